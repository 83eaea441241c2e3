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
    fingerprints: memoryview
    refs: memoryview
    mask: int


class Residents:
    """The blocks that the segments of a book hold. Made of what the book has."""

    def __init__(self, book: SegmentBook) -> None:
        self._book = book
        self._used = 0
        self._table = _Table(memoryview(b""), memoryview(b""), _FIRST_SLOTS - 1)
        self.rebuild()

    @property
    def slot_count(self) -> int:
        return self._table.mask + 1

    def has(self, digest: bytes, keys: Sequence[bytes], wall: float) -> list[bool]:
        """Tells of each block of a namespace whether it is there, and its time not over."""
        fingerprints, refs, mask = self._table
        segments, seed, found = self._book.by_number, seed_of(digest), []
        for key in keys:
            wanted = xxh3_64_intdigest(key, seed) or 1
            slot = wanted & mask
            while (there := fingerprints[slot]) != wanted and there:
                slot = (slot + 1) & mask
            is_there = False
            if there:
                ref = refs[slot]
                segment = segments.get(ref >> _ROW_BITS)
                if segment is not None:
                    rows, row = segment.rows, ref & _ROW_MASK
                    if row < rows.count:
                        cell = rows.cell
                        is_there = (
                            cell.alive[row] and cell.fingerprint[row] == wanted and not 0 < cell.expires[row] <= wall
                        )
            found.append(is_there)
        return found

    def put(self, segment: Segment, row: int) -> None:
        """Adds the block that was placed there. An older copy of it is dropped from its segment."""
        fingerprints, refs, mask = self._table
        wanted = segment.rows.cell.fingerprint[row]
        slot, stale = wanted & mask, -1
        while (there := fingerprints[slot]) != wanted and there:
            if stale < 0 and self._at(refs[slot], there) is None:
                stale = slot
            slot = (slot + 1) & mask
        ref = segment.number << _ROW_BITS | row
        if there:
            older = self._at(refs[slot], wanted)
            refs[slot] = ref
            if older is not None and older != (segment, row):
                older[0].drop(older[1])
            return
        if stale >= 0:
            slot = stale
        else:
            self._used += 1
        refs[slot] = ref
        fingerprints[slot] = wanted
        if self._used > _MOST_USED * (mask + 1):
            self.rebuild()

    def rebuild(self) -> None:
        """Makes the table anew from the rows of all segments, of a size that leaves room to grow."""
        slots = max(_FIRST_SLOTS, self.slot_count)
        while self._book.stored.block_count > _USED_AT_FIRST * slots:
            slots *= 2
        fingerprints: Words = np.zeros(slots, np.uint64)
        refs: Words = np.zeros(slots, np.uint64)
        self._used = 0
        found, refs_found, waiting = [], [], 0
        for segment in self._book.held:
            rows = segment.rows
            for at in range(0, rows.count, _STEP_ROWS):
                places = np.flatnonzero(rows.alive[at : min(at + _STEP_ROWS, rows.count)]) + at
                found.append(rows.fingerprint[places])
                refs_found.append(places.astype(np.uint64) | np.uint64(segment.number << _ROW_BITS))
                waiting += len(places)
                if waiting >= _STEP_ROWS:
                    self._used += _fill(fingerprints, refs, np.concatenate(found), np.concatenate(refs_found))
                    found, refs_found, waiting = [], [], 0
        if waiting:
            self._used += _fill(fingerprints, refs, np.concatenate(found), np.concatenate(refs_found))
        self._table = _Table(fingerprints.data, refs.data, slots - 1)

    def _at(self, ref: int, wanted: int) -> tuple[Segment, int] | None:
        """Returns the segment and row that an entry speaks of, None if the entry does not count any more."""
        segment, row = self._book.by_number.get(ref >> _ROW_BITS), ref & _ROW_MASK
        if segment is None or row >= segment.rows.count:
            return None
        cell = segment.rows.cell
        return (segment, row) if cell.alive[row] and cell.fingerprint[row] == wanted else None


def _fill(fingerprints: Words, refs: Words, wanted: Words, refs_wanted: Words) -> int:
    """Puts entries into a table of free slots enough, over those of the same fingerprint; returns how many are new."""
    mask, used = len(fingerprints) - 1, 0
    slots = (wanted & np.uint64(mask)).view(np.int64)
    while len(wanted):
        there = fingerprints[slots]
        free = there == 0
        mine = free | (there == wanted)
        at = slots[mine]
        fingerprints[at], refs[at] = wanted[mine], refs_wanted[mine]  # Of several that want a slot the last has it.
        won = free & (fingerprints[slots] == wanted) & (refs[slots] == refs_wanted)
        used += int(np.count_nonzero(won))
        left = fingerprints[slots] != wanted
        slots, wanted, refs_wanted = (slots[left] + 1) & mask, wanted[left], refs_wanted[left]
    return used
