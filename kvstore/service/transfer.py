"""Get and Put: what they read and write, and the message streams that carry the bytes themselves.

A slot's bytes are touched only while the lease over it is alive, checked without an await in between: the deadline of
a slow caller's lease ends the transfer, not somebody else's block. Where a worker thread copies, the lease is pinned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvstore.core.few import Rows
from kvstore.core.leases import Lease
from kvstore.core.reading import Acquisition, Glimpse
from kvstore.core.sessions import Session
from kvstore.core.writing import ReserveRequest
from kvstore.service import checks, regions
from kvstore.service.copier import Copying
from kvstore.service.handlers import StoreHandlers, Wait, joined_steps
from kvstore.service.incoming import Filling, FillPlan
from kvstore.service.outgoing import MOST_PIECES, Reading
from kvstore.service.shell import Call, Shell
from kvstore_wire import limits as contract
from kvstore_wire.errors import DeadlineExceeded, InvalidArgument
from kvstore_wire.namespace import Kind
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import acquired_within


@dataclass(frozen=True)
class Payload:
    """Pieces of the arena to send next. Valid until control goes back to the event loop: copy or send them at once."""

    pieces: list[memoryview]
    size_bytes: int


class Glance(NamedTuple):
    """The whole answer of a Get: its coded message, and its bytes where they are, for this moment only."""

    message: bytes
    pieces: list[memoryview]
    size_bytes: int
    seen: Glimpse


Outgoing: TypeAlias = "pb.GetResponse | Payload"
Incoming: TypeAlias = "pb.PutRequest | memoryview"


class Transfers:
    """Opens the transfers of every door."""

    def __init__(self, shell: Shell, handlers: StoreHandlers) -> None:
        self._shell, self._handlers = shell, handlers

    # -- get -----------------------------------------------------------------------------------------------------

    def is_immediate(self, request: pb.GetRequest) -> bool:
        """Whether a Get can be opened by `read_now`: it waits for no writer, disk or copy. Raises KvStoreError."""
        if request.HasField("into"):
            return False
        if not request.wait_ms or request.WhichOneof("target") == "lease":
            return True
        self._shell.checks.wait_s(request.wait_ms)
        return not self._handlers.waits(self._shell.session(request.session), request)

    def read_now(self, request: pb.GetRequest, call: Call) -> Reading:
        """Opens an immediate Get. Raises KvStoreError."""
        session = self._shell.session(request.session)
        if request.WhichOneof("target") == "lease":
            return self._read_lease(session, request)
        acquisition = self._handlers.begin_acquire(session, request, self._lease_s(call))
        try:
            step = self._shell.store.reader.finish(acquisition, self._shell.now())
            return self._reading(session, request, acquisition, states=step.states, parts=step.parts)
        except BaseException:
            self._give_up(session, acquisition)
            raise

    def glance(self, request: pb.GetRequest, most_bytes: int) -> Glance | None:
        """Reads few blocks without leasing them; None where they may be more than `most_bytes`, or more parts than go
        out at once.

        What is told must be sent, copied or kept before anything else happens. Raises KvStoreError.
        """
        if request.WhichOneof("target") != "chain" or request.ranges:
            return None
        shell = self._shell
        namespace = shell.session(request.session).namespace(request.namespace)
        spec, keys = namespace.spec, request.chain.keys
        parts = len(request.parts.parts) or namespace.parts_per_block
        count = len(keys) * parts
        if spec.kind is not Kind.KV or count >= MOST_PIECES or count * spec.part_bytes > most_bytes:
            return None
        wanted = self._handlers.wanted(namespace, request, 0.0)
        seen = shell.store.reader.glance(namespace, wanted, shell.now())
        offsets, lengths, checksums = shell.store.part_views(seen.grant.parts)
        header = pb.GetHeader(states=seen.states, lengths=lengths, checksums=checksums)
        view, size = shell.memory.view, spec.part_bytes
        namespace.counters.add("read_bytes", size * len(offsets))
        pieces = [view[at : at + size] for at in offsets]
        return Glance(pb.GetResponse(header=header).SerializeToString(), pieces, size * len(offsets), seen)

    def keep(self, request: pb.GetRequest, glance: Glance, call: Call) -> Reading:
        """Leases what a glance told of in this very moment. Raises KvStoreError."""
        shell = self._shell
        session = shell.session(request.session)
        states, grant = glance.seen
        lease = shell.store.reader.keep(
            session, session.namespace(request.namespace), grant, lease_s=self._lease_s(call), now=shell.now()
        )
        return Reading(shell, session, lease, states=states, parts=grant.parts, ends_lease=True, is_counted=True)

    async def read(self, request: pb.GetRequest, call: Call, wait: Wait | None = None) -> Reading:
        """Opens a Get once every block is settled and, where the bytes go to a region, they are there.

        `wait` stands in for `Shell.wait_for_change`. Raises KvStoreError.
        """
        session = self._shell.session(request.session)
        if request.WhichOneof("target") == "lease":
            reading = self._read_lease(session, request)
        else:
            reading = await self._read_chain(session, request, call, wait)
        try:
            if request.HasField("into"):
                await self._drain(session, request, reading)
                reading.skip()
        except BaseException:
            reading.close()
            raise
        return reading

    def _read_lease(self, session: Session, request: pb.GetRequest) -> Reading:
        lease = self._handlers.read_lease(session, request.lease)
        return Reading(
            self._shell, session, lease, states=b"", parts=lease.parts, chosen=request.ranges, ends_lease=False
        )

    async def _read_chain(self, session: Session, request: pb.GetRequest, call: Call, wait: Wait | None) -> Reading:
        wait_s = self._shell.checks.wait_s(request.wait_ms)
        acquisition = self._handlers.begin_acquire(session, request, self._lease_s(call))
        try:
            step = joined_steps([s async for s in self._handlers.steps(acquisition, wait_s, call, wait)])
            return self._reading(session, request, acquisition, states=step.states, parts=step.parts)
        except BaseException:
            self._give_up(session, acquisition)
            raise

    def _reading(
        self, session: Session, request: pb.GetRequest, acquisition: Acquisition, *, states: bytes, parts: Rows
    ) -> Reading:
        chosen, lease = request.ranges, acquisition.lease
        return Reading(self._shell, session, lease, states=states, parts=parts, chosen=chosen, ends_lease=True)

    def _give_up(self, session: Session, acquisition: Acquisition) -> None:
        if acquisition.lease is not None:
            self._shell.store.end_lease(session, acquisition.lease, self._shell.now())
            self._shell.settle()

    def _lease_s(self, call: Call) -> float:
        """The lease of a Get by chain lasts as long as the caller can use it."""
        limits = self._shell.limits
        if call.deadline is None:
            return limits.default_lease_ms / 1000
        return min(max(call.deadline - self._shell.now(), 0.001), limits.max_lease_ms / 1000)

    async def _drain(self, session: Session, request: pb.GetRequest, reading: Reading) -> None:
        """Copies what was granted to a region of the session."""
        if request.ranges:
            raise InvalidArgument("cannot go to a region", field="ranges", limit="0 with `into`")
        region = self._shell.regions.get(session.id, request.into.region)
        lengths, offsets = reading.lengths, reading.offsets
        if request.WhichOneof("target") == "chain":
            lengths, offsets = self._asked_parts(session, request, reading)
        jobs = regions.plan(request.into, region, lengths, offsets, field="into")
        await self._pinned(reading.lease, lambda: self._shell.copier.drain(region, jobs))
        reading.check()

    def _asked_parts(self, session: Session, request: pb.GetRequest, reading: Reading) -> tuple[list[int], list[int]]:
        """Returns (lengths, arena offsets) of all parts asked for: offset -1 where nothing was granted."""
        namespace = session.namespace(request.namespace)
        per_block = len(request.parts.parts) or namespace.parts_per_block
        hot = [i for i, s in enumerate(reading.header.states) if s == types.BLOCK_STATE_HOT]
        count = len(reading.header.states) * per_block
        lengths, offsets = [-1] * count, [-1] * count
        granted = iter(zip(reading.lengths, reading.offsets, strict=True))
        for block in hot:
            for at in range(block * per_block, (block + 1) * per_block):
                lengths[at], offsets[at] = next(granted)
        return lengths, offsets

    # -- put -----------------------------------------------------------------------------------------------------

    def fill(self, header: pb.PutHeader) -> Filling:
        """Opens a Put. Raises KvStoreError."""
        session = self._shell.session(header.session)
        if header.WhichOneof("target") == "lease":
            lease = self._handlers.write_lease(session, header.lease)
            return Filling(self._shell, session, FillPlan.of_lease(self._shell, lease), states=None)
        return self._fill_chain(session, header)

    def _fill_chain(self, session: Session, header: pb.PutHeader) -> Filling:
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
        plan = FillPlan.of_chain(shell, reserved.lease, reserved.states, lengths)
        return Filling(shell, session, plan, states=reserved.states)

    def copy_source(self, header: pb.PutHeader, filling: Filling) -> Copying:
        """Begins to take the bytes of a Put from a region of its session. Raises KvStoreError.

        Once it is done, tell the filling by `copied`.
        """
        session = self._shell.session(header.session)
        region = self._shell.regions.get(session.id, header.source.region)
        lease, offsets = filling.plan.lease, filling.plan.offsets
        if lease is not None:
            offsets = list(offsets)
            for i, place in enumerate(filling.plan.created):
                lease.landed[i] = 0  # Until all is there: it may have landed before, by another Put.
                if not lease.open[i]:
                    offsets[place] = -1
        jobs = regions.plan(header.source, region, filling.plan.lengths, offsets, field="source")
        return self._pinned(lease, lambda: self._shell.copier.fill(region, jobs))

    def _pinned(self, lease: Lease | None, begin: Callable[[], Copying]) -> Copying:
        """Keeps the slots of a lease from being given to others while threads copy, should the lease end."""
        if lease is None:
            return begin()
        store = self._shell.store
        store.pin(lease)  # Raises LeaseExpired.

        def unpin(_: object = None) -> None:
            store.unpin(lease, self._shell.now())
            self._shell.settle()

        try:
            copying = begin()
        except BaseException:
            unpin()
            raise
        copying.add_done_callback(unpin)
        return copying


@dataclass
class _Share:
    """Whether a Get stream has a share of the send budget now."""

    held: bool = False


class InlineTransfer:
    """Get and Put as streams of messages. `send_budget_bytes` bounds what all Gets together have on their way."""

    def __init__(self, shell: Shell, transfers: Transfers, *, send_budget_bytes: int) -> None:
        self._shell, self._transfers = shell, transfers
        # A stream has at most two chunks on its way: one in the transport, one being made.
        self._slots = asyncio.Semaphore(max(1, send_budget_bytes // (2 * shell.limits.chunk_bytes)))

    async def get(self, request: pb.GetRequest, call: Call) -> AsyncGenerator[Outgoing, None]:
        """Yields one header, once every block is settled, and then the payload of the parts granted."""
        self._shell.session(request.session)
        share = _Share()
        reading: Reading | None = None

        async def wait(acquisition: Acquisition, until: float) -> bool:
            self._leave(share)  # It sends nothing while it waits: others must not wait for its writers.
            changed = await self._shell.wait_for_change(acquisition, until)
            await self._enter(call, share)
            return changed

        await self._enter(call, share)
        try:
            reading = await self._transfers.read(request, call, wait)
            yield pb.GetResponse(header=reading.header)
            while reading.left_bytes:
                await self._shell.failpoints.hit("get.chunk")
                yield Payload(*reading.take(self._shell.limits.chunk_bytes))
            if reading.trailer is not None:
                reading.take(1)
                yield pb.GetResponse(trailer=reading.trailer)
        finally:
            if reading is not None:
                reading.close()
            self._leave(share)

    async def put(self, messages: AsyncIterator[Incoming], call: Call) -> pb.PutResponse:
        """Takes header, payload and trailer; nothing is visible unless the trailer came and fits."""
        first = await anext(messages, None)
        if not isinstance(first, pb.PutRequest) or first.WhichOneof("body") != "header":
            raise InvalidArgument("the first message must be the header", field="header")
        filling = self._transfers.fill(first.header)
        copying: Copying | None = None
        try:
            if first.header.HasField("source"):
                copying = self._transfers.copy_source(first.header, filling)
            trailer = await self._take(filling, messages)
            if copying is not None:
                await copying
                filling.copied()
            filling.check_trailer(trailer)
            await self._shell.failpoints.hit("put.commit")
            return filling.finish(trailer)
        finally:
            if copying is not None and not copying.done():
                copying.cancel()
                await asyncio.wait({copying})
            filling.close()

    async def _take(self, filling: Filling, messages: AsyncIterator[Incoming]) -> pb.PutTrailer:
        """Copies payload into slots until the trailer comes."""
        async for message in messages:
            if isinstance(message, memoryview):
                await self._shell.failpoints.hit("put.chunk")
                filling.take(message)
            elif message.WhichOneof("body") == "trailer":
                return message.trailer
            elif message.WhichOneof("body") == "data":
                filling.take(memoryview(message.data))
            else:
                raise InvalidArgument("only data and one trailer follow the header", field="header")
        raise InvalidArgument("the stream ended without a trailer", field="trailer")

    async def _enter(self, call: Call, share: _Share) -> None:
        left = None if call.deadline is None else max(0.0, call.deadline - self._shell.now())
        if not await acquired_within(left, self._slots):
            raise DeadlineExceeded("too many Get streams are being sent")
        share.held = True

    def _leave(self, share: _Share) -> None:
        if share.held:
            share.held = False
            self._slots.release()
