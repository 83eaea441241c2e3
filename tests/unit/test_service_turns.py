"""Turns: what a connection may move beside others, and for how long the loop stays awake."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import cast

import pytest

from kvstore.service.framed.turns import (
    _BESIDE_S,
    _CROWDED_AGAIN_S,
    _CROWDED_S,
    _LEAST_POLL_S,
    _LONGEST_MOVE_PAUSE_S,
    _MOVE_PAUSE_S,
    ALONE_BYTES,
    BESIDE_SMALL_BYTES,
    SHARED_BYTES,
    Turns,
)
from kvstore.service.scheduling import move_away

# Times are sums of powers of two, so that they are exact.
POLL_S = 2.0**-11
START_S = 1024.0
LATE_S = 2 * POLL_S
TICK_S = 2.0**-30

polls = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on an only CPU it never polls")


class Loop:
    """Records what is to be run soon."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def run_once(self) -> None:
        due, self.soon = self.soon, []
        for callback in due:
            callback()


class Bench:
    """Turns on a manual clock."""

    def __init__(self, busy_poll_s: float = POLL_S) -> None:
        self.now, self.loop, self.others_work = START_S, Loop(), False
        self.moves = list[float]()
        self.turns = Turns(
            cast(asyncio.AbstractEventLoop, self.loop),
            clock=lambda: self.now,
            busy_poll_s=busy_poll_s,
            others_work=lambda: self.others_work,
            move=lambda: self.moves.append(self.now),
        )

    def turn(self, connection: object, *, after_s: float, small: bool = False, came: bool = True) -> int:
        """A turn that takes no time; returns its quantum."""
        self.now += after_s
        quantum_bytes = self.turns.begin(connection, came=came)
        self.turns.end(small=small)
        return quantum_bytes

    @property
    def is_polling(self) -> bool:
        return bool(self.loop.soon)

    def assert_polls_for(self, seconds: float) -> None:
        """From now on, and no longer; leaves the clock where it ends."""
        end = self.now + seconds
        for now in (self.now, self.now + seconds / 2, end - TICK_S):
            self.now = now
            self.loop.run_once()
            assert len(self.loop.soon) == 1
        self.now = end
        self.loop.run_once()
        assert not self.is_polling


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert len(made.loop.soon) <= 1


# -- how much ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_s", [0.0, _BESIDE_S / 2, 1.0])
def test_a_connection_alone_moves_much(bench: Bench, pause_s: float) -> None:
    assert [bench.turn("a", after_s=pause_s) for _ in range(5)] == [ALONE_BYTES] * 5


def test_the_first_connection_is_alone_whatever_the_clock_says(bench: Bench) -> None:
    bench.now = 0.0
    assert bench.turn("a", after_s=0.0) == ALONE_BYTES


def test_connections_served_soon_after_each_other_share(bench: Bench) -> None:
    assert bench.turn("a", after_s=1) == ALONE_BYTES
    served = [bench.turn(name, after_s=_BESIDE_S / 2) for name in "babcab"]
    assert served == [SHARED_BYTES] * 6


def test_a_turn_from_inside_the_loop_shares_as_well(bench: Bench) -> None:
    bench.turn("a", after_s=1, came=False)
    assert bench.turn("b", after_s=0, came=False) == SHARED_BYTES


def test_connections_served_long_after_each_other_do_not_share(bench: Bench) -> None:
    assert [bench.turn(name, after_s=1.5 * _BESIDE_S) for name in "abab"] == [ALONE_BYTES] * 4


def test_it_is_the_end_of_a_turn_that_the_pause_begins_with(bench: Bench) -> None:
    bench.turns.begin("a", came=True)
    bench.now += 1  # A long turn.
    bench.turns.end(small=False)
    assert bench.turn("b", after_s=_BESIDE_S / 2) == SHARED_BYTES


def test_one_that_goes_on_without_others_is_alone_again(bench: Bench) -> None:
    bench.turn("a", after_s=1)
    step_s = _BESIDE_S / 4
    served = [bench.turn("b", after_s=step_s) for _ in range(8)]
    assert served == [SHARED_BYTES] * served.count(SHARED_BYTES) + [ALONE_BYTES] * served.count(ALONE_BYTES)
    assert 3 <= served.count(SHARED_BYTES) <= 5  # For that time from where it began.


def test_beside_one_that_asks_for_little_the_others_move_little(bench: Bench) -> None:
    bench.turn("small", after_s=1, small=True)
    assert [bench.turn(name, after_s=_BESIDE_S / 8) for name in "abab"] == [BESIDE_SMALL_BYTES] * 4


def test_one_that_asks_for_little_is_not_held_back_by_itself(bench: Bench) -> None:
    assert [bench.turn("small", after_s=POLL_S, small=True) for _ in range(3)] == [ALONE_BYTES] * 3
    bench.turn("large", after_s=POLL_S)
    assert bench.turn("small", after_s=POLL_S, small=True) == SHARED_BYTES


def test_the_last_one_that_asked_for_little_is_waited_for(bench: Bench) -> None:
    bench.turn("a", after_s=1, small=True)
    assert bench.turn("b", after_s=POLL_S, small=True) == BESIDE_SMALL_BYTES
    assert bench.turn("a", after_s=POLL_S) == BESIDE_SMALL_BYTES
    assert bench.turn("b", after_s=POLL_S) == SHARED_BYTES


def test_little_is_moved_only_while_little_is_asked_for(bench: Bench) -> None:
    bench.turn("small", after_s=1, small=True)
    bench.turn("large", after_s=_BESIDE_S * 3 / 4)
    assert bench.turn("large", after_s=_BESIDE_S / 2) == SHARED_BYTES
    assert bench.turn("large", after_s=_BESIDE_S) == ALONE_BYTES


def test_a_large_turn_of_the_same_connection_does_not_end_its_being_waited_for(bench: Bench) -> None:
    bench.turn("a", after_s=1, small=True)
    bench.turn("a", after_s=POLL_S)
    assert bench.turn("b", after_s=POLL_S) == BESIDE_SMALL_BYTES


# -- how long awake ------------------------------------------------------------------------------------------------


def _busy(bench: Bench) -> None:
    """Two requests, the second as fast as polling takes."""
    bench.turn("a", after_s=1)
    assert not bench.is_polling  # The first came late.
    bench.turn("a", after_s=POLL_S)
    assert bench.is_polling


@polls
def test_while_requests_come_fast_it_polls_all_the_time(bench: Bench) -> None:
    _busy(bench)
    for after_s in (POLL_S, POLL_S / 4, 0.0, POLL_S):
        bench.turn("a", after_s=after_s)
        assert len(bench.loop.soon) == 1
    bench.assert_polls_for(POLL_S)


@polls
def test_requests_of_several_connections_count_together(bench: Bench) -> None:
    for name, after_s in (("a", 1.0), ("b", POLL_S), ("c", POLL_S)):
        bench.turn(name, after_s=after_s)
    bench.assert_polls_for(POLL_S)


@polls
def test_each_late_request_halves_the_time_down_to_nothing(bench: Bench) -> None:
    _busy(bench)
    bench.assert_polls_for(POLL_S)
    poll_s = POLL_S / 2
    while poll_s > _LEAST_POLL_S:
        bench.turn("a", after_s=LATE_S)
        bench.assert_polls_for(poll_s)
        poll_s /= 2
    assert poll_s < POLL_S / 8
    for _ in range(3):
        bench.turn("a", after_s=LATE_S)
        assert not bench.is_polling


@polls
def test_a_fast_request_brings_all_of_the_time_back(bench: Bench) -> None:
    _busy(bench)
    for _ in range(20):
        bench.turn("a", after_s=LATE_S)
        bench.loop.run_once()
    bench.now += POLL_S
    bench.loop.run_once()
    assert not bench.is_polling
    bench.turn("a", after_s=1)
    assert not bench.is_polling
    bench.turn("a", after_s=POLL_S)
    bench.assert_polls_for(POLL_S)


@polls
def test_sending_alone_changes_nothing_about_the_time(bench: Bench) -> None:
    bench.turn("a", after_s=1)
    bench.turn("a", after_s=0, came=False)
    assert not bench.is_polling
    bench.turn("a", after_s=POLL_S)
    bench.turn("a", after_s=LATE_S, came=False)
    bench.assert_polls_for(POLL_S)


@polls
def test_a_turn_while_it_polls_makes_it_longer_and_arms_it_once(bench: Bench) -> None:
    _busy(bench)
    for _ in range(5):
        bench.turn("a", after_s=POLL_S / 2)
        assert len(bench.loop.soon) == 1
        bench.loop.run_once()
        assert len(bench.loop.soon) == 1
    bench.assert_polls_for(POLL_S)


@polls
def test_it_sleeps_while_others_work_and_polls_again_after_them(bench: Bench) -> None:
    _busy(bench)
    bench.others_work = True
    bench.loop.run_once()
    assert not bench.is_polling
    bench.others_work = False
    bench.loop.run_once()
    assert not bench.is_polling
    bench.turn("a", after_s=POLL_S)
    assert len(bench.loop.soon) == 1
    bench.assert_polls_for(POLL_S)


def _serve_fast(bench: Bench) -> None:
    for after_s in (0.0, POLL_S, 0.0, 0.0, 1.0, TICK_S):
        bench.turn("a", after_s=after_s, small=True)
        bench.turn("b", after_s=0.0, came=False)
        assert not bench.is_polling


def test_no_time_to_poll_is_never() -> None:
    _serve_fast(Bench(busy_poll_s=0.0))


def test_on_an_only_cpu_it_never_polls() -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        bench = Bench()
    finally:
        os.sched_setaffinity(0, cpus)
    _serve_fast(bench)


# -- where ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def yielding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], int]:
    """Polls once, so long after the last time, and is away for so long where it yields; returns the moves so far."""

    def poll(after_s: float, away_s: float) -> int:
        def yield_cpu() -> None:
            bench.now += away_s

        bench.now += after_s
        bench.turn("a", after_s=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_yield", yield_cpu)
            bench.loop.run_once()
        return len(bench.moves)

    _busy(bench)
    return poll


@polls
def test_who_shares_its_cpu_moves(bench: Bench, yielding: Callable[[float, float], int]) -> None:
    assert [yielding(POLL_S / 2, 2 * _CROWDED_S) for _ in range(2)] == [0, 1]


@polls
def test_who_is_alone_or_was_interrupted_stays(bench: Bench, yielding: Callable[[float, float], int]) -> None:
    for _ in range(100):
        assert yielding(POLL_S / 2, _CROWDED_S / 2) == 0
    for _ in range(100):
        assert yielding(0.0, 2 * _CROWDED_S) == 0
        bench.now += _CROWDED_AGAIN_S
        bench.turn("a", after_s=0.0)


@polls
def test_where_moving_does_not_help_it_is_done_ever_more_seldom(
    bench: Bench, yielding: Callable[[float, float], int]
) -> None:
    while bench.now < START_S + 10:
        yielding(POLL_S / 2, 2 * _CROWDED_S)
    pauses = [later - earlier for earlier, later in pairwise(bench.moves)]
    assert pauses[0] < 4 * _MOVE_PAUSE_S
    assert max(pauses) < 1.1 * _LONGEST_MOVE_PAUSE_S + 0.1
    assert all(later > 1.3 * earlier or later > 0.9 * _LONGEST_MOVE_PAUSE_S for earlier, later in pairwise(pauses))
    assert len(bench.moves) < 20


@polls
def test_where_it_helped_the_next_move_may_come_soon_again(
    bench: Bench, yielding: Callable[[float, float], int]
) -> None:
    for moves in range(20):
        assert yielding(POLL_S / 2, 2 * _CROWDED_S) == moves
        assert yielding(POLL_S / 2, 2 * _CROWDED_S) == moves + 1
        bench.now += 8 * _MOVE_PAUSE_S
        bench.turn("a", after_s=0.0)


def test_large_transfers_that_poll_for_nothing_are_moved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, yields = Bench(busy_poll_s=0.0), list[float]()

    def yield_cpu() -> None:
        yields.append(bench.now)
        bench.now += 2 * _CROWDED_S

    monkeypatch.setattr(os, "sched_yield", yield_cpu)
    for _ in range(10_000):
        bench.turn("a", after_s=0.0002, came=False)
    assert bench.moves[0] - START_S < 4 * _MOVE_PAUSE_S
    assert len(bench.moves) < 20  # Ever more seldom, and so is the looking: 2 s have passed.
    assert len(yields) < 60
    assert not bench.is_polling


def test_a_thread_moves_to_another_cpu_and_may_run_on_all_as_before() -> None:
    before = os.sched_getaffinity(0)
    assert move_away() == (len(before) > 1)
    assert os.sched_getaffinity(0) == before
    os.sched_setaffinity(0, {min(before)})
    try:
        assert not move_away()
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_a_closed_connection_is_not_kept(bench: Bench) -> None:
    class Connection:
        pass

    made = Connection()
    gone = weakref.ref(made)
    bench.turn(made, after_s=1.0, small=True)
    bench.turns.forget(made)
    del made
    assert gone() is None
