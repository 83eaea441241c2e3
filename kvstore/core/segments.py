"""Which segment of the warm tier is written next, which one is given up, and what may be written again. Pure.

    FREE -> OPEN -> SEALED -> (given up) -> FREE          any state -> BAD where the disk failed under it

Rules
- One segment is open at a time. A segment's life has a sequence number that no other life ever had.
- No more segments exist than the capacity allows; one is given up before another is made.
- Given up is, of the oldest sealed ones, the one with the fewest blocks that were read since it was written. Blocks
  that were read, and are nowhere else, may be written again, as long as that stays within its share of all writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class SegmentState(IntEnum):
    FREE = 0
    OPEN = 1
    SEALED = 2
    BAD = 3


@dataclass(eq=False, slots=True)
class Segment:
    """One segment. `used`: keys, with their namespace, of blocks that were read since they were written to it."""

    number: int
    state: SegmentState = SegmentState.FREE
    sequence: int = 0
    block_count: int = 0  # That the index still has here.
    used_bytes: int = 0  # Of those.
    used: set[tuple[int, bytes]] = field(default_factory=set)


@dataclass(frozen=True)
class SegmentRules:
    """`window_share`: of the sealed segments, the oldest, among which one is chosen to be given up.
    `rewrite_share`: of all bytes written, at most, that were written before."""

    segment_bytes: int
    window_share: float = 0.25
    rewrite_share: float = 0.15


class SegmentBook:
    """The segments of one folder."""

    def __init__(self, rules: SegmentRules, capacity_bytes: int) -> None:
        self.rules = rules
        self.capacity_count = 0
        self.resize(capacity_bytes)
        self._segments: dict[int, Segment] = {}
        self._sealed: dict[int, Segment] = {}  # In the order of their sequence numbers.
        self._next_sequence = 1
        self.written_bytes = self.rewritten_bytes = 0

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def get(self, number: int, sequence: int) -> Segment | None:
        """Returns a segment if it still has that life."""
        found = self._segments.get(number)
        return (
            found if found is not None and found.sequence == sequence and found.state is not SegmentState.FREE else None
        )

    @property
    def sealed(self) -> list[Segment]:
        """The sealed segments, the oldest first."""
        return list(self._sealed.values())

    def count(self, state: SegmentState) -> int:
        return sum(segment.state is state for segment in self._segments.values())

    @property
    def oldest_sequence(self) -> int:
        """The lowest sequence number that a block can still lie under."""
        lives = [s.sequence for s in self._segments.values() if s.state in (SegmentState.OPEN, SegmentState.SEALED)]
        return min(lives, default=self._next_sequence)

    @property
    def used_bytes(self) -> int:
        return sum(segment.used_bytes for segment in self._segments.values())

    # -- what there is -------------------------------------------------------------------------------------------

    def load(self, number: int, sequence: int, *, block_count: int, used_bytes: int) -> Segment:
        """Adds a sealed segment that was found at start; call in the order of sequence numbers."""
        made = Segment(number, SegmentState.SEALED, sequence, block_count, used_bytes)
        self._segments[number] = self._sealed[number] = made
        self._next_sequence = max(self._next_sequence, sequence + 1)
        return made

    def load_free(self, number: int, sequence: int = 0) -> None:
        """Adds a segment that was found at start and holds nothing; its last sequence number is never given again."""
        self._segments[number] = Segment(number)
        self._next_sequence = max(self._next_sequence, sequence + 1)

    def load_bad(self, number: int) -> None:
        """Adds a segment that must be left alone."""
        self._segments[number] = Segment(number, SegmentState.BAD)

    def resize(self, capacity_bytes: int) -> None:
        """Changes how many segments there may be; at least two, one to write while another is read."""
        self.capacity_count = max(2, capacity_bytes // self.rules.segment_bytes)

    @property
    def excess_count(self) -> int:
        """How many segments there are beyond the capacity."""
        return max(0, len(self._segments) - self.capacity_count)

    # -- writing -------------------------------------------------------------------------------------------------

    def open(self) -> Segment | None:
        """Takes the segment to write next: a free one, or one to be made (`sequence` of a new life in both cases).

        None where one must be given up before.
        """
        if self.excess_count:
            return None
        free = next((s for s in self._segments.values() if s.state is SegmentState.FREE), None)
        if free is None:
            if len(self._segments) >= self.capacity_count:
                return None
            number = next(n for n in range(len(self._segments) + 1) if n not in self._segments)
            free = self._segments[number] = Segment(number)
        free.state, free.sequence = SegmentState.OPEN, self._next_sequence
        self._next_sequence += 1
        return free

    def seal(self, segment: Segment) -> None:
        """Takes an open segment as sealed: all of it is durable."""
        assert segment.state is SegmentState.OPEN
        segment.state = SegmentState.SEALED
        self._sealed[segment.number] = segment

    def fail(self, segment: Segment) -> None:
        """Leaves a segment alone from now on: the disk failed under it."""
        self._sealed.pop(segment.number, None)
        self._empty(segment)
        segment.state = SegmentState.BAD

    def wrote(self, size_bytes: int, *, again: bool) -> None:
        """Counts what was written; `again`: it had been written before."""
        self.written_bytes += size_bytes
        self.rewritten_bytes += size_bytes if again else 0

    def may_rewrite(self, size_bytes: int) -> bool:
        """Whether so many bytes more may be written again."""
        most = self.rules.rewrite_share * (self.written_bytes + size_bytes)
        return self.rewritten_bytes + size_bytes <= most

    # -- giving up -----------------------------------------------------------------------------------------------

    def victim(self) -> Segment | None:
        """Chooses the sealed segment to give up next, None where there is none."""
        sealed = self.sealed
        window = sealed[: max(1, int(len(sealed) * self.rules.window_share))]
        return min(window, key=lambda s: (len(s.used), s.sequence), default=None)

    def give_up(self, segment: Segment) -> None:
        """Takes a segment as holding nothing any more; with more of them than the capacity allows it goes."""
        self._sealed.pop(segment.number, None)
        excess = self.excess_count
        self._empty(segment)
        if excess:
            del self._segments[segment.number]

    def _empty(self, segment: Segment) -> None:
        segment.state = SegmentState.FREE
        segment.block_count = segment.used_bytes = 0
        segment.used = set()
