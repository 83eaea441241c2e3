"""One Put on its way in: header, payload, trailer."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from kvstore.service.incoming import Filling
from kvstore.service.shell import Shell
from kvstore.service.transfer import Transfers
from kvstore_wire.errors import Internal, InvalidArgument, KvStoreError
from kvstore_wire.frames import END, ERROR, Discard, Frame, Sink, Verb
from kvstore_wire.v1 import block_store_pb2 as pb


class Answered(Protocol):
    def __call__(self, answer: bytes, flags: int) -> None: ...


class Ended(Protocol):
    def __call__(self, *, came: bool) -> None:
        """`came`: whether the last frame of the request has come."""


class PutStream:
    """A Put; a sink for its payload. An error answers it at once, and what else comes is dropped."""

    verb = Verb.PUT

    def __init__(self, shell: Shell, transfers: Transfers, *, answered: Answered, ended: Ended) -> None:
        self._shell, self._transfers = shell, transfers
        self._answered, self._ended = answered, ended
        self._started = time.perf_counter_ns()
        self._filling: Filling | None = None
        self._copying: asyncio.Task[None] | None = None
        self._trailer: pb.PutTrailer | None = None
        self._discard: Discard | None = None  # Set once the Put was answered.
        self._came = False

    @property
    def is_receiving(self) -> bool:
        """Whether bytes or the trailer are still to come."""
        return self._filling is not None and not self._came

    def frame(self, frame: Frame, message: memoryview) -> Sink | None:
        """Takes one frame of the request."""
        if self._discard is None:
            try:
                self._take(frame, bytes(message))
            except Exception as error:  # noqa: BLE001 - the outermost place of the door
                self._fail(error)
        if frame.ends and not frame.payload_bytes:
            self.ended()
        return self if frame.payload_bytes else None

    def ended(self) -> None:
        """Tells that the request's last frame has come, payload and all."""
        self._came = True
        if self._discard is not None:
            self._ended(came=True)
            return
        try:
            if self._trailer is None:
                raise InvalidArgument("the stream ended without a trailer", field="trailer")
            if self._shell.failpoints.any_armed("put.commit"):
                self._copying = asyncio.ensure_future(self._finish_later(self._copying))
                self._copying.add_done_callback(self._copied)
            elif self._copying is None or self._copying.done():
                self._finish()
        except Exception as error:  # noqa: BLE001 - the outermost place of the door
            self._fail(error)

    def room(self, most: int) -> memoryview:
        if self._discard is None:
            try:
                assert self._filling is not None
                return self._filling.room(most)
            except Exception as error:  # noqa: BLE001 - the outermost place of the door
                self._fail(error)
        assert self._discard is not None
        return self._discard.room(most)

    def landed(self, size: int) -> None:
        if self._discard is None:
            assert self._filling is not None
            self._filling.landed(size)

    def close(self) -> bool:
        """Drops the Put; tells whether its answer is still owed. Idempotent."""
        owed = self._discard is None
        self._discard = self._discard or Discard()
        if self._copying is not None:
            self._copying.cancel()
        if self._filling is not None:
            self._filling.close()  # The slots stay out of reach until no thread copies: the lease is pinned.
        return owed

    def _take(self, frame: Frame, message: bytes) -> None:
        if self._filling is None:
            self._shell.failpoints.hit_now("before.Put")
            header = _body(message, "header").header
            self._filling = self._transfers.fill(header)
            if header.HasField("source"):
                self._copying = asyncio.ensure_future(self._transfers.copy_source(header, self._filling))
                self._copying.add_done_callback(self._copied)
        elif message:
            if self._trailer is not None or not frame.ends:
                raise InvalidArgument("only data and one trailer follow the header", field="header")
            self._trailer = _body(message, "trailer").trailer
        if frame.payload_bytes:
            self._shell.failpoints.hit_now("put.chunk")

    def _copied(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or self._discard is not None:
            return
        try:
            if error is not None:
                raise error
            if self._came:
                self._finish()
        except Exception as failure:  # noqa: BLE001 - the outermost place of the door
            self._fail(failure)

    def _finish(self) -> None:
        assert self._filling is not None
        assert self._trailer is not None
        if self._copying is not None and self._copying.done():
            self._copying.result()
        self._filling.check_trailer(self._trailer)
        self._end(self._filling.finish(self._trailer).SerializeToString(), END)

    async def _finish_later(self, copying: asyncio.Task[None] | None) -> None:
        if copying is not None:
            await copying
        await self._shell.failpoints.hit("put.commit")

    def _fail(self, error: Exception) -> None:
        made = error if isinstance(error, KvStoreError) else Internal(f"{type(error).__name__}: {error}")
        self._end(made.to_detail().SerializeToString(), ERROR)

    def _end(self, answer: bytes, flags: int) -> None:
        self.close()
        self._answered(answer, flags)
        self._shell.latencies.add("Put", time.perf_counter_ns() - self._started)
        self._ended(came=self._came)


def _body(raw: bytes, expected: str) -> Any:
    message = pb.PutRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise InvalidArgument("is not a PutRequest", field="message") from None
    if message.WhichOneof("body") != expected:
        what = "the first message must be the header" if expected == "header" else "only a trailer may follow"
        raise InvalidArgument(what, field="header")
    return message
