"""Writing blocks of memory to the warm tier: straight from their slots, ahead of their eviction.

The core says which (`Cleaner`); a block's slots stay as they are while it is written. Nobody waits for any of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from kvstore.core.arena import SLOT_UNIT_BYTES
from kvstore.core.cleaning import Ahead, Cleaner
from kvstore.core.eviction.base import OVER
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records
from kvstore.service.latency import Latencies
from kvstore.tiers.index import Located
from kvstore.tiers.memory import ArenaMemory
from kvstore.tiers.segment import BLOCK_BYTES, Described, blocks_of
from kvstore.tiers.warm import Clocks, WarmTier
from kvstore.tiers.writer import BlockOut
from kvstore_wire.waiting import within

AHEAD_S = 0.1  # Longer than it takes to seal a segment; less than whoever waits for a disk expects at worst.
_TABLES_BYTES = 64 << 10  # At least so much of a segment is not payload of one block.
_BURST_FADES = 0.999  # With each pump: what one call took counts for some thousand of them.
_STEPS = 4  # Pumped each time this part of the window was given away.


@dataclass(frozen=True)
class _Written:
    row: int
    size_bytes: int
    started: float
    future: Future[Located | None]


class Demotion:
    """Lives on the event loop. `why_not()` says why nothing may be written now, empty where it may."""

    def __init__(
        self,
        records: Records,
        memory: ArenaMemory,
        warm: WarmTier,
        cleaner: Cleaner,
        *,
        queue_bytes: int,
        segment_bytes: int,
        clocks: Clocks,
        why_not: Callable[[], str],
        latencies: Latencies,
    ) -> None:
        self._records, self._memory, self._warm, self._cleaner = records, memory, warm, cleaner
        self._queue_bytes, self._clocks, self._why_not = queue_bytes, clocks, why_not
        self._latencies = latencies
        self._most_bytes = cleaner.largest_bytes = segment_bytes - _TABLES_BYTES
        self._loop: asyncio.AbstractEventLoop | None = None
        self._described: dict[bytes, Described] = {}
        self._writing_bytes = 0
        self._done: deque[_Written] = deque()
        self._flushing = False
        self._is_told = False  # That something is done.
        self._step_bytes = max(1, cleaner.window_bytes // _STEPS)
        self._pumped_at = self._poked_at = 0
        self._burst_bytes = 0.0
        self.disk_bytes = warm.gauges()["capacity_bytes"]
        self._came = asyncio.Event()
        self._waited_for: list[Ahead] = []
        self.counts: Counter[str] = Counter()
        self.fit()
        records.on_evict = self._evicted
        if cleaner.budget.rate_bytes is not None:
            records.on_link = self._linked

    @property
    def writing_bytes(self) -> int:
        return self._writing_bytes

    def poke(self) -> None:
        """Pumps if enough memory was given away since the last time. To be called after each call that takes some."""
        granted = self._records.granted_bytes
        taken, self._poked_at = granted - self._poked_at, granted
        if taken > self._burst_bytes:
            self._burst_bytes = float(taken)
            self.fit()
        if granted - self._pumped_at >= self._step_bytes:
            self._burst_bytes *= _BURST_FADES
            self.pump()

    def fit(self) -> None:
        """Takes in how large the disk is, and what calls take."""
        self._cleaner.fit(self.disk_bytes, self._burst_bytes)
        self._step_bytes = max(1, self._cleaner.window_bytes // _STEPS)

    def pump(self) -> None:
        """Begins to write what is coldest and has no copy, as far as the queue has room."""
        self._pumped_at = self._records.granted_bytes
        if self._flushing:  # It takes what is worth most first, and this what is worth least.
            return
        warm = self._warm
        self._cleaner.budget.spend(warm.written_bytes + warm.queued_bytes, self._clocks.now())
        room = self._queue_bytes - self._writing_bytes
        if room > 0 and not self._why_not():
            at_least_one = not self._writing_bytes
            for row in self._cleaner.choose(
                room, warm.lives, at_least_one=at_least_one, waited_for=tuple(self._waited_for)
            ):
                self._write(row)

    def is_ahead(self, ahead: Ahead) -> bool:
        """Whether nothing would be gained by waiting until so many blocks may be evicted without loss."""
        return bool(self._why_not()) or self._cleaner.is_ahead(ahead)

    async def get_ahead(self, ahead: Ahead, wait_s: float = AHEAD_S) -> None:
        """Waits until so many blocks may be evicted without loss, or never will; for those who can wait."""
        until = self._clocks.now() + wait_s
        self._waited_for.append(ahead)
        try:
            while not self.is_ahead(ahead):
                self.pump()
                left_s = until - self._clocks.now()
                has_room = self._writing_bytes + ahead.size_bytes <= self._queue_bytes
                if left_s <= 0 or (has_room and not self._cleaner.is_being_written(ahead)):
                    return  # What is in the way is not to be written.
                self._came.clear()
                with suppress(asyncio.TimeoutError):  # A disk that stops says nothing: look again.
                    await within(min(left_s, AHEAD_S), self._came.wait())
        finally:
            self._waited_for.remove(ahead)

    async def flush(self, timeout_s: float) -> tuple[int, int]:
        """Writes all that has no copy, what is worth most first; returns how many blocks were, and were not, written.

        Ends in time whatever the disk does; then what is left is lost with the memory.
        """
        until = self._clocks.now() + timeout_s
        before = self.counts["written_blocks"] + self.counts["kept_blocks"]
        rows = self._worth_a_flush()
        self._flushing = True
        while (rows or self._writing_bytes) and not self._why_not() and self._clocks.now() < until:
            self._write_leading(rows)
            if not self._writing_bytes:
                continue
            self._came.clear()
            with suppress(asyncio.TimeoutError):
                await within(max(0.0, until - self._clocks.now()), self._came.wait())
        written = self.counts["written_blocks"] + self.counts["kept_blocks"] - before
        return written, sum(self._cleaner.is_dirty(row) for row in self._cleaner.order_for_flush())

    def _worth_a_flush(self) -> deque[int]:
        """Returns the blocks to be written, as many as the disk has room for beside those of more worth that it has.

        Tells the tier when each of these was touched, so that it gives up others.
        """
        cell, lives = self._records.blocks.cell, self._warm.lives
        room = self._warm.gauges()["capacity_bytes"] - 2 * self._most_bytes
        found: deque[int] = deque()
        for row in self._cleaner.order_for_flush():
            sequence, segment = cell.disk_sequence[row], cell.disk_segment[row]
            if sequence and lives[segment] != sequence:
                sequence = cell.disk_sequence[row] = 0
            if sequence:
                self._warm.note((segment, sequence), cell.disk_start[row], cell.touched[row], used=True)
            room -= self._size(row)
            if room >= 0 and not sequence:
                found.append(row)
        return found

    def _write_leading(self, rows: deque[int]) -> None:
        """Begins to write rows as long as the queue has room for them; one at least, where nothing is on its way."""
        while rows and (not self._writing_bytes or self._writing_bytes + self._size(rows[0]) <= self._queue_bytes):
            row = rows.popleft()
            if self._cleaner.is_dirty(row):  # It may have gone, or been filled anew.
                self._write(row)

    def _size(self, row: int) -> int:
        """What a block takes in memory, no less than on disk."""
        cell = self._records.blocks.cell
        return cell.slot_units[row] * SLOT_UNIT_BYTES * cell.present[row]

    # -- one block -----------------------------------------------------------------------------------------------

    def _write(self, row: int) -> None:
        records, cell = self._records, self._records.blocks.cell
        namespace = records.namespaces[cell.namespace[row]]
        key = records.blocks.key[row]
        assert key is not None
        first, size = cell.first_part[row], 0
        offsets, lengths, checksums = list[int](), list[int](), list[int]()
        parts = records.parts.cell
        for part in range(first, first + namespace.parts_per_block):
            offsets.append(parts.offset[part])
            lengths.append(parts.length[part])
            checksums.append(parts.checksum[part])
        view, pieces = self._memory.view, []
        for offset, length in zip(offsets, lengths, strict=True):
            room = blocks_of(length) * BLOCK_BYTES
            pieces.append(view[offset : offset + room])
            size += room
        if not 0 < size <= self._most_bytes or self._is_there(row, namespace, key):
            return
        now = self._clocks.now()
        created = self._clocks.wall() - (now - cell.created[row])
        ttl_s = namespace.rules.ttl_s
        block = BlockOut(
            self._describe(namespace),
            key,
            namespace.all_parts,
            lengths,
            checksums,
            pieces,
            created=created,
            expires=0.0 if ttl_s is None else created + ttl_s,
        )
        records.begin_writing(row)
        self._writing_bytes += size
        future = self._warm.write(block)
        written = _Written(row, size, now, future)
        if future.done():  # Refused.
            self._end(written)
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: self._tell(written))

    def _is_there(self, row: int, namespace: Namespace, key: bytes) -> bool:
        """Whether the disk has a copy already, of before the block was stored anew; then it is as good as another."""
        found = self._warm.place_of(namespace.spec.digest, key)
        if found is None:
            return False
        life, start = found
        cell = self._records.blocks.cell
        cell.disk_segment[row], cell.disk_sequence[row], cell.disk_start[row] = (*life, start)
        self._warm.note(life, start, cell.touched[row], used=True, hot=True)
        self.counts["kept_blocks"] += 1
        return True

    def _tell(self, written: _Written) -> None:
        """In a thread of the tier: one call to the loop takes in all that is done by then."""
        self._done.append(written)
        if self._is_told:
            return
        self._is_told = True
        assert self._loop is not None
        with suppress(RuntimeError):  # The loop has ended, and with it whoever cared.
            self._loop.call_soon_threadsafe(self._take_in)

    def _take_in(self) -> None:
        self._is_told = False  # First: what is added from now on is taken in below, or told of again.
        while self._done:
            self._end(self._done.popleft())
        self._came.set()
        self.pump()

    def _end(self, written: _Written) -> None:
        self._writing_bytes -= written.size_bytes
        self._latencies.add("Demote", int(1e9 * (self._clocks.now() - written.started)))
        located = None if written.future.cancelled() or written.future.exception() else written.future.result()
        cell, row = self._records.blocks.cell, written.row
        namespace = self._records.namespaces[cell.namespace[row]]
        is_whole = cell.present[row] == namespace.parts_per_block
        is_stored = self._records.end_writing(row)
        self.counts["written_blocks" if located is not None else "failed_blocks"] += 1
        if located is None:
            return
        if is_stored and is_whole:
            self.place(row, located)
        else:
            self.left(located)

    def place(self, row: int, located: Located) -> None:
        """Notes where a stored block's copy lies."""
        cell = self._records.blocks.cell
        cell.disk_segment[row], cell.disk_sequence[row], cell.disk_start[row] = (*located.life, located.start)
        cell.reuses[row] = 0  # From now on: those since it came to disk, for whoever chooses what goes from there.

    def left(self, located: Located) -> None:
        """Tells the tier that a block is on disk only."""
        self._warm.note(located.life, located.start, self._clocks.now(), used=False)

    def _describe(self, namespace: Namespace) -> Described:
        digest = namespace.spec.digest
        found = self._described.get(digest)
        if found is None:
            found = self._described[digest] = Described(digest, namespace.spec.to_message().SerializeToString())
        return found

    # -- told by the core ------------------------------------------------------------------------------------------

    def _evicted(self, row: int) -> None:
        """Counts what becomes of a block that makes room, and tells the tier when it was last used."""
        cell = self._records.blocks.cell
        namespace = self._records.namespaces[cell.namespace[row]]
        if namespace.rules.spare:
            return
        self._latencies.add("HotResidence", int(1e9 * (self._clocks.now() - cell.entered[row])))
        sequence = cell.disk_sequence[row]
        if sequence:
            life, start = (cell.disk_segment[row], sequence), cell.disk_start[row]
            if self._warm.still_has(life, start):
                self.counts["demoted_blocks"] += 1
                self._warm.note(life, start, cell.touched[row], used=cell.reuses[row] > 0)
            else:
                self.counts["dropped_copy_gone_blocks"] += 1
            return
        if cell.writing[row]:
            self.counts["demoted_blocks"] += 1
            return
        is_whole = cell.present[row] == namespace.parts_per_block
        reason = self._why_not() or ("behind" if is_whole else "incomplete")
        if reason == "behind" and cell.kind[row] == OVER:
            reason = "over"
        if reason == "behind" and self._size(row) > self._most_bytes:
            reason = "too_large"
        if reason == "behind" and self._cleaner.budget.left_for_once_bytes <= 0:
            reason = "budget"
        self.counts[f"dropped_{reason}_blocks"] += 1
        if reason == "budget":
            key = self._records.blocks.key[row]
            assert key is not None
            self._cleaner.ghosts.add(namespace.index, key)

    def _linked(self, row: int) -> None:
        cell, key = self._records.blocks.cell, self._records.blocks.key[row]
        assert key is not None
        if self._cleaner.ghosts.take(cell.namespace[row], key):
            cell.reuses[row] = 1
