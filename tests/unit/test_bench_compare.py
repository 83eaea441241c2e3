"""The pure parts of bench.compare: what is asked for, who can run, the order of rounds, figures and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.compare.__main__ import parser_of, plan_of
from bench.compare.clients import memcpy
from bench.compare.clients.work import Job, Values, answer
from bench.compare.conversation import ClientFailed
from bench.compare.environments import ENVIRONMENTS, missing, unmet
from bench.compare.figures import (
    GB_PER_S,
    GET,
    LATENCY,
    MS,
    PUT,
    Beside,
    Figure,
    Report,
    Skip,
    latency_figure,
    quantile,
    rate_figure,
)
from bench.compare.lmcache_bench import SMALLEST_BYTES, parse, shape
from bench.compare.peers import CEILINGS, HOST, OURS, PEERS, ROWS, TCP, absent, chosen
from bench.compare.picture import bars, calls, shown, write_picture
from bench.compare.plan import Plan
from bench.compare.processes import free_ports, tail
from bench.compare.readiness import split
from bench.compare.tables import grids, to_json, to_markdown
from bench.compare.turn import Seat, latencies, rates, rounds_for, slices

KIB, MIB = 1 << 10, 1 << 20
CLIENTS = Path(memcpy.__file__).parent


def _plan(*words: str) -> Plan:
    return plan_of(parser_of().parse_args(words))


# -- what is asked for ---------------------------------------------------------------------------------------------


def test_everything_is_measured_by_default() -> None:
    plan = _plan()
    assert plan.rows == ROWS
    assert (plan.sizes, plan.batches, plan.rounds) == ((64 * KIB, 640 * KIB, 2 * MIB, 5 * MIB), (1, 16, 64), 5)
    assert plan.venvs == Path.home() / ".cache/kvcommons-compare"


def test_quick_measures_less_unless_told_otherwise() -> None:
    plan = _plan("--quick", "--sizes", "5MiB")
    assert (plan.sizes, plan.batches, plan.rounds) == ((5 * MIB,), (1, 16), 3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--peers", "redis,rediss"), "rediss"),
        (("--batches", "1,65"), "--batches: 65"),
        (("--sizes", "8MiB"), "--sizes: 8388608"),
        (("--rounds", "0"), "--rounds: 0"),
    ],
)
def test_a_wrong_option_is_named_with_its_limit(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _plan(*words)


def test_peers_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert [row.title for row in chosen("memcached,ours")] == [
        *(row.title for row in ROWS if row.peer == OURS and row.link == TCP),
        "memcached",
        *(row.title for row in ROWS if row.peer == OURS and row.link == HOST),
    ]


# -- the table of peers --------------------------------------------------------------------------------------------


def test_every_row_has_a_client_a_ceiling_and_pinned_libraries() -> None:
    assert len({row.title for row in ROWS}) == len(ROWS)
    assert {row.ceiling for row in ROWS} == {each.name for each in CEILINGS}
    for row in ROWS:
        assert not row.client or (CLIENTS / f"{row.client}.py").is_file(), row
        assert bool(row.environment) == (row.peer != OURS), row
        assert row.peer == OURS or row.environment in ENVIRONMENTS, row


def test_every_version_is_pinned() -> None:
    pins = [pin for made in ENVIRONMENTS.values() for pin in (*made.pins, *made.alone)]
    assert [pin for pin in pins if pin.count("==") != 1 or pin != pin.lower() or "_" in pin] == []


# -- who can run ---------------------------------------------------------------------------------------------------


def test_a_build_tag_meets_a_pin_and_another_version_or_none_does_not() -> None:
    found = {"torch": "2.13.0+cpu", "numpy": "2.0.0"}
    assert unmet(["torch==2.13.0", "numpy==2.2.6", "redis==8.1.0"], found) == ["numpy 2.2.6", "redis 8.1.0"]


def test_an_absent_environment_is_a_reason(tmp_path: Path) -> None:
    reason = missing(tmp_path, ENVIRONMENTS["redhare"])
    assert str(tmp_path / "redhare") in reason
    assert "--install" in reason


def test_an_absent_program_or_library_is_a_reason() -> None:
    row = replace(ROWS[-1], programs=("no-such-program",), libraries=("no-such-library",), packages=("some-package",))
    reason = absent(row)
    assert "no-such-program, libno-such-library not found" in reason
    assert "apt-get install some-package" in reason
    assert absent(ROWS[0]) == ""


def test_rows_without_their_environment_are_skipped_and_ours_stay(tmp_path: Path) -> None:
    able, skips = split(ROWS, tmp_path)
    assert {row.peer for row in able} == {OURS}
    assert {skip.title for skip in skips} == {row.title for row in ROWS if row.peer != OURS}
    assert all(skip.reason and skip.size_bytes is None for skip in skips)


# -- the order of rounds -------------------------------------------------------------------------------------------


class Recorder:
    """A player that takes a set time for each round and writes down when it played."""

    def __init__(self, name: str, journal: list[str], round_s: float = 1.0) -> None:
        self._name, self._journal, self._round_s = name, journal, round_s

    def round_s(self, op: str, batch: int) -> float:
        self._journal.append(f"{self._name}:{op}{batch}")
        return self._round_s

    def latencies_ms(self, first: int, calls: int) -> list[float]:
        self._journal.append(f"{self._name}:{first}+{calls}")
        return [float(i) for i in range(first, first + calls)]


def test_seats_play_in_turn_after_their_warm_up_rounds() -> None:
    journal: list[str] = []
    seats = [Seat("a", Recorder("a", journal)), Seat("b", Recorder("b", journal, 2.0), warm_up_rounds=2)]
    assert rates(seats, PUT, batch=4, rounds=3) == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert [line[0] for line in journal] == list("abb" + "ab" + "ba" + "ab")


def test_one_slow_seat_shortens_the_turn_of_all() -> None:
    journal: list[str] = []
    seats = [Seat("a", Recorder("a", journal)), Seat("b", Recorder("b", journal, 5.0))]
    assert {len(times) for times in rates(seats, GET, batch=1, rounds=5).values()} == {3}
    assert [rounds_for(s, 5) for s in (4.0, 5.0, 9.0)] == [5, 3, 1]
    assert rounds_for(5.0, 2) == 2


def test_single_gets_are_sliced_so_that_seats_alternate_and_each_call_counts_once() -> None:
    journal: list[str] = []
    seats = [Seat("a", Recorder("a", journal)), Seat("b", Recorder("b", journal))]
    times = latencies(seats, uncounted=20, calls=10)
    assert times == {"a": [float(i) for i in range(20, 30)], "b": [float(i) for i in range(20, 30)]}
    assert journal[:4] == ["a:0+20", "b:0+20", "a:20+2", "b:20+2"]
    assert slices(3) == [(0, 1), (1, 2), (2, 3)]


# -- the client's side ---------------------------------------------------------------------------------------------


def test_a_client_answers_and_verification_sees_what_was_not_put() -> None:
    job = Job.from_json(Job(4 * KIB, 20, "").to_json())
    values = Values(job)
    store = memcpy.open_memory(job, values)
    assert answer({"do": "verify"}, store=store, values=values) == {"equal": False}
    assert answer({"do": "put", "batch": 16}, store=store, values=values)["s"] > 0
    assert answer({"do": "get", "batch": 7}, store=store, values=values)["s"] > 0
    assert answer({"do": "verify"}, store=store, values=values) == {"equal": True}
    assert len(answer({"do": "latency", "first": 15, "calls": 30}, store=store, values=values)["ms"]) == 30
    with pytest.raises(ValueError, match="dance"):
        answer({"do": "dance"}, store=store, values=values)


def test_two_processes_would_have_the_same_values_and_different_ones_each() -> None:
    one, other = Values(Job(KIB, 4, "")), Values(Job(KIB, 4, ""))
    assert one.names == other.names
    assert [bytes(view) for view in one.sources] == [bytes(view) for view in other.sources]
    assert len({bytes(view) for view in one.sources}) == len(set(one.names)) == 4
    assert one.target_at[1] - one.target_at[0] == KIB


def test_free_ports_differ_and_a_log_ends_in_one_line(tmp_path: Path) -> None:
    assert len(set(free_ports(5))) == 5
    log = tmp_path / "log"
    log.write_text("one\n\ntwo \nthree\nfour\n")
    assert tail(log) == "two / three / four"


# -- LMCache's own benchmark ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [64 * KIB, 640 * KIB, 2 * MIB, 5 * MIB])
def test_a_chunk_has_the_size_of_a_value(size_bytes: int) -> None:
    heads, layers = shape(size_bytes)
    assert heads * layers * SMALLEST_BYTES == size_bytes


def test_a_size_that_no_chunk_has_is_refused() -> None:
    with pytest.raises(ValueError, match="100000"):
        shape(100_000)


def _bench_output(*, ok: int, fail: int) -> str:
    metrics = {
        "results": {"checksum_ok": ok, "checksum_fail": fail},
        "cold_store": {"cold_store_p50": 20.0},
        "warm_retrieve": {"warm_retrieve_p50": 10.0, "warm_retrieve_p99": 12.5},
    }
    return "=== Request seq=1 ===\n  {not this}\n" + json.dumps({"metrics": metrics}, indent=2) + "\nDone.\n"


def test_its_report_is_read() -> None:
    found = parse(_bench_output(ok=3, fail=0))
    assert (found.store_ms, found.retrieve_ms, found.retrieve_p99_ms) == (20.0, 10.0, 12.5)


@pytest.mark.parametrize("output", ["nothing", _bench_output(ok=3, fail=1), _bench_output(ok=0, fail=0)])
def test_a_report_without_verified_bytes_is_a_failure(output: str) -> None:
    with pytest.raises(ClientFailed):
        parse(output)


# -- figures and tables --------------------------------------------------------------------------------------------


def test_a_rate_stands_beside_the_rounds_of_its_neighbours() -> None:
    figure = rate_figure(
        "memcached",
        size_bytes=2 * MIB,
        set_bytes=10**9,
        op=GET,
        batch=16,
        times_s=[1.0, 2.0, 4.0],
        ceiling=Beside("raw TCP", [0.5, 1.0, 1.0]),
        ours=Beside("KV Commons bulk", [0.5, 1.0, 2.0]),
    )
    assert (figure.value, figure.unit, figure.ceiling, figure.ours) == (0.5, GB_PER_S, 1.0, 1.0)
    assert (figure.ratio, figure.ours_ratio) == (0.5, 2.0)


def test_a_latency_is_a_multiple_of_its_ceiling() -> None:
    figure = latency_figure(
        "memcached", size_bytes=2 * MIB, p50=3.0, p99=5.0, ceiling=Beside("raw TCP", [1.0, 2.0, 9.0]), ours=None
    )
    assert (figure.ceiling, figure.ratio, figure.ours_ratio) == (1.0, 3.0, None)
    assert [quantile(range(1, 501), share) for share in (0.5, 0.99)] == [250, 495]


def _figure(title: str, op: str, value: float, *, size_bytes: int = 2 * MIB, batch: int = 16) -> Figure:
    p99 = value * 2 if op == LATENCY else None
    unit = MS if op == LATENCY else GB_PER_S
    name = next(row.ceiling for row in ROWS if row.title == title)
    ceiling = Figure(title, size_bytes, op, batch, value, unit, p99=p99, ceiling=4.0, ceiling_name=name)
    return replace(ceiling, ceiling_p99=5.0, ratio=value / 4, ours=3.0, ours_name="ours", ours_ratio=3 / value)


def _report(figures: Sequence[Figure]) -> Report:
    before = [Figure("raw TCP", 2 * MIB, GET, 16, 4.0, GB_PER_S)]
    after = [Figure("raw TCP", 2 * MIB, GET, 16, 4.5, GB_PER_S)]
    skips = [Skip("OpenLake, shared memory", "no | pipes here")]
    return Report({"cores": "2 cores"}, {"rounds": "5"}, list(figures), before, after, skips)


FIGURES = [
    _figure("memcached", GET, 2.0),
    _figure("Redis, TCP", GET, 1.0),
    _figure("Redis, TCP", PUT, 3.0),
    _figure("Redis, TCP, hiredis", GET, 2.5),
    _figure("Redis, TCP, hiredis", PUT, 0.5),
    _figure("Redis, TCP", LATENCY, 0.9, batch=1),
    _figure("Redis, TCP, hiredis", LATENCY, 0.5, batch=1),
]


def test_the_tables_have_shares_ratios_drift_and_reasons() -> None:
    share, ours, ceilings, skips = grids(_report(FIGURES))
    assert [row[0] for row in share.rows] == ["Redis, TCP", "Redis, TCP, hiredis", "memcached"]
    assert share.header[2:] == ("put x16", "get x16", "get p50 / p99 ms")
    assert share.rows[0][2:] == ("3.00 (75%)", "1.00 (25%)", "0.900 / 1.800 (0.2 x)")
    assert share.rows[2][2:] == ("-", "2.00 (50%)", "-")
    assert ours.rows[0][2] == "3.00 (1.00 x)"
    assert ceilings.rows[0][-2] == "4.00 → 4.50"
    assert skips.rows == (("OpenLake, shared memory", "all", "no | pipes here"),)


def test_a_page_escapes_pipes_and_carries_the_notes_of_its_rows() -> None:
    page = to_markdown(_report(FIGURES))
    assert "no \\| pipes here" in page
    assert "- memcached: the copy" in page
    assert "Redhare" not in page
    assert "- cores: 2 cores" in page


def test_json_has_every_figure_with_its_ceiling_and_ratio() -> None:
    found = json.loads(to_json(_report(FIGURES)))
    assert len(found["figures"]) == len(FIGURES)
    assert all(each["ceiling"] == 4.0 and each["ratio"] == each["value"] / 4 for each in found["figures"])
    assert found["skips"][0]["reason"] == "no | pipes here"


# -- the picture ---------------------------------------------------------------------------------------------------


def test_a_family_shows_its_better_variant_of_each_direction_and_the_best_get_comes_last() -> None:
    drawn = bars(FIGURES, link=TCP, size_bytes=2 * MIB, batch=16)
    assert [(bar.name, bar.get, bar.put) for bar in drawn] == [("memcached", 2.0, 0.0), ("Redis, TCP", 2.5, 3.0)]
    assert bars(FIGURES, link=HOST, size_bytes=2 * MIB, batch=16) == []


def test_a_rate_of_calls_that_move_nothing_is_not_drawn() -> None:
    figures = [_figure("KV Commons shm views", GET, 90.0), _figure("KV Commons shm", GET, 9.0)]
    assert [bar.name for bar in bars(figures, link=HOST, size_bytes=2 * MIB, batch=16)] == ["KV Commons shm"]


def test_single_gets_stand_beside_their_ceiling() -> None:
    drawn = calls(FIGURES, size_bytes=2 * MIB)
    assert [(call.name, call.p50, call.p99) for call in drawn] == [
        ("raw TCP (ceiling)", 4.0, 5.0),
        ("Redis, TCP", 0.5, 1.0),
    ]


def test_the_picture_shows_2_mib_by_16_or_what_comes_nearest() -> None:
    assert shown(FIGURES) == (2 * MIB, 16)
    assert shown([_figure("memcached", GET, 1.0, size_bytes=5 * MIB, batch=64)]) == (5 * MIB, 64)


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    write_picture(_report(FIGURES), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_peers_are_known_by_short_names() -> None:
    assert PEERS == ("ours", "redis", "memcached", "mooncake", "lmcache-legacy", "redhare", "openlake", "lmcache-mp")
