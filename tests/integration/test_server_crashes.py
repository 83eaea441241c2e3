"""Processes that die, freeze or are told to go: clients beside a living server, and the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvstore_wire.errors import Draining, KvStoreError, LeaseExpired, UnknownSession
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import COMMITTED, HOT, IN_FLIGHT, MISSING, Caller, Got, value
from tests.contract.doors import GrpcDoor
from tests.integration.server_child import PART_BYTES, SPEC
from tests.integration.server_process import ChildClient, LocalServer, ServerProcess, serve_here, serving, until
from tests.shards import key, keys

pytestmark = pytest.mark.integration


@asynccontextmanager
async def calling(target: str, admin_target: str) -> AsyncIterator[Caller]:
    door = GrpcDoor(target, admin_target)
    caller = await Caller.open(door, SPEC)
    try:
        yield caller
    finally:
        await caller.close()
        await door.close()


@asynccontextmanager
async def local_caller(flags: Mapping[str, str] | None = None) -> AsyncIterator[tuple[LocalServer, Caller]]:
    async with serve_here(flags) as local, calling(local.target, local.admin_target) as caller:
        yield local, caller


async def test_a_writer_killed_in_the_middle_leaves_a_miss_and_no_bytes() -> None:
    async with local_caller() as (local, caller):
        child = ChildClient(local.target, "half_put")
        try:
            assert await child.line() == "half"
            await until(lambda: local.gauge("reserved_bytes") == 4 * PART_BYTES, "nothing was reserved")
            assert await caller.get(keys(0, 4)) == Got([IN_FLIGHT] * 4, [], [])
            child.signal(signal.SIGKILL)
            assert (await caller.get(keys(0, 4))).parts == []
            await until(lambda: not local.gauge("reserved_bytes"), "reserved bytes did not come back")
        finally:
            child.close()
        assert await caller.match(keys(0, 4)) == [MISSING] * 4
        values = [value(i, PART_BYTES) for i in range(4)]
        assert await caller.put(keys(0, 4), values) == [COMMITTED] * 4
        assert (await caller.get(keys(0, 4))).parts == values


async def test_holds_of_a_killed_client_go_at_once() -> None:
    async with local_caller() as (local, caller):
        await caller.put([key(0)], [value(0, PART_BYTES)])
        child = ChildClient(local.target, "hold")
        try:
            assert await child.line() == "holding"
            assert (local.gauge("leases"), local.gauge("leased_bytes")) == (2, PART_BYTES)
            child.signal(signal.SIGKILL)
            await local.until_idle()
        finally:
            child.close()
        assert local.gauge("leased_bytes") == local.gauge("reserved_bytes") == 0
        assert await caller.match(keys(0, 2)) == [HOT, MISSING]


async def test_a_writer_that_wakes_up_late_cannot_touch_what_is_there_now() -> None:
    """Its slot was given to another key meanwhile; neither its commit nor its bytes may land there."""
    async with local_caller() as (local, caller):
        child = ChildClient(local.target, "late_commit")
        try:
            offset = int((await child.line()).split()[1])
            child.signal(signal.SIGSTOP)
            await until(lambda: not local.gauge("leases"), "the frozen writer's lease did not end")
            answer = await caller.reserve([key(1)])
            assert answer.offsets[0] == offset, "the slot is in use again"
            assert await caller.fill(answer.lease, [value("b", PART_BYTES)]) == [COMMITTED]
            child.signal(signal.SIGCONT)
            child.tell("go")
            assert await child.line() == "REASON_LEASE_EXPIRED"
            assert await child.line() == "REASON_LEASE_EXPIRED"
        finally:
            child.close()
        assert (await caller.get([key(1)])).parts == [value("b", PART_BYTES)]
        assert await caller.match([key(0)]) == [MISSING]
        await local.until_idle()


async def test_a_server_killed_and_started_again_refuses_what_belongs_to_its_former_life() -> None:
    with serving() as first:
        async with calling(first.target, first.admin_target) as caller:
            await caller.put([key(0)], [value(0, PART_BYTES)])
            read = await caller.lease([key(0)])
            written = (await caller.reserve([key(1)])).lease
            first.kill()
            with pytest.raises((StopAsyncIteration, grpc.aio.AioRpcError)):
                await caller.notice()
        with serving(target=first.target) as second:
            async with calling(second.target, second.admin_target) as again:
                assert again.attached.generation != caller.attached.generation
                with pytest.raises(UnknownSession) as unknown:
                    await again.door.call("Match", pb.MatchRequest(session=caller.session, namespace=1))
                assert unknown.value.retryable
                assert "earlier life" in str(unknown.value)
                assert await again.renew(read, written) == [False, False]
                assert await again.release(read) == [False]
                with pytest.raises(LeaseExpired) as expired:
                    await again.commit(written, [0])
                assert f"generation {written.generation}" in str(expired.value)
                with pytest.raises(LeaseExpired):
                    await again.get(lease=read)
                assert await again.match(keys(0, 2)) == [MISSING] * 2
                assert await again.put([key(0)], [value(0, PART_BYTES)]) == [COMMITTED]


async def test_a_server_told_to_go_waits_for_leases_and_leaves_cleanly() -> None:
    with serving({"server.drain_timeout": "10s"}) as process:
        async with calling(process.target, process.admin_target) as caller:
            await caller.put([key(0)], [value(0, PART_BYTES)])
            read = await caller.lease([key(0)])
            written = (await caller.reserve([key(1)])).lease
            load = [asyncio.ensure_future(put_and_get(process, worker)) for worker in range(4)]
            await asyncio.sleep(0.2)
            process.terminate()
            assert (await caller.notice()).draining.within_ms == 10_000
            with pytest.raises(Draining):
                await caller.acquire([key(0)])
            assert (await caller.get(lease=read)).parts == [value(0, PART_BYTES)]
            assert await caller.fill(written, [value(1, PART_BYTES)]) == [COMMITTED]
            assert process.process.poll() is None, "it did not wait for the lease"
            assert await caller.release(read) == [True]
            assert await asyncio.to_thread(process.process.wait, 10) == 0
            await asyncio.gather(*load)
        assert "Traceback" not in process.stderr_text(), process.stderr_text()
        assert process.stdout_text().endswith("stopped\n")


async def test_a_server_told_to_go_does_not_wait_for_ever() -> None:
    with serving({"server.drain_timeout": "300ms"}) as process:
        async with calling(process.target, process.admin_target) as caller:
            await caller.put([key(0)], [value(0, PART_BYTES)])
            await caller.lease([key(0)])
            call = caller.door.stream("Acquire", caller.acquire_request([key(0)]))
            await anext(call)
            process.terminate()
            started = time.monotonic()
            assert await asyncio.to_thread(process.process.wait, 10) == 0
            assert time.monotonic() - started < 5, "far beyond its drain timeout"
            await call.aclose()
        assert "Traceback" not in process.stderr_text(), process.stderr_text()


async def test_a_stalled_reader_does_not_keep_a_server_from_leaving() -> None:
    flags = {"server.drain_timeout": "300ms", "hot.capacity": "64MiB"}
    with serving(flags) as process:
        async with calling(process.target, process.admin_target) as caller:
            chain = keys(0, 64)
            for at in range(0, 64, 16):
                await caller.put(chain[at : at + 16], [value(i, PART_BYTES) for i in range(at, at + 16)])
            stalled = caller.door.stream("Get", caller.get_request(chain * 8))
            await anext(stalled)
            process.terminate()
            assert await asyncio.to_thread(process.process.wait, 10) == 0
            with contextlib.suppress(grpc.aio.AioRpcError, KvStoreError):
                await stalled.aclose()
        assert "Traceback" not in process.stderr_text(), process.stderr_text()


async def put_and_get(process: ServerProcess, worker: int) -> None:
    """A client under way when the server goes: each answer is a value or a clear end."""
    with contextlib.suppress(grpc.aio.AioRpcError, Draining, UnknownSession, StopAsyncIteration):
        async with calling(process.target, process.admin_target) as caller:
            for i in range(10_000):
                block = key(1000 * (worker + 1) + i % 8)
                data = value((worker, i % 8), PART_BYTES)
                states = await caller.put([block], [data])
                if states == [types.PART_STATE_DRAINING]:
                    return
                got = await caller.get([block])
                assert got.parts in ([data], [])


def assert_cannot_listen(second: ServerProcess, address: str) -> None:
    try:
        assert second.process.wait(20) == 1
        assert f"kvstore serve: cannot listen on {address}" in second.stderr_text()
        assert "Traceback" not in second.stderr_text()
        assert "listening on" not in second.stdout_text()
    finally:
        second.close()


def test_a_second_server_on_the_same_port_says_so_and_ends() -> None:
    with serving() as first:
        assert_cannot_listen(ServerProcess(target=first.target), first.target)
        assert_cannot_listen(ServerProcess({"server.admin_listen": first.admin_target}), first.admin_target)


def test_a_unix_socket_is_taken_over_from_the_dead_and_not_from_the_living(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with serving(target=address) as first:
        first.kill()
        assert (tmp_path / "s").is_socket()
    with serving(target=address):
        assert_cannot_listen(ServerProcess(target=address), address)
        assert (tmp_path / "s").is_socket()


def test_a_wrong_configuration_ends_at_once_with_every_fault() -> None:
    process = ServerProcess({"hot.capacity": "12 parsecs", "lease.max": "1ms"})
    try:
        assert process.process.wait(20) == 2
        said = process.stderr_text()
        assert "hot.capacity" in said
        assert "lease.max" in said
        assert "Traceback" not in said
    finally:
        process.close()
