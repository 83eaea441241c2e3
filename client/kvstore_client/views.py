"""Leased blocks looked at in place, in the shard's own memory, without a copy.

Rules: the bytes are the blocks' for as long as the lease is held, and may be anyone's afterwards. So what was computed
from them counts only if `close` answers True; if it answers False the read is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore_client.errors import MalformedAnswer
from kvstore_client.grants import Grants
from kvstore_client.mapping import ArenaMapping
from kvstore_client.results import leading
from kvstore_wire.errors import InvalidArgument, LeaseExpired
from kvstore_wire.states import BlockState

HOT = bytes((BlockState.HOT,))


class LifeOfLease(Protocol):
    """Tells whether a lease has ended."""

    @property
    def ended(self) -> bool: ...


class Memory(Protocol):
    """Where the bytes are: the shard's own memory, or a copy."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def array(self) -> npt.NDArray[np.uint8]: ...

    def view(self, offset: int, length: int) -> memoryview: ...


class BlockViews:
    """Read-only views of the parts under one lease, in key then part order. Leave its `with` block to end the lease.

    `states[i]` is HOT where block i of the question is leased; only leased blocks have parts here.
    `release` ends the lease and answers whether it was valid to that moment; it is called at most once, with the
    indexes of parts whose bytes did not match, and not at all where the lease has ended by itself.
    Owns: the lease. Views are valid until `close`, or until the lease ends by itself; those handed out are released
    then and raise ValueError. What was made from them - arrays, slices, views that other code holds on to - cannot be
    taken back: it stays readable and may show other blocks' bytes, which is why the answer of `close` is what counts.
    Raises: MalformedAnswer where the grants fit neither the states nor the mapping. Looking at bytes raises
    LeaseExpired once the lease has ended. All methods may be called from any thread.
    """

    def __init__(
        self,
        mapping: Memory,
        *,
        states: bytes,
        grants: Grants,
        parts_per_block: int,
        life: LifeOfLease,
        release: Callable[[Sequence[int]], bool],
    ) -> None:
        _check(mapping, states, grants, parts_per_block)
        self.states, self.parts_per_block = states, parts_per_block
        self._mapping, self._life, self._release = mapping, life, release
        self._checksums: list[int] = grants.checksums.tolist()
        self._offsets: list[int] = grants.offsets.tolist()
        self._lengths: list[int] = grants.lengths.tolist()
        self._views: list[memoryview | None] = [None] * len(grants)
        self._corrupt: set[int] = set()
        self._lock = threading.Lock()  # Of the views; held for moments.
        self._closing = threading.Lock()  # Held while the lease is released.
        self._open = True
        self._valid: bool | None = None

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def prefix_blocks(self) -> int:
        """Leading blocks under lease."""
        return leading(self.states, HOT)

    @property
    def held(self) -> bool:
        """Whether the blocks are leased and, as far as is known, still are."""
        return self._open and not self._life.ended

    @property
    def in_place(self) -> bool:
        """Whether the bytes are looked at in the shard's own memory; else they are a copy."""
        return isinstance(self._mapping, ArenaMapping)

    @property
    def valid(self) -> bool | None:
        """What `close` answered, None before it."""
        return self._valid

    def __getitem__(self, part: int) -> memoryview:
        """Returns the bytes of a part, the same view each time. Raises IndexError, LeaseExpired."""
        part = self._index(part)
        with self._lock:
            self._check_held()
            view = self._views[part]
            if view is None:
                view = self._views[part] = self._mapping.view(self._offsets[part], self._lengths[part])
            return view

    def __iter__(self) -> Iterator[memoryview]:
        return (self[part] for part in range(len(self)))

    def block(self, block: int) -> tuple[memoryview, ...]:
        """Returns the parts of block `block` of the question; none where it is not leased. Raises as views[i]."""
        block = range(len(self.states))[block]
        if self.states[block] != BlockState.HOT:
            self._check_held_now()
            return ()
        first = self.states.count(HOT, 0, block) * self.parts_per_block
        return tuple(self[part] for part in range(first, first + self.parts_per_block))

    def array(
        self, part: int, dtype: npt.DTypeLike = np.uint8, shape: Sequence[int] | None = None
    ) -> npt.NDArray[np.generic]:
        """Returns the bytes of a part as an array, one-dimensional unless a shape is given. It cannot be taken back.

        Shapes: `shape` of `dtype`, read-only. Raises: as views[i]; InvalidArgument where the part's size does not fit.
        """
        part = self._index(part)
        with self._lock:
            self._check_held()
            bytes_ = self._mapping.array[self._offsets[part] :][: self._lengths[part]]
        return _shaped(bytes_, np.dtype(dtype), shape)

    def verify(self, parts: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns those of `parts` (None = all) that do not match their writer's checksum; `close` reports them."""
        found = []
        for part in range(len(self)) if parts is None else map(self._index, parts):
            with self._lock:
                self._check_held()
                view = self._mapping.view(self._offsets[part], self._lengths[part])
            matches = xxh3_64_intdigest(view) == self._checksums[part]
            with self._lock:
                self._check_held()  # Bytes that changed hands meanwhile are not damaged.
                if not matches:
                    self._corrupt.add(part)
                    found.append(part)
        return tuple(found)

    def close(self) -> bool:
        """Ends the lease and tells whether it was valid to this moment; if not, drop what was read. Idempotent."""
        with self._closing:
            if self._valid is None:
                self._valid = False  # Stays so if the release fails.
                with self._lock:
                    self._open = False
                    self._revoke()
                    corrupt = sorted(self._corrupt)
                self._valid = not self._life.ended and self._release(corrupt)
            return self._valid

    def __enter__(self) -> BlockViews:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _index(self, part: int) -> int:
        try:
            return range(len(self))[part]
        except IndexError:
            raise IndexError(f"part {part} of {len(self)}") from None

    def _check_held_now(self) -> None:
        with self._lock:
            self._check_held()

    def _check_held(self) -> None:
        """Raises LeaseExpired once the lease has ended. Call under the lock."""
        if not self._open:
            raise LeaseExpired("the views were closed, and their lease has ended")
        if self._life.ended:
            self._revoke()
            raise LeaseExpired("the lease has ended: drop what was read under it")

    def _revoke(self) -> None:
        for part, view in enumerate(self._views):
            if view is not None:
                with suppress(BufferError):  # Other code has a hold on it.
                    view.release()
                self._views[part] = None


def _check(mapping: Memory, states: bytes, grants: Grants, parts_per_block: int) -> None:
    if states.count(HOT) * parts_per_block != len(grants):
        raise MalformedAnswer(f"{len(grants)} parts for {states.count(HOT)} blocks of {parts_per_block}")
    size, offsets, lengths = np.uint64(mapping.size_bytes), grants.offsets, grants.lengths
    outside = (lengths > size) | (offsets > size - np.minimum(lengths, size))
    if outside.any():
        part = int(outside.argmax())
        where = f"{lengths[part]} bytes at {offsets[part]}"
        raise MalformedAnswer(f"part {part}: {where} are outside of an arena of {mapping.size_bytes} bytes")


def _shaped(
    flat: npt.NDArray[np.uint8], dtype: np.dtype[np.generic], shape: Sequence[int] | None
) -> npt.NDArray[np.generic]:
    if dtype.hasobject:
        raise InvalidArgument(f"{dtype} holds Python objects, not bytes", field="dtype")
    try:
        array = flat.view(dtype)
    except ValueError:
        limit = f"a size that divides {flat.nbytes} bytes"
        raise InvalidArgument(f"{dtype} does not fit", field="dtype", limit=limit) from None
    try:
        return array if shape is None else array.reshape(tuple(shape))
    except ValueError:
        limit = f"{array.size} of {dtype}"
        raise InvalidArgument(f"{tuple(shape or ())} does not fit", field="shape", limit=limit) from None
