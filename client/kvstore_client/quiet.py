"""The client's log: one line when a state changes, and never more than one of a kind in ten seconds."""

from __future__ import annotations

import logging
import time

LOGGER = logging.getLogger("kvstore_client")
QUIET_S = 10.0


class QuietLog:
    """Logs state changes of one client; what is held back is counted in the next line of its kind."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._last_s: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def info(self, kind: str, text: str) -> None:
        self._line(logging.INFO, kind, text)

    def warning(self, kind: str, text: str) -> None:
        self._line(logging.WARNING, kind, text)

    def _line(self, level: int, kind: str, text: str) -> None:
        now_s = time.monotonic()
        last_s = self._last_s.get(kind)
        if last_s is not None and now_s - last_s < QUIET_S:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        self._last_s[kind] = now_s
        held = self._held.pop(kind, 0)
        LOGGER.log(level, "%s: %s%s", self._target, text, f" ({held} like it held back)" if held else "")
