"""Blocks that have gone: how often each was asked for, and when last. Bounded, without an object a block.

A table of buckets of a few places: a key's hash says in which bucket it is remembered, and there the one goes that came
first. So it remembers about as many as it has places, the later ones, and searches no further than one bucket. (With
one place a bucket it would forget a third of what is asked for again within half as many as it has places.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.columns import Bytes, Floats, Longs

WAYS = 8
_FEWEST = 128 * WAYS
_ENDS = tuple(range(WAYS))


class GhostTable:
    """Counts and times by 64-bit hashes. 17 bytes a place."""

    __slots__ = ("_bucket_mask", "_cell", "_count", "_hash", "_next", "_time")

    def __init__(self, places: int = _FEWEST) -> None:
        self._make(places)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._count))

    @property
    def places(self) -> int:
        return (self._bucket_mask + 1) * WAYS

    def fit(self, places: int) -> None:
        """Grows, by doubling, to at least so many places; what is remembered stays. It never shrinks."""
        if places <= self.places:
            return
        hashes, counts, times = self._hash, self._count, self._time
        self._make(places)
        there = np.flatnonzero(counts)
        there = there[np.argsort(times[there], kind="stable")]
        for way in range(WAYS):  # Those of one bucket one after the other.
            some = there[way::WAYS]
            self._put(hashes[some], counts[some], times[some])

    def add(self, hashes: Sequence[int], counts: Bytes, times: Floats) -> None:
        """Remembers blocks. Of two in one call that share a bucket one may be forgotten."""
        self._put(np.array(hashes, np.int64), counts, times)

    def take(self, of: int) -> tuple[int, float] | None:
        """Returns count and time of one block and forgets it, None if it is not known."""
        cell, first = self._cell, (of & self._bucket_mask) * WAYS
        for way in _ENDS:
            if cell[first + way] == of and self._count[first + way]:
                found = int(self._count[first + way]), float(self._time[first + way])
                self._count[first + way] = 0
                return found
        return None

    def take_many(self, hashes: Sequence[int]) -> tuple[Longs, Floats]:
        """As `take`: counts, 0 for those not known, and times."""
        of = np.array(hashes, np.int64)
        at = ((of & self._bucket_mask) * WAYS)[:, None] + np.arange(WAYS)
        matches = (self._hash[at] == of[:, None]) & (self._count[at] > 0)
        at = at[np.arange(len(of)), matches.argmax(axis=1)]
        counts = np.where(matches.any(axis=1), self._count[at], 0).astype(np.int64)
        self._count[at[counts > 0]] = 0
        return counts, self._time[at]

    def _make(self, places: int) -> None:
        buckets = 1 << max(0, -(-max(_FEWEST, places) // WAYS) - 1).bit_length()
        self._bucket_mask = buckets - 1
        self._next: Bytes = np.zeros(buckets, np.uint8)
        self._hash: Longs = np.zeros(buckets * WAYS, np.int64)
        self._count: Bytes = np.zeros(buckets * WAYS, np.uint8)
        self._time: Floats = np.zeros(buckets * WAYS, np.float64)
        self._cell = self._hash.data

    def _put(self, hashes: Longs, counts: Bytes, times: Floats) -> None:
        bucket = hashes & self._bucket_mask
        at = bucket * WAYS + self._next[bucket]
        self._next[bucket] = (self._next[bucket] + 1) % WAYS
        self._hash[at], self._count[at], self._time[at] = hashes, counts, times
