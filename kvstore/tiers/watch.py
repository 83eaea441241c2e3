"""How long calls of the device have been under way, for whoever must know that a disk hangs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import TracebackType


class Watch:
    """Calls of any thread, without a lock. `now`: seconds of the monotonic clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._numbers = count()
        self._began: dict[int, float] = {}

    @property
    def stalled_s(self) -> float:
        """How long the longest of the calls under way has taken; 0 if there is none."""
        began = self._began.copy()
        return max(0.0, self._now() - min(began.values())) if began else 0.0

    def call(self) -> _Call:
        """Returns what a call is made within."""
        return _Call(self._began, next(self._numbers), self._now)


class _Call:
    __slots__ = ("_began", "_now", "_number")

    def __init__(self, began: dict[int, float], number: int, now: Callable[[], float]) -> None:
        self._began, self._number, self._now = began, number, now

    def __enter__(self) -> None:
        self._began[self._number] = self._now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._began[self._number]
