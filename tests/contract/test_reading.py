"""Match, Acquire and Get: one answer an item, in order, and nothing that is not committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from kvstore_wire.errors import InvalidArgument, LeaseExpired, Unsupported
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import (
    BEYOND,
    BUSY,
    COMMITTED,
    EACH,
    HOT,
    IN_FLIGHT,
    MISSING,
    PREFIX,
    Got,
    checksum,
    collect,
    value,
)
from tests.contract.conftest import OpenShard, Shard
from tests.contract.doors import HANG_S
from tests.shards import key, keys, kv_spec, opaque_spec

PART_BYTES = 4096
V = [value(i, PART_BYTES) for i in range(8)]


async def test_batches_answer_each_key_in_order(shard: Shard) -> None:
    caller = await shard.caller()
    assert await caller.put(keys(0, 3), V[:3]) == [COMMITTED] * 3
    asked = [key(2), key(9), key(0), key(2), key(8), key(1)]
    states = [HOT, MISSING, HOT, HOT, MISSING, HOT]
    assert await caller.match(asked) == states
    got = await caller.get(asked)
    assert got.states == states
    assert got.parts == [V[2], V[0], V[2], V[1]]
    (answer,) = await caller.acquire(asked)
    assert list(answer.states) == states
    assert list(answer.lengths) == [4096] * 4
    assert len(answer.offsets) == len(answer.checksums) == 4
    assert answer.offsets[0] == answer.offsets[2], "a key asked twice is the same slot twice"
    assert await caller.release(answer.lease) == [True]


async def test_prefix_ends_at_the_first_block_that_is_not_there(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 2), V[:2])
    await caller.put([key(3)], V[3:4])
    states: list[int] = [HOT, HOT, MISSING, BEYOND]
    answer = await caller.door.call("Match", caller.match_request(keys(0, 4), coverage=PREFIX))
    assert (list(answer.states), answer.prefix_blocks) == (states, 2)
    assert await caller.get(keys(0, 4), coverage=PREFIX) == Got(states, V[:2], [checksum(v) for v in V[:2]])
    (acquired,) = await caller.acquire(keys(0, 4), coverage=PREFIX)
    assert list(acquired.states) == states
    each = await caller.door.call("Match", caller.match_request(keys(0, 4), coverage=EACH))
    assert (list(each.states), each.prefix_blocks) == ([HOT, HOT, MISSING, HOT], 2)


@pytest.mark.parametrize("coverage", [PREFIX, EACH])
async def test_empty_batches_are_answered_empty(shard: Shard, coverage: int) -> None:
    caller = await shard.caller()
    assert await caller.match([], coverage=coverage) == []
    assert await caller.get([], coverage=coverage) == Got([], [], [])
    (answer,) = await caller.acquire([], coverage=coverage, wait_ms=100)
    assert (list(answer.states), answer.HasField("lease"), answer.settled) == ([], False, True)
    assert await caller.put([], []) == []
    reserved = await caller.reserve([])
    assert (list(reserved.states), reserved.HasField("lease")) == ([], False)
    assert await caller.delete([]) == []
    assert await caller.release() == []


async def test_parts_of_a_block_are_read_alone_and_together(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("parts", layer_groups=4))
    parts = [value(("p", i), 4096) for i in range(8)]
    assert await caller.put(keys(0, 2), parts) == [COMMITTED] * 8
    assert (await caller.get(keys(0, 2))).parts == parts
    assert (await caller.get(keys(0, 2), parts=[1, 3])).parts == [parts[1], parts[3], parts[5], parts[7]]
    # Of another block only two parts are stored: it counts for those who ask for no more.
    assert await caller.put([key(5)], [parts[0], parts[2]], parts=[0, 2]) == [COMMITTED] * 2
    assert await caller.match([key(5)]) == [MISSING]
    assert await caller.match([key(5)], parts=[2]) == [HOT]
    assert await caller.match([key(5)], parts=[2, 3]) == [MISSING]
    assert (await caller.get([key(5)], parts=[0, 2])).parts == [parts[0], parts[2]]
    (answer,) = [a async for a in caller.door.stream("Acquire", caller.acquire_request([key(5), key(0)], parts=[2, 3]))]
    assert list(answer.states) == [MISSING, HOT]
    assert len(answer.offsets) == 2


@pytest.mark.parametrize(("wrong", "limit"), [([1, 0], ""), ([1, 1], ""), ([4], "0-3")])
async def test_part_selections_out_of_their_limits(shard: Shard, wrong: list[int], limit: str) -> None:
    caller = await shard.caller(kv_spec("parts", layer_groups=4))
    for call in (
        caller.match([key(1)], parts=wrong),
        caller.get([key(1)], parts=wrong),
        caller.reserve([key(1)], parts=wrong),
        caller.put([key(1)], [V[0]], parts=wrong),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert (caught.value.field, caught.value.limit) == ("parts", limit)


async def test_a_value_of_no_bytes_is_not_a_missing_one(shard: Shard) -> None:
    caller = await shard.caller(opaque_spec("values"))
    values = [b"", b"x", b"", value("v", 5000)]
    assert await caller.put(keys(0, 4), values, opaque=True) == [COMMITTED] * 4
    got = await caller.get([key(0), key(7), key(3), key(2), key(1)])
    assert got.states == [HOT, MISSING, HOT, HOT, HOT]
    assert got.parts == [b"", values[3], b"", b"x"]
    (answer,) = await caller.acquire([key(7), key(0)])
    assert (list(answer.states), list(answer.lengths)) == ([MISSING, HOT], [0])
    by_lease = await caller.get(lease=answer.lease)
    assert (by_lease.states, by_lease.parts) == ([], [b""])


async def test_get_by_lease_reads_what_the_lease_names(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 3), V[:3])
    lease = await caller.lease([key(2), key(0)])
    assert await caller.delete([key(2)]) == [pb.DELETE_STATE_DEFERRED]
    assert (await caller.get(lease=lease)).parts == [V[2], V[0]], "a deleted block stays for those who hold it"
    assert await caller.match([key(2)]) == [MISSING]
    assert await caller.release(lease) == [True]
    with pytest.raises(LeaseExpired) as caught:
        await caller.get(lease=lease)
    assert caught.value.field == "lease"
    await shard.local.until_idle()


async def test_what_is_being_written_is_not_served(shard: Shard) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    reserved = await writer.reserve([key(1)])
    assert await reader.match([key(1)]) == [IN_FLIGHT]
    assert await reader.get([key(1)]) == Got([IN_FLIGHT], [], [])
    (answer,) = await reader.acquire([key(1)])
    assert (list(answer.states), answer.HasField("lease")) == ([IN_FLIGHT], False)
    assert await writer.fill(reserved.lease, V[:1]) == [COMMITTED]
    assert (await reader.get([key(1)])).parts == V[:1], "committed is visible at once, over another connection"


@pytest.mark.parametrize("coverage", [PREFIX, EACH])
async def test_a_waiting_acquire_is_answered_as_blocks_arrive(shard: Shard, coverage: int) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    await writer.put([key(0)], V[:1])
    first = await writer.reserve([key(1)])
    second = await writer.reserve([key(2)])
    request = reader.acquire_request(keys(0, 3), coverage=coverage, wait_ms=5000)
    async with aclosing(reader.door.stream("Acquire", request)) as answers:
        answer = await _next(answers)
        assert (answer.first, list(answer.states), answer.settled) == (0, [HOT], False)
        await writer.fill(first.lease, V[1:2])
        answer = await _next(answers)
        assert (answer.first, list(answer.states), answer.settled) == (1, [HOT], False)
        await writer.fill(second.lease, V[2:3])
        answer = await _next(answers)
        assert (answer.first, list(answer.states), answer.settled) == (2, [HOT], True)
        assert [a async for a in answers] == []
    assert (await reader.get(lease=answer.lease)).parts == V[:3], "all messages speak of one lease"
    assert await reader.release(answer.lease) == [True]


async def test_a_block_that_arrives_while_an_answer_is_on_its_way_is_not_overlooked(shard: Shard) -> None:
    """The wake-up comes while nobody waits: between two messages of one Acquire."""
    writer, reader = await shard.caller(), await shard.caller()
    await writer.put([key(0)], V[:1])
    reserved = await writer.reserve([key(1)])
    async with aclosing(reader.door.stream("Acquire", reader.acquire_request(keys(0, 2), wait_ms=5000))) as answers:
        await _next(answers)
        await writer.fill(reserved.lease, V[1:2])
        started = asyncio.get_running_loop().time()
        answer = await _next(answers)
        assert (list(answer.states), answer.settled) == ([HOT], True)
        assert asyncio.get_running_loop().time() - started < 4, "it waited to the end for what was there"


@pytest.mark.parametrize(("coverage", "states"), [(PREFIX, [HOT, MISSING, BEYOND]), (EACH, [HOT, MISSING, HOT])])
async def test_a_waiting_acquire_settles_when_the_writer_gives_up(
    shard: Shard, coverage: int, states: list[int]
) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    await writer.put([key(0)], V[:1])
    await writer.put([key(2)], V[2:3])
    reserved = await writer.reserve([key(1)])
    waiting = asyncio.ensure_future(reader.acquire(keys(0, 3), coverage=coverage, wait_ms=5000))
    await _until_waiting(shard)
    assert await writer.abort(reserved.lease) == [True]
    answers = await asyncio.wait_for(waiting, HANG_S)
    assert [s for a in answers for s in a.states] == states
    await reader.release(answers[-1].lease)


@pytest.mark.parametrize(("coverage", "states"), [(PREFIX, [HOT, IN_FLIGHT, BEYOND]), (EACH, [HOT, IN_FLIGHT, HOT])])
async def test_a_wait_ends_at_its_time(shard: Shard, coverage: int, states: list[int]) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    await writer.put([key(0)], V[:1])
    await writer.put([key(2)], V[2:3])
    await writer.reserve([key(1)])
    answers = await reader.acquire(keys(0, 3), coverage=coverage, wait_ms=60)
    assert [s for a in answers for s in a.states] == states
    got = await reader.get(keys(0, 3), coverage=coverage, wait_ms=60)
    assert got.states == states
    assert got.parts == [V[i] for i, s in enumerate(states) if s == HOT]


async def test_a_waiting_get_brings_the_bytes_when_they_arrive(shard: Shard) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    await writer.put([key(0)], V[:1])
    reserved = await writer.reserve([key(1)])
    waiting = asyncio.ensure_future(reader.get(keys(0, 2), wait_ms=5000))
    await _until_waiting(shard)
    await writer.fill(reserved.lease, V[1:2])
    assert (await asyncio.wait_for(waiting, HANG_S)).parts == V[:2]
    await shard.local.until_idle()


async def test_an_acquire_that_is_abandoned_holds_nothing(shard: Shard) -> None:
    writer, reader = await shard.caller(), await shard.caller()
    await writer.put([key(0)], V[:1])
    reserved = await writer.reserve([key(1)])
    async with aclosing(reader.door.stream("Acquire", reader.acquire_request(keys(0, 2), wait_ms=5000))) as answers:
        await _next(answers)
        assert shard.local.gauge("leases") == 2
    await writer.abort(reserved.lease)
    await shard.local.until_idle()


async def test_blocks_over_the_leased_share_are_busy_and_free_again_after_release(open_shard: OpenShard) -> None:
    shard = await open_shard({"hot.max_leased_share": "0.25", "limits.max_part": "256KiB"})
    caller = await shard.caller(kv_spec("big", part_bytes=256 << 10))
    for i in range(6):
        assert await caller.put([key(i)], [value(i, 256 << 10)]) == [COMMITTED]
    first = await caller.lease(keys(0, 4))
    for coverage, states in ((EACH, [BUSY, BUSY, HOT]), (PREFIX, [BUSY, BEYOND, BEYOND])):
        (answer,) = await caller.acquire([key(4), key(5), key(0)], coverage=coverage, wait_ms=50)
        assert list(answer.states)[:1] == states[:1]
        if answer.HasField("lease"):
            await caller.release(answer.lease)
    assert await caller.match([key(4)]) == [HOT], "busy is not missing"
    await caller.release(first)
    await caller.release(await caller.lease(keys(2, 6)))


async def test_no_call_leases_more_bytes_than_its_limit(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("big", part_bytes=256 << 10))
    for i in range(5):
        await caller.put([key(i)], [value(i, 256 << 10)])
    (answer,) = await caller.acquire(keys(0, 5))
    assert list(answer.states) == [HOT] * 4 + [BUSY], "four of 256 KiB are 1 MiB"
    got = await caller.get(keys(0, 5))
    assert got.states == [HOT] * 4 + [BUSY]
    assert got.parts == [value(i, 256 << 10) for i in range(4)]


async def test_get_is_cut_into_chunks(shard: Shard) -> None:
    caller = await shard.caller(opaque_spec("values", part_bytes=256 << 10))
    values = [value(0, 65536), value(1, 65537), value(2, 1), value(3, 65535 + 65536)]
    await caller.put(keys(0, 4), values, opaque=True)
    request = caller.get_request(keys(0, 4))
    sizes = [len(m.data) async for m in caller.door.stream("Get", request) if m.WhichOneof("body") == "data"]
    assert sizes == [65536] * 4 + [1], "each message is full but the last"


async def test_ranges_take_their_bytes_of_every_part(shard: Shard) -> None:
    caller = await shard.caller()
    assert "ranges" in caller.attached.features
    await caller.put(keys(0, 3), V[:3])
    for chosen in (
        [(0, 1, 0, 1)],
        [(0, PART_BYTES, 0, 1)],
        [(5, 100, 300, 7)],
        [(PART_BYTES - 1, 1, 0, 1), (0, 4, 8, 16), (100, 1000, 1000, 2)],
    ):
        request = caller.get_request(keys(0, 3))
        request.ranges.extend(types.Range(offset=o, length=n, stride=s, count=c) for o, n, s, c in chosen)
        got = await collect(caller.door.stream("Get", request))
        wanted = [b"".join(v[o + i * s :][:n] for o, n, s, c in chosen for i in range(c)) for v in V[:3]]
        assert got.parts == wanted
        assert got.checksums == [checksum(part) for part in wanted]


async def test_ranges_of_a_lease_are_those_of_its_parts(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 2), V[:2])
    lease = await caller.lease(keys(0, 2))
    request = caller.get_request([], lease=lease)
    request.ranges.add(offset=10, length=20, stride=30, count=2)
    assert (await collect(caller.door.stream("Get", request))).parts == [v[10:30] + v[40:60] for v in V[:2]]
    assert await caller.release(lease) == [True]


@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ((0, 0, 0, 1), "ranges[0]"),
        ((0, 1, 0, 0), "ranges[0]"),
        ((0, 2, 1, 2), "ranges[0].stride"),
        ((0, PART_BYTES + 1, 0, 1), "ranges[0]"),
        ((PART_BYTES, 1, 0, 1), "ranges[0]"),
        ((0, 1, PART_BYTES, 2), "ranges[0]"),
        ((2**64 - 1, 1, 2**64 - 1, 2**32 - 1), "ranges[0]"),
    ],
)
async def test_ranges_outside_the_part_are_refused(shard: Shard, chosen: tuple[int, ...], field: str) -> None:
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    request = caller.get_request([key(0)])
    offset, length, stride, count = chosen
    request.ranges.add(offset=offset, length=length, stride=stride, count=count)
    with pytest.raises(InvalidArgument) as caught:
        await collect(caller.door.stream("Get", request))
    assert caught.value.field == field
    request.ClearField("ranges")
    request.ranges.extend([types.Range(offset=0, length=1, count=1)] * 17)
    with pytest.raises(InvalidArgument) as caught:
        await collect(caller.door.stream("Get", request))
    assert (caught.value.field, caught.value.limit) == ("ranges", "16")
    await shard.local.until_idle()


async def test_a_lease_has_no_ranges(shard: Shard) -> None:
    caller = await shard.caller()
    request = caller.acquire_request([key(1)])
    request.ranges.add(offset=0, length=1, count=1)
    with pytest.raises(Unsupported) as caught:
        await _next(caller.door.stream("Acquire", request))
    assert caught.value.field == "ranges"


async def test_unknown_coverage_is_refused(shard: Shard) -> None:
    caller = await shard.caller()
    for call in (caller.match([key(1)], coverage=2), caller.acquire([key(1)], coverage=2)):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert (caught.value.field, caught.value.limit) == ("coverage", "0-1")


async def test_a_part_named_corrupt_is_dropped_only_if_it_is(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 2), V[:2])
    lease = await caller.lease(keys(0, 2))
    (answer,) = await caller.acquire([key(1)])
    offset = answer.offsets[0]
    view = shard.local.server.shell.memory.view
    view[offset : offset + 1] = bytes((view[offset] ^ 1,))
    corrupt = [pb.CorruptPart(lease=0, part=0), pb.CorruptPart(lease=0, part=1)]
    request = pb.ReleaseRequest(session=caller.session, leases=[lease], corrupt=corrupt)
    assert list((await caller.door.call("Release", request)).valid) == [True]
    assert await caller.match(keys(0, 2)) == [HOT, MISSING]
    assert (await caller.counters())["corrupt_blocks"] == 1
    lease = await caller.lease([key(0)])
    for wrong, field in ((pb.CorruptPart(lease=1), "corrupt.lease"), (pb.CorruptPart(part=1), "corrupt.part")):
        request = pb.ReleaseRequest(session=caller.session, leases=[lease], corrupt=[wrong])
        with pytest.raises(InvalidArgument) as caught:
            await caller.door.call("Release", request)
        assert caught.value.field == field
    assert await caller.release(lease) == [True], "a refused call changed nothing"


async def _next(answers: AsyncIterator[pb.AcquireResponse]) -> pb.AcquireResponse:
    return await asyncio.wait_for(anext(answers), HANG_S)


async def _until_waiting(shard: Shard) -> None:
    for _ in range(500):
        if shard.local.gauge("waiting_acquires"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nobody waits")


async def test_keys_times_parts_are_bounded(open_shard: OpenShard) -> None:
    limits = {"max_parts_per_block": "1024", "max_blocks_per_call": "4096", "max_match_blocks": "4096"}
    options = {f"limits.{name}": value for name, value in limits.items()}
    shard = await open_shard({**options, "server.max_message": "1MiB"})  # The trailer of so many parts.
    caller = await shard.caller(kv_spec("many parts", part_bytes=1, layer_groups=1024))
    many = keys(0, 65)
    for call in (caller.reserve(many), caller.get(many), caller.put(many, [b"x"] * 65 * 1024)):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert (caught.value.field, caught.value.limit) == ("chain.keys", "65536 parts a call")
    with pytest.raises(InvalidArgument) as caught:
        await caller.match(keys(0, 1025))
    assert (caught.value.field, caught.value.limit) == ("chain.keys", "1048576 parts a call")
    assert await caller.match(keys(0, 1024), coverage=EACH) == [MISSING] * 1024
