"""Waiting with a limit, for both sides.

`asyncio.wait_for` before Python 3.12 loses the caller's cancellation when the work ends at the same moment: a task that
was told to stop then goes on for ever. These two never lose it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def within(timeout_s: float | None, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns what `work` returns. Raises asyncio.TimeoutError, and cancels the work, if it takes longer."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
        raise asyncio.TimeoutError
    finally:
        task.cancel()


async def acquired_within(timeout_s: float | None, slots: asyncio.Semaphore) -> bool:
    """Takes a slot; false if none came in time. A slot that came as the caller was cancelled goes back."""
    task = asyncio.ensure_future(slots.acquire())
    taken = False
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        taken = task.done()
    finally:
        if not taken and not task.cancel() and not task.cancelled():
            slots.release()
    return taken
