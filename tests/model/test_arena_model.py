"""ArenaMap against a list of pages and a dict of slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.arena import ArenaMap

PAGE = 64 << 10
CAPACITY = 9 * PAGE + (20 << 10)  # The last page is short.
SIZES = [4096, 8192, 12288, 20480, 65536]

size_of_slot = st.sampled_from(SIZES)


@dataclass
class ModelPage:
    """What a page should be: its class (0 = free), where it goes when it empties, and its used slots."""

    size_bytes: int
    slot_bytes: int = 0
    drain_to: int = 0
    used: set[int] = field(default_factory=set)

    @property
    def room(self) -> int:
        return 0 if self.drain_to or not self.slot_bytes else self.size_bytes // self.slot_bytes - len(self.used)


class ArenaMachine(RuleBasedStateMachine):
    """Allocates, frees, drains and moves pages in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArenaMap(CAPACITY, PAGE)
        self.pages = [ModelPage(min(PAGE, CAPACITY - base)) for base in range(0, CAPACITY, PAGE)]
        self.owner: dict[int, int] = {}
        self.next_owner = 0

    @rule(size=size_of_slot, count=st.integers(0, 40))
    def allocate(self, size: int, count: int) -> None:
        room = sum(p.room for p in self.pages if p.slot_bytes == size)
        room += sum(p.size_bytes // size for p in self.pages if not p.slot_bytes)
        owners = np.arange(self.next_owner, self.next_owner + count, dtype=np.int32)
        self.next_owner += count
        offsets = self.arena.allocate(size, owners).tolist()
        assert len(offsets) == min(count, room)
        for owner, offset in zip(owners.tolist(), offsets, strict=False):
            page = self.pages[offset // PAGE]
            assert page.slot_bytes in (0, size)
            assert not page.drain_to
            assert offset not in page.used
            page.slot_bytes = size
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
        if self.pages[offset // PAGE].slot_bytes > 4096:
            with pytest.raises(ValueError, match="is free already"):
                self.arena.free([offset + 4096])

    @rule(data=st.data(), size=size_of_slot)
    def drain(self, data: st.DataObject, size: int) -> None:
        candidates = [
            i for i, p in enumerate(self.pages) if p.used and not p.drain_to and p.slot_bytes != size <= p.size_bytes
        ]
        if candidates:
            index = data.draw(st.sampled_from(candidates))
            self.arena.drain(self.arena.pages[index], size)
            self.pages[index].drain_to = size

    @rule(size=size_of_slot)
    def take_idle(self, size: int) -> None:
        idle = [p for p in self.pages if p.slot_bytes not in (0, size) and not p.used and p.size_bytes >= size]
        assert self.arena.take_idle(size) == bool(idle)
        if idle:
            moved = [i for i, p in enumerate(self.arena.pages) if p.slot_bytes != self.pages[i].slot_bytes]
            assert len(moved) == 1
            assert self.pages[moved[0]] in idle
            self.pages[moved[0]].slot_bytes = size

    @invariant()
    def slots_lie_apart_and_inside_their_pages(self) -> None:
        spans = sorted((o, o + self.pages[o // PAGE].slot_bytes) for o in self.owner)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(start // PAGE == (end - 1) // PAGE and end <= CAPACITY for start, end in spans)

    @invariant()
    def pages_are_as_the_model_says(self) -> None:
        for mine, real in zip(self.pages, self.arena.pages, strict=True):
            assert (mine.slot_bytes, mine.drain_to, len(mine.used)) == (real.slot_bytes, real.drain_to, real.live)
            assert sorted(real.owners().tolist()) == sorted(self.owner[o] for o in mine.used)
        assert self.arena.free_page_count == sum(not p.slot_bytes for p in self.pages)

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        used = sum(len(p.used) * p.slot_bytes for p in self.pages)
        assert self.arena.free_bytes() + used == CAPACITY
        self.arena.check()

    def _forget(self, offset: int) -> None:
        page = self.pages[offset // PAGE]
        page.used.remove(offset)
        del self.owner[offset]
        if not page.used:
            page.slot_bytes, page.drain_to = page.drain_to, 0


TestArena = ArenaMachine.TestCase
