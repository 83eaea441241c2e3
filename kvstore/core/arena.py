"""Which slots of the arena are free: pages given to size classes.

Rules
- The arena is cut into pages of one size (the last may be shorter). A page is free, or belongs to one size class, or
  drains: it belongs to a class still, takes nothing new, and goes to another class when its last slot is freed.
- A page that came to its class by draining is that class's even while it is empty, so that nobody snatches it before
  the class asks again. Such an idle page goes to another class only by `take_idle`.
- A slot is `slot_bytes` long, a multiple of SLOT_UNIT_BYTES, and never crosses a page.
- A class is a slot size within a pool. Pages of different pools never mix their slots, so that what one pool's blocks
  do to a page cannot touch another's: namespaces with a quota have a pool each, all others share one.
- A home page lies beyond the capacity and belongs to one class for ever; that class never gets another page.
- This file holds no bytes and knows no blocks: a slot carries its owner as a number (a part).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvstore.core.columns import Ids, Longs
from kvstore.core.few import Offsets, Rows

SLOT_UNIT_BYTES = 4096
OPAQUE_STEPS_PER_OCTAVE = 8
NO_OWNER = -1
COMMON_POOL = 0
SPARE_POOL = -1  # The shard's own page, for its health probe.


class ClassKey(NamedTuple):
    """Names a size class."""

    slot_bytes: int
    pool: int = COMMON_POOL


def slot_bytes_exact(length: int) -> int:
    """Slot size for parts of a fixed length: rounded up to 4 KiB, one unit at least."""
    return max(1, -(-length // SLOT_UNIT_BYTES)) * SLOT_UNIT_BYTES


def slot_bytes_stepped(length: int) -> int:
    """Slot size for values of any length: eight sizes an octave, so that at most an eighth is lost and the number of
    classes stays below a hundred and fifty whatever lengths are stored."""
    units = slot_bytes_exact(length) // SLOT_UNIT_BYTES
    step = 1 << max(0, (units - 1).bit_length() - OPAQUE_STEPS_PER_OCTAVE.bit_length())
    return -(-units // step) * step * SLOT_UNIT_BYTES


class Page:
    """One page. `owner[slot]` is the part stored there; `key` is the class it belongs to, None while it is free."""

    __slots__ = (
        "base",
        "cell",
        "drain_to",
        "freed",
        "fresh",
        "home",
        "index",
        "key",
        "live",
        "owner",
        "size_bytes",
        "slot_bytes",
        "slots",
    )

    def __init__(self, index: int, base: int, size_bytes: int, home: ClassKey | None = None) -> None:
        self.index, self.base, self.size_bytes, self.home = index, base, size_bytes, home
        self.clear()

    def clear(self) -> None:
        self.slot_bytes = self.slots = self.fresh = self.live = 0
        self.key: ClassKey | None = None
        self.drain_to: ClassKey | None = None
        self.freed = array("i")
        self._own(0)

    def give_to(self, key: ClassKey) -> None:
        """Cuts a free page into slots of one size."""
        self.key, self.slot_bytes, self.slots = key, key.slot_bytes, self.size_bytes // key.slot_bytes
        self._own(self.slots)

    @property
    def free_slots(self) -> int:
        return self.slots - self.live

    def owners(self) -> Ids:
        """Parts that live in this page."""
        used = self.owner[: self.fresh]
        live: Ids = used[used != NO_OWNER]
        return live

    def _own(self, slots: int) -> None:
        self.owner: Ids = np.full(slots, NO_OWNER, np.int32)
        self.cell = self.owner.data  # The same, slot by slot.


class SizeClass:
    """The pages of one class. `open_pages` have a free slot and do not drain."""

    __slots__ = ("draining_in", "key", "open_pages", "pages")

    def __init__(self, key: ClassKey) -> None:
        self.key = key
        self.pages: dict[int, Page] = {}
        self.open_pages: dict[int, Page] = {}
        self.draining_in = 0  # Pages of other classes that will come here.


class ArenaMap:
    """Gives and takes slots. Raises ValueError on a double free: that is a fault of the program, never of a caller.

    `homes` are classes with one slot each of their own, beyond `capacity_bytes` and part of `total_bytes`.
    """

    def __init__(self, capacity_bytes: int, page_bytes: int, homes: Iterable[ClassKey] = ()) -> None:
        if capacity_bytes % SLOT_UNIT_BYTES or page_bytes % SLOT_UNIT_BYTES or not 0 < page_bytes <= capacity_bytes:
            raise ValueError(f"capacity {capacity_bytes} and page {page_bytes} must be multiples of {SLOT_UNIT_BYTES}")
        self.capacity_bytes, self.page_bytes = capacity_bytes, page_bytes
        bases = range(0, capacity_bytes, page_bytes)
        self.pages = [Page(i, b, min(page_bytes, capacity_bytes - b)) for i, b in enumerate(bases)]
        self.classes: dict[ClassKey, SizeClass] = {}
        # Popped from the end: low addresses first, since those are prefaulted first.
        self._free_pages = list(reversed(self.pages))
        self._idle: dict[int, Page] = {}
        self._homes: dict[ClassKey, Page] = {}
        for key in homes:
            self._add_home(key)

    @property
    def free_page_count(self) -> int:
        return len(self._free_pages)

    @property
    def total_bytes(self) -> int:
        """Capacity and home pages: what the account of bytes sums to, and the memory that offsets speak of."""
        return self.capacity_bytes + sum(key.slot_bytes for key in self._homes)

    def is_home(self, key: ClassKey) -> bool:
        return key in self._homes

    def free_bytes(self) -> int:
        """Bytes in no used slot, the cuttings of pages included."""
        return sum(p.size_bytes - p.live * p.slot_bytes for p in self.pages)

    def class_of(self, key: ClassKey) -> SizeClass:
        """Returns a class, made at its first use."""
        found = self.classes.get(key)
        if found is None:
            found = self.classes[key] = SizeClass(key)
        return found

    def forget(self, key: ClassKey) -> None:
        """Drops a class that has no page and waits for none; one that does stays."""
        group = self.classes.get(key)
        if group is not None and not group.pages and not group.draining_in:
            del self.classes[key]

    def page_at(self, offset: int) -> Page:
        if offset < self.capacity_bytes:
            return self.pages[offset // self.page_bytes]
        return next(p for p in self._homes.values() if p.base <= offset < p.base + p.size_bytes)

    def allocate(self, key: ClassKey, owners: Rows) -> Offsets:
        """Gives slots to the first owners and returns their offsets; fewer than asked where room ends.

        Takes free slots of the class, then free pages. Never evicts: making room is the caller's decision.
        """
        group = self.class_of(key)
        if isinstance(owners, list):
            return self._allocate_few(group, owners)
        out, done, count = np.empty(len(owners), np.int64), 0, len(owners)
        while done < count and (page := self._page_with_room(group)) is not None:
            done += self._fill(page, owners[done:], out[done:])
            if not page.free_slots:
                del group.open_pages[page.index]
        return out[:done]

    def _allocate_few(self, group: SizeClass, owners: list[int]) -> list[int]:
        out: list[int] = []
        while len(out) < len(owners) and (page := self._page_with_room(group)) is not None:
            slots = self._take_slots(page, len(owners) - len(out))
            for slot, owner in zip(slots, owners[len(out) :], strict=False):
                page.cell[slot] = owner
                out.append(page.base + slot * page.slot_bytes)
            if page.live == page.slots:
                del group.open_pages[page.index]
        return out

    def free(self, offsets: Iterable[int]) -> None:
        """Takes slots back. A page that empties goes to the class it drains to, or becomes free."""
        pages, page_bytes, capacity_bytes = self.pages, self.page_bytes, self.capacity_bytes
        for offset in offsets:
            page = pages[offset // page_bytes] if offset < capacity_bytes else self.page_at(offset)
            slot, inside = divmod(offset - page.base, page.slot_bytes or page_bytes)
            if inside or slot >= page.fresh or page.cell[slot] == NO_OWNER:
                raise ValueError(f"slot at {offset} is free already")
            page.cell[slot] = NO_OWNER
            page.freed.append(slot)
            page.live -= 1
            if page.live == 0:
                self._emptied(page)
            elif page.drain_to is None:
                self._class_of_page(page).open_pages[page.index] = page

    def drain(self, page: Page, to: ClassKey) -> None:
        """Closes a page: it takes nothing new and goes to another class once its slots are free."""
        self._class_of_page(page).open_pages.pop(page.index, None)
        page.drain_to = to
        self.class_of(to).draining_in += 1

    def take_idle(self, key: ClassKey) -> bool:
        """Moves one empty page of another class to this one; false if there is none."""
        for page in self._idle.values():
            if page.key != key and page.home is None and page.size_bytes >= key.slot_bytes:
                self._leave(page)
                self._give(page, self.class_of(key))
                return True
        return False

    def check(self) -> None:
        """Raises AssertionError if the counts of pages, classes and free lists disagree."""
        for page in self.pages:
            assert page.live == len(page.owners()), f"page {page.index}: {page.live} live"
            assert page.fresh - len(page.freed) == page.live, f"page {page.index}: freed list"
            idle = page.key is not None and page.live == 0
            assert idle == (page.index in self._idle), f"page {page.index}: idle"
            is_open = page.key is not None and page.drain_to is None and page.free_slots > 0
            listed = page.key is not None and page.index in self._class_of_page(page).open_pages
            assert is_open == listed, f"page {page.index}: open"
            assert page.home in (None, page.key), f"page {page.index}: home"
        assert len(self._free_pages) == sum(p.key is None for p in self.pages), "free pages"
        drains = sum(p.drain_to is not None for p in self.pages)
        assert drains == sum(c.draining_in for c in self.classes.values()), "draining pages"

    def _page_with_room(self, group: SizeClass) -> Page | None:
        """The first page of the class that has a free slot, or a new one; None if there is none."""
        for page in group.open_pages.values():
            return page
        return self._open_page(group)

    def _open_page(self, group: SizeClass) -> Page | None:
        """Takes the first free page that holds at least one slot of the class."""
        if self.is_home(group.key):
            return None
        for at in range(len(self._free_pages) - 1, -1, -1):
            if self._free_pages[at].size_bytes >= group.key.slot_bytes:
                page = self._free_pages.pop(at)
                self._give(page, group)
                return page
        return None

    def _add_home(self, key: ClassKey) -> None:
        page = Page(len(self.pages), self.total_bytes, key.slot_bytes, home=key)
        self.pages.append(page)
        self._homes[key] = page
        self._give(page, self.class_of(key))

    def _give(self, page: Page, group: SizeClass) -> None:
        page.give_to(group.key)
        group.pages[page.index] = page
        group.open_pages[page.index] = page
        self._idle[page.index] = page

    def _leave(self, page: Page) -> None:
        old = self._class_of_page(page)
        del old.pages[page.index]
        old.open_pages.pop(page.index, None)
        self._idle.pop(page.index, None)
        page.clear()

    def _fill(self, page: Page, owners: Ids, out: Longs) -> int:
        """Puts owners into free slots of one page; returns how many went in."""
        count = min(len(owners), page.free_slots)
        reused = min(count, len(page.freed))
        slots = np.empty(count, np.int64)
        if reused:
            slots[:reused] = page.freed[-reused:]
            del page.freed[-reused:]
        slots[reused:] = np.arange(page.fresh, page.fresh + count - reused)
        page.fresh += count - reused
        page.owner[slots] = owners[:count]
        page.live += count
        self._idle.pop(page.index, None)
        out[:count] = page.base + slots * page.slot_bytes
        return count

    def _take_slots(self, page: Page, most: int) -> list[int]:
        """Takes free slots of one page, at most so many, as `_fill` does; they have no owner yet."""
        count = min(most, page.slots - page.live)
        reused = min(count, len(page.freed))
        slots: list[int] = []
        if reused:
            slots += page.freed[-reused:]
            del page.freed[-reused:]
        if reused < count:
            slots += range(page.fresh, page.fresh + count - reused)
            page.fresh += count - reused
        page.live += count
        self._idle.pop(page.index, None)
        return slots

    def _emptied(self, page: Page) -> None:
        """An emptied page leaves its class: to the class that waits for it, home, or to the free pages."""
        to = page.drain_to
        self._leave(page)
        if to is not None:
            self.class_of(to).draining_in -= 1
            self._give(page, self.class_of(to))
        elif page.home is not None:
            self._give(page, self.class_of(page.home))
        else:
            self._free_pages.append(page)

    def _class_of_page(self, page: Page) -> SizeClass:
        assert page.key is not None
        return self.classes[page.key]
