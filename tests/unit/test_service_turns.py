"""Turns of connections in one loop: how much each may move, and for how long the loop stays awake."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvstore.service.framed.connection import _first
from kvstore.service.framed.turns import ALONE_BYTES, BESIDE_SMALL_BYTES, SHARED_BYTES, Turns

POLL_S = 0.0005
LONG_S = 1.0
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU no loop stays awake")


class Loop:
    """A loop whose clock and turns the test moves."""

    def __init__(self) -> None:
        self.now, self.is_working = 100.0, False
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, act: Callable[[], None]) -> None:
        self.soon.append(act)

    def turns(self, busy_poll_s: float = POLL_S) -> Turns:
        loop = cast(asyncio.AbstractEventLoop, cast(Any, self))
        return Turns(loop, clock=lambda: self.now, busy_poll_s=busy_poll_s, others_work=lambda: self.is_working)

    def awake_s(self, step_s: float = POLL_S / 50) -> float:
        """Runs what is due until the loop may sleep; returns how long that took."""
        began = self.now
        while self.soon:
            due, self.soon = self.soon, []
            assert len(due) == 1, "looked for twice at once"
            due[0]()
            self.now += step_s
        return self.now - began


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_one_alone_moves_much_and_several_less(loop: Loop) -> None:
    turns = loop.turns(0.0)
    assert turns.begin("a", came=True) == ALONE_BYTES
    turns.end(small=False)
    loop.now += 0.001
    assert turns.begin("b", came=True) == SHARED_BYTES
    turns.end(small=False)
    assert turns.begin("b", came=False) == SHARED_BYTES
    turns.end(small=False)
    loop.now += LONG_S
    assert turns.begin("b", came=False) == ALONE_BYTES
    loop.now += LONG_S
    assert turns.begin("a", came=True) == ALONE_BYTES, "the other was served long ago"


def test_beside_one_that_asks_for_little_the_others_move_least(loop: Loop) -> None:
    turns = loop.turns(0.0)
    turns.begin("small", came=True)
    turns.end(small=True)
    assert turns.begin("large", came=False) == BESIDE_SMALL_BYTES
    turns.end(small=False)
    assert turns.begin("small", came=True) == SHARED_BYTES, "not beside itself"
    turns.end(small=True)
    loop.now += LONG_S
    assert turns.begin("large", came=False) == ALONE_BYTES


@needs_two_cpus
def test_the_loop_stays_awake_while_requests_come_fast(loop: Loop) -> None:
    turns = loop.turns()
    turns.begin("a", came=True)
    turns.end(small=True)
    assert loop.awake_s() == 0, "the first one after a long time"
    loop.now += POLL_S / 2
    turns.begin("a", came=True)
    turns.end(small=True)
    turns.begin("a", came=False)
    turns.end(small=False)
    assert POLL_S <= loop.awake_s() <= POLL_S * 1.1


@needs_two_cpus
def test_each_late_request_halves_the_time_down_to_nothing(loop: Loop) -> None:
    turns = loop.turns()
    turns.begin("a", came=True)
    turns.end(small=True)
    turns.begin("a", came=True)
    turns.end(small=True)
    awake = [loop.awake_s()]
    for _ in range(8):
        loop.now += LONG_S
        turns.begin("a", came=True)
        turns.end(small=True)
        awake.append(loop.awake_s())
    assert awake == sorted(awake, reverse=True)
    assert awake[1] < 0.6 * awake[0]
    assert awake[-1] == 0


@needs_two_cpus
def test_threads_with_work_have_the_cpu_to_themselves(loop: Loop) -> None:
    turns = loop.turns()
    for _ in range(2):
        turns.begin("a", came=True)
        turns.end(small=True)
    loop.is_working = True
    assert loop.awake_s() < POLL_S / 10


def test_no_time_is_no_staying_awake(loop: Loop) -> None:
    turns = loop.turns(0.0)
    for _ in range(3):
        turns.begin("a", came=True)
        turns.end(small=True)
    assert not loop.soon


@pytest.mark.parametrize("most", range(1, 12))
def test_buffers_are_cut_to_what_may_be_sent(most: int) -> None:
    buffers = [memoryview(b"abc"), memoryview(b"d"), memoryview(b"efghi")]
    assert b"".join(_first(buffers, most)) == b"abcdefghi"[:most]
