"""Shared memory, on the shard's own host: bytes are copied between processes' memory, once.

Rules
- Reads copy out of the shard's arena, mapped read-only, under a lease; a read counts if the checksums of what landed
  are those that came with the lease, or if the lease was valid to the end. Where the arena may not be mapped, the shard
  copies to the caller's region.
- Writes name slices of a registered region; the shard copies from there while this side makes the checksums.
- What is small, or lies in no region, goes through the socket: one exchange costs less than two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvstore_client.buffers import Slices
from kvstore_client.copying import Copier
from kvstore_client.deadline import Deadline
from kvstore_client.errand import Shared, waited
from kvstore_client.errors import ClientClosed, MalformedAnswer, PathDown
from kvstore_client.fast.dial import OPEN_MS, dial
from kvstore_client.fast.lane import BlockingLane
from kvstore_client.fast.wire import OneMessage, Piece
from kvstore_client.grants import Grants
from kvstore_client.mapping import ArenaMapping
from kvstore_client.options import Verify
from kvstore_client.outgoing import Outgoing
from kvstore_client.paths import Path
from kvstore_client.quiet import QuietLog
from kvstore_client.regions import Region, RegionBook, Registration
from kvstore_client.transports.base import Receiver
from kvstore_client.transports.framed import Arena, Aside, FramedTransport, Lanes
from kvstore_wire.errors import (
    DeadlineExceeded,
    Denied,
    InvalidArgument,
    KvStoreError,
    LeaseExpired,
    TableFull,
    UnknownSession,
    Unsupported,
)
from kvstore_wire.frames import Verb
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types

# Below this, one exchange through the socket costs less than lease, copy and release.
INLINE_BYTES = 256 << 10
# Copied on the caller's own thread even in an event loop: less than what a hop to another thread costs.
AT_ONCE_BYTES = 1 << 20
# How much longer than its deadline a call may take whose bytes the shard moves, until it is known that it has stopped.
RETIRE_MS = 200


class SharedMemory:
    """The arena's mapping and the regions of one client. Thread-safe."""

    def __init__(self, log: QuietLog, threads: int | None = None) -> None:
        self.copier = Copier(threads)
        self.regions = RegionBook()
        self._log = log
        self._lock = threading.Lock()
        self._mapped = _Mapped(0, None)
        self._mapping: Shared[None] = Shared()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            mapping, self._mapped, self._closed = self._mapped.mapping, _Mapped(0, None), True
        if mapping is not None:
            mapping.close()
        self.copier.close()
        self.regions.close()

    def knows(self, path: Path) -> bool:
        """Whether `mapping` answers at once."""
        return self._mapped.generation == path.generation

    def known(self, path: Path) -> ArenaMapping | None:
        """Returns the arena's mapping if it is there already."""
        mapped = self._mapped
        return mapped.mapping if mapped.generation == path.generation else None

    def mapping(
        self, path: Path, session: bytes, deadline: Deadline, failed: Callable[[KvStoreError], object]
    ) -> ArenaMapping | None:
        """Returns the arena's mapping, None where the shard does not give it. Blocks. Raises KvStoreError.

        `failed` is told where the path does not work, even if no call waits for that any more.
        """
        mapped = self._mapped
        if mapped.generation != path.generation:
            attempt = self._mapping.begin((path, session), lambda: self._map_once(path, session, failed))
            waited(attempt, deadline, "mapping the shard's memory")
            mapped = self._mapped
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        if mapped.generation != path.generation:
            raise PathDown("the shard has another life meanwhile")
        return mapped.mapping

    def number(self, path: Path, session: bytes, region: Region, deadline: Deadline) -> int | None:
        """Returns the region's number in a session, registering it once; None where the shard refuses it. Blocks."""
        with _held(region.lock, deadline):
            if session in region.refused or region.closed:
                return None
            known = region.number(session)
            if known is not None:
                return known
            # A call in a hurry gives up, this does not: without the number that the answer brings, a registration stays
            # until the session ends.
            attempt = region.registering.begin(session, lambda: self._register_once(path, session, region))
        waited(attempt, deadline, "registering a region")
        return region.number(session)

    def retire(self, region: Region, number: int | None = None) -> None:
        """Ends a region's registration, the one of that `number` if it is given, and waits until no copy uses it.

        It is registered anew when it is next used. Blocks, a moment at most; a shard that does not answer keeps it.
        """
        deadline = Deadline.after(RETIRE_MS)
        with suppress(KvStoreError), _held(region.lock, deadline):
            under_way = region.registering.under_way
            if number is None and under_way is not None:
                with suppress(PathDown):
                    waited(under_way, deadline, "registering a region")
            known = region.registration
            if known is None or number not in (None, known.number):
                return
            with suppress(UnknownSession):  # It has ended, and the region with it.
                self._unregister(known, deadline)
            region.registration = None

    def _map_once(self, path: Path, session: bytes, failed: Callable[[KvStoreError], object]) -> None:
        try:
            made = self._map(path, session, Deadline.after(OPEN_MS))
        except PathDown as error:
            failed(error)
            raise
        with self._lock:
            old = made
            if not self._closed and self._mapped.generation != path.generation:
                old, self._mapped = self._mapped.mapping, _Mapped(path.generation, made)
        if old is not None:
            old.close()

    def _register_once(self, path: Path, session: bytes, region: Region) -> None:
        deadline = Deadline.after(OPEN_MS)
        try:
            with region.descriptor() as fd:
                number = self._register(path, session, region, fd, deadline)
        except (InvalidArgument, TableFull, Unsupported, OSError) as error:
            self._log.warning("region", f"a region is not used, its bytes go through the socket: {error}")
            region.refused.add(session)
            return
        known = region.registration = Registration(path, session, number)
        if region.closed:  # Meanwhile.
            with suppress(KvStoreError):
                self._unregister(known, deadline)

    def _map(self, path: Path, session: bytes, deadline: Deadline) -> ArenaMapping | None:
        dialed = dial(path.endpoint, path.generation, deadline)
        lane = BlockingLane(dialed)
        try:
            if not dialed.answer.may_map:
                return None
            taker = OneMessage()
            request = channel.MapArenaRequest(session=session).SerializeToString()
            fd = lane.exchange_descriptor(Verb.MAP_ARENA, request, taker=taker, deadline=deadline)
            if fd is None:
                raise MalformedAnswer("the arena came without a descriptor")
            try:
                answer = _parsed(channel.MapArenaResponse(), taker.raw)
                if answer.generation != path.generation:
                    raise MalformedAnswer("the arena of another life of the shard came")
            except MalformedAnswer:
                os.close(fd)
                raise
            return ArenaMapping(fd, answer.size_bytes, answer.generation)
        except (Denied, MalformedAnswer, OSError) as error:
            self._log.warning("arena", f"the arena is not mapped, the shard copies instead: {error}")
            return None
        finally:
            lane.close()

    @staticmethod
    def _unregister(known: Registration, deadline: Deadline) -> None:
        lane = BlockingLane(dial(known.path.endpoint, known.path.generation, deadline))
        try:
            request = channel.UnregisterRegionRequest(session=known.session, region=known.number)
            raw = request.SerializeToString()
            lane.exchange(Verb.UNREGISTER_REGION, raw, taker=OneMessage(), deadline=deadline)
        finally:
            lane.close()

    def _register(self, path: Path, session: bytes, region: Region, fd: int, deadline: Deadline) -> int:
        lane = BlockingLane(dial(path.endpoint, path.generation, deadline))
        try:
            taker = OneMessage()
            request = channel.RegisterRegionRequest(session=session, offset=region.offset, length=region.length)
            lane.exchange_descriptor(
                Verb.REGISTER_REGION,
                request.SerializeToString(),
                taker=taker,
                deadline=deadline,
                descriptor=fd,
            )
            number: int = _parsed(channel.RegisterRegionResponse(), taker.raw).region
            return number
        finally:
            lane.close()


@dataclass(frozen=True)
class _Mapped:
    """The life of a shard, and its arena; None where it refused to be mapped."""

    generation: int
    mapping: ArenaMapping | None


@contextmanager
def _held(lock: threading.Lock, deadline: Deadline) -> Iterator[None]:
    """Holds a lock. Raises DeadlineExceeded."""
    if not lock.acquire(timeout=deadline.remaining_s()):
        raise DeadlineExceeded("the deadline passed while another call mapped or registered memory")
    try:
        yield
    finally:
        lock.release()


class ShmTransport(FramedTransport):
    """Reads and writes of one path. `limits` are the shard's."""

    quick_bytes = quick_put_bytes = INLINE_BYTES
    streams = False  # They come through regions, or arenas.

    def __init__(
        self, path: Path, lanes: Lanes, *, memory: SharedMemory, aside: Aside, verify: Verify, limits: types.Limits
    ) -> None:
        super().__init__(path.name, lanes, aside)
        self._path, self._memory = path, memory
        self._verify, self._limits = verify, limits

    @property
    def arena(self) -> Arena | None:  # type: ignore[override]
        mapping = self._memory.known(self._path)
        return None if mapping is None or mapping.closed else Arena(mapping.array, self._memory.copier)

    async def get(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        if receiver.most_bytes <= INLINE_BYTES or request.ranges:
            await super().get(request, receiver, deadline)
            return
        mapping = await self.mapping(request.session, deadline)
        if mapping is None:
            await self._get_by_copy(request, receiver, deadline)
        else:
            await self._get_by_lease(request, receiver, mapping, deadline)

    async def read(self, request: store.GetRequest, grants: Grants, receiver: Receiver, deadline: Deadline) -> None:
        mapping = None
        if receiver.most_bytes > INLINE_BYTES:
            mapping = await self.mapping(request.session, deadline)
        if mapping is None:
            await super().read(request, grants, receiver, deadline)
            return
        lengths, checksums = grants.lengths.tolist(), grants.checksums.tolist()
        receiver.begin(store.GetHeader(lengths=lengths, checksums=checksums))
        await self._copy_out(mapping, grants, receiver, self._verify)
        receiver.finish()

    def skips_what_is_stored(self, parts: Sequence[Slices]) -> bool:
        return self._memory.regions.may_hold(parts)

    async def put(self, header: store.PutHeader, outgoing: Outgoing, deadline: Deadline) -> store.PutResponse:
        found = self._memory.regions.find(outgoing.parts) if outgoing.size_bytes > INLINE_BYTES else None
        number = None
        if found is not None:
            number = await self._number(header.session, found[0], deadline)
        if found is None or number is None:
            return await super().put(header, outgoing, deadline)
        header.source.CopyFrom(found[1])
        header.source.region = number
        taker = OneMessage()
        raw = store.PutRequest(header=header).SerializeToString()
        source = _Trailer(outgoing, self._memory.copier).begin
        async with self._moving(found[0], number):
            try:
                await self.lanes.exchange(Verb.PUT, raw, taker=taker, deadline=deadline, source=source)
            except InvalidArgument as error:
                if error.field != "region":
                    raise
                header.ClearField("source")  # Its registration was ended meanwhile.
                return await super().put(header, outgoing, deadline)
        answer: store.PutResponse = _parsed(store.PutResponse(), taker.raw)
        return answer

    async def mapping(self, session: bytes, deadline: Deadline) -> ArenaMapping | None:
        """Returns the arena's mapping, None where the shard does not give it. Raises KvStoreError."""
        if self._memory.knows(self._path):
            return self._memory.mapping(self._path, session, deadline, self.lanes.failed)
        try:
            return await self._aside.run(lambda: self._memory.mapping(self._path, session, deadline, self.lanes.failed))
        except PathDown as error:
            self.lanes.failed(error)
            raise

    async def _get_by_lease(
        self, request: store.GetRequest, receiver: Receiver, mapping: ArenaMapping, deadline: Deadline
    ) -> None:
        told = await self._leased(request, deadline)
        proved = False
        try:
            header = store.GetHeader(states=told.states, lengths=told.lengths, checksums=told.checksums)
            receiver.begin(header)
            if told.offsets:
                grants = Grants.of(told.offsets, told.lengths, told.checksums)
                corrupt = await self._copy_out(mapping, grants, receiver, self._verify)
                proved = self._verify is Verify.ON and not corrupt
            else:
                receiver.moved(())
        except BaseException:
            if told.lease is not None:
                self._aside.background(self.end_lease("Acquire", request.session, told.lease))
            raise
        if told.lease is not None:
            await self._end(request.session, told.lease, deadline, proved=proved)
        receiver.finish()

    async def _end(self, session: bytes, lease: types.Lease, deadline: Deadline, *, proved: bool) -> None:
        """Ends the lease of a read. Raises LeaseExpired if it had ended, unless the bytes are proved to be right: then
        nobody waits for the answer."""
        request = store.ReleaseRequest(session=session, leases=[lease])
        if proved:
            if not self.lanes.tell(Verb.RELEASE, request.SerializeToString()):
                self._aside.background(self.end_lease("Acquire", session, lease))
            return
        taker = OneMessage()
        await self.lanes.exchange(Verb.RELEASE, request.SerializeToString(), taker=taker, deadline=deadline)
        answer: store.ReleaseResponse = _parsed(store.ReleaseResponse(), taker.raw)
        if list(answer.valid) != [True]:
            raise LeaseExpired("the lease ended under the read")

    async def _leased(self, request: store.GetRequest, deadline: Deadline) -> _Told:
        acquire = store.AcquireRequest(
            session=request.session,
            namespace=request.namespace,
            chain=request.chain,
            parts=request.parts,
            coverage=request.coverage,
            wait_ms=request.wait_ms,
            lease_ms=max(1, min(deadline.remaining_ms(), self._limits.max_lease_ms)),
            hint=request.hint,
        )
        told = _Told()
        async for answer in self.answers("Acquire", acquire, deadline):
            told.take(answer)
        return told

    async def _get_by_copy(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        """Lets the shard copy to a region where all buffers are in one; else the bytes come through the socket."""
        targets = receiver.all_targets
        found = None if targets is None else self._memory.regions.find(targets)
        number = None
        if found is not None:
            number = await self._number(request.session, found[0], deadline)
        if found is None or number is None:
            await super().get(request, receiver, deadline)
            return
        request.into.CopyFrom(found[1])
        request.into.region = number
        taker = _HeaderOnly(receiver)
        async with self._moving(found[0], number):
            try:
                await self.lanes.exchange(Verb.GET, request.SerializeToString(), taker=taker, deadline=deadline)
            except InvalidArgument as error:
                if error.field != "region":
                    raise
                request.ClearField("into")  # Its registration was ended meanwhile.
                await super().get(request, receiver, deadline)
                return
        header = taker.header
        if header is None:
            raise MalformedAnswer("the answer has no header")
        receiver.begin(header)
        small = sum(header.lengths) <= AT_ONCE_BYTES
        work = partial(self._mismatched, header, receiver)
        receiver.moved(work() if small else await self._aside.run(work))
        receiver.finish()

    @asynccontextmanager
    async def _moving(self, region: Region, number: int) -> AsyncIterator[None]:
        """Around an exchange whose bytes the shard moves by itself: once this is left, it moves none any more.

        An answer says so. Where none came, the region is taken back, which the shard answers when no copy uses it.
        """
        try:
            yield
        except BaseException as error:
            answered = isinstance(error, KvStoreError) and not isinstance(error, (PathDown, DeadlineExceeded))
            if not answered and (not isinstance(error, PathDown) or error.sent):
                await self._aside.run(lambda: self._memory.retire(region, number))
            raise

    def _mismatched(self, header: store.GetHeader, receiver: Receiver) -> list[int]:
        """Checks what landed in a region."""
        if self._verify is Verify.OFF:
            return []
        landed = [target for target in receiver.targets if target is not None]
        if len(landed) != len(header.checksums):
            raise MalformedAnswer(f"{len(header.checksums)} checksums for {len(landed)} parts")
        sums = self._memory.copier.hash_parts(landed)
        return [i for i, (ours, told) in enumerate(zip(sums, header.checksums, strict=True)) if ours != told]

    async def _copy_out(self, mapping: ArenaMapping, grants: Grants, receiver: Receiver, verify: Verify) -> list[int]:
        """Copies what was leased; returns the parts that are not what their checksums say."""

        def copy() -> list[int]:
            return self._memory.copier.copy_out(
                mapping.array,
                offsets=grants.offsets,
                lengths=grants.lengths,
                checksums=grants.checksums,
                targets=receiver.targets,
                verify=verify,
            )

        small = int(grants.lengths.sum()) <= AT_ONCE_BYTES
        corrupt = copy() if small else await self._aside.run(copy)
        receiver.moved(corrupt)
        return corrupt

    async def _number(self, session: bytes, region: Region, deadline: Deadline) -> int | None:
        known = region.number(session)
        if known is not None:
            return known
        with suppress(PathDown):
            return await self._aside.run(lambda: self._memory.number(self._path, session, region, deadline))
        return None


class _Told:
    """The messages of one Acquire, added up."""

    def __init__(self) -> None:
        self.lease: types.Lease | None = None
        self.states = b""
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.checksums: list[int] = []

    def take(self, answer: store.AcquireResponse) -> None:
        if answer.HasField("lease"):
            self.lease = answer.lease
        self.states += answer.states
        self.offsets.extend(answer.offsets)
        self.lengths.extend(answer.lengths)
        self.checksums.extend(answer.checksums)


class _HeaderOnly(OneMessage):
    """Takes the answer of a Get whose bytes the shard has moved."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver
        self.header: store.GetHeader | None = None

    def message(self, raw: bytes) -> None:
        answer = _parsed(store.GetResponse(), raw)
        if answer.WhichOneof("body") != "header" or self.header is not None:
            raise MalformedAnswer("not one header came")
        self.header = answer.header


class _Trailer:
    """The end of a Put whose bytes the shard takes from a region: the checksums, made while it copies."""

    is_slow = True

    def __init__(self, outgoing: Outgoing, copier: Copier) -> None:
        self._outgoing, self._copier = outgoing, copier

    def begin(self, frame_bytes: int) -> _Trailer:
        return self

    def __next__(self) -> Piece:
        os.sched_yield()  # The shard was woken, perhaps on this CPU: it is to begin before the hashing does.
        checksums = self._copier.hash_alone(self._outgoing.parts)  # The shard copies with more threads meanwhile.
        trailer = store.PutTrailer(checksums=checksums)
        return [], 0, store.PutRequest(trailer=trailer).SerializeToString(), True


def _parsed(message: Message, raw: bytes) -> Any:
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise MalformedAnswer(f"is not a {type(message).__name__}") from None
    return message
