"""The verbs of BlockStore as methods from message to message. They know no door: no status, no stream framing.

Answers that come in several messages are async generators. Whatever a caller did wrong is raised as a KvStoreError.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

import xxhash

from kvstore.core.cleaning import Ahead
from kvstore.core.few import Rows, joined
from kvstore.core.leases import ReadLease, WriteLease
from kvstore.core.namespaces import Namespace
from kvstore.core.reading import AcquireRequest, Acquisition, Step
from kvstore.core.sessions import Session
from kvstore.core.sight import Ask
from kvstore.core.store import STEP_BLOCKS
from kvstore.core.writing import ReserveRequest
from kvstore.service import checks
from kvstore.service.explain import explain
from kvstore.service.incoming import retry_after_ms
from kvstore.service.shell import Call, NoticeBoard, Shell
from kvstore.service.tiering import durably
from kvstore_wire import limits as contract
from kvstore_wire.errors import Draining, InvalidArgument, LeaseExpired, UnknownSession, VersionMismatch
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types

Wait: TypeAlias = "Callable[[Acquisition, float], Awaitable[bool]]"
FEATURES: tuple[str, ...] = ("ranges",)
HINTS_FEATURE = "hints"  # Of policies that act on them.
WARM_FEATURE = "warm"  # Blocks may be on disk: whoever waits for none reads only what is in memory.


class StoreHandlers:
    """All verbs but the inline transfers (see transfer.InlineTransfer)."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def attach(self, request: pb.AttachRequest, call: Call) -> pb.AttachResponse:
        shell = self._shell
        self._refuse_if_draining()
        version = _common_version(request)
        checks.text(request.client, field="client", limit=contract.MAX_CLIENT_BYTES)
        if len(request.features) > contract.MAX_FEATURES:
            limit = f"{contract.MAX_FEATURES}"
            raise InvalidArgument(f"{len(request.features)} features", field="features", limit=limit)
        spec = _spec(request.namespace)
        self._check_sizes(spec)
        session = shell.session(request.session) if request.session else self._new_session(request)
        try:
            handle = shell.store.attach(session, spec, request.digest)
        except Exception:
            if not request.session:
                shell.store.end_session(session, shell.now())
                shell.settle()
            raise
        return pb.AttachResponse(
            version=version,
            session=session.id,
            generation=shell.generation,
            namespace=handle,
            digest=spec.digest,
            limits=shell.limits,
            transports=shell.transports,
            features=self._features(),
            shard=shell.name,
        )

    def _features(self) -> list[str]:
        shell = self._shell
        found = list(FEATURES)
        if shell.store.takes_hints:
            found.append(HINTS_FEATURE)
        if shell.tiering is not None:
            found.append(WARM_FEATURE)
        return found

    async def session(self, pulses: AsyncIterator[pb.SessionPulse], call: Call) -> AsyncIterator[pb.SessionNotice]:
        first = await anext(pulses, None)
        session = self._shell.session(first.session if first is not None else b"")
        session.open_until = None
        board = NoticeBoard()
        replaced = self._shell.boards.get(session.id)
        self._shell.boards[session.id] = board
        if replaced is not None:
            replaced.post(None)
        reader = asyncio.ensure_future(_drain(pulses, board))
        try:
            yield pb.SessionNotice(opened=pb.SessionNotice.Opened())
            while (notice := await board.next()) is not None:
                yield notice
            if reader.done():
                reader.result()  # What the caller sent may be no message at all.
        finally:
            reader.cancel()
            if self._shell.boards.get(session.id) is board:
                del self._shell.boards[session.id]
                self._end_session(session)

    def match(self, request: pb.MatchRequest, call: Call) -> pb.MatchResponse:
        shell = self._shell
        namespace = shell.session(request.session).namespace(request.namespace)
        keys = shell.checks.keys(request.chain, shell.limits.max_match_blocks)
        found = shell.store.reader.match(
            namespace,
            keys,
            parts=checks.parts(request.parts, namespace, key_count=len(keys), limit=contract.MAX_MATCH_PARTS),
            coverage=checks.coverage(request.coverage),
            now=shell.now(),
        )
        return pb.MatchResponse(prefix_blocks=found.prefix_blocks, states=found.states)

    async def acquire(self, request: pb.AcquireRequest, call: Call) -> AsyncIterator[pb.AcquireResponse]:
        session = self._shell.session(request.session)
        checks.no_ranges(request.ranges)
        wait_s = self._shell.checks.wait_s(request.wait_ms)
        acquisition = self.begin_acquire(session, request, self._shell.checks.lease_s(request.lease_ms))
        delivered = False
        try:
            async for step in self.steps(acquisition, wait_s, call):
                yield self._acquired(acquisition, step)
            delivered = True
        finally:
            if not delivered and acquisition.lease is not None:  # The caller has gone; nobody will release it.
                self._shell.store.end_lease(session, acquisition.lease, self._shell.now())
                self._shell.settle()

    def acquire_now(self, request: pb.AcquireRequest, call: Call) -> pb.AcquireResponse:
        """Answers an Acquire that has nothing to wait for in one message."""
        session = self._shell.session(request.session)
        checks.no_ranges(request.ranges)
        acquisition = self.begin_acquire(session, request, self._shell.checks.lease_s(request.lease_ms))
        step = self._shell.store.reader.finish(acquisition, self._shell.now())
        return self._acquired(acquisition, step)

    def begin_acquire(
        self, session: Session, request: pb.AcquireRequest | pb.GetRequest, lease_s: float
    ) -> Acquisition:
        """Starts an Acquire for a session. Raises Draining."""
        namespace = session.namespace(request.namespace)
        return self._shell.store.reader.begin(session, namespace, self.wanted(namespace, request, lease_s))

    def wanted(
        self, namespace: Namespace, request: pb.AcquireRequest | pb.GetRequest, lease_s: float
    ) -> AcquireRequest:
        """Returns what an Acquire or a Get asks for, checked. Raises Draining."""
        self._refuse_if_draining()
        keys = self._shell.checks.keys(request.chain, self._shell.limits.max_blocks)
        return AcquireRequest(
            keys=keys,
            lease_s=lease_s,
            parts=checks.parts(request.parts, namespace, key_count=len(keys), limit=contract.MAX_CALL_PARTS),
            coverage=checks.coverage(request.coverage),
            hint=checks.hint(request.hint),
        )

    async def steps(
        self, acquisition: Acquisition, wait_s: float, call: Call, wait: Wait | None = None
    ) -> AsyncIterator[Step]:
        """Steps an Acquire until it is settled or the wait is over, whichever is first. `wait` stands in for
        `Shell.wait_for_change`."""
        wait = wait or self._shell.wait_for_change
        reader, shell = self._shell.store.reader, self._shell
        start = shell.now()
        until = start + wait_s if call.deadline is None else min(start + wait_s, call.deadline)
        tiering = shell.tiering if wait_s else None
        fetches = await tiering.begin(acquisition.ask(start), until) if tiering is not None else []
        try:
            now = shell.now()
            step = reader.step(acquisition, now) if wait_s and now < until else reader.finish(acquisition, now)
            while not step.settled:
                if step.states:
                    yield step
                changed = await wait(acquisition, until)
                step = reader.step(acquisition, shell.now()) if changed else reader.finish(acquisition, shell.now())
            yield step
        finally:
            reader.cancel(acquisition)
            if tiering is not None:
                tiering.leave(fetches)

    def acquire_waits(self, request: pb.AcquireRequest) -> bool:
        """Whether an Acquire has to be answered by `acquire`, because there is something to wait for."""
        if not request.wait_ms:
            return False
        self._shell.checks.wait_s(request.wait_ms)
        return self.waits(self._shell.session(request.session), request)

    def waits(self, session: Session, request: pb.AcquireRequest | pb.GetRequest) -> bool:
        """Whether an Acquire or a Get that may wait would. Raises KvStoreError as the call itself would."""
        namespace = session.namespace(request.namespace)
        wanted = self.wanted(namespace, request, 0.0)
        parts = wanted.parts or namespace.all_parts
        ask = Ask(namespace, wanted.keys, parts, wanted.coverage, self._shell.now())
        return self._shell.store.reader.waits(ask)

    def renew(self, request: pb.RenewRequest, call: Call) -> pb.RenewResponse:
        lease_s = self._shell.checks.lease_s(request.lease_ms)
        session = self._shell.session(request.session)
        valid = self._for_each(request.leases, lambda i: self._renewed(session, i, lease_s))
        return pb.RenewResponse(valid=valid)

    def release(self, request: pb.ReleaseRequest, call: Call) -> pb.ReleaseResponse:
        session = self._shell.session(request.session)
        checks.at_most_leases(request.leases)
        if len(request.corrupt) > contract.MAX_CORRUPT_PER_CALL:  # Each is hashed on the spot.
            limit = f"{contract.MAX_CORRUPT_PER_CALL}"
            raise InvalidArgument(f"{len(request.corrupt)} parts", field="corrupt", limit=limit)
        for item in request.corrupt:
            self._check_corrupt(session, request.leases, item)
        valid = self._for_each(request.leases, lambda i: self._shell.store.release(session, i, self._shell.now()))
        self._shell.settle()
        return pb.ReleaseResponse(valid=valid)

    def reserve_waits(self, request: pb.ReserveRequest) -> bool:
        """Whether a Reserve that may wait would. Raises KvStoreError as the call itself would."""
        if not request.wait_ms or self._shell.draining:
            return False
        self._shell.checks.wait_s(request.wait_ms)
        tiering = self._shell.tiering
        return tiering is not None and not tiering.demotion.is_ahead(self._room_for(request))

    async def reserve_in_time(self, request: pb.ReserveRequest, call: Call) -> pb.ReserveResponse:
        """As `reserve`, which follows once the disk has what must make room, or the wait is over."""
        shell = self._shell
        wait_s = shell.checks.wait_s(request.wait_ms)
        if wait_s and shell.tiering is not None and not shell.draining:
            if call.deadline is not None:
                wait_s = min(wait_s, call.deadline - shell.now())
            await shell.tiering.demotion.get_ahead(self._room_for(request), wait_s)
        return self.reserve(request, call)

    def _room_for(self, request: pb.ReserveRequest) -> Ahead:
        """Returns what a Reserve needs of memory; of values of several lengths, as if all were the longest."""
        shell = self._shell
        namespace = shell.session(request.session).namespace(request.namespace)
        keys = shell.checks.keys(request.chain, shell.limits.max_blocks)
        lengths = checks.lengths(request.lengths, namespace=namespace, key_count=len(keys))
        new = sum(key not in namespace.blocks for key in keys)
        slot_bytes = namespace.slot_bytes(max(lengths, default=namespace.spec.part_bytes))
        return Ahead(namespace, slot_bytes, new, spared=len(keys) - new)

    def reserve(self, request: pb.ReserveRequest, call: Call) -> pb.ReserveResponse:
        shell = self._shell
        session = shell.session(request.session)
        namespace = session.namespace(request.namespace)
        keys = shell.checks.keys(request.chain, shell.limits.max_blocks)
        wanted = ReserveRequest(
            keys=keys,
            lease_s=shell.checks.lease_s(request.lease_ms),
            parts=checks.parts(request.parts, namespace, key_count=len(keys), limit=contract.MAX_CALL_PARTS),
            lengths=checks.lengths(request.lengths, namespace=namespace, key_count=len(keys)),
            hint=checks.hint(request.hint),
        )
        reserved = shell.store.writer.reserve(session, namespace, wanted, shell.now())
        shell.settle()
        answer = pb.ReserveResponse(states=reserved.states, retry_after_ms=retry_after_ms(reserved.states))
        if reserved.lease is not None:
            self._grant(answer.lease, reserved.lease.id, wanted.lease_s)
            answer.offsets.extend(shell.store.part_views(reserved.lease.parts)[0])
        return answer

    def commit(self, request: pb.CommitRequest, call: Call) -> pb.CommitResponse:
        shell = self._shell
        session = shell.session(request.session)
        lease = self.write_lease(session, request.lease)
        indexes = request.parts[:] or range(len(lease.parts))
        states = shell.store.commit(session, lease, indexes, checksums=request.checksums[:], now=shell.now())
        shell.settle()
        return pb.CommitResponse(states=states)

    def abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        session = self._shell.session(request.session)
        valid = self._for_each(request.leases, lambda i: self._shell.store.abort(session, i, self._shell.now()))
        self._shell.settle()
        return pb.AbortResponse(valid=valid)

    async def delete(self, request: pb.DeleteRequest, call: Call) -> pb.DeleteResponse:
        namespace = self._shell.session(request.session).namespace(request.namespace)
        checks.checked_keys(request.keys, field="keys", limit=self._shell.limits.max_match_blocks)
        states, on_disk = bytearray(), list[asyncio.Future[int]]()
        for at in range(0, len(request.keys), STEP_BLOCKS):
            if at:
                await asyncio.sleep(0)
            states += self._delete(namespace, request.keys[at : at + STEP_BLOCKS], on_disk)
        await durably(on_disk)
        return pb.DeleteResponse(states=bytes(states))

    def _delete(self, namespace: Namespace, keys: Sequence[bytes], on_disk: list[asyncio.Future[int]]) -> bytes:
        """Removes blocks from memory and, in the same moment, from what can be found on disk."""
        tiering = self._shell.tiering
        was_there = [False] * len(keys)
        if tiering is not None and not namespace.rules.spare:
            was_there = tiering.warm.has(namespace.spec.digest, keys)
            on_disk.append(tiering.delete(namespace, keys))
        states = self._shell.store.delete(namespace, keys)
        self._shell.settle()
        return bytes([state or was for state, was in zip(states, was_there, strict=True)])

    def over(self, request: pb.OverRequest, call: Call) -> pb.OverResponse:
        """Tells the policy that a session is over, which its blocks name, or its tag."""
        namespace = self._shell.session(request.session).namespace(request.namespace)
        keys = self._shell.checks.keys(request.chain, self._shell.limits.max_match_blocks)
        blocks = self._shell.store.over(namespace, keys, request.session_tag)
        namespace.counters.add("over_blocks", blocks)
        return pb.OverResponse(blocks=blocks)

    async def explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainResponse:
        namespace = self._shell.session(request.session).namespace(request.namespace)
        keys = self._shell.checks.keys(request.chain, self._shell.limits.max_match_blocks)
        return await explain(self._shell.store, namespace, keys, self._shell.now())

    # -- shared with the inline transfers --------------------------------------------------------------------------

    def write_lease(self, session: Session, lease: types.Lease) -> WriteLease:
        """Raises LeaseExpired."""
        found = None
        if lease.generation == self._shell.generation:
            found = self._shell.store.write_lease(session, lease.id, self._shell.now())
        if found is None:
            raise LeaseExpired(f"write lease {lease.id} of generation {lease.generation} has ended", field="lease")
        return found

    def read_lease(self, session: Session, lease: types.Lease) -> ReadLease:
        """Raises LeaseExpired."""
        found = None
        if lease.generation == self._shell.generation:
            found = self._shell.store.read_lease(session, lease.id, self._shell.now())
        if found is None:
            raise LeaseExpired(f"read lease {lease.id} of generation {lease.generation} has ended", field="lease")
        return found

    # -- helpers -------------------------------------------------------------------------------------------------

    def _refuse_if_draining(self) -> None:
        if self._shell.draining:
            raise Draining("the shard is going away")

    def _new_session(self, request: pb.AttachRequest) -> Session:
        return self._shell.store.open_session(
            secrets.token_bytes(contract.SESSION_BYTES),
            client=request.client,
            features=frozenset(request.features),
            now=self._shell.now(),
        )

    def _check_sizes(self, spec: NamespaceSpec) -> None:
        limits = self._shell.limits
        if spec.part_bytes > limits.max_part_bytes:
            limit = f"{limits.max_part_bytes} bytes"
            raise InvalidArgument(f"is {spec.part_bytes}", field="namespace.part_bytes", limit=limit)
        if spec.parts_per_block > limits.max_parts_per_block:
            message, limit = f"{spec.parts_per_block} parts a block", f"{limits.max_parts_per_block}"
            raise InvalidArgument(message, field="namespace.geometry", limit=limit)

    def _end_session(self, session: Session) -> None:
        try:
            current = self._shell.session(session.id)
        except UnknownSession:
            return
        self._shell.store.end_session(current, self._shell.now())
        self._shell.settle()

    def _acquired(self, acquisition: Acquisition, step: Step) -> pb.AcquireResponse:
        answer = pb.AcquireResponse(first=step.first, states=step.states, settled=step.settled)
        if len(step.parts):
            offsets, lengths, checksums = self._shell.store.part_views(step.parts)
            answer.offsets.extend(offsets)
            answer.lengths.extend(lengths)
            answer.checksums.extend(checksums)
        if acquisition.lease is not None:
            left = acquisition.lease.deadline - self._shell.now()
            self._grant(answer.lease, acquisition.lease.id, left)
        return answer

    def _grant(self, lease: types.Lease, lease_id: int, lease_s: float) -> None:
        """Fills in the lease of an answer."""
        lease.id, lease.generation, lease.ttl_ms = lease_id, self._shell.generation, max(0, int(lease_s * 1000))

    def _for_each(self, leases: Sequence[types.Lease], act: Callable[[int], bool]) -> list[bool]:
        checks.at_most_leases(leases)
        return [lease.generation == self._shell.generation and act(lease.id) for lease in leases]

    def _renewed(self, session: Session, lease_id: int, lease_s: float) -> bool:
        return self._shell.store.renew(session, lease_id, lease_s=lease_s, now=self._shell.now())

    def _check_corrupt(self, session: Session, leases: Sequence[types.Lease], item: pb.CorruptPart) -> None:
        """Drops a block whose stored part really differs from its checksum; a damage on the way is not the block's."""
        if item.lease >= len(leases):
            raise InvalidArgument(f"is {item.lease}", field="corrupt.lease", limit=f"{len(leases) - 1}")
        lease = self._shell.store.read_lease(session, leases[item.lease].id, self._shell.now())
        if lease is None:
            return
        if item.part >= len(lease.parts):
            raise InvalidArgument(f"is {item.part}", field="corrupt.part", limit=f"{len(lease.parts) - 1}")
        parts, part = self._shell.store.records.parts, lease.parts[item.part]
        offset, length = int(parts.offset[part]), int(parts.length[part])
        if xxhash.xxh3_64_intdigest(self._shell.memory.view[offset : offset + length]) != int(parts.checksum[part]):
            self._shell.store.reader.drop_corrupt(int(parts.block[part]))


def joined_steps(steps: Sequence[Step]) -> Step:
    """Returns all steps of one Acquire as one."""
    if len(steps) == 1:
        return steps[0]
    parts: Rows = []
    for step in steps:
        parts = joined(parts, step.parts) if len(parts) else step.parts
    return Step(0, b"".join(step.states for step in steps), parts, settled=True)


async def _drain(pulses: AsyncIterator[pb.SessionPulse], board: NoticeBoard) -> None:
    """Reads pulses to the end of the stream, which ends the session."""
    try:
        async for _ in pulses:
            pass
    finally:
        board.post(None)


def _spec(message: types.NamespaceSpec) -> NamespaceSpec:
    """Raises InvalidArgument, its field named from the request down."""
    try:
        return NamespaceSpec.from_message(message)
    except InvalidArgument as error:
        field = error.field if error.field.startswith("namespace") else f"namespace.{error.field}"
        raise InvalidArgument(error.message, field=field, limit=error.limit) from None


def _common_version(request: pb.AttachRequest) -> int:
    own = contract.PROTOCOL_VERSION
    if not request.min_version <= own <= request.max_version:
        message = f"the caller speaks {request.min_version}-{request.max_version}, this shard {own}"
        raise VersionMismatch(message, field="max_version", limit=f"{own}")
    return own
