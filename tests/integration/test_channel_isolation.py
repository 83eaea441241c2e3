"""Two sessions, whatever they connect by: neither can use what the other was given, nor see what is not its own."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest

from kvstore_wire.errors import InvalidArgument, KvStoreError, LeaseExpired, UnknownNamespace, UnknownSession
from kvstore_wire.frames import Verb
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import COMMITTED, HOT, MISSING, Caller, checksum, put_messages
from tests.contract.doors import Door, FramedDoor, GrpcDoor
from tests.integration.channel_scene import BULK, PART_BYTES, SPEC, UNIX, Scene, block, frame_of, scene
from tests.integration.raw_peer import RawPeer
from tests.shards import key, keys, kv_spec

pytestmark = pytest.mark.integration

OTHER = kv_spec("a", part_bytes=PART_BYTES, tenant="other")
each_door = pytest.mark.parametrize("by", ["grpc", "bulk", "unix"])


def door(at: Scene, by: str) -> Door:
    if by == "grpc":
        return GrpcDoor(at.local.target, at.local.admin_target)
    return FramedDoor(at.local.channel[BULK if by == "bulk" else UNIX], at.local.admin_target)


async def error_of(call: Awaitable[object]) -> KvStoreError | None:
    try:
        await call
    except KvStoreError as error:
        return error
    return None


@each_door
async def test_another_tenant_with_the_same_keys_sees_and_changes_nothing(by: str) -> None:
    async with scene() as at:
        await at.fill(4)
        path = door(at, by)
        other = await Caller.open(path, OTHER)
        chain = keys(0, 4)
        assert await other.match(chain) == [MISSING] * 4
        (acquired,) = await other.acquire(chain)
        assert (list(acquired.states), acquired.HasField("lease")) == ([MISSING] * 4, False)
        assert (await other.get(chain)).states == [MISSING] * 4
        assert await other.delete(chain) == [0] * 4
        session = {"session": other.session, "namespace": other.namespace}
        explained = await path.call("Explain", pb.ExplainRequest(chain=types.Chain(keys=chain), **session))  # type: ignore[arg-type]
        assert [b.state for b in explained.blocks] == [MISSING] * 4
        over = await path.call("Over", pb.OverRequest(chain=types.Chain(keys=chain), **session))  # type: ignore[arg-type]
        assert over.blocks == 0
        own = [block(100 + i) for i in range(4)]
        assert await other.put(chain, own) == [COMMITTED] * 4
        assert (await other.get(chain)).parts == own
        assert (await at.caller.get(chain)).parts == [block(i) for i in range(4)]
        assert await other.delete(chain) == [1] * 4
        assert await at.caller.match(chain) == [HOT] * 4
        await other.close()
        await path.close()


@each_door
async def test_a_lease_is_of_no_use_to_another_session(by: str) -> None:
    """Of the same namespace, so that nothing but the session keeps them apart."""
    async with scene() as at:
        await at.fill(1)
        path = door(at, by)
        thief = await Caller.open(path, SPEC)
        reading = await at.caller.lease([key(0)])
        writing = (await at.caller.reserve([key(1)])).lease
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: thief.get(lease=reading),
            lambda: thief.fill(writing, [block(9)]),
            lambda: thief.commit(writing, [checksum(block(9))]),
        ]
        for call in calls:
            assert isinstance(await error_of(call()), LeaseExpired)
        for lease in (reading, writing):
            assert await thief.release(lease) == [False]
            assert await thief.renew(lease, lease_ms=1000) == [False]
            assert await thief.abort(lease) == [False]
        assert (await at.caller.get(lease=reading)).parts == [block(0)]
        assert await at.caller.fill(writing, [block(1)]) == [COMMITTED]
        assert (await at.caller.get([key(1)])).parts == [block(1)]
        assert await at.caller.release(reading) == [True]
        await thief.close()
        await path.close()


@each_door
async def test_handles_and_sessions_are_not_guessed(by: str) -> None:
    async with scene() as at:
        await at.fill(1)
        path = door(at, by)
        other = await Caller.open(path, OTHER)
        second = await at.caller.add(kv_spec("b", part_bytes=PART_BYTES))
        for handle in (0, second, 2**32 - 1):
            request = other.match_request([key(0)], namespace=handle)
            assert isinstance(await error_of(path.call("Match", request)), UnknownNamespace)
            header = other.put_header([key(0)])
            header.namespace = handle
            assert isinstance(await error_of(path.send("Put", put_messages(header, [block(0)]))), UnknownNamespace)
        for session in (b"", bytes(16), other.session[:-1], other.session + b"\0"):
            match = pb.MatchRequest(session=session, namespace=1, chain=types.Chain(keys=[key(0)]))
            assert isinstance(await error_of(path.call("Match", match)), UnknownSession)
        await other.close()
        await path.close()


@each_door
async def test_a_region_is_of_no_use_to_another_session(by: str) -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(1)
        number, fd = await region(at, peer)
        path = door(at, by)
        thief = await Caller.open(path, SPEC)
        slices = types.RegionSlices(region=number, offsets=[0], lengths=[PART_BYTES])
        get, put = thief.get_request([key(0)]), thief.put_header([key(7)])
        get.into.CopyFrom(slices)
        put.source.CopyFrom(slices)
        for error in (
            await error_of(first(path.stream("Get", get))),
            await error_of(path.send("Put", put_messages(put, []))),
        ):
            assert isinstance(error, InvalidArgument)
            assert error.field == "region"
        unregister = channel.UnregisterRegionRequest(session=thief.session, region=number)
        answer = await peer.call(Verb.UNREGISTER_REGION, 9, unregister)
        assert not channel.UnregisterRegionResponse.FromString(answer.message).known
        assert os.pread(fd, PART_BYTES, 0) == b"mine".ljust(PART_BYTES, b"\0")
        assert at.local.server.shell.regions.region_count == 1
        assert await at.caller.match([key(7)]) == [MISSING]
        os.close(fd)
        await thief.close()
        await path.close()


async def region(at: Scene, peer: RawPeer) -> tuple[int, int]:
    """Registers a region of the scene's caller; returns its number and its file."""
    fd = os.memfd_create("region")
    os.truncate(fd, PART_BYTES)
    os.pwrite(fd, b"mine", 0)
    request = channel.RegisterRegionRequest(session=at.caller.session, length=PART_BYTES)
    peer.send_with(frame_of(Verb.REGISTER_REGION, 3, request), fd)
    return channel.RegisterRegionResponse.FromString((await peer.next()).message).region, fd


async def first(answers: object) -> object:
    async for answer in answers:  # type: ignore[attr-defined]
        return answer
    return None
