"""Which blocks of memory are written to disk next, so that evicting them later costs nothing. Pure.

Rules
- Written are the coldest blocks, before they must go: a block that is evicted has its copy on disk already, or never
  gets one. Whoever needs room waits for no disk.
- Nothing is written while memory has room to spare. A block that came from disk has its copy there still.
- Only whole blocks are written: a part less makes a block useless to its readers. Nothing is written of what is over.
- A budget of bytes a second bounds the wear of the disk; what a quiet time leaves of it serves the next busy one. While
  it lasts everything is written; when only a few seconds' worth is left, only blocks that were asked for again, and of
  a chain the head before the tail, which is of no use without it; when all is gone, nothing. A block that was dropped
  unwritten and is stored anew counts as asked for again (`Ghosts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.core.columns import Flags, Ids, Longs
from kvstore.core.eviction.base import OVER, EvictionPolicy
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records

MOST_ROWS = 8192  # Looked at in one cohort: a fifth of a millisecond.
FEWEST_ROWS = 16
DOUBLED_SHARE = 0.03  # Of the disk, for what is in memory still: it is lost to what is not.
BURST_FACTOR = 1.25
# What of an unused budget can be saved up: flash wears by what is written in a year, while load comes in waves.
SAVED_S = 600.0
STRAINED_S = 5.0  # So much left, or less, is kept for what is worth most.
GHOSTS_PER_BLOCK = 4
_FEWEST_GHOSTS, _MOST_GHOSTS = 4096, 1 << 20


class Ahead(NamedTuple):
    """Room for so many blocks of a namespace, each part of which takes a slot of that size.

    `spared`: blocks that may be as cold as those that make room, and that whoever needs the room does not let go.
    """

    namespace: Namespace
    slot_bytes: int
    blocks: int
    spared: int = 0

    @property
    def rows(self) -> int:
        """How many blocks from the coldest on are to be written, so that those that make room are."""
        return self.blocks + self.spared

    @property
    def size_bytes(self) -> int:
        """What one block takes."""
        return self.slot_bytes * self.namespace.parts_per_block

    @property
    def policy(self) -> EvictionPolicy | None:
        """Orders the blocks that make room; None where there is none."""
        return self.namespace.cohorts.get(self.slot_bytes)

    def is_of(self, namespace: Namespace, slot_bytes: int) -> bool:
        return namespace is self.namespace and slot_bytes == self.slot_bytes


@dataclass(frozen=True)
class CleaningRules:
    """`share` of the memory, the coldest, is kept written, but at most `DOUBLED_SHARE` of the disk.

    `budget_bytes` a second may be written, None = no limit.
    """

    share: float = 0.5
    budget_bytes: int | None = None


class WriteBudget:
    """A bucket of bytes that fills with time. `spend` takes what was written, whoever wrote it."""

    def __init__(self, rate_bytes: int | None, now: float) -> None:
        self.rate_bytes = rate_bytes
        rate = rate_bytes or 0
        self._most, self._strained = rate * SAVED_S, rate * STRAINED_S
        # Little to begin with, so that one that is started again and again writes no more.
        self._left, self._at, self._written = 2 * self._strained, now, 0

    def spend(self, written_bytes: int, now: float) -> None:
        """Takes the count of all bytes ever written."""
        if self.rate_bytes is None:
            return
        filled = self._left + self.rate_bytes * (now - self._at)
        self._left, self._at = min(self._most, filled) - (written_bytes - self._written), now
        self._written = written_bytes

    @property
    def left_bytes(self) -> float:
        return float("inf") if self.rate_bytes is None else max(0.0, self._left)

    @property
    def is_strained(self) -> bool:
        """Whether less is left than all that could be written, by far."""
        return self.rate_bytes is not None and self._left <= self._strained

    @property
    def left_for_once_bytes(self) -> float:
        """What is left for blocks that were not asked for again."""
        return float("inf") if self.rate_bytes is None else max(0.0, self._left - self._strained)


class Ghosts:
    """Keys of blocks that were dropped unwritten, the latest of them; each is known by a number of 64 bits."""

    def __init__(self, most: int) -> None:
        self._most = max(_FEWEST_GHOSTS, min(_MOST_GHOSTS, most))
        self._known: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, namespace: int, key: bytes) -> None:
        self._known[hash((namespace, key))] = None
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def take(self, namespace: int, key: bytes) -> bool:
        """Whether the key is known; it is no more after that."""
        name = hash((namespace, key))
        if name not in self._known:
            return False
        del self._known[name]
        return True


class Cleaner:
    """Chooses rows of one shard. `lives[number]` is the sequence of what a segment holds now, 0 = nothing."""

    def __init__(self, records: Records, rules: CleaningRules, now: float) -> None:
        self._records, self.rules = records, rules
        self.budget = WriteBudget(rules.budget_bytes, now)
        self.ghosts = Ghosts(GHOSTS_PER_BLOCK * _FEWEST_GHOSTS)
        self.share, self.window_bytes = rules.share, int(rules.share * records.arena.total_bytes)
        self.largest_bytes = records.arena.total_bytes  # A block larger than this cannot be written.

    def fit(self, disk_bytes: int, burst_bytes: float = 0.0) -> None:
        """Takes in how large the disk is, and what single calls took of memory of late: a window smaller than that
        would lose blocks to each of them."""
        total_bytes = self._records.arena.total_bytes
        wanted_bytes = max(DOUBLED_SHARE * disk_bytes, BURST_FACTOR * burst_bytes)
        self.share = min(self.rules.share, wanted_bytes / total_bytes)
        self.window_bytes = int(self.share * total_bytes)

    def choose(
        self, room_bytes: int, lives: Longs, *, at_least_one: bool = False, waited_for: Sequence[Ahead] = ()
    ) -> list[int]:
        """Returns the blocks to write now, `room_bytes` at most, the coldest of each cohort first.

        `at_least_one`: one that is larger than the room is written alone. `waited_for`: comes first, and however little
        of memory is to be kept written.
        """
        room_bytes = int(min(room_bytes, self.budget.left_bytes))
        once_bytes, reuses = self.budget.left_for_once_bytes, self._records.blocks.cell.reuses
        chosen: list[int] = []
        may_be_large = at_least_one and room_bytes > 0
        arena = self._records.arena
        is_full = arena.free_page_count * arena.page_bytes < self.window_bytes
        for slot_bytes, namespace, policy in self._in_turn(waited_for):
            if namespace.rules.spare or namespace.is_being_purged:
                continue
            needed = sum(ahead.rows for ahead in waited_for if ahead.is_of(namespace, slot_bytes))
            if not (needed or is_full or self._near_its_limit(namespace)):
                continue
            size = slot_bytes * namespace.parts_per_block
            if size > self.largest_bytes:
                continue
            rows = self._dirty(policy, namespace, lives, needed)
            for row in (rows[::-1] if self.budget.is_strained else rows).tolist():
                if size > room_bytes and not (may_be_large and not chosen):
                    break
                if not reuses[row]:
                    if once_bytes <= 0:
                        continue
                    once_bytes -= size
                room_bytes -= size
                chosen.append(row)
        return chosen

    def _in_turn(self, waited_for: Sequence[Ahead]) -> Iterator[tuple[int, Namespace, EvictionPolicy]]:
        """Yields all cohorts, each with the size of its slots, those that somebody waits for first."""
        first = {id(ahead.policy): ahead for ahead in waited_for}  # Several may wait for the same.
        for ahead in first.values():
            if ahead.policy is not None:
                yield ahead.slot_bytes, ahead.namespace, ahead.policy
        for key, cohorts in self._records.cohorts.items():
            for index, policy in cohorts.items():
                if id(policy) not in first:
                    yield key.slot_bytes, self._records.namespaces[index], policy

    def is_ahead(self, ahead: Ahead) -> bool:
        """Whether so many blocks of a namespace could be evicted now without losing one that has no copy, and could
        have one."""
        policy = ahead.policy
        if not ahead.blocks or policy is None:
            return True
        arena, (namespace, slot_bytes, blocks, _) = self._records.arena, ahead
        need_bytes, limit = blocks * slot_bytes * namespace.parts_per_block, namespace.rules.max_bytes
        is_within = limit is None or namespace.hot_bytes + need_bytes <= limit
        if is_within and arena.free_page_count * arena.page_bytes >= need_bytes:
            return True
        rows = _coldest(policy, ahead.rows)
        columns = self._records.blocks
        is_whole = columns.present[rows] == namespace.parts_per_block
        is_wanted = is_whole & (columns.kind[rows] != OVER)
        return not bool(((columns.disk_sequence[rows] == 0) & is_wanted).any())

    def is_being_written(self, ahead: Ahead) -> bool:
        """Whether one of the blocks that make room is on its way to disk."""
        policy = ahead.policy
        return policy is not None and bool(self._records.blocks.writing[_coldest(policy, ahead.rows)].any())

    def order_for_flush(self) -> list[int]:
        """Returns all blocks, what is worth most first: those touched last, and of a chain its head before its tail."""
        found: list[Ids] = []
        for cohorts in self._records.cohorts.values():
            for index, policy in cohorts.items():
                namespace = self._records.namespaces[index]
                if not (namespace.rules.spare or namespace.is_being_purged):
                    found.append(policy.order()[::-1])
        rows = np.concatenate(found) if found else np.empty(0, np.int32)
        order: list[int] = rows[np.argsort(-self._records.blocks.touched[rows], kind="stable")].tolist()
        return order

    def is_dirty(self, row: int) -> bool:
        """Whether a row has a block that is whole, is not being written, and has no copy."""
        cell = self._records.blocks.cell
        if self._records.blocks.key[row] is None or cell.doomed[row] or cell.writing[row] or cell.disk_sequence[row]:
            return False
        if cell.kind[row] == OVER:
            return False
        return bool(cell.present[row] == self._records.namespaces[cell.namespace[row]].parts_per_block)

    def _near_its_limit(self, namespace: Namespace) -> bool:
        limit = namespace.rules.max_bytes
        return limit is not None and namespace.hot_bytes > (1 - self.share) * limit

    def _dirty(self, policy: EvictionPolicy, namespace: Namespace, lives: Longs, needed: int) -> Ids:
        count = max(FEWEST_ROWS, min(MOST_ROWS, max(needed, int(self.share * len(policy)))))
        rows = _coldest(policy, count)
        return rows[self._is_dirty(rows, namespace, lives)]

    def _is_dirty(self, rows: Ids, namespace: Namespace, lives: Longs) -> Flags:
        """Whether each block is whole, not being written, and without a copy; notes copies that have gone."""
        blocks = self._records.blocks
        sequence = blocks.disk_sequence[rows]
        gone = (sequence > 0) & (lives[np.minimum(blocks.disk_segment[rows], len(lives) - 1)] != sequence)
        blocks.disk_sequence[rows[gone]] = 0
        dirty: Flags = (sequence == 0) | gone
        dirty &= ~blocks.writing[rows] & (blocks.present[rows] == namespace.parts_per_block)
        dirty &= blocks.kind[rows] != OVER
        return dirty


def _coldest(policy: EvictionPolicy, count: int) -> Ids:
    """Returns the blocks that would go first, so many of them or all; those that are held stand among them."""
    count = asked = min(count, MOST_ROWS)
    while True:
        rows = policy.peek(asked)
        if len(rows) >= count or asked >= min(len(policy), MOST_ROWS):
            return rows[:count]
        asked *= 2
