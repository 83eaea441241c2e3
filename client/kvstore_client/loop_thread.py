"""One event loop in one background thread: the only place that touches the channel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

FINISH_S = 0.2
POLLER = "PollerCompletionQueue._handle_events"

R = TypeVar("R")


class LoopThread:
    """Owns the loop and its (daemon) thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=_serve, args=(self.loop,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this very thread, where blocking calls would wait for themselves."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Starts `work` in the loop and returns its future. Raises RuntimeError if the loop has stopped."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def post(self, action: Callable[[], object]) -> None:
        """Runs `action` in the loop soon; dropped if the loop has stopped."""
        try:
            self.loop.call_soon_threadsafe(action)
        except RuntimeError:
            return

    def stop(self, wait_s: float) -> None:
        """Ends loop and thread, waiting at most `wait_s`. Idempotent."""
        self.post(self.loop.stop)
        if not self.is_current:
            self._thread.join(wait_s)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_finish_tasks())
    finally:
        loop.close()


async def _finish_tasks() -> None:
    """Lets what gRPC still has to do end by itself, then cancels the rest."""
    for wait_s, cancels in ((FINISH_S, False), (FINISH_S, True)):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            if cancels:
                task.cancel()
        if left:
            await asyncio.wait(left, timeout=wait_s)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes every event loop of a process through one descriptor and lets whichever comes first hand the event on:
    # the second finds nothing to read, and the event's own loop may be closed by then. Neither is a fault of this loop.
    from_poller = POLLER in str(context.get("message"))
    if from_poller and isinstance(context.get("exception"), (BlockingIOError, RuntimeError)):
        return
    loop.default_exception_handler(context)
