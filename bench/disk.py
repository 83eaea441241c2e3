"""What the benchmarks of the warm tier stand on: a folder on a real disk, bare reads and writes there, rounds in turn.

A bare reader or writer moves the same pieces at the same depth as the tier, past the page cache, and knows nothing of
what they are.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.compare.figures import gb_per_s, paired
from bench.report import Row
from kvstore.tiers.device import Device, Disk, aligned

OWN, RAW = "own", "bare disk"
BLOCK_BYTES = 4096
LEAST_ROUNDS = 3

Act = Callable[[], float]


@contextmanager
def folder_on_disk(name: str) -> Iterator[Path]:
    """Makes a folder in the working directory, which is on a disk more often than /tmp; it is removed at the end."""
    with TemporaryDirectory(prefix=f".bench-{name}-", dir=Path.cwd()) as folder:
        yield Path(folder)


def in_turn(acts: Mapping[str, Act], *, rounds: int, seconds: float, warm_up: int = 1) -> dict[str, list[float]]:
    """Plays rounds of each, another one first each time, until there are enough or the time is over.

    An act returns the seconds that it took. Rounds of the same index are neighbours.
    """
    for act in acts.values():
        for _ in range(warm_up):
            act()
    times: dict[str, list[float]] = {name: [] for name in acts}
    names, end = list(acts), time.perf_counter() + seconds
    for i in range(rounds):
        if i >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        at = i % len(names)
        for name in [*names[at:], *names[:at]]:
            times[name].append(acts[name]())
    return times


def share_row(name: str, times: Mapping[str, Sequence[float]], size_bytes: int, *, at_least: float) -> Row:
    """The rate of one's own rounds, of so many bytes each, beside that of the bare disk."""
    rate, ceiling = (gb_per_s(size_bytes, times[who]) for who in (OWN, RAW))
    return Row(name, rate, "GB/s", ceiling, RAW, at_least=at_least, paired=paired(times[OWN], times[RAW]))


class RawFile:
    """A file past the page cache. Owns the descriptor until `close`. Raises OSError, also without O_DIRECT."""

    def __init__(self, path: Path, size_bytes: int = 0) -> None:
        """Opens what is there; with a size it is made, and its room taken."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        try:
            self._fd = os.open(path, flags | os.O_CREAT | os.O_EXCL if size_bytes else flags, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise OSError(errno.EINVAL, "this file system has no O_DIRECT: run this on another", str(path)) from None
        if size_bytes:
            os.posix_fallocate(self._fd, 0, size_bytes)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        _all_of(os.pwritev(self._fd, pieces, offset), pieces)

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        _all_of(os.preadv(self._fd, pieces, offset), pieces)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Read(NamedTuple):
    """One bare read: pieces that lie one after another."""

    file: RawFile
    offset: int
    pieces: Sequence[memoryview]


class RawReader:
    """Threads that read. Owns them, and the files that it opened, until the block is left."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "bench-read")
        self._files: dict[Path, RawFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> RawReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._stack.close()

    def file(self, path: Path) -> RawFile:
        """Opens a file once."""
        if path not in self._files:
            self._files[path] = RawFile(path)
            self._stack.callback(self._files[path].close)
        return self._files[path]

    def read_s(self, reads: Iterable[Read]) -> float:
        """Seconds that all of them take, as many at once as there are threads."""
        start = time.perf_counter()
        list(self._pool.map(lambda one: one.file.read(one.offset, one.pieces), reads))
        return time.perf_counter() - start


class RawWriter:
    """One thread that writes segments without a store: header, large pieces, table, footer, and the syncs."""

    def __init__(self, files: Sequence[RawFile], size_bytes: int, *, table_blocks: int) -> None:
        self._files, self._size_bytes = files, size_bytes
        self._block, self._table = aligned(BLOCK_BYTES), aligned(table_blocks * BLOCK_BYTES)
        self._next = 0

    def write_s(self, segments: Iterable[Sequence[Sequence[memoryview]]]) -> float:
        """Seconds that it takes to write segments, each given as the pieces of its writes."""
        start = time.perf_counter()
        for writes in segments:
            self._write(writes)
        return time.perf_counter() - start

    def _write(self, writes: Sequence[Sequence[memoryview]]) -> None:
        file = self._files[self._next % len(self._files)]
        self._next += 1
        file.write(0, [self._block])
        file.sync()
        offset = BLOCK_BYTES
        for pieces in writes:
            file.write(offset, pieces)
            offset += sum(map(len, pieces))
        file.write(self._size_bytes - BLOCK_BYTES - len(self._table), [self._table])
        file.sync()
        file.write(self._size_bytes - BLOCK_BYTES, [self._block])
        file.sync()


class CountingDisk:
    """Another disk, whose written bytes are counted."""

    def __init__(self, inner: Disk) -> None:
        self._inner = inner
        self.written_bytes = 0

    def names(self) -> list[str]:
        return self._inner.names()

    def open(self, name: str) -> CountingDevice:
        return CountingDevice(self, self._inner.open(name))

    def create(self, name: str, size_bytes: int) -> CountingDevice:
        return CountingDevice(self, self._inner.create(name, size_bytes))

    def remove(self, name: str) -> None:
        self._inner.remove(name)

    def free_bytes(self) -> int:
        return self._inner.free_bytes()


class CountingDevice:
    def __init__(self, disk: CountingDisk, inner: Device) -> None:
        self._disk, self._inner = disk, inner
        self.size_bytes = inner.size_bytes

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._inner.read(offset, pieces)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._disk.written_bytes += sum(map(len, pieces))
        self._inner.write(offset, pieces)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def process_written_bytes() -> int:
    """Bytes that this process has sent to disks, by way of the page cache or past it."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise LookupError("write_bytes")


def _all_of(moved: int, pieces: Sequence[memoryview]) -> None:
    if moved != sum(map(len, pieces)):
        raise OSError(errno.EIO, f"{moved} bytes of {sum(map(len, pieces))} were moved")
