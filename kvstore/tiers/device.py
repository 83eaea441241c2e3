"""Where segments lie: a port of two small interfaces, and files written and read past the page cache.

Rules
- Offsets, lengths and addresses of buffers are multiples of `segment.BLOCK_BYTES`.
- A call moves everything or raises OSError. What a failed write left behind is undefined, in its range only.
- What was written is durable when `sync` has returned, not before.
- Every call blocks; all of them run without the interpreter lock, and several threads may use one device at a time.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvstore.tiers.segment import BLOCK_BYTES

_LOG = logging.getLogger("kvstore.disk")
_MOST_PIECES = 1024  # IOV_MAX of Linux.
_NEW = ".new-"
_LOCK = "LOCK"


class Device(Protocol):
    """The bytes of one segment."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Fills the pieces, in their order, with what lies from `offset` on. Raises OSError (EIO: it ends there)."""

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Writes the pieces, in their order, from `offset` on. Raises OSError."""

    def sync(self) -> None:
        """Waits until all that was written is durable. Raises OSError."""

    def close(self) -> None:
        """Gives the device back. Idempotent."""


class Disk(Protocol):
    """A set of named devices, and the room they are in."""

    def names(self) -> list[str]:
        """Returns what is there, sorted. Raises OSError."""

    def open(self, name: str) -> Device:
        """Raises OSError."""

    def create(self, name: str, size_bytes: int) -> Device:
        """Makes a device whose room is taken at once. Raises OSError (ENOSPC, EEXIST); then nothing of it is left."""

    def remove(self, name: str) -> None:
        """Takes a device away; one that has gone is no error. Raises OSError."""

    def free_bytes(self) -> int:
        """Returns the room that is left. Raises OSError."""


class FolderInUse(OSError):
    """Another process has the folder."""


class Folder:
    """A folder of a file system, which this process alone may use until `close`.

    Raises FolderInUse, and OSError where it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise FolderInUse(errno.EBUSY, "another process uses the folder", str(path)) from None
            raise
        self._remove_unfinished()

    def names(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.path) if entry.name != _LOCK)

    def open(self, name: str) -> DirectFile:
        return DirectFile(self.path / name)

    def create(self, name: str, size_bytes: int) -> DirectFile:
        path, new = self.path / name, self.path / f"{_NEW}{name}"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, size_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.link(new, path)  # Unlike a rename, it never takes the place of what is there.
        finally:
            with suppress(OSError):
                os.unlink(new)
        sync_names(self.path)
        return DirectFile(path)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path / name)
        sync_names(self.path)

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Lets other processes have the folder. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _remove_unfinished(self) -> None:
        for name in self.names():
            if name.startswith(_NEW):
                _LOG.info("removing %s, which was never finished", self.path / name)
                self.remove(name)


class DirectFile:
    """A file opened with O_DIRECT; where the file system does not know it, one whose pages are dropped after use."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self.is_direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd, self.is_direct = os.open(path, flags), False
        self.size_bytes = os.fstat(self._fd).st_size

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        size = self._move(os.preadv, offset, pieces)
        self._drop_pages(offset, size)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, pieces))
        if end > self.size_bytes:  # It would grow beyond the room that was taken for it.
            raise OSError(errno.EFBIG, f"a write to {end} in a device of {self.size_bytes} bytes")
        self._move(os.pwritev, offset, pieces)

    def sync(self) -> None:
        os.fdatasync(self._fd)
        self._drop_pages(0, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _move(
        self, move: Callable[[int, Sequence[memoryview], int], int], offset: int, pieces: Sequence[memoryview]
    ) -> int:
        """Calls until all pieces were moved; returns their bytes."""
        left, at = list(pieces), offset
        while left:
            moved = move(self._fd, left[:_MOST_PIECES], at)
            if moved <= 0:
                raise OSError(errno.EIO, f"nothing could be moved at {at}")
            at += moved
            left = _after(left, moved)
        return at - offset

    def _drop_pages(self, offset: int, size: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)


def sync_names(folder: Path) -> None:
    """Makes the names in a folder durable: what was made, renamed or removed there. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def aligned(size_bytes: int) -> memoryview:
    """Returns zeroed memory that devices take, of at least so many bytes rounded up to a block."""
    return memoryview(mmap.mmap(-1, max(BLOCK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)))


def read_bytes(device: Device, offset: int, size_bytes: int) -> memoryview:
    """Reads into new memory. Raises OSError."""
    memory = aligned(size_bytes)
    device.read(offset, [memory])
    return memory[:size_bytes]


def write_bytes(device: Device, offset: int, raw: bytes) -> None:
    """Writes whole blocks that lie anywhere in memory. Raises OSError."""
    memory = aligned(len(raw))
    memory[: len(raw)] = raw
    device.write(offset, [memory])


def _after(pieces: list[memoryview], moved: int) -> list[memoryview]:
    """Returns what is left of pieces after their first `moved` bytes."""
    for i, piece in enumerate(pieces):
        if moved < len(piece):
            return [piece[moved:], *pieces[i + 1 :]]
        moved -= len(piece)
    return []
