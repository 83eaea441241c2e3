"""Hands out the requests of a plan in order, each to prefill and then to decode, and adds up what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.replay.crew import Crew
from kvstore.replay.outcomes import Prefilled
from kvstore.replay.plan import Plan
from kvstore.replay.tally import Tally
from kvstore.workload.splitmix import SplitMix64

POLL_S = 0.1


@dataclass(frozen=True)
class Pace:
    """How fast requests are handed out.

    `speed`: multiple of the trace's own time, None for as fast as workers take them. `in_flight`: most requests under
    way at once, whatever the speed. `decode_share`: of the requests that are decoded, 0..1.
    """

    in_flight: int
    speed: float | None = None
    decode_share: float = 1.0


class Dispatch:
    """One run over a plan."""

    def __init__(self, plan: Plan, crew: Crew, *, pace: Pace, check: Callable[[Tally], None]) -> None:
        self._plan, self._crew, self._pace, self._check = plan, crew, pace, check
        self._draws = SplitMix64(0)
        self._sent = self._under_way = 0
        self._start_s = 0.0
        self.tally = Tally(plan)
        self.latest_s = 0.0  # How late the latest request was handed out.

    def run(self) -> float:
        """Runs to the end and returns the seconds taken. Raises what `check` and the crew raise."""
        self._start_s = time.monotonic()
        while self._sent < self._plan.request_count or self._under_way:
            self._send_due()
            for outcome in self._crew.outcomes(self._wait_s()):
                self.tally.add(outcome)
                self._follow(outcome)
            self._check(self.tally)
        return time.monotonic() - self._start_s

    def _send_due(self) -> None:
        while self._has_room() and self._due_in_s() <= 0:
            self.latest_s = max(self.latest_s, -self._due_in_s())
            self._crew.prefill(self._sent)
            self._sent += 1
            self._under_way += 1

    def _follow(self, outcome: object) -> None:
        """Sends a prefilled request to decode, or counts it as done."""
        if isinstance(outcome, Prefilled) and self._draws.uniform() < self._pace.decode_share:
            self._crew.decode(outcome.request)
        else:
            self._under_way -= 1
        self._send_due()

    def _has_room(self) -> bool:
        return self._sent < self._plan.request_count and self._under_way < self._pace.in_flight

    def _due_in_s(self) -> float:
        """Seconds until the next request is due; below 0 if it is late."""
        if self._pace.speed is None:
            return 0.0
        due_s = float(self._plan.times_s[self._sent]) / self._pace.speed
        return due_s - (time.monotonic() - self._start_s)

    def _wait_s(self) -> float:
        return min(POLL_S, max(0.0, self._due_in_s())) if self._has_room() else POLL_S
