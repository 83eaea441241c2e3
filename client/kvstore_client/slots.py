"""How many threads may be in a call at once. Survives an interrupt anywhere.

A slot is its thread's, not a number that is counted down: what a KeyboardInterrupt leaves taken is used again by the
same thread's next call. Nothing here waits on a lock that Python code could have been interrupted in.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from kvstore_client.deadline import Deadline

_RECHECK_S = 0.05  # A wake-up that went to a thread which had given up is made up for.


class Slots:
    """`most` slots. Thread-safe; a thread has one at most, however often it enters."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, bool] = {}
        self._waiting: dict[int, bool] = {}
        self._freed: SimpleQueue[None] = SimpleQueue()

    @property
    def held(self) -> int:
        return len(self._held)

    def try_enter(self) -> bool:
        """Takes a slot if one is free; give it back by `leave`."""
        held, me = self._held, threading.get_ident()
        if me in held:
            return True
        if len(held) >= self._most:
            return False
        held[me] = True
        if len(held) > self._most:  # Another thread came in between; perhaps both go out, and try again.
            held.pop(me, None)
            return False
        return True

    def enter(self, deadline: Deadline) -> bool:
        """Takes a slot as soon as one is free; false if the deadline came first."""
        if self.try_enter():
            return True
        me = threading.get_ident()
        self._waiting[me] = True
        try:
            while not self.try_enter():
                left_s = deadline.remaining_s()
                if left_s <= 0:
                    return False
                with suppress(Empty):
                    self._freed.get(timeout=min(left_s, _RECHECK_S))
            return True
        finally:
            self._waiting.pop(me, None)

    def leave(self) -> None:
        """Gives the calling thread's slot back. Idempotent."""
        self._held.pop(threading.get_ident(), None)
        if self._waiting:
            self._freed.put(None)
