"""How the connections of one event loop share it: who may move how much in a turn, and when the loop may sleep.

Why a loop with nothing to do stays awake for a moment: after a sleep the next tenth of a millisecond of Python runs at
half its speed, on a virtual machine more than elsewhere, since sleeping leaves the machine. A client that makes one
small request after the other would pay for that with each of them.

Why it moves: the kernel likes to wake a server on the CPU of the client that wakes it. Two that are awake all the time
then take turns there, beside a CPU that idles, and nothing of what they do overlaps. Who yields and comes back late
shares its CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kvstore.service.scheduling import move_away

ALONE_BYTES = 4 << 20  # Moved in one turn by a connection that none was served beside.
SHARED_BYTES = 1 << 20  # By one of several: each may have to wait for that of each other.
BESIDE_SMALL_BYTES = 128 << 10  # Beside one that asks for little at a time, which it waits for.
_BESIDE_S = 0.02  # Two connections served within this share the loop.
_LEAST_POLL_S = 20e-6
_CROWDED_S = 50e-6  # Yielding takes less than a microsecond where nobody else wants the CPU.
_CROWDED_AGAIN_S = 0.02  # One time may be an interrupt's.
_MOVE_PAUSE_S, _LONGEST_MOVE_PAUSE_S = 0.005, 1.0  # Where all CPUs are busy, moving helps nobody.


class Turns:
    """Lives in one event loop. `busy_poll_s`: how long it may poll after a turn before it sleeps; 0 = never.

    It polls while requests come as fast as that; each that comes later halves the time, so that a shard with little to
    do sleeps at once. It does not poll while `others_work` says that threads of this process have work.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float],
        busy_poll_s: float,
        others_work: Callable[[], bool],
        move: Callable[[], object] = move_away,
    ) -> None:
        self._loop, self._clock, self._others_work, self._move = loop, clock, others_work, move
        self._crowded_s = self._moved_s = self._looked_s = -1.0
        self._move_pause_s = _MOVE_PAUSE_S
        # On an only CPU it would keep the peer from running.
        self._most_poll_s = busy_poll_s if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._poll_s = self._until = 0.0
        self._served_s = self._shared_until = 0.0
        self._last: object = None
        self._small: object = None
        self._small_until = 0.0
        self._polling = False

    def begin(self, connection: object, *, came: bool) -> int:
        """Begins a turn; `came`: since something came. Returns how many bytes the connection may move in it."""
        now = self._clock()
        pause_s = now - self._served_s
        if came and self._most_poll_s:
            self._poll_s = self._most_poll_s if pause_s <= self._most_poll_s else self._poll_s / 2
        if connection is not self._last:
            if self._last is not None and pause_s < _BESIDE_S:
                self._shared_until = now + _BESIDE_S
            self._last = connection
        if now < self._small_until and connection is not self._small:
            return BESIDE_SMALL_BYTES
        return SHARED_BYTES if now < self._shared_until else ALONE_BYTES

    def end(self, *, small: bool) -> None:
        """Ends a turn; `small`: all that had come was answered in it, with little."""
        self._served_s = now = self._clock()
        if small:
            self._small, self._small_until = self._last, now + _BESIDE_S
        if now - self._looked_s > self._move_pause_s / 2:  # Large transfers poll for nothing, and share CPUs as well.
            self._yield(now)
        if self._poll_s > _LEAST_POLL_S:
            self._until = now + self._poll_s
            if not self._polling:
                self._polling = True
                self._loop.call_soon(self._poll)

    def forget(self, connection: object) -> None:
        """Lets go of a connection that was closed."""
        if self._last is connection:
            self._last = None
        if self._small is connection:
            self._small = None

    def _poll(self) -> None:
        """What is to be run soon keeps the loop from sleeping: it looks at its sockets and comes back here."""
        now = self._clock()
        if now < self._until and not self._others_work():
            self._yield(now)
            self._loop.call_soon(self._poll)
        else:
            self._polling = False

    def _yield(self, now: float) -> None:
        """Lets others run, and notes whether there were any."""
        os.sched_yield()
        self._looked_s = back = self._clock()
        if back - now > _CROWDED_S:
            self._crowded(back)

    def _crowded(self, now: float) -> None:
        """Notes that another thread ran on this CPU meanwhile; the second time in a moment, this one moves."""
        again = now - self._crowded_s < max(_CROWDED_AGAIN_S, self._move_pause_s)
        self._crowded_s = now
        since_s = now - self._moved_s
        if not again or since_s < self._move_pause_s:
            return
        longer_s = min(2 * self._move_pause_s, _LONGEST_MOVE_PAUSE_S)
        self._move_pause_s = longer_s if since_s < 4 * self._move_pause_s else _MOVE_PAUSE_S
        self._moved_s, self._crowded_s = now, -1.0
        self._move()
