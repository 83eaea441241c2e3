"""Match, Acquire and Release: what readers do.

An Acquire is a small state machine (`Acquisition`) that the shell steps: each step leases what is ready, in order, and
stops at the first block that is being written if the caller may wait for it. The shell steps it again when the block
changed, and ends it when the wait is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.arena import SLOT_UNIT_BYTES
from kvstore.core.columns import PRESENT, RESERVED, Bytes, Flags, Ids
from kvstore.core.counters import Removal
from kvstore.core.eviction.base import NO_HINT, TouchHint
from kvstore.core.leases import NO_IDS, LeaseTable, ReadLease
from kvstore.core.lookup import each_block, leading_blocks
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records
from kvstore.core.sessions import Session
from kvstore_wire.errors import UnknownSession
from kvstore_wire.states import BlockState, Coverage


@dataclass(frozen=True)
class AcquireRequest:
    """What to lease. `parts` is empty for all parts of each block."""

    keys: Sequence[bytes]
    lease_s: float
    parts: tuple[int, ...] = ()
    coverage: Coverage = Coverage.PREFIX
    hint: TouchHint = NO_HINT


@dataclass(eq=False)
class Acquisition:
    """An Acquire under way. `waits_for` is the block whose change steps it, None if it is settled."""

    session: Session
    namespace: Namespace
    request: AcquireRequest
    lease: ReadLease | None = None
    next: int = 0
    waits_for: int | None = None
    leased_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """What one step decided: states of keys[first:], and the parts leased by it, in key then part order."""

    first: int
    states: bytes
    parts: Ids
    settled: bool


@dataclass(frozen=True)
class Matched:
    """Answer to Match: leading blocks stored, and the state of each key."""

    prefix_blocks: int
    states: bytes


@dataclass
class ReadLimits:
    """`leased_share_bytes` bounds all that is leased or reserved, `call_bytes` what one lease may hold."""

    leased_share_bytes: int
    call_bytes: int


@dataclass
class Reader:
    """The reading half of a shard."""

    records: Records
    leases: LeaseTable
    limits: ReadLimits
    waiting: dict[int, list[Acquisition]] = field(default_factory=dict)

    def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, parts: tuple[int, ...], coverage: Coverage, now: float
    ) -> Matched:
        """Tells which blocks are stored with all the parts asked for. Changes nothing but counters."""
        states = bytearray(len(keys))
        at, blocks = self._known(namespace, list(keys), coverage)
        ready, reserved, _ = self._ready(namespace, blocks, parts, now)
        answers = np.where(ready, np.uint8(BlockState.HOT), np.where(reserved, np.uint8(BlockState.IN_FLIGHT), 0))
        view = np.frombuffer(states, np.uint8)
        view[at] = answers
        misses = np.flatnonzero(view != BlockState.HOT)
        prefix = int(misses[0]) if len(misses) else len(keys)
        if coverage is Coverage.PREFIX:
            view[prefix + 1 :] = BlockState.BEYOND
        hits = prefix if coverage is Coverage.PREFIX else len(keys) - len(misses)
        counters = namespace.counters
        counters.add("match_calls")
        counters.add("match_asked_blocks", len(keys))
        counters.add("match_hit_blocks", hits)
        return Matched(prefix, bytes(states))

    def begin(self, session: Session, namespace: Namespace, request: AcquireRequest) -> Acquisition:
        """Starts an Acquire; nothing is leased before the first step."""
        namespace.counters.add("acquire_calls")
        namespace.counters.add("acquire_asked_blocks", len(request.keys))
        return Acquisition(session, namespace, request)

    def step(self, acquisition: Acquisition, now: float) -> Step:
        """Leases what is ready; stops at the first block in flight and waits for it.

        Raises TableFull when too many leases are open, UnknownSession when the session has ended meanwhile.
        """
        return self._advance(acquisition, now, stop_at_flight=True)

    def finish(self, acquisition: Acquisition, now: float) -> Step:
        """Settles an Acquire: what is in flight still is answered so, and later blocks as their coverage says."""
        return self._advance(acquisition, now, stop_at_flight=False)

    def cancel(self, acquisition: Acquisition) -> None:
        """Ends the waiting of an Acquire whose caller has gone; its lease is the caller's to end."""
        self._stop_waiting(acquisition)

    def waiting_in(self, session: Session) -> list[Acquisition]:
        """Takes out the Acquires of a session that has ended."""
        found = [a for waiters in self.waiting.values() for a in waiters if a.session is session]
        for acquisition in found:
            self._stop_waiting(acquisition)
        return found

    def woken_by(self, block: int) -> list[Acquisition]:
        """Takes out the Acquires that wait for a block."""
        woken = self.waiting.pop(block, [])
        for acquisition in woken:
            acquisition.waits_for = None
        return woken

    def end(self, lease: ReadLease, now: float) -> None:
        """Ends a read lease and gives up its holds, now or with its last pin."""
        self.leases.end(lease)
        if not lease.pins:
            self._let_go(lease, now)

    def unpinned(self, lease: ReadLease, now: float) -> None:
        """Gives up what a lease that ended under its pins held."""
        if lease.ended:
            self._let_go(lease, now)

    def drop_corrupt(self, block: int) -> None:
        """Removes a block whose stored bytes do not match their checksum any more."""
        if not self.records.blocks.doomed[block]:
            self.records.unlink(block, Removal.CORRUPT)

    def _let_go(self, lease: ReadLease, now: float) -> None:
        if len(lease.blocks):
            self.records.unhold(lease.blocks[::-1], now)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _advance(self, acq: Acquisition, now: float, *, stop_at_flight: bool) -> Step:
        self._stop_waiting(acq)
        if acq.session.ended:
            raise UnknownSession("the session ended while the call waited", field="session")
        if acq.lease is not None and (acq.lease.ended or acq.lease.deadline <= now):
            return self._give_up(acq)
        keys = list(acq.request.keys[acq.next :])
        coverage, first = acq.request.coverage, acq.next
        at, blocks = self._known(acq.namespace, keys, coverage)
        ready, reserved, rows = self._ready(acq.namespace, blocks, acq.request.parts, now)
        states: Bytes = np.zeros(len(keys), np.uint8)
        states[at] = np.where(ready, np.uint8(BlockState.HOT), np.where(reserved, np.uint8(BlockState.IN_FLIGHT), 0))
        end = self._end(states, coverage, stop_at_flight=stop_at_flight)
        waits = stop_at_flight and end < len(keys) and states[end] == BlockState.IN_FLIGHT
        wanted = np.flatnonzero(ready & (at < end)).astype(np.int32)
        chosen = self._within_share(acq, blocks, wanted, states, at)
        if len(chosen) < len(wanted) and coverage is Coverage.PREFIX:  # BUSY ends the prefix: nothing to wait for.
            waits = False
        self._lease(acq, blocks[chosen], rows[chosen].ravel(), now)
        if waits:
            self._wait(acq, int(blocks[np.flatnonzero(at == end)[0]]))
            states = states[:end]
        elif coverage is Coverage.PREFIX:
            misses = np.flatnonzero(states != BlockState.HOT)
            if len(misses):
                states[int(misses[0]) + 1 :] = BlockState.BEYOND
        acq.next = first + len(states)
        self._count(acq.namespace, states)
        return Step(first, states.tobytes(), rows[chosen].ravel(), settled=not waits)

    def _give_up(self, acq: Acquisition) -> Step:
        """Settles an Acquire whose lease ended while it waited: nothing more can come under that lease."""
        first, left = acq.next, len(acq.request.keys) - acq.next
        prefix = acq.request.coverage is Coverage.PREFIX
        states = np.full(left, BlockState.BEYOND if prefix else BlockState.MISSING, np.uint8)
        acq.next = len(acq.request.keys)
        self._count(acq.namespace, states)
        return Step(first, states.tobytes(), NO_IDS, settled=True)

    @staticmethod
    def _end(states: Bytes, coverage: Coverage, *, stop_at_flight: bool) -> int:
        """Index of the first key that this step must not lease."""
        if coverage is Coverage.PREFIX:
            stops = np.flatnonzero(states != BlockState.HOT)
        elif stop_at_flight:
            stops = np.flatnonzero(states == BlockState.IN_FLIGHT)
        else:
            return len(states)
        return int(stops[0]) if len(stops) else len(states)

    def _within_share(self, acq: Acquisition, blocks: Ids, chosen: Ids, states: Bytes, at: Ids) -> Ids:
        """Cuts the blocks to lease where the shard's leased share or the call's bytes end; marks the rest BUSY."""
        if not len(chosen):
            return chosen
        columns = self.records.blocks
        parts = len(acq.request.parts) or acq.namespace.parts_per_block
        size = columns.slot_units[blocks[chosen]].astype(np.int64) * SLOT_UNIT_BYTES
        call_total = np.cumsum(size * parts) + acq.leased_bytes
        newly = np.cumsum(np.where(columns.holds[blocks[chosen]] == 0, size * columns.present[blocks[chosen]], 0))
        held = self.records.leased_bytes + self.records.reserved_bytes
        fits = (call_total <= self.limits.call_bytes) & (
            (newly == 0) | (held + newly <= self.limits.leased_share_bytes)
        )
        count = len(fits) if fits.all() else int(np.argmin(fits))
        states[at[chosen[count:]]] = BlockState.BUSY
        if count:
            acq.leased_bytes = int(call_total[count - 1])
        return chosen[:count]

    def _lease(self, acq: Acquisition, blocks: Ids, parts: Ids, now: float) -> None:
        if not len(blocks):
            return
        deadline = now + acq.request.lease_s
        if acq.lease is not None:  # Each message's grants last as long as the first one's.
            self.leases.renew(acq.lease, max(deadline, acq.lease.deadline))
        else:
            acq.session.check_room()
            acq.lease = ReadLease(self.leases.new_id(), acq.session.id, acq.namespace, deadline)
            self.leases.add(acq.lease)
            acq.session.leases.add(acq.lease.id)
        lease = acq.lease
        self.records.hold(blocks)
        lease.blocks = np.concatenate((lease.blocks, blocks)) if len(lease.blocks) else blocks
        lease.parts = np.concatenate((lease.parts, parts)) if len(lease.parts) else parts
        # The whole request again, so that blocks that arrived late are still older than the head before them.
        self.records.touch(acq.namespace, distinct_tail_first(lease.blocks), now=now, hint=acq.request.hint)

    def _wait(self, acq: Acquisition, block: int) -> None:
        acq.waits_for = block
        self.waiting.setdefault(block, []).append(acq)

    def _stop_waiting(self, acq: Acquisition) -> None:
        if acq.waits_for is not None:
            others = self.waiting[acq.waits_for]
            others.remove(acq)
            if not others:
                del self.waiting[acq.waits_for]
            acq.waits_for = None

    def _count(self, namespace: Namespace, states: Bytes) -> None:
        counts = np.bincount(states, minlength=len(BlockState)).tolist()
        counters = namespace.counters
        counters.add("acquire_leased_blocks", counts[BlockState.HOT])
        counters.add("acquire_missing_blocks", counts[BlockState.MISSING] + counts[BlockState.BEYOND])
        counters.add("acquire_busy_blocks", counts[BlockState.BUSY])
        counters.add("acquire_late_blocks", counts[BlockState.IN_FLIGHT])

    # -- looking -------------------------------------------------------------------------------------------------

    def _known(self, namespace: Namespace, keys: list[bytes], coverage: Coverage) -> tuple[Ids, Ids]:
        """Returns (indexes of keys, their blocks) for keys in the index; PREFIX stops before the first that is not."""
        if coverage is Coverage.PREFIX:
            blocks = leading_blocks(self.records.blocks, namespace, keys)
            return np.arange(len(blocks), dtype=np.int32), blocks
        blocks = each_block(namespace, keys)
        at = np.flatnonzero(blocks >= 0).astype(np.int32)
        return at, blocks[at]

    def _ready(self, namespace: Namespace, blocks: Ids, parts: tuple[int, ...], now: float) -> tuple[Flags, Flags, Ids]:
        """Returns, for each block, whether all its parts asked for are present, whether it is not but the missing
        ones are being written, and the rows of those parts (shape: blocks x parts)."""
        columns = self.records.blocks
        chosen = np.array(parts or range(namespace.parts_per_block), np.int32)
        rows: Ids = columns.first_part[blocks][:, None] + chosen
        state = self.records.parts.state[rows]
        present = state == PRESENT
        ready = present.all(axis=1)
        reserved = ~ready & (present | (state == RESERVED)).all(axis=1)
        if namespace.rules.ttl_s is not None:
            young = columns.created[blocks] + namespace.rules.ttl_s > now
            ready, reserved = ready & young, reserved & young
        return ready, reserved, rows


def distinct_tail_first(blocks: Ids) -> Ids:
    """Returns the distinct blocks, the last one first."""
    order = list(dict.fromkeys(blocks[::-1].tolist()))
    return np.array(order, np.int32) if order else NO_IDS
