"""The administrators' door, and what every door refuses to those of other namespaces."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.config import effective
from kvstore_wire.errors import Draining, InvalidArgument
from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import COMMITTED, HOT, MISSING, Caller, attach_request, value
from tests.contract.conftest import Shard
from tests.contract.doors import HANG_S
from tests.shards import key, keys, kv_spec, opaque_spec

V = [value(i, 4096) for i in range(8)]


async def purge(caller: Caller, **selectors: object) -> tuple[int, int, int]:
    answer = await caller.door.call("Purge", admin.PurgeRequest(**selectors))  # type: ignore[arg-type]
    return answer.blocks, answer.deferred_blocks, answer.bytes


async def test_config_is_the_effective_one_with_its_sources(shard: Shard) -> None:
    answer = await shard.door().call("GetConfig", admin.GetConfigRequest())
    assert [(o.key, o.value, o.source) for o in answer.options] == effective(shard.local.config)
    told = {o.key: (o.value, o.source) for o in answer.options}
    assert told["limits.max_blocks_per_call"] == ("8", "flag")
    assert told["server.max_sessions"] == ("4096", "default")


async def test_stats_name_the_life_of_the_shard(shard: Shard) -> None:
    caller = await shard.caller()
    stats = await caller.door.call("GetStats", admin.GetStatsRequest())
    assert stats.generation == caller.attached.generation
    gauges = {g.name: g.value for g in stats.gauges}
    assert gauges["free_bytes"] == gauges["capacity_bytes"] >= 4 << 20
    assert gauges["sessions"] == 2, "this one and the probe's"
    assert {c.name for c in stats.counters} >= {"match_calls", "committed_parts", "evicted_capacity_blocks"}


async def test_stats_are_watched(shard: Shard) -> None:
    door = shard.door()
    watched = door.stream("WatchStats", admin.WatchStatsRequest(interval_ms=100))
    first = await asyncio.wait_for(anext(watched), HANG_S)
    second = await asyncio.wait_for(anext(watched), HANG_S)
    assert second.uptime_ms > first.uptime_ms
    await watched.aclose()
    for interval_ms in (99, 60_001):
        with pytest.raises(InvalidArgument) as caught:
            await anext(door.stream("WatchStats", admin.WatchStatsRequest(interval_ms=interval_ms)))
        assert (caught.value.field, caught.value.limit) == ("interval_ms", "100-60000")


async def test_namespaces_are_listed_in_pages(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("n0"))
    for i in range(1, 5):
        await caller.add(kv_spec(f"n{i}"))
    await caller.put(keys(0, 2), V[:2])
    names, token, pages = [], "", 0
    while True:
        request = admin.ListNamespacesRequest(page_size=2, page_token=token)
        page = await caller.door.call("ListNamespaces", request)
        names += [n.spec.name for n in page.namespaces]
        pages, token = pages + 1, page.next_page_token
        assert len(page.namespaces) == (2 if token else 1)
        if not token:
            break
    assert sorted(names) == ["n0", "n1", "n2", "n3", "n4"], "the probe's own is nobody's business"
    assert pages == 3
    everything = await caller.door.call("ListNamespaces", admin.ListNamespacesRequest(page_size=1000))
    found = next(n for n in everything.namespaces if n.digest == caller.attached.digest)
    assert (found.blocks, found.hot_bytes, found.sessions) == (2, 2 * 4096, 1)
    assert found.spec == kv_spec("n0").to_message()
    with pytest.raises(InvalidArgument) as caught:
        await caller.door.call("ListNamespaces", admin.ListNamespacesRequest(page_size=1001))
    assert (caught.value.field, caught.value.limit) == ("page_size", "1000")


async def test_a_purge_needs_a_selector(shard: Shard) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await shard.door().call("Purge", admin.PurgeRequest())
    assert caught.value.field == "selector"


async def test_a_purge_takes_what_its_selectors_name_and_no_more(shard: Shard) -> None:
    mine = await shard.caller(kv_spec("a", tenant="t1"))
    same = await shard.caller(kv_spec("b", tenant="t1"))
    other = await shard.caller(kv_spec("a", tenant="t2"))
    plain = await shard.caller(kv_spec("a"))
    callers = (mine, same, other, plain)

    async def stored() -> list[int]:
        return [(await c.match([key(0)]))[0] for c in callers]

    async def refill() -> None:
        for caller in callers:
            await caller.put([key(0)], V[:1])

    await refill()
    assert await purge(mine, digest=mine.attached.digest) == (1, 0, 4096)
    assert await stored() == [MISSING, HOT, HOT, HOT]
    await refill()
    assert await purge(mine, tenant="t1") == (2, 0, 8192)
    assert await stored() == [MISSING, MISSING, HOT, HOT]
    assert await purge(mine, tenant="") == (1, 0, 4096), "the empty tenant is a tenant"
    assert await stored() == [MISSING, MISSING, HOT, MISSING]
    await refill()
    assert await purge(mine, tenant="t2", digest=mine.attached.digest) == (0, 0, 0), "selectors narrow each other"
    assert await purge(mine, older_than_ms=3_600_000) == (0, 0, 0)
    assert await purge(mine, all=True) == (4, 0, 4 * 4096)
    assert await stored() == [MISSING] * 4


async def test_a_purge_by_age_leaves_what_is_younger(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    await asyncio.sleep(0.15)
    await caller.put([key(1)], V[1:2])
    assert await purge(caller, older_than_ms=100) == (1, 0, 4096)
    assert await caller.match(keys(0, 2)) == [MISSING, HOT]


async def test_a_purge_defers_what_is_held_and_nobody_new_finds_it(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 2), V[:2])
    lease = await caller.lease([key(0)])
    reserved = await caller.reserve([key(2)])
    assert await purge(caller, all=True) == (3, 2, 3 * 4096)
    assert await caller.match(keys(0, 3)) == [MISSING] * 3
    assert (await caller.get(lease=lease)).parts == V[:1]
    assert await caller.fill(reserved.lease, V[2:3]) == [types.PART_STATE_LOST]
    assert await caller.release(lease) == [True]
    assert shard.local.used_bytes() == 0


async def test_every_verb_stays_in_its_namespace(shard: Shard) -> None:
    """Same keys, another namespace of the same session: it finds nothing and takes nothing away."""
    owner = await shard.caller(opaque_spec("owner"))
    twin = await shard.caller(opaque_spec("twin"))
    chain = keys(0, 2)
    await owner.put(chain, V[:2], opaque=True)
    assert await twin.match(chain) == [MISSING, MISSING]
    assert (await twin.get(chain)).parts == []
    (answer,) = await twin.acquire(chain)
    assert list(answer.states) == [MISSING, MISSING]
    explain = pb.ExplainRequest(session=twin.session, namespace=twin.namespace, chain=types.Chain(keys=chain))
    assert (await twin.door.call("Explain", explain)).first_missing == 0
    over = pb.OverRequest(session=twin.session, namespace=twin.namespace, chain=types.Chain(keys=chain))
    assert (await twin.door.call("Over", over)).blocks == 0
    assert await twin.delete(chain) == [pb.DELETE_STATE_NOT_FOUND] * 2
    assert await twin.put([key(0)], V[5:6], opaque=True) == [COMMITTED]
    assert await purge(twin, digest=twin.attached.digest) == (1, 0, 4096)
    assert (await owner.get(chain)).parts == V[:2]
    listed = await owner.door.call("ListNamespaces", admin.ListNamespacesRequest())
    assert {n.spec.name: n.blocks for n in listed.namespaces} == {"owner": 2, "twin": 0}


async def test_a_draining_shard_admits_nothing_new_and_lets_leases_end(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    read, written = await caller.lease([key(0)]), (await caller.reserve([key(1)])).lease
    draining = asyncio.ensure_future(shard.local.server.drain(10.0))
    notice = await caller.notice()
    assert notice.draining.within_ms == 10_000
    for call in (
        caller.door.call("Attach", attach_request(kv_spec("a"))),
        caller.acquire([key(0)]),
        caller.get([key(0)]),
    ):
        with pytest.raises(Draining) as caught:
            await call
        assert caught.value.retryable
    assert await caller.put([key(2)], V[2:3]) == [types.PART_STATE_DRAINING]
    assert list((await caller.reserve([key(2)])).states) == [types.PART_STATE_DRAINING]
    assert await caller.match([key(0)]) == [HOT]
    assert (await caller.get(lease=read)).parts == V[:1]
    assert await caller.fill(written, V[1:2]) == [COMMITTED], "what was reserved before may be finished"
    assert not draining.done()
    assert await caller.release(read) == [True]
    await asyncio.wait_for(draining, HANG_S)
