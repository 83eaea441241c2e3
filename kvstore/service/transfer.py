"""Inline transfers: Get and Put carry the bytes themselves.

A slot's bytes are touched only while the lease over it is alive, checked without an await in between: the deadline of
a slow caller's lease ends the transfer, not somebody else's block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.core.columns import Ids
from kvstore.core.leases import ReadLease, WriteLease
from kvstore.core.reading import Acquisition
from kvstore.core.sessions import Session
from kvstore.core.writing import ReserveRequest
from kvstore.service import checks
from kvstore.service.handlers import StoreHandlers, retry_after_ms
from kvstore.service.shell import Call, Shell
from kvstore_wire import limits as contract
from kvstore_wire.errors import DeadlineExceeded, InvalidArgument, LeaseExpired
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.waiting import acquired_within


@dataclass(frozen=True)
class Payload:
    """Pieces of the arena to send next. Valid until control goes back to the event loop: copy or send them at once."""

    pieces: list[memoryview]
    size_bytes: int


Outgoing: TypeAlias = "pb.GetResponse | Payload"
Incoming: TypeAlias = "pb.PutRequest | memoryview"


@dataclass
class _Share:
    """Whether a Get stream has a share of the send budget now."""

    held: bool = False


class InlineTransfer:
    """Get and Put. `send_budget_bytes` bounds what all Get streams together have on their way."""

    def __init__(self, shell: Shell, handlers: StoreHandlers, *, send_budget_bytes: int) -> None:
        self._shell, self._handlers = shell, handlers
        # A stream has at most two chunks on its way: one in the transport, one being made.
        self._slots = asyncio.Semaphore(max(1, send_budget_bytes // (2 * shell.limits.chunk_bytes)))

    # -- get -----------------------------------------------------------------------------------------------------

    async def get(self, request: pb.GetRequest, call: Call) -> AsyncGenerator[Outgoing, None]:
        """Yields one header, once every block is settled, and then the payload of the parts granted."""
        session = self._shell.session(request.session)
        checks.no_ranges(request.ranges)
        share = _Share()
        await self._enter(call, share)
        try:
            if request.WhichOneof("target") == "lease":
                lease = self._handlers.read_lease(session, request.lease)
                async for out in self._send_lease(lease):
                    yield out
            else:
                async for out in self._send_chain(session, request, call, share):
                    yield out
        finally:
            self._leave(share)

    async def _enter(self, call: Call, share: _Share) -> None:
        left = None if call.deadline is None else max(0.0, call.deadline - self._shell.now())
        if not await acquired_within(left, self._slots):
            raise DeadlineExceeded("too many Get streams are being sent")
        share.held = True

    def _leave(self, share: _Share) -> None:
        if share.held:
            share.held = False
            self._slots.release()

    async def _send_lease(self, lease: ReadLease) -> AsyncIterator[Outgoing]:
        offsets, lengths, checksums = self._shell.store.part_views(lease.parts)
        yield pb.GetResponse(header=pb.GetHeader(lengths=lengths, checksums=checksums))
        async for payload in self._payload(lease, offsets, lengths):
            yield payload

    async def _send_chain(
        self, session: Session, request: pb.GetRequest, call: Call, share: _Share
    ) -> AsyncIterator[Outgoing]:
        shell = self._shell

        async def wait(acquisition: Acquisition, until: float) -> bool:
            self._leave(share)  # It sends nothing while it waits: others must not wait for its writers.
            changed = await shell.wait_for_change(acquisition, until)
            await self._enter(call, share)
            return changed

        limits = shell.limits
        lease_s = limits.default_lease_ms / 1000
        if call.deadline is not None:  # The lease lasts as long as the caller can use it.
            lease_s = min(max(call.deadline - shell.now(), 0.001), limits.max_lease_ms / 1000)
        acquisition = self._handlers.begin_acquire(session, request, lease_s)
        try:
            states = b""
            parts: list[Ids] = [np.empty(0, np.int32)]
            async for step in self._handlers.steps(acquisition, shell.checks.wait_s(request.wait_ms), call, wait):
                states += step.states
                parts.append(step.parts)
            offsets, lengths, checksums = shell.store.part_views(np.concatenate(parts))
            yield pb.GetResponse(header=pb.GetHeader(states=states, lengths=lengths, checksums=checksums))
            if acquisition.lease is not None:
                async for payload in self._payload(acquisition.lease, offsets, lengths):
                    yield payload
        finally:
            if acquisition.lease is not None:
                shell.store.end_lease(session, acquisition.lease, shell.now())
                shell.settle()

    async def _payload(self, lease: ReadLease, offsets: list[int], lengths: list[int]) -> AsyncIterator[Payload]:
        """Cuts the parts, one after another, into payloads of the shard's chunk size."""
        view, chunk = self._shell.memory.view, self._shell.limits.chunk_bytes
        pieces: list[memoryview] = []
        size = 0
        for offset, length in zip(offsets, lengths, strict=True):
            at, end = offset, offset + length
            while at < end:
                stop = min(end, at + chunk - size)
                pieces.append(view[at:stop])
                size += stop - at
                at = stop
                if size == chunk:
                    yield await self._checked(lease, pieces, size)
                    pieces, size = [], 0
        if size:
            yield await self._checked(lease, pieces, size)

    async def _checked(self, lease: ReadLease, pieces: list[memoryview], size: int) -> Payload:
        await self._shell.failpoints.hit("get.chunk")
        if lease.ended:
            raise LeaseExpired(f"read lease {lease.id} ended before all bytes were sent", field="lease")
        lease.namespace.counters.add("read_bytes", size)
        return Payload(pieces, size)

    # -- put -----------------------------------------------------------------------------------------------------

    async def put(self, messages: AsyncIterator[Incoming], call: Call) -> pb.PutResponse:
        """Takes header, payload and trailer; nothing is visible unless the trailer came and fits."""
        first = await anext(messages, None)
        if not isinstance(first, pb.PutRequest) or first.WhichOneof("body") != "header":
            raise InvalidArgument("the first message must be the header", field="header")
        session = self._shell.session(first.header.session)
        if first.header.WhichOneof("target") == "lease":
            lease = self._handlers.write_lease(session, first.header.lease)
            states = await self._fill_and_commit(session, _Plan.of_lease(self._shell, lease), messages)
            return pb.PutResponse(states=bytes(states))
        return await self._put_chain(session, first.header, messages)

    async def _put_chain(
        self, session: Session, header: pb.PutHeader, messages: AsyncIterator[Incoming]
    ) -> pb.PutResponse:
        shell = self._shell
        namespace = session.namespace(header.namespace)
        keys = shell.checks.keys(header.chain, shell.limits.max_blocks)
        wanted = ReserveRequest(
            keys=keys,
            lease_s=shell.limits.default_lease_ms / 1000,
            parts=checks.parts(header.parts, namespace, key_count=len(keys), limit=contract.MAX_CALL_PARTS),
            lengths=checks.lengths(header.lengths, namespace=namespace, key_count=len(keys)),
            hint=checks.hint(header.hint),
        )
        reserved = shell.store.writer.reserve(session, namespace, wanted, shell.now())
        shell.settle()
        per_block = len(wanted.parts) or namespace.parts_per_block
        lengths = [n for n in wanted.lengths or [namespace.spec.part_bytes] * len(keys) for _ in range(per_block)]
        plan = _Plan.of_chain(shell, reserved.lease, reserved.states, lengths)
        try:
            committed = await self._fill_and_commit(session, plan, messages)
        finally:
            if reserved.lease is not None:
                shell.store.end_lease(session, reserved.lease, shell.now())
                shell.settle()
        states = bytearray(reserved.states)
        for place, state in zip(plan.created, committed, strict=True):
            states[place] = state
        return pb.PutResponse(states=bytes(states), retry_after_ms=retry_after_ms(reserved.states))

    async def _fill_and_commit(self, session: Session, plan: _Plan, messages: AsyncIterator[Incoming]) -> bytes:
        lease = plan.lease
        if lease is not None:
            if lease.busy:
                raise InvalidArgument("another Put writes under this lease", field="lease")
            lease.busy = True
        try:
            trailer = await self._fill(plan, messages)
            if len(trailer.checksums) != len(plan.lengths):
                message = f"{len(trailer.checksums)} checksums for {len(plan.lengths)} parts"
                raise InvalidArgument(message, field="checksums")
            await self._shell.failpoints.hit("put.commit")
            if lease is None:
                return b""
            if lease.ended or lease.deadline <= self._shell.now():
                raise LeaseExpired(f"write lease {lease.id} ended under the write", field="lease")
            sums = [trailer.checksums[i] for i in plan.created]
            indexes = range(len(lease.parts))
            states = self._shell.store.commit(session, lease, indexes, checksums=sums, now=self._shell.now())
            self._shell.settle()
            return states
        finally:
            if lease is not None:
                lease.busy = False

    async def _fill(self, plan: _Plan, messages: AsyncIterator[Incoming]) -> pb.PutTrailer:
        """Copies payload into slots until the trailer comes."""
        cursor = _Cursor(plan, self._shell.memory.view)
        async for message in messages:
            if isinstance(message, memoryview):
                await self._shell.failpoints.hit("put.chunk")
                cursor.take(message)
            elif message.WhichOneof("body") == "trailer":
                cursor.finish()
                return message.trailer
            elif message.WhichOneof("body") == "data":
                cursor.take(memoryview(message.data))
            else:
                raise InvalidArgument("only data and one trailer follow the header", field="header")
        raise InvalidArgument("the stream ended without a trailer", field="trailer")


@dataclass(frozen=True)
class _Plan:
    """Where the payload of a Put goes: `created[i]` is the place of the lease's part i among all parts sent."""

    lease: WriteLease | None
    lengths: list[int]
    offsets: list[int]  # -1: sent, but stored already.
    created: list[int]

    @staticmethod
    def of_lease(shell: Shell, lease: WriteLease) -> _Plan:
        offsets, lengths, _ = shell.store.part_views(lease.parts)
        return _Plan(lease, lengths, offsets, list(range(len(lengths))))

    @staticmethod
    def of_chain(shell: Shell, lease: WriteLease | None, states: bytes, lengths: list[int]) -> _Plan:
        created = [i for i, s in enumerate(states) if s == PartState.CREATED]
        offsets = [-1] * len(states)
        if lease is not None:
            for place, offset in zip(created, shell.store.part_views(lease.parts)[0], strict=True):
                offsets[place] = offset
        return _Plan(lease, lengths, offsets, created)


class _Cursor:
    """Walks the parts of a Put as payload arrives."""

    def __init__(self, plan: _Plan, view: memoryview) -> None:
        self._plan, self._view = plan, view
        self._index = self._filled = self._created = 0
        self._skip_empty()

    def take(self, data: memoryview) -> None:
        """Copies a piece to where it belongs. Raises InvalidArgument (too many bytes) and LeaseExpired."""
        lease, plan, at = self._plan.lease, self._plan, 0
        if lease is not None and lease.ended:
            raise LeaseExpired(f"write lease {lease.id} ended under the write", field="lease")
        while at < len(data):
            if self._index == len(plan.lengths):
                raise InvalidArgument(
                    "more bytes than the parts have", field="data", limit=f"{sum(plan.lengths)} bytes"
                )
            size = min(len(data) - at, plan.lengths[self._index] - self._filled)
            offset = plan.offsets[self._index]
            if offset >= 0 and lease is not None and self._is_open():
                lease.landed[self._created] = 0  # Until it is whole: it may have landed before, by another Put.
                start = offset + self._filled
                self._view[start : start + size] = data[at : at + size]
            at += size
            self._filled += size
            if self._filled == plan.lengths[self._index]:
                self._next()
        if lease is not None:
            lease.namespace.counters.add("written_bytes", len(data))

    def finish(self) -> None:
        """Raises InvalidArgument if bytes are missing."""
        if self._index < len(self._plan.lengths):
            limit = f"{sum(self._plan.lengths)} bytes"
            raise InvalidArgument(f"ended in part {self._index}", field="data", limit=limit)

    def _is_open(self) -> bool:
        """A part that a Commit beside this Put made visible must not change any more."""
        lease = self._plan.lease
        return lease is not None and bool(lease.open[self._created])

    def _next(self) -> None:
        self._landed()
        self._index, self._filled = self._index + 1, 0
        self._skip_empty()

    def _skip_empty(self) -> None:
        while self._index < len(self._plan.lengths) and self._plan.lengths[self._index] == 0:
            self._landed()
            self._index += 1

    def _landed(self) -> None:
        if self._plan.offsets[self._index] >= 0 and self._plan.lease is not None:
            self._plan.lease.landed[self._created] = 1
            self._created += 1
