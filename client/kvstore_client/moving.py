"""Copies and hashes with the interpreter lock given up, so that threads work side by side, unless that costs more.

Rules: in a process whose other threads compute in Python all the time, each giving up of the lock costs up to 5 ms (the
interpreter's switch interval) to get it back: measured, 16 parts of 2 MiB took 168 ms instead of 4. So two steps in a
row that took `STALL_S` make everything of the next `HOLD_S` keep the lock, at most 0.3 ms a step; then giving it up is
tried again. One alone says little: the system may have run another process meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

STALL_S = 0.0045  # Just less than the switch interval; a copy of 2 MiB into fresh memory takes 3 ms and is no stall.
STALLS = 2
HOLD_S = 1.0
SMALL_BYTES = 32 << 10  # Always copied with the lock kept: done (5 us) before any other thread could make use of it.
HASH_STEP_BYTES = 64 << 10  # xxhash keeps the lock up to here.


class Mover:
    """Moves bytes, a step of at most 2 MiB at a time, for any number of threads. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holds_until_s = clock()
        self._stalls = 0  # In a row, over all threads; a count lost between two of them does no harm.

    @property
    def holds(self) -> bool:
        """Whether the lock is kept at present, so that more threads are of no use."""
        return self._clock() < self._holds_until_s

    def copy(self, into: memoryview, data: memoryview) -> None:
        """Copies `data` to `into`, which has its size."""
        if len(into) <= SMALL_BYTES:
            into[:] = data
            return
        began_s = self._clock()
        if began_s < self._holds_until_s:
            into[:] = data
        else:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
            self._ended(began_s)

    def hash(self, view: memoryview) -> int:
        """Returns the xxh3-64 of `view`."""
        if len(view) <= HASH_STEP_BYTES:
            return xxh3_64_intdigest(view)
        digest = xxh3_64()
        self.update(digest, view)
        return digest.intdigest()

    def update(self, digest: xxh3_64, view: memoryview) -> None:
        """Adds `view` to what `digest` hashes."""
        if len(view) <= HASH_STEP_BYTES:
            digest.update(view)
            return
        began_s = self._clock()
        if began_s < self._holds_until_s:
            for at in range(0, len(view), HASH_STEP_BYTES):
                digest.update(view[at : at + HASH_STEP_BYTES])
        else:
            digest.update(view)
            self._ended(began_s)

    def _ended(self, began_s: float) -> None:
        now_s = self._clock()
        self._stalls = self._stalls + 1 if now_s - began_s >= STALL_S else 0
        if self._stalls >= STALLS:
            self._stalls, self._holds_until_s = 0, now_s + HOLD_S
