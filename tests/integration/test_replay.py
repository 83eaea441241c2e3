"""The replay with real server and worker processes, on short generated loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.cli import exit_codes, main
from kvstore.replay.crew import CrewSize, crew_at_work
from kvstore.replay.dispatch import Dispatch, Pace
from kvstore.replay.faults import WorkerDied
from kvstore.replay.own_server import own_server
from kvstore.replay.plan import plan_of
from kvstore.workload.generate import generate_trace
from kvstore.workload.profiles import API, CHAT
from kvstore.workload.reuse import tail_first_lru
from kvstore_client import Client, ClientOptions
from tests.integration.shard import FLAGS, closed_address, shard

pytestmark = pytest.mark.integration

LOAD = ["gen:chat", "--rate", "2", "--seconds", "60", "--capacity", "30%", "--part-size", "8KiB"]
# A tenth of it in memory; all of it fits on disk.
TIERED = [
    *("gen:api", "--rate", "3", "--seconds", "20", "--part-size", "32KiB", "--capacity", "10%", "--warm", "100%"),
    *("--speed", "4x", "--in-flight", "2", "--no-plot", "--json", "-"),
]
START_S = 20.0
END_S = 10.0


def test_hits_are_those_of_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, figures = tmp_path / "plot.png", tmp_path / "figures.json"
    assert main(["replay", *LOAD, "--json", str(figures), "--plot", str(plot)]) == exit_codes.OK
    found = json.loads(figures.read_text())
    trace = generate_trace(CHAT, rate=2, seconds=60)
    expected = tail_first_lru(trace, found["capacity_blocks"])
    assert found["capacity_bytes"] == round(0.3 * trace.distinct_blocks()) * 8192
    assert found["prefix_hit_rate"] == pytest.approx(expected.prefix, abs=0.005)
    assert found["block_hit_rate"] - found["prefix_hit_rate"] < 0.001
    assert found["expected_prefix_hit_rate"] == expected.prefix
    assert found["tokens_saved"] == round(found["prefix_hit_rate"] * found["accesses"]) * CHAT.block_tokens
    assert found["wrong_bytes"] == 0
    assert found["failed_calls"] == 0
    assert found["decode_asked_blocks"] == trace.accesses()
    assert found["decode_good_blocks"] >= 0.9 * trace.accesses()  # In so small a store some go before decode comes.
    assert found["evictions"]["capacity"] > 0
    assert found["get_p50_ms"] <= found["get_p99_ms"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "wrong bytes: 0" in said
    assert str(plot) in said


def test_several_workers_keep_the_order_of_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    workers = ["--prefill", "2", "--decode", "2", "--in-flight", "12", "--limit", "100"]
    assert main(["replay", *LOAD, *workers, "--no-plot", "--json", "-"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["prefix_hit_rate"] == pytest.approx(found["expected_prefix_hit_rate"], abs=0.005)
    assert (found["requests"], found["wrong_bytes"], found["failed_calls"]) == (100, 0, 0)


def test_a_running_server_is_used_at_the_pace_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with shard("64MiB") as server:
        where = ["--server", server.target, "--admin", server.admin_target]
        load = ["gen:chat", "--rate", "2", "--seconds", "20", "--part-size", "8KiB"]
        assert main(["replay", *load, *where, "--speed", "20x", "--no-plot", "--json", "-"]) == exit_codes.OK
        server.check()
    found = json.loads(capsys.readouterr().out)
    assert found["capacity_bytes"] == 64 << 20
    assert found["prefix_hit_rate"] == found["expected_prefix_hit_rate"]
    span_s = generate_trace(CHAT, rate=2, seconds=20).span_s()
    assert found["elapsed_s"] >= span_s / 20


def test_bytes_that_nobody_wrote_are_counted_as_wrong() -> None:
    trace = generate_trace(CHAT, rate=1, seconds=10)
    plan = plan_of(trace, part_bytes=4096, salt=b"known")
    with shard() as server:
        with Client(ClientOptions(target=server.target)) as client:
            assert client.namespace(plan.spec()).put(plan.keys(0)[:1], [b"\x00" * 4096]).ok
        with crew_at_work(CrewSize(), plan, target=server.target, wait_ms=1000) as crew:
            crew.wait_ready()
            dispatch = Dispatch(plan, crew, pace=Pace(in_flight=2), check=lambda tally: None)
            dispatch.run()
    assert dispatch.tally.wrong_bytes > 4000
    assert dispatch.tally.prefilled == dispatch.tally.decoded == len(trace.requests)


def test_a_warm_tier_brings_back_what_memory_had_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["replay", *TIERED]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    trace = generate_trace(API, rate=3, seconds=20)
    in_memory = tail_first_lru(trace, found["capacity_blocks"])
    warm, from_disk = found["warm"], found["from_disk"]
    assert (found["wrong_bytes"], found["corrupt_blocks"], found["failed_calls"]) == (0, 0, 0)
    assert warm["state"] == "on"
    assert warm["capacity_blocks"] >= trace.distinct_blocks()
    assert found["prefix_hit_rate"] > in_memory.prefix + 0.02
    assert found["prefix_hit_rate"] <= found["expected_prefix_hit_rate"] == found["ceiling_hit_rate"]
    assert found["disk_hit_rate"] == from_disk["hits"] / found["accesses"] > 0
    assert warm["promoted_blocks"] >= from_disk["hits"]
    assert 0 <= warm["written_bytes"] - warm["written_blocks"] * 32768 < 8 << 20  # Some may be on their way.
    assert warm["writes_per_access"] == warm["written_blocks"] / found["accesses"] > 0
    assert warm["stored_blocks"] <= trace.distinct_blocks()
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_come_from_disk_in_time_is_late_and_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["replay", *TIERED, "--wait", "0s"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["from_disk"]["late_blocks"] > 0
    assert (found["wrong_bytes"], found["corrupt_blocks"], found["failed_calls"]) == (0, 0, 0)
    assert found["prefix_hit_rate"] < found["block_hit_rate"]  # They are stored, and no hits.


def test_a_folder_that_was_named_stays_and_a_budget_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "warm"
    order = ["--warm-path", str(folder), "--write-budget", "1MiB"]
    assert main(["replay", *TIERED, *order]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["wrong_bytes"] == 0
    assert found["warm"]["dropped_blocks"]["budget"] > 0
    assert any(folder.glob("segments/*.seg"))


def test_the_warm_tier_of_a_running_server_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm = ["--warm.path", str(tmp_path), "--warm.capacity", "64MiB", "--warm.segment", "1MiB"]
    with own_server([*FLAGS, "--hot.capacity", "16MiB", "--limits.max_part", "64KiB", *warm]) as server:
        where = ["--server", server.target, "--admin", server.admin_target]
        load = ["gen:api", "--rate", "3", "--seconds", "20", "--part-size", "32KiB", "--in-flight", "2"]
        assert main(["replay", *load, *where, "--no-plot", "--json", "-"]) == exit_codes.OK
        server.check()
    found = json.loads(capsys.readouterr().out)
    assert (found["warm"]["capacity_blocks"], found["warm"]["state"]) == (2048, "on")
    trace = generate_trace(API, rate=3, seconds=20)
    assert found["expected_prefix_hit_rate"] == tail_first_lru(trace, 512 + 2048).prefix
    assert found["warm"]["written_blocks"] > 0
    assert found["from_disk"]["hits"] > 0
    assert found["wrong_bytes"] == 0


def test_a_dead_server_ends_the_replay(tmp_path: Path) -> None:
    replay = _start(tmp_path)
    os.kill(_child(replay, "serve"), signal.SIGKILL)
    out, err = replay.communicate(timeout=30)
    assert replay.returncode == exit_codes.FAILED
    assert "kvstore replay: the server died with exit code -9" in err
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("warm", [[], ["--warm", "64MiB"]])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, warm: list[str]) -> None:
    replay = _start(tmp_path, *warm)
    assert bool(list(tmp_path.iterdir())) == bool(warm)
    children = _descendants(replay.pid)
    assert len(children) >= 3
    replay.send_signal(number)
    _, err = replay.communicate(timeout=30)
    assert replay.returncode == exit_codes.INTERRUPTED
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert _left_of(children) == []


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    replay = _start(tmp_path)
    children = _descendants(replay.pid)
    replay.kill()
    replay.communicate(timeout=30)
    assert _left_of(children) == []


def test_a_missing_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["gen:chat", "--seconds", "20"]
    assert main(["replay", *load, "--server", closed_address()]) == exit_codes.UNREACHABLE
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("kvstore replay: no server answers at 127.0.0.1:")


def test_a_dead_worker_ends_the_run() -> None:
    plan = plan_of(generate_trace(CHAT, rate=1, seconds=10), part_bytes=4096, salt=b"s")
    with shard() as server, crew_at_work(CrewSize(), plan, target=server.target, wait_ms=1000) as crew:
        crew.wait_ready()
        for pid in _descendants(os.getpid()):
            if "spawn_main" in _command(pid):
                os.kill(pid, signal.SIGKILL)
        dispatch = Dispatch(plan, crew, pace=Pace(in_flight=2), check=lambda tally: None)
        with pytest.raises(WorkerDied):
            dispatch.run()


def _start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Starts a replay that would take minutes, and returns once its workers are at it."""
    command = [sys.executable, "-m", "kvstore", "replay", "gen:chat", "--speed", "1x", "--plot", "p.png", *more]
    here = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    replay = subprocess.Popen(command, cwd=folder, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end_s = time.monotonic() + START_S
    while sum("spawn_main" in _command(pid) for pid in _descendants(replay.pid)) < 2:
        assert replay.poll() is None, replay.communicate()
        assert time.monotonic() < end_s, "the workers did not start"
        time.sleep(0.05)
    time.sleep(1.0)  # They have started, and need a moment to be in the middle of a request.
    return replay


def _child(replay: subprocess.Popen[str], word: str) -> int:
    return next(pid for pid in _descendants(replay.pid) if word in _command(pid).split("\0"))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _left_of(processes: list[int]) -> list[int]:
    """Returns those that still run, after the time that an orderly end may take."""
    end_s = time.monotonic() + END_S
    while any(map(_runs, processes)) and time.monotonic() < end_s:
        time.sleep(0.05)
    return [pid for pid in processes if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
