"""Many threads, many tasks, cancellations, forks and sudden ends: right bytes, exact counts, and nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kvstore_client import AsyncClient, Client, InvalidArgument, Region
from kvstore_client.fast.pools import MAX_IDLE_LANES
from kvstore_wire.errors import DeadlineExceeded
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.test_transport_leases import child
from tests.integration.transport_scene import (
    MIB,
    Blocking,
    InLoop,
    Rooms,
    Shard,
    options_of,
    region_of,
    sharded,
    until,
)

pytestmark = pytest.mark.integration
SMALL, LARGE = kv_spec("small", part_bytes=20_000), kv_spec("large", part_bytes=400_000, layer_groups=2)
COUNT = 8
SMALLS = [value(("small", i), 20_000) for i in range(COUNT)]
LARGES = [value(("large", i), 400_000) for i in range(2 * COUNT)]
BLOCKS = keys(COUNT)
WAYS = [("bulk", {}), ("shm", {}), ("shm", {"shm.map_uids": "none"})]


def stored(client: Client) -> None:
    assert client.namespace(SMALL).put(BLOCKS, SMALLS).ok
    assert client.namespace(LARGE).put(BLOCKS, LARGES).ok


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "flags"), WAYS)
def test_threads_share_a_client(transport: str, flags: dict[str, str]) -> None:
    """Each of 16 threads compares every byte it reads; afterwards the counts are exact."""
    threads, calls = 16, 160
    wrong: list[object] = []

    def work(client: Client, seed: int) -> None:
        chosen, rooms = random.Random(seed), [bytearray(400_000) for _ in range(2)]
        small, large = client.namespace(SMALL), client.namespace(LARGE)
        small_rooms = [bytearray(20_000) for _ in range(2)]
        for _ in range(calls):
            i = chosen.randrange(COUNT - 1)
            if chosen.random() < 0.9:
                got = small.get(BLOCKS[i : i + 2], into=[memoryview(room) for room in small_rooms])
                right = small_rooms == SMALLS[i : i + 2] and got.prefix_blocks == 2
            else:
                got = large.get(BLOCKS[i : i + 1], into=rooms)
                right = rooms == LARGES[2 * i : 2 * i + 2] and got.prefix_blocks == 1
            if not right:
                wrong.append(got)

    with sharded(flags) as shard, Client(options_of(shard.target, transport, deadline_ms=30_000)) as client:
        stored(client)
        before = client.stats()
        workers = [threading.Thread(target=work, args=(client, seed)) for seed in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []
        assert client.transport == transport
        after = client.stats()
        assert after.calls["get"] == threads * calls
        asked = sum(_asked(seed, calls) for seed in range(threads))
        assert after.fetched_blocks_asked - before.fetched_blocks_asked == asked
        assert after.fetched_blocks == asked
        assert (after.failures, after.path_changes, after.corrupt_blocks, after.retries) == ({}, 0, 0, 0)
        assert shard.ask(lambda local: local.server.channel.connection_count) <= MAX_IDLE_LANES + 1


def _asked(seed: int, calls: int) -> int:
    """Blocks that a thread asks for in all."""
    chosen, total = random.Random(seed), 0
    for _ in range(calls):
        chosen.randrange(COUNT - 1)
        total += 2 if chosen.random() < 0.9 else 1
    return total


def test_counts_of_all_verbs_from_many_threads_add_up() -> None:
    def work(client: Client, number: int) -> None:
        ns = client.namespace(SMALL)
        own = keys(20, f"{number}")
        for block in own:
            assert ns.put([block], [SMALLS[0]]).stored == 1
            assert ns.put([block], [SMALLS[0]]).present == 1
        assert ns.match(own).prefix_blocks == 20
        assert ns.get([*own, *keys(1, "none")]).prefix_blocks == 20
        with ns.acquire(own) as lease:
            assert len(lease.grants) == 20
        with pytest.raises(InvalidArgument):
            ns.get(own, into=[])
        assert ns.delete(own).states == b"\x01" * 20

    with sharded({"hot.capacity": "64MiB"}) as shard, Client(options_of(shard.target, "shm")) as client:
        client.namespace(SMALL).match(keys(1))
        workers = [threading.Thread(target=work, args=(client, number)) for number in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stats = client.stats()
        expected = {"put": 320, "match": 9, "get": 8, "acquire": 8, "release": 8, "delete": 8}
        assert stats.calls == expected
        assert (stats.stored_parts, stats.present_parts, stats.stored_bytes) == (160, 160, 160 * 20_000)
        assert (stats.matched_blocks_asked, stats.matched_blocks) == (161, 160)
        assert (stats.fetched_blocks_asked, stats.fetched_blocks) == (168, 160)
        assert stats.fetched_bytes == 160 * 20_000
        assert stats.failures == {}


def test_threads_wait_for_a_slot_no_longer_than_their_deadline() -> None:
    with sharded() as shard:
        options = options_of(shard.target, "bulk")
        with Client(options) as client:
            stored(client)
            shard.arm("before.Match", "delay:1s")
            began_s = time.monotonic()
            found = client.namespace(SMALL).match(BLOCKS, deadline_ms=100)
            assert isinstance(found.failure, DeadlineExceeded)
            assert time.monotonic() - began_s < 0.9  # Not as long as the shard takes.
            shard.disarm("before.Match")
            assert client.namespace(SMALL).match(BLOCKS).prefix_blocks == COUNT


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "flags"), WAYS)
def test_many_tasks_share_a_connection(transport: str, flags: dict[str, str]) -> None:
    async def one(client: AsyncClient, at: int) -> bool:
        namespace, i = client.namespace(LARGE if at % 5 == 0 else SMALL), at % COUNT
        values = LARGES[2 * i : 2 * i + 2] if at % 5 == 0 else [SMALLS[i]]
        rooms = [bytearray(len(v)) for v in values]
        got = await namespace.get([BLOCKS[i]], into=rooms)
        return got.prefix_blocks == 1 and rooms == values

    async def work(client: AsyncClient) -> list[bool]:
        return list(await asyncio.gather(*(one(client, i) for i in range(200))))

    with sharded(flags) as shard:
        driver = InLoop(options_of(shard.target, transport, deadline_ms=30_000))
        assert driver.put(SMALL, BLOCKS, SMALLS).ok
        assert driver.put(LARGE, BLOCKS, LARGES).ok
        assert all(driver.wait(work(driver.client)))
        assert shard.ask(lambda local: local.server.channel.connection_count) == 1
        assert driver.client.stats().failures == {}
        driver.close()


class Storm:
    """Calls of one client that are cancelled, or run out of time, at random moments."""

    def __init__(self, client: AsyncClient, region: Region, seed: int) -> None:
        self._client, self._random = client, random.Random(seed)
        self._small, self._large = client.namespace(SMALL), client.namespace(LARGE)
        self._rooms = Rooms(region.memory)
        self.ends: Counter[str] = Counter()
        self.touched: list[memoryview] = []  # Buffers of calls that have ended.

    async def call(self, *, cancels: bool) -> None:
        """Makes one call and ends it early; then fills its buffers with a pattern that must stay."""
        verb = self._random.choice(("get", "get", "get", "put", "acquire", "reserve", "match", "view"))
        i = self._random.randrange(COUNT)
        deadline_ms = 5000 if cancels else self._random.randrange(1, 12)
        into = [memoryview(bytearray(400_000)) for _ in range(2)]
        if self._random.random() < 0.5 and verb == "get":
            into = self._rooms.of([400_000] * 2)
        task = asyncio.ensure_future(self._made(verb, i, into, deadline_ms))
        if cancels:
            await asyncio.sleep(self._random.random() * 0.006)
            task.cancel()
        try:
            await task
            self.ends["ended"] += 1
        except asyncio.CancelledError:
            self.ends["cancelled"] += 1
        for room in into:
            room[:] = b"\x77" * len(room)
        self.touched += into
        if len(self.touched) >= 24:
            await self.check()

    async def check(self) -> None:
        """Looks at the buffers of calls that have ended: nobody may have written to them."""
        await asyncio.sleep(0.03)
        assert all(bytes(room) == b"\x77" * len(room) for room in self.touched)
        self._rooms.check()
        self._rooms.clear()
        self.touched.clear()

    async def _made(self, verb: str, i: int, into: list[memoryview], deadline_ms: int) -> None:
        if verb == "get":
            got = await self._large.get([BLOCKS[i]], into=into, deadline_ms=deadline_ms)
            assert not got.prefix_blocks or list(map(bytes, into)) == LARGES[2 * i : 2 * i + 2]
            assert got.corrupt_blocks == 0
        elif verb == "put":
            block = keys(1, f"storm{self._random.randrange(20)}")
            put = await self._large.put(block, LARGES[:2], deadline_ms=deadline_ms)
            assert put.failure is None or isinstance(put.failure, DeadlineExceeded), put.failure
        elif verb == "acquire":
            lease = await self._large.acquire([BLOCKS[i]], deadline_ms=deadline_ms, lease_ms=60_000)
            await lease.release()
        elif verb == "reserve":
            slots = await self._small.reserve(keys(1, f"{i}"), deadline_ms=deadline_ms, lease_ms=60_000)
            await slots.abort()
        elif verb == "match":
            await self._small.match(BLOCKS, deadline_ms=deadline_ms)
        else:
            async with await self._large.view([BLOCKS[i]], deadline_ms=deadline_ms) as viewed:
                assert [bytes(v) for v in viewed.views] in ([], LARGES[2 * i : 2 * i + 2])


@pytest.mark.parametrize("cancels", [True, False], ids=["cancelled", "late"])
@pytest.mark.parametrize(("transport", "flags"), WAYS)
def test_calls_that_end_early_leave_nothing(transport: str, flags: dict[str, str], cancels: bool) -> None:
    """At the end no lease of a minute is left, no task, no descriptor, and the connection works."""
    with sharded({"hot.capacity": "48MiB", **flags}) as shard:
        driver = InLoop(options_of(shard.target, transport, deadline_ms=30_000))
        assert driver.put(SMALL, BLOCKS, SMALLS).ok
        assert driver.put(LARGE, BLOCKS, LARGES).ok
        with region_of(driver.client, 24 * MIB) as region:
            driver.wait(_stormed(driver.client, region, cancels=cancels))
        driver.run(SMALL, lambda ns: ns.match(BLOCKS))
        leases_end_s = time.monotonic() + 10
        while shard.ask(lambda local: local.gauge("leases")):
            assert time.monotonic() < leases_end_s, "a lease of a call that nobody waits for is left"
            time.sleep(0.02)
        shard.until(lambda local: local.gauge("reserved_bytes") == 0, "slots are reserved for nobody")
        assert driver.get(LARGE, BLOCKS).prefix_blocks == COUNT
        assert shard.ask(lambda local: local.server.channel.connection_count) == 1
        driver.close()


async def _stormed(client: AsyncClient, region: Region, *, cancels: bool) -> None:
    tasks, descriptors = len(asyncio.all_tasks()), fds()
    cancelled = 0
    for seed in range(5):
        storm = Storm(client, region, seed)
        for _ in range(34):
            await storm.call(cancels=cancels)
        await storm.check()
        cancelled += storm.ends["cancelled"]
    assert cancelled > 0 or not cancels
    # Many at once.
    namespace = client.namespace(LARGE)
    for _ in range(5):
        rooms = [[bytearray(400_000) for _ in range(2)] for _ in range(20)]
        gets = [asyncio.ensure_future(namespace.get([BLOCKS[i % COUNT]], into=rooms[i])) for i in range(20)]
        await asyncio.sleep(0.004)
        for get in gets[::2]:
            get.cancel()
        ended = await asyncio.gather(*gets, return_exceptions=True)
        for i in range(1, 20, 2):
            found = ended[i]
            assert not isinstance(found, BaseException), found
            assert found.prefix_blocks == 1
            assert list(map(bytes, rooms[i])) == LARGES[2 * (i % COUNT) :][:2]
    end_s = time.monotonic() + 5
    while len(asyncio.all_tasks()) > tasks:
        assert time.monotonic() < end_s, asyncio.all_tasks()
        await asyncio.sleep(0.01)
    assert fds() <= descriptors + 1


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "bulk"])
def test_a_fork_takes_nothing_along(transport: str) -> None:
    """The child is refused and ends in order; the parent's calls go on meanwhile on its own connections."""
    with sharded() as shard, child(shard, "forks", transport=transport) as forking:
        assert forking.line() == "0", "the number of calls that the child was allowed"
        assert forking.line() == "True"
        assert forking.end() == (0, "")


@pytest.mark.parametrize("transport", ["shm", "bulk"])
def test_a_process_that_ends_with_everything_open_ends_quietly(transport: str) -> None:
    with sharded() as shard, child(shard, "leaves_all_open", transport=transport) as leaving:
        assert leaving.line() == "leaves"
        assert leaving.end() == (0, "")


@pytest.mark.parametrize("transport", ["shm", "bulk"])
def test_a_client_that_is_forgotten_is_closed(transport: str) -> None:
    with sharded() as shard, child(shard, "is_forgotten", transport=transport) as forgetting:
        assert int(forgetting.line()) < 0, "its threads have ended"
        shard.until(lambda local: not local.server.channel.connection_count, "a connection is left")
        shard.until(lambda local: local.gauge("sessions") == 1, "a session is left")
        forgetting.tell()
        assert forgetting.end() == (0, "")


def test_clients_that_come_and_go_leave_no_descriptors_and_threads() -> None:
    with sharded() as shard:
        _come_and_go(shard)
        gc.collect()
        descriptors, threads = fds(), threading.active_count()
        maps = _arena_maps()
        for _ in range(10):
            _come_and_go(shard)
        gc.collect()
        until(lambda: fds() <= descriptors, f"descriptors are left: {fds()} instead of {descriptors}")
        assert threading.active_count() <= threads
        assert _arena_maps() <= maps


def _come_and_go(shard: Shard) -> None:
    driver = Blocking(options_of(shard.target, "shm", "bulk", "grpc"))
    with region_of(driver.client, 8 * MIB) as region:
        rooms = Rooms(region.memory)
        assert driver.put(LARGE, BLOCKS[:2], rooms.holding(LARGES[:4])).failure is None
        assert driver.get(LARGE, BLOCKS[:2]).prefix_blocks == 2
    driver.close()


def _arena_maps() -> int:
    return sum("kvstore" in line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line)
