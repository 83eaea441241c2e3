"""What a client does on the side, so that no call waits for it longer than it has time.

Rules: threads here are daemons, begin when first needed, and do nothing whose outcome a caller relies on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from kvstore_client.deadline import Deadline
from kvstore_client.errors import PathDown
from kvstore_wire.errors import DeadlineExceeded

THREAD_NAME = "kvstore-errands"
MOST_THREADS = 4  # One errand that hangs must not hold up all others.

R = TypeVar("R")


class Errands:
    """Runs short pieces of work in at most `threads` threads, begun in the order they were taken. Thread-safe.

    Work of which `most` wait already is not taken. What an errand raises must be caught in it.
    """

    def __init__(self, most: int, threads: int = MOST_THREADS) -> None:
        self._most, self._most_threads = most, threads
        self._waiting: deque[Callable[[], object]] = deque()
        # A client that is forgotten within an errand closes these from inside.
        self._changed = threading.Condition(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._idle = 0  # Threads that wait for an errand.
        self._closed = False

    def take(self, work: Callable[[], object]) -> bool:
        """Queues work; False where it is not taken."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                return False
            if len(self._waiting) >= self._idle and len(self._threads) < self._most_threads:
                try:
                    self._threads.append(_started(self._serve))
                except PathDown:
                    if not self._threads:
                        return False
            self._waiting.append(work)
            self._changed.notify()
            return True

    def close(self, wait_s: float) -> None:
        """Takes no more, and waits at most `wait_s` for what was taken. Idempotent."""
        end_s = time.monotonic() + wait_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # It refers to what the caller wanted, which may be gone.

    def _next(self) -> Callable[[], object] | None:
        """Waits for an errand; None once closed and nothing waits any more."""
        with self._changed:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


class Shared(Generic[R]):
    """Work that is done once for all who want the same: it goes on when none of them waits for it any more.

    Thread-safe. Keeps nothing of what it brought.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._key: object = None
        self._future: Future[R] | None = None

    def begin(self, key: object, work: Callable[[], R]) -> Future[R]:
        """Returns the work under way for `key`, begun now if there is none. Raises PathDown where no thread is left."""
        with self._lock:
            found = self._future
            if found is None or self._key != key:
                self._key, self._future = key, begun(work)
                found = self._future
                found.add_done_callback(self._forget)
            return found

    @property
    def under_way(self) -> Future[R] | None:
        return self._future

    def _forget(self, future: Future[R]) -> None:
        with self._lock:
            if self._future is future:
                self._future = None


def begun(work: Callable[[], R]) -> Future[R]:
    """Runs work in a thread of its own. Raises PathDown where no thread is left."""
    future: Future[R] = Future()

    def serve() -> None:
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            future.set_exception(error)
        else:
            future.set_result(outcome)

    _started(serve)
    return future


def waited(future: Future[R], deadline: Deadline, doing: str) -> R:
    """Returns what came of work that others may wait for too. Raises what it raised; DeadlineExceeded."""
    try:
        return future.result(deadline.remaining_s())
    except FutureTimeout:
        if future.done():
            return future.result()
        raise DeadlineExceeded(f"the deadline passed while {doing}") from None


def _started(target: Callable[[], None]) -> threading.Thread:
    """Raises PathDown where the process may have no more threads, or ends."""
    thread = threading.Thread(target=target, name=THREAD_NAME, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise PathDown(f"no thread can be begun: {error}") from None
    return thread
