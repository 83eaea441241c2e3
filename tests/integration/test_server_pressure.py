"""A server under pressure: full arenas, many writers, slow readers, large parts, purges under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_wire.errors import LeaseExpired
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import (
    COMMITTED,
    EACH,
    FULL,
    HOT,
    MISSING,
    TOO_LARGE,
    Caller,
    attach_request,
    checksum,
    put_messages,
    value,
)
from tests.contract.doors import GrpcDoor, error_of
from tests.integration.server_process import LocalServer, serve_here, serving, until
from tests.shards import key, keys, kv_spec, opaque_spec

pytestmark = pytest.mark.integration

KIB, MIB = 1 << 10, 1 << 20


@asynccontextmanager
async def started(
    flags: Mapping[str, str], *specs: NamespaceSpec
) -> AsyncIterator[tuple[LocalServer, Sequence[Caller]]]:
    """A server and one caller a namespace, each on a connection of its own."""
    async with serve_here(flags) as local:
        callers = [await Caller.open(GrpcDoor(local.target, local.admin_target), spec) for spec in specs]
        yield local, callers
        for caller in callers:
            await caller.close()
            await caller.door.close()


async def is_serving(target: str, *, within_s: float = 1.0) -> bool:
    async with grpc.aio.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(service="kvstore.v1.BlockStore"), timeout=within_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_where_everything_is_held_a_put_is_refused_at_once_and_health_answers() -> None:
    flags = {"hot.capacity": "4MiB", "hot.max_leased_share": "1.0"}
    async with started(flags, kv_spec("a", part_bytes=64 * KIB)) as (local, (caller,)):
        for i in range(64):
            assert await caller.put([key(i)], [value(i, 64 * KIB)]) == [COMMITTED]
        leases = [await caller.lease(keys(at, at + 16)) for at in range(0, 64, 16)]
        assert local.gauge("evictable_bytes") == 0
        for i in range(20):
            header = caller.put_header([key(100 + i)])
            messages = put_messages(header, [value(i, 64 * KIB)])
            answer = await grpc_of(caller).method("Put")(messages, timeout=1.0)
            assert list(answer.states) == [FULL]
            assert answer.retry_after_ms > 0
            assert await is_serving(local.target)
        assert await caller.release(*leases) == [True] * 4
        assert await caller.put([key(100)], [value(100, 64 * KIB)]) == [COMMITTED]


async def test_many_writers_on_a_small_arena_all_get_through() -> None:
    """64 writers, each holding a lease on what it wrote last, write eight times what the arena holds."""
    writers, rounds = 64, 8
    spec = kv_spec("a", part_bytes=32 * KIB)
    async with started({"hot.capacity": "2MiB"}, spec) as (local, (caller,)):
        refusals: list[int] = []

        async def write(writer: int) -> None:
            lease: types.Lease | None = None
            for i in range(rounds):
                block, data = key(1000 * writer + i), value((writer, i), 32 * KIB)
                for _ in range(500):
                    header = caller.put_header([block])
                    answer = await caller.door.send("Put", put_messages(header, [data]))
                    if list(answer.states) == [COMMITTED]:
                        break
                    assert list(answer.states) == [FULL]
                    assert answer.retry_after_ms > 0, "a refusal says when to come back"
                    refusals.append(writer)
                    if lease is not None:
                        await caller.release(lease)
                        lease = None
                    await asyncio.sleep(answer.retry_after_ms / 1000)
                else:
                    raise AssertionError("refused for ever")
                if lease is not None:
                    await caller.release(lease)
                (held,) = await caller.acquire([block], lease_ms=2000)
                lease = held.lease if held.HasField("lease") else None
            if lease is not None:
                await caller.release(lease)

        await asyncio.wait_for(asyncio.gather(*(write(w) for w in range(writers))), 60)
        counters = await caller.counters()
        assert counters["committed_parts"] == writers * rounds
        assert counters["reserve_full_parts"] == len(refusals) > 0, "the arena was never full: the test shows nothing"
        assert counters["evicted_capacity_blocks"] >= writers * rounds - 64
        await local.until_idle()
        assert local.gauge("reserved_bytes") == local.gauge("leased_bytes") == 0


async def test_slow_readers_cost_a_bounded_window_and_no_stored_block() -> None:
    """32 readers ask for 256 MiB each, 8 GiB in all, and do not read."""
    flags = {"hot.capacity": "64MiB", "server.send_budget": "64MiB", "lease.default": "4s"}
    with serving(flags) as process:
        door = GrpcDoor(process.target, process.admin_target)
        caller = await Caller.open(door, kv_spec("a", part_bytes=MIB))
        for at in range(0, 32, 8):
            assert await caller.put(keys(at, at + 8), [value(i, MIB) for i in range(at, at + 8)]) == [COMMITTED] * 8
        before = process.rss_anon_bytes()
        calls = []
        for _ in range(32):
            call = door.method("Get")(caller.get_request(keys(0, 32) * 8))
            await call.read()
            calls.append(call)
        peak = before
        for _ in range(10):
            await asyncio.sleep(0.05)
            peak = max(peak, process.rss_anon_bytes())
        assert peak - before < 128 * MIB, f"{(peak - before) >> 20} MiB for readers that do not read"
        assert await caller.match(keys(0, 32)) == [HOT] * 32
        assert await caller.gauge("leased_bytes") == 32 * MIB
        await until_gauge(caller, "leased_bytes", 0)
        ends = await asyncio.gather(*(end_of(call) for call in calls))
        # gRPC in the reader's process may have taken all of a stream ahead of it: then there is nothing to drop.
        assert {type(end) for end in ends} <= {LeaseExpired, int}, "each is told to drop what came"
        assert LeaseExpired in {type(end) for end in ends}
        # The first one asks for what nobody holds yet: it is granted 0.8 of the memory, and no more.
        wholes = [51 * MIB, *[256 * MIB] * 31]
        is_whole = [not isinstance(end, int) or end >= whole for end, whole in zip(ends, wholes, strict=True)]
        assert all(is_whole), "a stream cut short ended well"
        assert (await caller.get(keys(0, 4))).parts == [value(i, MIB) for i in range(4)]
        assert await caller.match(keys(0, 32)) == [HOT] * 32
        await caller.close()
        await door.close()


async def test_stalled_readers_do_not_keep_others_from_reading() -> None:
    """All that may be on its way at once belongs to readers that do not read: until their leases end."""
    flags = {"hot.capacity": "64MiB", "server.send_budget": "4MiB", "lease.default": "1s"}
    async with started(flags, *[kv_spec("a", part_bytes=MIB)] * 2) as (local, (stalled, other)):
        for at in range(0, 16, 8):
            await stalled.put(keys(at, at + 8), [value(i, MIB) for i in range(at, at + 8)])
        calls = []
        for _ in range(2):
            call = grpc_of(stalled).method("Get")(stalled.get_request(keys(0, 16) * 16))
            await call.read()
            calls.append(call)
        assert (await asyncio.wait_for(other.get([key(3)]), 10)).parts == [value(3, MIB)]
        for call in calls:
            assert isinstance(await end_of(call), LeaseExpired)
        await local.until_idle()


async def test_gets_that_wait_for_a_writer_do_not_keep_others_from_reading() -> None:
    """They send nothing while they wait, so that the budget for what is on its way is not theirs."""
    flags = {"server.send_budget": "4MiB"}  # Two streams.
    async with started(flags, *[kv_spec("a")] * 2) as (local, (waiter, other)):
        await other.put([key(9)], [value(9, 4096)])
        reserved = await other.reserve(keys(0, 4))
        waits = [asyncio.ensure_future(waiter.get([key(i)], wait_ms=20_000)) for i in range(4)]
        await until(lambda: local.gauge("waiting_acquires") == 4, "not all of them wait")
        assert (await asyncio.wait_for(other.get([key(9)]), 10)).parts == [value(9, 4096)]
        assert await is_serving(local.target)
        await other.fill(reserved.lease, [value(i, 4096) for i in range(4)])
        answers = await asyncio.wait_for(asyncio.gather(*waits), 10)
        assert [a.parts for a in answers] == [[value(i, 4096)] for i in range(4)]
        await local.until_idle()


async def test_gets_are_cut_into_chunks_and_small_calls_pass_between_them() -> None:
    flags = {"hot.capacity": "128MiB", "limits.chunk": "256KiB"}
    async with started(flags, *[kv_spec("a", part_bytes=16 * MIB)] * 2) as (local, (caller, other)):
        assert await caller.put([key(0), key(1)], [value(i, 16 * MIB) for i in range(2)]) == [COMMITTED] * 2
        # Each chunk takes a moment: what is asked meanwhile must not wait for the rest of the stream.
        local.failpoints.arm("get.chunk", "delay:5ms")
        call = grpc_of(caller).method("Get")(caller.get_request([key(0), key(1)]))
        sizes, passed = [], 0
        await call.read()
        while (message := await call.read()) is not grpc.aio.EOF:
            sizes.append(len(message.data))
            if len(sizes) % 16 == 0:
                assert await is_serving(local.target)
                assert await other.match([key(0)]) == [HOT]
                passed += 1
        assert sum(sizes) == 32 * MIB
        assert max(sizes) == 256 * KIB
        assert passed == 8


@pytest.mark.parametrize("size_bytes", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 16 * MIB, 64 * MIB])
async def test_parts_of_every_size_work_both_ways_with_default_settings(size_bytes: int) -> None:
    """A channel with the library's own limits: 4 MiB a message."""
    async with serve_here({"hot.capacity": "1GiB"}) as local:
        door = GrpcDoor(local.target, local.admin_target)
        plain = grpc.aio.insecure_channel(local.target)
        data = value("seed", 4096) * (size_bytes // 4096 + 1)
        data = data[:size_bytes]
        for spec, lengths in ((kv_spec("kv", part_bytes=size_bytes), []), (opaque_spec("v", part_bytes=64 * MIB), [1])):
            caller = await Caller.open(door, spec)
            header = caller.put_header([key(0)], lengths=[size_bytes] * len(lengths))
            put = plain.stream_unary("/kvstore.v1.BlockStore/Put", response_deserializer=pb.PutResponse.FromString)
            raw = (m.SerializeToString() async for m in put_messages(header, [data], piece_bytes=MIB))
            assert list((await put(raw)).states) == [COMMITTED]
            get = plain.unary_stream("/kvstore.v1.BlockStore/Get", response_deserializer=pb.GetResponse.FromString)
            answers = [a async for a in get(caller.get_request([key(0)]).SerializeToString())]
            assert list(answers[0].header.lengths) == [size_bytes]
            assert b"".join(a.data for a in answers[1:]) == data
            await caller.close()
        await plain.close()
        await door.close()


async def test_parts_above_the_stated_maximum_are_refused_by_name() -> None:
    async with started({"hot.capacity": "1GiB"}, opaque_spec("v", part_bytes=64 * MIB)) as (_, (caller,)):
        limits = caller.attached.limits
        assert limits.max_part_bytes == 64 * MIB
        assert list((await caller.reserve([key(0)], lengths=[64 * MIB + 1])).states) == [TOO_LARGE]
        call = grpc_of(caller).method("Attach")(attach_request(kv_spec("kv", part_bytes=64 * MIB + 1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert error_of(caught.value).limit == f"{64 * MIB} bytes"
        piece = pb.PutRequest(data=bytes(limits.max_message_bytes + 1))
        put = grpc_of(caller).method("Put")()
        await put.write(pb.PutRequest(header=caller.put_header([key(0)], lengths=[64 * MIB])))
        await put.write(piece)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(limits.max_message_bytes) in str(caught.value.details())
        assert await caller.match([key(0)]) == [MISSING]


async def test_one_of_three_namespaces_is_purged_under_load_and_stays_gone() -> None:
    specs = [kv_spec(f"model{i}", part_bytes=16 * KIB) for i in range(3)]
    async with started({"hot.capacity": "16MiB"}, *specs) as (local, callers):
        for caller in callers:
            for at in range(0, 64, 16):
                await caller.put(keys(at, at + 16), [value(i, 16 * KIB) for i in range(at, at + 16)])
        stop = asyncio.Event()

        async def read(caller: Caller) -> int:
            reads = 0
            while not stop.is_set():
                got = await caller.get(keys(0, 64), coverage=EACH)
                hits = [i for i, state in enumerate(got.states) if state == HOT]
                assert got.parts == [value(i, 16 * KIB) for i in hits]
                reads += 1
            return reads

        readers = [asyncio.ensure_future(read(caller)) for caller in callers for _ in range(2)]
        await asyncio.sleep(0.1)
        target = callers[1]
        answer = await target.door.call("Purge", admin.PurgeRequest(digest=target.attached.digest))
        assert answer.blocks == 64
        assert await target.match(keys(0, 64)) == [MISSING] * 64, "gone for everybody who asks from now on"
        await asyncio.sleep(0.1)
        stop.set()
        assert min(await asyncio.gather(*readers)) > 0
        assert await target.match(keys(0, 64)) == [MISSING] * 64
        for caller in (callers[0], callers[2]):
            assert await caller.match(keys(0, 64)) == [HOT] * 64
        await local.until_idle()
        assert local.used_bytes() == 2 * 64 * 16 * KIB


async def test_committed_is_visible_at_once_over_another_connection() -> None:
    async with started({}, *[kv_spec("a")] * 2) as (_, (prefill, decode)):
        for i in range(300):
            chain = keys(4 * i, 4 * i + 4)
            assert await prefill.put(chain, [value((i, j), 4096) for j in range(4)]) == [COMMITTED] * 4
            assert await decode.match(chain) == [HOT] * 4
            if i % 50 == 0:
                assert (await decode.get(chain)).parts == [value((i, j), 4096) for j in range(4)]


async def test_bytes_stay_bytes(tmp_path: Path) -> None:
    """A pickle that would make a file when it is loaded, as value, as key and as metadata."""
    trap = tmp_path / "trap"
    evil = b"cposix\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR."
    spec = opaque_spec("v")
    async with started({}, spec) as (_, (caller,)):
        block = evil[:32].ljust(32, b".")
        assert await caller.put([block], [evil], opaque=True) == [COMMITTED]
        got = await caller.get([block])
        assert (got.parts, got.checksums) == ([evil], [checksum(evil)])
        request = attach_request(opaque_spec("w"), digest=b"")
        request.namespace.facts.add(name="pickle", value=evil.decode("latin-1"))
        request.client = evil.decode("latin-1")
        await caller.door.call("Attach", request)
        match = grpc_of(caller).method("Match")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await match(caller.match_request([block]), metadata=(("evil-bin", evil),))
    assert not trap.exists()


def grpc_of(caller: Caller) -> GrpcDoor:
    """The caller's connection itself."""
    assert isinstance(caller.door, GrpcDoor)
    return caller.door


async def end_of(call: Any) -> object:
    """Reads a stream to its end; the error it ended with, the bytes of payload that came if with none."""
    came = 0
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            came += len(message.data)
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    return came


async def until_gauge(caller: Caller, name: str, wanted: int) -> None:
    """Polls a gauge of a server in another process."""

    async def poll() -> None:
        while await caller.gauge(name) != wanted:
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), 15)
