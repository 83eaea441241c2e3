"""The bytes of one Put on their way in, whatever door they come by."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.leases import WriteLease
from kvstore.core.sessions import Session
from kvstore.service.shell import Shell
from kvstore_wire.errors import InvalidArgument, LeaseExpired
from kvstore_wire.frames import Discard
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types

RETRY_FULL_MS = 20
_CREATED = int(PartState.CREATED)  # Compared for every part, where a member of an enum is slow to read.


def retry_after_ms(states: bytes) -> int:
    """When to try again after an answer of part states."""
    return RETRY_FULL_MS if types.PART_STATE_FULL in states else 0


@dataclass(frozen=True)
class FillPlan:
    """Where the payload of a Put goes: `created[i]` is the place of the lease's part i among all parts sent."""

    lease: WriteLease | None
    lengths: list[int]
    offsets: list[int]  # -1: sent, but stored already.
    created: list[int]

    @staticmethod
    def of_lease(shell: Shell, lease: WriteLease) -> FillPlan:
        offsets, lengths, _ = shell.store.part_views(lease.parts)
        return FillPlan(lease, lengths, offsets, list(range(len(lengths))))

    @staticmethod
    def of_chain(shell: Shell, lease: WriteLease | None, states: bytes, lengths: list[int]) -> FillPlan:
        created = [i for i, s in enumerate(states) if s == _CREATED]
        offsets = [-1] * len(states)
        if lease is not None:
            for place, offset in zip(created, shell.store.part_views(lease.parts)[0], strict=True):
                offsets[place] = offset
        return FillPlan(lease, lengths, offsets, created)


class Filling:
    """Slots that take the payload of one Put, part by part; a sink of frames. Close it, whatever happens.

    Owns: its lease, if it was made for this call (`states` is the answer to its Reserve then).
    """

    def __init__(self, shell: Shell, session: Session, plan: FillPlan, *, states: bytes | None) -> None:
        if plan.lease is not None and plan.lease.busy:
            raise InvalidArgument("another Put writes under this lease", field="lease")
        self._shell, self._session, self.plan, self._states = shell, session, plan, states
        self._view = shell.memory.view
        self._index = self._filled = self._created = 0
        self._closed = False
        self._discard: Discard | None = None
        if plan.lease is not None:
            plan.lease.busy = True
        self._skip_empty()

    def room(self, most: int) -> memoryview:
        """Returns where the next bytes of the payload go. Raises InvalidArgument (too many bytes) and LeaseExpired."""
        plan = self.plan
        self.check()
        if self._index == len(plan.lengths):
            limit = f"{sum(plan.lengths)} bytes"
            raise InvalidArgument("more bytes than the parts have", field="data", limit=limit)
        size = min(most, plan.lengths[self._index] - self._filled)
        offset = plan.offsets[self._index]
        if offset < 0 or not self._is_open():
            self._discard = self._discard or Discard()
            return self._discard.room(size)
        assert plan.lease is not None
        plan.lease.landed[self._created] = 0  # Until it is whole: it may have landed before, by another Put.
        start = offset + self._filled
        return self._view[start : start + size]

    def landed(self, size: int) -> None:
        """Tells that the first `size` bytes of the last `room` have come."""
        self._filled += size
        if self.plan.lease is not None:
            self.plan.lease.namespace.counters.add("written_bytes", size)
        if self._filled == self.plan.lengths[self._index]:
            self._next()

    def take(self, data: memoryview) -> None:
        """Copies a piece of payload to where it belongs."""
        at = 0
        while at < len(data):
            room = self.room(len(data) - at)
            room[:] = data[at : at + len(room)]
            at += len(room)
            self.landed(len(room))

    def copied(self) -> None:
        """Takes all parts as landed: threads have copied them. Raises LeaseExpired."""
        self.check()
        lease = self.plan.lease
        if lease is not None:
            lease.landed[:] = lease.open
            lease.namespace.counters.add("written_bytes", sum(self.plan.lengths))
        self._index = len(self.plan.lengths)

    def check(self) -> None:
        """Raises LeaseExpired if the slots may belong to somebody else by now."""
        lease = self.plan.lease
        if lease is not None and lease.ended:
            raise LeaseExpired(f"write lease {lease.id} ended under the write", field="lease")

    def finish(self, trailer: pb.PutTrailer) -> pb.PutResponse:
        """Commits what landed. Raises InvalidArgument if bytes or checksums are missing, and LeaseExpired."""
        plan, lease, shell = self.plan, self.plan.lease, self._shell
        self.check_trailer(trailer)
        committed = b""
        if lease is not None:
            if lease.ended or lease.deadline <= shell.now():
                raise LeaseExpired(f"write lease {lease.id} ended under the write", field="lease")
            checksums = trailer.checksums[:]
            sums = [checksums[i] for i in plan.created]
            indexes = range(len(lease.parts))
            committed = shell.store.commit(self._session, lease, indexes, checksums=sums, now=shell.now())
            shell.settle()
        if self._states is None:
            return pb.PutResponse(states=committed)
        states = bytearray(self._states)
        for place, state in zip(plan.created, committed, strict=True):
            states[place] = state
        return pb.PutResponse(states=bytes(states), retry_after_ms=retry_after_ms(self._states))

    def check_trailer(self, trailer: pb.PutTrailer) -> None:
        """Raises InvalidArgument if bytes or checksums are missing."""
        lengths = self.plan.lengths
        if self._index < len(lengths):
            raise InvalidArgument(f"ended in part {self._index}", field="data", limit=f"{sum(lengths)} bytes")
        if len(trailer.checksums) != len(lengths):
            message = f"{len(trailer.checksums)} checksums for {len(lengths)} parts"
            raise InvalidArgument(message, field="checksums")

    def close(self) -> None:
        """Ends the lease of a Put by chain, and with it what was not committed. Idempotent."""
        lease = self.plan.lease
        if self._closed or lease is None:
            return
        self._closed = True
        lease.busy = False
        if self._states is not None:
            self._shell.store.end_lease(self._session, lease, self._shell.now())
            self._shell.settle()

    def _is_open(self) -> bool:
        """A part that a Commit beside this Put made visible must not change any more."""
        lease = self.plan.lease
        return lease is not None and bool(lease.open[self._created])

    def _next(self) -> None:
        self._landed()
        self._index, self._filled = self._index + 1, 0
        self._skip_empty()

    def _skip_empty(self) -> None:
        while self._index < len(self.plan.lengths) and self.plan.lengths[self._index] == 0:
            self._landed()
            self._index += 1

    def _landed(self) -> None:
        if self.plan.offsets[self._index] >= 0 and self.plan.lease is not None:
            self.plan.lease.landed[self._created] = 1
            self._created += 1
