"""Match, Acquire and Release: what readers do.

An Acquire is a small state machine (`Acquisition`) that the shell steps: each step leases what is ready, in order, and
stops at the first block that is being written if the caller may wait for it. The shell steps it again when the block
changed, and ends it when the wait is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvstore.core.counters import Removal
from kvstore.core.eviction.base import NO_HINT, TouchHint
from kvstore.core.few import Rows, distinct_tail_first, joined
from kvstore.core.leases import LeaseTable, ReadLease
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records
from kvstore.core.sessions import Session
from kvstore.core.sight import BEYOND, BUSY, HOT, IN_FLIGHT, MISSING, WARM, Ask, Grant, Room, hot_prefix, look
from kvstore_wire.errors import UnknownSession
from kvstore_wire.states import Coverage

# Tells of each key whether the warm tier has its block, whole. Asked for what memory does not have.
Elsewhere: TypeAlias = "Callable[[Namespace, Sequence[bytes]], Sequence[bool]]"
_ASKED_AT_ONCE = 256  # Keys: a prefix mostly ends soon.


class AcquireRequest(NamedTuple):
    """What to lease. `parts` is empty for all parts of each block."""

    keys: Sequence[bytes]
    lease_s: float
    parts: tuple[int, ...] = ()
    coverage: Coverage = Coverage.PREFIX
    hint: TouchHint = NO_HINT


_STORED = bytes((HOT, WARM))


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

    def ask(self, now: float) -> Ask:
        """Returns what is looked for."""
        parts = self.request.parts or self.namespace.all_parts
        return Ask(self.namespace, self.request.keys, parts, self.request.coverage, now)


class Step(NamedTuple):
    """What one step decided: states of keys[first:], and the parts leased by it, in key then part order."""

    first: int
    states: bytes
    parts: Rows
    settled: bool


class Glimpse(NamedTuple):
    """What a glance found: the state of each key, and what may be read."""

    states: bytes
    grant: Grant


class Matched(NamedTuple):
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
    """The reading half of a shard. `elsewhere` is None without a warm tier."""

    records: Records
    leases: LeaseTable
    limits: ReadLimits
    waiting: dict[int, list[Acquisition]] = field(default_factory=dict)
    elsewhere: Elsewhere | None = None

    def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, parts: tuple[int, ...], coverage: Coverage, now: float
    ) -> Matched:
        """Tells which blocks are stored with all the parts asked for. Changes nothing but counters."""
        ask = Ask(namespace, keys, parts or namespace.all_parts, coverage, now)
        states = look(self.records, ask).states
        prefix = hot_prefix(states)
        if self.elsewhere is not None and prefix < len(states):
            self._mark_stored(self.elsewhere, ask, states, prefix)
            prefix = len(states) - len(states.lstrip(_STORED))
        hits = prefix if coverage is Coverage.PREFIX else states.count(HOT) + states.count(WARM)
        if coverage is Coverage.PREFIX:
            _mark_beyond(states, prefix + 1)
        counters = namespace.counters
        counters.add("match_warm_blocks", states.count(WARM))
        counters.add("match_calls")
        counters.add("match_asked_blocks", len(keys))
        counters.add("match_hit_blocks", hits)
        return Matched(prefix, bytes(states))

    def waits(self, ask: Ask) -> bool:
        """Whether an Acquire that may wait would: for a block in flight, or for one on disk."""
        states = look(self.records, ask).states
        if ask.coverage is Coverage.PREFIX:
            at = hot_prefix(states)
            if at == len(states):
                return False
            if states[at] == IN_FLIGHT:
                return True
            return self.elsewhere is not None and bool(self.elsewhere(ask.namespace, ask.keys[at : at + 1])[0])
        if IN_FLIGHT in states:
            return True
        missing = [key for key, state in zip(ask.keys, states, strict=True) if state == MISSING]
        return bool(missing) and self.elsewhere is not None and any(self.elsewhere(ask.namespace, missing))

    def wanted_from_disk(self, ask: Ask) -> list[int]:
        """Returns the indexes of the keys whose blocks an Acquire would get from disk, if they were brought in time."""
        states = look(self.records, ask).states
        start = hot_prefix(states) if ask.coverage is Coverage.PREFIX else 0
        if self.elsewhere is None or start == len(states):
            return []
        self._mark_stored(self.elsewhere, ask, states, start, or_in_flight=True)
        return [at for at, state in enumerate(states) if state == WARM]

    def _mark_stored(
        self, elsewhere: Elsewhere, ask: Ask, states: bytearray, start: int, *, or_in_flight: bool = False
    ) -> None:
        """Fills in what is on disk from the first key on that is not HOT; PREFIX stops where neither tier has a block.

        `or_in_flight`: what is being written counts as stored in memory.
        """
        is_prefix = ask.coverage is Coverage.PREFIX
        known = (HOT, IN_FLIGHT) if or_in_flight else (HOT,)
        for at in range(start, len(states), _ASKED_AT_ONCE):
            keys = ask.keys[at : at + _ASKED_AT_ONCE]
            there = elsewhere(ask.namespace, keys)
            if is_prefix and at == start and not there[0] and states[at] not in known:
                return
            here = look(self.records, ask._replace(keys=keys, coverage=Coverage.EACH)).states
            for i, state in enumerate(here, at):
                states[i] = WARM if there[i - at] and state not in known else state
                if is_prefix and states[i] not in known and states[i] != WARM:
                    return

    def _mark_warm(self, namespace: Namespace, keys: Sequence[bytes], states: bytearray, coverage: Coverage) -> None:
        """Tells of blocks that are not in memory but on disk; of a prefix only the one that ends it."""
        assert self.elsewhere is not None
        end = states.find(MISSING)
        if end >= 0 and coverage is Coverage.PREFIX:
            states[end] = WARM if self.elsewhere(namespace, keys[end : end + 1])[0] else MISSING
        elif end >= 0:
            missing = [i for i, state in enumerate(states) if state == MISSING]
            for i, is_there in zip(missing, self.elsewhere(namespace, [keys[i] for i in missing]), strict=True):
                states[i] = WARM if is_there else MISSING

    def glance(self, namespace: Namespace, request: AcquireRequest, now: float) -> Glimpse:
        """As an Acquire that waits for nothing, its bytes taken and its lease released in one moment: leases nothing.

        The parts told are there until control goes back to the event loop, and not a moment longer, unless `keep` is
        called before.
        """
        counters = namespace.counters
        counters.add("acquire_calls")
        counters.add("acquire_asked_blocks", len(request.keys))
        parts = request.parts or namespace.all_parts
        sight = look(self.records, Ask(namespace, request.keys, parts, request.coverage, now))
        states, records = sight.states, self.records
        end = _end(states, request.coverage, stop_at_flight=False)
        share = self.limits.leased_share_bytes - records.leased_bytes - records.reserved_bytes
        grant = sight.grant(end, Room(self.limits.call_bytes, share))
        if len(grant.blocks):
            records.touch(namespace, distinct_tail_first(grant.blocks), now=now, hint=request.hint)
        if request.coverage is Coverage.PREFIX:
            _mark_beyond(states, (hot_prefix(states) if grant.cut else end) + 1)
        if self.elsewhere is not None and len(grant.blocks) < len(states):
            self._mark_warm(namespace, request.keys, states, request.coverage)
        _count(namespace, states)
        return Glimpse(bytes(states), grant)

    def keep(self, session: Session, namespace: Namespace, grant: Grant, *, lease_s: float, now: float) -> ReadLease:
        """Leases what a `glance` told of in this very moment. Raises TableFull."""
        session.check_room()
        lease = self._new_lease(session, namespace, now + lease_s)
        self.records.hold(grant.blocks)
        lease.blocks, lease.parts = grant.blocks, grant.parts
        return lease

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
        request, first = acq.request, acq.next
        keys = request.keys[first:] if first else request.keys
        parts = request.parts or acq.namespace.all_parts
        sight = look(self.records, Ask(acq.namespace, keys, parts, request.coverage, now))
        states = sight.states
        end = _end(states, request.coverage, stop_at_flight=stop_at_flight)
        waits = stop_at_flight and end < len(states) and states[end] == IN_FLIGHT
        grant = sight.grant(end, self._room(acq))
        if grant.cut and request.coverage is Coverage.PREFIX:  # BUSY ends the prefix: nothing to wait for.
            waits = False
        self._lease(acq, grant, now)
        if waits:
            self._wait(acq, acq.namespace.blocks[keys[end]])
            del states[end:]
        elif request.coverage is Coverage.PREFIX:
            _mark_beyond(states, (hot_prefix(states) if grant.cut else end) + 1)
        if self.elsewhere is not None and len(grant.blocks) < len(states):
            self._mark_warm(acq.namespace, keys, states, request.coverage)
        acq.next = first + len(states)
        _count(acq.namespace, states)
        return Step(first, bytes(states), grant.parts, not waits)

    def _give_up(self, acq: Acquisition) -> Step:
        """Settles an Acquire whose lease ended while it waited: nothing more can come under that lease."""
        first, left = acq.next, len(acq.request.keys) - acq.next
        prefix = acq.request.coverage is Coverage.PREFIX
        states = bytearray([BEYOND if prefix else MISSING]) * left
        acq.next = len(acq.request.keys)
        _count(acq.namespace, states)
        return Step(first, bytes(states), [], settled=True)

    def _room(self, acq: Acquisition) -> Room:
        """What is left of the shard's leased share, and of what one call may lease."""
        records, limits = self.records, self.limits
        held = records.leased_bytes + records.reserved_bytes
        return Room(limits.call_bytes - acq.leased_bytes, limits.leased_share_bytes - held)

    def _lease(self, acq: Acquisition, grant: Grant, now: float) -> None:
        if not len(grant.blocks):
            return
        acq.leased_bytes += grant.size_bytes
        deadline = now + acq.request.lease_s
        if acq.lease is not None:  # Each message's grants last as long as the first one's.
            self.leases.renew(acq.lease, max(deadline, acq.lease.deadline))
        else:
            acq.session.check_room()
            acq.lease = self._new_lease(acq.session, acq.namespace, deadline)
        lease = acq.lease
        is_first = not len(lease.blocks)
        self.records.hold(grant.blocks)
        lease.blocks = grant.blocks if is_first else joined(lease.blocks, grant.blocks)
        lease.parts = joined(lease.parts, grant.parts) if len(lease.parts) else grant.parts
        # The whole request again, so that blocks that arrived late are still older than the head before them.
        blocks = lease.blocks if is_first else self.records.linked(lease.blocks)
        self.records.touch(acq.namespace, distinct_tail_first(blocks), now=now, hint=acq.request.hint)

    def _new_lease(self, session: Session, namespace: Namespace, deadline: float) -> ReadLease:
        lease = ReadLease(self.leases.new_id(), session.id, namespace, deadline)
        self.leases.add(lease)
        session.leases.add(lease.id)
        return lease

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


def _end(states: bytearray, coverage: Coverage, *, stop_at_flight: bool) -> int:
    """Index of the first key that this step must not lease."""
    if coverage is Coverage.PREFIX:
        return hot_prefix(states)
    flight = states.find(IN_FLIGHT) if stop_at_flight else -1
    return len(states) if flight < 0 else flight


def _mark_beyond(states: bytearray, start: int) -> None:
    """Answers what lies beyond the usable prefix."""
    if start < len(states):
        states[start:] = bytes([BEYOND]) * (len(states) - start)


def _count(namespace: Namespace, states: bytearray) -> None:
    counters, leased = namespace.counters, states.count(HOT)
    counters.add("acquire_leased_blocks", leased)
    if leased < len(states):
        counters.add("acquire_missing_blocks", states.count(MISSING) + states.count(BEYOND))
        counters.add("acquire_warm_blocks", states.count(WARM))
        counters.add("acquire_busy_blocks", states.count(BUSY))
        counters.add("acquire_late_blocks", states.count(IN_FLIGHT))
