"""What a server shows of itself: health by doing, reflection, exact counters, ports, and what its source never does."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.config import effective, load_config
from kvstore.service.admin import AdminHandlers
from kvstore.service.probe import PROBE_TENANT
from kvstore.service.shell import Call
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.methods import ADMIN, ADMIN_METHODS, BLOCK_STORE, STORE_METHODS
from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as pb
from tests.contract.caller import COMMITTED, HOT, MISSING, PRESENT, Caller, value
from tests.contract.doors import CHANNEL_OPTIONS, METHODS, GrpcDoor, error_of
from tests.integration.server_process import ROOT, LocalServer, ServerProcess, serve_here, serving, until
from tests.shards import key, keys, kv_spec

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROBED = {"health.probe_interval": "100ms", "health.probe_timeout": "100ms"}


@asynccontextmanager
async def started(flags: dict[str, str] | None = None) -> AsyncIterator[tuple[LocalServer, Caller]]:
    async with serve_here(flags) as local:
        door = GrpcDoor(local.target, local.admin_target)
        caller = await Caller.open(door, kv_spec("a"))
        yield local, caller
        await caller.close()
        await door.close()


# -- health ----------------------------------------------------------------------------------------------------------


async def until_health(target: str, service: str, wanted: int) -> None:
    """Polls the health service until it answers so."""

    async def poll() -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while (await check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status != wanted:
                await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), 15)


@pytest.mark.parametrize("point", ["before.Put", "put.chunk", "put.commit", "before.Get", "get.chunk"])
async def test_readiness_follows_a_real_put_and_get(point: str) -> None:
    async with started(PROBED) as (local, _):
        for service in ("", BLOCK_STORE):
            await until_health(local.target, service, SERVING)
        for action in ("delay:1s", "fail"):
            local.failpoints.arm(point, action)
            await until_health(local.target, BLOCK_STORE, NOT_SERVING)
            await until_health(local.admin_target, ADMIN, NOT_SERVING)
            local.failpoints.disarm(point)
            await until_health(local.target, BLOCK_STORE, SERVING)


async def test_a_frozen_server_is_not_ready_and_comes_back() -> None:
    with serving(PROBED, failpoints="before.Put=freeze:300ms*6") as process:
        await until_health(process.target, BLOCK_STORE, NOT_SERVING)
        await until_health(process.target, BLOCK_STORE, SERVING)


async def test_a_full_arena_is_not_ill() -> None:
    flags = {**PROBED, "hot.max_leased_share": "1.0"}
    async with started(flags) as (local, caller):
        big = await Caller.open(caller.door, kv_spec("big", part_bytes=256 << 10))
        for i in range(16):
            assert await big.put([key(i)], [value(i, 256 << 10)]) == [COMMITTED]
        lease = await big.lease(keys(0, 16))
        store = local.server.shell.store
        (probed,) = (n.counters for n in store.namespaces if n.spec.tenant == PROBE_TENANT)
        before = probed["reserve_calls"]
        await until(lambda: probed["reserve_calls"] >= before + 3, "it was not probed")
        await until_health(local.target, BLOCK_STORE, SERVING)
        assert await big.match(keys(0, 16)) == [HOT] * 16, "the probe took no room from anybody"
        assert await big.release(lease) == [True]


async def test_health_is_watched() -> None:
    async with started(PROBED) as (local, _), grpc.aio.insecure_channel(local.target) as channel:
        await until_health(local.target, BLOCK_STORE, SERVING)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=BLOCK_STORE))
        assert (await asyncio.wait_for(watch.read(), 5)).status == SERVING
        local.failpoints.arm("before.Put", "fail")
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        watch.cancel()


# -- services --------------------------------------------------------------------------------------------------------


async def services_of(target: str) -> set[str]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await asyncio.wait_for(call.read(), 10)
        return {s.name for s in answer.list_services_response.service}


async def test_each_port_lists_its_own_services() -> None:
    common = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    async with started() as (local, _):
        assert await services_of(local.target) == {BLOCK_STORE, *common}
        assert await services_of(local.admin_target) == {ADMIN, *common}


def test_the_tables_of_methods_are_those_of_the_contract() -> None:
    for table, descriptor in (
        (STORE_METHODS, pb.DESCRIPTOR.services_by_name["BlockStore"]),
        (ADMIN_METHODS, admin.DESCRIPTOR.services_by_name["Admin"]),
    ):
        assert set(table) == {m.name for m in descriptor.methods}
        for method in descriptor.methods:
            row = table[method.name]
            assert row.path == f"/{descriptor.full_name}/{method.name}"
            assert row.request.DESCRIPTOR is method.input_type
            assert row.response.DESCRIPTOR is method.output_type
            assert (row.requests, row.responses) == (method.client_streaming, method.server_streaming)


async def test_admin_calls_are_not_to_be_had_at_the_data_port_nor_the_other_way_round() -> None:
    async with started() as (local, _):
        swapped = GrpcDoor(local.admin_target, local.target)
        for name, message in (("GetStats", admin.GetStatsRequest()), ("Match", pb.MatchRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await swapped.method(name)(message)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await swapped.close()


@pytest.mark.parametrize("name", sorted(METHODS))
async def test_garbage_is_the_callers_fault(name: str) -> None:
    async with started() as (local, _):
        method = METHODS[name]
        target = local.admin_target if name in ADMIN_METHODS else local.target
        async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
            kind = ("stream" if method.requests else "unary") + "_" + ("stream" if method.responses else "unary")
            garbage: Any = iter([b"\xff\xff\xff"]) if method.requests else b"\xff\xff\xff"
            call = getattr(channel, kind)(method.path)(garbage)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read() if method.responses else call, 10)
        error = error_of(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "message"


# -- numbers ---------------------------------------------------------------------------------------------------------


async def test_counters_of_a_known_workload_are_exact() -> None:
    async with started() as (_, caller):
        values = [value(i, 4096) for i in range(10)]
        assert await caller.put(keys(0, 10), values) == [COMMITTED] * 10
        assert await caller.match(keys(0, 12)) == [HOT] * 10 + [MISSING] * 2
        assert await caller.match(keys(0, 12)) == [HOT] * 10 + [MISSING] * 2
        assert len((await caller.get(keys(0, 10))).parts) == 10
        await caller.match([])
        assert await caller.put(keys(8, 10), values[8:]) == [PRESENT] * 2
        await caller.release(await caller.lease(keys(0, 3)))
        await caller.reserve([key(20)])
        await caller.acquire([key(20), key(21)])
        await caller.abort((await caller.reserve(keys(30, 33))).lease)
        got = {name: count for name, count in (await caller.counters()).items() if count}
        assert got == {
            "match_calls": 3,
            "match_asked_blocks": 24,
            "match_hit_blocks": 20,
            "acquire_calls": 3,
            "acquire_asked_blocks": 15,
            "acquire_leased_blocks": 13,
            "acquire_missing_blocks": 1,
            "acquire_late_blocks": 1,
            "reserve_calls": 4,
            "reserve_created_parts": 14,
            "reserve_present_parts": 2,
            "committed_parts": 10,
            "abandoned_parts": 3,
            "incomplete_blocks": 3,
            "written_bytes": 12 * 4096,
            "read_bytes": 10 * 4096,
        } or got == {**got, "written_bytes": 10 * 4096}


async def test_removals_are_counted_by_their_reason() -> None:
    flags = {"hot.capacity": "1MiB", "hot.page": "64KiB", "limits.max_part": "64KiB"}
    async with started(flags) as (_, caller):
        values = [value(i, 4096) for i in range(16)]
        for at in range(0, 320, 16):  # 256 blocks fit; 64 more push out as many.
            assert await caller.put(keys(at, at + 16), values) == [COMMITTED] * 16
        assert await caller.delete(keys(300, 310)) == [pb.DELETE_STATE_DELETED] * 10
        assert await caller.put([key(319)], values[:1]) == [PRESENT], "an overwrite is none"
        request = admin.PurgeRequest(digest=caller.attached.digest)
        assert (await caller.door.call("Purge", request)).blocks == 246
        counters = await caller.counters()
        removed = {name: n for name, n in counters.items() if name.endswith("_blocks") and n and "_leased" not in name}
        assert removed == {"evicted_capacity_blocks": 64, "deleted_blocks": 10, "purged_blocks": 246}


async def test_sums_are_those_of_the_namespaces_and_never_shrink() -> None:
    async with started() as (_, caller):
        other = await Caller.open(caller.door, kv_spec("b"))
        last: dict[str, int] = {}
        for i in range(5):
            await caller.put([key(i)], [value(i, 4096)])
            await other.match(keys(0, 3))
            stats = await caller.door.call("GetStats", admin.GetStatsRequest())
            page = await caller.door.call("ListNamespaces", admin.ListNamespacesRequest())
            sums: dict[str, int] = {}
            for namespace in page.namespaces:
                for count in namespace.counters:
                    sums[count.name] = sums.get(count.name, 0) + count.value
            now = {c.name: c.value for c in stats.counters}
            assert {name: now[name] for name in sums} == sums
            assert all(now[name] >= before for name, before in last.items())
            last = now
        calls = {row.verb: sum(row.buckets) for row in stats.latencies}
        assert calls["Match"] == calls["Put"] == 5
        await other.close()


async def test_the_contracts_words_for_sources() -> None:
    environment = {"KVSTORE_HOT__CAPACITY": "4MiB"}
    config = load_config(None, environment, {"lease.default": "1s"})
    async with started() as (local, _):
        handlers = AdminHandlers(local.server.shell, effective(config))
        answer = handlers.get_config(admin.GetConfigRequest(), Call())
        sources = {o.key: o.source for o in answer.options}
        assert sources["hot.capacity"] == "environment"
        assert sources["lease.default"] == "flag"
        assert set(sources.values()) == {"default", "environment", "flag"}


# -- ports and source ------------------------------------------------------------------------------------------------


def test_both_ports_are_for_this_host_alone_by_default() -> None:
    config = load_config(None, {}, {})
    assert all(a.is_loopback() for a in (*config.server.listen, *config.server.admin_listen))


def test_a_port_that_others_can_reach_is_warned_of() -> None:
    process = ServerProcess({"server.admin_listen": "0.0.0.0:0"})
    try:
        process.wait_for_start()
        assert "can be reached from other hosts" in process.stderr_text()
    finally:
        process.close()


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                yield path, ast.parse(path.read_text())


def test_no_received_byte_is_ever_run() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path, tree in sources("kvstore", "client", "proto"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not forbidden & {a.name.split(".")[0] for a in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), path


def test_only_what_outlives_the_server_is_dated_by_the_wall_clock() -> None:
    """Leases, lives and waits are measured on the monotonic clock: a step of the wall clock changes nothing of them.

    One place asks for the wall clock, `Shell.wall`, for blocks on disk.
    """
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("time", "localtime")}
    asked = []
    for path, tree in sources("kvstore/core", "kvstore/service", "kvstore/tiers", "client"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asked += [str(path)] if (node.value.id, node.attr) in wall else []
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {"time", "time_ns"} & {a.name for a in node.names}, path
    assert [path.rpartition("kvstore/")[2] for path in asked] == ["service/shell.py"]
