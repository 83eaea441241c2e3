"""The pure parts of the matrix: what is asked for, memory, figures, ceilings, tables and the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, BOUNDED, MATRIX, parser_of
from bench.crew import Played
from bench.jobs import BARE_GRPC, BULK, GRPC, MEMCPY, OWN, RAW_TCP, RAW_UNIX, SHM, VIEWS
from bench.matrix.figures import Figure, Report, Round, Skip, ceiling_key, figure_of, together
from bench.matrix.picture import best_batches, drawn, write_picture
from bench.matrix.plan import Group, Plan, available_bytes, plan_of
from bench.matrix.session import beside
from bench.matrix.tables import grids, to_dict
from bench.worker import GET, MATCH, MIXED, PUT

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _plan(*words: str) -> Plan:
    return plan_of(parser_of().parse_args([MATRIX, *words]))


# -- what is asked for ---------------------------------------------------------------------------------------------


def test_everything_with_bounds_runs_by_default_and_the_matrix_when_named() -> None:
    assert (*BOUNDED, MATRIX) == tuple(BENCHES)
    assert {"channel", "fairness"} <= set(BOUNDED)


def test_full_is_every_cell() -> None:
    plan = _plan("--full")
    assert (plan.workloads, plan.transports) == ((GET, PUT, MIXED, MATCH), OWN)
    assert plan.sizes == (64 * KIB, 640 * KIB, 2 * MIB, 5 * MIB)
    assert (plan.batches, plan.clients) == ((1, 16, 64, 256), (1, 2, 8))
    groups, left_out = plan.groups(5 * MIB, 1000 * GIB)
    assert [group.batches for group in groups] == [(1, 16, 64, 256)] * 3
    assert left_out == []


def test_the_default_takes_the_corners_of_moderate_calls() -> None:
    plan = _plan()
    found = {size: [group.batches for group in plan.groups(size, 1000 * GIB)[0]] for size in plan.sizes}
    assert found == {64 * KIB: [(1, 256)] * 2, 2 * MIB: [(1, 64)] * 2, 5 * MIB: [(1, 16)] * 2}
    assert replace(plan, batches=(64, 256)).batches_of(5 * MIB) == (64,)


def test_what_is_named_is_measured_however_large() -> None:
    plan = _plan("--sizes", "5MiB", "--batches", "256,64", "--clients", "2", "--transports", "bulk,shm")
    assert (plan.transports, plan.batches) == ((SHM, BULK), (64, 256))
    assert [group.batches for group in plan.groups(5 * MIB, 1000 * GIB)[0]] == [(64, 256)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--transports", "pigeon"), "--transports: 'pigeon'"),
        (("--workloads", "get,fly"), "--workloads: 'fly'"),
        (("--clients", "0"), "--clients: 0"),
        (("--sizes", "1GiB"), "--sizes: 1073741824"),
    ],
)
def test_a_wrong_option_is_named_with_its_limit(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _plan(*words)


def test_views_only_read_and_a_match_is_measured_at_one_size() -> None:
    plan = _plan("--sizes", "64KiB,2MiB")
    assert [w for t, w in plan.cells(64 * KIB) if t == VIEWS] == [GET]
    assert [w for t, w in plan.cells(64 * KIB) if t == GRPC] == [GET, PUT, MIXED, MATCH]
    assert MATCH not in {w for _, w in plan.cells(2 * MIB)}


def test_cells_that_need_more_memory_than_there_is_are_left_out_with_a_reason() -> None:
    plan = _plan("--full", "--clients", "8")
    groups, left_out = plan.groups(5 * MIB, 16 * GIB)
    assert [group.batches for group in groups] == [(1, 16, 64)]
    assert [(clients, batch) for clients, batch, _ in left_out] == [(8, 256)]
    assert "needs 45 GB of memory, there are 17" in left_out[0][2]
    assert available_bytes() > 0


@pytest.mark.parametrize("size", [64 * KIB, 640 * KIB, 5 * MIB])
def test_a_set_is_larger_than_caches_and_holds_whole_batches(size: int) -> None:
    group = Group(size, 8, (1, 64))
    assert group.part_count % 64 == 0
    assert group.set_bytes >= 256 * MIB
    assert group.arena_bytes % MIB == 0
    assert group.arena_bytes > group.set_bytes
    assert group.memory_bytes == group.arena_bytes + 2 * group.set_bytes


# -- figures -------------------------------------------------------------------------------------------------------


def test_a_round_lasts_from_the_first_start_to_the_last_end() -> None:
    played = [Played(1.0, 11.0, 0.5, 10, [1.0]), Played(1.5, 12.0, 0.25, 20, [2.0, 3.0])]
    assert together(played, 0.125) == Round(2.0, 30, 0.75, 0.125, [1.0, 2.0, 3.0])


def test_a_cell_has_the_median_rate_all_latencies_and_cpu_a_gb() -> None:
    rounds = [Round(wall_s, 1000, 2.0, 1.0, [wall_s] * 100) for wall_s in (1.0, 2.0, 4.0)]
    figure = figure_of(BULK, GET, part_bytes=10**6, batch=10, clients=1, rounds=rounds)
    assert (figure.gb_per_s, figure.keys_per_s, figure.rate) == (0.5, 500.0, 0.5)
    assert (figure.p50_ms, figure.p99_ms, figure.calls, figure.rounds) == (2.0, 4.0, 300, 3)
    assert (figure.client_cpu_s_per_gb, figure.server_cpu_s_per_gb) == (2.0, 1.0)


def test_a_match_moves_no_payload() -> None:
    figure = figure_of(SHM, MATCH, part_bytes=MIB, batch=4, clients=1, rounds=[Round(0.5, 1000, 0.01, 0.02, [1.0])])
    assert (figure.gb_per_s, figure.client_cpu_s_per_gb, figure.rate) == (None, None, 2000.0)
    assert figure.server_cpu_us_per_key == pytest.approx(20)


def _figure(name: str, workload: str, rate: float, *, size: int = 2 * MIB, batch: int = 64, clients: int = 1) -> Figure:
    round_ = Round(1.0, 1000, 0.5, 0.25, [1.0, 2.0])
    figure = figure_of(name, workload, part_bytes=size, batch=batch, clients=clients, rounds=[round_])
    return replace(figure, gb_per_s=None, keys_per_s=rate) if workload == MATCH else replace(figure, gb_per_s=rate)


def _report(cells: Sequence[Figure]) -> Report:
    named = {(MEMCPY, GET): 8.0, (MEMCPY, PUT): 8.0, (RAW_TCP, GET): 4.0, (RAW_UNIX, MATCH): 1e6, (BARE_GRPC, GET): 1.0}
    before = [_figure(name, workload, rate) for (name, workload), rate in named.items()]
    after = [replace(f, gb_per_s=f.gb_per_s and f.gb_per_s * 2, keys_per_s=f.keys_per_s * 2) for f in before]
    report = Report({"cores": "2 cores"}, list(cells), before, after, [Skip("all, 5MiB", "needs 45 GB")])
    report.cells = beside(report)
    return report


CELLS = [
    _figure(SHM, GET, 6.0),
    _figure(SHM, GET, 2.0, batch=1),
    _figure(VIEWS, GET, 90.0),
    _figure(BULK, GET, 3.0),
    _figure(BULK, GET, 2.0, clients=8),
    _figure(GRPC, MIXED, 0.75),
    _figure(SHM, PUT, 4.0),
    _figure(SHM, MATCH, 750_000),
]


def test_each_cell_stands_beside_its_own_ceiling_of_the_same_shape() -> None:
    cells = _report(CELLS).cells
    assert [(c.ceiling_name, c.ratio) for c in cells] == [
        (MEMCPY, 0.5),
        ("", None),  # Nothing of this shape was measured.
        ("", None),  # Views move nothing.
        (RAW_TCP, 0.5),
        ("", None),
        (BARE_GRPC, 0.5),
        (MEMCPY, 1 / 3),
        (RAW_UNIX, 0.5),
    ]
    assert (cells[0].ceiling_before, cells[0].ceiling_after, cells[0].ceiling) == (8.0, 16.0, 12.0)
    assert ceiling_key(CELLS[5]) == (BARE_GRPC, GET, (2 * MIB, 64, 1))


def test_the_tables_have_every_cell_its_ceilings_and_what_is_missing() -> None:
    get, put, mixed, match, ceilings, missing = grids(_report(CELLS))
    assert [len(grid.rows) for grid in (get, put, mixed, match, ceilings)] == [5, 1, 1, 1, 5]
    assert get.rows[0][:7] == ("shm", "2MiB", "64", "1", "6", "8 → 16 memcpy", "0.50")
    assert match.header[4] == "keys/s"
    assert match.rows[0][4] == "750,000"
    assert missing.rows == (("all, 5MiB", "needs 45 GB"),)


def test_json_has_every_figure_with_its_ceilings() -> None:
    found = json.loads(json.dumps(to_dict(_report(CELLS))))
    assert len(found["cells"]) == len(CELLS)
    assert found["cells"][0]["ceiling_before"] == 8.0
    assert [f["name"] for f in found["ceilings_after"]] == [f["name"] for f in found["ceilings_before"]]


# -- the picture ---------------------------------------------------------------------------------------------------


def test_the_largest_batch_of_moderate_calls_is_drawn() -> None:
    cells = [_figure(SHM, GET, 1.0, size=size, batch=batch) for size in (64 * KIB, 5 * MIB) for batch in (1, 16, 256)]
    assert best_batches(cells) == {64 * KIB: 256, 5 * MIB: 16}
    assert best_batches([_figure(SHM, GET, 1.0, batch=256)]) == {2 * MIB: 256}
    assert [(f.part_bytes, f.batch) for f in drawn(cells, workload=GET, clients=1)] == [(64 * KIB, 256), (5 * MIB, 16)]
    assert drawn(cells, workload=PUT, clients=1) == []


@pytest.mark.parametrize("cells", [CELLS, CELLS[:1], CELLS[-1:]])
def test_a_picture_is_written_of_whatever_there_is(cells: list[Figure], tmp_path: Path) -> None:
    path = tmp_path / "matrix.png"
    write_picture(_report(cells), path)
    assert path.read_bytes().startswith(b"\x89PNG")
