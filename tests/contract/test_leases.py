"""Leases and sessions: every right has an end, and an ended one is refused."""

from __future__ import annotations

import asyncio

import pytest

from kvstore_wire.errors import InvalidArgument, LeaseExpired, UnknownSession
from kvstore_wire.limits import MAX_LEASES_PER_CALL
from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import (
    COMMITTED,
    HOT,
    IN_FLIGHT,
    MISSING,
    Caller,
    as_stream,
    checksum,
    pulses,
    value,
)
from tests.contract.conftest import OpenShard, Shard
from tests.contract.doors import HANG_S
from tests.integration.server_process import until
from tests.shards import key, keys, kv_spec

V = [value(i, 4096) for i in range(8)]


async def test_a_read_lease_ends_at_its_deadline_and_its_holder_is_told(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    lease = await caller.lease([key(0)], lease_ms=100)
    notice = await caller.notice()
    assert list(notice.leases_ended.ids) == [lease.id]
    assert await caller.release(lease) == [False]
    assert await caller.renew(lease) == [False]
    with pytest.raises(LeaseExpired):
        await caller.get(lease=lease)
    assert await caller.gauge("leased_bytes") == 0
    assert (await caller.counters())["read_leases_expired"] == 1


async def test_a_write_lease_ends_at_its_deadline_and_nothing_becomes_visible(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve([key(0)], lease_ms=100)
    await until(lambda: not shard.local.gauge("leases"), "the lease did not end")
    with pytest.raises(LeaseExpired) as caught:
        await caller.commit(reserved.lease, [checksum(V[0])])
    assert caught.value.field == "lease"
    assert await caller.abort(reserved.lease) == [False]
    assert await caller.match([key(0)]) == [MISSING]
    assert await caller.gauge("reserved_bytes") == 0
    assert (await caller.counters())["write_leases_expired"] == 1


async def test_renew_lengthens_a_lease_beyond_its_first_deadline(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    renewed, left = await caller.lease([key(0)], lease_ms=200), await caller.lease([key(0)], lease_ms=200)
    assert await caller.renew(renewed, lease_ms=20_000) == [True]
    await until(lambda: shard.local.gauge("leases") == 1, "the other lease did not end")
    assert await caller.release(renewed, left) == [True, False]


async def test_renew_and_release_answer_each_lease(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    first, second = await caller.lease([key(0)]), await caller.lease([key(0)])
    unknown = types.Lease(id=1 << 60, generation=first.generation)
    assert await caller.renew(first, unknown, second, first) == [True, False, True, True]
    assert await caller.release(second, unknown, second, first) == [True, False, False, True]
    assert await caller.release(first) == [False]


async def test_leases_of_another_session_are_refused(shard: Shard) -> None:
    owner, thief = await shard.caller(), await shard.caller()
    await owner.put([key(0)], V[:1])
    read, written = await owner.lease([key(0)]), (await owner.reserve([key(1)])).lease
    assert await thief.renew(read, written) == [False, False]
    assert await thief.release(read, written) == [False, False]
    assert await thief.abort(read, written) == [False, False]
    for call in (thief.get(lease=read), thief.fill(written, V[1:2]), thief.commit(written, [0])):
        with pytest.raises(LeaseExpired):
            await call
    assert await owner.fill(written, V[1:2]) == [COMMITTED]
    assert await owner.release(read) == [True]


async def test_leases_of_the_other_kind_are_refused(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    read, written = await caller.lease([key(0)]), (await caller.reserve([key(1)])).lease
    assert await caller.release(written) == [False]
    assert await caller.abort(read) == [False]
    for call in (caller.get(lease=written), caller.commit(read, [0]), caller.fill(read, V[:1])):
        with pytest.raises(LeaseExpired):
            await call
    assert await caller.renew(read, written) == [True, True]


async def test_leases_of_another_generation_are_refused(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    read, written = await caller.lease([key(0)]), (await caller.reserve([key(1)])).lease
    assert read.generation == written.generation == caller.attached.generation
    stale = [types.Lease(id=lease.id, generation=lease.generation - 1) for lease in (read, written)]
    assert await caller.renew(*stale) == [False, False]
    assert await caller.release(stale[0]) == [False]
    assert await caller.abort(stale[1]) == [False]
    for call in (caller.get(lease=stale[0]), caller.commit(stale[1], [0]), caller.fill(stale[1], V[1:2])):
        with pytest.raises(LeaseExpired):
            await call
    assert await caller.release(read) == [True]
    assert await caller.abort(written) == [True]


async def test_the_end_of_the_stream_ends_the_session_and_its_leases(shard: Shard) -> None:
    caller, other = await shard.caller(), await shard.caller()
    await caller.put([key(0)], V[:1])
    lease = await caller.lease([key(0)])
    await caller.reserve([key(1)])
    assert await other.match(keys(0, 2)) == [HOT, IN_FLIGHT]
    await caller.close()
    await shard.local.until_idle()
    assert await other.match(keys(0, 2)) == [HOT, MISSING]
    assert await other.gauge("leased_bytes") == await other.gauge("reserved_bytes") == 0
    with pytest.raises(UnknownSession):
        await caller.release(lease)


async def test_a_client_that_closes_its_side_of_the_stream_ends_the_session(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.reserve([key(1)])
    caller._ending.set()
    with pytest.raises(StopAsyncIteration):
        await caller.notice()
    await shard.local.until_idle()
    with pytest.raises(UnknownSession):
        await caller.match([key(1)])


async def test_a_second_stream_replaces_the_first(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve([key(1)])
    ending = asyncio.Event()
    second = caller.door.talk("Session", pulses(caller.session, ending))
    assert (await asyncio.wait_for(anext(second), HANG_S)).WhichOneof("notice") == "opened"
    with pytest.raises(StopAsyncIteration):
        await caller.notice()
    await caller.close()
    assert await caller.fill(reserved.lease, V[:1]) == [COMMITTED], "the session lives on in the second stream"
    await caller.lease([key(1)], lease_ms=100)
    assert (await asyncio.wait_for(anext(second), HANG_S)).WhichOneof("notice") == "leases_ended"
    ending.set()
    await second.aclose()
    await until(lambda: shard.local.gauge("sessions") == 1, "the session outlived its last stream")


async def test_a_stream_names_a_session_that_exists(shard: Shard) -> None:
    for messages in ([], [pb.SessionPulse(session=bytes(16))]):
        with pytest.raises(UnknownSession):
            await asyncio.wait_for(anext(shard.door().talk("Session", as_stream(messages))), HANG_S)


async def test_a_waiting_acquire_ends_with_its_session(shard: Shard) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    await writer.reserve([key(0)])
    waiting = asyncio.ensure_future(reader.acquire([key(0)], wait_ms=5000))
    await until(lambda: shard.local.gauge("waiting_acquires") == 1, "nobody waits")
    await reader.close()
    with pytest.raises(UnknownSession):
        await asyncio.wait_for(waiting, HANG_S)


async def test_a_purge_is_told_to_those_who_attached_the_namespace(shard: Shard) -> None:
    caller, other = await shard.caller(), await shard.caller(kv_spec("b"))
    await caller.door.call("Purge", admin.PurgeRequest(digest=caller.attached.digest))
    notice = await caller.notice()
    assert notice.purged.namespace == caller.namespace
    await other.put([key(0)], V[:1])
    lease = await other.lease([key(0)], lease_ms=100)
    assert list((await other.notice()).leases_ended.ids) == [lease.id], "the other heard nothing of the purge"


async def test_limits_of_leases_and_waits(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    lease = await caller.lease([key(0)], lease_ms=20_000)
    assert 19_000 < lease.ttl_ms <= 20_000
    assert 9_000 < (await caller.lease([key(0)])).ttl_ms <= 10_000, "0 asks for the default"
    for call in (
        caller.acquire([key(0)], lease_ms=20_001),
        caller.reserve([key(1)], lease_ms=20_001),
        caller.renew(lease, lease_ms=20_001),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert (caught.value.field, caught.value.limit) == ("lease_ms", "20000")
    await caller.acquire([key(0)], wait_ms=5000)
    for wait in (caller.acquire([key(0)], wait_ms=5001), caller.get([key(0)], wait_ms=5001)):
        with pytest.raises(InvalidArgument) as caught:
            await wait
        assert (caught.value.field, caught.value.limit) == ("wait_ms", "5000")


async def test_leases_a_call_at_and_above_the_limit(shard: Shard) -> None:
    caller = await shard.caller()
    lease = types.Lease(id=1 << 60, generation=caller.attached.generation)
    many = [lease] * MAX_LEASES_PER_CALL
    assert await caller.release(*many) == [False] * len(many)
    assert await caller.abort(*many) == [False] * len(many)
    assert await caller.renew(*many) == [False] * len(many)
    for call in (caller.release(*many, lease), caller.abort(*many, lease), caller.renew(*many, lease)):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert (caught.value.field, caught.value.limit) == ("leases", "1024")


async def test_a_get_whose_lease_ends_under_it_is_told_to_drop_what_came(open_shard: OpenShard) -> None:
    shard = await open_shard()
    caller = await shard.caller(kv_spec("big", part_bytes=256 << 10))
    await caller.put([key(0)], [value(0, 256 << 10)])
    lease = await caller.lease([key(0)])
    shard.local.failpoints.arm("get.chunk", "delay:50ms")
    reading = asyncio.ensure_future(caller.get(lease=lease))
    await asyncio.sleep(0.02)
    assert await caller.release(lease) == [True]
    with pytest.raises(LeaseExpired):
        await asyncio.wait_for(reading, HANG_S)


async def test_keys_at_and_outside_their_limits(shard: Shard) -> None:
    caller = await shard.caller()
    for size in (16, 64):
        assert await caller.match([bytes(size)] * 16) == [MISSING] * 16
        assert await caller.put([bytes(size)], V[:1]) == [COMMITTED]
    for chain, field, limit in (
        ([bytes(15)], "chain.keys", "16-64 bytes"),
        ([bytes(65)], "chain.keys", "16-64 bytes"),
        ([b""], "chain.keys", "16-64 bytes"),
        ([bytes(32), bytes(33)], "chain.keys", "one length"),
    ):
        for call in (caller.match(chain), caller.get(chain), caller.reserve(chain), _explain(caller, chain)):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert (caught.value.field, caught.value.limit) == (field, limit)
        with pytest.raises(InvalidArgument) as caught:
            await caller.delete(chain)
        assert caught.value.field == "keys"
    request = caller.match_request([key(0)])
    request.chain.parent = bytes(15)
    with pytest.raises(InvalidArgument) as caught:
        await caller.door.call("Match", request)
    assert caught.value.field == "chain.parent"


async def test_keys_a_call_at_and_above_the_limits(shard: Shard) -> None:
    caller = await shard.caller()
    assert len(await caller.match(keys(0, 16))) == 16
    assert len(await caller.delete(keys(0, 16))) == 16
    for call in (caller.match(keys(0, 17)), _explain(caller, keys(0, 17)), caller.delete(keys(0, 17))):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert caught.value.limit == "16"
    assert await caller.put(keys(0, 8), V) == [COMMITTED] * 8
    assert (await caller.get(keys(0, 8))).parts == V
    for too_many in (
        caller.acquire(keys(0, 9)),
        caller.get(keys(0, 9)),
        caller.reserve(keys(0, 9)),
        caller.put(keys(0, 9), [*V, V[0]]),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await too_many
        assert (caught.value.field, caught.value.limit) == ("chain.keys", "8")


async def _explain(caller: Caller, chain: list[bytes]) -> None:
    request = pb.ExplainRequest(session=caller.session, namespace=caller.namespace, chain=types.Chain(keys=chain))
    await caller.door.call("Explain", request)
