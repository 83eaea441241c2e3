"""Memory that the shard maps: regions that cannot shrink, the client's own (`allocate`) before all."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.service.copier import MAPPED_SLICE_BYTES
from kvstore.service.regions import Region as ShardRegion
from kvstore_client import AsyncClient, Client, InvalidArgument, NamespaceSpec, Region
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.server_process import LocalServer
from tests.integration.transport_scene import (
    DRIVERS,
    MIB,
    Driver,
    Rooms,
    Shard,
    driven,
    options_of,
    region_of,
    sharded,
    until,
)
from tests.unit.test_service_regions import maps_of, sealed_memfd

pytestmark = pytest.mark.integration
IS_STRICT = Path("/proc/sys/vm/overcommit_memory").read_text() == "2\n"
SIZE = 400_000


@pytest.fixture(scope="module")
def shards() -> Iterator[dict[bool, Shard]]:
    """By whether they give their memory to clients."""
    with sharded({"hot.capacity": "64MiB"}) as mapped, sharded({"hot.capacity": "64MiB", "shm.map_uids": "none"}) as no:
        yield {True: mapped, False: no}


@pytest.fixture
def shard(shards: dict[bool, Shard]) -> Shard:
    return shards[True]


def _spec(request: pytest.FixtureRequest, part_bytes: int = SIZE) -> NamespaceSpec:
    """A namespace, and blocks, of the test's own."""
    name = request.node.name.removeprefix("test_")
    return replace(kv_spec(name, part_bytes=part_bytes), model=name)


def _inode(region: Region) -> int:
    return os.fstat(region.fd).st_ino


def _at_shard(local: LocalServer, inode: int) -> list[ShardRegion]:
    sessions = local.server.shell.regions._sessions.values()
    return [each for own in sessions for each in own.regions.values() if each.file[1] == inode]


def _is_mapped(shard: Shard, region: Region) -> list[bool]:
    """Of each registration of a region."""
    inode = _inode(region)
    return shard.ask(lambda local: [each.mapped is not None for each in _at_shard(local, inode)])


def _files() -> list[int]:
    """The file of each descriptor of allocated memory that this process has, the shard and the clients in it."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the listing itself, and what is closed meanwhile.
            place = f"/proc/self/fd/{fd}"
            if "memfd:kvstore-region" in os.readlink(place):
                found.append(os.stat(place).st_ino)
    return sorted(found)


@contextmanager
def _copied_by_the_shard(shard: Shard, verb: str = "fill") -> Iterator[None]:
    """Fails if the shard did not copy from (or to) a region inside."""
    shard.arm(f"region.{verb}", "delay:1ms*1")
    try:
        yield
        shard.until_hit(f"region.{verb}")
    finally:
        shard.disarm(f"region.{verb}")


@contextmanager
def _through_the_socket(shard: Shard) -> Iterator[None]:
    """Fails if the shard copied from or to a region inside."""
    points = ("region.fill", "region.drain")
    for point in points:
        shard.arm(point, "fail")
    try:
        yield
        assert shard.ask(lambda local: all(map(local.failpoints.any_armed, points)))
    finally:
        for point in points:
            shard.disarm(point)


def _check_read(shard: Shard, spec: NamespaceSpec, blocks: Sequence[bytes], values: Sequence[bytes]) -> None:
    """Another client, which has no part in any region, gets these values."""
    with driven("blocking", options_of(shard.target, "grpc")) as other:
        got = other.get(spec, blocks)
        assert got.prefix_blocks == len(blocks)
        assert [bytes(each or b"") for each in got.values or ()] == list(values)


# -- allocate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRIVERS)
def test_allocated_memory_is_zero_and_mapped_by_the_shard(
    shard: Shard, kind: str, request: pytest.FixtureRequest
) -> None:
    spec, blocks = _spec(request), keys(5)
    values = [value((kind, i), SIZE) for i in range(5)]
    with driven(kind, options_of(shard.target, "shm")) as driver:
        region = driver.client.allocate(4 * MIB + 1)
        assert (region.length, len(region.memory), bytes(region.memory)) == (4 * MIB + 1,) * 2 + (bytes(4 * MIB + 1),)
        rooms = Rooms(region.memory)
        for first in (0, 2):  # The second is not registered again.
            with _copied_by_the_shard(shard):
                put = driver.put(spec, blocks[first : first + 3], rooms.holding(values[first : first + 3]))
            assert (put.ok, put.failure) == (True, None)
        assert _is_mapped(shard, region) == [not IS_STRICT]
        _check_read(shard, spec, blocks, values)
        rooms.check()
        assert driver.client.transport == "shm"


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_shard_writes_into_allocated_memory(
    shards: dict[bool, Shard], kind: str, request: pytest.FixtureRequest
) -> None:
    shard, spec, blocks = shards[False], _spec(request), keys(3)
    values = [value((kind, i), SIZE) for i in range(3)]
    with driven(kind, options_of(shard.target, "shm")) as driver:
        region = driver.client.allocate(8 * MIB)
        rooms = Rooms(region.memory)
        assert driver.put(spec, blocks, rooms.holding(values)).ok
        into = rooms.of([SIZE] * 3)
        with _copied_by_the_shard(shard, "drain"):
            assert driver.get(spec, blocks, into).prefix_blocks == 3
        assert [bytes(room) for room in into] == values
        rooms.check()
        again = rooms.holding([bytes(room) for room in into])  # What the shard wrote is what it reads.
        assert driver.put(spec, keys(3, "again"), again).ok
        _check_read(shard, spec, keys(3, "again"), values)


@pytest.mark.parametrize("transport", ["bulk", "grpc"])
@pytest.mark.parametrize("kind", DRIVERS)
def test_over_other_transports_it_is_memory_like_any_other(
    shard: Shard, kind: str, transport: str, request: pytest.FixtureRequest
) -> None:
    spec, blocks = _spec(request), keys(3)
    values = [value((kind, transport, i), SIZE) for i in range(3)]
    with driven(kind, options_of(shard.target, transport)) as driver:
        region = driver.client.allocate(4 * MIB)
        rooms, inode = Rooms(region.memory), _inode(region)
        with _through_the_socket(shard):
            assert driver.put(spec, blocks, rooms.holding(values)).ok
            into = rooms.of([SIZE] * 3)
            assert driver.get(spec, blocks, into).prefix_blocks == 3
        assert [bytes(room) for room in into] == values
        rooms.check()
        assert _is_mapped(shard, region) == []
        assert maps_of(inode) == ["rw-s"]
        assert driver.client.transport == transport


@pytest.mark.parametrize("length", [0, -1, "x", 1.5, None, True, 1 << 50, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 70])
@pytest.mark.parametrize("kind", DRIVERS)
def test_a_length_that_cannot_be_had_is_refused_by_name(shard: Shard, kind: str, length: int) -> None:
    with driven(kind, options_of(shard.target, "shm")) as driver:
        shard.until(lambda local: not local.server.shell.regions.region_count, "a region is left")
        gc.collect()
        before = _files()
        with pytest.raises(InvalidArgument) as caught:
            driver.client.allocate(length)
        assert caught.value.field == "length"
        assert _files() == before
        assert len(driver.client.allocate(1).memory) == 1


# -- what is mapped --------------------------------------------------------------------------------------------------


def test_memory_of_the_caller_s_own_is_mapped_where_it_cannot_shrink(
    shard: Shard, request: pytest.FixtureRequest
) -> None:
    """At its own bytes, wherever in its file they lie."""
    spec, at, fd = _spec(request), 4096 + 12, sealed_memfd(4 * MIB)
    values = [value(i, SIZE) for i in range(4)]
    with driven("blocking", options_of(shard.target, "shm")) as driver:
        sealed = driver.client.register(fd, offset=at, length=2 * MIB)
        os.close(fd)
        with region_of(driver.client, 2 * MIB) as plain:
            for region, blocks, mine in ((sealed, keys(2), values[:2]), (plain, keys(2, "plain"), values[2:])):
                with _copied_by_the_shard(shard):
                    assert driver.put(spec, blocks, Rooms(region.memory).holding(mine)).ok
                _check_read(shard, spec, blocks, mine)
            assert (_is_mapped(shard, sealed), _is_mapped(shard, plain)) == ([not IS_STRICT], [False])


@pytest.mark.parametrize(("part_bytes", "slices"), [(64 << 10, 16), (64 << 10, 1), (2 * MIB, 1), (2 * MIB, 16)])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("gives_memory", [True, False])
def test_parts_of_short_and_of_long_slices_are_right(
    shards: dict[bool, Shard],
    kind: str,
    gives_memory: bool,
    part_bytes: int,
    slices: int,
    request: pytest.FixtureRequest,
) -> None:
    """The slices of a part lie apart, as of a layer each: what lies side by side belongs to different parts."""
    shard, spec, count = shards[gives_memory], _spec(request, part_bytes), 6
    step = part_bytes // slices
    assert (step < MAPPED_SLICE_BYTES) == (slices == 16 and part_bytes == 64 << 10)
    blocks, values = keys(count), [value((kind, part_bytes, i), part_bytes) for i in range(count)]
    with driven(kind, options_of(shard.target, "shm")) as driver:
        region = driver.client.allocate(2 * count * part_bytes)
        memory = region.memory

        def room(part: int, number: int, base: int) -> memoryview:
            at = base + (number * count + part) * step
            return memory[at : at + step]

        sources, targets = (
            [[room(i, n, base) for n in range(slices)] for i in range(count)] for base in (0, count * part_bytes)
        )
        for part, data in zip(sources, values, strict=True):
            for n, view in enumerate(part):
                view[:] = data[n * step : (n + 1) * step]
        with _copied_by_the_shard(shard):
            assert driver.put(spec, blocks, sources).ok
        _check_read(shard, spec, blocks, values)
        assert driver.get(spec, blocks, targets).prefix_blocks == count
        assert [b"".join(part) for part in targets] == values
        assert _is_mapped(shard, region) == [not IS_STRICT]


@pytest.mark.parametrize("straddling", ["beyond its end", "before its start", "outside"])
def test_values_that_are_not_all_in_the_region_go_through_the_socket(
    shard: Shard, straddling: str, request: pytest.FixtureRequest
) -> None:
    spec, blocks, fd = _spec(request), keys(3), sealed_memfd(6 * MIB)
    values = [value((straddling, i), SIZE) for i in range(3)]
    last = {"beyond its end": 4 * MIB - 1, "before its start": 2 * MIB - SIZE + 1, "outside": 4 * MIB}[straddling]
    memory = memoryview(mmap.mmap(fd, 6 * MIB))
    with driven("blocking", options_of(shard.target, "shm")) as driver:
        driver.client.register(fd, offset=2 * MIB, length=2 * MIB, buffer=memory[2 * MIB : 4 * MIB])
        os.close(fd)
        rooms = [memory[at : at + SIZE] for at in (2 * MIB + 1, 3 * MIB, last)]
        for room, data in zip(rooms, values, strict=True):
            room[:] = data
        with _through_the_socket(shard):
            assert driver.put(spec, blocks, rooms).ok
        _check_read(shard, spec, blocks, values)
        with _copied_by_the_shard(shard):  # As it is with those that are.
            assert driver.put(spec, keys(2, "inside"), rooms[:2]).ok
        assert driver.client.transport == "shm"


# -- ends ------------------------------------------------------------------------------------------------------------


def _used(driver: Driver, shard: Shard, spec: NamespaceSpec) -> tuple[Region, int]:
    """Memory that the shard has copied from, and its file."""
    region = driver.client.allocate(2 * MIB)
    with _copied_by_the_shard(shard):
        assert driver.put(spec, keys(2), Rooms(region.memory).holding([value(i, SIZE) for i in range(2)])).ok
    inode = _inode(region)
    ours = [] if IS_STRICT else ["r--s"]
    assert sorted(maps_of(inode)) == [*ours, "rw-s"]
    return region, inode


def _unregister(driver: Driver, spec: NamespaceSpec, region: Region) -> None:
    driver.run(spec, lambda _: driver.client.unregister(region))


@pytest.mark.parametrize("kind", DRIVERS)
def test_memory_that_is_unregistered_is_let_go_of_by_the_shard(
    shard: Shard, kind: str, request: pytest.FixtureRequest
) -> None:
    with driven(kind, options_of(shard.target, "shm")) as driver:
        spec = _spec(request)
        region, inode = _used(driver, shard, spec)
        _unregister(driver, spec, region)
        if isinstance(driver.client, AsyncClient):  # It tells the shard on the side.
            until(lambda: maps_of(inode) == ["rw-s"], "the shard keeps its mapping")
        assert maps_of(inode) == ["rw-s"], "the shard keeps its mapping"
        assert shard.ask(lambda local: _at_shard(local, inode)) == []
        assert _files().count(inode) == 1, "more is open than what the caller's own mapping holds"
        del region
        gc.collect()
        assert (maps_of(inode), _files().count(inode)) == ([], 0)


@pytest.mark.parametrize("end", ["client", "session"])
def test_memory_goes_with_its_session(shard: Shard, end: str, request: pytest.FixtureRequest) -> None:
    with driven("blocking", options_of(shard.target, "shm")) as driver:
        spec = _spec(request)
        region, inode = _used(driver, shard, spec)
        if end == "session":
            shard.end_sessions()
        else:
            assert isinstance(driver.client, Client)
            driver.client.close()
        until(lambda: maps_of(inode) == ["rw-s"], "the shard keeps its mapping")
        ours = 2 if end == "session" else 1  # That of the region, and of its mapping here.
        until(lambda: _files().count(inode) == ours, "the shard keeps its descriptor")
        if end == "session":  # The next session registers it anew.
            with _copied_by_the_shard(shard):
                values = Rooms(region.memory).holding([value(i, SIZE) for i in range(2)])
                assert driver.put(_spec(request), keys(2, "again"), values).ok
            assert _is_mapped(shard, region) == [not IS_STRICT]
