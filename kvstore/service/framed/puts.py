"""One Put on its way in: header, payload, trailer."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from kvstore.service.incoming import Filling
from kvstore.service.shell import Shell
from kvstore.service.transfer import Transfers
from kvstore_wire.errors import Internal, InvalidArgument, KvStoreError
from kvstore_wire.frames import END, ERROR, Discard, Frame, Sink, Verb
from kvstore_wire.v1 import block_store_pb2 as pb

_LOG = logging.getLogger("kvstore.framed")
DISCARD = Discard()  # One for all connections: nobody reads what lies in it.


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
        self._copying: asyncio.Future[None] | None = None
        self._has_source = False
        self._trailer: pb.PutTrailer | None = None
        self._over = False  # It was answered, or nobody waits for the answer.
        self.has_ended = False  # The request's last frame has come.

    @property
    def is_receiving(self) -> bool:
        """Whether bytes or the trailer are still to come."""
        return self._filling is not None and not self.has_ended

    def frame(self, frame: Frame, message: memoryview) -> Sink | None:
        """Takes one frame of the request."""
        if not self._over:
            try:
                self._take(frame, bytes(message))
            except Exception as error:  # noqa: BLE001 - the outermost place of the door
                self._fail(error)
        if frame.ends and not frame.payload_bytes:
            self.ended()
        return self if frame.payload_bytes else None

    def ended(self) -> None:
        """Tells that the request's last frame has come, payload and all."""
        self.has_ended = True
        if self._over:
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
        if not self._over:
            try:
                assert self._filling is not None
                return self._filling.room(most)
            except Exception as error:  # noqa: BLE001 - the outermost place of the door
                self._fail(error)
        return DISCARD.room(most)

    def landed(self, size: int) -> None:
        if not self._over:
            assert self._filling is not None
            self._filling.landed(size)

    def close(self) -> bool:
        """Drops the Put; tells whether its answer is still owed. Idempotent."""
        owed, self._over = not self._over, True
        if self._copying is not None and self._copying.cancel():
            self._copying.add_done_callback(self._close_filling)  # Until then a thread may write to the slots.
        else:
            self._close_filling()
        return owed

    def _close_filling(self, _: object = None) -> None:
        if self._filling is not None:
            self._filling.close()

    def _take(self, frame: Frame, message: bytes) -> None:
        if self._filling is None:
            self._shell.failpoints.hit_now("before.Put")
            header = _body(message, "header").header
            self._filling = self._transfers.fill(header)
            self._has_source = header.HasField("source")
            if self._has_source:
                self._copying = self._transfers.copy_source(header, self._filling)
                self._copying.add_done_callback(self._copied)
        elif message:
            if self._trailer is not None or not frame.ends:
                raise InvalidArgument("only data and one trailer follow the header", field="header")
            self._trailer = _body(message, "trailer").trailer
        if frame.payload_bytes:
            if self._copying is not None:
                raise InvalidArgument("carries none with `source`", field="frame.payload_bytes", limit="0")
            self._shell.failpoints.hit_now("put.chunk")

    def _copied(self, copying: asyncio.Future[None]) -> None:
        error = None if copying.cancelled() else copying.exception()
        if copying.cancelled() or self._over:
            return
        try:
            if error is not None:
                raise error
            if self.has_ended and copying is self._copying:
                self._finish()
        except Exception as failure:  # noqa: BLE001 - the outermost place of the door
            self._fail(failure)

    def _finish(self) -> None:
        assert self._filling is not None
        assert self._trailer is not None
        if self._copying is not None:
            self._copying.result()
        if self._has_source:
            self._filling.copied()
        self._filling.check_trailer(self._trailer)
        self._end(self._filling.finish(self._trailer).SerializeToString(), END)

    async def _finish_later(self, copying: asyncio.Future[None] | None) -> None:
        if copying is not None:
            await copying
        await self._shell.failpoints.hit("put.commit")

    def _fail(self, error: Exception) -> None:
        self._end(as_error(Verb.PUT, error).to_detail().SerializeToString(), ERROR)

    def _end(self, answer: bytes, flags: int) -> None:
        self.close()
        self._answered(answer, flags)
        self._shell.latencies.add("Put", time.perf_counter_ns() - self._started)
        self._ended(came=self.has_ended)


def as_error(verb: int, error: BaseException) -> KvStoreError:
    """Returns the answer that an exception comes to; a fault of our own is logged."""
    if isinstance(error, KvStoreError):
        return error
    _LOG.error("verb %d failed", verb, exc_info=error)
    return Internal(f"{type(error).__name__}: {error}")


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
