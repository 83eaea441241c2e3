"""The doors of a shard as the contract's tests see them: one way to call, whatever carries the messages.

Every door answers with the contract's messages and raises the errors of kvstore_wire. A new door needs only a class
here to be held to the whole contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from kvstore.config import effective
from kvstore.service.admin import AdminHandlers
from kvstore.service.shell import Call
from kvstore.service.transfer import Payload
from kvstore_wire.errors import KvStoreError, from_detail
from kvstore_wire.methods import ADMIN_METHODS, ERROR_METADATA, STORE_METHODS
from kvstore_wire.v1 import block_store_pb2 as pb
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
