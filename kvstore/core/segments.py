"""Which segment of the warm tier is written next, which one is given up, and what of it is written again. Pure.

    FREE -> OPEN -> SEALED -> (given up) -> FREE          any state -> BAD where the disk failed under it

Rules
- One segment is open at a time. A segment's life has a sequence number that no other life ever had.
- No more segments exist than the capacity allows; one is given up before another is made.
- One thread changes the book and its segments. Others may look at them without a lock: a row's last cells to be written
  are `fingerprint` and `alive`, and columns are replaced all at once.
- What is in memory too is not lost with its segment, but would have to be written again when it leaves memory: it is
  live, and is not written again before.
- A block is *live* while it was touched more recently than blocks of a share of all bytes stored: what an LRU of that
  size would keep. The share is the larger the less of what may be written again is used up.
- Given up is the segment with the fewest live bytes, the oldest of equals. Those of its live blocks that were used
  since they came to disk are written again, the most recently touched first, as long as that stays within
  `rewrite_share` of all writes; what was never asked for is not worth a second write.

Why not the order of writing: a conversation's first blocks are the oldest on disk as long as it goes on, and without
them the others are of no use. Measured on traces, warm tier of 20 % of all blocks, prefix hits of both tiers: in order
of writing 85.9 % (Claude sessions) and 33.7 % (conversations), by live bytes 90.5 and 36.0 %, by LRU, which no log can
keep, 91.1 and 36.4 %. With a fixed share of 0.85 it is 90.4 and 35.7 %, with 0.95 86.0 and 36.1 %: agents ask for most
blocks again, so that what may be rewritten runs out on the less recent ones.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.core.arena import SLOT_UNIT_BYTES as UNIT_BYTES
from kvstore.core.columns import Flags, Floats, Ids, Longs, Words

_FIRST_ROWS = 64
MOST_LOOKED_AT, FEW = 512, 16  # Segments, for each that is given up: some 5 ms.
_MOST_SAMPLES = 1 << 16  # Of all blocks, for the time that parts the live from the others: right to half a percent.


class SegmentState(IntEnum):
    FREE = 0
    OPEN = 1
    SEALED = 2
    BAD = 3


class RowCells:
    """The columns of a segment's blocks, row by row."""

    __slots__ = ("alive", "expires", "fingerprint", "hot", "size", "start", "touched", "used")

    def __init__(self, rows: Rows) -> None:
        self.start = rows.start.data
        self.size = rows.size.data
        self.fingerprint = rows.fingerprint.data
        self.used = rows.used.data.cast("B").cast("?")
        self.hot = rows.hot.data.cast("B").cast("?")
        self.alive = rows.alive.data.cast("B").cast("?")
        self.touched = rows.touched.data.cast("B").cast("d")
        self.expires = rows.expires.data.cast("B").cast("d")


class Rows:
    """The columns of a segment's blocks: one row a block, the first `count` in use. Never made longer: a segment takes
    others, so that who reads without a lock has all columns of one length."""

    __slots__ = ("alive", "cell", "count", "expires", "fingerprint", "hot", "size", "start", "touched", "used")

    def __init__(self, length: int) -> None:
        self.count, length = 0, max(1, length)  # What is empty has no cells.
        self.start: Ids = np.zeros(length, np.int32)  # Where a block begins, in UNIT_BYTES.
        self.size: Ids = np.zeros(length, np.int32)  # Likewise.
        self.fingerprint: Words = np.zeros(length, np.uint64)  # 0 once the block has gone.
        self.touched: Floats = np.zeros(length, np.float64)
        self.expires: Floats = np.zeros(length, np.float64)  # 0 = never.
        self.used: Flags = np.zeros(length, np.bool_)  # Touched since it came to disk.
        self.hot: Flags = np.zeros(length, np.bool_)  # In memory too, and not lost with this copy.
        self.alive: Flags = np.zeros(length, np.bool_)  # In the index, with this place.
        self.cell = RowCells(self)

    def __len__(self) -> int:
        return len(self.start)

    @staticmethod
    def of(
        *,
        starts: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        touched: Floats,
        expires: Floats,
        fingerprints: Words,
    ) -> Rows:
        """Makes rows of blocks in the order of their places, `starts` and `sizes` in bytes."""
        made, n = Rows(len(starts)), len(starts)
        made.start[:n], made.size[:n] = starts // UNIT_BYTES, -(-sizes // UNIT_BYTES)
        made.touched[:n], made.expires[:n], made.fingerprint[:n] = touched, expires, fingerprints
        made.alive[:n] = True
        made.count = n
        return made

    def copied(self, length: int) -> Rows:
        """Returns the rows in use in columns of another length."""
        made, n = Rows(length), self.count
        for name in ("start", "size", "fingerprint", "touched", "expires", "used", "hot", "alive"):
            getattr(made, name)[:n] = getattr(self, name)[:n]
        made.count = n
        return made

    def row_at(self, start: int) -> int | None:
        """Returns the row of the block that begins at a place, in bytes; None if there is none any more."""
        cell, count = self.cell, self.count
        row = bisect_left(cell.start, start // UNIT_BYTES, 0, count)
        is_there = row < count and cell.start[row] * UNIT_BYTES == start and cell.alive[row]
        return row if is_there else None


class Stored:
    """What all segments of a book hold together.

    `fingerprints` and `expires`: by a segment's number these columns of its rows, `expires` None where no block does.
    """

    __slots__ = ("block_count", "expires", "fingerprints", "size_bytes")

    def __init__(self) -> None:
        self.block_count = self.size_bytes = 0
        self.fingerprints: list[memoryview] = []
        self.expires: list[memoryview[float] | None] = []


class Segment:
    """One segment, and what it holds: a row for each block, in the order of their places; none is of no bytes.

    `block_count` and `alive_bytes` are those of the blocks that are there. `oldest`: the lowest sequence number that
    its file may still bear, 0 for none.
    """

    __slots__ = ("_stored", "alive_bytes", "block_count", "number", "oldest", "rows", "sequence", "state")

    def __init__(self, number: int, stored: Stored | None = None) -> None:
        self.number, self.state = number, SegmentState.FREE
        self.sequence = self.oldest = 0
        self._stored = stored or Stored()
        self.block_count = self.alive_bytes = 0
        missing = number + 1 - len(self._stored.fingerprints)
        if missing > 0:
            self._stored.expires.extend([None] * missing)
            self._stored.fingerprints.extend([memoryview(b"")] * missing)
        self._take(Rows(0))

    def __len__(self) -> int:
        """Number of blocks that were placed, those that are gone included."""
        return self.rows.count

    def empty(self) -> None:
        """Forgets all blocks."""
        self._take(Rows(0))
        self._count(-self.block_count, -self.alive_bytes)

    def add(
        self,
        start: int,
        size_bytes: int,
        touched: float,
        *,
        used: bool = False,
        hot: bool = False,
        fingerprint: int = 0,
        expires: float = 0.0,
    ) -> int:
        """Adds a block behind all others; returns its row.

        `used`: it comes from another segment, where it was. `hot`: it is in memory still.
        """
        rows = self.rows
        row = rows.count
        if row == len(rows):
            rows = rows.copied(max(_FIRST_ROWS, 2 * row))
            self._take(rows)
        cell = rows.cell
        if expires:
            self._stored.expires[self.number] = cell.expires
        cell.start[row], cell.size[row] = start // UNIT_BYTES, -(-size_bytes // UNIT_BYTES)
        cell.touched[row], cell.expires[row], cell.used[row], cell.hot[row] = touched, expires, used, hot
        cell.fingerprint[row] = fingerprint
        cell.alive[row] = True
        rows.count = row + 1
        self._count(1, cell.size[row] * UNIT_BYTES)
        return row

    def fill(self, rows: Rows) -> None:
        """Takes these rows, all of them alive and in the order of their places, for what it holds."""
        self.empty()
        self._take(rows)
        self._count(rows.count, int(rows.size[: rows.count].sum(dtype=np.int64)) * UNIT_BYTES)

    def drop(self, row: int) -> bool:
        """Notes that a block is there no more; false if it was not."""
        cell = self.rows.cell
        if not cell.alive[row]:
            return False
        cell.alive[row], cell.fingerprint[row] = False, 0
        self._count(-1, -cell.size[row] * UNIT_BYTES)
        return True

    def trim(self) -> None:
        """Gives back the rows that it will not need: nothing is added any more."""
        if len(self.rows) > self.rows.count:
            self._take(self.rows.copied(self.rows.count))

    def row_at(self, start: int) -> int | None:
        """Returns the row of the block that begins at a place, None if there is none any more."""
        return self.rows.row_at(start)

    def start_of(self, row: int) -> int:
        """Returns where a block begins, in bytes."""
        return int(self.rows.cell.start[row]) * UNIT_BYTES

    def live_bytes(self, since: float) -> int:
        """Bytes of blocks that are there, and in memory too or touched at `since` or later."""
        rows = self.rows
        return int(rows.size[: rows.count][self._live(since)].sum(dtype=np.int64)) * UNIT_BYTES

    def worth_rewriting(self, since: float) -> list[int]:
        """Rows of those blocks that were used, the most recently touched first."""
        rows = self.rows
        found = np.flatnonzero(self._live(since) & rows.used[: rows.count] & ~rows.hot[: rows.count])
        order: list[int] = found[np.argsort(-rows.touched[found], kind="stable")].tolist()
        return order

    def _take(self, rows: Rows) -> None:
        stored, number = self._stored, self.number
        stored.expires[number] = rows.cell.expires if rows.expires.any() else None
        stored.fingerprints[number] = rows.cell.fingerprint
        self.rows = rows

    def _live(self, since: float) -> Flags:
        rows = self.rows
        n = rows.count
        live: Flags = rows.alive[:n] & (rows.hot[:n] | (rows.touched[:n] >= since))
        return live

    def _count(self, blocks: int, size_bytes: int) -> None:
        self.block_count += blocks
        self.alive_bytes += size_bytes
        self._stored.block_count += blocks
        self._stored.size_bytes += size_bytes


@dataclass(frozen=True)
class SegmentRules:
    """See the rules above.

    A share `live_share` of all bytes is live while less than `strained_at` of what may be rewritten is used, and in
    proportion less beyond, down to `least_live_share` when all of it is.
    """

    segment_bytes: int
    live_share: float = 0.95
    least_live_share: float = 0.8
    strained_at: float = 0.6
    rewrite_share: float = 0.25


class SegmentBook:
    """The segments of one folder. One thread changes it; others may ask for segments and rows meanwhile.

    `lives`: by a segment's number the sequence number of the life it is in, 0 where it holds nothing.
    """

    def __init__(self, rules: SegmentRules, capacity_bytes: int) -> None:
        self.rules = rules
        self.capacity_count = 0
        self.resize(capacity_bytes)
        self.stored = Stored()
        self._segments: dict[int, Segment] = {}
        self._scores: dict[int, int] = {}  # By sequence number: live bytes, when a segment was last looked at.
        self._looked_at = 0
        self._free: dict[int, Segment] = {}  # Of these, those that can be begun; the first to be is the first.
        self._counts = dict.fromkeys(SegmentState, 0)
        self.lives: Longs = np.zeros(_FIRST_ROWS, np.int64)
        self._vacant = 0  # No number below it is free to be given to a new segment.
        self._next_sequence = 1
        self.written_bytes = self.rewritten_bytes = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    @property
    def by_number(self) -> dict[int, Segment]:
        """The segments; to be read only."""
        return self._segments

    def get(self, number: int, sequence: int) -> Segment | None:
        """Returns a segment if it still has that life, and holds something."""
        found = self._segments.get(number)
        if found is None or found.sequence != sequence or found.state not in (SegmentState.OPEN, SegmentState.SEALED):
            return None
        return found

    @property
    def sealed(self) -> list[Segment]:
        """The sealed segments, the oldest first."""
        found = [s for s in self._segments.values() if s.state is SegmentState.SEALED]
        return sorted(found, key=lambda s: s.sequence)

    @property
    def held(self) -> list[Segment]:
        """The segments that may hold something, the oldest first."""
        found = [s for s in self._segments.values() if s.state in (SegmentState.OPEN, SegmentState.SEALED)]
        return sorted(found, key=lambda s: s.sequence)

    def count(self, state: SegmentState) -> int:
        return self._counts[state]

    @property
    def has_room(self) -> bool:
        """Whether another segment can be begun without giving one up."""
        if self.excess_count:
            return False
        return len(self._segments) < self.capacity_count or bool(self._free)

    @property
    def last_sequence(self) -> int:
        """The highest sequence number that was given; 0 before the first."""
        return self._next_sequence - 1

    @property
    def oldest_sequence(self) -> int:
        """The lowest sequence number that a block can still lie under, on disk too: a free segment's last life is there
        until it is begun anew, and nobody knows what a bad one holds."""
        if self._counts[SegmentState.BAD]:
            return 0
        return min((s.oldest for s in self._segments.values() if s.oldest), default=self._next_sequence)

    # -- what there is -------------------------------------------------------------------------------------------

    def load(self, number: int, sequence: int) -> Segment:
        """Adds a sealed segment that was found at start; its blocks are the caller's to add."""
        made = self._make(number, SegmentState.SEALED)
        made.sequence = made.oldest = self.lives[number] = sequence
        self.pass_sequence(sequence)
        return made

    def load_free(self, number: int, sequence: int = 0) -> None:
        """Adds a segment that was found at start and counts as empty; `sequence`: of what its file still holds."""
        self._make(number, SegmentState.FREE).oldest = sequence
        self.pass_sequence(sequence)

    def load_bad(self, number: int) -> None:
        """Adds a segment that must be left alone."""
        self._make(number, SegmentState.BAD)

    def pass_sequence(self, sequence: int) -> None:
        """Never gives this sequence number, nor a lower one."""
        self._next_sequence = max(self._next_sequence, sequence + 1)

    def resize(self, capacity_bytes: int) -> None:
        """Changes how many segments there may be; at least two, one to write while another is read."""
        self.capacity_count = max(2, capacity_bytes // self.rules.segment_bytes)

    @property
    def excess_count(self) -> int:
        """How many segments there are beyond the capacity."""
        return max(0, len(self._segments) - self.capacity_count)

    def has(self, number: int, sequence: int, start: int) -> bool:
        """Whether a block lies there still."""
        segment = self.get(number, sequence)
        return segment is not None and segment.row_at(start) is not None

    def touch(
        self, number: int, sequence: int, start: int, now: float, *, used: bool = True, hot: bool = False
    ) -> None:
        """Notes when a block was touched, whether it was `used` since it came to disk, and whether it is in memory now;
        one that has gone is ignored."""
        segment = self.get(number, sequence)
        row = None if segment is None else segment.row_at(start)
        if segment is not None and row is not None:
            cell = segment.rows.cell
            cell.touched[row], cell.used[row] = max(now, cell.touched[row]), used or cell.used[row]
            cell.hot[row] = hot

    def drop(self, number: int, sequence: int, start: int) -> bool:
        """Notes that the index has a block no more; false, and ignored, if it has gone."""
        segment = self.get(number, sequence)
        row = None if segment is None else segment.row_at(start)
        return segment is not None and row is not None and segment.drop(row)

    # -- writing -------------------------------------------------------------------------------------------------

    def open(self) -> Segment | None:
        """Begins a life of the segment to write next, a free one or a new one; None where one must be given up before.

        A new one's number is at most the number of segments.
        """
        if self.excess_count:
            return None
        chosen = next(iter(self._free.values()), None)
        if chosen is None:
            if len(self._segments) >= self.capacity_count:
                return None
            while self._vacant in self._segments:
                self._vacant += 1
            chosen = self._make(self._vacant, SegmentState.FREE)
        chosen.sequence = self._next_sequence
        chosen.oldest = chosen.oldest or chosen.sequence
        self._turn(chosen, SegmentState.OPEN)
        self._next_sequence += 1
        return chosen

    def seal(self, segment: Segment) -> None:
        """Takes an open segment as sealed: all of it is durable."""
        assert segment.state is SegmentState.OPEN
        segment.trim()
        segment.oldest = segment.sequence
        self._turn(segment, SegmentState.SEALED)

    def fail(self, segment: Segment) -> None:
        """Leaves a segment alone from now on: the disk failed under it."""
        self._turn(segment, SegmentState.BAD)
        segment.empty()

    def wrote(self, size_bytes: int, *, again: bool = False) -> None:
        """Counts what was written; `again`: it had been written before."""
        self.written_bytes += size_bytes
        self.rewritten_bytes += size_bytes if again else 0

    def may_rewrite(self, size_bytes: int) -> bool:
        """Whether so many bytes more may be written again."""
        most = self.rules.rewrite_share * (self.written_bytes + size_bytes)
        return self.rewritten_bytes + size_bytes <= most

    # -- giving up -----------------------------------------------------------------------------------------------

    def live_since(self) -> float:
        """Returns the time whose later touches make a block live."""
        held = [s.rows for s in self.held]
        step = max(1, sum(rows.count for rows in held) // _MOST_SAMPLES)
        picked = [(rows, slice(0, rows.count, step)) for rows in held]
        none: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        alive = np.concatenate([rows.alive[p] for rows, p in picked] or [none])
        if not alive.any():
            return float("-inf")
        hot = np.concatenate([rows.hot[p] for rows, p in picked])[alive]
        touched = np.concatenate([rows.touched[p] for rows, p in picked])[alive]
        touched[hot] = float("inf")  # When they were last touched is known once they leave memory.
        sizes = np.concatenate([rows.size[p] for rows, p in picked])[alive]
        order = np.argsort(-touched, kind="stable")
        kept = np.cumsum(sizes[order], dtype=np.int64)
        last = int(np.searchsorted(kept, self.live_share * kept[-1], side="left"))
        return float(touched[order[min(last, len(order) - 1)]])

    @property
    def live_share(self) -> float:
        """Share of all bytes that counts as live now."""
        rules, most = self.rules, self.rules.rewrite_share * self.written_bytes
        used = 1.0 if most <= 0 else min(1.0, self.rewritten_bytes / most)
        strain = max(0.0, used - rules.strained_at) / (1 - rules.strained_at)
        return rules.live_share - strain * (rules.live_share - rules.least_live_share)

    def victim(self, since: float) -> Segment | None:
        """Chooses the sealed segment to give up next, None where there is none; `since` from `live_since`.

        Of many segments only some are looked at anew, in turn, and those that had least when they were.
        """
        sealed = self.sealed
        known = {s.sequence: self._scores.get(s.sequence) for s in sealed}
        turn = self._looked_at % max(1, len(sealed))
        anew = sealed[turn : turn + MOST_LOOKED_AT]
        self._looked_at = turn + len(anew)
        for segment in anew:
            known[segment.sequence] = segment.live_bytes(since)
        best = sorted(
            (s for s in sealed if known[s.sequence] is not None), key=lambda s: (known[s.sequence], s.sequence)
        )
        for segment in best[:FEW]:
            known[segment.sequence] = segment.live_bytes(since)
        self._scores = {sequence: score for sequence, score in known.items() if score is not None}
        return min(best[:FEW], key=lambda s: (self._scores[s.sequence], s.sequence), default=None)

    def drop_free(self) -> Segment | None:
        """Takes out a free segment, if there are too many and one is free; its room is the caller's to give back."""
        found = next(iter(self._free.values()), None) if self.excess_count else None
        if found is not None:
            self.give_up(found)
        return found

    def give_up(self, segment: Segment) -> bool:
        """Takes a segment as holding nothing any more; true if it has gone, since there were too many."""
        gone = self.excess_count > 0
        self._turn(segment, SegmentState.FREE)
        segment.empty()
        if gone:
            self._counts[SegmentState.FREE] -= 1
            del self._segments[segment.number], self._free[segment.number]
            self._vacant = min(self._vacant, segment.number)
        return gone

    def _make(self, number: int, state: SegmentState) -> Segment:
        made = self._segments[number] = Segment(number, self.stored)
        made.state = state
        self._counts[state] += 1
        if state is SegmentState.FREE:
            self._free[number] = made
        if number >= len(self.lives):
            lives: Longs = np.zeros(max(number + 1, 2 * len(self.lives)), np.int64)
            lives[: len(self.lives)] = self.lives
            self.lives = lives
        return made

    def _turn(self, segment: Segment, state: SegmentState) -> None:
        self._counts[segment.state] -= 1
        self._counts[state] += 1
        self._free.pop(segment.number, None)
        segment.state = state
        if state is SegmentState.FREE:
            self._free[segment.number] = segment
        self.lives[segment.number] = segment.sequence if state in (SegmentState.OPEN, SegmentState.SEALED) else 0
