"""What a blocking client does on the side, so that no call waits for it.

Rules: threads here are daemons, begin when first needed, and do nothing whose outcome a caller relies on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from kvstore_client.deadline import Deadline
from kvstore_client.errors import ClientClosed
from kvstore_wire.errors import DeadlineExceeded

THREAD_NAME = "kvstore-errands"

R = TypeVar("R")


class Errands:
    """Runs short pieces of work one after the other in one thread. Thread-safe.

    Work of which `most` wait already is not taken. What an errand raises must be caught in it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, work: Callable[[], object]) -> bool:
        """Queues work; False where it is not taken."""
        with self._lock:
            if self._closed or self._queue.qsize() >= self._most:
                return False
            if self._thread is None:
                try:
                    self._thread = _started(self._serve)
                except ClientClosed:
                    return False
            self._queue.put(work)
            return True

    def close(self, wait_s: float) -> None:
        """Takes no more, and waits at most `wait_s` for what was taken. Idempotent."""
        with self._lock:
            thread, ended, self._closed = self._thread, self._closed, True
            if thread is not None and not ended:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def begun(work: Callable[[], R]) -> Future[R]:
    """Runs work in a thread of its own, which goes on when nobody waits for it any more. Raises ClientClosed."""
    future: Future[R] = Future()

    def serve() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            future.set_exception(error)

    _started(serve)
    return future


def waited(future: Future[R], deadline: Deadline, doing: str) -> R:
    """Returns what came of work that others may wait for too. Raises what it raised; DeadlineExceeded."""
    try:
        return future.result(deadline.remaining_s())
    except TimeoutError:
        if future.done():
            return future.result()
        raise DeadlineExceeded(f"the deadline passed while {doing}") from None


def _started(target: Callable[[], None]) -> threading.Thread:
    """Raises ClientClosed where the interpreter ends and makes no more threads."""
    thread = threading.Thread(target=target, name=THREAD_NAME, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ClientClosed(f"the process ends: {error}", field="client") from None
    return thread
