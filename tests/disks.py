"""Disks without a disk: one in memory that forgets what was not synced, and one that fails as told."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.tiers.device import Device, Disk
from kvstore.tiers.segment import BLOCK_BYTES


class Crashed(BaseException):
    """The process was killed here. No handler of the code under test may see it as an error of the disk."""


class MemoryDisk:
    """A disk in memory. `room_bytes` bounds all devices together.

    What was written is there for readers at once and durable with `sync`; a crash keeps, of each block that was
    written since, the old content or the new one. Creating and removing are durable at once.
    `before(what, name)` is called at the start of every operation and may raise.
    """

    def __init__(self, room_bytes: int = 1 << 40) -> None:
        self.room_bytes = room_bytes
        self.files: dict[str, MemoryDevice] = {}
        self.before: Callable[[str, str], None] = lambda what, name: None

    def names(self) -> list[str]:
        return sorted(self.files)

    def open(self, name: str) -> MemoryDevice:
        self.before("open", name)
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such device", name)
        return self.files[name]

    def create(self, name: str, size_bytes: int) -> MemoryDevice:
        self.before("create", name)
        if name in self.files:
            raise FileExistsError(errno.EEXIST, "it is there already", name)
        if size_bytes > self.free_bytes():
            raise OSError(errno.ENOSPC, "no room", name)
        made = self.files[name] = MemoryDevice(self, name, size_bytes)
        return made

    def remove(self, name: str) -> None:
        self.before("remove", name)
        self.files.pop(name, None)

    def free_bytes(self) -> int:
        return self.room_bytes - sum(file.size_bytes for file in self.files.values())

    def after_crash(self, rng: random.Random) -> MemoryDisk:
        """Returns what a disk holds after the power went now."""
        left = MemoryDisk(self.room_bytes)
        for name, file in self.files.items():
            device = left.files[name] = MemoryDevice(left, name, file.size_bytes)
            device.content[:] = device.durable[:] = file.durable
            for block in sorted(file.unsynced):
                if rng.random() < 0.5:
                    at = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
                    device.content[at] = device.durable[at] = file.content[at]
        return left


class MemoryDevice:
    """A device of a MemoryDisk. Never closed: closing gives back nothing here."""

    def __init__(self, disk: MemoryDisk, name: str, size_bytes: int) -> None:
        self._disk, self.name = disk, name
        self.content, self.durable = bytearray(size_bytes), bytearray(size_bytes)
        self.unsynced: set[int] = set()

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._disk.before("read", self.name)
        self._check(offset, pieces)
        for piece in pieces:
            if offset + len(piece) > self.size_bytes:
                raise OSError(errno.EIO, "it ends before")
            piece[:] = self.content[offset : offset + len(piece)]
            offset += len(piece)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._check(offset, pieces)
        for piece in pieces:
            self._disk.before("write", self.name)  # A crash may come in the middle.
            if offset + len(piece) > self.size_bytes:
                raise OSError(errno.EFBIG, "it would grow")
            self.content[offset : offset + len(piece)] = piece
            self.unsynced.update(range(offset // BLOCK_BYTES, (offset + len(piece)) // BLOCK_BYTES))
            offset += len(piece)

    def sync(self) -> None:
        self._disk.before("sync", self.name)
        for block in self.unsynced:
            at = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            self.durable[at] = self.content[at]
        self.unsynced.clear()

    def close(self) -> None:
        return

    @staticmethod
    def _check(offset: int, pieces: Sequence[memoryview]) -> None:
        """What O_DIRECT refuses is refused here too."""
        if offset % BLOCK_BYTES or any(len(piece) % BLOCK_BYTES for piece in pieces):
            raise OSError(errno.EINVAL, "not at a multiple of a block")


@dataclass
class Faults:
    """What goes wrong, and how often each operation was asked for. Changed by tests at any time."""

    read_error: int = 0  # An errno; 0 = none.
    write_error: int = 0
    sync_error: int = 0
    create_error: int = 0
    flips: int = 0  # So many of the next reads have a bit changed in each piece.
    delay_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    _thawed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thawed.set()

    def freeze(self) -> None:
        """Lets every operation wait, as on a disk that hangs."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def meet(self, what: str, error: int, size_bytes: int = 0) -> None:
        self.calls[what] += 1
        self._thawed.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        if error:
            raise OSError(error, f"a {what} that was to fail")
        self.moved_bytes[what] += size_bytes


class FaultyDisk:
    """Another disk, with faults."""

    def __init__(self, inner: Disk, faults: Faults | None = None) -> None:
        self.inner, self.faults = inner, faults or Faults()

    def names(self) -> list[str]:
        return self.inner.names()

    def open(self, name: str) -> FaultyDevice:
        self.faults.meet("open", 0)
        return FaultyDevice(self.inner.open(name), self.faults)

    def create(self, name: str, size_bytes: int) -> FaultyDevice:
        self.faults.meet("create", self.faults.create_error)
        return FaultyDevice(self.inner.create(name, size_bytes), self.faults)

    def remove(self, name: str) -> None:
        self.faults.meet("remove", 0)
        self.inner.remove(name)

    def free_bytes(self) -> int:
        return 0 if self.faults.create_error == errno.ENOSPC else self.inner.free_bytes()


class FaultyDevice:
    def __init__(self, inner: Device, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        faults = self._faults
        faults.meet("read", faults.read_error, sum(map(len, pieces)))
        self._inner.read(offset, pieces)
        if faults.flips:
            faults.flips -= 1
            for piece in pieces:
                piece[len(piece) // 2] ^= 1

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._faults.meet("write", self._faults.write_error, sum(map(len, pieces)))
        self._inner.write(offset, pieces)

    def sync(self) -> None:
        self._faults.meet("sync", self._faults.sync_error)
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()
