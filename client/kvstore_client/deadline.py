"""A point in time that one call of the caller must not outlive, retries and waits included."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstore_wire.errors import DeadlineExceeded, InvalidArgument

MAX_DEADLINE_MS = 3_600_000


@dataclass(frozen=True)
class Deadline:
    """Units: `at_s` is on the monotonic clock of this process, in seconds."""

    at_s: float

    @staticmethod
    def after(wait_ms: int) -> Deadline:
        """Returns the deadline `wait_ms` from now. Raises InvalidArgument (deadline_ms)."""
        if not isinstance(wait_ms, int) or isinstance(wait_ms, bool):
            raise InvalidArgument(f"must be a whole number, not {wait_ms!r}", field="deadline_ms")
        if not 1 <= wait_ms <= MAX_DEADLINE_MS:
            raise InvalidArgument(f"is {wait_ms}", field="deadline_ms", limit=f"1-{MAX_DEADLINE_MS}")
        return Deadline(time.monotonic() + wait_ms / 1000)

    def remaining_s(self) -> float:
        """Returns what is left, never negative."""
        return max(0.0, self.at_s - time.monotonic())

    def remaining_ms(self) -> int:
        return int(self.remaining_s() * 1000)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at_s

    def check(self, doing: str) -> None:
        """Raises DeadlineExceeded if it has passed while `doing`."""
        if self.passed:
            raise DeadlineExceeded(f"the deadline passed while {doing}")
