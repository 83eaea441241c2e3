"""Making room: which blocks go when slots are needed, and when a page changes its size class.

Rules
- A namespace within its quota loses nothing to others; over its quota, or without one, it loses by age alone.
- A class takes victims of its own unless another class's next victim has been idle more than twice as long: then that
  class gives a whole page, the one with the most of its coldest blocks.
- Each step either frees something or ends the search, so that it cannot spin; what is held is never waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvstore.core.arena import Page
from kvstore.core.columns import Ids, Longs
from kvstore.core.counters import Removal
from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records

VICTIMS_PER_STEP = 32  # Where several cohorts compete, so that their ages stay merged.
PAGES_EXAMINED = 8
OLDER_FACTOR = 2.0


@dataclass(frozen=True)
class Candidate:
    """A cohort that may give, and since when its next victim has been idle."""

    slot_bytes: int
    policy: EvictionPolicy
    idle_since: float
    last_resort: bool  # The asking namespace's own, while it is within its quota.
    alone: bool = False  # No other cohort of its class may give.


class Space:
    """Allocates slots, evicting as the rules above say."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def allocate(self, namespace: Namespace, owners: Ids, *, slot_bytes: int, now: float) -> Longs:
        """Gives slots to the first owners (parts); fewer than asked when nothing more may be evicted now."""
        arena = self._records.arena
        if slot_bytes > arena.page_bytes:
            return np.empty(0, np.int64)
        got = [arena.allocate(slot_bytes, owners)]
        missing = len(owners) - len(got[0])
        while missing and self._make_room(namespace, slot_bytes, count=missing, now=now):
            got.append(arena.allocate(slot_bytes, owners[len(owners) - missing :]))
            missing -= len(got[-1])
        return np.concatenate(got) if len(got) > 1 else got[0]

    def shrink(self, namespace: Namespace, slot_bytes: int, need_bytes: int) -> int:
        """Evicts the namespace's own blocks until `need_bytes` more fit under its limit; returns the bytes that fit."""
        limit = namespace.rules.max_bytes
        if limit is None:
            return need_bytes
        own = sorted(namespace.cohorts.items(), key=lambda item: item[0] != slot_bytes)
        for size, policy in own:
            while (over := namespace.hot_bytes + need_bytes - limit) > 0:
                victims = policy.take(max(1, min(-(-over // size), VICTIMS_PER_STEP)))
                if not len(victims):
                    break
                self._evict(victims, Removal.QUOTA)
        return max(0, min(need_bytes, limit - namespace.hot_bytes))

    def evict_any(self, namespace: Namespace, now: float) -> bool:
        """Evicts a few of the coldest blocks of any class; false if nothing may go."""
        for size in list(self._records.cohorts):
            candidate = self._candidate(size, namespace, need_bytes=0)
            if candidate is not None and self._take(candidate, VICTIMS_PER_STEP):
                return True
        return False

    def _make_room(self, namespace: Namespace, slot_bytes: int, *, count: int, now: float) -> bool:
        """Frees slots that this class can use, or a page for it; false if nothing could be freed at once."""
        need = count * slot_bytes
        donor = self._donor(slot_bytes, namespace, need_bytes=need)
        own = self._candidate(slot_bytes, namespace, need_bytes=need)
        while own is not None and not _donor_first(donor, own, now):
            if self._take(own, count if own.alone else min(count, VICTIMS_PER_STEP)):
                return True
            own = self._candidate(slot_bytes, namespace, need_bytes=need)
        if self._records.arena.take_idle(slot_bytes) or (donor is not None and self._take_page(donor, slot_bytes)):
            return True
        return own is not None and self._take(own, count) > 0

    def _take_page(self, donor: Candidate, slot_bytes: int) -> bool:
        """Moves one page from the donor's class to another; false if held slots keep it, or one is on its way."""
        if self._records.arena.class_of(slot_bytes).draining_in:
            return False
        page = self._coldest_page(donor, slot_bytes)
        return page is not None and self._reclaim(page, slot_bytes)

    def _candidate(self, slot_bytes: int, asking: Namespace, *, need_bytes: int) -> Candidate | None:
        """The cohort of one class that loses next: the asking namespace's own comes last while it is within quota."""
        found: list[Candidate] = []
        within = asking.hot_bytes + need_bytes <= asking.rules.quota_bytes
        for index, policy in self._records.cohorts.get(slot_bytes, {}).items():
            owner = self._records.namespaces[index]
            if owner is not asking and owner.hot_bytes <= owner.rules.quota_bytes:
                continue
            since = policy.idle_since()
            if since is not None:
                found.append(Candidate(slot_bytes, policy, since, last_resort=owner is asking and within))
        best = min(found, key=lambda c: (c.last_resort, c.idle_since), default=None)
        return best if best is None or len(found) > 1 else replace(best, alone=True)

    def _donor(self, slot_bytes: int, asking: Namespace, *, need_bytes: int) -> Candidate | None:
        """The cohort of another class whose next victim has been idle longest."""
        sizes = [size for size in self._records.cohorts if size != slot_bytes]
        others = [self._candidate(size, asking, need_bytes=need_bytes) for size in sizes]
        found = [c for c in others if c is not None]
        return min(found, key=lambda c: (c.last_resort, c.idle_since), default=None)

    def _take(self, candidate: Candidate, count: int) -> int:
        victims = candidate.policy.take(count)
        self._evict(victims, Removal.CAPACITY)
        return len(victims)

    def _evict(self, victims: Ids, cause: Removal) -> None:
        for block in victims.tolist():
            self._records.unlink(block, cause)

    def _coldest_page(self, donor: Candidate, slot_bytes: int) -> Page | None:
        """The donor's page with most of its coldest blocks; protected or held blocks count against a page."""
        records, arena = self._records, self._records.arena
        cold = donor.policy.peek(2 * (arena.page_bytes // donor.slot_bytes))
        if not len(cold):
            return None
        places = records.parts.offset[records.blocks.first_part[cold]] // arena.page_bytes
        numbers, counts = np.unique(places, return_counts=True)
        order = numbers[np.argsort(-counts, kind="stable")][:PAGES_EXAMINED]
        pages = [arena.pages[int(n)] for n in order]
        usable = [p for p in pages if p.slot_bytes and not p.drain_to and p.size_bytes >= slot_bytes]
        return min(usable, key=self._cost, default=None)

    def _cost(self, page: Page) -> tuple[int, int]:
        """How much a page's blocks must not go: blocks of namespaces within their quota, then blocks with holds."""
        blocks = self._records.blocks
        owners = self._records.parts.block[page.owners()]
        held = int(np.count_nonzero(blocks.holds[owners]))
        indexes, counts = np.unique(blocks.namespace[owners], return_counts=True)
        shielded = 0
        for index, count in zip(indexes.tolist(), counts.tolist(), strict=True):
            owner = self._records.namespaces[index]
            shielded += count if owner.hot_bytes <= owner.rules.quota_bytes else 0
        return shielded, held

    def _reclaim(self, page: Page, slot_bytes: int) -> bool:
        """Removes all blocks of a page and gives it to another class; false if held slots keep it for now."""
        blocks = dict.fromkeys(self._records.parts.block[page.owners()].tolist())
        self._records.arena.drain(page, slot_bytes)
        for block in blocks:
            if not self._records.blocks.doomed[block]:
                self._records.unlink(block, Removal.PAGE)
        return page.slot_bytes == slot_bytes


def _donor_first(donor: Candidate | None, own: Candidate, now: float) -> bool:
    """Whether another class should give a page rather than this one a victim."""
    if donor is None or donor.last_resort:
        return False
    return own.last_resort or now - donor.idle_since > OLDER_FACTOR * (now - own.idle_since)
