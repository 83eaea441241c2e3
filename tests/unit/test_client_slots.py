"""Slots of threads: no more than there are, waited for no longer than the deadline, and none lost to an interrupt."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvstore_client.deadline import Deadline
from kvstore_client.slots import Slots


def in_thread(work: Callable[[], Any]) -> Any:
    """Runs work in a thread of its own and returns what it returned."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(20)
    return found[0]


def test_there_are_so_many_and_no_more() -> None:
    slots, over = Slots(2), threading.Event()
    assert slots.try_enter()
    entered: list[bool] = []

    def hold() -> None:
        entered.append(slots.try_enter())
        over.wait(20)

    for count, expected in ((1, [True]), (2, [True, False])):
        threading.Thread(target=hold, daemon=True).start()
        while len(entered) < count:
            time.sleep(0.001)
        assert entered == expected
    slots.leave()
    threading.Thread(target=hold, daemon=True).start()
    while len(entered) < 3:
        time.sleep(0.001)
    assert entered[2]
    assert slots.held == 2
    over.set()


def test_a_thread_has_one_however_often_it_enters() -> None:
    slots = Slots(2)
    assert [slots.try_enter(), slots.try_enter(), slots.enter(Deadline.after(10))] == [True] * 3
    assert slots.held == 1
    slots.leave()
    slots.leave()
    assert slots.held == 0


def test_who_waits_gets_the_first_that_is_free() -> None:
    slots, entered = Slots(1), threading.Event()
    assert slots.try_enter()

    def wait() -> None:
        assert slots.enter(Deadline.after(20_000))
        entered.set()
        slots.leave()

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not entered.wait(0.1)
    slots.leave()
    for thread in threads:
        thread.join(20)
    assert entered.is_set()
    assert slots.held == 0


def test_the_deadline_ends_the_wait() -> None:
    slots = Slots(1)
    assert slots.try_enter()
    began_s = time.monotonic()
    assert in_thread(lambda: slots.enter(Deadline.after(50))) is False
    assert time.monotonic() - began_s < 10
    assert in_thread(lambda: slots.enter(Deadline(time.monotonic() - 1))) is False


def test_many_threads_never_hold_more_than_there_are() -> None:
    slots, most, inside, lock = Slots(3), [0], [0], threading.Lock()

    def work() -> None:
        for _ in range(200):
            assert slots.enter(Deadline.after(20_000))
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with lock:
                inside[0] -= 1
            slots.leave()

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most[0] <= 3
    assert slots.held == 0


@pytest.mark.parametrize("call", ["try_enter", "enter", "leave"])
def test_an_interrupt_at_any_line_loses_no_slot_and_hangs_nobody(call: str) -> None:
    line = 0
    while True:
        line += 1
        slots = Slots(1)
        if call == "leave":
            slots.try_enter()
        if not _interrupted(slots, call, line):
            break
        assert slots.enter(Deadline.after(1000)), f"interrupted at line {line}"
        slots.leave()
        assert in_thread(partial(slots.enter, Deadline.after(1000))), f"interrupted at line {line}"
    assert line > 2, "nothing was interrupted: the test shows nothing"


def _interrupted(slots: Slots, call: str, line: int) -> bool:
    """Makes a call and raises KeyboardInterrupt at its n-th line; false if it has not so many."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line" and frame.f_code.co_filename.endswith("slots.py"):
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        getattr(slots, call)(*([Deadline.after(1000)] if call == "enter" else []))
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
