"""Blocks, their parts, their slots, and the account of the arena's bytes.

Rules
- Every byte of the arena is free, reserved (a slot waiting for its bytes), leased (a committed slot of a block with
  holds, or of a removed block that a reader still holds or that is being written to disk) or evictable: the four sum
  to the arena's total.
- A block with holds keeps its slots. `unlink` takes a block out of the index at once; its slots come back with the
  last hold.
- A block that is being written to disk may be evicted as any other; its slots come back when it was written.
- A block without any present part exists only while a lease holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstore.core.arena import SLOT_UNIT_BYTES, ArenaMap, ClassKey
from kvstore.core.columns import ABSENT, PRESENT, RESERVED, BlockColumns, Ids, PartColumns
from kvstore.core.counters import Removal
from kvstore.core.eviction.base import SAME_REQUEST_S, EvictionPolicy, TouchHint
from kvstore.core.few import Offsets, Rows, as_rows, distinct_tail_first
from kvstore.core.holds import add_holds, take_holds
from kvstore.core.namespaces import Namespace

SPARE_ROWS = 70_000  # Rows for one call's blocks before they have slots.
_EVICTIONS = frozenset((Removal.CAPACITY, Removal.PAGE, Removal.QUOTA))


class Records:
    """The tables of one shard's hot tier.

    `on_change(block)` is called when a block's parts became visible or went, `on_evict(block)` just before a block goes
    to make room, `on_link(block)` when one was made.
    """

    def __init__(self, arena: ArenaMap, policy: Callable[[BlockColumns], EvictionPolicy]) -> None:
        rows = arena.capacity_bytes // SLOT_UNIT_BYTES + SPARE_ROWS
        self.arena = arena
        self.blocks = BlockColumns(rows)
        self.parts = PartColumns(2 * rows)
        self.reserved_bytes = self.leased_bytes = self.evictable_bytes = 0
        self.granted_bytes = 0  # All slots ever reserved: only grows.
        self.cohorts: dict[ClassKey, dict[int, EvictionPolicy]] = {}  # Class -> namespace index -> policy.
        self.namespaces: dict[int, Namespace] = {}
        self.on_change: Callable[[int], None] = lambda block: None
        self.on_evict: Callable[[int], None] = lambda block: None
        self.on_link: Callable[[int], None] | None = None
        self._policy = policy

    @property
    def free_bytes(self) -> int:
        return self.arena.total_bytes - self.reserved_bytes - self.leased_bytes - self.evictable_bytes

    def slot_bytes(self, block: int) -> int:
        return self.blocks.cell.slot_units[block] * SLOT_UNIT_BYTES

    # -- making and removing -------------------------------------------------------------------------------------

    def new_block(self, namespace: Namespace, key: bytes, slot_bytes: int) -> int | None:
        """Makes a block without slots, not yet in the index; None if the tables have no room."""
        block = self.blocks.add(key)
        if block is None:
            return None
        first = self.parts.add(namespace.parts_per_block, block)
        if first is None:
            self.blocks.remove(block)
            return None
        cell = self.blocks.cell
        cell.first_part[block] = first
        cell.namespace[block] = namespace.index
        cell.slot_units[block] = slot_bytes // SLOT_UNIT_BYTES
        return block

    def drop_new_block(self, namespace: Namespace, block: int) -> None:
        """Takes back a block that `new_block` made and that was never linked."""
        self.parts.remove(self.blocks.cell.first_part[block], namespace.parts_per_block)
        self.blocks.remove(block)

    def link(self, namespace: Namespace, block: int, now: float) -> None:
        """Puts a new block into the index; it must have a reserved part."""
        key = self.blocks.key[block]
        assert key is not None
        namespace.blocks[key] = block
        self.namespaces[namespace.index] = namespace
        cell = self.blocks.cell
        cell.created[block] = cell.entered[block] = cell.touched[block] = now
        if namespace.expiry is not None:
            namespace.expiry.append([block])
        if self.on_link is not None:
            self.on_link(block)

    def reserve_slots(self, namespace: Namespace, parts: Rows, *, offsets: Offsets, lengths: Sequence[int]) -> None:
        """Gives slots to absent parts of blocks of one slot size."""
        if not len(parts):
            return
        if isinstance(parts, list):
            self._mark_reserved_few(parts, offsets, lengths)
        else:
            self.parts.offset[parts] = offsets
            self.parts.length[parts] = lengths
            self.parts.state[parts] = RESERVED
            np.add.at(self.blocks.reserved, self.parts.block[parts], 1)
        size = len(parts) * self.slot_bytes(self.parts.cell.block[int(parts[0])])
        self.reserved_bytes += size
        self.granted_bytes += size
        namespace.hot_bytes += size

    def _mark_reserved_few(self, parts: list[int], offsets: Iterable[int], lengths: Iterable[int]) -> None:
        cell, reserved = self.parts.cell, self.blocks.cell.reserved
        for part, offset, length in zip(parts, offsets, lengths, strict=True):
            cell.offset[part] = offset
            cell.length[part] = length
            cell.state[part] = RESERVED
            reserved[cell.block[part]] += 1

    def publish(self, parts: list[int], checksums: list[int]) -> None:
        """Makes reserved parts of held blocks visible."""
        rows = as_rows(parts)
        if isinstance(rows, list):
            owners, units = self._mark_present_few(rows, checksums)
        else:
            owners, units = self._mark_present_many(rows, checksums)
        self.reserved_bytes -= units * SLOT_UNIT_BYTES
        self.leased_bytes += units * SLOT_UNIT_BYTES
        for block in owners:
            self.on_change(block)

    def _mark_present_many(self, parts: Ids, checksums: list[int]) -> tuple[Iterable[int], int]:
        """Returns the distinct blocks of the parts, in their order, and the slot units of the parts."""
        self.parts.checksum[parts] = np.array(checksums, np.uint64)
        self.parts.state[parts] = PRESENT
        owners = self.parts.block[parts]
        np.add.at(self.blocks.reserved, owners, -1)
        np.add.at(self.blocks.present, owners, 1)
        self.blocks.disk_sequence[owners] = 0
        return dict.fromkeys(owners.tolist()), int(self.blocks.slot_units[owners].sum(dtype=np.int64))

    def _mark_present_few(self, parts: list[int], checksums: list[int]) -> tuple[Iterable[int], int]:
        cell, blocks = self.parts.cell, self.blocks.cell
        owners: dict[int, None] = {}
        units = 0
        for part, checksum in zip(parts, checksums, strict=True):
            block = cell.block[part]
            cell.checksum[part] = checksum
            cell.state[part] = PRESENT
            blocks.reserved[block] -= 1
            blocks.present[block] += 1
            blocks.disk_sequence[block] = 0
            units += blocks.slot_units[block]
            owners[block] = None
        return owners, units

    def abandon(self, namespace: Namespace, parts: list[int]) -> None:
        """Takes the slots of reserved parts back; their blocks are still held by the lease that ends."""
        cell, blocks = self.parts.cell, self.blocks.cell
        owners = [cell.block[part] for part in parts]
        units = 0
        for part, block in zip(parts, owners, strict=True):
            cell.state[part] = ABSENT
            blocks.reserved[block] -= 1
            units += blocks.slot_units[block]
        self.reserved_bytes -= units * SLOT_UNIT_BYTES
        namespace.hot_bytes -= units * SLOT_UNIT_BYTES
        self.arena.free([cell.offset[part] for part in parts])
        for block in dict.fromkeys(owners):
            self.on_change(block)

    def unlink(self, block: int, cause: Removal) -> bool:
        """Takes a block out of the index; true if its slots came back at once (nothing holds it)."""
        cell = self.blocks.cell
        namespace = self.namespaces[cell.namespace[block]]
        key = self.blocks.key[block]
        assert key is not None
        assert not cell.doomed[block]
        if cause in _EVICTIONS:
            self.on_evict(block)
        del namespace.blocks[key]
        namespace.counters.add(cause.value)
        self._policy_of(block).remove(block)
        if namespace.expiry is not None:
            namespace.expiry.remove(block)
        cell.doomed[block] = True
        self.on_change(block)
        if cell.holds[block]:
            return False
        size = cell.present[block] * self.slot_bytes(block)
        self.evictable_bytes -= size
        if cell.writing[block]:
            self.leased_bytes += size
            return False
        self._free_block(block, namespace)
        return True

    def _free_block(self, block: int, namespace: Namespace) -> None:
        """Gives back the slots and rows of an unlinked block that nothing holds (its bytes are off the account)."""
        first, count = self.blocks.cell.first_part[block], namespace.parts_per_block
        cell = self.parts.cell
        used = [cell.offset[part] for part in range(first, first + count) if cell.state[part] != ABSENT]
        self.arena.free(used)
        namespace.hot_bytes -= len(used) * self.slot_bytes(block)
        self.parts.remove(first, count)
        self.blocks.remove(block)

    # -- holds ---------------------------------------------------------------------------------------------------

    def hold(self, blocks: Rows) -> None:
        """Adds a hold to each block; a block may be named more than once."""
        size = add_holds(self.blocks, blocks) * SLOT_UNIT_BYTES
        self.evictable_bytes -= size
        self.leased_bytes += size

    def unhold(self, blocks: Rows, now: float) -> None:
        """Takes one hold from each, given tail first; frees what was removed meanwhile and what holds no part."""
        idle = take_holds(self.blocks, blocks)
        self.leased_bytes -= (idle.kept_units + idle.gone_units) * SLOT_UNIT_BYTES
        self.evictable_bytes += idle.kept_units * SLOT_UNIT_BYTES
        for block in idle.gone:
            if self.blocks.cell.writing[block]:
                self.leased_bytes += self.blocks.cell.present[block] * self.slot_bytes(block)
            else:
                self._free_block(block, self.namespaces[self.blocks.cell.namespace[block]])
        for block in idle.empty:
            self.unlink(block, Removal.INCOMPLETE)
        if idle.is_parked:
            self._unpark(blocks, now)

    def _unpark(self, blocks: Rows, now: float) -> None:
        """Returns parked blocks whose last hold ended to their cohort's order, in the order given."""
        place, holds = self.blocks.queue_place.cell, self.blocks.cell.holds
        for block in dict.fromkeys(blocks if isinstance(blocks, list) else blocks.tolist()):
            if place[block] < 0 and not holds[block]:
                self._policy_of(block).unpark(np.array([block], np.int32), now)

    # -- writing to disk -----------------------------------------------------------------------------------------

    def begin_writing(self, block: int) -> None:
        """Keeps the slots of a stored block as they are until `end_writing`, whatever becomes of the block."""
        assert not self.blocks.cell.writing[block]
        self.blocks.cell.writing[block] = True

    def end_writing(self, block: int) -> bool:
        """Ends it; true if the block is still in the index."""
        cell = self.blocks.cell
        cell.writing[block] = False
        if not cell.doomed[block]:
            return True
        if not cell.holds[block]:
            self.leased_bytes -= cell.present[block] * self.slot_bytes(block)
            self._free_block(block, self.namespaces[cell.namespace[block]])
        return False

    # -- order ---------------------------------------------------------------------------------------------------

    def touch(self, namespace: Namespace, blocks: Rows, *, now: float, hint: TouchHint, asked: bool = True) -> None:
        """Tells the policy of one request's blocks, distinct, given tail first. `asked`: by a reader."""
        if not len(blocks):
            return
        self._count_reuses(blocks, now)
        if namespace.has_one_slot_size:
            self.cohort(namespace, namespace.kv_slot_bytes).touch(blocks, now, hint, asked=asked)
            return
        for unit, some in self._by_slot_units(blocks):
            self.cohort(namespace, unit * SLOT_UNIT_BYTES).touch(some, now, hint, asked=asked)

    def over(self, namespace: Namespace, keys: Sequence[bytes], session_tag: int) -> int:
        """Tells the policies that a session is over; returns how many blocks they believe that of."""
        if keys:
            rows = np.array([block for key in keys if (block := namespace.blocks.get(key)) is not None], np.int32)
        elif session_tag:
            count = len(self.blocks.key)
            mine = self.blocks.session_tag[:count] == np.uint64(session_tag)
            mine &= (self.blocks.namespace[:count] == namespace.index) & (self.blocks.queue_place.at[:count] != 0)
            rows = np.flatnonzero(mine).astype(np.int32)
        else:
            return 0
        found = 0
        for unit, some in self._by_slot_units(distinct_tail_first(rows)) if len(rows) else ():
            chosen = np.asarray(some, np.int32)
            found += self.cohort(namespace, unit * SLOT_UNIT_BYTES).over(chosen, session_tag)
        return found

    def _count_reuses(self, blocks: Rows, now: float) -> None:
        if isinstance(blocks, list):
            touched, reuses, since = self.blocks.cell.touched, self.blocks.cell.reuses, now - SAME_REQUEST_S
            for block in blocks:
                if touched[block] < since:
                    reuses[block] += 1
        else:
            self.blocks.reuses[blocks] += self.blocks.touched[blocks] < now - SAME_REQUEST_S

    def _by_slot_units(self, blocks: Rows) -> list[tuple[int, Rows]]:
        """Splits blocks by their slot size, the smallest first."""
        if isinstance(blocks, list):
            units = [self.blocks.cell.slot_units[block] for block in blocks]
            return [(u, [b for b, of in zip(blocks, units, strict=True) if of == u]) for u in sorted(set(units))]
        column = self.blocks.slot_units[blocks]
        return [(unit, blocks[column == unit]) for unit in np.unique(column).tolist()]

    def cohort(self, namespace: Namespace, slot_bytes: int) -> EvictionPolicy:
        """The policy that orders a namespace's blocks of one slot size, made on first use."""
        found = namespace.cohorts.get(slot_bytes)
        if found is None:
            found = namespace.cohorts[slot_bytes] = self._policy(self.blocks)
            self.cohorts.setdefault(ClassKey(slot_bytes, namespace.pool), {})[namespace.index] = found
            self.namespaces[namespace.index] = namespace
        return found

    def linked(self, blocks: Rows) -> Rows:
        """Returns those of the blocks that are in the index still."""
        doomed = self.blocks.cell.doomed
        return as_rows(
            [block for block in (blocks if isinstance(blocks, list) else blocks.tolist()) if not doomed[block]]
        )

    def forget_namespace(self, namespace: Namespace) -> None:
        """Drops the cohorts of a namespace that no longer exists; it must have no blocks."""
        index = namespace.index
        self.namespaces.pop(index, None)
        for key, cohorts in list(self.cohorts.items()):
            cohorts.pop(index, None)
            if not cohorts:
                del self.cohorts[key]
                self.arena.forget(key)
        self.arena.forget(ClassKey(namespace.kv_slot_bytes, namespace.pool))  # Where no slot was ever to be had.

    def _policy_of(self, block: int) -> EvictionPolicy:
        return self.cohort(self.namespaces[self.blocks.cell.namespace[block]], self.slot_bytes(block))

    # -- checking ------------------------------------------------------------------------------------------------

    def account_fault(self) -> str:
        """Recounts the arena's bytes from the tables; returns what disagrees, empty if nothing does.

        Costs a few milliseconds a million blocks: for idle time in production, where `check` would take seconds.
        """
        blocks, rows = self.blocks, len(self.blocks.key)
        slot = blocks.slot_units[:rows].astype(np.int64) * SLOT_UNIT_BYTES
        present = blocks.present[:rows] * slot
        held = (blocks.holds[:rows] > 0) | (blocks.writing[:rows] & blocks.doomed[:rows])
        counted = {
            "reserved": int((blocks.reserved[:rows] * slot).sum()),
            "leased": int(present[held].sum()),
            "evictable": int(present[~held].sum()),
            "free": self.arena.free_bytes(),
            "of namespaces": self.arena.total_bytes - self.free_bytes,
        }
        kept = {
            "reserved": self.reserved_bytes,
            "leased": self.leased_bytes,
            "evictable": self.evictable_bytes,
            "free": self.free_bytes,
            "of namespaces": sum(n.hot_bytes for n in self.namespaces.values()),
        }
        wrong = [f"{name}: counted {counted[name]}, kept {kept[name]}" for name in kept if counted[name] != kept[name]]
        if (blocks.holds[:rows] < 0).any():
            wrong.append("a block has a negative number of holds")
        return "; ".join(wrong)

    def check(self) -> None:
        """Raises AssertionError unless every table agrees with every other. Costs the number stored: for idle time."""
        self.arena.check()
        reserved = leased = evictable = 0
        for block, key in enumerate(self.blocks.key):
            if key is None:
                continue
            namespace, size = self.namespaces[int(self.blocks.namespace[block])], self.slot_bytes(block)
            first = int(self.blocks.first_part[block])
            state = self.parts.state[first : first + namespace.parts_per_block]
            present, waiting = int((state == PRESENT).sum()), int((state == RESERVED).sum())
            assert present == self.blocks.present[block], f"block {block}: present"
            assert waiting == self.blocks.reserved[block], f"block {block}: reserved"
            is_kept = bool(self.blocks.writing[block] and self.blocks.doomed[block])
            held = self.blocks.holds[block] > 0 or is_kept
            assert held or present > 0, f"block {block}: empty"
            assert self.blocks.holds[block] >= 0, f"block {block}: holds"
            assert held or not waiting, f"block {block}: reserved without a hold"
            assert self.blocks.doomed[block] or namespace.blocks[key] == block, f"block {block}: index"
            assert held or not self.blocks.doomed[block], f"block {block}: doomed and idle"
            reserved += waiting * size
            leased += present * size if held else 0
            evictable += 0 if held else present * size
        assert (reserved, leased, evictable) == (self.reserved_bytes, self.leased_bytes, self.evictable_bytes)
        assert self.arena.free_bytes() == self.free_bytes, (self.arena.free_bytes(), self.free_bytes)
        hot = sum(n.hot_bytes for n in self.namespaces.values())
        assert hot == reserved + leased + evictable, (hot, reserved, leased, evictable)
