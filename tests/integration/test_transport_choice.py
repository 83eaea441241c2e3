"""Which way a client takes, what it does when that way fails, and how often it registers memory."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.replay.admin import admin_peer
from kvstore_client import BlockViews, ClientOptions
from kvstore_client.channel import Connection
from kvstore_wire.errors import DeadlineExceeded, LeaseExpired, Unreachable
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.server_process import ServerProcess, serving
from tests.integration.shard import closed_address
from tests.integration.transport_scene import (
    MIB,
    Blocking,
    Driver,
    InLoop,
    Rooms,
    Shard,
    driven,
    options_of,
    proxied,
    region_of,
    sharded,
    unregister,
    until,
)

pytestmark = pytest.mark.integration
SIZE = 700_000
SPEC = kv_spec(part_bytes=SIZE)
COUNT = 3
BLOCKS, VALUES = keys(COUNT), [value(("choice", i), SIZE) for i in range(COUNT)]
KINDS = ("blocking", "asyncio")
ALL = ("shm", "bulk", "grpc")


def is_stored(driver: Driver, blocks: list[bytes] = BLOCKS) -> bool:
    """Puts the blocks; what was stored by a try that failed half-way counts too."""
    return bool(driver.run(SPEC, lambda ns: ns.put(blocks, VALUES)).ok)


def is_right(driver: Driver, blocks: list[bytes] = BLOCKS, *, deadline_ms: int = 5000) -> bool:
    """Gets the blocks into fresh buffers and compares every byte."""
    into = [bytearray(SIZE) for _ in blocks]
    got = driver.run(SPEC, lambda ns: ns.get(blocks, into=into, deadline_ms=deadline_ms))
    return bool(got.prefix_blocks == len(blocks)) and into == VALUES


class _Aside:
    """One call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(20)
        return self._found[0]


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [({}, "shm"), ({"shm.socket": "off"}, "bulk"), ({"shm.socket": "off", "bulk.listen": "off"}, "grpc")],
)
def test_the_best_way_that_is_offered_is_taken(kind: str, flags: dict[str, str], expected: str) -> None:
    with sharded(flags) as shard, driven(kind, options_of(shard.target, *ALL)) as driver:
        assert driver.client.transport == ""
        assert is_stored(driver)
        assert is_right(driver)
        assert driver.client.transport == expected
        assert driver.client.stats().path_changes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_that_is_gone_and_one_of_another_shard_are_left_alone(kind: str) -> None:
    with sharded() as shard, sharded() as other:
        with driven(kind, options_of(shard.target, *ALL)) as driver:
            os.unlink(shard.socket_path)
            assert is_stored(driver)
            assert is_right(driver)
            assert driver.client.transport == "bulk"
            assert driver.client.stats().path_changes >= 1
        os.link(other.socket_path, shard.socket_path)
        with driven(kind, options_of(shard.target, *ALL)) as driver:
            assert is_right(driver)
            assert driver.client.transport == "bulk"
        assert other.ask(lambda local: local.gauge("stored_blocks")) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_that_cannot_be_had_does_not_stop_the_call(kind: str) -> None:
    """The socket goes away while connections through it live: a new one is needed to map."""
    with sharded() as shard, driven(kind, options_of(shard.target, *ALL)) as driver:
        assert driver.run(SPEC, lambda ns: ns.match(BLOCKS)).failure is None
        assert driver.run(SPEC, lambda ns: ns.match(BLOCKS)).failure is None
        assert driver.client.transport == "shm"
        assert is_stored(driver)
        os.unlink(shard.socket_path)
        assert is_right(driver)
        assert driver.client.transport == "bulk"


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_port_costs_a_moment(kind: str) -> None:
    with proxied() as proxy:
        proxy.lead_to(closed_address())
        flags = {"shm.socket": "off", "bulk.advertise": proxy.address}
        with sharded(flags) as shard:
            with driven(kind, options_of(shard.target, *ALL)) as driver:
                assert is_stored(driver)
                assert is_right(driver)
                assert driver.client.transport == "grpc"
            with driven(kind, options_of(shard.target, "bulk", deadline_ms=1000)) as driver:
                for _ in range(3):
                    began_s = time.monotonic()
                    got = driver.run(SPEC, lambda ns: ns.get(BLOCKS))
                    assert isinstance(got.failure, Unreachable)
                    assert (got.prefix_blocks, is_stored(driver)) == (0, False)
                    assert time.monotonic() - began_s < 3
                proxy.lead_to(shard.bulk)
                until(lambda: is_right(driver), "it does not come back", within_s=5)
                assert driver.client.transport == "bulk"


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_that_swallows_everything_costs_the_deadline(kind: str) -> None:
    with proxied() as proxy, sharded({"shm.socket": "off", "bulk.advertise": proxy.address}) as shard:
        proxy.lead_to(shard.bulk)
        with driven(kind, options_of(shard.target, "bulk")) as driver:
            assert is_stored(driver)
            proxy.is_deaf = True
            began_s = time.monotonic()
            got = driver.run(SPEC, lambda ns: ns.get(BLOCKS, deadline_ms=300))
            put = driver.run(SPEC, lambda ns: ns.put(keys(COUNT, "new"), VALUES, deadline_ms=300))
            assert isinstance(got.failure, (DeadlineExceeded, Unreachable))
            assert isinstance(put.failure, (DeadlineExceeded, Unreachable))
            assert time.monotonic() - began_s < 3  # Far above 600 ms for a busy machine, far below a hang.
            proxy.cut()
            proxy.is_deaf = False
            until(lambda: is_right(driver), "it does not come back", within_s=5)


# -- connections that are cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shm", "bulk"])
def test_a_cut_while_idle_is_not_noticed(kind: str, transport: str) -> None:
    with sharded() as shard, driven(kind, options_of(shard.target, transport)) as driver:
        assert is_stored(driver)
        assert is_right(driver)
        verbs: list[Callable[[Any], Any]] = [
            lambda ns: ns.match(BLOCKS),
            lambda ns: ns.get(BLOCKS[:1]),
            lambda ns: ns.put(keys(1, "more"), VALUES[:1]),
            lambda ns: ns.reserve(keys(1, "slot")),
            lambda ns: ns.delete(keys(1, "none")),
        ]
        for verb in verbs:
            assert shard.cut() >= 1
            if kind == "asyncio":  # Its loop must have heard of it: what is sent before that may have been lost.
                time.sleep(0.05)
            assert driver.run(SPEC, verb).failure is None
        assert is_right(driver)
        assert driver.client.stats().failures == {}
        assert (driver.client.stats().path_changes, driver.client.transport) == (0, transport)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shm", "bulk"])
def test_a_cut_in_the_middle_costs_time_only(kind: str, transport: str) -> None:
    """Gets and puts that are held at the shard, while all connections are closed."""
    points = {"get": "before.Get" if transport == "bulk" else "before.Acquire", "put": "put.commit"}
    others = [name for name in ALL if name != transport]
    with sharded() as shard, driven(kind, options_of(shard.target, transport, *others)) as driver:
        assert is_stored(driver)
        shard.arm(points["get"], "delay:10s*1")
        call = _Aside(lambda: is_right(driver))
        shard.until_hit(points["get"])
        assert shard.cut() >= 1
        assert call.result() is True
        new = keys(COUNT, "new")
        shard.arm("put.commit", "delay:10s*1")
        call = _Aside(lambda: is_stored(driver, new))
        shard.until_hit("put.commit")
        assert shard.cut() >= 1
        assert call.result() is True
        assert is_right(driver, new)
        assert is_right(driver)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_within_the_payload_is_made_up_by_another_way(kind: str) -> None:
    with proxied() as proxy, sharded({"shm.socket": "off", "bulk.advertise": proxy.address}) as shard:
        proxy.lead_to(shard.bulk)
        with driven(kind, options_of(shard.target, *ALL)) as driver:
            proxy.most_sent_bytes = SIZE
            assert is_stored(driver)
            proxy.cut()
            assert driver.client.stats().path_changes >= 1
            assert driver.client.stats().stored_parts + driver.client.stats().present_parts == COUNT
            proxy.most_sent_bytes, proxy.most_bytes = None, SIZE
            before = driver.client.stats().path_changes
            # The way that failed is left out for half a second, and then tried on the side first.
            until(lambda: is_right(driver) and driver.client.stats().path_changes > before, "it is not used again")
            assert driver.client.transport == "grpc"
            proxy.most_bytes = None
            until(lambda: is_right(driver) and driver.client.transport == "bulk", "bulk is not tried again")
        assert shard.ask(lambda local: local.gauge("stored_blocks")) == COUNT


@pytest.mark.parametrize("kind", KINDS)
def test_leases_outlive_the_way_they_came_by(kind: str) -> None:
    """Every way but gRPC goes away while leases are held: they are read, written, looked at and ended all the same."""
    with proxied() as proxy, sharded({"bulk.advertise": proxy.address}) as shard, ExitStack() as stack:
        driver = stack.enter_context(driven(kind, options_of(shard.target, *ALL)))
        run = driver.run
        assert is_stored(driver)
        lease, slots = run(SPEC, lambda ns: ns.acquire(BLOCKS)), run(SPEC, lambda ns: ns.reserve(keys(COUNT, "w")))
        unused, forgotten = run(SPEC, lambda ns: ns.acquire(BLOCKS)), run(SPEC, lambda ns: ns.reserve(keys(2, "f")))
        viewed = run(SPEC, lambda ns: ns.view(BLOCKS))
        assert driver.client.transport == "shm"
        os.unlink(shard.socket_path)
        shard.cut()
        read = run(SPEC, lambda ns: ns.read(lease))
        assert [bytes(v) for v in read.values or ()] == VALUES
        assert run(SPEC, lambda ns: ns.write(slots, VALUES)).stored == COUNT
        assert driver.client.transport == "grpc"
        assert run(SPEC, lambda ns: lease.release()) is True
        assert run(SPEC, lambda ns: unused.release()) is True
        assert run(SPEC, lambda ns: forgotten.abort()) is True
        assert [bytes(v) for v in getattr(viewed, "views", viewed)] == VALUES
        assert run(SPEC, lambda ns: viewed.close()) is True
        copied = run(SPEC, lambda ns: ns.view(keys(COUNT, "w")))
        assert [bytes(v) for v in getattr(copied, "views", copied)] == VALUES
        assert run(SPEC, lambda ns: copied.close()) is True
        assert driver.client.stats().failures == {}
        assert shard.ask(lambda local: local.gauge("leases")) == 0


async def test_a_call_that_grpc_gives_up_by_itself_is_no_cancellation_of_the_callers() -> None:
    connection = Connection(ClientOptions(closed_address()))
    call: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(connection._outcome(call))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(Unreachable, match="broke under a write"):
        await waiting
    call = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(connection._outcome(call))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert call.cancelled()
    await connection.close(0.1)


def test_concurrent_calls_share_the_fate_of_their_connection_and_all_succeed() -> None:
    """Fifty gets on one connection that is cut again and again."""

    async def hammer(driver: InLoop, shard: Shard) -> list[bool]:
        namespace = driver.client.namespace(SPEC)

        async def one(at: int) -> bool:
            into = [bytearray(SIZE)]
            got = await namespace.get([BLOCKS[at % COUNT]], into=into)
            return got.prefix_blocks == 1 and into[0] == VALUES[at % COUNT]

        gets = [asyncio.ensure_future(one(i)) for i in range(50)]
        for _ in range(3):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(shard.cut)
        return list(await asyncio.gather(*gets))

    with sharded() as shard:
        driver = InLoop(options_of(shard.target, "bulk", "grpc", deadline_ms=10_000))
        assert is_stored(driver)
        assert driver.wait(hammer(driver, shard)) == [True] * 50
        driver.close()


# -- regions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_registered_once_however_often_it_is_used(kind: str) -> None:
    size, count = 300_000, 800
    spec = kv_spec(part_bytes=size)
    with sharded({"shm.map_uids": "none"}) as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        with region_of(driver.client, 2 * MIB) as region:
            rooms = Rooms(region.memory)
            source, target = rooms.holding([value("once", size)])[0], rooms.of([size])[0]
            for i in range(count):
                block = keys(1, f"{i % 64}")
                assert driver.put(spec, block, [source]).ok
                assert driver.get(spec, block, [target]).prefix_blocks == 1
            assert target == source
            rooms.check()
        assert shard.ask(lambda local: local.server.shell.regions.registered_count) == 1
        assert driver.client.stats().fetched_blocks == count


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_given_back_is_let_go_by_the_shard(kind: str) -> None:
    """More regions in turn than a session may have at once."""
    with sharded({"shm.max_regions": "4"}) as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        for i in range(12):
            with region_of(driver.client, 4 * MIB) as region:
                rooms = Rooms(region.memory)
                assert driver.put(SPEC, keys(3, f"{i}"), rooms.holding(VALUES)).ok
                rooms.check()
                shard.until(lambda local: local.server.shell.regions.region_count == 1, "it is not registered")
                unregister(driver, region)
                shard.until(lambda local: local.server.shell.regions.region_count == 0, "it is still there")
        assert shard.ask(lambda local: local.server.shell.regions.registered_count) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_once_a_call_has_ended_the_shard_writes_nothing_more(kind: str) -> None:
    """A get into a region whose copy is late: what the caller does with the buffer afterwards stays."""
    with sharded({"shm.map_uids": "none"}) as shard, driven(kind, options_of(shard.target, "shm", "bulk")) as driver:
        assert is_stored(driver)
        with region_of(driver.client, 8 * MIB) as region:
            rooms = Rooms(region.memory)
            into = rooms.of([SIZE] * COUNT)
            assert driver.run(SPEC, lambda ns: ns.get(BLOCKS, into=into)).prefix_blocks == COUNT
            for _ in range(3):
                shard.arm("region.drain", "delay:100ms*1")
                got = driver.run(SPEC, lambda ns: ns.get(BLOCKS, into=into, deadline_ms=50))
                assert isinstance(got.failure, DeadlineExceeded)
                for room in into:
                    room[:] = b"\x77" * SIZE
                time.sleep(0.15)
                assert all(bytes(room) == b"\x77" * SIZE for room in into)
            shard.arm("region.fill", "delay:100ms*1")
            source = rooms.holding(VALUES)
            put = driver.run(SPEC, lambda ns: ns.put(keys(COUNT, "late"), source, deadline_ms=50))
            assert isinstance(put.failure, DeadlineExceeded)
            for room in source:
                room[:] = b"\x77" * SIZE
            time.sleep(0.15)
            found = driver.run(SPEC, lambda ns: ns.get(keys(COUNT, "late")))
            assert found.prefix_blocks == 0
            assert driver.run(SPEC, lambda ns: ns.get(BLOCKS, into=into)).prefix_blocks == COUNT
            assert [bytes(room) for room in into] == VALUES
            rooms.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_while_the_shard_copies_leaves_no_copy_behind(kind: str) -> None:
    """The put and the get go on by another way, and the region is registered anew."""
    flags = {"shm.map_uids": "none"}
    with sharded(flags) as shard, driven(kind, options_of(shard.target, *ALL)) as driver, ExitStack() as stack:
        region = stack.enter_context(region_of(driver.client, 8 * MIB))
        rooms = Rooms(region.memory)
        source, into = rooms.holding(VALUES), rooms.of([SIZE] * COUNT)
        for point, act in (
            ("region.fill", lambda ns: ns.put(BLOCKS, source)),
            ("region.drain", lambda ns: ns.get(BLOCKS, into=into)),
        ):
            shard.arm(point, "delay:300ms*1")
            call = _Aside(partial(driver.run, SPEC, act))
            shard.until_hit(point)
            assert shard.cut() >= 1
            assert call.result().failure is None

            def works(act: Callable[[Any], Any] = act) -> bool:
                return driver.run(SPEC, act).failure is None and driver.client.transport == "shm"

            until(works, "shared memory is not used again")
        assert [bytes(room) for room in into] == VALUES
        rooms.check()


# -- another life of the shard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_crash_the_new_life_is_mapped_and_nothing_of_the_old_one_is_believed(kind: str, tmp_path: Path) -> None:
    flags = {"hot.capacity": "16MiB", "shm.socket": str(tmp_path / "s")}
    options = partial(options_of, deadline_ms=20_000)
    with serving(flags) as first, driven(kind, options(first.target, "shm")) as driver, ExitStack() as stack:
        region = stack.enter_context(region_of(driver.client, 8 * MIB))
        rooms = Rooms(region.memory)
        source, into = rooms.holding(VALUES), rooms.of([SIZE] * COUNT)
        assert driver.run(SPEC, lambda ns: ns.put(BLOCKS, source)).ok
        assert driver.run(SPEC, lambda ns: ns.get(BLOCKS, into=into)).prefix_blocks == COUNT
        viewed = driver.run(SPEC, lambda ns: ns.view(BLOCKS))
        views: BlockViews = getattr(viewed, "views", viewed)
        arrays = [views.array(i) for i in range(COUNT)]
        generation = driver.client.generation
        first.kill()
        with serving(flags, target=first.target) as second:
            other = [value(("other", i), SIZE) for i in range(COUNT)]
            source = rooms.holding(other)
            until(lambda: bool(driver.run(SPEC, lambda ns: ns.put(BLOCKS, source)).ok), "it does not come back")
            for _ in range(5):
                assert driver.run(SPEC, lambda ns: ns.get(BLOCKS, into=into)).prefix_blocks == COUNT
                assert [bytes(room) for room in into] == other
            assert driver.client.generation != generation
            assert driver.client.transport == "shm"
            assert not views.held
            with pytest.raises(LeaseExpired):
                views[0]
            assert driver.run(SPEC, lambda ns: viewed.close()) is False
            assert [array.tobytes() for array in arrays] == VALUES, "the old memory is what it was"
            again = driver.run(SPEC, lambda ns: ns.view(BLOCKS))
            assert [bytes(v) for v in getattr(again, "views", again)] == other
            assert driver.run(SPEC, lambda ns: again.close()) is True
            assert _gauges(second)["regions_registered"] == 1
            rooms.check()


def _gauges(server: ServerProcess) -> dict[str, int]:
    with admin_peer(server.admin_target, deadline_s=10) as admin:
        return {gauge.name: gauge.value for gauge in admin.stats().gauges}


def test_connections_to_lives_that_have_ended_are_closed(tmp_path: Path) -> None:
    flags = {"hot.capacity": "8MiB", "shm.socket": str(tmp_path / "s")}
    with serving(flags) as first:
        driver = Blocking(options_of(first.target, "shm", "bulk", deadline_ms=20_000))
        assert is_stored(driver)
        first.kill()
        counts = []
        for _ in range(3):
            with serving(flags, target=first.target):
                until(lambda: is_stored(driver), "it does not come back")
                assert is_right(driver)
                counts.append(len(os.listdir("/proc/self/fd")))
        assert max(counts) - counts[0] <= 1, f"descriptors grow with each life: {counts}"
        driver.close()
