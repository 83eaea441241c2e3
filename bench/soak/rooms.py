"""Buffers of one actor, in memory of its own or in a region, and a watch over those whose calls have ended."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.soak.tally import Tally

ROOM_BYTES = 8 << 20  # More than the largest call of an actor needs.
_LEFT = b"\x77"


class Rooms:
    """Cuts buffers from `memories`, a piece of memory each."""

    def __init__(self, memories: Sequence[memoryview], tally: Tally) -> None:
        self._memories, self.tally = memories, tally
        self._watched: list[memoryview] = []

    def of(self, sizes: Sequence[int], chosen: random.Random) -> list[memoryview]:
        """Returns buffers, one behind the other, somewhere in one of the memories."""
        self.check()
        memory = chosen.choice(self._memories)
        at = chosen.randrange(1 + len(memory) - sum(sizes))
        rooms = []
        for size in sizes:
            rooms.append(memory[at : at + size])
            at += size
        return rooms

    def watch(self, rooms: Sequence[memoryview]) -> None:
        """The call of these buffers has ended: from here on only their owner may write to them."""
        for room in rooms:
            room[:] = _LEFT * len(room)
        self._watched += rooms

    def check(self) -> None:
        """Counts the watched buffers that somebody wrote to, and watches them no more."""
        self.tally.touched += sum(bytes(room) != _LEFT * len(room) for room in self._watched)
        self._watched.clear()
