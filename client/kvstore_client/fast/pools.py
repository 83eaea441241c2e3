"""Connections of one path: one for each call under way in threads, one for all calls of an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvstore_client.deadline import Deadline
from kvstore_client.errand import Shared
from kvstore_client.errors import ClientClosed, PathDown
from kvstore_client.fast.aio import AsyncLane
from kvstore_client.fast.dial import OPEN_MS, Dialed, dial, orphaned
from kvstore_client.fast.lane import BlockingLane
from kvstore_client.fast.wire import MakePieces, Taker
from kvstore_client.paths import Path, Paths
from kvstore_wire.errors import DeadlineExceeded, KvStoreError
from kvstore_wire.frames import Verb

R = TypeVar("R")
MAX_IDLE_LANES = 32
_REPEATABLE = frozenset((Verb.MATCH, Verb.GET, Verb.RENEW, Verb.DELETE, Verb.OVER, Verb.EXPLAIN))


class BlockingLanes:
    """Thread-safe. Owns the lanes that no call uses."""

    def __init__(self, path: Path, paths: Paths, busy_poll_s: float) -> None:
        self.path, self._paths, self._busy_poll_s = path, paths, busy_poll_s
        self._idle: deque[BlockingLane] = deque()
        self._closed = self._retired = False
        self._opening: Shared[None] = Shared()

    async def exchange(
        self,
        verb: int,
        message: bytes,
        *,
        taker: Taker,
        deadline: Deadline,
        source: MakePieces | None = None,
    ) -> None:
        """Never suspends: it blocks."""
        lane = self._idle_lane(verb)
        if lane is not None:
            try:
                lane.exchange(verb, message, taker=taker, deadline=deadline, source=source)
                self._paths.worked(self.path)
                return
            except PathDown as error:
                if not lane.was_silent or verb not in _REPEATABLE:
                    self._paths.failed(self.path, error)
                    raise
            finally:
                self._give_back(lane)
        # A connection that was closed while it lay idle says nothing about the shard: a new one does.
        lane = self._new_lane(deadline)
        try:
            lane.exchange(verb, message, taker=taker, deadline=deadline, source=source)
        except PathDown as error:
            self._paths.failed(self.path, error)
            raise
        finally:
            self._give_back(lane)
        self._paths.worked(self.path)

    def tell(self, verb: int, message: bytes) -> bool:
        while not self._closed:
            try:
                lane = self._idle.pop()
            except IndexError:
                break
            told = lane.is_fit and lane.tell(verb, message)
            self._give_back(lane)
            if told:
                return True
        return False

    def borrow(self, size_bytes: int) -> BlockingLane | None:
        """Returns a lane for `BlockingLane.ask` with an answer of so much payload at most, None if none is to hand.

        Give it back, whatever happens.
        """
        while not self._closed:
            try:
                lane = self._idle.pop()
            except IndexError:
                return None
            if not lane.is_fit:
                lane.close()
            elif lane.is_plain and size_bytes <= lane.wire.frame_bytes:
                return lane
            else:
                self._give_back(lane)
                return None
        return None

    def give_back(self, lane: BlockingLane) -> None:
        """Takes a borrowed lane back."""
        self._give_back(lane)

    def worked(self) -> None:
        """Notes that the path carried a call."""
        self._paths.worked(self.path)

    def failed(self, error: KvStoreError) -> None:
        """Notes that the path does not work."""
        self._paths.failed(self.path, error)

    def retire(self) -> None:
        """Keeps no connection any more: the shard's life that they led to has ended."""
        self._retired = True
        while self._idle:
            with suppress(IndexError):  # Another thread took it.
                self._idle.pop().close()

    def close(self) -> None:
        """Lets no call begin. Idempotent."""
        self._closed = True
        self.retire()

    def _idle_lane(self, verb: int) -> BlockingLane | None:
        """Returns a lane that no call uses; for a call that must not be made twice, one that is known to be open."""
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        while True:
            try:
                lane = self._idle.pop()
            except IndexError:
                return None
            if lane.is_fit and (verb in _REPEATABLE or lane.is_quiet()):
                return lane
            lane.close()

    def _new_lane(self, deadline: Deadline) -> BlockingLane:
        try:
            return BlockingLane(dial(self.path.endpoint, self.path.generation, deadline), self._busy_poll_s)
        except PathDown as error:
            self._paths.failed(self.path, error)
            raise
        except DeadlineExceeded:
            self._open_aside()
            raise

    def _open_aside(self) -> None:
        """Opens a connection for the next call, and so finds out whether the path works: calls in more of a hurry than
        a connection takes could not."""
        if not self._closed:
            with suppress(PathDown):
                self._opening.begin(None, self._opened_aside)

    def _opened_aside(self) -> None:
        try:
            dialed = dial(self.path.endpoint, self.path.generation, Deadline.after(OPEN_MS))
        except KvStoreError as error:
            self._paths.failed(self.path, error)
        else:
            self._give_back(BlockingLane(dialed, self._busy_poll_s))

    def _give_back(self, lane: BlockingLane) -> None:
        if not lane.is_fit or len(self._idle) >= MAX_IDLE_LANES:
            lane.close()
            return
        self._idle.append(lane)
        if self._retired:  # Perhaps just now.
            self.retire()


class AsyncLanes:
    """Lives in one event loop. Owns one lane, opened when first used and again when it broke."""

    def __init__(self, path: Path, paths: Paths) -> None:
        self.path, self._paths = path, paths
        self._lane: AsyncLane | None = None
        self._opening: asyncio.Task[AsyncLane] | None = None
        self._closed = False

    async def exchange(
        self,
        verb: int,
        message: bytes,
        *,
        taker: Taker,
        deadline: Deadline,
        source: MakePieces | None = None,
    ) -> None:
        lane = self._lane
        try:
            if lane is None or lane.broken:
                lane = await self._opened(deadline)
            await lane.exchange(verb, message, taker=taker, deadline=deadline, source=source)
        except PathDown as error:
            if self._closed:
                raise ClientClosed("the client was closed under the call", field="client") from None
            self._paths.failed(self.path, error)
            raise
        self._paths.worked(self.path)

    def tell(self, verb: int, message: bytes) -> bool:
        return self._lane is not None and self._lane.tell(verb, message)

    def failed(self, error: KvStoreError) -> None:
        """Notes that the path does not work."""
        self._paths.failed(self.path, error)

    def retire(self) -> None:
        """Closes the connection: the shard's life that it led to has ended."""
        if self._lane is not None:
            self._lane.close()

    def close(self) -> None:
        """Lets no call begin. Idempotent."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self.retire()

    async def _opened(self, deadline: Deadline) -> AsyncLane:
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        if self._opening is None:
            # Not by this call's deadline: others, that may have more time, wait for the same connection.
            self._opening = asyncio.ensure_future(self._open(Deadline.after(OPEN_MS)))
            self._opening.add_done_callback(self._open_ended)
        opening = self._opening
        await asyncio.wait({opening}, timeout=deadline.remaining_s())
        if not opening.done():
            raise DeadlineExceeded("the deadline passed while connecting")
        if opening.cancelled():
            raise ClientClosed("the client was closed while connecting", field="client")
        return opening.result()

    async def _open(self, deadline: Deadline) -> AsyncLane:
        dialed = await offloaded(partial(dial, self.path.endpoint, self.path.generation, deadline), orphaned)
        self._lane = AsyncLane(dialed)
        if self._closed:
            self._lane.close()
        return self._lane

    def _open_ended(self, task: asyncio.Task[AsyncLane]) -> None:
        self._opening = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, KvStoreError):  # Perhaps no call waits any more.
            self._paths.failed(self.path, error)


def in_thread(work: Callable[[], R]) -> asyncio.Future[R]:
    """Runs work in a thread of the loop's. Raises ClientClosed where the interpreter ends and has none any more."""
    try:
        return asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError as error:
        raise ClientClosed(f"the process ends: {error}", field="client") from None


async def offloaded(work: Callable[[], Dialed], orphan: Callable[[Dialed], None]) -> Dialed:
    """Runs blocking work in a thread. If the caller is cancelled meanwhile, `orphan` gets what came of it."""
    future = in_thread(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else orphan(done.result()))
        raise
