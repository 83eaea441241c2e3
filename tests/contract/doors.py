"""The doors of a shard as the contract's tests see them: one way to call, whatever carries the messages.

Every door answers with the contract's messages and raises the errors of kvstore_wire. A new door needs only a class
here to be held to the whole contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from kvstore.config import effective
from kvstore.service.admin import AdminHandlers
from kvstore.service.shell import Call
from kvstore.service.transfer import Payload
from kvstore_wire.errors import KvStoreError, from_detail
from kvstore_wire.frames import END, ERROR, VERB_OF_METHOD, Frame, FrameReader, Verb, head
from kvstore_wire.methods import ADMIN_METHODS, ERROR_METADATA, STORE_METHODS
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from tests.integration.server_process import LocalServer

WRITE_FAILED = "Internal error from Core"  # What gRPC says of a write that came too late.
HANG_S = 20.0  # A call that takes longer is a failed test, not a slow one.
METHODS = {**STORE_METHODS, **ADMIN_METHODS}
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Door(Protocol):
    """One connection to a shard. Raises KvStoreError."""

    name: str

    async def call(self, name: str, message: Message) -> Any:
        """One message, one answer."""

    def stream(self, name: str, message: Message) -> AsyncGenerator[Any, None]:
        """One message, many answers."""

    async def send(self, name: str, messages: AsyncIterator[Message]) -> Any:
        """Many messages, one answer."""

    def talk(self, name: str, messages: AsyncIterator[Message]) -> AsyncGenerator[Any, None]:
        """Many messages both ways."""

    async def close(self) -> None: ...


class DirectDoor:
    """The handlers themselves: what every door must come to."""

    name = "direct"

    def __init__(self, local: LocalServer) -> None:
        server = local.server
        self._server, self._admin = server, AdminHandlers(server.shell, effective(local.config))

    async def call(self, name: str, message: Message) -> Any:
        answer = self._handler(name)(message, Call())
        return await answer if inspect.isawaitable(answer) else answer

    async def stream(self, name: str, message: Message) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(self._handler(name)(message, Call())) as answers:
            async for answer in answers:
                yield _as_message(answer)

    async def send(self, name: str, messages: AsyncIterator[Message]) -> Any:
        return await asyncio.wait_for(self._handler(name)(messages, Call()), HANG_S)

    async def talk(self, name: str, messages: AsyncIterator[Message]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(self._handler(name)(messages, Call())) as answers:
            async for answer in answers:
                yield answer

    async def close(self) -> None:
        return

    def _handler(self, name: str) -> Any:
        if name in ("Get", "Put"):
            return getattr(self._server.transfer, name.lower())
        owner: object = self._admin if name in ADMIN_METHODS else self._server.handlers
        return getattr(owner, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())


class GrpcDoor:
    """The gRPC door over a real socket, without any client library."""

    name = "grpc"

    def __init__(self, target: str, admin_target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._admin_channel = grpc.aio.insecure_channel(admin_target, options=CHANNEL_OPTIONS)

    async def call(self, name: str, message: Message) -> Any:
        with _errors():
            return await asyncio.wait_for(self.method(name)(message), HANG_S)

    async def stream(self, name: str, message: Message) -> AsyncGenerator[Any, None]:
        call = self.method(name)(message)
        with _errors(), _cancelling(call):
            async for answer in call:
                yield answer

    async def send(self, name: str, messages: AsyncIterator[Message]) -> Any:
        call = self.method(name)(messages)
        told = _PeerStatus(call)
        with _errors():
            try:
                return await asyncio.wait_for(call, HANG_S)
            except grpc.aio.AioRpcError as error:
                raise await told.or_else(error) from None

    async def talk(self, name: str, messages: AsyncIterator[Message]) -> AsyncGenerator[Any, None]:
        call = self.method(name)(messages)
        with _errors(), _cancelling(call):
            async for answer in call:
                yield answer

    async def close(self) -> None:
        await self._channel.close()
        await self._admin_channel.close()

    def method(self, name: str) -> Any:
        """The callable of one rpc."""
        method = METHODS[name]
        channel = self._admin_channel if name in ADMIN_METHODS else self._channel
        kind = ("stream" if method.requests else "unary") + "_" + ("stream" if method.responses else "unary")
        return getattr(channel, kind)(
            method.path,
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=method.response.FromString,
        )


class _PeerStatus:
    """How the shard ended a call with a stream of requests: a write that comes too late may hide it (grpcio 1.85)."""

    def __init__(self, call: Any) -> None:
        self._told: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    async def or_else(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Returns what the shard said, or the error itself if it says nothing within a second."""
        if error.details() != WRITE_FAILED:
            return error
        await asyncio.wait({self._told}, timeout=1.0)
        return self._told.result() if self._told.done() else error

    def _note(self, call: Any) -> None:
        code, details, trailing = (_ready(part) for part in (call.code(), call.details(), call.trailing_metadata()))
        if details != WRITE_FAILED and not self._told.done():
            self._told.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))


class FramedDoor:
    """The fast channel over a real socket, without any client library. Admin calls have no frames: they go by gRPC."""

    name = "framed"

    def __init__(self, address: str, admin_target: str, tls: ssl.SSLContext | None = None) -> None:
        self._address, self._tls, self._admin = address, tls, GrpcDoor(admin_target, admin_target)
        self._answers: dict[int, asyncio.Queue[tuple[Frame, bytes]]] = {}
        self._last = 0
        self._opened: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._payload = bytearray()
        self._room = memoryview(b"")

    async def call(self, name: str, message: Message) -> Any:
        if name in ADMIN_METHODS:
            return await self._admin.call(name, message)
        request = await self._begin(name, message.SerializeToString(), END)
        return await asyncio.wait_for(self._one(name, request), HANG_S)

    async def stream(self, name: str, message: Message) -> AsyncGenerator[Any, None]:
        if name in ADMIN_METHODS:
            async with contextlib.aclosing(self._admin.stream(name, message)) as answers:
                async for answer in answers:
                    yield answer
            return
        request = await self._begin(name, message.SerializeToString(), END)
        async with contextlib.aclosing(self._many(name, request)) as answers:
            async for answer in answers:
                yield answer

    async def send(self, name: str, messages: AsyncIterator[Message]) -> Any:
        request = self._request()

        async def send_all() -> None:
            kind = None
            async for message in messages:
                assert isinstance(message, pb.PutRequest)
                kind = message.WhichOneof("body")
                if kind == "data":
                    for at in range(0, len(message.data), self._frame_bytes):
                        payload = message.data[at : at + self._frame_bytes]
                        self._write(head(Verb.PUT, request, payload_bytes=len(payload)) + payload)
                else:
                    flags = END if kind == "trailer" else 0
                    self._write(head(Verb.PUT, request, message.SerializeToString(), flags=flags))
                await self._writer.drain()
            if kind != "trailer":
                self._write(head(Verb.PUT, request, flags=END))

        await self._open()
        sending = asyncio.ensure_future(send_all())
        try:
            return await asyncio.wait_for(self._one(name, request), HANG_S)
        finally:
            if not sending.done():
                sending.cancel()
                self._write(head(Verb.CANCEL, request, flags=END))
            else:
                sending.result()

    async def talk(self, name: str, messages: AsyncIterator[Message]) -> AsyncGenerator[Any, None]:
        first = await anext(messages, None)
        request = await self._begin(name, b"" if first is None else first.SerializeToString(), 0 if first else END)

        async def send_all() -> None:
            async for message in messages:
                self._write(head(VERB_OF_METHOD[name], request, message.SerializeToString()))
            if first is not None:
                self._write(head(VERB_OF_METHOD[name], request, flags=END))

        sending = asyncio.ensure_future(send_all())
        try:
            async with contextlib.aclosing(self._many(name, request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            sending.cancel()
            self._write(head(Verb.CANCEL, request, flags=END))

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._writer.close()
        await self._admin.close()

    # -- a receiver of frames ------------------------------------------------------------------------------------

    def frame(self, frame: Frame, message: memoryview) -> FramedDoor:
        if frame.verb == Verb.GOODBYE:
            why = channel.Goodbye.FromString(bytes(message)).why
            raise ConnectionError(f"the shard said goodbye: {why.message}")
        if frame.verb == Verb.CREDIT:
            return self
        if frame.message_bytes or (frame.ends and not frame.payload_bytes):
            plain = frame._replace(flags=0) if frame.payload_bytes else frame
            self._queue(frame.request).put_nowait((plain, bytes(message)))
        self._payload = bytearray()
        return self

    def room(self, most: int) -> memoryview:
        self._room = memoryview(bytearray(most))
        return self._room

    def landed(self, size: int) -> None:
        self._payload += self._room[:size]

    def payload_landed(self, frame: Frame) -> None:
        answer = pb.GetResponse(data=bytes(self._payload)).SerializeToString()
        self._queue(frame.request).put_nowait((frame, answer))
        self._write(head(Verb.CREDIT, 0, channel.Credit(bytes=frame.payload_bytes).SerializeToString(), flags=END))

    # -- helpers -------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._opened is not None:
            await self._opened
            return
        self._opened = asyncio.get_running_loop().create_future()
        if self._address.startswith("unix:"):
            streams = await asyncio.open_unix_connection(self._address.removeprefix("unix:"))
        else:
            host, _, port = self._address.rpartition(":")
            streams = await asyncio.open_connection(host, int(port), ssl=self._tls)
        self._reader, self._writer = streams
        self._pump = asyncio.ensure_future(self._receive())
        request = self._request()
        self._write(head(Verb.HELLO, request, channel.Hello(credit_bytes=1 << 20).SerializeToString(), flags=END))
        _, raw = await asyncio.wait_for(self._queue(request).get(), HANG_S)
        self._frame_bytes = channel.HelloAnswer.FromString(raw).max_frame_bytes
        self._opened.set_result(None)

    async def _receive(self) -> None:
        """Reads until the connection ends, and says so to all that wait."""
        try:
            await self._receive_frames()
        finally:
            for queue in self._answers.values():
                queue.put_nowait((Frame(0, ERROR, 0, 0, 0, 0), b""))

    async def _receive_frames(self) -> None:
        frames = FrameReader(self, max_message_bytes=64 << 20, max_payload_bytes=4 << 20)
        while data := await self._reader.read(64 << 10):
            at = 0
            while at < len(data):
                room = frames.wanted()
                size = min(len(room), len(data) - at)
                room[:size] = data[at : at + size]
                at += size
                frames.landed(size)

    async def _begin(self, name: str, raw: bytes, flags: int) -> int:
        await self._open()
        request = self._request()
        self._write(head(VERB_OF_METHOD[name], request, raw, flags=flags))
        return request

    def _request(self) -> int:
        self._last += 1
        return self._last

    def _write(self, data: bytes) -> None:
        self._writer.write(data)

    def _queue(self, request: int) -> asyncio.Queue[tuple[Frame, bytes]]:
        return self._answers.setdefault(request, asyncio.Queue())

    async def _one(self, name: str, request: int) -> Any:
        frame, raw = await self._queue(request).get()
        _raise_if_error(frame, raw)
        assert frame.ends
        return STORE_METHODS[name].response.FromString(raw)

    async def _many(self, name: str, request: int) -> AsyncGenerator[Any, None]:
        ended = False
        try:
            while not ended:
                frame, raw = await self._queue(request).get()
                ended = frame.ends
                _raise_if_error(frame, raw)
                if raw:
                    yield STORE_METHODS[name].response.FromString(raw)
        finally:
            if not ended:
                self._write(head(Verb.CANCEL, request, flags=END))


def _raise_if_error(frame: Frame, raw: bytes) -> None:
    if frame.flags & ERROR:
        raise from_detail(types.ErrorDetail.FromString(raw))


def error_of(error: grpc.aio.AioRpcError) -> KvStoreError:
    """The error that a failed call carries; its status must be the one that belongs to it.

    Raises the gRPC error itself where the shard sent no detail.
    """
    detail = dict(error.trailing_metadata()).get(ERROR_METADATA)
    if detail is None:
        raise error
    found = from_detail(types.ErrorDetail.FromString(detail))
    assert error.code().name == found.status, f"{found} came as {error.code()}"
    assert error.details() == str(found)
    return found


@contextlib.contextmanager
def _errors() -> Any:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None


def _ready(value: Any) -> Any:
    """Returns what a coroutine returns that need not wait."""
    try:
        value.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a finished call still waits")


@contextlib.contextmanager
def _cancelling(call: Any) -> Any:
    try:
        yield
    finally:
        call.cancel()


def _as_message(answer: Any) -> Any:
    if isinstance(answer, Payload):
        return pb.GetResponse(data=b"".join(answer.pieces))
    return answer
