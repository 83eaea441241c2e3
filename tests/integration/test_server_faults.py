"""Failures, cancels and deadlines in the middle of calls: everything that was taken comes back, exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import grpc
import pytest

from kvstore_wire.errors import Internal
from kvstore_wire.v1 import block_store_pb2 as pb
from tests.contract.caller import COMMITTED, HOT, PRESENT, WRITING, Caller, put_messages, value
from tests.contract.doors import GrpcDoor
from tests.integration.server_process import LocalServer, serve_here, serving, until
from tests.shards import key, keys, kv_spec

pytestmark = pytest.mark.integration

PART_BYTES = 64 << 10
SPEC = kv_spec("a", part_bytes=PART_BYTES)
FLAGS = {"hot.capacity": "16MiB", "limits.chunk": "64KiB", "server.send_budget": "4MiB"}
VALUES = [value(i, PART_BYTES) for i in range(8)]


@asynccontextmanager
async def started(flags: dict[str, str] | None = None) -> AsyncIterator[tuple[LocalServer, Caller, GrpcDoor]]:
    async with serve_here({**FLAGS, **(flags or {})}) as local:
        door = GrpcDoor(local.target, local.admin_target)
        caller = await Caller.open(door, SPEC)
        yield local, caller, door
        await caller.close()
        await door.close()


async def fails(call: Awaitable[object]) -> None:
    with pytest.raises(Internal, match="failpoint"):
        await call


@pytest.mark.parametrize("point", ["before.Get", "get.chunk"])
async def test_a_get_that_fails_at_any_step_gives_everything_back(point: str) -> None:
    async with started() as (local, caller, _):
        await caller.put(keys(0, 8), VALUES)
        free = local.gauge("free_bytes")
        for i in range(100):
            local.failpoints.arm(point, "fail")
            await fails(caller.get(keys(0, 8)))
            local.failpoints.disarm(point)
            if i % 10 == 0:
                lease = await caller.lease(keys(0, 8))
                local.failpoints.arm(point, "fail*1")
                await fails(caller.get(lease=lease))
                assert await caller.release(lease) == [True], "a failed Get by lease leaves the lease to its holder"
        await local.until_idle()
        assert local.gauge("free_bytes") == free
        assert (await caller.get(keys(0, 8))).parts == VALUES


@pytest.mark.parametrize("point", ["before.Put", "put.chunk", "put.commit"])
async def test_a_put_that_fails_at_any_step_gives_everything_back(point: str) -> None:
    async with started() as (local, caller, _):
        free = local.gauge("free_bytes")
        for _ in range(100):
            local.failpoints.arm(point, "fail")
            await fails(caller.put(keys(0, 8), VALUES))
        local.failpoints.disarm(point)
        await local.until_idle()
        assert local.gauge("free_bytes") == free
        assert local.gauge("stored_blocks") == 0
        assert await caller.put(keys(0, 8), VALUES) == [COMMITTED] * 8
        assert (await caller.get(keys(0, 8))).parts == VALUES


async def test_a_put_by_lease_that_fails_leaves_the_lease_to_its_holder() -> None:
    async with started() as (local, caller, _):
        reserved = await caller.reserve(keys(0, 8))
        for point in ("before.Put", "put.chunk", "put.commit"):
            local.failpoints.arm(point, "fail*1")
            await fails(caller.fill(reserved.lease, VALUES))
        assert await caller.fill(reserved.lease, VALUES) == [COMMITTED] * 8
        assert (await caller.get(keys(0, 8))).parts == VALUES
        await local.until_idle()


async def test_calls_cancelled_at_random_moments_leave_nothing_behind() -> None:
    random_source = random.Random(11)
    async with started() as (local, caller, door):
        await caller.put(keys(0, 8), VALUES)
        writer = await Caller.open(GrpcDoor(local.target, local.admin_target), SPEC)
        held = await writer.reserve([key(50)])
        makers = (
            lambda i: door.method("Get")(caller.get_request(keys(0, 8) * 4)),
            lambda i: door.method("Acquire")(caller.acquire_request([key(0), key(50)], wait_ms=5000)),
            lambda i: door.method("Get")(caller.get_request([key(0), key(50)], wait_ms=5000)),
            lambda i: door.method("Put")(put_messages(caller.put_header(keys(100 + 8 * i, 108 + 8 * i)), VALUES)),
        )
        for i in range(400):
            call = makers[i % 4](i)
            await asyncio.sleep(random_source.choice((0, 0, 0.001, 0.002, 0.004)))
            if random_source.random() < 0.3 and i % 4 != 3:
                with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError, grpc.aio.AioRpcError):
                    await asyncio.wait_for(call.read(), 0.01)
            call.cancel()
        await writer.abort(held.lease)
        await settled(local, caller)
        assert await caller.match(keys(0, 8)) == [HOT] * 8
        assert (await caller.get(keys(0, 8))).parts == VALUES
        await writer.close()
        await writer.door.close()


async def test_calls_over_deadline_stop_and_release_what_they_held() -> None:
    async with started({"limits.max_wait": "10s"}) as (local, caller, door):
        await caller.put(keys(0, 8), VALUES)
        local.failpoints.arm("get.chunk", "delay:500ms")
        tasks_before = len(asyncio.all_tasks())
        most = 0
        late = 0
        for _ in range(10):
            request = caller.get_request(keys(0, 8))
            calls = [asyncio.ensure_future(read_all(door.method("Get")(request, timeout=0.05))) for _ in range(100)]
            outcomes = await asyncio.gather(*calls)
            late += sum(code is grpc.StatusCode.DEADLINE_EXCEEDED for code in outcomes)
            most = max(most, local.gauge("leases"))
        assert late == 1000
        assert most <= 200, "no call outlives its deadline by a round"
        local.failpoints.disarm("get.chunk")
        await settled(local, caller)
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before + 2, "tasks of late calls are left")
        assert (await caller.get(keys(0, 8))).parts == VALUES


async def test_clients_that_vanish_after_leasing_release_everything() -> None:
    async with started({"hot.policy": "lru"}) as (local, caller, _):  # However often they were asked for.
        await caller.put(keys(0, 8), VALUES)
        doors = [GrpcDoor(local.target, local.admin_target) for _ in range(10)]
        ghosts = [await Caller.open(door, SPEC) for door in doors]
        for ghost in ghosts:
            await asyncio.gather(*(ghost.lease(keys(0, 8), lease_ms=60_000) for _ in range(100)))
        assert local.gauge("leases") == 1000
        assert local.gauge("leased_bytes") == 8 * PART_BYTES
        for door in doors:
            await door.close()
        await local.until_idle()
        assert local.gauge("leased_bytes") == 0
        for at in range(100, 100 + 32 * 8, 8):  # As much as the arena holds.
            assert await caller.put(keys(at, at + 8), VALUES) == [COMMITTED] * 8
        assert await caller.match(keys(0, 8)) != [HOT] * 8, "what nobody holds may be evicted"


async def test_a_put_that_is_cut_off_frees_its_keys_for_others() -> None:
    async with started() as (local, caller, door):
        call = door.method("Put")()
        await call.write(pb.PutRequest(header=caller.put_header(keys(0, 8))))
        await call.write(pb.PutRequest(data=VALUES[0]))
        await until(lambda: local.gauge("reserved_bytes") == 8 * PART_BYTES, "nothing was reserved")
        assert await caller.put(keys(0, 8), VALUES) == [WRITING] * 8
        call.cancel()
        await local.until_idle()
        assert await caller.put(keys(0, 8), VALUES) == [COMMITTED] * 8
        assert await caller.put(keys(0, 8), VALUES) == [PRESENT] * 8


async def test_callers_that_go_away_leave_no_traceback_in_the_log() -> None:
    with serving({"hot.capacity": "16MiB"}) as process:
        door = GrpcDoor(process.target, process.admin_target)
        caller = await Caller.open(door, SPEC)
        await caller.put(keys(0, 8), VALUES)
        for i in range(60):
            get = door.method("Get")(caller.get_request(keys(0, 8) * 8))
            match = door.method("Match")(caller.match_request(keys(0, 8) * 100))
            put = door.method("Put")(put_messages(caller.put_header(keys(100, 108)), VALUES))
            if i % 2:
                await get.read()
                await asyncio.sleep(0.003)
            for call in (get, match, put):
                call.cancel()
        assert (await caller.get(keys(0, 8))).parts == VALUES
        await caller.close()
        await door.close()
        process.terminate()
        assert await asyncio.to_thread(process.process.wait, 15) == 0
        assert "Traceback" not in process.stderr_text(), process.stderr_text()


async def read_all(call: object) -> grpc.StatusCode | None:
    """Reads a stream to its end; the code it ended with, None for OK."""
    try:
        async for _ in call:  # type: ignore[attr-defined]
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def settled(local: LocalServer, caller: Caller) -> None:
    """Nothing is held any more and the account is whole."""
    await local.until_idle()
    assert await caller.gauge("reserved_bytes") == await caller.gauge("leased_bytes") == 0
