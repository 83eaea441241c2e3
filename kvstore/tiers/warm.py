"""The warm tier: blocks on disk, written as they leave memory and read back on demand.

Rules
- One thread writes: payload, tables, the index, deletions, in the order they were asked for. It alone changes the book,
  the residents and what is pending; everyone else looks at them as they are, without a lock. Several threads read.
- No call waits for the disk, nor for a lock that is held for longer than it takes to put something into a queue.
- What was written can be read at once; it outlives the process once its segment is sealed.
- What is to be deleted is not found from the moment that was asked for.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple, TypeVar

from kvstore.core.columns import Longs
from kvstore.core.residents import Residents, fingerprint_of
from kvstore.core.segments import Segment, SegmentBook, SegmentState
from kvstore.tiers.device import Disk, aligned
from kvstore.tiers.index import MOST_CHANGES, Change, Index, IndexBroken, Located, NamespaceAt, PartAt, SegmentAt
from kvstore.tiers.lending import Gone, Lending
from kvstore.tiers.marks import Marks
from kvstore.tiers.pool import DaemonPool
from kvstore.tiers.reader import PartIn, mismatched, read_run, runs_of
from kvstore.tiers.recovery import blocks_in, name_of
from kvstore.tiers.sealing import Keyring, SegmentKey, WrongKey
from kvstore.tiers.segment import BLOCK_BYTES, BadSegment, Described, Header, Layout, blocks_of
from kvstore.tiers.tombstones import WHOLE, Tombstone, Tombstones
from kvstore.tiers.watch import Watch
from kvstore.tiers.writer import BlockOut, Placed, SegmentWriter

_LOG = logging.getLogger("kvstore.warm")
BATCH_BYTES = 8 << 20  # Written in one piece.
MOST_NOTES = 1 << 16  # Uses that wait to be noted; of more the oldest are forgotten.
_NOTES_EVERY_S = 1.0
_FIND_KEYS = 1000  # In one look-up of the thread that writes.
_FEW_TOMBSTONES = 10_000  # Kept without a thought of the segments that they speak of.
_FOR_EVER = float("inf")
_DAMAGE = (BadSegment, WrongKey)
_CLOSED: Exception | None = OSError(errno.EBADF, "the tier was closed before")
_FAULTS = (OSError, IndexBroken, *_DAMAGE)
_T = TypeVar("_T")


class Clocks(NamedTuple):
    """Seconds of the monotonic clock, and of the wall clock."""

    now: Callable[[], float]
    wall: Callable[[], float]


@dataclass(frozen=True)
class WarmSettings:
    """`queue_bytes`: that may wait to be written. `is_hot(digest, key)`: whether a block is in memory too; whoever says
    that it is tells of its leaving by `WarmTier.note`."""

    queue_bytes: int = 256 << 20
    readers: int = 8
    is_hot: Callable[[bytes, bytes], bool] = lambda digest, key: False


class Wanted(NamedTuple):
    """A block to be read: where it lies, and for each of its parts the memory that it lands in, as in `PartIn`."""

    digest: bytes
    key: bytes
    located: Located
    pieces: Sequence[memoryview]


class _Came(NamedTuple):
    """Parts as they came from the device, not looked at yet, and the key of their segment's life."""

    parts: list[PartIn]
    key: SegmentKey | None


class Purged(NamedTuple):
    """What was forgotten."""

    block_count: int
    size_bytes: int


class WarmTier:
    """Owns its threads, the index, the log of deletions and the open devices, from construction to `close`.

    `keyring`: seals what is written, and opens what was sealed.
    """

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
        keyring: Keyring | None = None,
    ) -> None:
        self._disk, self._book, self._index, self._tombstones = disk, book, index, tombstones
        self._store_id, self._keyring = store_id, keyring
        self.settings, self._clocks = settings or WarmSettings(), clocks
        self._residents = Residents(book)
        self._lock = threading.Condition()  # Of the queue, the fault and the counts.
        self._namespaces = namespaces  # Replaced, never changed.
        self._pending: dict[tuple[bytes, bytes], Located] = {}  # Written, and not in the index yet.
        self._queue: deque[_Block | _Errand] = deque()  # In the order they were asked for.
        self._queued_bytes = 0
        self._marks = Marks()
        self._notes: deque[tuple[tuple[int, int], int, float, bool, bool]] = deque(maxlen=MOST_NOTES)
        self._losing: set[tuple[int, int]] = set()
        self._kept_tombstones = tombstones.count
        self._closing = False
        self._closer: threading.Thread | None = None
        self.fault: Exception | None = None
        self.counts: Counter[str] = Counter()
        self._watch = Watch(clocks.now)
        self._lending = Lending(disk, book.get, store_id=store_id, keyring=keyring)
        self._open: tuple[Segment, SegmentWriter] | None = None
        self._pool = DaemonPool(self.settings.readers, "kvstore-warm-read", turns=True)
        self._writes = DaemonPool(2, "kvstore-warm-io")
        self._under_way: deque[_Begun] = deque()  # In the order they were begun; at most three, two of them written.
        self._owes_room = False  # No segment is free but the open one.
        self._writer = threading.Thread(target=self._write_all, name="kvstore-warm-write", daemon=True)
        self._writer.start()

    # -- looking up ----------------------------------------------------------------------------------------------

    def has(self, digest: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Tells of each block whether it is here: not deleted, and its time not over. In memory alone.

        Where a purge of the namespace is under way, no for all of its blocks. A yes may be wrong where the segment goes
        in this moment, or for one pair of blocks in 10^19.
        """
        found = self._residents.has(digest, keys, self._clocks.wall())
        if self._marks:
            hides = self._marks.hides
            found = [one and not hides(digest, key) for key, one in zip(keys, found, strict=True)]
        return found

    def locate(self, digest: bytes, keys: Sequence[bytes]) -> Future[list[Located | None]]:
        """Looks up where blocks lie, in a thread that reads: None for those that are not here, or cannot be looked up.

        The future can be cancelled until that has begun.
        """
        asked = list(keys)
        return self._pool.submit(lambda: self._locate(digest, asked), otherwise=[None] * len(asked))

    def place_of(self, digest: bytes, key: bytes) -> tuple[tuple[int, int], int] | None:
        """Returns the life of the segment that a block lies in, and where it begins; None if it is not here. In memory
        alone; it may be gone in this moment."""
        found = self._residents.find(digest, key)
        if found is None or (self._marks and self._marks.hides(digest, key)):
            return None
        number, row = found
        try:
            segment = self._book[number]
            return (number, segment.sequence), segment.start_of(row)
        except (KeyError, IndexError):  # It was given up in this moment.
            return None

    def still_has(self, life: tuple[int, int], start: int) -> bool:
        """Whether a block lies at that place still."""
        return self._book.has(*life, start)

    def note(self, life: tuple[int, int], start: int, touched: float, *, used: bool, hot: bool = False) -> None:
        """Notes when a block was last touched, for the choice of what is given up: it has left memory, or (`hot`) is
        there again. `used`: since it was written."""
        self._notes.append((life, start, touched, used, hot))

    @property
    def lives(self) -> Longs:
        """By a segment's number the sequence number of the life it is in, 0 where it holds nothing. To be read only."""
        return self._book.lives

    def namespaces(self) -> dict[bytes, bytes]:
        """Returns the message of each namespace that blocks may be stored in, by its digest."""
        return {digest: at.spec for digest, at in self._namespaces.items()}

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, block: BlockOut) -> Future[Located | None]:
        """Writes a block; tells where it lies now. None where it could not be written; at once where the queue is full,
        the disk failed, or the block has no bytes or more than a segment takes.

        Owns: the pieces until the future is resolved. It cannot be cancelled.
        """
        item = _Block(block, sum(map(len, block.pieces)))
        fits = item.size_bytes and Layout(self._book.rules.segment_bytes).fits(block.lengths, block.described)
        with self._lock:
            is_full = self._queued_bytes and self._queued_bytes + item.size_bytes > self.settings.queue_bytes
            if self._closing or self.fault is not None or is_full or not fits:
                self.counts["refused_blocks"] += 1
                item.future.set_result(None)
                return item.future
            self._queue.append(item)
            self._queued_bytes += item.size_bytes
            self._lock.notify_all()
        return item.future

    def delete(self, digest: bytes, keys: Sequence[bytes]) -> Future[int]:
        """Forgets blocks, those that wait to be written included; tells how many were here. Durable when it is done.

        Fails with OSError or IndexBroken: then this process does not find them, `heal` tries again, and without that
        they may be back after a restart.
        """
        asked = list(dict.fromkeys(keys))
        return self._forgetting(digest, asked, _FOR_EVER, lambda: self._delete(digest, asked))

    def purge(self, digest: bytes, created_before: float = _FOR_EVER) -> Future[Purged]:
        """Forgets a namespace's blocks that were made before a time of the wall clock; as `delete`."""
        return self._forgetting(digest, None, created_before, lambda: self._purge(digest, created_before))

    def flush(self) -> Future[None]:
        """Writes what waits, and seals the open segment, so that all of it outlives the process."""
        return self._errand(self._seal)

    def resize(self, capacity_bytes: int) -> Future[None]:
        """Changes the capacity; what is beyond it is given up when the future is resolved."""

        def resize() -> None:
            self._book.resize(capacity_bytes)
            while (free := self._book.drop_free()) is not None:
                self._remove(free)
            while self._book.excess_count and self._give_up_one(rewrite=False):
                pass

        return self._errand(resize)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, wanted: Sequence[Wanted]) -> Future[list[bool]]:
        """Reads blocks; tells of each whether all of its parts have landed as they were written.

        Owns: the pieces until the future is resolved, or was cancelled, which it can be until reading has begun. A part
        that is damaged takes its block out of the tier.
        """
        asked = list(wanted)
        return self._pool.submit(lambda: self._read(asked), otherwise=[False] * len(asked))

    # -- health --------------------------------------------------------------------------------------------------

    @property
    def stalled_s(self) -> float:
        """How long the longest call of the device now under way has taken; 0 if there is none."""
        return self._watch.stalled_s

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def written_bytes(self) -> int:
        """Of payload, since the tier was opened."""
        return self._book.written_bytes

    def gauges(self) -> dict[str, int]:
        """How the tier is now."""
        book = self._book
        return {
            "capacity_bytes": book.capacity_count * book.rules.segment_bytes,
            "stored_bytes": book.stored.size_bytes,
            "stored_blocks": book.stored.block_count,
            "segments": len(book),
            "free_segments": book.count(SegmentState.FREE),
            "bad_segments": book.count(SegmentState.BAD),
            "queued_bytes": self._queued_bytes,
            "written_bytes": book.written_bytes,
            "rewritten_bytes": book.rewritten_bytes,
            "namespaces": len(self._namespaces),
        }

    def heal(self) -> Future[None]:
        """Tries the disk where it failed; writes are taken again if it works. Fails with what is still wrong."""

        def probe() -> None:
            if self.fault is None:
                return
            self._close_open()
            if isinstance(self.fault, IndexBroken):
                with self._watch.call():
                    self._index.reopen()
            self._delete_undone()
            self._begin()
            with self._lock:
                self.fault = None

        return self._errand(probe)

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Does what waits, seals, and gives everything back; no longer than that where the disk hangs. Idempotent.

        Where it took longer, what waits is lost, and what is under way goes on.
        """
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            if self._closer is None:
                self._closer = threading.Thread(target=self._give_back, name="kvstore-warm-close", daemon=True)
                self._closer.start()
        self._closer.join(timeout_s)
        if self._closer.is_alive():
            _LOG.error("the disk hangs: what was not written is lost")
            self._abandon()
            self._pool.abandon()

    def _give_back(self) -> None:
        self._writer.join()
        self._writes.close()
        self._pool.close()
        self._lending.close()
        self._index.close()
        self._tombstones.close()

    def _abandon(self) -> None:
        """Ends what waits for the thread that writes, without doing it."""
        with self._lock:
            waiting, self._queue = self._queue, deque()
            self._queued_bytes = 0
        for item in waiting:
            if isinstance(item, _Block):
                item.future.set_result(None)
            else:
                item.future.set_exception(OSError("the tier was closed before"))

    # -- the thread that writes ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            if not self._queue:
                self._take_in()
            with self._lock:
                while not (self._queue or self._closing or self._notes):
                    self._lock.wait(_NOTES_EVERY_S)
                if self._closing and not self._queue:
                    break
                batch = self._take_batch()
                errand = self._queue.popleft() if self._queue and not batch else None
            if batch:
                self._write_batch(batch)
            elif isinstance(errand, _Errand):
                self._run(errand)
            self._take_notes()
        self._take_in()
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

    def _take_notes(self) -> None:
        for _ in range(len(self._notes)):
            life, start, touched, used, hot = self._notes.popleft()
            self._book.touch(*life, start, touched, used=used, hot=hot)

    def _write_batch(self, batch: list[_Block]) -> None:
        """Begins to write a batch; what was begun before it is taken in meanwhile, so that the disk never waits."""
        left = batch
        try:
            while left and self.fault is None:
                has_time = self._book.rules.segment_bytes >= 8 * BATCH_BYTES
                segment, writer = self._open or self._begin(owe_room=has_time)
                placed, write = writer.place([item.block for item in left])
                written = self._writes.submit(self._watched(write), otherwise=_CLOSED)
                begun = _Begun(segment, writer, left[: len(placed)], placed, written)
                left = left[len(placed) :]
                self._under_way.append(begun)
                if self._owes_room:
                    self._make_room()  # While the disk is busy.
                self._take_in(most_left=2)
                if left:
                    self._seal()
        except Exception as error:  # noqa: BLE001 - whoever asked is told; the thread must live
            self._failed(error)
        self._resolve(left, [])

    def _watched(self, write: Callable[[], object]) -> Callable[[], Exception | None]:
        def run() -> Exception | None:
            try:
                with self._watch.call():
                    write()
            except OSError as error:
                return error
            return None

        return run

    def _take_in(self, *, most_left: int = 0) -> None:
        """Waits until no more than so many writes are under way, and makes known what they wrote.

        Of a segment that a write failed in nothing counts.
        """
        while len(self._under_way) > most_left:
            begun = self._under_way.popleft()
            error = begun.written.result()
            if error is not None:
                begun.writer.failed = True
                self._failed(error)
            found = [] if self.fault is not None else self._noted(begun.segment, begun.placed)
            self._resolve(begun.items, found)

    def _resolve(self, items: list[_Block], found: list[Located]) -> None:
        """Tells who asked for blocks where they lie; those beyond what was found were not written."""
        if not items:
            return
        with self._lock:
            self._queued_bytes -= sum(item.size_bytes for item in items)
            self.counts["written_blocks"] += len(found)
            self.counts["failed_blocks"] += len(items) - len(found)
        for item, located in zip_longest(items, found):
            item.future.set_result(located)

    def _place(self, blocks: list[BlockOut], *, touched: float) -> list[Located]:
        """Writes leading blocks again to the open segment, begun where there is none; returns where they lie.

        `touched`: when they were last used. Raises OSError and IndexBroken.
        """
        self._take_in()  # Rows of a segment stand in the order of their places.
        segment, writer = self._open or self._begin()
        if writer.failed:
            raise OSError(errno.EIO, "a write to the segment failed before")
        with self._watch.call():
            placed = writer.write(blocks)
        return self._noted(segment, placed, touched=touched)

    def _noted(self, segment: Segment, placed: list[Placed], *, touched: float | None = None) -> list[Located]:
        """Notes where blocks lie that have been written, `touched`: again."""
        now = self._clocks.now() if touched is None else touched
        found = []
        for one in placed:
            block = one.block
            parts = tuple([PartAt(*row) for row in one.rows()])
            located = Located(block.created, block.expires, segment.number, segment.sequence, parts)
            self._note(segment, block, located, now, again=touched is not None)
            found.append(located)
        return found

    def _note(self, segment: Segment, block: BlockOut, located: Located, touched: float, *, again: bool) -> None:
        """Notes where a block lies now; its older copy goes out of the book."""
        digest = block.described.digest
        row = segment.add(
            located.start,
            located.size_bytes,
            touched,
            used=again,
            hot=not again and self.settings.is_hot(digest, block.key),
            fingerprint=fingerprint_of(digest, block.key),
            expires=block.expires,
        )
        self._namespace(block.described)
        self._pending[digest, block.key] = located
        self._residents.put(segment, row)
        self._book.wrote(located.size_bytes, again=again)

    def _begin(self, *, owe_room: bool = False) -> tuple[Segment, SegmentWriter]:
        """Begins the next segment; then sees to it that another one is free, or leaves that to its caller (`owe_room`),
        who must while this one has room for what is written again. Raises OSError and IndexBroken."""
        segment = self._book.open()
        if segment is None:  # Nothing was left free: capacity that was taken away, or segments that failed.
            self._give_up_one(rewrite=False)
            segment = self._book.open()
            if segment is None:
                raise OSError(errno.ENOSPC, "no segment can be had")
        size = self._book.rules.segment_bytes
        header = Header(self._store_id, segment.number, segment.sequence, size, self._wall_ns())
        try:
            with self._watch.call():
                writer = SegmentWriter.begin(self._disk, name_of(segment.number), header, keyring=self._keyring)
        except OSError:
            self._book.give_up(segment)
            raise
        self._lending.add((segment.number, segment.sequence), writer.device, writer.key)
        self._open = (segment, writer)
        self._owes_room = not self._book.has_room
        if self._owes_room and not owe_room:
            self._make_room()
        return self._open or self._begin()

    def _make_room(self) -> None:
        self._owes_room = False
        self._give_up_one(rewrite=True)

    def _seal(self) -> None:
        """Makes the open segment durable, and its blocks known to the index. Raises OSError and IndexBroken."""
        self._take_in()
        if self._open is None:
            return
        segment, writer = self._open
        if writer.failed:
            raise OSError(errno.EIO, "a write to the segment failed before")
        if writer.layout.is_empty:
            return
        with self._watch.call():
            writer.seal(self._wall_ns())
        change = self._index.change()
        part_count = used_bytes = 0
        for described in writer.layout.namespaces:
            change.put_namespace(described.digest, self._namespace(described))
        for (digest, key), located in self._pending.items():
            change.put_block(self._namespaces[digest].id, key, located)
            part_count += len(located.parts)
            used_bytes += located.size_bytes
            change = self._apply_if_full(change)
        change.put_segment(segment.number, SegmentAt(segment.sequence, part_count, used_bytes))
        self._apply(change)  # The segment with the last of its blocks: until then the table counts.
        self._pending = {}  # Of this segment, all of it: no other is open.
        self._book.seal(segment)
        self._open = None
        self._count("sealed_segments")

    def _wall_ns(self) -> int:
        return int(self._clocks.wall() * 1e9)

    def _namespace(self, described: Described) -> NamespaceAt:
        known = self._namespaces.get(described.digest)
        if known is None:
            number = max((n.id for n in self._namespaces.values()), default=0) + 1
            known = NamespaceAt(number, described.spec)
            self._namespaces = {**self._namespaces, described.digest: known}
        return known

    # -- giving up -----------------------------------------------------------------------------------------------

    def _give_up_one(self, *, rewrite: bool) -> bool:
        """Gives up the segment that holds least that is live, which is written again; false if there is none."""
        self._take_notes()
        since = self._book.live_since()
        victim = self._book.victim(since)
        if victim is None:
            return False
        self._give_up(victim, victim.worth_rewriting(since) if rewrite else [])
        return True

    def _give_up(self, victim: Segment, rows: Sequence[int]) -> None:
        """Gives up a sealed segment, after these of its blocks were written again. Raises OSError and IndexBroken."""
        blocks, is_whole = self._blocks_of(victim)
        self._rewrite(victim, rows, {block[2].start: block for block in blocks} if rows else {})
        places = self._places_in(victim, blocks if is_whole else None)
        change = self._index.change()
        for namespace_id, key in places:
            change.drop_block(namespace_id, key)
            change = self._apply_if_full(change)
        change.drop_segment(victim.number)
        self._apply(change)
        gone = self._leave(victim)
        self._count("given_up_segments")
        if gone:
            self._remove(victim)
        self._forget_tombstones()

    def _blocks_of(self, segment: Segment) -> tuple[list[tuple[Described, bytes, Located]], bool]:
        """Returns what a sealed segment's table says that it holds, and whether it says all."""
        try:
            with self._watch.call(), self._lending.lent((segment.number, segment.sequence)) as lent:
                return blocks_in(lent.device, store_id=self._store_id, number=segment.number)
        except FileNotFoundError:
            _LOG.error("segment %d has been removed by somebody else", segment.number)
            self._count("lost_segments")
        except (OSError, *_DAMAGE) as error:
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
        by_namespace: dict[bytes, list[tuple[bytes, Located]]] = {}
        for described, key, located in blocks:
            by_namespace.setdefault(described.digest, []).append((key, located))
        for digest, there in by_namespace.items():
            namespace = self._namespaces.get(digest)
            if namespace is None:
                continue
            found = self._find(namespace.id, [key for key, _ in there])
            for (key, located), now in zip(there, found, strict=True):
                if now == located:
                    yield namespace.id, key

    def _rewrite(
        self, victim: Segment, rows: Sequence[int], blocks: dict[int, tuple[Described, bytes, Located]]
    ) -> None:
        """Writes live blocks again that are not in memory, within their share. Raises OSError."""
        wall = self._clocks.wall()
        for row in rows:
            found = blocks.get(victim.start_of(row))
            if found is None or self.settings.is_hot(found[0].digest, found[1]):
                continue
            located = found[2]
            if 0 < located.expires <= wall or not self._book.may_rewrite(located.size_bytes):
                continue
            touched = float(victim.rows.touched[row])
            block = self._loaded(victim, *found)
            if block is not None and self._place([block], touched=touched):
                self._count("rewritten_blocks")

    def _loaded(self, segment: Segment, described: Described, key: bytes, located: Located) -> BlockOut | None:
        """Reads a block to write it again; None if it is damaged."""
        memory = aligned(located.size_bytes)
        pieces = [memory[p.offset - located.start :][: _room(p.length)] for p in located.parts]
        parts = _parts_in(0, Wanted(described.digest, key, located, pieces))
        with self._watch.call(), self._lending.lent((segment.number, segment.sequence)) as lent:
            lent.device.read(located.start, [memory[: located.size_bytes]])
            if mismatched(parts, lent.key):
                return None
        return BlockOut(
            described,
            key,
            [p.part for p in located.parts],
            [p.length for p in located.parts],
            [p.checksum for p in located.parts],
            pieces,
            created=located.created,
            expires=located.expires,
        )

    def _leave(self, segment: Segment) -> bool:
        """Gives a segment up: nobody begins to read it, and nobody reads it any more when this returns.

        Tells whether it has gone, and is not to be used again.
        """
        return self._lending.leave((segment.number, segment.sequence), lambda: self._book.give_up(segment))

    def _remove(self, segment: Segment) -> None:
        with self._watch.call():
            self._disk.remove(name_of(segment.number))

    def _close_open(self) -> None:
        """Gives up the open segment: what lay in it is not found any more."""
        if self._open is None:
            return
        segment, writer = self._open
        self._open = None
        self._pending = {}
        self._leave(segment)
        writer.close()

    # -- deleting ------------------------------------------------------------------------------------------------

    def _forgetting(self, digest: bytes, keys: list[bytes] | None, before: float, work: Callable[[], _T]) -> Future[_T]:
        """Hides blocks, and has them deleted."""

        def run() -> _T:
            try:
                return work()
            except BaseException:
                self._marks.failed(digest, keys, before)
                raise
            finally:
                self._marks.done(ticket)

        with self._lock:  # So that tickets are in the order of the queue.
            ticket = self._marks.ask(digest, keys)
            return self._errand(run)

    def _delete(self, digest: bytes, keys: Sequence[bytes]) -> int:
        namespace = self._namespaces.get(digest)
        if namespace is None:
            return 0
        sequence, end = self._horizon()
        self._bury([Tombstone(sequence, digest, key, end) for key in keys])
        stored = self._find(namespace.id, keys)
        change = self._index.change()
        count = 0
        for key, located in zip(keys, stored, strict=True):
            if located is not None:
                change.drop_block(namespace.id, key)
                change = self._apply_if_full(change)
            here = [self._forget(digest, key, at) for at in (self._pending.get((digest, key)), located) if at]
            count += any(here)
        self._apply(change)
        self._count("deleted_blocks", count)
        return count

    def _purge(self, digest: bytes, before: float) -> Purged:
        namespace = self._namespaces.get(digest)
        if namespace is None:
            return Purged(0, 0)
        is_whole = before == _FOR_EVER
        if is_whole:
            sequence, end = self._horizon()
            self._bury([Tombstone(sequence, digest, b"", end)])
        pending = ((key, at) for (other, key), at in list(self._pending.items()) if other == digest)
        stored = ((key, at) for _, key, at in self._index.blocks(namespace.id))
        found = ((key, at) for key, at in chain(pending, stored) if at.created < before)
        count = size = 0
        while chunk := list(islice(found, MOST_CHANGES)):
            change = self._index.change()
            if not is_whole:
                self._bury([_tombstone_of(digest, key, at) for key, at in chunk])
            for key, at in chunk:
                if not is_whole:
                    change.drop_block(namespace.id, key)
                if self._forget(digest, key, at):
                    count, size = count + 1, size + at.size_bytes
            self._apply(change)
        if is_whole:
            change = self._index.change()
            change.drop_blocks_of(namespace.id)
            self._apply(change)
        self._count("deleted_blocks", count)
        return Purged(count, size)

    def _delete_undone(self) -> None:
        """Tries again what could not be deleted. Raises OSError and IndexBroken."""
        marks = self._marks
        for digest, before in list(marks.undone_purges.items()):
            self._purge(digest, before)
            del marks.undone_purges[digest]
        for digest, keys in list(marks.undone_keys.items()):
            self._delete(digest, list(keys))
            del marks.undone_keys[digest]

    def _horizon(self) -> tuple[int, int]:
        """Returns the place that all blocks written so far lie before: a sequence number, and a block of the device."""
        if self._open is None:
            return self._book.last_sequence, WHOLE
        segment, writer = self._open
        return segment.sequence, writer.layout.end_bytes // BLOCK_BYTES

    def _bury(self, tombstones: Sequence[Tombstone]) -> None:
        with self._watch.call():
            self._tombstones.add(tombstones)

    def _forget_tombstones(self) -> None:
        """Drops records whose segments have gone, when there are many."""
        if self._tombstones.count < 2 * self._kept_tombstones + _FEW_TOMBSTONES:
            return
        with self._watch.call():
            self._tombstones.forget_below(self._book.oldest_sequence)
        self._kept_tombstones = self._tombstones.count

    def _forget(self, digest: bytes, key: bytes, located: Located) -> bool:
        """Takes a block out of memory's part of the tier, if it lies there still; tells whether it did."""
        if self._pending.get((digest, key)) == located:
            del self._pending[digest, key]
        return self._book.drop(*located.life, located.start)

    # -- the index -----------------------------------------------------------------------------------------------

    def _find(self, namespace_id: int, keys: Sequence[bytes]) -> list[Located | None]:
        """Looks up blocks, not too many at a time. Raises IndexBroken."""
        found: list[Located | None] = []
        for at in range(0, len(keys), _FIND_KEYS):
            with self._watch.call():
                found += self._index.find(namespace_id, keys[at : at + _FIND_KEYS])
        return found

    def _apply(self, change: Change) -> None:
        with self._watch.call():
            self._index.apply(change)

    def _apply_if_full(self, change: Change) -> Change:
        """Returns the change to go on with."""
        if change.count < MOST_CHANGES:
            return change
        self._apply(change)
        return self._index.change()

    # -- the threads that read -----------------------------------------------------------------------------------

    def _locate(self, digest: bytes, keys: list[bytes]) -> list[Located | None]:
        pending, namespace = self._pending, self._namespaces.get(digest)
        found = [pending.get((digest, key)) for key in keys]  # Before the index: what is taken in there leaves here.
        missing = [i for i, located in enumerate(found) if located is None]
        if namespace is not None and missing:
            try:
                stored = self._find(namespace.id, [keys[i] for i in missing])
            except IndexBroken as error:
                self._failed(error)
                stored = [None] * len(missing)
            for i, located in zip(missing, stored, strict=True):
                found[i] = located
        wall, book, marks = self._clocks.wall(), self._book, self._marks
        for i, located in enumerate(found):  # Written again between the two look-ups: it lies elsewhere now.
            if located is None or not book.has(*located.life, located.start):
                found[i] = self._pending.get((digest, keys[i]))
        return [
            None
            if located is None
            or 0 < located.expires <= wall
            or not book.has(*located.life, located.start)
            or (marks and marks.hides(digest, key))
            else located
            for key, located in zip(keys, found, strict=True)
        ]

    def _read(self, wanted: list[Wanted]) -> list[bool]:
        good = [True] * len(wanted)
        by_life: dict[tuple[int, int], list[int]] = {}
        for i, want in enumerate(wanted):
            by_life.setdefault(want.located.life, []).append(i)
        landed = []
        for life, indexes in by_life.items():
            parts = [part for i in indexes for part in _parts_in(i, wanted[i])]
            came = self._read_life(life, parts)
            if came is not None:
                landed.append(came)
                continue
            for i in indexes:
                good[i] = False
        self._pool.pass_turn()  # The disk has more to do while this thread looks at what came.
        for came in landed:
            for i in {wrong.block for wrong in mismatched(*came)}:
                good[i] = False
                self._damaged(wanted[i])
        now = self._clocks.now()
        for want, is_good in zip(wanted, good, strict=True):
            if is_good:
                life, start = want.located.life, want.located.start
                self._notes.append((life, start, now, True, self.settings.is_hot(want.digest, want.key)))
        with self._lock:
            self.counts["read_blocks"] += sum(good)
            self.counts["missed_blocks"] += len(good) - sum(good)
        return good

    def _read_life(self, life: tuple[int, int], parts: list[PartIn]) -> _Came | None:
        """Reads parts of one segment; None where they cannot be read."""
        try:
            with self._watch.call(), self._lending.lent(life) as lent:
                for run in runs_of(parts):
                    read_run(lent.device, run)
                return _Came(parts, lent.key)
        except Gone:
            pass
        except FileNotFoundError as error:
            self._lost(life, error)
        except (OSError, *_DAMAGE) as error:
            self._count("read_errors")
            _LOG.warning("reading segment %d: %s", life[0], error)
        return None

    def _damaged(self, want: Wanted) -> None:
        """Takes a block out whose bytes are not what was written, unless there is another by now."""
        digest, key, located, _ = want

        def forget() -> None:
            self._forget(digest, key, located)
            namespace = self._namespaces.get(digest)
            if namespace is not None and self._find(namespace.id, [key])[0] == located:
                change = self._index.change()
                change.drop_block(namespace.id, key)
                self._apply(change)

        self._count("corrupt_blocks")
        self._errand(forget)

    def _lost(self, life: tuple[int, int], error: OSError) -> None:
        """Gives up a segment whose file is not there any more."""
        with self._lock:
            if life in self._losing:
                return
            self._losing.add(life)

        def give_up() -> None:
            segment = self._book.get(*life)
            if segment is not None and segment.state is SegmentState.SEALED:
                self._give_up(segment, [])
            self._losing.discard(life)

        _LOG.error("reading segment %d: %s", life[0], error)
        self._errand(give_up)

    # -- errands and faults --------------------------------------------------------------------------------------

    def _errand(self, work: Callable[[], _T]) -> Future[_T]:
        item = _Errand(work)
        with self._lock:
            if self._closing:
                item.future.set_exception(OSError("the tier is closed"))
                return item.future
            self._queue.append(item)
            self._lock.notify_all()
        return item.future

    def _run(self, errand: _Errand) -> None:
        self._take_in()
        try:
            result = errand.work()
        except BaseException as error:  # noqa: BLE001 - whoever asked is told; the thread must live
            if isinstance(error, _FAULTS):
                self._failed(error)
            errand.future.set_exception(error)
        else:
            errand.future.set_result(result)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self.fault is None:
                _LOG.error("the warm tier takes no writes: %s", error)
            self.fault = error
            self.counts["faults"] += 1

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.counts[name] += count


class _Begun(NamedTuple):
    """A write that is under way: of which blocks, and what comes of it."""

    segment: Segment
    writer: SegmentWriter
    items: list[_Block]
    placed: list[Placed]
    written: Future[Exception | None]


class _Block:
    """A block that waits to be written."""

    __slots__ = ("block", "future", "size_bytes")

    def __init__(self, block: BlockOut, size_bytes: int) -> None:
        self.block, self.size_bytes = block, size_bytes
        self.future: Future[Located | None] = Future()
        self.future.set_running_or_notify_cancel()


class _Errand:
    """Something else that the thread which writes is to do."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()


def _parts_in(block: int, want: Wanted) -> Iterable[PartIn]:
    digest, key, located, pieces = want
    return [
        PartIn(block, p.offset, p.length, p.checksum, piece, p.part, p.tag, digest, key)
        for p, piece in zip(located.parts, pieces, strict=True)
    ]


def _tombstone_of(digest: bytes, key: bytes, located: Located) -> Tombstone:
    """Returns a record that this copy of a block is gone, and older ones."""
    return Tombstone(located.sequence, digest, key, located.start // BLOCK_BYTES + 1)


def _room(length: int) -> int:
    return blocks_of(length) * BLOCK_BYTES
