"""Blocks that have gone: how often each was asked for, and when last. Bounded, without an object a block.

A table of buckets of a few places: a key's hash says in which bucket it is remembered, and there the one goes that came
first. Blocks are remembered until as many have gone after them as the horizon says; the table has twice as many places,
so that nearly none is forgotten before. The horizon matters: what comes back later than a cache could ever have kept it
says nothing of what is worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.columns import Bytes, Floats, Longs

WAYS = 8
_FEWEST = 64 * WAYS
_PLACES_PER_GHOST = 2
_WRAP = (1 << 32) - 1
_ENDS = np.arange(WAYS)


class GhostTable:
    """Counts and times by 64-bit hashes, of the last `horizon` blocks that went. 21 bytes a place, two places each."""

    __slots__ = (
        "_bucket_mask",
        "_cells",
        "_count",
        "_hash",
        "_hashes",
        "_next",
        "_number",
        "_time",
        "_went",
        "horizon",
    )

    def __init__(self) -> None:
        self.horizon = 0
        self._went = 0
        self._make(_FEWEST)

    def __len__(self) -> int:
        """How many places are taken, by ghosts and by what the horizon has passed."""
        return int(np.count_nonzero(self._count))

    @property
    def places(self) -> int:
        return (self._bucket_mask + 1) * WAYS

    def fit(self, horizon: int) -> None:
        """Sets the horizon. The table grows, by doubling, and never shrinks. What it knew is lost then: to put millions
        of them anew takes seconds, and it grows while memory fills for the first time, when little has gone."""
        self.horizon = horizon
        if _PLACES_PER_GHOST * horizon <= self.places:
            return
        self._make(_PLACES_PER_GHOST * horizon)

    def add(self, hashes: Sequence[int], counts: Bytes, times: Floats) -> None:
        """Remembers blocks, in the order in which they went."""
        numbers = (np.arange(self._went, self._went + len(hashes)) & _WRAP).astype(np.uint32)
        self._went += len(hashes)
        self._put(np.array(hashes, np.int64), counts, times, numbers)

    def take(self, of: int) -> tuple[int, float] | None:
        """Returns count and time of one block and forgets it, None if it is not known."""
        first = (of & self._bucket_mask) * WAYS
        if of not in self._hashes[first : first + WAYS].tolist():
            return None
        hashes, (counts, times, numbers) = self._hashes, self._cells
        for at in range(first, first + WAYS):
            if hashes[at] == of and counts[at]:
                found = counts[at], times[at]
                counts[at] = 0
                return found if (self._went - numbers[at]) & _WRAP <= self.horizon else None
        return None

    def take_many(self, hashes: Sequence[int]) -> tuple[Longs, Floats]:
        """As `take`: counts, 0 for those not known, and times."""
        of = np.array(hashes, np.int64)
        at = ((of & self._bucket_mask) * WAYS)[:, None] + _ENDS
        found, way = ((self._hash[at] == of[:, None]) & (self._count[at] > 0)).nonzero()
        counts, times = np.zeros(len(of), np.int64), np.zeros(len(of), np.float64)
        if len(found):
            at = at[found, way]
            is_recent = self._age(self._number[at]) <= self.horizon
            recent = at[is_recent]
            counts[found[is_recent]], times[found[is_recent]] = self._count[recent], self._time[recent]
            self._count[at] = 0
        return counts, times

    def _age(self, numbers: npt.NDArray[np.uint32]) -> Longs:
        """How many have gone since each went."""
        found: Longs = (self._went - numbers.astype(np.int64)) & _WRAP
        return found

    def _make(self, places: int) -> None:
        buckets = 1 << max(0, -(-max(_FEWEST, places) // WAYS) - 1).bit_length()
        self._bucket_mask = buckets - 1
        self._next: Bytes = np.zeros(buckets, np.uint8)
        self._hash: Longs = np.zeros(buckets * WAYS, np.int64)
        self._count: Bytes = np.zeros(buckets * WAYS, np.uint8)
        self._time: Floats = np.zeros(buckets * WAYS, np.float64)
        self._number: npt.NDArray[np.uint32] = np.zeros(buckets * WAYS, np.uint32)
        self._hashes, self._cells = self._hash.data, (self._count.data, self._time.data, self._number.data)

    def _put(self, hashes: Longs, counts: Bytes, times: Floats, numbers: npt.NDArray[np.uint32]) -> None:
        """Puts them in, in their order; those of one bucket one after the other."""
        if not len(hashes):
            return
        bucket = hashes & self._bucket_mask
        if len(set(bucket.tolist())) == len(bucket):  # Mostly: a table has many times the buckets of one call.
            at = bucket * WAYS + self._next[bucket]
            self._next[bucket] = (self._next[bucket] + 1) % WAYS
        else:
            order = np.argsort(bucket, kind="stable")
            bucket, hashes, counts = bucket[order], hashes[order], counts[order]
            times, numbers = times[order], numbers[order]
            starts = np.flatnonzero(np.concatenate(([True], bucket[1:] != bucket[:-1])))
            sizes = np.diff(starts, append=len(bucket))
            rank = np.arange(len(bucket)) - np.repeat(starts, sizes)
            at = bucket * WAYS + (self._next[bucket] + rank) % WAYS
            self._next[bucket[starts]] = (self._next[bucket[starts]] + sizes) % WAYS
        self._hash[at], self._count[at], self._time[at], self._number[at] = hashes, counts, times, numbers
