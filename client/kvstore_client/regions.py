"""Shared memory of the caller's own that shards of this host copy from and to.

A caller registers a memfd or a file of /dev/shm once. From then on every buffer that lies in it - given as memoryview,
numpy array or whatever - is named to the shard by its place, and no byte of it passes through a socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore_client.buffers import Slices
from kvstore_client.errand import Shared
from kvstore_client.mapping import F_SEAL_SHRINK
from kvstore_client.paths import Path
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import types_pb2 as types

F_ADD_SEALS, F_SEAL_GROW = 1033, 4  # As in mapping.py: not everywhere in Python's fcntl.


@dataclass(frozen=True)
class Registration:
    """What a region is called at a shard, and the way to it."""

    path: Path
    session: bytes
    number: int


class Region:
    """Registered memory. `memory` is its mapping here: slices of it are what calls take.

    Owns: a duplicate of the descriptor, and the mapping unless the caller gave one. Close it when no call uses it.
    """

    def __init__(self, fd: int, *, offset: int, length: int, buffer: Any | None) -> None:
        self.offset, self.length = offset, length
        self.fd = os.dup(fd)
        self._map: mmap.mmap | None = None
        try:
            self.memory = self._mapped() if buffer is None else _whole(buffer, length)
        except BaseException:
            os.close(self.fd)
            raise
        self.start = _address(self.memory)
        self.registration: Registration | None = None  # The last one; those of earlier sessions ended with them.
        self.registering: Shared[None] = Shared()
        self.refused: set[bytes] = set()  # Sessions that may not register it.
        self.lock = threading.Lock()  # While it is registered or given back: held for as long as the shard takes.
        self._closing = threading.Lock()
        self.closed = False

    def number(self, session: bytes) -> int | None:
        """Returns its number in a session; None where it is not registered there."""
        known = self.registration
        return known.number if known is not None and known.session == session else None

    def close(self) -> None:
        """Ends the region here; shards forget it with the session, or when they are next told. Idempotent."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            os.close(self.fd)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """A descriptor that stays open whatever happens to the region. Raises OSError; InvalidArgument if closed."""
        with self._closing:
            if self.closed:
                raise InvalidArgument("was closed", field="region")
            fd = os.dup(self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _mapped(self) -> memoryview:
        grain = mmap.ALLOCATIONGRANULARITY
        before = self.offset % grain
        self._map = mmap.mmap(self.fd, self.length + before, offset=self.offset - before)
        return memoryview(self._map)[before : before + self.length]


class RegionBook:
    """The regions of one client. Thread-safe."""

    def __init__(self) -> None:
        self._regions: tuple[Region, ...] = ()
        self._lock = threading.Lock()

    def add(self, fd: int, *, offset: int, length: int | None, buffer: Any | None) -> Region:
        """Adds memory. Raises InvalidArgument (fd, offset, length, buffer)."""
        try:
            size = os.fstat(fd).st_size
        except OSError as error:
            raise InvalidArgument(f"is not open: {error.strerror}", field="fd") from None
        length = size - offset if length is None else length
        if offset < 0 or length < 1 or offset + length > size:
            raise InvalidArgument(
                f"{length} bytes from byte {offset}", field="length", limit=f"the file's {size} bytes"
            )
        try:
            region = Region(fd, offset=offset, length=length, buffer=buffer)
        except OSError as error:
            raise InvalidArgument(f"cannot be mapped: {error.strerror}", field="fd") from None
        with self._lock:
            self._regions = (*self._regions, region)
        return region

    def allocate(self, length: int) -> Region:
        """Adds fresh memory that can never become shorter, so that a shard may map it. Raises InvalidArgument (length).

        It is zero, and taken from the kernel page by page as it is first used.
        """
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise InvalidArgument(f"is {length!r}", field="length", limit="at least 1 byte")
        try:
            fd = os.memfd_create("kvstore-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise InvalidArgument(f"{length} bytes cannot be had: {error.strerror}", field="length") from None
        try:
            os.ftruncate(fd, length)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            return self.add(fd, offset=0, length=length, buffer=None)
        except (OSError, OverflowError, InvalidArgument) as error:
            raise InvalidArgument(f"{length} bytes cannot be had: {error}", field="length") from None
        finally:
            os.close(fd)

    def remove(self, region: Region) -> None:
        """Takes a region out and closes it."""
        with self._lock:
            self._regions = tuple(r for r in self._regions if r is not region)
        region.close()

    def close(self) -> None:
        for region in self._regions:
            self.remove(region)

    def may_hold(self, parts: Sequence[Slices]) -> bool:
        """Whether the first slice lies in a region, and so perhaps all of them do; a quick look."""
        first = next((view for slices in parts for view in slices if len(view)), None)
        if first is None or not self._regions:
            return False
        at = _address(first)
        return any(region.start <= at < region.start + region.length for region in self._regions)

    def find(self, parts: Sequence[Slices]) -> tuple[Region, types.RegionSlices] | None:
        """Returns the region that holds all slices of all parts, and their places in it; None if there is none."""
        if not self._regions or not parts:
            return None
        starts = [_address(view) if len(view) else 0 for slices in parts for view in slices]
        lengths = [len(view) for slices in parts for view in slices]
        for region in self._regions:
            offsets = [start - region.start if size else 0 for start, size in zip(starts, lengths, strict=True)]
            if all(at >= 0 and at + size <= region.length for at, size in zip(offsets, lengths, strict=True)):
                counts = [] if all(len(s) == 1 for s in parts) else [len(slices) for slices in parts]
                return region, types.RegionSlices(offsets=offsets, lengths=lengths, counts=counts)
        return None


def _whole(buffer: Any, length: int) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes != length:
        raise InvalidArgument(f"has {view.nbytes} bytes", field="buffer", limit=f"{length}, contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
