"""The warm tier of a replay: its size and flags, and what is told of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from kvstore.cli import exit_codes, main
from kvstore.cli.replay_args import add_flags, trace_and_settings
from kvstore.config import load_config
from kvstore.config.units import GIB, KIB, MIB, parse_size
from kvstore.replay.buffers import BufferPool
from kvstore.replay.engine import Settings
from kvstore.replay.outcomes import Delivery, FromDisk, Prefilled
from kvstore.replay.plan import Plan, plan_of
from kvstore.replay.plot import write_plot
from kvstore.replay.prefill import Prefill
from kvstore.replay.report import Report, percentiles
from kvstore.replay.sampler import Sample
from kvstore.replay.sizing import ShardSize, SizingError, server_flags
from kvstore.replay.table import print_report
from kvstore.replay.tally import Tally
from kvstore.replay.turns import Turn
from kvstore.replay.warm import MIN_SEGMENTS, WarmOrder, WarmSize, warm_by_bytes, warm_by_share, warm_flags
from kvstore.replay.wear import wear_of
from kvstore.tiers.segment import Described, Layout
from kvstore.workload.generate import generate_trace
from kvstore.workload.payload import check_payload, fill_payload
from kvstore.workload.profiles import CHAT
from kvstore.workload.reuse import HitRates
from kvstore_client import AsyncNamespace, Chain, Coverage, MatchResult, PutResult, ReadResult
from kvstore_wire.states import BlockState, PartState

PART = 64 * KIB
PARTS = [1, 4096, 4097, PART, MIB - 16 * KIB, MIB, 3 * MIB]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(generate_trace(CHAT, rate=1, seconds=40), part_bytes=PART, salt=b"s")


@pytest.mark.parametrize("part_bytes", PARTS)
@pytest.mark.parametrize("share", [0.2, 0.05])
def test_a_share_is_what_the_segments_hold_when_all_are_full(share: float, part_bytes: int) -> None:
    distinct = 1_708_990
    size = warm_by_share(share, distinct_blocks=distinct, part_bytes=part_bytes)
    assert size.capacity_blocks - size.blocks_per_segment < round(share * distinct) <= size.capacity_blocks
    assert size.segment_count >= MIN_SEGMENTS
    assert MIB <= size.segment_bytes <= 256 * MIB
    assert size.segment_bytes & (size.segment_bytes - 1) == 0


@pytest.mark.parametrize("part_bytes", PARTS)
@pytest.mark.parametrize("segment_bytes", [MIB, 4 * MIB, 256 * MIB])
def test_a_segment_holds_as_many_parts_as_are_said(part_bytes: int, segment_bytes: int, plan: Plan) -> None:
    size = WarmSize(-(-part_bytes // 4096) * 4096, segment_bytes, MIN_SEGMENTS)
    described = Described(plan.spec().digest, plan.spec().to_message().SerializeToString())
    layout, count = Layout(segment_bytes), size.blocks_per_segment
    assert layout.fits([part_bytes] * count, described)
    assert not layout.fits([part_bytes] * (count + 1), described)


def test_a_size_is_rounded_down_to_whole_segments() -> None:
    found = {given: warm_by_bytes(given, part_bytes=PART) for given in (64 * MIB, 127 * MIB + 1, 128 * MIB, 64 * GIB)}
    shapes = [(size.segment_bytes, size.segment_count) for size in found.values()]
    assert shapes == [(MIB, 64), (MIB, 127), (2 * MIB, 64), (256 * MIB, 256)]


@pytest.mark.parametrize("part_bytes", PARTS)
def test_a_tier_of_less_than_64_segments_is_refused_and_the_smallest_is_said(part_bytes: int) -> None:
    with pytest.raises(SizingError, match="--warm: is 1000000 bytes, less than") as caught:
        warm_by_bytes(1_000_000, part_bytes=part_bytes)
    smallest = parse_size(str(caught.value).split("warm tier of ")[1].split(" in ")[0])
    size = warm_by_bytes(smallest, part_bytes=part_bytes)
    assert (size.capacity_bytes, size.segment_count) == (smallest, MIN_SEGMENTS)
    assert size.blocks_per_segment > 0
    with pytest.raises(SizingError):
        warm_by_bytes(smallest - 1, part_bytes=part_bytes)


def test_a_share_that_is_too_small_is_refused() -> None:
    with pytest.raises(SizingError, match="--warm: 10% is 1000 blocks of 4096 bytes, less than"):
        warm_by_share(0.1, distinct_blocks=10_000, part_bytes=4096)


@pytest.mark.parametrize("part_bytes", PARTS)
def test_the_server_takes_the_flags(part_bytes: int, plan: Plan, tmp_path: Path) -> None:
    size = warm_by_share(0.2, distinct_blocks=100_000, part_bytes=part_bytes)
    hot = ShardSize(size.slot_bytes, 1000)
    with warm_flags(WarmOrder(size, tmp_path, 5 * MIB)) as more:
        flags = [*server_flags(hot, plan), *more]
    options = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    config = load_config(None, {}, options).warm
    assert (config.path, config.capacity, config.segment) == (str(tmp_path), size.capacity_bytes, size.segment_bytes)
    assert (config.write_budget, config.flush_timeout) == (5 * MIB, 0)


def test_no_warm_tier_is_no_flag() -> None:
    with warm_flags(None) as flags:
        assert flags == []


def test_a_temporary_folder_lies_in_tmpdir_or_the_working_directory_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    order = WarmOrder(warm_by_bytes(64 * MIB, part_bytes=PART))
    for setting, parent in ((None, here), (str(there), there)):
        if setting is None:
            monkeypatch.delenv("TMPDIR", raising=False)
        else:
            monkeypatch.setenv("TMPDIR", setting)
        assert str(parent) in order.place
        with pytest.raises(KeyboardInterrupt):
            _interrupted_in(order, parent)
        assert list(parent.iterdir()) == []


def _interrupted_in(order: WarmOrder, parent: Path) -> None:
    with warm_flags(order) as flags:
        folder = Path(flags[flags.index("--warm.path") + 1])
        assert folder.parent == parent
        (folder / "segments").mkdir()
        (folder / "segments" / "0000000000.seg").write_bytes(b"x")
        raise KeyboardInterrupt


def test_a_folder_that_was_named_stays(tmp_path: Path) -> None:
    order = WarmOrder(warm_by_bytes(64 * MIB, part_bytes=PART), tmp_path / "warm")
    (tmp_path / "warm").mkdir()
    with warm_flags(order) as flags:
        assert str(tmp_path / "warm") in flags
        assert "--warm.write_budget" not in flags
    assert (tmp_path / "warm").is_dir()


# -- what the workers find -------------------------------------------------------------------------------------------

M, H, W, F, B, E = (
    int(state)
    for state in (
        *(BlockState.MISSING, BlockState.HOT, BlockState.WARM),
        *(BlockState.IN_FLIGHT, BlockState.BUSY, BlockState.BEYOND),
    )
)


@pytest.mark.parametrize(
    ("matched", "leased", "good", "expected"),
    [
        pytest.param([H, W, W, M], [H, H, H], 3, FromDisk(hits=2), id="all came"),
        pytest.param([H, W, W, H], [H, H, W, E], 2, FromDisk(hits=1, late_blocks=1), id="one was late"),
        pytest.param([W, W, M, W], [F, E], 0, FromDisk(late_blocks=2, beyond_blocks=1), id="on its way"),
        pytest.param([W, W, W, M], [H, B, B], 1, FromDisk(hits=1, busy_blocks=2), id="no room to lease"),
        pytest.param([W, W, W], [H, M, E], 1, FromDisk(hits=1, gone_blocks=2), id="gone since the match"),
        pytest.param([M, W, H], [], 0, FromDisk(beyond_blocks=1), id="behind a missing block"),
        pytest.param([W, W], [H, H], 1, FromDisk(hits=1), id="damaged on the way"),
        pytest.param([H, F, M], [H, F], 1, FromDisk(), id="nothing on disk"),
    ],
)
def test_what_was_on_disk_is_counted_once(matched: list[int], leased: list[int], good: int, expected: FromDisk) -> None:
    assert FromDisk.of(bytes(matched), bytes(leased), good_blocks=good) == expected


class _Store:
    """A namespace with a block in memory, one in flight, one on disk that is late, then a hole; behind it all blocks
    but the last are on disk."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.written: dict[bytes, bytes] = {}

    async def match(self, chain: Chain, *, coverage: Coverage) -> MatchResult:
        states = bytes([H, F, W, M]).ljust(len(chain.keys) - 1, bytes([W])) + bytes([M])
        return MatchResult(states, prefix_blocks=1)

    async def acquire(self, chain: Chain, *, wait_ms: int, hint: object = None) -> _Lease:
        assert len(chain.keys) == 3
        return _Lease(bytes([H, H, W]))

    async def read(self, lease: _Lease, into: Sequence[memoryview]) -> ReadResult:
        for key, part in zip(self.asked, into, strict=False):
            fill_payload(key, 0, part)
        return ReadResult(None, size_bytes=sum(map(len, into)))

    async def reserve(self, chain: Chain, *, wait_ms: int, hint: object = None) -> _Lease:
        self.asked = list(chain.keys)
        states = [PartState.PRESENT, PartState.PRESENT, PartState.IN_FLIGHT]
        return _Lease(bytes(states).ljust(len(chain.keys), bytes([PartState.CREATED])))

    async def write(self, lease: _Lease, values: Sequence[memoryview]) -> PutResult:
        keys = [self.asked[i] for i in lease.created]
        self.written = {key: bytes(value) for key, value in zip(keys, values, strict=True)}
        return PutResult(bytes(len(keys)), stored=len(keys))


class _Lease:
    failure, retry_after_ms = None, 0

    def __init__(self, states: bytes, store: _SmallStore | None = None) -> None:
        self.states, self.grants, self.store = states, range(states.count(H)), store
        self.created = [i for i, state in enumerate(states) if state == PartState.CREATED]

    async def release(self, *, corrupt: Sequence[int]) -> bool:
        if self.store is not None:
            self.store.leased = 0
        return not corrupt


async def _prefill(plan: Plan, store: _Store | _SmallStore, *, wait_ms: int) -> tuple[list[bytes], Prefilled]:
    """Serves the first request of more than five blocks."""
    index = next(i for i in range(plan.request_count) if len(plan.keys(i)) > 5)
    pool = BufferPool(part_bytes=PART, part_count=plan.longest_blocks)
    turn = Turn(inbox=None, outbox=None, first=True)
    prefill = Prefill(plan, cast("AsyncNamespace", store), turn=turn, pool=pool, wait_ms=wait_ms)
    return plan.keys(index), await prefill.run(index)


async def test_a_worker_offers_all_that_it_made_also_what_is_on_disk_behind_a_hole(plan: Plan) -> None:
    store = _Store()
    keys, done = await _prefill(plan, store, wait_ms=0)
    assert store.asked == keys
    assert list(store.written) == keys[3:]
    assert all(check_payload(key, 0, written) for key, written in store.written.items())
    assert done.from_disk == FromDisk(late_blocks=1, beyond_blocks=len(keys) - 5)
    assert (done.prefix_hits, done.waited_blocks, done.block_hits) == (2, 1, len(keys) - 2)
    assert (done.delivery.wrong_bytes, done.stored_blocks, done.failures) == (0, len(keys) - 3, ())


class _SmallStore:
    """A namespace whose memory takes two blocks at a time; all but the last ones are on disk."""

    def __init__(self, missing: int = 1) -> None:
        self.missing = missing
        self.asked: list[list[bytes]] = []
        self.written: list[bytes] = []
        self.leased = 0

    async def match(self, chain: Chain, *, coverage: Coverage) -> MatchResult:
        count = len(chain.keys) - self.missing
        return MatchResult(bytes([W]) * count + bytes([M]) * self.missing, prefix_blocks=count)

    async def acquire(self, chain: Chain, *, wait_ms: int, hint: object = None) -> _Lease:
        assert not self.leased, "what was read is still leased"
        self.keys = list(chain.keys)
        self.leased = min(2, len(self.keys))
        return _Lease(bytes([H] * self.leased).ljust(len(self.keys), bytes([W])), self)

    async def read(self, lease: _Lease, into: Sequence[memoryview]) -> ReadResult:
        assert len(into) == self.leased
        for key, part in zip(self.keys, into, strict=False):
            fill_payload(key, 0, part)
        return ReadResult(None, size_bytes=sum(map(len, into)))

    async def reserve(self, chain: Chain, *, wait_ms: int, hint: object = None) -> _Lease:
        assert wait_ms > 0
        self.asked.append(list(chain.keys))
        states = [PartState.PRESENT] * self.leased + [PartState.CREATED] * (len(self.asked) >= 3) + [PartState.FULL]
        return _Lease(bytes(states).ljust(len(chain.keys), bytes([PartState.BEYOND]))[: len(chain.keys)], self)

    async def write(self, lease: _Lease, values: Sequence[memoryview]) -> PutResult:
        self.written += [self.asked[-1][i] for i in lease.created]
        return PutResult(bytes(len(values)), stored=len(values))


@pytest.mark.parametrize("missing", [1, 3])
async def test_a_chain_larger_than_memory_is_read_piece_by_piece_and_stored_when_there_is_room(
    plan: Plan, missing: int
) -> None:
    store = _SmallStore(missing)
    keys, done = await _prefill(plan, store, wait_ms=5000)
    there = len(keys) - missing
    last = there % 2 or 2
    # What is leased and what is to be stored; then what there was no room for, which is stored one after another.
    rounds = [keys[there - last :], keys[there:], *(keys[there + i :] for i in range(missing))]
    assert store.asked == rounds
    assert store.written == keys[there:]
    assert (done.prefix_hits, done.delivery.good_blocks) == (there, there)
    assert done.delivery.read_bytes == PART * there
    assert (done.stored_blocks, done.refused_blocks, done.failures) == (missing, 0, ())
    assert done.from_disk == FromDisk(hits=there)


async def test_a_chain_larger_than_memory_ends_where_the_wait_does(plan: Plan) -> None:
    keys, done = await _prefill(plan, _SmallStore(), wait_ms=1)
    assert 2 <= done.prefix_hits <= len(keys) - 1
    assert done.delivery.wrong_bytes == 0


def _tally(plan: Plan) -> Tally:
    tally = Tally(plan)
    for i in range(plan.request_count):
        count = len(plan.keys(i))
        tally.add(
            Prefilled(
                request=i,
                prefix_hits=count,
                block_hits=count,
                waited_blocks=0,
                delivery=Delivery(good_blocks=count, read_bytes=count * PART, get_ms=1.0),
                stored_blocks=0,
                refused_blocks=0,
                written_bytes=0,
                match_ms=1.0,
                put_ms=-1.0,
                failures=(),
                from_disk=FromDisk(hits=count // 2, late_blocks=3 if i == 0 else 0),
            )
        )
    return tally


def _report(plan: Plan, samples: list[Sample], *, place: str | None = None) -> Report:
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
        warm_blocks=0 if place is None else 4096,
        warm_place=place,
    )


def _said(report: Report, path: Path) -> str:
    with path.open("w") as file:
        print_report(report, Console(file=file, width=140))
    return path.read_text()


SAMPLES = [
    Sample(0.0, {"warm_state": 1, "warm_written_blocks": 100, "warm_dropped_budget_blocks": 1}),
    Sample(
        1.0,
        {
            "warm_state": 2,
            "warm_capacity_bytes": 64 * MIB,
            "warm_stored_bytes": 32 * MIB,
            "warm_stored_blocks": 777,
            "warm_written_blocks": 350,
            "warm_rewritten_blocks": 50,
            "warm_written_bytes": 300 * PART,
            "warm_promoted_blocks": 90,
            "warm_dropped_budget_blocks": 41,
            "warm_dropped_copy_gone_blocks": 0,
        },
    ),
]


def test_a_report_tells_both_tiers(plan: Plan, tmp_path: Path) -> None:
    report = _report(plan, SAMPLES, place="/mnt/warm")
    tally, figures = report.tally, json.loads(json.dumps(report.to_json()))
    assert figures["memory_hit_rate"] + figures["disk_hit_rate"] == pytest.approx(figures["prefix_hit_rate"])
    assert figures["disk_hit_rate"] == tally.from_disk.hits / tally.accesses
    assert figures["from_disk"] == tally.from_disk._asdict()
    assert figures["from_disk"]["late_blocks"] == 3
    assert figures["wrong_bytes"] == 0
    assert figures["warm"] == {
        "state": "degraded",
        "capacity_bytes": 64 * MIB,
        "capacity_blocks": 4096,
        "stored_bytes": 32 * MIB,
        "stored_blocks": 777,
        "writes_per_access": 300 / tally.accesses,
        "written_blocks": 300,
        "rewritten_blocks": 50,
        "written_bytes": 300 * PART,
        "promoted_blocks": 90,
        "dropped_blocks": {"budget": 40, "copy_gone": 0},
    }
    said = _said(report, tmp_path / "table")
    for text in ("degraded, 4,096 blocks", "/mnt/warm", "50 again", "40 budget", "3 late", "both sizes"):
        assert text in said
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("names", [{}, {"warm_state": 0, "warm_written_blocks": 0}])
def test_a_server_without_a_warm_tier_has_no_such_rows(names: dict[str, int], plan: Plan, tmp_path: Path) -> None:
    report = _report(plan, [Sample(0.0, names), Sample(1.0, names)])
    assert report.to_json()["warm"] is None
    said = _said(report, tmp_path / "table")
    assert "warm tier" not in said
    assert "disk" not in said
    assert "tail-first LRU of this size" in said
    assert wear_of(report.samples[:1]) is None


# -- what the command is told ----------------------------------------------------------------------------------------

LOAD = ["gen:chat", "--rate", "2", "--seconds", "60", "--part-size", "64KiB"]


def _settings(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return trace_and_settings(parser.parse_args([*LOAD, *arguments]))[1]


def test_the_command_orders_a_warm_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _settings().warm is None
    by_size = _settings("--warm", "100MiB", "--warm-path", "w", "--write-budget", "1MB").warm
    assert by_size == WarmOrder(WarmSize(PART, MIB, 100), tmp_path / "w", 1_000_000)
    distinct = generate_trace(CHAT, rate=2, seconds=60).distinct_blocks()
    by_share = _settings("--warm", "100%").warm
    assert by_share == WarmOrder(warm_by_share(1, distinct_blocks=distinct, part_bytes=PART))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--warm-path", "w"], "--warm-path: is of a warm tier; ask for one with --warm"),
        (["--write-budget", "1MiB"], "--write-budget: is of a warm tier; ask for one with --warm"),
        (["--warm", "1GiB", "--server", "127.0.0.1:1"], "--warm: is a running server's own affair"),
        (["--warm", "120%"], "--warm: 120% is above 100%"),
        (["--warm", "lots"], "--warm: 'lots' is not a size"),
        (["--warm", "1%"], "less than the smallest warm tier of 64MiB in 64 segments"),
        (["--warm", "1GiB", "--write-budget", "33%"], "--write-budget: '33%' is not a size"),
        (["--warm", "1GiB", "--write-budget", "100"], "--write-budget: 100 is outside 64KiB..64GiB a second"),
        (["--warm", "8000TiB"], "name another place with --warm-path or $TMPDIR"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *LOAD, *arguments, "--no-plot"]) == exit_codes.USAGE
    found = capsys.readouterr()
    assert len(found.err.splitlines()) == 1
    assert said in found.err
