"""What the callers of a replay say of their next requests."""

from __future__ import annotations

import argparse
import pickle

import pytest

from kvstore.cli.command_errors import CommandError
from kvstore.cli.replay_args import add_flags, trace_and_settings
from kvstore.replay.engine import Settings
from kvstore.replay.plan import plan_of
from kvstore.workload.hints import Sayings, said_of, sessions_of
from kvstore.workload.trace import Trace, TraceRequest, as_block_ids
from kvstore_client import Hint

LOAD = ["gen:chat", "--rate", "2", "--seconds", "60", "--part-size", "64KiB"]


def _settings(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return trace_and_settings(parser.parse_args([*LOAD, *arguments]))[1]


def test_the_command_says_what_is_said() -> None:
    assert _settings().sayings is None
    assert _settings("--hints", "over=0.7,wrong=0.05").sayings == Sayings(over=0.7, wrong=0.05)
    paced = _settings("--hints", "over=1,sigma=0.5,bias=0.33,lie=1", "--speed", "10x").sayings
    assert paced == Sayings(over=1.0, sigma=0.5, bias=0.33, lie=1.0)
    assert _settings("--hints", "tool=1,flip=0.1", "--speed", "10x").sayings == Sayings(sigma=0.0, tool=True, flip=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hints", "ovr=1"], "--hints: 'ovr' is not one of over, wrong, sigma"),
        (["--hints", "over"], "--hints: 'over' is not over=NUMBER"),
        (["--hints", "over=much"], "--hints: 'over=much' is not over=NUMBER"),
        (["--hints", "over=nan"], "--hints: over is nan, outside 0..1"),
        (["--hints", "over=1.1"], "--hints: over is 1.1, outside 0..1"),
        (["--hints", "sigma=1"], "--hints: promises are of the trace's own time; give a --speed"),
        (["--hints", "tool=1"], "--hints: promises are of the trace's own time; give a --speed"),
        (["--policy", "lru", "--server", "127.0.0.1:1"], "--policy: is a running server's own affair"),
    ],
)
def test_what_cannot_be_said_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError) as caught:
        _settings(*arguments)
    assert said in str(caught.value)


def test_hints_go_with_their_request_in_the_time_of_the_replay() -> None:
    made = [TraceRequest(float(t), 5, 1, 16, 1, as_block_ids([t])) for t in (0, 20, 60)]
    trace = Trace("made", 16, tuple(made))
    said = said_of(sessions_of(made, 3), Sayings(over=1.0, sigma=0.0))
    plan = pickle.loads(pickle.dumps(plan_of(trace, part_bytes=4096, salt=b"s", said=said, speed=10.0)))
    assert [plan.hint(i) for i in range(3)] == [Hint(2.0, 6), Hint(4.0, 6), Hint(0.0, 6)]
    silent = plan_of(trace, part_bytes=4096, salt=b"s", said=said_of(sessions_of(made, 3), Sayings(over=1.0)))
    assert [silent.hint(i) for i in range(3)] == [Hint(None, 6), Hint(None, 6), Hint(0.0, 6)]
    assert plan_of(trace, part_bytes=4096, salt=b"s").hint(0) is None
