"""Which blocks the warm tier holds, for a question that must be answered at once: in memory, 16 bytes a slot.

Rules
- An open-addressing table from a block's fingerprint to the segment and row that it lies in. An entry counts only while
  that row is alive and bears the same fingerprint: giving up a segment or dropping a block changes nothing here. What
  does not count any more is taken by later entries, and is gone when the table is made anew.
- Two blocks of one fingerprint, one pair in 10^19, are one entry, the later one's: the other is a miss.
- One thread changes it; any thread asks, without a lock. A reference is written before its fingerprint, and a new table
  takes the place of the old one all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.core.columns import Words
from kvstore.core.segments import Segment, SegmentBook

_FIRST_SLOTS = 1 << 12
_MOST_USED, _USED_AT_FIRST = 0.6, 0.45  # Of the slots, before a table is made anew and afterwards, at most.
_STEP_ROWS = 1 << 14  # Moved at once: the interpreter lock is free in between.
_ROW_BITS, _ROW_MASK = 32, (1 << 32) - 1


def seed_of(digest: bytes) -> int:
    """Returns what makes the fingerprints of a namespace differ from those of others."""
    return int.from_bytes(digest[:8], "little")


def fingerprint_of(digest: bytes, key: bytes) -> int:
    return xxh3_64_intdigest(key, seed_of(digest)) or 1  # 0 is a slot that was never used.


class _Table(NamedTuple):
    """`cells`: of each slot a fingerprint, 0 where there never was one, and where that block lies. `mask`: of a
    fingerprint the cell to begin at, an even number."""

    cells: memoryview
    mask: int


class Residents:
    """The blocks that the segments of a book hold. Made of what the book has."""

    def __init__(self, book: SegmentBook) -> None:
        self._book = book
        self._used = 0
        self.slot_count = _FIRST_SLOTS
        self.rebuild()

    def has(self, digest: bytes, keys: Sequence[bytes], wall: float) -> list[bool]:
        """Tells of each block of a namespace whether it is there, and its time not over."""
        cells, mask = self._table
        stored, seed = self._book.stored, seed_of(digest)
        fingerprints, expires = stored.fingerprints, stored.expires
        found = []
        for key in keys:
            wanted = xxh3_64_intdigest(key, seed) or 1
            at = wanted & mask
            while (there := cells[at]) != wanted and there:
                at = (at + 2) & mask
            is_there = False
            if there:
                ref = cells[at + 1]
                number, row = ref >> _ROW_BITS, ref & _ROW_MASK
                column = fingerprints[number]
                if row < len(column) and column[row] == wanted:
                    times = expires[number]
                    is_there = times is None or row >= len(times) or not 0 < times[row] <= wall
            found.append(is_there)
        return found

    def find(self, digest: bytes, key: bytes) -> tuple[int, int] | None:
        """Returns the number of the segment that a block lies in, and its row there; None if it is not there."""
        cells, mask = self._table
        wanted = fingerprint_of(digest, key)
        at = wanted & mask
        while (there := cells[at]) != wanted and there:
            at = (at + 2) & mask
        if not there or not self._counts(cells[at + 1], wanted):
            return None
        return cells[at + 1] >> _ROW_BITS, cells[at + 1] & _ROW_MASK

    def put(self, segment: Segment, row: int) -> None:
        """Adds the block that was placed there. An older copy of it is dropped from its segment."""
        cells, mask = self._table
        wanted = segment.rows.cell.fingerprint[row]
        at, stale = wanted & mask, -1
        while (there := cells[at]) != wanted and there:
            if stale < 0 and not self._counts(cells[at + 1], there):
                stale = at
            at = (at + 2) & mask
        ref = segment.number << _ROW_BITS | row
        if there:
            older = cells[at + 1]
            cells[at + 1] = ref
            if older != ref and self._counts(older, wanted):
                self._book[older >> _ROW_BITS].drop(older & _ROW_MASK)
            return
        if stale >= 0:
            at = stale
        else:
            self._used += 1
        cells[at + 1] = ref
        cells[at] = wanted
        if self._used > _MOST_USED * self.slot_count:
            self.rebuild()

    def rebuild(self) -> None:
        """Makes the table anew from the rows of all segments, of a size that leaves room to grow."""
        while self._book.stored.block_count > _USED_AT_FIRST * self.slot_count:
            self.slot_count *= 2
        cells: Words = np.zeros(2 * self.slot_count, np.uint64)
        self._used = 0
        found, refs, waiting = [], [], 0
        for segment in self._book.held:
            rows = segment.rows
            for at in range(0, rows.count, _STEP_ROWS):
                places = np.flatnonzero(rows.alive[at : min(at + _STEP_ROWS, rows.count)]) + at
                found.append(rows.fingerprint[places])
                refs.append(places.astype(np.uint64) | np.uint64(segment.number << _ROW_BITS))
                waiting += len(places)
                if waiting >= _STEP_ROWS:
                    self._used += _fill(cells, np.concatenate(found), np.concatenate(refs))
                    found, refs, waiting = [], [], 0
        if waiting:
            self._used += _fill(cells, np.concatenate(found), np.concatenate(refs))
        self._table = _Table(cells.data, 2 * self.slot_count - 2)

    def _counts(self, ref: int, wanted: int) -> bool:
        """Whether a block of that fingerprint lies there still."""
        column, row = self._book.stored.fingerprints[ref >> _ROW_BITS], ref & _ROW_MASK
        return row < len(column) and column[row] == wanted


def _fill(cells: Words, wanted: Words, refs: Words) -> int:
    """Puts entries into a table of free slots enough, over those of the same fingerprint; returns how many are new."""
    mask, used = len(cells) - 2, 0
    places = (wanted & np.uint64(mask)).view(np.int64)
    while len(wanted):
        there = cells[places]
        free = there == 0
        mine = free | (there == wanted)
        at = places[mine]
        cells[at], cells[at + 1] = wanted[mine], refs[mine]  # Of several that want a slot the last has it.
        left = cells[places] != wanted
        used += int(np.count_nonzero(free & ~left & (cells[places + 1] == refs)))
        places, wanted, refs = (places[left] + 2) & mask, wanted[left], refs[left]
    return used
