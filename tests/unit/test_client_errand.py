"""Work on the side of a blocking client: one thread for what is queued, one for each thing that others wait for."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore_client.deadline import Deadline
from kvstore_client.errand import MOST_THREADS, THREAD_NAME, Errands, Shared, begun, waited
from kvstore_client.errors import PathDown
from kvstore_wire.errors import DeadlineExceeded, Denied, KvStoreError

LONG_S = 30.0  # What takes as long hangs.


class Held:
    """Work that begins when it is run and ends when it is let go."""

    def __init__(self) -> None:
        self.runs = 0
        self._began, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.runs += 1
        self._began.set()
        assert self._may_end.wait(LONG_S)
        return 42

    def until_begun(self) -> None:
        assert self._began.wait(LONG_S)

    def let_go(self) -> None:
        self._may_end.set()


def until(holds: Callable[[], bool], otherwise: str) -> None:
    end_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.001)


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Those for work on the side that were not there before."""
    return [t for t in threading.enumerate() if t.name == THREAD_NAME and t not in before]


def no_more_threads(_: threading.Thread) -> None:
    """In place of `Thread.start`: what the interpreter says while it ends."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


# -- errands ----------------------------------------------------------------------------------------------------------


def test_errands_run_in_the_order_they_were_taken_and_one_at_a_time() -> None:
    errands, ran, threads = Errands(1000, threads=1), [], set()

    def errand(number: int) -> None:
        threads.add(threading.current_thread())
        ran.append(number)
        time.sleep(0)
        ran.append(number)

    assert all(errands.take(lambda i=i: errand(i)) for i in range(200))  # type: ignore[misc]
    errands.close(LONG_S)
    assert ran == [i for i in range(200) for _ in range(2)]
    assert len(threads) == 1


def test_so_many_errands_wait_and_no_more() -> None:
    errands, held, ran = Errands(3, threads=1), Held(), []
    assert errands.take(held)
    held.until_begun()  # It waits no more, and leaves room for three.
    assert [errands.take(lambda i=i: ran.append(i)) for i in range(5)] == [True] * 3 + [False] * 2  # type: ignore[misc]
    held.let_go()
    again = Held()
    until(lambda: errands.take(again), "there is no room again")
    again.let_go()
    errands.close(LONG_S)
    assert (ran, again.runs) == ([0, 1, 2], 1)


def test_close_waits_for_what_was_taken_and_takes_nothing_more() -> None:
    errands, held, ran = Errands(1_000_000, threads=1), Held(), []
    assert errands.take(held)
    assert errands.take(lambda: ran.append("taken"))
    held.until_begun()

    def close() -> None:
        errands.close(LONG_S)
        ran.append("closed")

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    until(lambda: not errands.take(lambda: None), "it does not close")
    time.sleep(0.05)
    assert ran == []
    held.let_go()
    closing.join(LONG_S)
    assert ran == ["taken", "closed"]
    assert not errands.take(lambda: ran.append("late"))
    errands.close(LONG_S)
    assert ran == ["taken", "closed"]


def test_close_waits_no_longer_than_it_may_and_what_was_taken_goes_on() -> None:
    before, errands, held, ran = set(threading.enumerate()), Errands(10, threads=1), Held(), []
    assert errands.take(held)
    assert errands.take(lambda: ran.append("taken"))
    held.until_begun()
    (thread,) = new_threads(before)
    for _ in range(2):
        began_s = time.monotonic()
        errands.close(0.05)
        assert time.monotonic() - began_s < 5
    assert not errands.take(lambda: ran.append("late"))
    assert (ran, thread.is_alive()) == ([], True)
    held.let_go()
    thread.join(LONG_S)
    assert (ran, thread.is_alive()) == (["taken"], False)


def test_close_called_by_an_errand_does_not_wait_for_itself() -> None:
    before, errands, held, came = set(threading.enumerate()), Errands(10, threads=1), Held(), []

    def close() -> None:
        try:
            errands.close(LONG_S)
            came.append("closed")
        except RuntimeError as error:
            came.append(str(error))

    for errand in (held, close, lambda: came.append("taken before")):
        assert errands.take(errand)
    held.until_begun()
    (thread,) = new_threads(before)
    held.let_go()
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
    assert came == ["closed", "taken before"]
    assert not errands.take(close)


def test_the_thread_for_errands_begins_with_the_first_and_keeps_no_process_alive() -> None:
    before, errands, held = set(threading.enumerate()), Errands(10, threads=1), Held()
    Errands(10, threads=1).close(LONG_S)
    assert new_threads(before) == []
    assert errands.take(held)
    assert errands.take(held)
    (thread,) = new_threads(before)
    assert thread.daemon
    held.let_go()
    errands.close(LONG_S)
    assert new_threads(before) == []


def test_an_interpreter_that_ends_takes_no_errand(monkeypatch: pytest.MonkeyPatch) -> None:
    errands, held = Errands(10, threads=1), Held()
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    assert not errands.take(held)
    with pytest.raises(PathDown):
        begun(held)
    monkeypatch.undo()
    errands.close(LONG_S)
    assert held.runs == 0


def test_errands_that_hang_hold_up_no_others_as_long_as_there_are_threads() -> None:
    before, errands, ran = set(threading.enumerate()), Errands(100), []
    hanging = [Held() for _ in range(MOST_THREADS - 1)]
    for held in hanging:
        assert errands.take(held)
        held.until_begun()
    for i in range(20):
        assert errands.take(lambda i=i: ran.append(i))  # type: ignore[misc]
    until(lambda: len(ran) == 20, "one that hangs holds them up")
    assert ran == list(range(20))
    assert len(new_threads(before)) == MOST_THREADS
    for held in hanging:
        held.let_go()
    errands.close(LONG_S)
    assert new_threads(before) == []


def test_one_after_the_other_needs_one_thread() -> None:
    before, errands = set(threading.enumerate()), Errands(100)
    for _ in range(50):
        held = Held()
        assert errands.take(held)
        held.let_go()
        held.until_begun()
        until(lambda: errands._idle == 1, "it does not end")
    assert len(new_threads(before)) == 1
    errands.close(LONG_S)


def test_an_errand_may_hand_out_another_and_close() -> None:
    errands, ran = Errands(10), []

    def errand() -> None:
        with errands._changed:  # As where what is forgotten within `take` closes these.
            errands.take(lambda: ran.append("inner"))
            errands.close(0.01)
        ran.append("outer")

    assert errands.take(errand)
    until(lambda: len(ran) == 2, "it waits for itself")
    errands.close(LONG_S)
    assert sorted(ran) == ["inner", "outer"]


# -- what several want ------------------------------------------------------------------------------------------------


def test_what_several_want_is_done_once_and_anew_once_it_is_done() -> None:
    shared, held = Shared[int](), Held()
    first, second = shared.begin("a", held), shared.begin("a", held)
    assert first is second is shared.under_way
    held.let_go()
    assert waited(first, Deadline.after(20_000), "testing") == 42
    until(lambda: shared.under_way is None, "it is kept")
    assert shared.begin("a", lambda: 7).result(LONG_S) == 7
    assert held.runs == 1


def test_who_wants_something_else_does_not_wait_for_the_first() -> None:
    shared, held = Shared[int](), Held()
    first = shared.begin("a", held)
    assert shared.begin("b", lambda: 7).result(LONG_S) == 7
    held.let_go()
    assert first.result(LONG_S) == 42


def test_nothing_is_kept_of_work_that_failed() -> None:
    class Buffer:
        pass

    def call(into: Buffer) -> None:
        with pytest.raises(OSError, match="broken"):
            waited(shared.begin(into is None, failing(OSError("broken"))), Deadline.after(20_000), "testing")

    shared, buffer = Shared[None](), Buffer()
    gone = weakref.ref(buffer)
    call(buffer)
    del buffer
    gc.collect()
    assert gone() is None


# -- what several wait for --------------------------------------------------------------------------------------------


class Waiters:
    """Several threads that wait for the same work. `found` is what each got, or what each was raised."""

    def __init__(self, future: Future[Any], count: int, wait_ms: int) -> None:
        self.found: list[Any] = []
        self._threads = [
            threading.Thread(target=self._wait, args=(future, Deadline.after(wait_ms))) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()

    def _wait(self, future: Future[Any], deadline: Deadline) -> None:
        try:
            self.found.append(waited(future, deadline, "testing"))
        except (KvStoreError, OSError) as error:
            self.found.append(error)


def failing(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_all_who_wait_get_what_came_of_work_that_was_done_once() -> None:
    before, held = set(threading.enumerate()), Held()
    future = begun(held)
    held.until_begun()
    (thread,) = new_threads(before)
    assert thread.daemon
    waiters = Waiters(future, 4, 20_000)
    held.let_go()
    waiters.join()
    assert waiters.found == [42] * 4
    assert waited(future, Deadline(time.monotonic()), "testing") == 42  # It is there: no time is needed to take it.
    thread.join(LONG_S)
    assert held.runs == 1


def test_who_has_no_time_left_gives_up_and_the_work_goes_on_for_whoever_waits_later() -> None:
    held = Held()
    future = begun(held)
    began_s = time.monotonic()
    for deadline in (Deadline.after(50), Deadline(began_s - 1)):
        with pytest.raises(DeadlineExceeded, match="while testing"):
            waited(future, deadline, "testing")
    assert time.monotonic() - began_s < 5
    hasty, patient = Waiters(future, 2, 20), Waiters(future, 2, 20_000)
    hasty.join()
    assert [type(error) for error in hasty.found] == [DeadlineExceeded] * 2
    held.let_go()
    patient.join()
    assert patient.found == [42] * 2
    assert waited(future, Deadline.after(1), "testing") == 42
    assert held.runs == 1


@pytest.mark.parametrize("error", [Denied("no"), OSError("broken")])
def test_all_who_wait_are_raised_what_the_work_raised(error: Exception) -> None:
    future = begun(failing(error))
    waiters = Waiters(future, 3, 20_000)
    waiters.join()
    assert waiters.found == [error] * 3
    with pytest.raises(type(error)):
        waited(future, Deadline.after(1000), "testing")


def test_work_that_ran_into_a_limit_of_its_own_is_no_deadline_of_who_waits() -> None:
    future = begun(failing(TimeoutError("of the work")))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="of the work"):
            waited(future, Deadline.after(20_000), "testing")


def test_work_that_ends_its_thread_leaves_nobody_waiting() -> None:
    with pytest.raises(SystemExit):
        waited(begun(failing(SystemExit(3))), Deadline.after(20_000), "testing")
