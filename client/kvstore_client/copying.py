"""Copies parts out of the arena into callers' slices and hashes parts, with more threads where that is faster.

Rules:
- A part is one unit of work, the largest first; threads take parts from one shared list. A single part, a batch of less
  than `SPREAD_COPY_BYTES` (`SPREAD_HASH_BYTES`), and one of parts smaller than `SPREAD_PART_BYTES` in the mean stay on
  the caller's thread; so does everything while the mover holds the interpreter lock.
- What is hashed is what landed, not its source.
- Everything is checked before a byte moves; nothing writes to the targets once a call has returned or raised.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from kvstore_client.buffers import Slices, size_of
from kvstore_client.crew import Crew
from kvstore_client.errors import MalformedAnswer
from kvstore_client.moving import Mover
from kvstore_client.options import Verify
from kvstore_wire.errors import InvalidArgument

KIB, MIB = 1 << 10, 1 << 20
DEFAULT_THREADS, MAX_THREADS = 4, 64
# Copied, then hashed. Measured on EPYC (Zen 4), copy and hash of 2 MiB parts in pieces of 256 KiB: 5.7 GB/s, of 1 or
# 2 MiB: 8.5 GB/s, as glibc's `rep movsb` reads the destination's lines first where a copy is smaller than a core's L2.
# Large pieces also give up the interpreter lock less often.
CHUNK_BYTES = 2 * MIB
# From where two threads were faster than one there: 8 MiB, 10.8 instead of 9.2 GB/s; 32 MiB, 11.1 instead of 7.9.
# Smaller batches lose to waking a thread, smaller parts to passing the interpreter lock; one thread hashes at 27 GB/s.
SPREAD_COPY_BYTES, SPREAD_HASH_BYTES = 8 * MIB, 32 * MIB
SPREAD_PART_BYTES = 128 * KIB

Numbers: TypeAlias = "Sequence[int] | npt.NDArray[np.uint64]"


class Copier:
    """Copies and hashes for one client, for any number of calling threads at once.

    `threads`: most threads of one call, the caller's own included; None = the CPUs of this process, at most 4.
    Owns: the helper threads, from the first large batch to `close`. A forked child starts its own.
    Raises: InvalidArgument for a number of threads outside of 1-64.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = _checked_threads(threads)
        self._crew = Crew(self.threads - 1)
        self._mover = Mover()

    def copy_out(
        self,
        array: npt.NDArray[np.uint8],
        *,
        offsets: Numbers,
        lengths: Numbers,
        checksums: Numbers,
        targets: Sequence[Slices | None],
        verify: Verify,
    ) -> list[int]:
        """Copies each part to its target and returns the indexes, ascending, of parts that do not match their checksum.

        Shapes: `array` (arena bytes,) uint8, C-contiguous. Units: bytes; `checksums` xxh3-64.
        A target may be larger than its part: the bytes behind it stay as they are. A part whose target is None is
        passed over and never reported. With VERIFY_OFF nothing is reported.
        Raises: MalformedAnswer for a part outside of the arena, InvalidArgument for a target that is too small, both
        before a byte moves. What else goes wrong leaves the content of the targets undefined.
        """
        starts, sizes, sums = _ints(offsets), _ints(lengths), _ints(checksums)
        _check(starts, sizes, sums, targets, arena_bytes=len(array))
        source = array.data
        corrupt: list[int] = []

        def copy(part: int) -> None:
            target = targets[part]
            assert target is not None
            data = source[starts[part] : starts[part] + sizes[part]]
            if verify is Verify.OFF:
                self._copy(target, data)
            elif self._copy_hashed(target, data) != sums[part]:
                corrupt.append(part)

        wanted = [part for part, target in enumerate(targets) if target is not None]
        self._spread(copy, wanted, sizes, from_bytes=SPREAD_COPY_BYTES)
        return sorted(corrupt)

    def hash_parts(self, values: Sequence[Slices]) -> list[int]:
        """Returns the xxh3-64 of each part, over its slices in order."""
        sums = [0] * len(values)

        def hash_one(part: int) -> None:
            sums[part] = self._hash(values[part])

        sizes = [size_of(slices) for slices in values]
        self._spread(hash_one, range(len(values)), sizes, from_bytes=SPREAD_HASH_BYTES)
        return sums

    def hash_alone(self, values: Sequence[Slices]) -> list[int]:
        """As `hash_parts`, on the caller's thread: for callers that leave the other cores to somebody else's work."""
        return [self._hash(slices) for slices in values]

    def close(self) -> None:
        """Ends the helper threads and waits for them; calls go on alone from then on. Idempotent."""
        self._crew.close()

    def _copy(self, target: Slices, data: memoryview) -> None:
        for landed, at in _pieces(target, len(data)):
            self._mover.copy(landed, data[at : at + len(landed)])

    def _copy_hashed(self, target: Slices, data: memoryview) -> int:
        """Copies `data` and returns the hash of what landed."""
        if len(target) == 1 and len(data) <= CHUNK_BYTES:
            landed = target[0][: len(data)]
            self._mover.copy(landed, data)
            return self._mover.hash(landed)
        digest = xxh3_64()
        for landed, at in _pieces(target, len(data)):
            self._mover.copy(landed, data[at : at + len(landed)])
            self._mover.update(digest, landed)
        return digest.intdigest()

    def _hash(self, slices: Slices) -> int:
        size_bytes = size_of(slices)
        if len(slices) == 1 and size_bytes <= CHUNK_BYTES:
            return self._mover.hash(slices[0])
        digest = xxh3_64()
        for view, _ in _pieces(slices, size_bytes):
            self._mover.update(digest, view)
        return digest.intdigest()

    def _spread(
        self, work: Callable[[int], None], parts: Sequence[int], sizes: Sequence[int], *, from_bytes: int
    ) -> None:
        size_bytes = sum(map(sizes.__getitem__, parts))
        is_large = len(parts) > 1 and size_bytes >= max(from_bytes, len(parts) * SPREAD_PART_BYTES)
        if is_large and self.threads > 1 and not self._mover.holds:
            self._crew.run(work, sorted(parts, key=sizes.__getitem__, reverse=True))
        else:
            for part in parts:
                work(part)


def _checked_threads(threads: int | None) -> int:
    if threads is None:
        return min(DEFAULT_THREADS, len(os.sched_getaffinity(0)))
    if not 1 <= threads <= MAX_THREADS:
        raise InvalidArgument(f"is {threads}", field="threads", limit=f"1-{MAX_THREADS}")
    return threads


def _ints(numbers: Numbers) -> list[int]:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)


def _check(
    starts: list[int], sizes: list[int], sums: list[int], targets: Sequence[Slices | None], *, arena_bytes: int
) -> None:
    if not len(starts) == len(sizes) == len(sums):
        raise MalformedAnswer(f"{len(starts)} offsets, {len(sizes)} lengths and {len(sums)} checksums")
    if len(targets) != len(starts):
        raise InvalidArgument(f"has {len(targets)} entries", field="into", limit=f"{len(starts)}, one for each part")
    for part, (start, size, target) in enumerate(zip(starts, sizes, targets, strict=True)):
        if start < 0 or size < 0 or start + size > arena_bytes:
            raise MalformedAnswer(
                f"part {part}: {size} bytes at {start} are outside of an arena of {arena_bytes} bytes"
            )
        if target is not None and size_of(target) < size:
            limit = f"at least {size} bytes"
            raise InvalidArgument(f"has {size_of(target)} bytes", field=f"into[{part}]", limit=limit)


def _pieces(target: Slices, size_bytes: int) -> Iterator[tuple[memoryview, int]]:
    """Yields the target's first `size_bytes` in pieces of at most a chunk, each with its offset in the part."""
    at = 0
    for view in target:
        end = min(len(view), size_bytes - at)
        for start in range(0, end, CHUNK_BYTES):
            yield view[start : min(start + CHUNK_BYTES, end)], at + start
        at += end
