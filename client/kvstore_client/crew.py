"""Threads that help a caller with a batch of equal work.

Rules:
- The caller always works too, and takes whatever no helper has taken. It waits only for helpers that have joined its
  batch, so busy, missing or forked-away helpers cost speed and nothing else.
- When `run` returns or raises, no thread works for it any more, and no helper holds on to what it worked on.
- Helpers are started with the first batch of a process. A forked child starts its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from kvstore_client.errors import ForkedClient

MAX_OFFERS = 256  # Batches that wait for helpers to look at them; what is beyond is done by its caller alone.
RECHECK_S = 1.0  # How often a waiting caller looks whether it is a forked child, where no helper will ever end.


class Crew:
    """Owns up to `helper_count` daemon threads, shared by all callers, until `close`."""

    def __init__(self, helper_count: int) -> None:
        self._helper_count = helper_count
        self._by_process: dict[int, _Helpers] = {}
        self._closed = False

    def run(self, work: Callable[[int], None], order: Sequence[int]) -> None:
        """Calls `work` once with each item, in about that order, and returns when all have ended.

        Raises: the first error of `work`, after what was under way has ended; the rest is not begun.
        """
        batch = _Batch(work, order)
        try:
            if not self._closed:
                self._helpers().offer(batch, min(self._helper_count, len(order) - 1))
            batch.take_turns()
            batch.end()
        except BaseException:
            batch.end()  # Failed or interrupted, perhaps inside of `end`: helpers may still write to the buffers.
            raise
        batch.raise_error()

    def close(self) -> None:
        """Ends the helpers and waits for them. Batches run on their callers alone from then on. Idempotent."""
        self._closed = True
        helpers = self._by_process.pop(os.getpid(), None)
        if helpers is not None:
            helpers.close()

    def _helpers(self) -> _Helpers:
        # One atomic step instead of a lock, which a fork could leave held for ever.
        pid = os.getpid()
        return self._by_process.get(pid) or self._by_process.setdefault(pid, _Helpers(self._helper_count))


class _Helpers:
    """The helpers of one process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._offers: SimpleQueue[_Batch | None] = SimpleQueue()

    def offer(self, batch: _Batch, count: int) -> None:
        """Lets up to `count` helpers know of `batch`."""
        if len(self._threads) < self._most:
            self._start()
        if self._offers.qsize() < MAX_OFFERS:
            for _ in range(min(count, len(self._threads))):
                self._offers.put(batch)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        self._end(len(threads))
        for thread in threads:
            thread.join()

    def _start(self) -> None:
        with self._lock, suppress(RuntimeError):  # No more threads to be had: callers work alone.
            while not self._closed and len(self._threads) < self._most:
                thread = threading.Thread(target=_serve, args=(self._offers,), name="kvstore-copy", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _end(self, count: int) -> None:
        for _ in range(count):
            self._offers.put(None)

    def __del__(self) -> None:
        self._end(len(self._threads))


class _Batch:
    """One call's work. The caller ends it; helpers join and leave."""

    def __init__(self, work: Callable[[int], None], order: Sequence[int]) -> None:
        self._work = work
        self._left = deque(order)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._over = False
        self._present = 0
        self._errors: list[BaseException] = []

    def join(self) -> None:
        """Helps as long as there is work; what goes wrong is raised by the caller."""
        with self._changed:
            if self._over:
                return
            self._present += 1
        try:
            self.take_turns()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._errors.append(error)
            self._left.clear()
        finally:
            with self._changed:
                self._present -= 1
                self._changed.notify()

    def take_turns(self) -> None:
        """Works until nothing is left."""
        work, left = self._work, self._left
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            work(item)

    def end(self) -> None:
        """Lets no helper begin anything more and waits for those that are present. May be called again."""
        self._left.clear()
        self._work = _nothing  # Helpers that look at this batch later must not keep buffers alive.
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._over = True
            while self._present and os.getpid() == self._pid:
                self._changed.wait(RECHECK_S)

    def raise_error(self) -> None:
        """Raises what went wrong elsewhere than in the caller's own turns."""
        if os.getpid() != self._pid:
            raise ForkedClient("the process was forked inside of this call", field="client")
        if self._errors:
            raise self._errors.pop()


def _serve(offers: SimpleQueue[_Batch | None]) -> None:
    while True:
        batch = offers.get()
        if batch is None:
            return
        batch.join()


def _nothing(_: int) -> None:
    return
