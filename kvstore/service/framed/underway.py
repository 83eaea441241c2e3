"""Requests that are under way: each can be dropped at any moment, and tells whether it still owes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from kvstore.service.failpoints import Failpoints
from kvstore.service.framed.outbox import GetAnswer, Outbox
from kvstore_wire.errors import InvalidArgument, KvStoreError
from kvstore_wire.frames import MAX_OPEN_REQUESTS, Frame, Verb
from kvstore_wire.v1 import block_store_pb2 as pb


class Open(Protocol):
    """A request under way."""

    @property
    def verb(self) -> int: ...

    def close(self) -> bool:
        """Drops it, and whatever it holds; true if nobody else gives the answer that is still owed. Idempotent."""


class Pauses:
    """The failpoint `get.chunk`: holds the answer that hits it back for as long as it says."""

    def __init__(self, failpoints: Failpoints, wake: Callable[[], None]) -> None:
        self._failpoints, self._wake = failpoints, wake
        self._held: dict[GetAnswer, asyncio.Task[None]] = {}

    def may_go(self, answer: GetAnswer) -> bool:
        """Whether an answer may send its next frame."""
        task = self._held.get(answer)
        if task is None and self._failpoints.any_armed("get.chunk"):
            task = self._held[answer] = asyncio.ensure_future(self._hit(answer))
        if task is None or not task.done():
            return task is None
        del self._held[answer]
        return True

    def forget(self, answer: GetAnswer) -> None:
        """Stops holding back an answer that is over."""
        task = self._held.pop(answer, None) if self._held else None
        if task is not None:
            task.cancel()

    async def _hit(self, answer: GetAnswer) -> None:
        try:
            await self._failpoints.hit("get.chunk")
        except KvStoreError as error:
            answer.fault = error
        self._wake_soon()

    def _wake_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._wake)  # Once this task counts as done.


class Sending:
    """A Get whose answer is being sent."""

    def __init__(self, outbox: Outbox, answer: GetAnswer) -> None:
        self._outbox, self._answer = outbox, answer

    verb = Verb.GET

    def close(self) -> bool:
        owed = not self._answer.last_made
        self._outbox.drop_answer(self._answer)
        return owed


class TaskAnswer:
    """A request that a task answers."""

    def __init__(self, verb: int, task: asyncio.Task[None]) -> None:
        self.verb, self.task = verb, task

    def close(self) -> bool:
        self.task.cancel()
        return False  # Its end is the answer: until then it may still write to a region.


class SessionStream:
    """The pulses of a Session request."""

    verb = Verb.SESSION

    def __init__(self) -> None:
        self._pulses: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.has_ended = False
        self.task: asyncio.Task[None] | None = None

    def frame(self, frame: Frame, message: bytes) -> None:
        if self._pulses.qsize() < MAX_OPEN_REQUESTS:  # A pulse says nothing new: beyond that they may be dropped.
            self._pulses.put_nowait(message)
        if frame.ends:
            self.has_ended = True
            self._pulses.put_nowait(None)

    async def pulses(self) -> AsyncIterator[pb.SessionPulse]:
        while (raw := await self._pulses.get()) is not None:
            yield parsed(pb.SessionPulse, raw)

    def close(self) -> bool:
        self.has_ended = True
        if self.task is not None:
            self.task.cancel()
        return False  # The task's end is the answer: then the session has ended too.


def parsed(kind: type[Any], raw: bytes) -> Any:
    """Reads a message. Raises InvalidArgument."""
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise InvalidArgument(f"is not a {kind.__name__}", field="message") from None
    return message
