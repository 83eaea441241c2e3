"""The one interface of eviction policies, and the queue they are built from.

A policy orders the blocks of one *cohort*: the blocks of one namespace with one slot size. The store asks for victims;
it alone decides which cohort must give. Blocks under a lease (holds > 0) are never given as victims.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import numpy as np

from kvstore.core.columns import Flags, Floats, Ids, Places
from kvstore.core.few import Rows

SAME_REQUEST_S = 0.1  # A touch sooner than this belongs to the request before: its writer's own, or who waited for it.
OVER = 4  # In the column `kind`: a block of what is over, the next to go.
PARKED = -1  # Place of a block that reached the old end while it was held.
_FIRST_LOG = 64


@dataclass(frozen=True)
class TouchHint:
    """What the caller of a request said of its blocks' next use; `next_use` as on the wire, None = no statement."""

    next_use: int | None = None
    session_tag: int = 0


NO_HINT = TouchHint()


class EvictionPolicy(Protocol):
    """Chooses the order in which the blocks of a cohort go.

    All identifiers in one call are distinct. Every method costs what it handles, not what is stored (amortised).
    `takes_hints`: what callers say of the next use counts.
    """

    takes_hints: ClassVar[bool]

    def touch(self, blocks: Rows, now: float, hint: TouchHint, *, asked: bool = True) -> None:
        """Takes in the blocks of one request, given tail first; unknown ones enter. They share one logical time.

        `asked`: a reader wants them. Of a writer, who names the chain that it continues, only what enters is news.
        """

    def over(self, blocks: Ids, session_tag: int) -> int:
        """Says that the session which asked for these blocks last is over, given tail first; returns of how many that
        is believed: those that no other session asked for."""

    def remove(self, block: int) -> None:
        """Forgets a block that left for another reason than `take`. Unknown blocks are ignored."""

    def take(self, count: int) -> Ids:
        """Removes and returns up to `count` victims, the worst first, none of them held.

        Fewer than `count` only if every block that is left is held. Held blocks in the way are parked: they come back
        with `unpark`, and are looked at once, however often victims are asked for.
        """

    def peek(self, count: int) -> Ids:
        """Returns up to `count` blocks that would go next, without removing any."""

    def order(self) -> Ids:
        """Returns all blocks, the one that would go next first, those that are held in their places, parked ones left
        out. Costs the number stored: for the end of a shard's life."""

    def unpark(self, blocks: Ids, now: float) -> None:
        """Says that the holds on these blocks, given tail first, ended; those that were parked can go again."""

    def idle_since(self) -> float | None:
        """Returns the time of the last touch of the next victim, None if there is none, -inf if it is of what is over.
        Compares cohorts.

        Held blocks in the way are parked, as by `take`.
        """

    def __len__(self) -> int:
        """Number of blocks in the order, parked ones not counted."""


class BlockQueue:
    """Blocks in the order they were appended, oldest first; appending a block again moves it to the young end.

    An append-only log with lazy deletion: `place[block]` is the number of its live entry, so that an older entry of
    the same block is known to be stale. Entries are numbered from `_base` on, in numbers no other queue uses. The log
    is compacted when it is full and at least half stale, and doubled otherwise: O(1) amortised a block, a few numpy
    calls a batch.
    Owns: the column of places for the blocks in it (0 = not in it). Blocks of one call must be distinct.
    """

    __slots__ = ("_base", "_cell", "_count", "_head", "_log", "_place", "_places", "_tail")

    def __init__(self, places: Places) -> None:
        self._places, self._place, self._cell = places, places.at, places.cell
        self._log: Ids = np.empty(_FIRST_LOG, np.int32)
        self._base = places.take(_FIRST_LOG)
        self._head = self._tail = self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, blocks: Rows) -> None:
        """Puts blocks at the young end, in their order."""
        size = len(blocks)
        if self._tail + size > len(self._log):
            self._make_room(size)
        if isinstance(blocks, list):
            self._append_few(blocks)
            return
        place, tail = self._place, self._tail
        self._count += size - int(np.count_nonzero(place[blocks] > 0))
        self._log[tail : tail + size] = blocks
        self._tail = tail + size
        place[blocks] = np.arange(self._base + tail, self._base + tail + size)

    def _append_few(self, blocks: list[int]) -> None:
        log, cell, base = self._log, self._cell, self._base
        for at, block in enumerate(blocks, self._tail):
            self._count += cell[block] <= 0
            log[at] = block
            cell[block] = base + at
        self._tail += len(blocks)

    def remove(self, block: int) -> None:
        """Takes a block out; one that is not in it is ignored."""
        if self._cell[block] > 0:
            self._count -= 1
        self._cell[block] = 0

    def left(self, count: int) -> None:
        """Says that so many blocks that were in the queue, parked ones not counted, have been given place 0."""
        self._count -= count

    def oldest(self, holds: Ids) -> int | None:
        """Returns the oldest block without a hold; stale entries before it are dropped, held blocks parked."""
        while self._head < self._tail:
            block = int(self._log[self._head])
            if self._cell[block] == self._base + self._head:
                if holds[block] == 0:
                    return block
                self._cell[block] = PARKED
                self._count -= 1
            self._head += 1
        return None

    def take(self, count: int, holds: Ids, *, times: Floats | None = None, limit: float = inf) -> Ids:
        """Removes and returns up to `count` of the oldest blocks without a hold; held ones in the way are parked.

        With `times`, which follow the order: none that is younger than `limit`.
        """
        found: list[Ids] = []
        while count > 0 and self._head < self._tail:
            chunk, live = self._chunk(self._head, count)
            if times is not None and limit < inf:
                young = np.flatnonzero(live & (times[chunk] > limit))
                if len(young):
                    chunk, live = chunk[: young[0]], live[: young[0]]
                    if not len(chunk):
                        break
            free = np.flatnonzero(live & (holds[chunk] == 0))
            end = len(chunk) if len(free) < count else int(free[count - 1]) + 1
            self._leave(chunk[:end], live[:end], holds)
            victims = chunk[free[:count]]
            self._place[victims] = 0
            self._head += end
            count -= len(victims)
            found.append(victims)
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def first(self) -> int | None:
        """Returns the oldest block, held or not; stale entries before it are dropped."""
        self._skip_stale()
        return int(self._log[self._head]) if self._head < self._tail else None

    def youngest(self, holds: Ids) -> int | None:
        """Returns the youngest block without a hold; stale entries behind it are dropped, held blocks parked."""
        while self._head < self._tail:
            last = self._tail - 1
            block = int(self._log[last])
            if self._cell[block] == self._base + last:
                if holds[block] == 0:
                    return block
                self._cell[block] = PARKED
                self._count -= 1
            self._tail = last
        return None

    def take_young(self, count: int, holds: Ids, *, times: Floats, since: float) -> Ids:
        """Removes and returns up to `count` of the youngest blocks without a hold, the youngest first, none of them
        older than `since`; held ones in the way are parked."""
        found: list[Ids] = []
        while count > 0 and self._head < self._tail:
            start = max(self._head, self._tail - max(32, 2 * count))
            chunk = self._log[start : self._tail][::-1]
            live = self._place[chunk] == np.arange(self._base + self._tail - 1, self._base + start - 1, -1)
            old = (live & (times[chunk] < since)).nonzero()[0]
            if len(old):
                chunk, live = chunk[: old[0]], live[: old[0]]
                if not len(chunk):
                    break
            free = (live & (holds[chunk] == 0)).nonzero()[0]
            end = len(chunk) if len(free) < count else int(free[count - 1]) + 1
            victims = chunk[free[:count]]
            self._leave(chunk[:end], live[:end], holds)
            self._place[victims] = 0
            self._tail -= end
            count -= len(victims)
            found.append(victims)
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def peek_young(self, count: int, holds: Ids) -> Ids:
        """Returns up to `count` of the youngest blocks without a hold, the youngest first, looking at no more than 4 x
        count entries."""
        start = max(self._head, self._tail - max(32, 4 * count))
        chunk = self._log[start : self._tail][::-1]
        live = self._place[chunk] == np.arange(self._base + self._tail - 1, self._base + start - 1, -1)
        free: Ids = chunk[live & (holds[chunk] == 0)][:count]
        return free

    def peek(self, count: int, holds: Ids) -> Ids:
        """Returns up to `count` of the oldest blocks without a hold, looking at no more than 4 x count entries from the
        oldest block on."""
        self._skip_stale()
        chunk, live = self._chunk(self._head, 2 * count)
        free: Ids = chunk[live & (holds[chunk] == 0)][:count]
        return free

    def order(self) -> Ids:
        """Returns all blocks, the oldest first."""
        entries = self._log[self._head : self._tail]
        live: Flags = self._place[entries] == np.arange(self._base + self._head, self._base + self._tail)
        found: Ids = entries[live]
        return found

    def take_while_older(self, limit: float, times: Floats, most: int) -> Ids:
        """Removes and returns the leading blocks whose `times` are at or before `limit`, about `most` of them."""
        found: list[Ids] = []
        while self._head < self._tail and most > 0:
            chunk, live = self._chunk(self._head, 64)
            young = np.flatnonzero(live & (times[chunk] > limit))
            end = int(young[0]) if len(young) else len(chunk)
            gone = chunk[:end][live[:end]]
            self._place[gone] = 0
            self._count -= len(gone)
            most -= len(gone)
            self._head += end
            found.append(gone)
            if len(young):
                break
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def unpark(self, blocks: Ids) -> Ids:
        """Puts those of the blocks that were parked at the young end, in their order, and returns them."""
        parked: Ids = blocks[self._place[blocks] == PARKED]
        if len(parked):
            self.append(parked)
        return parked

    def _skip_stale(self) -> None:
        """Drops stale entries before the oldest block."""
        while self._head < self._tail:
            _, live = self._chunk(self._head, 64)
            first = int(np.argmax(live))
            if live[first]:
                self._head += first
                return
            self._head += len(live)

    def _chunk(self, start: int, count: int) -> tuple[Ids, Flags]:
        """Returns the next entries and which of them are live."""
        end = min(self._tail, start + max(32, 2 * count))
        chunk = self._log[start:end]
        return chunk, self._place[chunk] == np.arange(self._base + start, self._base + end)

    def _leave(self, chunk: Ids, live: Flags, holds: Ids) -> None:
        passed = chunk[live]
        self._count -= len(passed)
        self._place[passed[holds[passed] > 0]] = PARKED

    def _make_room(self, size: int) -> None:
        """Drops stale entries; doubles the log if that leaves it more than half full."""
        start, tail = self._head, self._tail
        entries = self._log[start:tail]
        kept = entries[self._place[entries] == np.arange(self._base + start, self._base + tail)]
        length = len(self._log)
        while length < 2 * (len(kept) + size):
            length *= 2
        log = self._log if length == len(self._log) else np.empty(length, np.int32)
        log[: len(kept)] = kept
        self._log, self._head, self._tail = log, 0, len(kept)
        self._base = self._places.take(length)
        self._place[kept] = np.arange(self._base, self._base + len(kept))
