"""Looking for an answer for a moment before sleeping until it comes.

Why: an answer that comes within a fraction of a millisecond is there before the thread is asleep and awake again, and
after a sleep the next Python runs at half its speed.
"""

from __future__ import annotations

import os
import socket
import time

FILL_BYTES = 512 << 10  # Half of a core's cache; a call for each little piece costs more than to hash it.
_MISSES = 4  # So many answers in a row that came later: the next ones are slept for.
_SHORT_SLEEPS = 8  # So many in a row that would have been worth looking for: they are again.


class BusyPoll:
    """Of one connection, in the hands of one thread at a time. `most_s`: how long it looks; 0 = it never does."""

    __slots__ = ("_misses", "_most_s", "_short", "is_on")

    def __init__(self, most_s: float) -> None:
        # On an only CPU it would keep the peer from running.
        self._most_s = most_s if len(os.sched_getaffinity(0)) > 1 else 0.0
        self.is_on = self._most_s > 0
        self._misses = self._short = 0

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Receives what comes within the time, 0 bytes at the stream's end; -1 where nothing did. Raises OSError."""
        receive, until = sock.recv_into, 0.0
        while True:
            try:
                came = receive(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                now = time.perf_counter()
                if not until:
                    until = now + self._most_s
                elif now > until:
                    break
                os.sched_yield()  # The peer may wait for this CPU.
            else:
                self._misses = 0
                return came
        self._misses += 1
        if self._misses >= _MISSES:
            self.is_on, self._short = False, 0
        return -1

    def fill(self, sock: socket.socket, view: memoryview) -> int:
        """Receives as `receive`, again and again, up to what is worth hashing at once; 0 where nothing more comes.

        Raises OSError. A stream's end is left to whoever receives next.
        """
        receive, at, most = sock.recv_into, 0, min(len(view), FILL_BYTES)
        until = time.perf_counter() + self._most_s
        while at < most:
            try:
                came = receive(view[at:most], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() > until:
                    break
                os.sched_yield()
            else:
                if not came:
                    break
                at += came
        return at

    def slept(self, seconds: float) -> None:
        """Notes how long an answer that was not looked for took to come."""
        if not self._most_s or self.is_on:
            return
        self._short = self._short + 1 if seconds < self._most_s else 0
        if self._short >= _SHORT_SLEEPS:
            self.is_on, self._misses = True, 0
