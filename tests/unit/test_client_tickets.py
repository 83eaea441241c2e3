"""The ticket queue and its descriptor, without a network."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvstore_client import Cancelled, ClientClosed, MatchResult, QueueFull
from kvstore_client.deadline import Deadline
from kvstore_client.loop_thread import LoopThread
from kvstore_client.stats import Counters
from kvstore_client.tickets import Job, Tickets
from kvstore_client.wakeup import Wakeup
from kvstore_wire.errors import DeadlineExceeded, Internal, KvStoreError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("test")
    yield made
    made.stop(5)


@pytest.fixture
def stats() -> Counters:
    return Counters()


@pytest.fixture
def tickets(thread: LoopThread, stats: Counters) -> Tickets:
    return Tickets(thread=thread, queue_bytes=100, stats=stats)


def failed(error: KvStoreError) -> MatchResult:
    return MatchResult(b"", failure=error)


async def done() -> MatchResult:
    return MatchResult(b"\x01", 1)


def job(
    start: Callable[[int], Coroutine[Any, Any, MatchResult]] = lambda _: done(),
    *,
    size_bytes: int = 0,
    deadline_ms: int = 5000,
    held: bool = False,
) -> Job[MatchResult]:
    return Job("match", size_bytes, Deadline.after(deadline_ms), start, failed, held)


class Gate:
    """A call that stays under way until it is opened."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread, self._open = thread, asyncio.Event()

    async def call(self, _: int) -> MatchResult:
        await self._open.wait()
        return await done()

    def open(self) -> None:
        self._thread.post(self._open.set)

    def __call__(self, left_ms: int) -> Coroutine[Any, Any, MatchResult]:
        return self.call(left_ms)


def failure_of(result: object) -> KvStoreError | None:
    assert isinstance(result, MatchResult)
    return result.failure


def test_bytes_are_held_until_the_call_ends(thread: LoopThread, tickets: Tickets, stats: Counters) -> None:
    gate = Gate(thread)
    first = tickets.submit(job(gate, size_bytes=60))
    refused = tickets.submit(job(size_bytes=41))
    fits = tickets.submit(job(size_bytes=40))
    assert isinstance(failure_of(tickets.wait(refused, 1)), QueueFull)
    assert failure_of(tickets.wait(fits, 5)) is None
    assert (stats.inflight_bytes, stats.dropped) == (60, 1)
    gate.open()
    assert failure_of(tickets.wait(first, 5)) is None
    assert stats.inflight_bytes == 0


def test_bytes_of_answers_are_held_until_they_are_taken(tickets: Tickets, stats: Counters) -> None:
    ticket = tickets.submit(job(size_bytes=100, held=True))
    assert select.select([tickets.fileno()], [], [], 5)[0]
    assert stats.inflight_bytes == 100
    assert [c.ticket for c in tickets.poll()] == [ticket]
    assert stats.inflight_bytes == 0


def test_time_in_the_queue_counts(thread: LoopThread, tickets: Tickets) -> None:
    thread.post(lambda: time.sleep(0.05))  # The loop is busy past the deadline.
    started: list[int] = []

    def start(left_ms: int) -> Coroutine[Any, Any, MatchResult]:
        started.append(left_ms)
        return done()

    ticket = tickets.submit(job(start, deadline_ms=10))
    assert isinstance(failure_of(tickets.wait(ticket, 5)), DeadlineExceeded)
    assert started == []


def test_a_fault_of_the_client_still_finishes_the_ticket(tickets: Tickets) -> None:
    async def broken() -> MatchResult:
        raise ZeroDivisionError

    ticket = tickets.submit(job(lambda _: broken()))
    assert isinstance(failure_of(tickets.wait(ticket, 5)), Internal)


def test_cancelling_and_closing_finish_every_ticket_once(thread: LoopThread, tickets: Tickets) -> None:
    gate = Gate(thread)
    first, second = tickets.submit(job(gate)), tickets.submit(job(gate))
    assert tickets.cancel(first) is True
    assert isinstance(failure_of(tickets.wait(first, 5)), Cancelled)
    assert tickets.wait(first, 0) is None
    assert tickets.cancel(first) is False
    tickets.close(0.05)
    tickets.settle(5)
    late = tickets.submit(job())
    results = {c.ticket: failure_of(c.result) for c in tickets.poll()}
    assert set(results) == {second, late}
    assert all(isinstance(f, ClientClosed) for f in results.values())


def test_waiting_is_bounded_and_wakes_at_once(thread: LoopThread, tickets: Tickets) -> None:
    gate = Gate(thread)
    ticket = tickets.submit(job(gate))
    assert tickets.wait(ticket, 0.01) is None
    threading.Timer(0.02, gate.open).start()
    assert failure_of(tickets.wait(ticket, 5)) is None


def test_many_threads_submit_and_each_ticket_ends_once(tickets: Tickets) -> None:
    made: list[int] = []

    def work() -> None:
        made.extend(tickets.submit(job()).id for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen: list[int] = []
    end_s = time.monotonic() + 5
    while len(seen) < 800 and time.monotonic() < end_s:
        select.select([tickets.fileno()], [], [], 0.1)
        seen.extend(c.ticket.id for c in tickets.poll())
    assert sorted(seen) == sorted(made)
    assert len(set(made)) == 800


def test_the_descriptor_is_readable_from_set_to_clear() -> None:
    wakeup = Wakeup()
    assert not select.select([wakeup.fileno()], [], [], 0)[0]
    wakeup.set()
    wakeup.set()
    assert select.select([wakeup.fileno()], [], [], 0)[0]
    wakeup.clear()
    wakeup.clear()
    assert not select.select([wakeup.fileno()], [], [], 0)[0]
