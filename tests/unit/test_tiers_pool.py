"""Threads that read: turns, and work that waits for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.tiers.pool import DaemonPool

WAIT_S = 10


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    made = DaemonPool(1, "test", turns=True)
    yield made
    made.close()


def test_work_waits_for_a_turn_which_another_may_pass_on_before_it_ends(pool: DaemonPool) -> None:
    started, may_pass, may_end = threading.Event(), threading.Event(), threading.Event()

    def first() -> str:
        started.set()
        assert may_pass.wait(WAIT_S)
        pool.pass_turn()
        pool.pass_turn()  # It has none any more.
        assert may_end.wait(WAIT_S)
        return "first"

    one, two = pool.submit(first, otherwise=""), pool.submit(lambda: "second", otherwise="")
    three = pool.submit(lambda: "third", otherwise="")
    assert started.wait(WAIT_S)
    assert three.cancel(), "nothing that waits for its turn has begun"
    may_pass.set()
    assert two.result(WAIT_S) == "second"
    assert not one.done()
    may_end.set()
    assert one.result(WAIT_S) == "first"


def test_no_more_have_a_turn_than_there_are_turns(pool: DaemonPool) -> None:
    now, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        with lock:
            now -= 1
        pool.pass_turn()

    for future in [pool.submit(work, otherwise=None) for _ in range(500)]:
        future.result(WAIT_S)
    assert most == 1


def test_what_fails_gives_its_turn_back(pool: DaemonPool) -> None:
    def fail() -> None:
        raise OSError("to fail")

    for _ in range(5):
        with pytest.raises(OSError, match="to fail"):
            pool.submit(fail, otherwise=None).result(WAIT_S)


def test_closing_does_what_waits_and_ends_every_thread() -> None:
    pool, gate = DaemonPool(2, "test", turns=True), threading.Event()
    futures = [pool.submit(lambda: gate.wait(WAIT_S), otherwise=False) for _ in range(10)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert all(future.result(0) for future in futures)
    assert not any(thread.is_alive() for thread in pool._threads)
    assert pool.submit(lambda: 1, otherwise=2).result(WAIT_S) == 2


def test_abandoning_ends_what_has_no_turn() -> None:
    pool, gate, started = DaemonPool(1, "test", turns=True), threading.Event(), threading.Event()

    def hang() -> int:
        started.set()
        gate.wait()
        return 1

    hanging, waiting = pool.submit(hang, otherwise=0), pool.submit(lambda: 1, otherwise=2)
    assert started.wait(WAIT_S)
    pool.abandon()
    assert waiting.result(WAIT_S) == 2
    gate.set()
    assert hanging.result(WAIT_S) == 1
