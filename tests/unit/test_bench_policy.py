"""The benchmark of eviction policies: it counts as a plain replay does, and judges what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.policy import __main__ as command
from bench.policy import speed
from bench.policy.figures import ORACLE, Cell, grids, verdicts
from bench.policy.hints import ENDS, EXACT, hint_verdicts, hinted
from bench.policy.oracle import furthest_next_use
from bench.policy.others import library, play_other
from bench.policy.play import Played, play
from kvstore.core.eviction import POLICIES
from kvstore.core.eviction.base import TouchHint
from kvstore.workload.generate import generate_trace
from kvstore.workload.hints import Sayings, Sessions, sessions_of
from kvstore.workload.profiles import API, CHAT, Profile
from kvstore.workload.reuse import HitRates, infinite_hit_rate, tail_first_lru
from kvstore.workload.trace import Trace, TraceRequest, as_block_ids


def _trace(*requests: list[int]) -> Trace:
    made = [TraceRequest(float(i), None, 1, 16 * len(r), 1, as_block_ids(r)) for i, r in enumerate(requests)]
    return Trace("made", 16, tuple(made))


@pytest.mark.parametrize(("profile", "seconds"), [(CHAT, 900), (API, 40)])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_lru_is_played_as_a_plain_replay_does(profile: Profile, seconds: int, share: float) -> None:
    trace = generate_trace(profile, seed=3, seconds=seconds)
    played = Played.of(trace)
    capacity = played.capacity(100 * share)
    assert played.blocks == trace.distinct_blocks()
    assert played.accesses == trace.accesses()
    assert play(played, POLICIES["lru"], capacity) == pytest.approx(tail_first_lru(trace, capacity), abs=2e-3)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_beats_the_oracle_and_none_forgets_what_fits(name: str) -> None:
    trace = generate_trace(CHAT, seed=4, seconds=900)
    played = Played.of(trace)
    ceiling = infinite_hit_rate(trace)
    assert play(played, POLICIES[name], played.blocks).prefix == pytest.approx(ceiling)
    assert furthest_next_use(played, played.blocks).prefix == pytest.approx(ceiling)
    for percent in (1, 5, 20):
        capacity = played.capacity(percent)
        best = furthest_next_use(played, capacity)
        found = play(played, POLICIES[name], capacity)
        assert found.prefix <= found.block <= best.block
        assert found.prefix <= best.prefix


def test_the_oracle_keeps_what_comes_back_first() -> None:
    played = Played.of(_trace([1, 2], [3], [4], [3], [1, 2]))
    assert furthest_next_use(played, 2) == HitRates(2 / 7, 2 / 7)
    assert furthest_next_use(played, 3) == HitRates(3 / 7, 3 / 7)


def test_a_prefix_ends_at_its_first_hole() -> None:
    played = Played.of(_trace([1, 2, 3], [9], [1, 2, 3]))
    rates = play(played, POLICIES["lru"], 3)
    assert rates == HitRates(2 / 7, 2 / 7), "the tail had to go, not the head"


def test_empty_requests_count_for_nothing() -> None:
    played = Played.of(_trace([], [1], [], [1]))
    assert play(played, POLICIES["expected"], 1) == HitRates(0.5, 0.5)


@pytest.mark.skipif(library() is None, reason="libcachesim is not installed")
def test_the_library_s_policies_take_the_same_trace() -> None:
    played = Played.of(generate_trace(CHAT, seed=4, seconds=300))
    rates = play_other(played, "arc", played.capacity(20))
    assert 0 < rates.prefix <= furthest_next_use(played, played.capacity(20)).prefix


def _cells(**prefixes: float) -> list[Cell]:
    return [Cell("t", name, 5.0, HitRates(p / 100 + 0.01, p / 100)) for name, p in prefixes.items()]


def test_ours_must_be_the_best_online_policy_and_near_lru() -> None:
    held = {row.name: row.holds for row in verdicts(_cells(min=50.0, expected=30.0, lru=29.0))}
    assert held["expected, mean of 1 cells"] is True
    assert held["min, mean of 1 cells"] is None
    assert held["expected, most points under lru"] is True
    held = {row.name: row.holds for row in verdicts(_cells(min=50.0, expected=30.0, lru=33.0))}
    assert held["expected, mean of 1 cells"] is False
    assert held["expected, most points under lru"] is False


def test_what_is_known_of_a_trace_is_asked_of_us() -> None:
    cells = [Cell("gen:api", "expected", p, HitRates(0.0, share)) for p, share in ((1.0, 0.466), (2.0, 0.40))]
    row = next(row for row in verdicts(cells) if "best known" in row.name)
    assert (row.value, row.holds) == (1, False)


def test_block_hits_are_shown_where_they_are_more() -> None:
    (grid,) = grids(_cells(lru=20.0))
    assert grid.header == ("policy", "5 %")
    assert grid.rows == (("lru", "20.0 (21.0)"),)


def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "small.jsonl"
    with source.open("w") as out:
        for i in range(40):
            out.write(
                json.dumps({"timestamp": 1000 * i, "input_length": 2048, "output_length": 1, "hash_ids": _ids(i)})
            )
            out.write("\n")
    files = [tmp_path / name for name in ("f.json", "f.md", "f.png")]
    flags = [str(source), "--policies", "lru,expected,min", "--capacities", "10,50"]
    flags += ["--json", str(files[0]), "--markdown", str(files[1]), "--png", str(files[2])]
    assert command.main(flags) in (0, 1)
    figures = json.loads(files[0].read_text())["policy"]
    assert len(figures) == 6
    assert {figure["policy"] for figure in figures} == {"lru", "expected", "min"}
    assert "small: prefix hit" in files[1].read_text()
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert "million look-ups a minute" in capsys.readouterr().out


def _ids(request: int) -> list[int]:
    session = request % 7
    return (
        [100 * session + depth for depth in range(4)] if request % 3 else [10_000 + 10 * request + d for d in range(4)]
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["gen:nothing"], "no profile 'nothing'"),
        (["gen:api@x"], "what follows @ is no number"),
        (["/no/such/file"], "No such file"),
        (["gen:api", "--policies", "lur"], "no policy 'lur'"),
        (["gen:api", "--capacities", "0"], "outside of 0..100"),
    ],
)
def test_a_wrong_argument_is_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(flags)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_seed_and_a_sample_are_part_of_a_trace_s_name() -> None:
    first, second = command.load("gen:chat@1"), command.load("gen:chat@2")
    assert len(first.requests) != len(second.requests)


def test_the_speed_is_that_of_a_full_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TOUCHES", 64 * 200)
    for make in POLICIES.values():
        assert speed.touches_per_s(make, 2000, 0.5) > 0


# -- hints -----------------------------------------------------------------------------------------------------------


def _with_sessions(name: str = "") -> tuple[Played, Sessions]:
    requests = generate_trace(CHAT, seed=1, seconds=1200).requests
    count = sum(request.time_s <= 600 for request in requests)
    return Played.of(Trace("short", 512, requests[:count])), sessions_of(requests, count)


def _hinted(sayings: Sayings) -> list[TouchHint]:
    played, sessions = _with_sessions()
    return list(hinted(played, sessions, sayings).hints)


def test_hints_follow_what_sessions_did_next() -> None:
    requests = [TraceRequest(float(t), s, 1, 16, 1, as_block_ids([t])) for t, s in ((0, 1), (3, 2), (10, 1), (12, 2))]
    sessions = sessions_of(requests, 3)
    assert sessions.of == [1, 2, 1]
    assert sessions.gaps_s.tolist() == [10.0, 9.0, -1.0], "what came after the end of the trace counts"
    played = Played.of(Trace("made", 16, tuple(requests[:3])))
    exact = hinted(played, sessions, Sayings(over=1.0, sigma=0.0)).hints
    assert list(exact) == [TouchHint(5, 2), TouchHint(5, 3), TouchHint(0, 2)], "within 16 s: rounded up"


def test_sessions_are_guessed_where_a_trace_names_none() -> None:
    trace = _trace([1, 2, 3], [1, 7, 8], [1, 2, 3, 4], [1, 7, 8, 9], [20, 21])
    found = sessions_of(trace.requests, len(trace.requests)).of
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert len({found[0], found[1], found[4]}) == 3


def test_errors_of_hints_are_as_many_as_asked_for() -> None:
    ends = [hint.next_use == 0 for hint in _hinted(Sayings(over=0.7))]
    wrong = [hint.next_use == 0 for hint in _hinted(Sayings(over=0.7, wrong=0.2))]
    assert sum(wrong) == pytest.approx(sum(ends) / 0.8, rel=0.05)
    exact, noisy = _hinted(Sayings(sigma=0.0)), _hinted(Sayings(sigma=1.0))
    assert all((one.next_use is None) == (other.next_use is None) for one, other in zip(exact, noisy, strict=True))
    assert exact != noisy
    tools = {hint.next_use for hint in _hinted(Sayings(sigma=0.0, tool=True))}
    assert tools == {None, 5}


def test_hints_are_judged_by_what_is_known_of_them() -> None:
    cells = [Cell("gen:chat", ENDS, 1.0, HitRates(0.0, 0.08)), Cell("gen:chat", ENDS, 2.0, HitRates(0.0, 0.2))]
    (row,) = hint_verdicts(cells)
    assert row.value == pytest.approx(1.5)
    assert row.holds is False
    conversation = "mooncake_conversation"
    cells = [Cell(conversation, name, 5.0, HitRates(0.0, p)) for name, p in ((ORACLE, 0.4), (EXACT, 0.39))]
    (row,) = hint_verdicts(cells)
    assert row.value == pytest.approx(0.975)
    assert row.holds is False


def test_the_command_plays_hints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SAYINGS", {"nothing": Sayings(), EXACT: Sayings(over=1.0, sigma=0.0)})
    monkeypatch.setattr(command, "with_sessions", _with_sessions)
    assert command.main(["short", "--hints", "--capacities", "5"]) == 0
    (row,) = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if EXACT in line and "│" in line]
    assert float(row[1].split()[0]) > 20
