"""Parts of the replay that need no process."""

from __future__ import annotations

import asyncio
import json
from multiprocessing import Pipe
from pathlib import Path

import pytest
from rich.console import Console

from kvstore.replay.buffers import BufferPool, PartBuffer
from kvstore.replay.outcomes import Decoded, Delivery, Prefilled
from kvstore.replay.plan import Plan, first_requests, plan_of
from kvstore.replay.plot import write_plot
from kvstore.replay.report import Report, percentiles
from kvstore.replay.sampler import Sample
from kvstore.replay.sizing import ShardSize, SizingError, server_flags, size_by_bytes, size_by_share
from kvstore.replay.table import print_report
from kvstore.replay.tally import Tally
from kvstore.replay.turns import Turn
from kvstore.workload.generate import generate_trace
from kvstore.workload.profiles import CHAT
from kvstore.workload.reuse import HitRates
from kvstore.workload.trace import Trace

PART = 4096


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate_trace(CHAT, rate=1, seconds=40)


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return plan_of(trace, part_bytes=PART, salt=b"s")


def test_a_plan_holds_every_request(trace: Trace, plan: Plan) -> None:
    assert plan.request_count == len(trace.requests)
    assert plan.longest_blocks == max(len(request.block_ids) for request in trace.requests)
    assert plan.times_s[0] == 0
    for i, request in enumerate(trace.requests):
        assert len(plan.keys(i)) == len(request.block_ids)


def test_requests_share_keys_as_they_share_blocks_and_salts_share_none(trace: Trace, plan: Plan) -> None:
    assert plan.keys(0)[0] == plan.keys(1)[0]  # Every chat starts with the same block.
    other = plan_of(trace, part_bytes=PART, salt=b"t")
    assert not set(plan.keys(0)) & set(other.keys(0))


def test_a_limit_keeps_the_first_requests(trace: Trace) -> None:
    assert first_requests(trace, 3).requests == trace.requests[:3]
    assert first_requests(trace, None) is trace


def test_capacity_is_a_rounded_share_in_whole_slots() -> None:
    size = size_by_share(0.05, distinct_blocks=170_899, part_bytes=4097)
    assert (size.capacity_blocks, size.slot_bytes) == (8545, 8192)
    assert size.capacity_bytes == 8545 * 8192
    assert size_by_bytes((1 << 30) + 5000, part_bytes=PART).capacity_blocks == (1 << 18) + 1


@pytest.mark.parametrize(("share", "part_bytes"), [(0.001, PART), (0.5, 65 << 20), (0.0001, 1 << 20)])
def test_a_shard_that_cannot_be_is_refused(share: float, part_bytes: int) -> None:
    with pytest.raises(SizingError, match=r"--capacity|--part-size"):
        size_by_share(share, distinct_blocks=10_000, part_bytes=part_bytes)


def test_the_part_size_that_is_proposed_fits() -> None:
    with pytest.raises(SizingError) as caught:
        size_by_share(0.01, distinct_blocks=1000, part_bytes=PART)
    proposed = int(str(caught.value).split("--part-size ")[1].removesuffix("KiB")) << 10
    assert size_by_share(0.01, distinct_blocks=1000, part_bytes=proposed).capacity_blocks == 10


@pytest.mark.parametrize("size", [ShardSize(4096, 256), ShardSize(3 << 20, 7), ShardSize(4096, 1 << 28)])
def test_a_page_holds_a_slot_and_lies_within_its_limits(size: ShardSize, plan: Plan) -> None:
    flags = server_flags(size, plan)
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    page = int(options["--hot.page"])
    assert 64 << 10 <= page <= 64 << 20
    assert page & (page - 1) == 0
    assert size.slot_bytes <= page <= size.capacity_bytes
    assert int(options["--hot.capacity"]) == size.capacity_bytes


def test_wrong_bytes_are_counted_one_by_one() -> None:
    keys = [bytes([i]) * 32 for i in range(3)]
    buffer = PartBuffer(part_bytes=PART, part_count=4)
    assert len(buffer.fill(keys)) == 3
    assert buffer.wrong_bytes(keys) == 0
    buffer.parts[1][7] ^= 1
    buffer.parts[2][-1] ^= 255
    assert buffer.wrong_bytes(keys) == 2
    assert buffer.wrong_bytes(keys[:1]) == 0


def test_a_pool_lends_a_buffer_to_one_at_a_time() -> None:
    pool = BufferPool(part_bytes=PART, part_count=1)
    with pool.lend() as one, pool.lend() as other:
        assert one is not other
    with pool.lend() as again:
        assert again in (one, other)


async def test_turns_come_in_the_order_of_the_ring() -> None:
    ends = [Pipe(duplex=False) for _ in range(2)]
    turns = [Turn(inbox=ends[i][0], outbox=ends[1 - i][1], first=i == 0) for i in range(2)]
    order: list[int] = []

    async def serve(request: int) -> None:
        turn = turns[request % 2]
        await turn.take()
        order.append(request)
        turn.pass_on()

    later = [asyncio.create_task(serve(request)) for request in (1, 3, 5)]
    await asyncio.sleep(0)
    assert order == []
    await asyncio.gather(*later, *(serve(request) for request in (0, 2, 4)))
    assert order == [0, 1, 2, 3, 4, 5]
    for turn_in, turn_out in ends:
        asyncio.get_running_loop().remove_reader(turn_in.fileno())
        turn_in.close()
        turn_out.close()


async def test_a_lone_worker_hands_the_token_to_itself() -> None:
    turn = Turn(inbox=None, outbox=None, first=True)
    for _ in range(3):
        await turn.take()
        turn.pass_on()
    await turn.take()
    waiting = asyncio.create_task(turn.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    turn.pass_on()
    await waiting


def _tally(plan: Plan) -> Tally:
    tally = Tally(plan)
    for i in range(plan.request_count):
        count = len(plan.keys(i))
        hits = count // 2
        read = Delivery(good_blocks=hits, read_bytes=hits * PART, get_ms=2.0 + i)
        tally.add(
            Prefilled(
                request=i,
                prefix_hits=hits,
                block_hits=hits,
                waited_blocks=0,
                delivery=read,
                stored_blocks=count - hits,
                refused_blocks=0,
                written_bytes=(count - hits) * PART,
                match_ms=1.0,
                put_ms=-1.0,
                failures=("get: late",),
            )
        )
        tally.add(Decoded(i, count, Delivery(count, count * PART, 0, 0, 1.0), ()))
    return tally


def _report(plan: Plan, *, samples: list[Sample]) -> Report:
    tally = _tally(plan)
    return Report(
        tally=tally,
        elapsed_s=2.0,
        latest_s=0.0,
        distinct_blocks=10,
        capacity_bytes=1 << 20,
        capacity_blocks=256,
        expected=HitRates(block=0.5, prefix=0.49),
        ceiling=0.6,
        samples=samples,
        match=percentiles(tally.match_ms),
        get=percentiles(tally.get_ms),
        put=percentiles(tally.put_ms),
    )


def test_a_tally_adds_up(plan: Plan) -> None:
    tally = _tally(plan)
    assert tally.prefilled == tally.decoded == tally.failed_calls == plan.request_count
    assert tally.accesses == len(plan.block_ids) == tally.decode_good_blocks
    assert tally.prefix_hits + tally.stored_blocks == tally.accesses
    assert tally.prefix_hit_rate == tally.prefix_hits / tally.accesses
    assert len(tally.put_ms) == 0
    assert tally.failures.most_common(1) == [("get: late", plan.request_count)]
    assert tally.hits_by_request.sum() == tally.prefix_hits


def test_a_report_has_figures_a_table_and_a_picture(plan: Plan, tmp_path: Path) -> None:
    samples = [
        Sample(0.0, {"evicted_capacity_blocks": 5, "read_bytes": 0}),
        Sample(1.0, {"evicted_capacity_blocks": 25, "read_bytes": 1000}),
    ]
    report = _report(plan, samples=samples)
    figures = json.loads(json.dumps(report.to_json()))
    assert figures["evictions"] == {"capacity": 20, "page": 0, "quota": 0, "ttl": 0, "corrupt": 0}
    assert figures["expected_prefix_hit_rate"] == 0.49
    assert figures["put_p50_ms"] is None
    assert figures["match_p99_ms"] == 1.0
    assert figures["gb_per_s"] == (figures["read_bytes"] + figures["written_bytes"]) / 2e9
    with (tmp_path / "table").open("w") as file:
        print_report(report, Console(file=file, width=120))
    said = (tmp_path / "table").read_text()
    assert "wrong bytes: 0" in said
    assert "20 capacity" in said
    assert f"{plan.request_count} x get: late" in said
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_samples_evictions_are_unknown(plan: Plan, tmp_path: Path) -> None:
    report = _report(plan, samples=[])
    assert report.to_json()["evictions"] is None
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
