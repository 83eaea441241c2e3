"""The client against a real shard: what works, and what a killed, frozen or draining shard costs."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from kvstore_client import (
    AsyncClient,
    BlockState,
    Client,
    ClientOptions,
    Coverage,
    NamespaceSpec,
    PartState,
    chain_keys,
)
from kvstore_wire import errors
from tests.integration.client_cases import keys, kv_spec, opaque_spec, value
from tests.integration.client_shard import ShardProcess

pytestmark = pytest.mark.integration
HIT, MISS = BlockState.HOT, BlockState.MISSING


@pytest.fixture
def shard() -> Iterator[ShardProcess]:
    made = ShardProcess().start()
    yield made
    made.kill()


@pytest.fixture
async def client(shard: ShardProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(ClientOptions(shard.target, default_deadline_ms=5000)) as made:
        yield made


async def test_parts_of_many_sizes_come_back_as_they_were(client: AsyncClient) -> None:
    for part_bytes, count in ((1, 3), (511, 300), (4097, 700), (300_000, 20), (2 << 20, 5)):
        ns = client.namespace(kv_spec(f"n{part_bytes}", part_bytes=part_bytes, layer_groups=2))
        blocks = keys(count, f"b{part_bytes}")
        values = [value((part_bytes, i), part_bytes) for i in range(2 * count)]
        put = await ns.put(blocks, values, deadline_ms=20_000)
        assert put.ok, (part_bytes, put)
        room = np.zeros((2 * count, part_bytes), np.uint8)
        got = await ns.get(blocks, into=list(room), deadline_ms=20_000)
        assert (got.prefix_blocks, got.failure, got.corrupt_blocks) == (count, None, 0)
        assert all(room[i].tobytes() == values[i] for i in range(2 * count))
    assert client.stats().failures == {}


async def test_values_of_an_opaque_namespace(client: AsyncClient) -> None:
    ns = client.namespace(opaque_spec(part_bytes=4 << 20))
    sizes = [0, 1, 4096, 3_098_112, 4 << 20]
    values = [value(i, size) for i, size in enumerate(sizes)]
    assert (await ns.put(keys(5), values)).ok
    got = await ns.get(keys(6), coverage=Coverage.EACH)
    assert got.states == bytes((HIT,) * 5 + (MISS,))
    assert got.values is not None
    assert [None if v is None else bytes(v) for v in got.values] == [*values, None]
    assert got.lengths[:, 0].tolist() == [*sizes, 0]
    assert (await ns.delete(keys(6))).states == b"\x01\x01\x01\x01\x01\x00"
    assert (await ns.match(keys(6))).prefix_blocks == 0


async def test_leases_hold_and_release(client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    blocks, values = keys(6), [value(i) for i in range(6)]
    assert (await ns.put(blocks[:4], values[:4])).ok
    async with await ns.acquire(blocks) as lease:
        assert lease.prefix_blocks == 4
        read = await ns.read(lease)
        assert [bytes(v) for v in read.values or ()] == values[:4]
        assert (await ns.renew([lease])).valid == (True,)
    assert lease.valid is True
    slots = await ns.reserve(blocks)
    assert slots.created == (4, 5)
    assert (await ns.write(slots, values[4:])).stored == 2
    assert (await ns.match(blocks)).prefix_blocks == 6
    told = await ns.explain([*blocks, *keys(1, "none")])
    assert told.first_missing == 6
    assert told.digest == ns.spec.digest


async def test_a_reader_waits_for_a_writer(client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    slots = await ns.reserve(keys(2))
    waiting = asyncio.create_task(ns.get(keys(2), wait_ms=4000))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert (await ns.write(slots, [value(0), value(1)])).ok
    got = await waiting
    assert (got.prefix_blocks, got.failure) == (2, None)
    late = await ns.get(keys(3), wait_ms=50)
    assert late.prefix_blocks == 2


async def test_a_dropped_reader_or_writer_leaves_nothing_behind(shard: ShardProcess, client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    async with AsyncClient(client.options) as other:
        assert (await other.namespace(kv_spec()).reserve(keys(2))).held
        seen = await ns.put(keys(2), [value(0), value(1)])
        assert seen.states == bytes((PartState.IN_FLIGHT,) * 2)
    end_s = time.monotonic() + 5
    while not (await ns.put(keys(2), [value(0), value(1)])).ok:
        assert time.monotonic() < end_s, "the slots of a closed client stay reserved"
        await asyncio.sleep(0.02)


async def test_a_full_arena_is_a_state(client: AsyncClient) -> None:
    ns = client.namespace(kv_spec(part_bytes=1 << 20))
    put = await ns.put(keys(80), [bytes(1 << 20)] * 80, deadline_ms=20_000)
    held = await ns.acquire(keys(80), coverage=Coverage.EACH)
    assert put.failure is None
    assert held.failure is None
    assert BlockState.HOT in held.states
    assert client.stats().stored_parts == put.stored <= 80


async def test_a_batch_larger_than_one_call_may_lease_is_read_whole() -> None:
    shard = ShardProcess("--limits.max_call_bytes", "8MiB").start()
    async with AsyncClient(ClientOptions(shard.target, default_deadline_ms=10_000)) as client:
        ns = client.namespace(opaque_spec(part_bytes=3 << 20))
        blocks, values = keys(9), [value(i, 3 << 20) for i in range(9)]
        assert (await ns.put(blocks, values)).ok
        got = await ns.get(blocks)
        assert [None if v is None else bytes(v) for v in got.values or ()] == values
    shard.kill()


async def test_another_spec_under_a_name_is_refused_with_its_field(client: AsyncClient) -> None:
    await client.namespace(kv_spec()).match(keys(1))
    with pytest.raises(errors.NamespaceMismatch) as caught:
        await client.namespace(kv_spec(part_bytes=2000)).match(keys(1))
    assert "part_bytes" in str(caught.value)


async def test_a_killed_shard_comes_back_without_help(shard: ShardProcess, client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    assert (await ns.put(keys(2), [value(0), value(1)])).ok
    lease, generation = await ns.acquire(keys(2)), client.generation
    shard.kill()
    down = await ns.get(keys(2))
    assert isinstance(down.failure, errors.Unreachable)
    assert down.states == bytes(2)
    refused = await ns.put(keys(1), [value(0)])
    assert (refused.ok, refused.stored) == (False, 0)
    shard.start()
    end_s = time.monotonic() + 5
    while (await ns.match(keys(2))).failure is not None:
        assert time.monotonic() < end_s, "the client stayed in back-off"
        await asyncio.sleep(0.05)
    assert (await ns.match(keys(2))).prefix_blocks == 0
    assert (await ns.put(keys(2), [value(0), value(1)])).ok
    assert (await ns.get(keys(2))).prefix_blocks == 2
    assert client.generation != generation
    assert (lease.held, await lease.release()) == (False, False)


async def test_the_first_call_after_a_quick_restart_succeeds(shard: ShardProcess, client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    assert (await ns.match(keys(1))).failure is None
    shard.kill()
    shard.start()
    assert (await ns.match(keys(1))).failure is None
    assert (await ns.put(keys(1), [value(0)])).ok


async def test_a_frozen_shard_costs_the_deadline(shard: ShardProcess, client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    assert (await ns.put(keys(2), [value(0), value(1)])).ok
    shard.send(signal.SIGSTOP)
    began_s = time.monotonic()
    answers = await asyncio.gather(
        ns.get(keys(2), deadline_ms=200),
        ns.put(keys(2, "n"), [value(0)] * 2, deadline_ms=200),
        ns.acquire(keys(2), deadline_ms=200),
    )
    assert time.monotonic() - began_s < 3  # Far above 200 ms for a busy machine, far below a hang.
    assert all(isinstance(a.failure, errors.DeadlineExceeded) for a in answers)
    shard.send(signal.SIGCONT)
    assert (await ns.get(keys(2))).prefix_blocks == 2


async def test_a_draining_shard_says_so(shard: ShardProcess, client: AsyncClient) -> None:
    ns = client.namespace(kv_spec())
    assert (await ns.put(keys(2), [value(0), value(1)])).ok
    async with await ns.acquire(keys(2)):
        shard.send(signal.SIGTERM)
        end_s = time.monotonic() + 5
        while not client.draining:
            assert time.monotonic() < end_s, "no word of the drain"
            await asyncio.sleep(0.01)
        put = await ns.put(keys(1, "new"), [value(9)])
        assert not put.ok
        assert put.stored == 0


async def test_a_blocking_client_beside_the_engines_own_loop(
    shard: ShardProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    spec = kv_spec()
    with Client(ClientOptions(shard.target, default_deadline_ms=20_000)) as client:
        ns = client.namespace(spec)
        blocks = chain_keys(spec, list(range(64)))
        assert ns.put(blocks, [value(i) for i in range(4)]).ok
        wrong: list[object] = []

        def work() -> None:
            for _ in range(250):
                got = ns.get(blocks)
                if got.prefix_blocks != 4:
                    wrong.append(got)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        ticks = 0
        while any(t.is_alive() for t in threads):
            await asyncio.sleep(0.001)
            ticks += 1
    assert wrong == []
    assert ticks > 0
    assert client.stats().fetched_blocks == 4000
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_two_processes_and_kinds_share_by_namespace(shard: ShardProcess) -> None:
    spec: NamespaceSpec = kv_spec()
    with Client(ClientOptions(shard.target, default_deadline_ms=5000)) as one:
        assert one.namespace(spec).put(keys(2), [value(0), value(1)]).ok
    async with AsyncClient(ClientOptions(shard.target, default_deadline_ms=5000)) as two:
        assert (await two.namespace(spec).get(keys(2))).prefix_blocks == 2
        assert (await two.namespace(kv_spec("other", layer_groups=2)).match(keys(2))).prefix_blocks == 0
