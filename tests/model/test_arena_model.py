"""ArenaMap against a list of pages and a dict of slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.arena import SPARE_POOL, ArenaMap, ClassKey

PAGE = 64 << 10
CAPACITY = 9 * PAGE + (20 << 10)  # The last page is short.
HOME = ClassKey(4096, SPARE_POOL)
# Two classes have one slot size in pools of their own, and must never share a page.
KEYS = [ClassKey(4096), ClassKey(8192), ClassKey(8192, 7), ClassKey(12288), ClassKey(20480, 7), ClassKey(65536)]

some_class = st.sampled_from(KEYS)
any_class = st.sampled_from([*KEYS, HOME])


@dataclass
class ModelPage:
    """What a page should be: its class (None = free), where it goes when it empties, and its used slots."""

    size_bytes: int
    key: ClassKey | None = None
    drain_to: ClassKey | None = None
    used: set[int] = field(default_factory=set)

    @property
    def room(self) -> int:
        return 0 if self.drain_to or not self.key else self.size_bytes // self.key.slot_bytes - len(self.used)

    @property
    def slot_bytes(self) -> int:
        return self.key.slot_bytes if self.key else 0


class ArenaMachine(RuleBasedStateMachine):
    """Allocates, frees, drains and moves pages in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArenaMap(CAPACITY, PAGE, [HOME])
        self.pages = [ModelPage(min(PAGE, CAPACITY - base)) for base in range(0, CAPACITY, PAGE)]
        self.pages.append(ModelPage(HOME.slot_bytes, HOME))
        self.owner: dict[int, int] = {}
        self.next_owner = 0

    @rule(key=any_class, count=st.integers(0, 40), one_by_one=st.booleans())
    def allocate(self, key: ClassKey, count: int, one_by_one: bool) -> None:
        room = sum(p.room for p in self.pages if p.key == key)
        if key != HOME:
            room += sum(p.size_bytes // key.slot_bytes for p in self.pages if not p.key)
        owners = np.arange(self.next_owner, self.next_owner + count, dtype=np.int32)
        self.next_owner += count
        given = self.arena.allocate(key, owners.tolist() if one_by_one else owners)
        offsets = given if isinstance(given, list) else given.tolist()
        assert len(offsets) == min(count, room)
        for owner, offset in zip(owners.tolist(), offsets, strict=False):
            page = self._page(offset)
            assert page.key in (None, key)
            assert not page.drain_to
            assert offset not in page.used
            page.key = key
            page.used.add(offset)
            self.owner[offset] = owner

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), share=st.sampled_from([0.1, 0.5, 1.0]))
    def free(self, data: st.DataObject, share: float) -> None:
        count = max(1, int(share * len(self.owner)))
        chosen = data.draw(st.permutations(sorted(self.owner)))[:count]
        self.arena.free(chosen)
        for offset in chosen:
            self._forget(offset)

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.owner)))
        self.arena.free([offset])
        self._forget(offset)
        with pytest.raises(ValueError, match=f"{offset} is free already"):
            self.arena.free([offset])

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def free_inside_a_slot(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.owner)))
        if self._page(offset).slot_bytes > 4096:
            with pytest.raises(ValueError, match="is free already"):
                self.arena.free([offset + 4096])

    @rule(data=st.data(), key=some_class)
    def drain(self, data: st.DataObject, key: ClassKey) -> None:
        candidates = [
            i
            for i, p in enumerate(self.pages)
            if p.used and not p.drain_to and p.key not in (key, HOME) and key.slot_bytes <= p.size_bytes
        ]
        if candidates:
            index = data.draw(st.sampled_from(candidates))
            self.arena.drain(self.arena.pages[index], key)
            self.pages[index].drain_to = key

    @rule(key=some_class)
    def take_idle(self, key: ClassKey) -> None:
        others = [p for p in self.pages if p.key not in (None, key, HOME)]
        idle = [p for p in others if not p.used and p.size_bytes >= key.slot_bytes]
        assert self.arena.take_idle(key) == bool(idle)
        if idle:
            moved = [i for i, p in enumerate(self.arena.pages) if p.key != self.pages[i].key]
            assert len(moved) == 1
            assert self.pages[moved[0]] in idle
            self.pages[moved[0]].key = key

    @invariant()
    def slots_lie_apart_and_inside_their_pages(self) -> None:
        spans = sorted((o, o + self._page(o).slot_bytes) for o in self.owner)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(self._page(start) is self._page(end - 1) for start, end in spans)
        assert all(end <= CAPACITY or start == CAPACITY for start, end in spans)

    @invariant()
    def pages_are_as_the_model_says(self) -> None:
        for mine, real in zip(self.pages, self.arena.pages, strict=True):
            assert (mine.key, mine.drain_to, len(mine.used)) == (real.key, real.drain_to, real.live)
            assert sorted(real.owners().tolist()) == sorted(self.owner[o] for o in mine.used)
        assert self.arena.free_page_count == sum(p.key is None for p in self.pages)

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        used = sum(len(p.used) * p.slot_bytes for p in self.pages)
        assert self.arena.free_bytes() + used == CAPACITY + HOME.slot_bytes == self.arena.total_bytes
        self.arena.check()

    def _forget(self, offset: int) -> None:
        page = self._page(offset)
        page.used.remove(offset)
        del self.owner[offset]
        if not page.used and page.key != HOME:
            page.key, page.drain_to = page.drain_to, None

    def _page(self, offset: int) -> ModelPage:
        return self.pages[offset // PAGE] if offset < CAPACITY else self.pages[-1]


TestArena = ArenaMachine.TestCase
