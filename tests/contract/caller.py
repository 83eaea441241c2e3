"""A client of the contract in raw messages: one session, one namespace, the verbs as short calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

import xxhash
from google.protobuf.message import Message

from kvstore_wire.limits import PROTOCOL_VERSION
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.doors import HANG_S, Door

MISSING, HOT, IN_FLIGHT = types.BLOCK_STATE_MISSING, types.BLOCK_STATE_HOT, types.BLOCK_STATE_IN_FLIGHT
BUSY, BEYOND = types.BLOCK_STATE_BUSY, types.BLOCK_STATE_BEYOND
CREATED, PRESENT, COMMITTED = types.PART_STATE_CREATED, types.PART_STATE_PRESENT, types.PART_STATE_COMMITTED
WRITING, FULL, UNFILLED = types.PART_STATE_IN_FLIGHT, types.PART_STATE_FULL, types.PART_STATE_UNFILLED
TOO_LARGE, LOST, PART_BEYOND = types.PART_STATE_TOO_LARGE, types.PART_STATE_LOST, types.PART_STATE_BEYOND
EACH, PREFIX = types.COVERAGE_EACH, types.COVERAGE_PREFIX


@dataclass(frozen=True)
class Got:
    """What one Get brought: the states of its header and the bytes of each part that followed."""

    states: list[int]
    parts: list[bytes]
    checksums: list[int]


@dataclass
class Caller:
    """One session at a door, held open by its stream."""

    door: Door
    attached: pb.AttachResponse
    notices: AsyncGenerator[pb.SessionNotice, None]
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    @staticmethod
    async def open(door: Door, spec: NamespaceSpec) -> Caller:
        """Attaches, opens the session's stream and waits until the shard has bound it."""
        attached = await door.call("Attach", attach_request(spec))
        ending = asyncio.Event()
        caller = Caller(door, attached, door.talk("Session", pulses(attached.session, ending)), ending)
        opened = await caller.notice()
        assert opened.WhichOneof("notice") == "opened"
        return caller

    async def close(self) -> None:
        """Breaks the stream, as the end of the process does."""
        self._ending.set()
        await self.notices.aclose()

    @property
    def session(self) -> bytes:
        return self.attached.session

    @property
    def namespace(self) -> int:
        return self.attached.namespace

    async def add(self, spec: NamespaceSpec) -> int:
        """Adds a namespace to the session and returns its handle."""
        answer = await self.door.call("Attach", attach_request(spec, session=self.session))
        return int(answer.namespace)

    async def notice(self) -> pb.SessionNotice:
        return await asyncio.wait_for(anext(self.notices), HANG_S)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def match(self, chain: Sequence[bytes], *, parts: Sequence[int] = (), coverage: int = EACH) -> list[int]:
        """States of each key."""
        answer = await self.door.call("Match", self.match_request(chain, parts=parts, coverage=coverage))
        assert len(answer.states) == len(chain)
        return list(answer.states)

    def match_request(
        self, chain: Sequence[bytes], *, parts: Sequence[int] = (), coverage: int = EACH, namespace: int | None = None
    ) -> pb.MatchRequest:
        return pb.MatchRequest(
            session=self.session,
            namespace=self.namespace if namespace is None else namespace,
            chain=types.Chain(keys=chain),
            parts=types.PartSelection(parts=parts),
            coverage=coverage,  # type: ignore[arg-type]
        )

    def acquire_request(
        self,
        chain: Sequence[bytes],
        *,
        parts: Sequence[int] = (),
        coverage: int = EACH,
        wait_ms: int = 0,
        lease_ms: int = 0,
    ) -> pb.AcquireRequest:
        return pb.AcquireRequest(
            session=self.session,
            namespace=self.namespace,
            chain=types.Chain(keys=chain),
            parts=types.PartSelection(parts=parts),
            coverage=coverage,  # type: ignore[arg-type]
            wait_ms=wait_ms,
            lease_ms=lease_ms,
        )

    async def acquire(
        self, chain: Sequence[bytes], *, coverage: int = EACH, wait_ms: int = 0, lease_ms: int = 0
    ) -> list[pb.AcquireResponse]:
        """All answers; the last one is settled and together they speak of every key once."""
        request = self.acquire_request(chain, coverage=coverage, wait_ms=wait_ms, lease_ms=lease_ms)
        answers = [answer async for answer in self.door.stream("Acquire", request)]
        assert [a.settled for a in answers] == [False] * (len(answers) - 1) + [True]
        at = 0
        for answer in answers:
            assert answer.first == at
            at += len(answer.states)
        assert at == len(chain)
        return answers

    async def lease(self, chain: Sequence[bytes], *, lease_ms: int = 0) -> types.Lease:
        """Leases stored blocks."""
        (answer,) = await self.acquire(chain, lease_ms=lease_ms)
        assert list(answer.states) == [HOT] * len(chain)
        return answer.lease

    async def release(self, *leases: types.Lease) -> list[bool]:
        answer = await self.door.call("Release", pb.ReleaseRequest(session=self.session, leases=leases))
        assert len(answer.valid) == len(leases)
        return list(answer.valid)

    async def renew(self, *leases: types.Lease, lease_ms: int = 0) -> list[bool]:
        request = pb.RenewRequest(session=self.session, leases=leases, lease_ms=lease_ms)
        return list((await self.door.call("Renew", request)).valid)

    def get_request(
        self,
        chain: Sequence[bytes] = (),
        *,
        lease: types.Lease | None = None,
        parts: Sequence[int] = (),
        coverage: int = EACH,
        wait_ms: int = 0,
    ) -> pb.GetRequest:
        request = pb.GetRequest(session=self.session, namespace=self.namespace, wait_ms=wait_ms)
        request.parts.parts.extend(parts)
        request.coverage = coverage  # type: ignore[assignment]
        if lease is None:
            request.chain.keys.extend(chain)
            request.chain.SetInParent()
        else:
            request.lease.CopyFrom(lease)
        return request

    async def get(
        self,
        chain: Sequence[bytes] = (),
        *,
        lease: types.Lease | None = None,
        parts: Sequence[int] = (),
        coverage: int = EACH,
        wait_ms: int = 0,
    ) -> Got:
        request = self.get_request(chain, lease=lease, parts=parts, coverage=coverage, wait_ms=wait_ms)
        return await collect(self.door.stream("Get", request))

    # -- writing ---------------------------------------------------------------------------------------------------

    async def reserve(
        self,
        chain: Sequence[bytes],
        *,
        parts: Sequence[int] = (),
        lengths: Sequence[int] = (),
        lease_ms: int = 0,
    ) -> pb.ReserveResponse:
        request = pb.ReserveRequest(
            session=self.session,
            namespace=self.namespace,
            chain=types.Chain(keys=chain),
            parts=types.PartSelection(parts=parts),
            lengths=lengths,
            lease_ms=lease_ms,
        )
        answer: pb.ReserveResponse = await self.door.call("Reserve", request)
        return answer

    async def put(
        self, chain: Sequence[bytes], values: Sequence[bytes], *, parts: Sequence[int] = (), opaque: bool = False
    ) -> list[int]:
        """Puts a chain; `values` has the bytes of each part, key by key. Returns the part states."""
        header = self.put_header(chain, parts=parts, lengths=[len(v) for v in values] if opaque else ())
        answer = await self.door.send("Put", put_messages(header, values))
        return list(answer.states)

    def put_header(
        self,
        chain: Sequence[bytes] = (),
        *,
        lease: types.Lease | None = None,
        parts: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> pb.PutHeader:
        header = pb.PutHeader(session=self.session, namespace=self.namespace, lengths=lengths)
        header.parts.parts.extend(parts)
        if lease is None:
            header.chain.keys.extend(chain)
            header.chain.SetInParent()
        else:
            header.lease.CopyFrom(lease)
        return header

    async def fill(self, lease: types.Lease, values: Sequence[bytes]) -> list[int]:
        """Puts and commits the parts of a write lease."""
        answer = await self.door.send("Put", put_messages(self.put_header(lease=lease), values))
        return list(answer.states)

    async def commit(
        self, lease: types.Lease, checksums: Sequence[int] = (), *, parts: Sequence[int] = ()
    ) -> list[int]:
        request = pb.CommitRequest(session=self.session, lease=lease, checksums=checksums, parts=parts)
        return list((await self.door.call("Commit", request)).states)

    async def abort(self, *leases: types.Lease) -> list[bool]:
        return list((await self.door.call("Abort", pb.AbortRequest(session=self.session, leases=leases))).valid)

    async def delete(self, keys: Sequence[bytes]) -> list[int]:
        request = pb.DeleteRequest(session=self.session, namespace=self.namespace, keys=keys)
        return list((await self.door.call("Delete", request)).states)

    # -- looking ---------------------------------------------------------------------------------------------------

    async def gauge(self, name: str) -> int:
        stats = await self.door.call("GetStats", admin.GetStatsRequest())
        return next(int(g.value) for g in stats.gauges if g.name == name)

    async def counters(self) -> dict[str, int]:
        """Counters of this caller's namespace."""
        page = await self.door.call("ListNamespaces", admin.ListNamespacesRequest(page_size=1000))
        found = next(n for n in page.namespaces if n.digest == self.attached.digest)
        return {c.name: int(c.value) for c in found.counters}


def attach_request(spec: NamespaceSpec, *, session: bytes = b"", digest: bytes | None = None) -> pb.AttachRequest:
    return pb.AttachRequest(
        min_version=PROTOCOL_VERSION,
        max_version=PROTOCOL_VERSION,
        client="test",
        session=session,
        namespace=spec.to_message(),
        digest=spec.digest if digest is None else digest,
    )


async def pulses(session: bytes, ending: asyncio.Event) -> AsyncIterator[pb.SessionPulse]:
    """Names the session and keeps the stream open until told."""
    yield pb.SessionPulse(session=session)
    await ending.wait()


async def put_messages(
    header: pb.PutHeader, values: Sequence[bytes], *, checksums: Sequence[int] | None = None, piece_bytes: int = 32768
) -> AsyncIterator[pb.PutRequest]:
    """A whole Put stream, its bytes cut into pieces wherever they fall."""
    yield pb.PutRequest(header=header)
    payload = b"".join(values)
    for at in range(0, len(payload), piece_bytes):
        yield pb.PutRequest(data=payload[at : at + piece_bytes])
    sums = [checksum(v) for v in values] if checksums is None else checksums
    yield pb.PutRequest(trailer=pb.PutTrailer(checksums=sums))


async def as_stream(messages: Sequence[Message]) -> AsyncIterator[Message]:
    """Sends messages and then ends the stream."""
    for message in messages:
        yield message


async def collect(answers: AsyncIterator[pb.GetResponse]) -> Got:
    """Reads a Get stream to its end and checks it against its header."""
    first = await asyncio.wait_for(anext(answers), HANG_S)
    assert first.WhichOneof("body") == "header"
    rest = [answer async for answer in answers]
    sums = list(first.header.checksums)
    if rest and rest[-1].WhichOneof("body") == "trailer":
        assert not sums
        sums = list(rest.pop().trailer.checksums)
    payload = b"".join([answer.data for answer in rest])
    header, parts, at = first.header, list[bytes](), 0
    for length in header.lengths:
        parts.append(payload[at : at + length])
        at += length
    assert at == len(payload)
    assert [checksum(p) for p in parts] == sums
    return Got(list(header.states), parts, sums)


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def value(label: object, size_bytes: int) -> bytes:
    """Bytes that differ from label to label."""
    return hashlib.shake_128(repr(label).encode()).digest(size_bytes)
