"""Every verb and shape of call, by every kind of client, over every way to a shard: the same results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from kvstore_client import BlockState, Coverage, InvalidArgument, NamespaceSpec, PartState, Range, Verify
from kvstore_wire.errors import NamespaceMismatch
from tests.integration.client_cases import keys, kv_spec, opaque_spec, value
from tests.integration.transport_scene import MIB, Driver, Rooms, Shard, driven, options_of, region_of, sharded

pytestmark = pytest.mark.integration
HIT, MISS, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND
COMMITTED, PRESENT = PartState.COMMITTED, PartState.PRESENT
SIZES = (1, 511, 4095, 4096, 4097, 300_000, 3_098_112)
ROOM_BYTES = 24 * MIB

# Way -> (transport, whether the shard gives its memory, whether the buffers lie in a region).
WAYS = {
    "grpc": ("grpc", True, False),
    "bulk": ("bulk", True, False),
    "shm": ("shm", True, False),
    "shm region": ("shm", True, True),
    "shm unmapped": ("shm", False, False),
    "shm copied": ("shm", False, True),
}


@dataclass(frozen=True)
class Scene:
    """One client at one shard, and memory for its buffers."""

    driver: Driver
    rooms: Rooms
    transport: str
    shard: Shard
    label: str

    def kv(self, part_bytes: int, *, layer_groups: int = 1) -> NamespaceSpec:
        name = f"kv{part_bytes}/{self.label}"
        return replace(kv_spec(name, part_bytes=part_bytes, layer_groups=layer_groups), model=self.label)

    def opaque(self) -> NamespaceSpec:
        return replace(opaque_spec(f"opaque/{self.label}", part_bytes=4 * MIB), model=self.label)

    def check(self) -> None:
        """No byte was written beside a buffer, and the last call went the way it was to go."""
        self.rooms.check()
        assert self.driver.client.transport == self.transport


@pytest.fixture(scope="module")
def shards() -> Iterator[dict[bool, Shard]]:
    with sharded({"hot.capacity": "96MiB"}) as mapped, sharded({"hot.capacity": "64MiB", "shm.map_uids": "none"}) as no:
        yield {True: mapped, False: no}


@contextmanager
def opened(
    shards: dict[bool, Shard], kind: str, way: str, *, verify: Verify = Verify.ON, label: str = ""
) -> Iterator[Scene]:
    transport, is_mapped, in_region = WAYS[way]
    shard = shards[is_mapped]
    with ExitStack() as stack:
        driver = stack.enter_context(driven(kind, options_of(shard.target, transport, verify=verify)))
        if in_region:
            memory = stack.enter_context(region_of(driver.client, ROOM_BYTES)).memory
        else:
            memory = memoryview(bytearray(ROOM_BYTES))
        yield Scene(driver, Rooms(memory), transport, shard, label or f"{kind}/{way}")


@pytest.fixture(
    scope="module",
    params=[
        *(f"{kind}, {way}" for kind in ("blocking", "asyncio") for way in WAYS),
        *(f"tickets, {way}" for way in ("bulk", "shm region")),
    ],
)
def client_scene(shards: dict[bool, Shard], request: pytest.FixtureRequest) -> Iterator[Scene]:
    kind, way = request.param.split(", ")
    with opened(shards, kind, way) as made:
        yield made


@pytest.fixture
def scene(client_scene: Scene, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """One client for all tests, with blocks and buffers of each test's own."""
    made = replace(client_scene, label=f"{client_scene.label}/{request.node.originalname[5:30]}")
    made.rooms.clear()
    yield made
    made.check()


def whole(rooms: Sequence[memoryview]) -> list[bytes]:
    return [bytes(room) for room in rooms]


def raised(call: Callable[[], Any]) -> None:
    """Raises what a call raises; of a ticket, what its result says was raised."""
    failure = call().failure
    if failure is not None:
        raise failure


def test_parts_of_every_size_come_back(scene: Scene) -> None:
    for size in SIZES:
        count = 3 if size < MIB else 2
        spec, blocks = scene.kv(size), keys(count, f"{size}")
        values = [value((size, i), size) for i in range(count)]
        put = scene.driver.put(spec, blocks, scene.rooms.holding(values))
        assert (put.ok, put.stored, put.failure) == (True, count, None), size
        into = scene.rooms.of([size] * count)
        got = scene.driver.get(spec, blocks, into)
        assert (got.prefix_blocks, got.size_bytes, got.failure) == (count, count * size, None)
        assert whole(into) == values
        made = scene.driver.get(spec, blocks)
        assert whole([v for v in made.values or () if v is not None]) == values
        again = scene.driver.put(spec, blocks, values)
        assert (again.stored, again.present) == (0, count)
        scene.check()


def test_parts_of_a_block_are_stored_and_read_alone(scene: Scene) -> None:
    size = 200_000
    spec, blocks = scene.kv(size, layer_groups=4), keys(3, "parts")
    values = [value(("part", i), size) for i in range(12)]
    middle = [v for i, v in enumerate(values) if i % 4 in (1, 2)]
    put = scene.driver.run(spec, lambda ns: ns.put(blocks, scene.rooms.holding(middle), parts=(1, 2)))
    assert put.stored == 6
    assert scene.driver.run(spec, lambda ns: ns.match(blocks)).prefix_blocks == 0
    assert scene.driver.run(spec, lambda ns: ns.match(blocks, parts=(2,))).prefix_blocks == 3
    rest = scene.driver.run(spec, lambda ns: ns.put(blocks, scene.rooms.holding(values)))
    assert (rest.stored, rest.present) == (6, 6)
    into = scene.rooms.of([size] * 6)
    got = scene.driver.run(spec, lambda ns: ns.get(blocks, into=into, parts=(0, 3)))
    assert got.prefix_blocks == 3
    assert whole(into) == [v for i, v in enumerate(values) if i % 4 in (0, 3)]
    assert whole(scene.driver.run(spec, lambda ns: ns.get(blocks)).values) == values


def test_values_of_any_size_with_empty_ones(scene: Scene) -> None:
    spec, sizes = scene.opaque(), [0, 1, 4096, 0, 700_000, 3_098_112]
    blocks, values = keys(7, "any"), [value(("any", i), size) for i, size in enumerate(sizes)]
    put = scene.driver.run(spec, lambda ns: ns.put(blocks[:6], scene.rooms.holding(values)))
    assert (put.ok, put.stored) == (True, 6)
    got = scene.driver.run(spec, lambda ns: ns.get(blocks, coverage=Coverage.EACH))
    assert got.states == bytes((HIT,) * 6 + (MISS,))
    assert [None if v is None else bytes(v) for v in got.values] == [*values, None]
    assert got.lengths[:, 0].tolist() == [*sizes, 0]
    into = scene.rooms.of([size + 100 for size in sizes])
    larger = scene.driver.run(spec, lambda ns: ns.get(blocks[:6], into=into))
    assert larger.prefix_blocks == 6
    assert [bytes(room[:size]) for room, size in zip(into, sizes, strict=True)] == values
    assert all(bytes(room[size:]) == b"\xee" * 100 for room, size in zip(into, sizes, strict=True))


def test_a_value_larger_than_its_buffer_is_a_miss(scene: Scene) -> None:
    spec, blocks = scene.opaque(), keys(3, "large")
    values = [value(i, size) for i, size in enumerate((1000, 900_000, 2000))]
    assert scene.driver.run(spec, lambda ns: ns.put(blocks, values)).ok
    into = scene.rooms.of([1000, 899_999, 2000])
    got = scene.driver.run(spec, lambda ns: ns.get(blocks, into=into, coverage=Coverage.EACH))
    assert got.states == bytes((HIT, MISS, HIT))
    assert got.mismatched_blocks == 1
    assert [bytes(into[0]), bytes(into[2])] == [values[0], values[2]]
    assert bytes(into[1]) == b"\xee" * 899_999
    fixed = scene.kv(5000)
    for size in (4999, 5001):
        with pytest.raises(InvalidArgument, match=r"into\[0\].*exactly 5000 bytes"):
            raised(partial(scene.driver.get, fixed, keys(1), [bytearray(size)]))


def test_values_in_slices(scene: Scene) -> None:
    size = 600_000
    spec, blocks = scene.kv(size), keys(2, "slices")
    values = [value(("slice", i), size) for i in range(2)]
    cuts = [(0, 1), (1, 1), (1, 4097), (4097, 300_000), (300_000, size)]
    parts = [scene.rooms.holding([v[a:b] for a, b in cuts]) for v in values]
    assert scene.driver.run(spec, lambda ns: ns.put(blocks, parts)).ok
    into = [scene.rooms.of([b - a for a, b in cuts]) for _ in values]
    assert scene.driver.run(spec, lambda ns: ns.get(blocks, into=into)).prefix_blocks == 2
    assert [b"".join(map(bytes, slices)) for slices in into] == values


def test_a_hole_ends_a_prefix_but_not_a_set(scene: Scene) -> None:
    size = 150_000
    spec, blocks = scene.kv(size), keys(5, "holes")
    values = [value(("hole", i), size) for i in range(5)]
    for i in (0, 1, 3, 4):
        assert scene.driver.put(spec, [blocks[i]], scene.rooms.holding([values[i]])).ok
    into = scene.rooms.of([size] * 5)
    got = scene.driver.run(spec, lambda ns: ns.get(blocks, into=into))
    assert got.states == bytes((HIT, HIT, MISS, BEYOND, BEYOND))
    assert whole(into[:2]) == values[:2]
    into = scene.rooms.of([size] * 5)
    each = scene.driver.run(spec, lambda ns: ns.get(blocks, into=into, coverage=Coverage.EACH))
    assert each.states == bytes((HIT, HIT, MISS, HIT, HIT))
    assert [bytes(into[i]) for i in (0, 1, 3, 4)] == [values[i] for i in (0, 1, 3, 4)]
    nothing = scene.driver.run(spec, lambda ns: ns.get(keys(4, "none"), into=scene.rooms.of([size] * 4)))
    assert (nothing.states, nothing.failure) == (bytes((MISS, BEYOND, BEYOND, BEYOND)), None)
    assert scene.driver.run(spec, lambda ns: ns.match(blocks)).states == bytes((HIT, HIT, MISS, BEYOND, BEYOND))


def test_a_reader_waits_for_a_writer(scene: Scene) -> None:
    size = 400_000
    spec, blocks = scene.kv(size), keys(2, "wait")
    values = [value(("wait", i), size) for i in range(2)]
    with driven("blocking", options_of(scene.shard.target, "grpc")) as writer:
        slots = writer.run(spec, lambda ns: ns.reserve(blocks))
        assert slots.created == (0, 1)
        timer = threading.Timer(0.05, lambda: writer.run(spec, lambda ns: ns.write(slots, values)))
        timer.start()
        into = scene.rooms.of([size] * 2)
        got = scene.driver.run(spec, lambda ns: ns.get(blocks, into=into, wait_ms=4000))
        assert (got.prefix_blocks, got.failure) == (2, None)
        assert whole(into) == values
        timer.join()
        with writer.run(spec, lambda ns: ns.reserve(keys(1, "never"))):
            late = scene.driver.run(spec, lambda ns: ns.get(keys(1, "never"), wait_ms=20))
            assert (late.prefix_blocks, late.failure) == (0, None)


def test_ranges_of_every_part(scene: Scene) -> None:
    size = 1 * MIB
    spec, blocks = scene.kv(size), keys(3, "ranges")
    values = [value(("range", i), size) for i in range(3)]
    assert scene.driver.run(spec, lambda ns: ns.put(blocks, values)).ok
    heads = Range(offset=4096, length=1000, stride=10_000, count=90)
    tail = Range(offset=size - 7, length=7)
    into = scene.rooms.of([90_007] * 3)
    got = scene.driver.run(spec, lambda ns: ns.get(blocks, into=into, ranges=(heads, tail)))
    assert (got.prefix_blocks, got.size_bytes) == (3, 3 * 90_007)
    chosen = [b"".join(v[4096 + 10_000 * i :][:1000] for i in range(90)) + v[-7:] for v in values]
    assert whole(into) == chosen
    assert whole(scene.driver.run(spec, lambda ns: ns.get(blocks, ranges=(heads, tail))).values) == chosen


def test_leases_are_read_and_written(scene: Scene) -> None:
    size = 500_000
    spec, blocks = scene.kv(size), keys(4, "lease")
    values = [value(("lease", i), size) for i in range(4)]
    run = scene.driver.run
    slots = run(spec, lambda ns: ns.reserve(blocks))
    assert slots.created == (0, 1, 2, 3)
    wrote = run(spec, lambda ns: ns.write(slots, scene.rooms.holding(values)))
    assert (wrote.ok, wrote.stored) == (True, 4)
    lease = run(spec, lambda ns: ns.acquire([*blocks, *keys(1, "no")]))
    assert lease.states == bytes((HIT,) * 4 + (MISS,))
    into = scene.rooms.of([size] * 4)
    read = run(spec, lambda ns: ns.read(lease, into))
    assert (read.failure, read.corrupt) == (None, ())
    assert whole(into) == values
    assert whole(run(spec, lambda ns: ns.read(lease)).values) == values
    assert run(spec, lambda ns: ns.renew([lease])).valid == (True,)
    assert run(spec, lambda ns: lease.release()) is True
    assert run(spec, lambda ns: lease.release()) is False
    held = run(spec, lambda ns: ns.reserve(keys(2, "aborted")))
    assert run(spec, lambda ns: held.abort()) is True
    assert run(spec, lambda ns: ns.match(keys(2, "aborted"))).prefix_blocks == 0
    late = run(spec, lambda ns: ns.read(lease))
    assert late.failure is not None


def test_other_verbs(scene: Scene) -> None:
    spec, blocks = scene.kv(1000), keys(3, "other")
    run = scene.driver.run
    assert run(spec, lambda ns: ns.put(blocks, [value(i, 1000) for i in range(3)])).ok
    assert run(spec, lambda ns: ns.over(blocks)).failure is None
    told = run(spec, lambda ns: ns.explain([*blocks, *keys(1, "none")]))
    assert (told.digest, told.first_missing) == (spec.digest, 3)
    assert run(spec, lambda ns: ns.delete([blocks[1], *keys(1, "none")])).states == b"\x01\x00"
    assert run(spec, lambda ns: ns.match(blocks)).states == bytes((HIT, MISS, BEYOND))
    other = replace(spec, part_bytes=2000)
    with pytest.raises(NamespaceMismatch, match="part_bytes"):
        raised(lambda: run(other, lambda ns: ns.match(blocks)))


def test_no_tenant_sees_another_ones_blocks(scene: Scene) -> None:
    """Every call of one tenant finds nothing of the other, though name, model and keys are the same."""
    size, blocks = 300_000, keys(3, "tenants")
    first, second = (replace(scene.kv(size), tenant=tenant) for tenant in ("one", "two"))
    mine, theirs = [value(("one", i), size) for i in range(3)], [value(("two", i), size) for i in range(3)]
    run = scene.driver.run
    assert run(first, lambda ns: ns.put(blocks, scene.rooms.holding(mine))).ok
    _sees_nothing(scene, second, blocks, size)
    assert run(second, lambda ns: ns.put(blocks, scene.rooms.holding(theirs))).stored == 3
    for spec, values in ((first, mine), (second, theirs)):
        into = scene.rooms.of([size] * 3)
        assert scene.driver.get(spec, blocks, into).prefix_blocks == 3
        assert whole(into) == values
        viewed = run(spec, lambda ns: ns.view(blocks))
        assert whole(list(getattr(viewed, "views", viewed))) == values
        assert _closed(scene, spec, viewed) is True
    assert run(first, lambda ns: ns.delete(blocks)).states == b"\x01\x01\x01"
    _sees_nothing(scene, first, blocks, size)
    assert run(second, lambda ns: ns.match(blocks)).prefix_blocks == 3


def _closed(scene: Scene, spec: NamespaceSpec, viewed: Any) -> Any:
    return scene.driver.run(spec, lambda ns: viewed.close())


def _sees_nothing(scene: Scene, spec: NamespaceSpec, blocks: list[bytes], size: int) -> None:
    run = scene.driver.run
    into = scene.rooms.of([size] * 3)
    assert run(spec, lambda ns: ns.match(blocks)).states[:1] == bytes((MISS,))
    assert run(spec, lambda ns: ns.get(blocks, into=into)).prefix_blocks == 0
    assert run(spec, lambda ns: ns.get(blocks, coverage=Coverage.EACH)).states == bytes((MISS,) * 3)
    assert all(bytes(room) == b"\xee" * size for room in into)
    assert run(spec, lambda ns: ns.acquire(blocks)).held is False
    viewed = run(spec, lambda ns: ns.view(blocks))
    assert len(getattr(viewed, "views", viewed)) == 0
    run(spec, lambda ns: viewed.close())
    assert run(spec, lambda ns: ns.explain(blocks)).first_missing == 0
    assert run(spec, lambda ns: ns.delete(blocks)).states == b"\x00\x00\x00"
    assert run(spec, lambda ns: ns.over(blocks)).blocks == 0


@pytest.mark.parametrize("way", WAYS)
def test_without_verification_bytes_come_and_are_counted(shards: dict[bool, Shard], way: str) -> None:
    size = 400_000
    with opened(shards, "blocking", way, verify=Verify.OFF, label=f"off/{way}") as scene:
        spec, blocks, values = scene.kv(size), keys(3), [value(("off", i), size) for i in range(3)]
        assert scene.driver.run(spec, lambda ns: ns.put(blocks, scene.rooms.holding(values))).ok
        into = scene.rooms.of([size] * 3)
        assert scene.driver.run(spec, lambda ns: ns.get(blocks, into=into)).prefix_blocks == 3
        assert whole(into) == values
        assert scene.driver.client.stats().unverified_parts == 3
        scene.check()


@pytest.mark.parametrize("way", WAYS)
def test_some_parts_of_a_lease_are_committed(shards: dict[bool, Shard], way: str) -> None:
    """A part that nobody filled or named stays unseen; one committed with another checksum is found out by readers."""
    size = 300_000
    with opened(shards, "blocking", way, label=f"some/{way}") as scene:
        spec, run = scene.kv(size), scene.driver.run
        slots = run(spec, lambda ns: ns.reserve(keys(3)))
        unfilled = slots.commit([1, 2], (0, 2))
        assert unfilled.states == bytes((PartState.UNFILLED,) * 2)
        assert run(spec, lambda ns: ns.match(keys(3), coverage=Coverage.EACH)).states.count(HIT) == 0
        assert slots.abort() is True
        wrote: Any = run(spec, lambda ns: ns.put(keys(3), scene.rooms.holding([value(i, size) for i in range(3)])))
        assert wrote.states == bytes((COMMITTED,) * 3)
        assert run(spec, lambda ns: ns.reserve(keys(4))).states == bytes((PRESENT,) * 3 + (PartState.CREATED,))
        scene.check()
