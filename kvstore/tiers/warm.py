"""The warm tier: blocks on disk, written as they leave memory and read back on demand.

Rules
- One thread writes: payload, tables, the index, deletions, in the order they were asked for. Several threads read.
- What was written can be read at once; it outlives the process once its segment is sealed.
- One segment is always free or being written, so that the live blocks of one that is given up have a place to go.
- A fault of the disk is never a fault of a caller: writes are refused, reads are misses, and both are counted. Whoever
  uses the tier sees `fault` and calls `heal` until it is gone.
- Futures are resolved in the tier's threads. Memory that was handed in is not touched once its future is resolved.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.segments import Segment, SegmentBook
from kvstore.tiers.device import Device, Disk, aligned
from kvstore.tiers.index import Index, IndexBroken, Located, NamespaceAt, PartAt, SegmentAt
from kvstore.tiers.reader import PartIn, mismatched, read_run, runs_of
from kvstore.tiers.recovery import blocks_in, name_of
from kvstore.tiers.segment import BLOCK_BYTES, BadSegment, Described, Header, Layout, blocks_of
from kvstore.tiers.tombstones import Tombstone, Tombstones
from kvstore.tiers.writer import BlockOut, SegmentWriter

_LOG = logging.getLogger("kvstore.warm")
BATCH_BYTES = 8 << 20  # Written in one piece.
_FAULTS = (OSError, IndexBroken, BadSegment)


class Clocks(NamedTuple):
    """Seconds of the monotonic clock, and of the wall clock."""

    now: Callable[[], float]
    wall: Callable[[], float]


@dataclass(frozen=True)
class WarmSettings:
    """`queue_bytes`: that may wait to be written. `is_hot(digest, key)`: whether a block is in memory too."""

    queue_bytes: int = 256 << 20
    readers: int = 4
    is_hot: Callable[[bytes, bytes], bool] = lambda digest, key: False


class Wanted(NamedTuple):
    """A block to be read: where it lies, and for each of its parts the memory that it lands in, as in `PartIn`."""

    digest: bytes
    key: bytes
    located: Located
    pieces: Sequence[memoryview]


class WarmTier:
    """Owns its threads, the index, the log of deletions and the open devices, from construction to `close`."""

    def __init__(
        self,
        disk: Disk,
        book: SegmentBook,
        index: Index,
        tombstones: Tombstones,
        *,
        namespaces: dict[bytes, NamespaceAt],
        store_id: bytes,
        clocks: Clocks,
        settings: WarmSettings | None = None,
    ) -> None:
        self._disk, self._book, self._index, self._tombstones = disk, book, index, tombstones
        self._store_id = store_id
        self.settings, self._clocks = settings or WarmSettings(), clocks
        self._lock = threading.Condition()
        self._namespaces = namespaces
        self._pending: dict[tuple[bytes, bytes], Located] = {}  # Written, and not in the index yet.
        self._queue: deque[_Block | _Errand] = deque()  # In the order they were asked for.
        self._queued_bytes = 0
        self._closing = False
        self.fault: Exception | None = None
        self.counts: Counter[str] = Counter()
        self._devices: dict[tuple[int, int], _Open] = {}
        self._open: tuple[Segment, SegmentWriter] | None = None
        self._readers = ThreadPoolExecutor(self.settings.readers, "kvstore-warm-read")
        self._writer = threading.Thread(target=self._write_all, name="kvstore-warm-write", daemon=True)
        self._writer.start()

    # -- looking up ----------------------------------------------------------------------------------------------

    def find(self, digest: bytes, keys: Sequence[bytes]) -> list[Located | None]:
        """Returns where blocks lie, None for those that are not here, or cannot be looked up."""
        with self._lock:
            namespace = self._namespaces.get(digest)
            found: list[Located | None] = [self._pending.get((digest, key)) for key in keys]
        missing = [i for i, located in enumerate(found) if located is None]
        if namespace is not None and missing:
            try:
                stored = self._index.find(namespace.id, [keys[i] for i in missing])
            except IndexBroken as error:
                self._failed(error)
                stored = [None] * len(missing)
            for i, located in zip(missing, stored, strict=True):
                found[i] = located
        wall = self._clocks.wall()
        with self._lock:
            return [self._usable(located, wall) for located in found]

    def touch(self, located: Located) -> None:
        """Notes that a block was used, here or in memory."""
        with self._lock:
            self._book.touch(*located.life, located.start, self._clocks.now())

    def _usable(self, located: Located | None, wall: float) -> Located | None:
        if located is None or self._book.get(*located.life) is None or 0 < located.expires <= wall:
            return None
        return located

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, block: BlockOut) -> Future[bool]:
        """Writes a block; tells whether it can be found now. False at once where the queue is full or the disk failed.

        Owns: the pieces until the future is resolved.
        """
        item = _Block(block, sum(map(len, block.pieces)))
        fits = Layout(self._book.rules.segment_bytes).fits(block.lengths, block.described)
        with self._lock:
            is_full = self._queued_bytes + item.size_bytes > self.settings.queue_bytes
            if self._closing or self.fault is not None or is_full or not fits:
                self.counts["refused_blocks"] += 1
                item.future.set_result(False)
                return item.future
            self._queue.append(item)
            self._queued_bytes += item.size_bytes
            self._lock.notify_all()
        return item.future

    def delete(self, digest: bytes, keys: Sequence[bytes]) -> Future[None]:
        """Forgets blocks, those that wait to be written included; durable when the future is resolved.

        Fails with OSError or IndexBroken: then they are forgotten by this process, and may be back after a restart.
        """
        return self._errand(lambda: self._delete(digest, keys))

    def purge(self, digest: bytes) -> Future[None]:
        """Forgets all blocks of a namespace; as `delete`."""
        return self._errand(lambda: self._purge(digest))

    def flush(self) -> Future[None]:
        """Writes what waits, and seals the open segment, so that all of it outlives the process."""
        return self._errand(self._seal)

    def resize(self, capacity_bytes: int) -> Future[None]:
        """Changes the capacity; what is beyond it is given up when the future is resolved."""

        def resize() -> None:
            with self._lock:
                self._book.resize(capacity_bytes)
            self._shrink()

        return self._errand(resize)

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, wanted: Sequence[Wanted]) -> Future[list[bool]]:
        """Reads blocks; tells of each whether all of its parts have landed as they were written.

        Owns: the pieces until the future is resolved. A part that is damaged takes its block out of the tier.
        """
        return self._readers.submit(self._read, list(wanted))

    # -- health --------------------------------------------------------------------------------------------------

    def heal(self) -> Future[None]:
        """Tries the disk; writes are taken again if it works. Fails with what is still wrong."""

        def probe() -> None:
            self._close_open()
            with self._lock:
                self.fault = None
            self._begin()

        return self._errand(probe)

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Writes what waits, seals, and gives everything back; no longer than that where the disk hangs. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            _LOG.error("the disk hangs: what was not written is lost")
            return
        self._readers.shutdown(wait=True)
        for opened in self._devices.values():
            opened.device.close()
        self._devices.clear()
        self._index.close()
        self._tombstones.close()

    # -- the thread that writes ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not (self._queue or self._closing):
                    self._lock.wait()
                if not self._queue:
                    break
                batch = self._take_batch()
                errand = self._queue.popleft() if not batch else None
            if batch:
                self._write_batch(batch)
            elif isinstance(errand, _Errand):
                self._run(errand)
        with suppress(*_FAULTS):
            self._seal()
        self._close_open()

    def _take_batch(self) -> list[_Block]:
        """Takes leading blocks, up to an errand."""
        batch: list[_Block] = []
        size = 0
        while self._queue and isinstance(item := self._queue[0], _Block):
            size += item.size_bytes
            if batch and size > BATCH_BYTES:
                break
            self._queue.popleft()
            batch.append(item)
        return batch

    def _write_batch(self, batch: list[_Block]) -> None:
        left = [item.block for item in batch]
        written: set[int] = set()
        try:
            while left and self.fault is None:
                placed = self._place(left)
                written.update(map(id, left[:placed]))
                left = left[placed:]
        except _FAULTS as error:
            self._failed(error)
        with self._lock:
            self._queued_bytes -= sum(item.size_bytes for item in batch)
            self.counts["written_blocks"] += len(written)
            self.counts["failed_blocks"] += len(batch) - len(written)
        for item in batch:
            item.future.set_result(id(item.block) in written)

    def _place(self, blocks: list[BlockOut], *, touched: float | None = None) -> int:
        """Writes leading blocks to the open segment, begun where there is none; returns how many. A full one is sealed.

        `touched`: they were on disk before, and were last used then.
        """
        segment, writer = self._open or self._begin()
        placed = writer.write(blocks)
        now = self._clocks.now()
        with self._lock:
            for block, offsets in placed:
                rows = zip(block.parts, offsets, block.lengths, block.checksums, strict=True)
                parts = tuple(PartAt(*row) for row in rows)
                located = Located(block.created, block.expires, segment.number, segment.sequence, parts)
                self._replace(block.described.digest, block.key, located)
                again = touched is not None
                segment.add(located.start, located.size_bytes, now if touched is None else touched, used=again)
                self._book.wrote(located.size_bytes, again=again)
        if len(placed) < len(blocks):
            self._seal()
        return len(placed)

    def _replace(self, digest: bytes, key: bytes, located: Located) -> None:
        """Notes the new place of a block; the old one of this process is dropped from the book."""
        old = self._pending.get((digest, key))
        self._pending[digest, key] = located
        if old is not None:
            self._book.drop(*old.life, old.start)

    def _begin(self) -> tuple[Segment, SegmentWriter]:
        """Begins the next segment; then sees to it that another one is free. Raises OSError and IndexBroken."""
        with self._lock:
            segment = self._book.open()
        if segment is None:  # Nothing was left free: capacity that was taken away, or segments that failed.
            self._give_up_one(rewrite=False)
            with self._lock:
                segment = self._book.open()
            if segment is None:
                raise OSError(errno.ENOSPC, "no segment can be had")
        size = self._book.rules.segment_bytes
        header = Header(self._store_id, segment.number, segment.sequence, size, self._wall_ns())
        try:
            writer = SegmentWriter.begin(self._disk, name_of(segment.number), header)
        except OSError:
            with self._lock:
                self._book.give_up(segment)
            raise
        self._open = (segment, writer)
        with self._lock:
            self._devices[segment.number, segment.sequence] = _Open(writer.device)
            is_last = not self._book.has_room
        if is_last:
            self._give_up_one(rewrite=True)
        return self._open or self._begin()

    def _seal(self) -> None:
        """Makes the open segment and its places in the index durable. Raises OSError and IndexBroken."""
        if self._open is None:
            return
        segment, writer = self._open
        if writer.layout.is_empty:
            return
        writer.seal(self._wall_ns())
        change = self._index.change()
        with self._lock:
            mine = {place: at for place, at in self._pending.items() if at.life == (segment.number, segment.sequence)}
            part_count = used_bytes = 0
            for described in writer.layout.namespaces:
                change.put_namespace(described.digest, self._namespace(described))
            for (digest, key), located in mine.items():
                change.put_block(self._namespaces[digest].id, key, located)
                part_count += len(located.parts)
                used_bytes += located.size_bytes
            change.put_segment(segment.number, SegmentAt(segment.sequence, part_count, used_bytes))
        self._index.apply(change)
        with self._lock:
            for place, located in mine.items():
                if self._pending.get(place) == located:
                    del self._pending[place]
            self._book.seal(segment)
            self._open = None
            self.counts["sealed_segments"] += 1

    def _wall_ns(self) -> int:
        return int(self._clocks.wall() * 1e9)

    def _namespace(self, described: Described) -> NamespaceAt:
        known = self._namespaces.get(described.digest)
        if known is None:
            number = max((n.id for n in self._namespaces.values()), default=0) + 1
            known = self._namespaces[described.digest] = NamespaceAt(number, described.spec)
        return known

    # -- giving up -----------------------------------------------------------------------------------------------

    def _give_up_one(self, *, rewrite: bool) -> bool:
        """Gives up the segment that holds least that is live, which is written again; false if there is none."""
        with self._lock:
            since = self._book.live_since()
            victim = self._book.victim(since)
            if victim is None:
                return False
            rows = [int(victim.start[row]) for row in victim.worth_rewriting(since)] if rewrite else []
        blocks, is_whole = self._blocks_of(victim)
        if rewrite:
            self._rewrite(victim, rows, {block[2].start: block for block in blocks})
        change = self._index.change()
        for namespace_id, key in self._places_in(victim, blocks if is_whole else None):
            change.drop_block(namespace_id, key)
        change.drop_segment(victim.number)
        self._index.apply(change)
        gone = self._leave(victim)
        with self._lock:
            self.counts["given_up_segments"] += 1
        if gone:
            self._disk.remove(name_of(victim.number))
        return True

    def _blocks_of(self, segment: Segment) -> tuple[list[tuple[Described, bytes, Located]], bool]:
        """Returns what a sealed segment's table says that it holds, and whether it says all."""
        try:
            with self._opened(segment.number, segment.sequence) as device:
                return blocks_in(device, store_id=self._store_id, number=segment.number)
        except (OSError, BadSegment) as error:
            _LOG.warning("the table of segment %d cannot be read: %s", segment.number, error)
            return [], False

    def _places_in(
        self, segment: Segment, blocks: list[tuple[Described, bytes, Located]] | None
    ) -> Iterator[tuple[int, bytes]]:
        """Yields what the index has in a segment; without the segment's own word all of the index is looked at."""
        life = (segment.number, segment.sequence)
        if blocks is None:
            yield from ((name, key) for name, key, located in self._index.blocks() if located.life == life)
            return
        for described, key, located in blocks:
            namespace = self._namespaces.get(described.digest)
            if namespace is not None and self._index.find(namespace.id, [key])[0] == located:
                yield namespace.id, key

    def _rewrite(
        self, victim: Segment, rows: Sequence[int], blocks: dict[int, tuple[Described, bytes, Located]]
    ) -> None:
        """Writes live blocks again that are not in memory, within their share. Raises OSError."""
        for start in rows:
            found = blocks.get(start)
            if found is None or self.settings.is_hot(found[0].digest, found[1]):
                continue
            described, key, located = found
            with self._lock:
                current = self._current(described.digest, key)
                if current != located or not self._book.may_rewrite(located.size_bytes):
                    continue
                touched = float(victim.touched[victim.row_at(start) or 0])
            block = self._loaded(victim, described, key, located)
            if block is None:
                continue
            if self._place([block], touched=touched):
                with self._lock:
                    self.counts["rewritten_blocks"] += 1

    def _current(self, digest: bytes, key: bytes) -> Located | None:
        pending = self._pending.get((digest, key))
        namespace = self._namespaces.get(digest)
        if pending is not None or namespace is None:
            return pending
        return self._index.find(namespace.id, [key])[0]

    def _loaded(self, segment: Segment, described: Described, key: bytes, located: Located) -> BlockOut | None:
        """Reads a block to write it again; None if it is damaged."""
        memory = aligned(located.size_bytes)
        parts = _parts_in(0, located, [memory[p.offset - located.start :][: _room(p.length)] for p in located.parts])
        with self._opened(segment.number, segment.sequence) as device:
            device.read(located.start, [memory[: located.size_bytes]])
        if mismatched(parts):
            return None
        return BlockOut(
            described,
            key,
            [p.part for p in located.parts],
            [p.length for p in located.parts],
            [p.checksum for p in located.parts],
            [p.piece for p in parts],
            created=located.created,
            expires=located.expires,
        )

    def _shrink(self) -> None:
        while self._book.excess_count and self._give_up_one(rewrite=False):
            pass

    # -- deleting ------------------------------------------------------------------------------------------------

    def _delete(self, digest: bytes, keys: Sequence[bytes]) -> None:
        with self._lock:
            namespace = self._namespaces.get(digest)
            gone = [self._pending.pop((digest, key), None) for key in keys]
            sequence = self._book.last_sequence
        if namespace is None and not any(gone):
            return
        self._tombstones.add([Tombstone(sequence, digest, key) for key in keys])
        if namespace is not None:
            gone += self._index.find(namespace.id, keys)
            change = self._index.change()
            for key in keys:
                change.drop_block(namespace.id, key)
            self._index.apply(change)
        self._dropped(gone)

    def _purge(self, digest: bytes) -> None:
        with self._lock:
            namespace = self._namespaces.get(digest)
            places = [place for place in self._pending if place[0] == digest]
            gone: list[Located | None] = [self._pending.pop(place) for place in places]
            sequence = self._book.last_sequence
        if namespace is None:
            return
        self._tombstones.add([Tombstone(sequence, digest)])
        gone += [located for name, _, located in self._index.blocks() if name == namespace.id]
        change = self._index.change()
        change.drop_blocks_of(namespace.id)
        self._index.apply(change)
        self._dropped(gone)

    def _dropped(self, gone: Sequence[Located | None]) -> None:
        with self._lock:
            for located in gone:
                if located is not None:
                    self._book.drop(*located.life, located.start)
                    self.counts["deleted_blocks"] += 1

    # -- the threads that read -----------------------------------------------------------------------------------

    def _read(self, wanted: list[Wanted]) -> list[bool]:
        good = [True] * len(wanted)
        by_life: dict[tuple[int, int], list[int]] = {}
        for i, want in enumerate(wanted):
            by_life.setdefault(want.located.life, []).append(i)
        for life, indexes in by_life.items():
            parts = [part for i in indexes for part in _parts_in(i, wanted[i].located, wanted[i].pieces)]
            try:
                with self._opened(*life) as device:
                    for run in runs_of(parts):
                        for block in {wrong.block for wrong in read_run(device, run)}:
                            good[block] = False
                            self._damaged(wanted[block])
            except _Gone:
                for i in indexes:
                    good[i] = False
            except OSError as error:
                with self._lock:
                    self.counts["read_errors"] += 1
                _LOG.warning("reading segment %d: %s", life[0], error)
                for i in indexes:
                    good[i] = False
        with self._lock:
            now = self._clocks.now()
            for want, is_good in zip(wanted, good, strict=True):
                if is_good:
                    self._book.touch(*want.located.life, want.located.start, now)
            self.counts["read_blocks"] += sum(good)
            self.counts["missed_blocks"] += len(good) - sum(good)
        return good

    def _damaged(self, want: Wanted) -> None:
        """Takes a block out whose bytes are not what was written, unless there is another by now."""
        digest, key, located, _ = want

        def forget() -> None:
            with self._lock:
                if self._pending.get((digest, key)) == located:
                    del self._pending[digest, key]
                namespace = self._namespaces.get(digest)
            if namespace is not None and self._index.find(namespace.id, [key])[0] == located:
                change = self._index.change()
                change.drop_block(namespace.id, key)
                self._index.apply(change)
            with self._lock:
                self._book.drop(*located.life, located.start)

        with self._lock:
            self.counts["corrupt_blocks"] += 1
        self._errand(forget)

    def _opened(self, number: int, sequence: int) -> _Lent:
        return _Lent(self, (number, sequence))

    def lend(self, life: tuple[int, int]) -> Device:
        """Returns the device of a segment's life, which stays as it is until it is given back. Raises OSError."""
        with self._lock:
            if self._book.get(*life) is None:
                raise _Gone("the segment has another life")
            opened = self._devices.get(life)
            if opened is not None:
                opened.users += 1
                return opened.device
        device = self._disk.open(name_of(life[0]))
        with self._lock:
            other = self._devices.get(life)
            if other is None and self._book.get(*life) is not None:
                self._devices[life] = _Open(device, users=1)
                return device
        device.close()
        return self.lend(life)

    def take_back(self, life: tuple[int, int]) -> None:
        """Ends a use of a device."""
        with self._lock:
            self._devices[life].users -= 1
            self._lock.notify_all()

    def _leave(self, segment: Segment) -> bool:
        """Gives a segment up: nobody begins to read it, and nobody reads it any more when this returns.

        Tells whether it has gone, and is not to be used again.
        """
        life = (segment.number, segment.sequence)
        with self._lock:
            gone = self._book.give_up(segment)
            opened = self._devices.get(life)
            while opened is not None and opened.users:
                self._lock.wait()
            self._devices.pop(life, None)
        if opened is not None:
            opened.device.close()
        return gone

    # -- faults --------------------------------------------------------------------------------------------------

    def _errand(self, work: Callable[[], None]) -> Future[None]:
        item = _Errand(work)
        with self._lock:
            if self._closing:
                item.future.set_exception(OSError("the tier is closed"))
                return item.future
            self._queue.append(item)
            self._lock.notify_all()
        return item.future

    def _run(self, errand: _Errand) -> None:
        try:
            errand.work()
        except _FAULTS as error:
            self._failed(error)
            errand.future.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - whoever asked is told; the thread must live
            errand.future.set_exception(error)
        else:
            errand.future.set_result(None)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self.fault is None:
                _LOG.error("the warm tier takes no writes: %s", error)
            self.fault = error
            self.counts["faults"] += 1

    def _close_open(self) -> None:
        """Gives up the open segment: what lay in it is not found any more."""
        if self._open is None:
            return
        segment, writer = self._open
        self._open = None
        with self._lock:
            life = (segment.number, segment.sequence)
            self._pending = {place: at for place, at in self._pending.items() if at.life != life}
        self._leave(segment)
        writer.close()


@dataclass(eq=False)
class _Block:
    """A block that waits to be written."""

    block: BlockOut
    size_bytes: int
    future: Future[bool] = field(default_factory=Future)


@dataclass(eq=False)
class _Errand:
    """Something else that the thread which writes is to do."""

    work: Callable[[], None]
    future: Future[None] = field(default_factory=Future)


@dataclass(eq=False)
class _Open:
    device: Device
    users: int = 0


class _Gone(OSError):
    """The segment has been given up."""


class _Lent:
    """A device while it is used."""

    def __init__(self, tier: WarmTier, life: tuple[int, int]) -> None:
        self._tier, self._life = tier, life

    def __enter__(self) -> Device:
        return self._tier.lend(self._life)

    def __exit__(self, *_: object) -> None:
        self._tier.take_back(self._life)


def _parts_in(block: int, located: Located, pieces: Sequence[memoryview]) -> list[PartIn]:
    return [
        PartIn(block, part.offset, part.length, part.checksum, piece)
        for part, piece in zip(located.parts, pieces, strict=True)
    ]


def _room(length: int) -> int:
    return blocks_of(length) * BLOCK_BYTES
