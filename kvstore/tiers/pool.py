"""Threads that read. Unlike those of an executor they do not keep a process alive whose disk hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")


class _Work(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]
    otherwise: Any


class DaemonPool:
    """Owns its threads from construction to `close`. Whoever asks bounds how much waits.

    `count` of them have a turn at once; there are as many more with `turns`, for what goes on after `pass_turn`.
    """

    def __init__(self, count: int, name: str, *, turns: bool = False) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._closing = False
        self._turns = threading.Semaphore(count)
        self._mine = threading.local()
        count += count * turns
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, run: Callable[[], _T], *, otherwise: _T) -> Future[_T]:
        """Runs something in one of the threads; its result, or `otherwise` where the pool was closed before it began.

        The future can be cancelled until it has begun.
        """
        work = _Work(Future(), run, otherwise)
        self._waiting.put(work)
        if self._closing:
            self.abandon()
        return work.future

    def pass_turn(self) -> None:
        """Lets another thread begin with what waits, while the calling one goes on with its own. Idempotent."""
        if self._mine.has_turn:
            self._mine.has_turn = False
            self._turns.release()

    def close(self) -> None:
        """Does what waits, and waits for it. Idempotent."""
        self._closing = True
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Ends what waits without doing it, and all that is asked for from now on."""
        self._closing = True
        while True:
            try:
                work = self._waiting.get_nowait()
            except Empty:
                break
            if work is not None and work.future.set_running_or_notify_cancel():
                work.future.set_result(work.otherwise)
        self._waiting.put(None)

    def _work(self) -> None:
        while True:
            self._turns.acquire()
            self._mine.has_turn = True
            work = self._waiting.get()
            if work is None:
                break
            self._do(work)
            del work
            self.pass_turn()
        self._waiting.put(None)  # For the next thread.
        self.pass_turn()

    def _do(self, work: _Work) -> None:
        if not work.future.set_running_or_notify_cancel():
            return
        try:
            result = work.run()
        except BaseException as error:  # noqa: BLE001 - whoever asked is told; the thread must live
            work.future.set_exception(error)
        else:
            work.future.set_result(result)
