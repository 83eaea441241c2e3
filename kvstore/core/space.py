"""Making room: which blocks go when slots are needed, and when a page changes its size class.

Rules
- A namespace within its quota loses nothing to others; over its quota, or without one, it loses by age alone, and no
  more than what it has above its quota - to within one page, where a class that has nothing to evict needs a page.
- A class takes victims of its own unless another class's next victim has been idle more than twice as long: then that
  class gives a whole page, the one with the most of its coldest blocks.
- Each step either frees something or ends the search, so that it cannot spin; what is held is never waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from kvstore.core.arena import ClassKey, Page
from kvstore.core.columns import ABSENT, Ids, Longs
from kvstore.core.counters import Removal
from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.few import Offsets, Rows
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records

VICTIMS_PER_STEP = 32  # Where several cohorts compete, so that their ages stay merged.
PAGES_EXAMINED = 8
OLDER_FACTOR = 2.0
MOST_REMOVED = 16_384  # With pages that change their class, before a call must come again: 130 ms, and one page more.


@dataclass(frozen=True)
class Candidate:
    """A cohort that may give, and since when its next victim has been idle."""

    key: ClassKey
    policy: EvictionPolicy
    idle_since: float
    last_resort: bool  # The asking namespace's own, while it is within its quota.
    parts_per_block: int
    spare_bytes: int  # What it may lose.
    alone: bool = False  # No other cohort of its class may give.

    def blocks_for(self, count: int) -> int:
        """How many victims to take at once for `count` slots."""
        wanted = -(-count // self.parts_per_block)
        spare = -(-self.spare_bytes // (self.key.slot_bytes * self.parts_per_block))
        return max(1, min(wanted, spare, wanted if self.alone else VICTIMS_PER_STEP))


@dataclass(frozen=True)
class _Need:
    """Slots that a namespace asks for; `within` says that all of them lie within its quota."""

    namespace: Namespace
    key: ClassKey
    count: int
    within: bool


class _Rank(NamedTuple):
    """How soon a class gives a page to another: the least first. `order` decides between equals."""

    last_resort: bool
    idle_since: float
    order: int
    key: ClassKey


class Space:
    """Allocates slots, evicting as the rules above say."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._removed = 0  # Blocks that went with pages that change their class, in this call.
        self._ranks: dict[bool, list[_Rank]] = {}  # Classes by rank, as read in this call; by `_Need.within`.

    def start(self) -> None:
        """Begins a call: what was read in the one before may hold no more."""
        self._ranks.clear()
        self._removed = 0

    def allocate(self, namespace: Namespace, owners: Rows, *, slot_bytes: int, now: float) -> Offsets:
        """Gives slots to the first owners (parts); fewer than asked when nothing more may be evicted now."""
        arena = self._records.arena
        if slot_bytes > arena.page_bytes:
            return []
        key = ClassKey(slot_bytes, namespace.pool)
        got = arena.allocate(key, owners)
        missing = len(owners) - len(got)
        while missing:
            have_bytes = (len(owners) - missing) * slot_bytes
            if not self._make_room(self._need(namespace, key, count=missing, have_bytes=have_bytes), now):
                break
            more = arena.allocate(key, owners[len(owners) - missing :])
            got = got + more if isinstance(got, list) and isinstance(more, list) else np.concatenate((got, more))
            missing -= len(more)
        return got

    def shrink(self, namespace: Namespace, slot_bytes: int, need_bytes: int) -> int:
        """Evicts the namespace's own blocks until `need_bytes` more fit under its limit; returns the bytes that fit."""
        limit = namespace.rules.max_bytes
        if limit is None:
            return need_bytes
        own = sorted(namespace.cohorts.items(), key=lambda item: item[0] != slot_bytes)
        for size, policy in own:
            while (over := namespace.hot_bytes + need_bytes - limit) > 0:
                victims = policy.take(max(1, min(-(-over // (size * namespace.parts_per_block)), VICTIMS_PER_STEP)))
                if not len(victims):
                    break
                self._evict(victims, Removal.QUOTA)
        return max(0, min(need_bytes, limit - namespace.hot_bytes))

    def evict_any(self, namespace: Namespace, now: float) -> bool:
        """Evicts a few of the coldest blocks of any class; false if nothing may go."""
        for key in list(self._records.cohorts):
            candidate = self._candidate(key, _Need(namespace, key, VICTIMS_PER_STEP, within=False))
            if candidate is not None and self._take(candidate, VICTIMS_PER_STEP):
                return True
        return False

    @staticmethod
    def _need(namespace: Namespace, key: ClassKey, *, count: int, have_bytes: int) -> _Need:
        """Cuts a need where the namespace's quota ends, so that no slot beyond it is asked for as one within it."""
        left = (namespace.rules.quota_bytes - namespace.hot_bytes - have_bytes) // key.slot_bytes
        return _Need(namespace, key, count=min(count, left) if left > 0 else count, within=left > 0)

    def _make_room(self, need: _Need, now: float) -> bool:
        """Frees slots that this class can use, or a page for it; false if nothing could be freed at once."""
        donor = self._donor(need)
        own = self._candidate(need.key, need)
        while own is not None and not _donor_first(donor, own, now):
            if self._take(own, need.count):
                return True
            own = self._candidate(need.key, need)
        if self._records.arena.is_home(need.key):
            return False
        dip = own is None or need.within
        if self._records.arena.take_idle(need.key) or (donor is not None and self._take_page(donor, need, dip=dip)):
            return True
        return own is not None and self._take(own, need.count) > 0

    def _take_page(self, donor: Candidate, need: _Need, *, dip: bool) -> bool:
        """Moves one page from the donor's class to another; false if held slots keep it.

        `dip`: the page may take its namespace below its quota, if no other will do. While such a page is on its way
        already, only pages that come at once are taken: the others' blocks would be lost for nothing.
        """
        page = self._coldest_page(donor, need.key.slot_bytes) if self._removed < MOST_REMOVED else None
        if page is None:
            return False
        shielded, held = self._cost(page)
        if (shielded and not dip) or (held and self._records.arena.class_of(need.key).draining_in):
            return False
        return self._reclaim(page, need.key)

    def _candidate(self, key: ClassKey, need: _Need) -> Candidate | None:
        """The cohort of one class that loses next: the asking namespace's own comes last while it is within quota."""
        found: list[Candidate] = []
        for index, policy in self._records.cohorts.get(key, {}).items():
            owner = self._records.namespaces[index]
            own = owner is need.namespace
            spare = owner.hot_bytes if own else owner.hot_bytes - owner.rules.quota_bytes
            since = policy.idle_since() if spare > 0 else None
            if since is not None:
                last = own and need.within
                found.append(Candidate(key, policy, since, last, owner.parts_per_block, spare))
        best = min(found, key=lambda c: (c.last_resort, c.idle_since), default=None)
        return best if best is None or len(found) > 1 else replace(best, alone=True)

    def _donor(self, need: _Need) -> Candidate | None:
        """The cohort of another class whose next victim has been idle longest.

        In one call victims go and nothing gets older, so that a class keeps its rank or sinks: the first one whose
        rank, read again, is what it was is the first of all.
        Reading every class anew for each value makes one call of many sizes hold the loop for seconds.
        """
        ranks = self._ranks.get(need.within)
        if ranks is None:
            ranks = self._ranks[need.within] = self._ranked(need)
        kept: list[_Rank] = []
        found: Candidate | None = None
        while ranks and found is None:
            rank = heappop(ranks)
            if rank.key == need.key:
                kept.append(rank)
                continue
            candidate = self._candidate(rank.key, need)
            if candidate is None:
                continue
            again = _Rank(candidate.last_resort, candidate.idle_since, rank.order, rank.key)
            if again == rank:
                found = candidate
                kept.append(rank)
            else:
                heappush(ranks, again)
        for rank in kept:
            heappush(ranks, rank)
        return found

    def _ranked(self, need: _Need) -> list[_Rank]:
        """The ranks of all classes that may give, as a heap."""
        keys = [key for key in self._records.cohorts if not self._records.arena.is_home(key)]
        found = [(order, self._candidate(key, need)) for order, key in enumerate(keys)]
        ranks = [_Rank(c.last_resort, c.idle_since, order, c.key) for order, c in found if c is not None]
        heapify(ranks)
        return ranks

    def _take(self, candidate: Candidate, count: int) -> int:
        """Evicts blocks of a cohort for `count` slots; returns how many blocks went."""
        victims = candidate.policy.take(candidate.blocks_for(count))
        self._evict(victims, Removal.CAPACITY)
        return len(victims)

    def _evict(self, victims: Ids, cause: Removal) -> None:
        for block in victims.tolist():
            self._records.unlink(block, cause)

    def _coldest_page(self, donor: Candidate, slot_bytes: int) -> Page | None:
        """The donor's page with most of its coldest blocks; protected or held blocks count against a page."""
        arena = self._records.arena
        slots = 2 * (arena.page_bytes // donor.key.slot_bytes)
        cold = donor.policy.peek(max(1, slots // donor.parts_per_block))
        numbers, counts = np.unique(self._places(cold, donor.parts_per_block), return_counts=True)
        order = numbers[np.argsort(-counts, kind="stable")][:PAGES_EXAMINED]
        pages = [arena.pages[int(n)] for n in order]
        return min((p for p in pages if p.size_bytes >= slot_bytes), key=self._cost, default=None)

    def _places(self, blocks: Ids, parts_per_block: int) -> Longs:
        """The number of the page of each stored part of these blocks."""
        records = self._records
        rows = (records.blocks.first_part[blocks][:, None] + np.arange(parts_per_block, dtype=np.int32)).ravel()
        stored = rows[records.parts.state[rows] != ABSENT]
        places: Longs = records.parts.offset[stored] // records.arena.page_bytes
        return places

    def _cost(self, page: Page) -> tuple[int, int]:
        """How much a page's blocks must not go: bytes that namespaces would lose of their quota, then held parts."""
        blocks = self._records.blocks
        owners = self._records.parts.block[page.owners()]
        held = int(np.count_nonzero((blocks.holds[owners] > 0) | blocks.writing[owners]))
        indexes, counts = np.unique(blocks.namespace[owners], return_counts=True)
        shielded = 0
        for index, count in zip(indexes.tolist(), counts.tolist(), strict=True):
            owner = self._records.namespaces[index]
            spare = max(0, owner.hot_bytes - owner.rules.quota_bytes)
            shielded += max(0, count * page.slot_bytes - spare) if owner.rules.quota_bytes else 0
        return shielded, held

    def _reclaim(self, page: Page, to: ClassKey) -> bool:
        """Removes all blocks of a page and gives it to another class; false if held slots keep it still."""
        blocks = dict.fromkeys(self._records.parts.block[page.owners()].tolist())
        self._removed += len(blocks)
        self._records.arena.drain(page, to)
        for block in blocks:
            if not self._records.blocks.doomed[block]:
                self._records.unlink(block, Removal.PAGE)
        return page.key == to


def _donor_first(donor: Candidate | None, own: Candidate, now: float) -> bool:
    """Whether another class should give a page rather than this one a victim."""
    if donor is None or donor.last_resort:
        return False
    return own.last_resort or now - donor.idle_since > OLDER_FACTOR * (now - own.idle_since)
