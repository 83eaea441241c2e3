"""The gRPC door: binds handlers to methods by name, and turns errors into statuses.

Payload messages of Get and Put pass through kvstore_wire.inline, everything else through the protobuf library.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.service.admin import AdminHandlers
from kvstore.service.handlers import StoreHandlers
from kvstore.service.shell import Call, Shell
from kvstore.service.transfer import Incoming, InlineTransfer, Outgoing, Payload
from kvstore_wire import inline
from kvstore_wire.errors import Internal, InvalidArgument, KvStoreError, LeaseExpired
from kvstore_wire.methods import ADMIN, ADMIN_METHODS, BLOCK_STORE, ERROR_METADATA, STORE_METHODS, Method, method_name

_LOG = logging.getLogger("kvstore.grpc")
_GONE_S = 1.0  # Between a failed write and the cancellation of its call: far more than it takes.
MOST_PATIENCE_S = 5.0  # For a caller of Get to take one message: it holds a share of the send budget meanwhile.
GRPC_LOGGER = "grpc._cython.cygrpc"
_INFINITE_S = 1e8  # grpc reports a call without a deadline as one that ends centuries from now.

# The client's keepalive (30 s) stays above the minimum that this door allows, or idle clients would be dropped.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # A second server on the same port must fail, not share it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class _CallerGone(Exception):
    """The caller of a stream left in the middle: nobody is there to be told."""


class DepartedCallers(logging.Filter):
    """Keeps from the log what gRPC says, with a traceback each, of callers that left before their answer.

    For the logger GRPC_LOGGER; a program installs it, this module does not.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


def store_service(shell: Shell, handlers: StoreHandlers, transfer: InlineTransfer) -> grpc.GenericRpcHandler:
    """Returns the BlockStore service."""
    door = _Door(shell)
    table = {name: door.bind(method, _named(handlers, name)) for name, method in _without(STORE_METHODS, "Get", "Put")}
    table["Reserve"] = door.bind(STORE_METHODS["Reserve"], handlers.reserve_in_time)
    table["Get"] = door.bind_get(STORE_METHODS["Get"], transfer)
    table["Put"] = door.bind_put(STORE_METHODS["Put"], transfer)
    return grpc.method_handlers_generic_handler(BLOCK_STORE, table)


def admin_service(shell: Shell, handlers: AdminHandlers) -> grpc.GenericRpcHandler:
    """Returns the Admin service."""
    door = _Door(shell)
    table = {name: door.bind(method, _named(handlers, name)) for name, method in ADMIN_METHODS.items()}
    return grpc.method_handlers_generic_handler(ADMIN, table)


class _Door:
    """Wraps handlers for grpc.aio."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def bind(self, method: Method, handler: Callable[..., Any]) -> grpc.RpcMethodHandler:
        """Binds a handler whose messages are all protobuf."""
        codec = {"request_deserializer": _parser(method.request), "response_serializer": _serialize}
        if method.requests and method.responses:
            talk = self._streaming(method.name, lambda messages, call: handler(_parsed(messages), call))
            return grpc.stream_stream_rpc_method_handler(talk, **codec)
        if method.responses:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method.name, handler), **codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(method.name, handler), **codec)

    def bind_get(self, method: Method, transfer: InlineTransfer) -> grpc.RpcMethodHandler:
        """Binds Get. A caller that takes no message for as long as a lease lasts is told that its lease has ended."""
        patience_s = min(self._shell.limits.default_lease_ms / 1000, MOST_PATIENCE_S)
        return grpc.unary_stream_rpc_method_handler(
            self._streaming("Get", transfer.get, patience_s=patience_s),
            request_deserializer=_parser(method.request),
            response_serializer=_encode_get,
        )

    def bind_put(self, method: Method, transfer: InlineTransfer) -> grpc.RpcMethodHandler:
        async def put(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Message:
            call, started = self._call(context), time.perf_counter_ns()
            try:
                await self._shell.failpoints.hit("before.Put")
                return await transfer.put(_decoded(messages), call)
            except KvStoreError as error:
                await _abort(context, error)
            except Exception as error:  # noqa: BLE001 - the outermost loop of the door
                await _abort(context, _unexpected("Put", error))
            finally:
                self._shell.latencies.add("Put", time.perf_counter_ns() - started)
            raise AssertionError("unreachable")

        return grpc.stream_unary_rpc_method_handler(put, request_deserializer=None, response_serializer=_serialize)

    def _unary(self, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        before, after = f"before.{name}", f"after.{name}"
        waits = inspect.iscoroutinefunction(handler)

        async def unary(request: Message | KvStoreError, context: grpc.aio.ServicerContext) -> Message:
            started = time.perf_counter_ns()
            try:
                if isinstance(request, KvStoreError):
                    raise request
                await self._shell.failpoints.hit(before)
                made = handler(request, self._call(context))
                answer: Message = await made if waits else made
                await self._shell.failpoints.hit(after)
                return answer
            except KvStoreError as error:
                await _abort(context, error)
            except Exception as error:  # noqa: BLE001 - the outermost loop of the door
                await _abort(context, _unexpected(name, error))
            finally:
                self._shell.latencies.add(name, time.perf_counter_ns() - started)
            raise AssertionError("unreachable")

        return unary

    def _streaming(
        self, name: str, handler: Callable[..., AsyncGenerator[Any, None]], *, patience_s: float | None = None
    ) -> Callable[..., Any]:
        before = f"before.{name}"

        async def streaming(request: Any, context: grpc.aio.ServicerContext) -> None:
            started = time.perf_counter_ns()
            try:
                if isinstance(request, KvStoreError):
                    raise request
                await self._shell.failpoints.hit(before)
                # Closed before an error is sent: a caller that reads nothing must not keep leases and budget meanwhile.
                async with contextlib.aclosing(handler(request, self._call(context))) as answers:
                    async for answer in answers:
                        await _write(context, answer, patience_s)
            except _CallerGone:
                _LOG.debug("the caller of %s left", name)
            except KvStoreError as error:
                await _abort(context, error)
            except Exception as error:  # noqa: BLE001 - the outermost loop of the door
                await _abort(context, _unexpected(name, error))
            finally:
                self._shell.latencies.add(name, time.perf_counter_ns() - started)

        return streaming

    def _call(self, context: grpc.aio.ServicerContext) -> Call:
        left = context.time_remaining()
        deadline = None if left is None or left > _INFINITE_S else self._shell.now() + left
        return Call(deadline, context.peer())


async def _write(context: grpc.aio.ServicerContext, message: Any, patience_s: float | None) -> None:
    """Sends one message of a stream. Raises LeaseExpired if the caller does not take it within its patience."""
    task, stalled = asyncio.current_task(), asyncio.Event()

    def give_up() -> None:
        stalled.set()
        assert task is not None
        task.cancel()

    timer = None if patience_s is None else asyncio.get_running_loop().call_later(patience_s, give_up)
    try:
        await context.write(message)
    except asyncio.CancelledError:
        if not stalled.is_set():
            raise
        raise LeaseExpired(f"the caller took nothing for {patience_s:g} s", field="lease") from None
    except Exception as error:
        await asyncio.sleep(_GONE_S)  # Where the caller has gone, grpc cancels this call in a moment.
        if type(error).__name__ == "ExecuteBatchError":  # It has gone, and grpc is late. The class is private to grpc.
            raise _CallerGone from error
        raise
    finally:
        if timer is not None:
            timer.cancel()


async def _parsed(messages: AsyncIterator[Message | KvStoreError]) -> AsyncIterator[Message]:
    """Passes on what `_parser` made of a stream. Raises InvalidArgument for garbage."""
    async for message in messages:
        if isinstance(message, KvStoreError):
            raise message
        yield message


async def _decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[Incoming]:
    async for raw in messages:
        yield inline.decode_put(raw)


def _encode_get(message: Outgoing) -> bytes:
    if isinstance(message, Payload):
        return inline.encode_data(message.pieces, message.size_bytes)
    return message.SerializeToString()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parser(kind: type[Message]) -> Callable[[bytes], Message | KvStoreError]:
    """A deserializer that hands garbage on as an error, since grpc would report it as a fault of the server."""

    def parse(raw: bytes) -> Message | KvStoreError:
        message = kind()
        try:
            message.ParseFromString(raw)
        except DecodeError:
            return InvalidArgument(f"is not a {kind.__name__}", field="message")
        return message

    return parse


async def _abort(context: grpc.aio.ServicerContext, error: KvStoreError) -> None:
    detail = error.to_detail().SerializeToString()
    code = grpc.StatusCode[error.status]
    await context.abort(code, str(error), trailing_metadata=((ERROR_METADATA, detail),))


def _unexpected(name: str, error: Exception) -> KvStoreError:
    _LOG.error("%s failed", name, exc_info=error)
    return Internal(f"{type(error).__name__}: {error}")


def _named(handlers: object, name: str) -> Callable[..., Any]:
    """Returns the method for an rpc."""
    method: Callable[..., Any] = getattr(handlers, method_name(name))
    return method


def _without(table: Mapping[str, Method], *names: str) -> list[tuple[str, Method]]:
    return [(name, method) for name, method in table.items() if name not in names]
