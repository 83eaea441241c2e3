"""Calls that nobody waits for: a bounded queue in, finished tickets out.

Rules:
- `submit` never blocks and never waits for the network. A call that does not fit into `queue_bytes` is finished at
  once with QueueFull, and counted.
- A put holds its bytes from submit until it is finished, a get from submit until its completion is taken.
- Every ticket is finished exactly once, cancelled and closed ones too. Take each completion by `poll` or `wait`.
- A ticket's deadline runs from its submit; time in the queue counts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from kvstore_client.deadline import Deadline
from kvstore_client.errors import Cancelled, ClientClosed, QueueFull
from kvstore_client.loop_thread import LoopThread
from kvstore_client.quiet import LOGGER
from kvstore_client.results import GetResult, MatchResult, PutResult
from kvstore_client.stats import Counters
from kvstore_client.wakeup import Wakeup
from kvstore_wire.errors import DeadlineExceeded, Internal, KvStoreError

R = TypeVar("R", GetResult, MatchResult, PutResult)
Result: TypeAlias = "GetResult | MatchResult | PutResult"


@dataclass(frozen=True)
class Ticket:
    """Names a submitted call of one client."""

    id: int
    verb: str


@dataclass(frozen=True)
class Completion:
    """A finished ticket. The result's `failure` also holds what a blocking call would have raised."""

    ticket: Ticket
    result: Result


@dataclass(eq=False)
class Job(Generic[R]):
    """A call to be made. `start` makes it with the milliseconds left; `failed` makes its result without it."""

    verb: str
    size_bytes: int
    deadline: Deadline
    start: Callable[[int], Coroutine[Any, Any, R]]
    failed: Callable[[KvStoreError], R]
    held_until_taken: bool = False


class Tickets:
    """The queue and the finished tickets of one client. Thread-safe; jobs run in the client's loop."""

    def __init__(self, *, thread: LoopThread, queue_bytes: int, stats: Counters) -> None:
        self._thread, self._queue_bytes, self._stats = thread, queue_bytes, stats
        self._changed = threading.Condition()
        self._wakeup = Wakeup()
        self._waiting: deque[tuple[Ticket, Job[Any]]] = deque()
        self._tasks: dict[int, asyncio.Task[Result]] = {}
        self._open: set[int] = set()
        self._done: dict[int, Completion] = {}
        self._held: dict[int, int] = {}
        self._draining = self._closed = False
        self._last_id = 0

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def submit(self, job: Job[Any]) -> Ticket:
        """Queues a job, or finishes it at once where there is no room."""
        with self._changed:
            self._last_id += 1
            ticket = Ticket(self._last_id, job.verb)
            self._open.add(ticket.id)
            refusal = self._refusal(job)
            if refusal is not None:
                self._finish(ticket, job, job.failed(refusal))
                return ticket
            self._stats.inflight_bytes += job.size_bytes
            self._held[ticket.id] = job.size_bytes
            self._waiting.append((ticket, job))
            wake, self._draining = not self._draining, True
        if wake:
            self._thread.post(self._drain)
        return ticket

    def poll(self) -> list[Completion]:
        """Takes all finished tickets, in the order they finished. Never blocks."""
        with self._changed:
            taken = list(self._done.values())
            self._done.clear()
            for completion in taken:
                self._give_back(completion.ticket.id)
            self._clear()
        return taken

    def wait(self, ticket: Ticket, wait_s: float) -> Result | None:
        """Takes one ticket's result; None if it is not finished within `wait_s`, or was taken before."""
        end_s = time.monotonic() + wait_s
        with self._changed:
            while ticket.id not in self._done:
                left_s = end_s - time.monotonic()
                if ticket.id not in self._open or left_s <= 0:
                    return None
                self._changed.wait(left_s)
            completion = self._done.pop(ticket.id)
            self._give_back(ticket.id)
            self._clear()
        return completion.result

    def cancel(self, ticket: Ticket) -> bool:
        """Asks for an early end; False if the ticket is finished. Else it finishes soon, with Cancelled if not done."""
        with self._changed:
            if ticket.id not in self._open:
                return False
            for entry in self._waiting:
                if entry[0].id == ticket.id:
                    self._waiting.remove(entry)
                    self._finish(*entry, entry[1].failed(Cancelled("the caller cancelled it")))
                    return True
        self._thread.post(lambda: self._cancel_task(ticket.id))
        return True

    def close(self, wait_s: float) -> None:
        """Takes no more; waits for what is queued, then ends the rest as closed. Completions stay takeable."""
        end_s = time.monotonic() + wait_s
        with self._changed:
            self._closed = True
            while self._open and end_s > time.monotonic():
                self._changed.wait(max(0.0, end_s - time.monotonic()))
            while self._waiting:
                ticket, job = self._waiting.popleft()
                self._finish(ticket, job, job.failed(_closed()))
        self._thread.post(self._cancel_all)

    def settle(self, wait_s: float) -> None:
        """Waits for cancelled tickets to finish."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, wait_s)

    # -- under the lock ------------------------------------------------------------------------------------------

    def _refusal(self, job: Job[Any]) -> KvStoreError | None:
        if self._closed:
            return _closed()
        if self._stats.inflight_bytes + job.size_bytes <= self._queue_bytes:
            return None
        self._stats.dropped += 1
        asked = f"{job.verb} of {job.size_bytes} bytes beside {self._stats.inflight_bytes} in flight"
        return QueueFull(asked, field="queue_bytes", limit=f"{self._queue_bytes}")

    def _finish(self, ticket: Ticket, job: Job[Any], result: Result) -> None:
        if ticket.id not in self._open:
            return
        self._open.discard(ticket.id)
        if not job.held_until_taken:
            self._give_back(ticket.id)
        if not self._done:
            self._wakeup.set()
        self._done[ticket.id] = Completion(ticket, result)
        self._changed.notify_all()

    def _give_back(self, ticket_id: int) -> None:
        self._stats.inflight_bytes -= self._held.pop(ticket_id, 0)

    def _clear(self) -> None:
        if not self._done:
            self._wakeup.clear()

    # -- in the loop ---------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        with self._changed:
            jobs = list(self._waiting)
            self._waiting.clear()
            self._draining = False
            for ticket, job in jobs:
                task = asyncio.ensure_future(_result(job))
                self._tasks[ticket.id] = task
                task.add_done_callback(partial(self._ended, ticket, job))

    def _cancel_task(self, ticket_id: int) -> None:
        task = self._tasks.get(ticket_id)
        if task is not None:
            task.cancel()

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _ended(self, ticket: Ticket, job: Job[Any], task: asyncio.Task[Result]) -> None:
        del self._tasks[ticket.id]
        if task.cancelled():
            result: Result = job.failed(_closed() if self._closed else Cancelled("the caller cancelled it"))
        elif task.exception() is not None:
            LOGGER.error("a ticket failed by a fault of the client", exc_info=task.exception())
            result = job.failed(Internal(f"a fault of the client: {task.exception()!r}"))
        else:
            result = task.result()
        with self._changed:
            self._finish(ticket, job, result)


async def _result(job: Job[Any]) -> Result:
    left_ms = job.deadline.remaining_ms()
    if left_ms < 1:
        return job.failed(DeadlineExceeded("the deadline passed in the client's queue"))  # type: ignore[no-any-return]
    try:
        made: Result = await job.start(left_ms)
    except KvStoreError as error:
        return job.failed(error)  # type: ignore[no-any-return]
    return made


def _closed() -> ClientClosed:
    return ClientClosed("the client was closed", field="client")
