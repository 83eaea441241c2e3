"""Reads blocks of the warm tier into memory that is given, neighbours in one piece, and checks what landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xxhash import xxh3_64

from kvstore.tiers.device import Device
from kvstore.tiers.sealing import SegmentKey, about_part
from kvstore.tiers.segment import BLOCK_BYTES, blocks_of

MOST_RUN_BYTES = 8 << 20  # In one system call: as fast as more, and others pass in between.


class PartIn(NamedTuple):
    """One part on its way from disk: where it lies, and the memory it is to land in, `blocks_of(length)` blocks.

    `block` tells parts of one block by the same number. A part that is sealed has a `tag`, and says whose it is.
    """

    block: int
    offset: int
    length: int
    checksum: int
    piece: memoryview
    part: int = 0
    tag: bytes = b""
    digest: bytes = b""
    key: bytes = b""

    @property
    def end(self) -> int:
        return self.offset + blocks_of(self.length) * BLOCK_BYTES


class Run(NamedTuple):
    """Parts that lie one after another in one segment."""

    offset: int
    parts: list[PartIn]


def runs_of(parts: Iterable[PartIn]) -> Iterator[Run]:
    """Puts parts of one segment together where one begins as another ends; each run is at most `MOST_RUN_BYTES` long,
    or one part."""
    found: list[PartIn] = []
    for part in sorted(parts, key=lambda p: p.offset):
        if found and (part.offset != found[-1].end or part.end - found[0].offset > MOST_RUN_BYTES):
            yield Run(found[0].offset, found)
            found = []
        found.append(part)
    if found:
        yield Run(found[0].offset, found)


def read_run(device: Device, run: Run) -> None:
    """Reads a run; `mismatched` tells what of it came as it was written. Blocks. Raises OSError."""
    pieces = [part.piece for part in run.parts if len(part.piece)]
    if pieces:
        device.read(run.offset, pieces)


def mismatched(parts: Iterable[PartIn], key: SegmentKey | None = None) -> list[PartIn]:
    """Opens parts that are sealed, where they lie, and returns those that do not have the bytes that were written.

    `key`: of the segment's life, where it is sealed.
    """
    return [part for part in parts if not (_open(part, key) and _is_whole(part))]


def _open(part: PartIn, key: SegmentKey | None) -> bool:
    """Whether a part is sealed just where its segment is, and its tag is right."""
    if key is None:
        return not part.tag
    about = about_part(part.digest, part.key, part.part, part.length)
    return key.open(part.piece[: part.length], part.tag, about, offset=part.offset)


def _is_whole(part: PartIn) -> bool:
    digest = xxh3_64()
    digest.update(part.piece[: part.length])  # Without the interpreter lock, where it is long.
    return digest.intdigest() == part.checksum
