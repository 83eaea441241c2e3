"""Failpoints: places where tests make the server slow, wrong or dead. Absent unless a test asks for them.

An armed point is `name=action[*times]`, several joined by `;`. Actions: `delay:250ms`, `fail` (an internal error),
`kill` (SIGKILL to this process), `freeze:2s` (blocks the event loop), `full` (no room, at a disk). Names are
`before.<Verb>`, `after.<Verb>`, those of the transfers: `get.chunk`, `put.chunk`, `put.commit`, `region.drain`,
`region.fill`, and those of the warm tier's disk: `disk.create`, `disk.open`, `disk.read`, `disk.write`, `disk.sync`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from dataclasses import dataclass
from difflib import get_close_matches

from kvstore.config import parse_duration
from kvstore_wire.errors import Internal
from kvstore_wire.methods import ADMIN_METHODS, STORE_METHODS

ENVIRONMENT = "KVCOMMONS_FAILPOINTS"
POINTS = frozenset(f"{when}.{verb}" for verb in (*STORE_METHODS, *ADMIN_METHODS) for when in ("before", "after"))
POINTS |= {"get.chunk", "put.chunk", "put.commit", "region.drain", "region.fill"}
POINTS |= {f"disk.{call}" for call in ("create", "open", "read", "write", "sync")}
_ACTIONS = ("delay", "fail", "kill", "freeze", "full")
_SLICE_S = 0.01


@dataclass
class _Armed:
    action: str
    duration_s: float
    times: int | None


class Failpoints:
    """Points by name. `hit` costs one dictionary look-up while nothing is armed."""

    def __init__(self, text: str = "") -> None:
        self._armed: dict[str, _Armed] = {}
        for item in filter(None, (part.strip() for part in text.split(";"))):
            name, _, action = item.partition("=")
            self.arm(name, action)

    def arm(self, name: str, action: str) -> None:
        """Arms a point. Raises ValueError for a point or an action that does not exist."""
        if name not in POINTS:
            near = get_close_matches(name, POINTS, n=1)
            raise ValueError(f"failpoint {name!r} does not exist" + (f"; the nearest is {near[0]}" if near else ""))
        action, _, times = action.partition("*")
        kind, _, duration = action.partition(":")
        if kind not in _ACTIONS:
            raise ValueError(f"failpoint {name}: {kind!r} is none of {', '.join(_ACTIONS)}")
        duration_s = parse_duration(duration) if duration else 0.0
        self._armed[name] = _Armed(kind, duration_s, int(times) if times else None)

    def disarm(self, name: str) -> None:
        self._armed.pop(name, None)

    def any_armed(self, *names: str) -> bool:
        return bool(self._armed) and any(name in self._armed for name in names)

    def hit_now(self, name: str) -> None:
        """As `hit`, for places that cannot wait: a delay blocks the event loop there."""
        armed = self._taken(name)
        if armed is not None and armed.action in ("delay", "freeze"):
            time.sleep(armed.duration_s)
        elif armed is not None:
            _strike(name, armed)

    async def hit(self, name: str) -> None:
        """Does what the point is armed for. Raises Internal for `fail`."""
        armed = self._taken(name)
        if armed is None:
            return
        if armed.action == "delay":
            await asyncio.sleep(armed.duration_s)
        elif armed.action == "freeze":
            time.sleep(armed.duration_s)  # noqa: ASYNC251 - blocking the loop is what it is for
        else:
            _strike(name, armed)

    def hit_in_thread(self, name: str) -> None:
        """As `hit`, for threads that use a disk: a delay ends early when the point is disarmed.

        Raises OSError: EIO for `fail`, ENOSPC for `full`.
        """
        armed = self._taken(name)
        if armed is None:
            return
        if armed.action in ("delay", "freeze"):
            end_s = time.monotonic() + armed.duration_s
            while time.monotonic() < end_s and self._armed.get(name) in (armed, None):
                if armed.times is None and name not in self._armed:
                    return
                time.sleep(_SLICE_S)
        elif armed.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            code = errno.ENOSPC if armed.action == "full" else errno.EIO
            raise OSError(code, f"{os.strerror(code)} (failpoint {name})")

    def _taken(self, name: str) -> _Armed | None:
        """Returns what a point is armed for, one time less."""
        armed = self._armed.get(name)
        if armed is not None and armed.times is not None:
            armed.times -= 1
            if armed.times <= 0:
                del self._armed[name]
        return armed


def _strike(name: str, armed: _Armed) -> None:
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Internal(f"failpoint {name}")
