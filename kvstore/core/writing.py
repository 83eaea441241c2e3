"""Reserve, Commit and Abort: what writers do.

Blocks are write-once and become visible part by part, each atomically, at Commit and not before. Whatever a writer
reserved and did not commit comes back with its lease, or with the lease's last pin if that is later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.columns import ABSENT, PRESENT, RESERVED
from kvstore.core.counters import Removal
from kvstore.core.eviction.base import NO_HINT, TouchHint
from kvstore.core.few import Offsets, Rows, as_rows, distinct_tail_first
from kvstore.core.leases import LeaseTable, WriteLease
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records
from kvstore.core.sessions import Session
from kvstore.core.space import Space
from kvstore_wire.errors import InvalidArgument, LeaseExpired
from kvstore_wire.namespace import Kind
from kvstore_wire.states import PartState

_RESERVE_COUNTERS: dict[int, str] = {
    PartState.CREATED: "reserve_created_parts",
    PartState.PRESENT: "reserve_present_parts",
    PartState.IN_FLIGHT: "reserve_in_flight_parts",
    PartState.FULL: "reserve_full_parts",
    PartState.QUOTA: "reserve_quota_parts",
    PartState.TOO_LARGE: "reserve_too_large_parts",
    PartState.DRAINING: "reserve_draining_parts",
    PartState.BEYOND: "reserve_beyond_parts",
}


class ReserveRequest(NamedTuple):
    """What to reserve. `lengths` has one entry a key in OPAQUE namespaces and is empty in KV ones."""

    keys: Sequence[bytes]
    lease_s: float
    parts: tuple[int, ...] = ()
    lengths: Sequence[int] = ()
    hint: TouchHint = NO_HINT


class Reserved(NamedTuple):
    """Answer to Reserve: the lease (None if nothing was created) and the state of each part, key by key."""

    lease: WriteLease | None
    states: bytes


class _Wish(NamedTuple):
    """One block to reserve parts of: its key's index, its row if it exists, and the parts to create."""

    at: int
    block: int | None
    parts: tuple[int, ...]
    length: int


@dataclass(eq=False)
class _Plan:
    """A Reserve under way: each key's block (-1 = none yet), the states of its parts so far, what needs slots, and what
    got them."""

    chosen: tuple[int, ...]
    keys: Sequence[bytes]
    known: list[int]
    states: bytearray  # Key by key.
    wishes: list[_Wish] = field(default_factory=list)
    repeats: dict[int, int] = field(default_factory=dict)  # Index of a key given again -> its first index.
    share_bytes: int = 0  # What may be reserved yet before the leased share ends.
    blocks: list[int] = field(default_factory=list)  # Those with created parts, and these.
    parts: list[int] = field(default_factory=list)  # In key then part order.

    def mark(self, wish: _Wish, state: PartState) -> None:
        """Answers the parts of a wish."""
        width = len(self.chosen)
        start = wish.at * width
        if width == 1:
            self.states[start] = state
        elif len(wish.parts) == width:
            self.states[start : start + width] = bytes((state,)) * width
        else:
            for part in wish.parts:
                self.states[start + self.chosen.index(part)] = state

    def answer_repeats(self) -> None:
        """Answers a key given again as the first time; what that created is in flight."""
        width = len(self.chosen)
        for at, first in self.repeats.items():
            row = self.states[first * width : (first + 1) * width]
            self.states[at * width : (at + 1) * width] = row.translate(_GIVEN_AGAIN)


_KNOWN_STATES = {ABSENT: PartState.REFUSED, RESERVED: PartState.IN_FLIGHT, PRESENT: PartState.PRESENT}
_GIVEN_AGAIN = bytes.maketrans(bytes((PartState.CREATED,)), bytes((PartState.IN_FLIGHT,)))
# Read for every part, where a member of an enum costs as much as all the rest.
_PRESENT, _COMMITTED, _UNFILLED, _LOST = (
    int(state) for state in (PartState.PRESENT, PartState.COMMITTED, PartState.UNFILLED, PartState.LOST)
)


@dataclass
class Writer:
    """The writing half of a shard. `leased_share_bytes` bounds all that is leased or reserved."""

    records: Records
    leases: LeaseTable
    space: Space
    leased_share_bytes: int
    call_bytes: int
    draining: bool = False

    def reserve(self, session: Session, namespace: Namespace, request: ReserveRequest, now: float) -> Reserved:
        """Takes slots for the parts that are neither stored nor being written.

        Raises InvalidArgument (more bytes than one call may hold) and TableFull; then nothing changed.
        """
        chosen = request.parts or namespace.all_parts
        session.check_room()
        lease = WriteLease(self.leases.new_id(), session.id, namespace, now + request.lease_s)
        self.space.start()
        plan = self._plan(namespace, request, chosen, now)
        if len(plan.states) * namespace.spec.part_bytes > self.call_bytes:
            self._check_size(namespace, plan.wishes)
        # Before this call's own holds, which end with it and are no leases.
        plan.share_bytes = self.leased_share_bytes - self.records.leased_bytes - self.records.reserved_bytes
        # Held, so that making room cannot take this call's own blocks.
        own = distinct_tail_first(as_rows([block for block in plan.known if block >= 0]))
        if len(own):
            self.records.hold(own)
            self.records.touch(namespace, own, now=now, hint=request.hint, asked=False)
        self._create(namespace, plan, now)
        if plan.parts:
            self._touch_all(namespace, plan.known, now=now, hint=request.hint)
        if len(own):
            self.records.unhold(own, now)
        if plan.repeats:
            plan.answer_repeats()
        _count(namespace, plan.states)
        if not plan.parts:
            return Reserved(None, bytes(plan.states))
        lease.parts, lease.blocks = as_rows(plan.parts), as_rows(plan.blocks[::-1])
        lease.landed, lease.open = bytearray(len(plan.parts)), bytearray(b"\x01") * len(plan.parts)
        self.leases.add(lease)
        session.leases.add(lease.id)
        return Reserved(lease, bytes(plan.states))

    def commit(self, lease: WriteLease, indexes: Sequence[int], checksums: Sequence[int], now: float) -> bytes:
        """Makes landed parts of a live lease visible; answers one PartState an index. The last part ends the lease.

        Raises LeaseExpired for an ended lease, InvalidArgument for an index out of range or given twice, and a wrong
        number of checksums; then nothing changed.
        """
        if lease.ended:
            raise LeaseExpired(f"write lease {lease.id} has ended", field="lease")
        _check_indexes(indexes, len(lease.parts), len(checksums))
        states = self._verdicts(lease, indexes)
        lost = self._open_lost(lease, indexes, states) if _LOST in states else []
        good = [i for i, s in enumerate(states) if s == _COMMITTED]
        self._drop(lease, lost)
        if good:
            parts = _numbers(lease.parts)
            for i in good:
                lease.open[indexes[i]] = 0
            self.records.publish([parts[indexes[i]] for i in good], [checksums[i] for i in good])
        lease.namespace.counters.add("committed_parts", len(good))
        lease.namespace.counters.add("lost_parts", len(lost))
        if 1 not in lease.open:
            self.end(lease, now)
        return bytes(states)

    def drop(self, lease: WriteLease, indexes: list[int], now: float) -> None:
        """Gives up open parts of a live lease that will never land; the last open part ends it."""
        lease.namespace.counters.add("abandoned_parts", len(indexes))
        self._drop(lease, indexes)
        if 1 not in lease.open:
            self.end(lease, now)

    def end(self, lease: WriteLease, now: float) -> None:
        """Ends a write lease and drops what it had not committed. What it held comes back now or with its last pin."""
        self.leases.end(lease)
        left = [index for index, is_open in enumerate(lease.open) if is_open] if 1 in lease.open else []
        lease.namespace.counters.add("abandoned_parts", len(left))
        self._drop(lease, left)
        if not lease.pins:
            self.records.unhold(lease.blocks, now)

    def unpinned(self, lease: WriteLease, now: float) -> None:
        """Takes back the slots of parts dropped under the pins, and the holds if the lease has ended."""
        owed, lease.owed = lease.owed, []
        self.records.abandon(lease.namespace, owed)
        if lease.ended:
            self.records.unhold(lease.blocks, now)

    def _drop(self, lease: WriteLease, indexes: list[int]) -> None:
        """Closes open parts that will never be visible; where a copy may still go on, their slots come back later."""
        if not indexes:
            return
        for index in indexes:
            lease.open[index] = 0
        rows = _numbers(lease.parts)
        parts = [rows[index] for index in indexes]
        if lease.pins:
            lease.owed += parts
        else:
            self.records.abandon(lease.namespace, parts)

    def _verdicts(self, lease: WriteLease, indexes: Sequence[int]) -> bytearray:
        """Tells of each part whether it can be committed."""
        doomed, block, parts = self.records.blocks.cell.doomed, self.records.parts.cell.block, _numbers(lease.parts)
        states = bytearray(len(indexes))
        for i, index in enumerate(indexes):
            if doomed[block[parts[index]]]:
                states[i] = _LOST
            elif not lease.open[index]:
                states[i] = _PRESENT
            else:
                states[i] = _COMMITTED if lease.landed[index] else _UNFILLED
        return states

    @staticmethod
    def _open_lost(lease: WriteLease, indexes: Sequence[int], states: bytearray) -> list[int]:
        return [index for index, s in zip(indexes, states, strict=True) if s == _LOST and lease.open[index]]

    # -- reserve, step by step -----------------------------------------------------------------------------------

    def _plan(self, namespace: Namespace, request: ReserveRequest, chosen: tuple[int, ...], now: float) -> _Plan:
        """Answers the parts that need no slot and lists the blocks that do."""
        keys, get = request.keys, namespace.blocks.get
        self._expire(namespace, keys, now)
        known = [get(key, -1) for key in keys]
        plan = _Plan(chosen, keys, known, bytearray(len(keys) * len(chosen)))
        seen: dict[bytes, int] = {}
        for at, key in enumerate(keys):
            length = request.lengths[at] if request.lengths else namespace.spec.part_bytes
            first = seen.setdefault(key, at)
            if first != at:
                plan.repeats[at] = first
            elif known[at] < 0:
                plan.wishes.append(_Wish(at, None, chosen, length))
            else:
                self._plan_known(plan, at, length)
        return plan

    def _plan_known(self, plan: _Plan, at: int, length: int) -> None:
        block, cell = plan.known[at], self.records.parts.cell
        first, width = self.records.blocks.cell.first_part[block], len(plan.chosen)
        state = [cell.state[first + part] for part in plan.chosen]
        plan.states[at * width : (at + 1) * width] = bytes([_KNOWN_STATES[s] for s in state])
        missing = tuple([part for part, s in zip(plan.chosen, state, strict=True) if s == ABSENT])
        if missing:
            plan.wishes.append(_Wish(at, block, missing, length))

    def _expire(self, namespace: Namespace, keys: Sequence[bytes], now: float) -> None:
        """Removes blocks past their life, so that they can be written anew."""
        if namespace.rules.ttl_s is None:
            return
        for key in keys:
            block = namespace.blocks.get(key)
            if block is not None and self.records.blocks.cell.created[block] + namespace.rules.ttl_s <= now:
                self.records.unlink(block, Removal.TTL)

    def _check_size(self, namespace: Namespace, wishes: list[_Wish]) -> None:
        most = namespace.spec.part_bytes
        size = sum([len(w.parts) * min(w.length, most) for w in wishes])
        if size > self.call_bytes:
            raise InvalidArgument(f"{size} bytes to reserve", field="chain.keys", limit=f"{self.call_bytes} bytes")

    def _create(self, namespace: Namespace, plan: _Plan, now: float) -> None:
        """Gives slots wish by wish, in runs of one slot size; in a chain nothing follows the first refusal."""
        stopped = False
        for slot_bytes, run in _runs(namespace, plan.wishes):
            if stopped:
                for wish in run:
                    plan.mark(wish, PartState.BEYOND)
                continue
            count, why = self._create_run(namespace, plan, run, slot_bytes=slot_bytes, now=now)
            for wish in run[:count]:
                plan.mark(wish, PartState.CREATED)
            for i, wish in enumerate(run[count:]):
                plan.mark(wish, PartState.BEYOND if i and namespace.is_chained else why)
            stopped = namespace.is_chained and count < len(run)

    def _create_run(
        self, namespace: Namespace, plan: _Plan, run: list[_Wish], *, slot_bytes: int, now: float
    ) -> tuple[int, PartState]:
        """Creates the leading blocks of a run; returns how many, and why the next was refused."""
        if self.draining:
            return 0, PartState.DRAINING
        if run[0].length > namespace.spec.part_bytes or slot_bytes > self.records.arena.page_bytes:
            return 0, PartState.TOO_LARGE
        asked = sum([len(w.parts) for w in run])
        need = min(asked, max(0, plan.share_bytes // slot_bytes))
        allowed = self.space.shrink(namespace, slot_bytes, need * slot_bytes) // slot_bytes
        why = PartState.QUOTA if allowed < need else PartState.FULL
        wishes = run if allowed >= asked else _leading(run, allowed)
        blocks = self._rows(namespace, plan, wishes, slot_bytes=slot_bytes, now=now)
        wishes = wishes[: len(blocks)]
        parts = self._part_rows(blocks, wishes)
        owners = as_rows(parts)
        offsets = self.space.allocate(namespace, owners, slot_bytes=slot_bytes, now=now)
        fit = len(wishes)
        if len(offsets) < len(parts):
            fit = len(_leading(wishes, len(offsets)))
            used = sum([len(w.parts) for w in wishes[:fit]])
            self._take_back(namespace, blocks[fit:], wishes[fit:], offsets=offsets[used:])
            blocks, wishes, owners, offsets = blocks[:fit], wishes[:fit], owners[:used], offsets[:used]
        plan.share_bytes -= len(owners) * slot_bytes
        self._adopt(namespace, plan, blocks, wishes, owners=owners, offsets=offsets, now=now)
        return fit, why

    def _take_back(self, namespace: Namespace, blocks: list[int], wishes: list[_Wish], *, offsets: Offsets) -> None:
        """Gives up blocks that did not get all their slots, and the slots that they got."""
        self.records.arena.free(offsets if isinstance(offsets, list) else offsets.tolist())
        for block, wish in zip(blocks, wishes, strict=True):
            if wish.block is None:
                self.records.drop_new_block(namespace, block)

    def _rows(
        self, namespace: Namespace, plan: _Plan, wishes: list[_Wish], *, slot_bytes: int, now: float
    ) -> list[int]:
        """Makes rows for the new blocks of a run; stops early if the tables are full and nothing may go."""
        blocks: list[int] = []
        for wish in wishes:
            block = wish.block
            while block is None:
                block = self.records.new_block(namespace, plan.keys[wish.at], slot_bytes)
                if block is None and not self.space.evict_any(namespace, now):
                    return blocks
            blocks.append(block)
        return blocks

    def _part_rows(self, blocks: list[int], wishes: list[_Wish]) -> list[int]:
        first = self.records.blocks.cell.first_part
        rows: list[int] = []
        for block, wish in zip(blocks, wishes, strict=True):
            start = first[block]
            rows += [start + part for part in wish.parts]
        return rows

    def _adopt(
        self,
        namespace: Namespace,
        plan: _Plan,
        blocks: list[int],
        wishes: list[_Wish],
        *,
        owners: Rows,
        offsets: Offsets,
        now: float,
    ) -> None:
        """Links new blocks, gives parts their slots and holds every block for the lease."""
        if not blocks:
            return
        lengths = [wish.length for wish in wishes for _ in wish.parts]
        self.records.reserve_slots(namespace, owners, offsets=offsets, lengths=lengths)
        for block, wish in zip(blocks, wishes, strict=True):
            if wish.block is None:
                self.records.link(namespace, block, now)
                plan.known[wish.at] = block
        self.records.hold(as_rows(blocks))
        plan.blocks += blocks
        plan.parts += owners if isinstance(owners, list) else owners.tolist()

    def _touch_all(self, namespace: Namespace, known: list[int], *, now: float, hint: TouchHint) -> None:
        """The whole chain as one request, stored head included; blocks removed while room was made are left out."""
        doomed = self.records.blocks.cell.doomed
        blocks = as_rows([block for block in known if block >= 0 and not doomed[block]])
        self.records.touch(namespace, distinct_tail_first(blocks), now=now, hint=hint, asked=False)


def _numbers(rows: Rows) -> Sequence[int]:
    """The same rows, as ints one by one."""
    return rows if isinstance(rows, list) else rows.data


def _count(namespace: Namespace, states: bytearray) -> None:
    """Counts one call and what it answered."""
    counters = namespace.counters
    counters.add("reserve_calls")
    for state in set(states):
        name = _RESERVE_COUNTERS.get(state)
        if name is not None:
            counters.add(name, states.count(state))


def _runs(namespace: Namespace, wishes: list[_Wish]) -> list[tuple[int, list[_Wish]]]:
    """Cuts wishes into runs of one slot size (KV: one run), keeping their order; too long values stand alone."""
    if namespace.spec.kind is Kind.KV:
        return [(namespace.kv_slot_bytes, wishes)] if wishes else []
    runs: list[tuple[int, list[_Wish]]] = []
    limit = namespace.spec.part_bytes
    for wish in wishes:
        size = namespace.slot_bytes(wish.length)
        same = bool(runs) and runs[-1][0] == size and (runs[-1][1][0].length > limit) == (wish.length > limit)
        if same:
            runs[-1][1].append(wish)
        else:
            runs.append((size, [wish]))
    return runs


def _leading(wishes: list[_Wish], parts: int) -> list[_Wish]:
    """The leading blocks that need no more than `parts` slots: a block is created whole or not at all."""
    for i, wish in enumerate(wishes):
        parts -= len(wish.parts)
        if parts < 0:
            return wishes[:i]
    return wishes


def _check_indexes(indexes: Sequence[int], parts: int, checksums: int) -> None:
    if checksums != len(indexes):
        raise InvalidArgument(f"{checksums} checksums for {len(indexes)} parts", field="checksums")
    if len(set(indexes)) != len(indexes):
        raise InvalidArgument("a part is named twice", field="parts")
    if indexes and not 0 <= min(indexes) <= max(indexes) < parts:
        raise InvalidArgument(f"names part {max(indexes)}", field="parts", limit=f"0-{parts - 1}")
