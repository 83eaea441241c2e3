"""The one gRPC channel of a client: methods by name, and every failure as an error of the contract.

Calls go out and come back as raw bytes and are coded here, so that a malformed answer is a value of ours and not a
traceback in gRPC's log.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

# gRPC's own fork handlers crash one forked child in ten here (grpcio 1.85), though the child never touches gRPC again.
# They are decided when gRPC is loaded, so this stands before its import; a value set by the user is kept.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvstore_client.deadline import Deadline
from kvstore_client.errors import ClientClosed, ForkedClient, MalformedAnswer
from kvstore_client.options import ClientOptions
from kvstore_client.tls import TlsOptions, tls_for
from kvstore_wire import errors
from kvstore_wire.inline import decode_get
from kvstore_wire.methods import ERROR_METADATA, STORE_METHODS, Method
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import within

MAX_MESSAGE_BYTES = 64 << 20  # Above any shard's Limits.max_message_bytes; gRPC's own default of 4 MiB is below it.
CONNECT_TIMEOUT_MS = 2000  # gRPC waits 20 s for an address that swallows packets unless told.
KEEPALIVE_TIMEOUT_MS = 5000
STATUS_AFTER_WRITE_S = 0.2  # Between a write that failed and the status that tells why: far more than it takes.
WRITE_FAILED = "Internal error from Core"  # What gRPC says of a write that came too late.

_AIO: Any = grpc.aio
_BY_STATUS: dict[str, type[errors.KvStoreError]] = {
    "UNAVAILABLE": errors.Unreachable,
    "CANCELLED": errors.Unreachable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "UNIMPLEMENTED": errors.Unsupported,
    "UNAUTHENTICATED": errors.Denied,
    "PERMISSION_DENIED": errors.Denied,
}


class Connection:
    """Owns the channel. Make and use it inside one event loop."""

    def __init__(self, options: ClientOptions) -> None:
        _check_not_forked()
        self._channel = _opened(options)
        self._target = options.target
        self._calls = {name: _bound(self._channel, method) for name, method in STORE_METHODS.items()}
        self._closing = False

    async def unary(self, name: str, request: Message, deadline: Deadline) -> Any:
        """Calls a unary method and returns its parsed answer. Raises KvStoreError."""
        deadline.check(f"calling {name}")
        with self._mapped():
            call = self._calls[name](request.SerializeToString(), timeout=deadline.remaining_s())
            raw: bytes = await call
        return _parsed(STORE_METHODS[name].response, raw)

    async def answers(self, name: str, request: Message, deadline: Deadline) -> AsyncGenerator[Any, None]:
        """Yields the parsed answers of a server-streaming method. Raises KvStoreError."""
        deadline.check(f"calling {name}")
        call = self._calls[name](request.SerializeToString(), timeout=deadline.remaining_s())
        async with _ended(call):
            with self._mapped():
                async for raw in call:
                    yield _parsed(STORE_METHODS[name].response, raw)

    async def payload(
        self, request: store.GetRequest, deadline: Deadline
    ) -> AsyncGenerator[memoryview | store.GetResponse, None]:
        """Yields the messages of a Get stream, payload as views. Raises KvStoreError."""
        deadline.check("calling Get")
        call = self._calls["Get"](request.SerializeToString(), timeout=deadline.remaining_s())
        async with _ended(call):
            with self._mapped():
                async for raw in call:
                    yield _decoded(raw)

    async def send(self, messages: Iterator[bytes], deadline: Deadline) -> store.PutResponse:
        """Sends a Put stream of coded messages and returns the answer. Raises KvStoreError."""
        deadline.check("calling Put")
        call = self._calls["Put"](messages, timeout=deadline.remaining_s())
        told = _PeerStatus(call)
        try:
            with self._mapped():
                raw = await self._outcome(call)
        except errors.Internal:
            status = await told.status()
            if status is None:
                raise
            raise error_of(status, self._target) from None
        answer: store.PutResponse = _parsed(store.PutResponse, raw)
        return answer

    async def pulse(self, session: bytes) -> AsyncGenerator[store.SessionNotice, None]:
        """Holds the session's stream open and yields its notices until it breaks. Raises KvStoreError."""
        call = self._calls["Session"]()
        async with _ended(call):
            with self._mapped():
                await call.write(store.SessionPulse(session=session).SerializeToString())
                while (raw := await call.read()) is not _AIO.EOF:
                    yield _parsed(store.SessionNotice, raw)
                status = await call.code()
                if status is not grpc.StatusCode.OK:
                    raise errors.Unreachable(f"the session's stream ended with {status.name}")

    async def close(self, grace_s: float) -> None:
        """Closes the channel; calls still out after `grace_s` end as closed."""
        self._closing = True
        await self._channel.close(grace_s)

    async def _outcome(self, call: Any) -> bytes:
        """Returns the answer to a stream of requests. Raises as the call does.

        Unreachable where gRPC itself cancelled it: it does where a write of the stream fails in an unusual way (grpcio
        1.85: one in 500 connections that break under a write), and reports it as if the caller had cancelled.
        """
        waiting = asyncio.ensure_future(_answer(call))
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.cancelled() and not self._closing:
            raise errors.Unreachable(f"the connection to {self._target} broke under a write")
        return waiting.result()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except _AIO.AioRpcError as error:
            status = _Status(error.code(), error.details(), error.trailing_metadata())
            raise error_of(status, self._target) from error
        except _AIO.UsageError as error:
            raise ClientClosed("the client was closed", field="client") from error
        except asyncio.CancelledError:
            # gRPC reports a channel closed under a call as a cancellation; only a caller's own may pass as one.
            if self._closing:
                raise ClientClosed("the client was closed under the call", field="client") from None
            raise
        except asyncio.InvalidStateError as error:
            raise errors.Unreachable(f"{self._target} ended the stream") from error


@asynccontextmanager
async def _ended(call: Any) -> AsyncIterator[None]:
    """Ends a streaming call with the block, and waits for its end: gRPC must owe nothing to a loop that may close."""
    try:
        yield
    finally:
        if call.cancel():
            await call.code()


async def _answer(call: Any) -> bytes:
    raw: bytes = await call
    return raw


# The process in which gRPC's threads were started; they do not survive a fork, and gRPC cannot start them again.
_grpc_pid: list[int] = []


def _check_not_forked() -> None:
    if not _grpc_pid:
        _grpc_pid.append(os.getpid())
    if _grpc_pid[0] != os.getpid():
        raise ForkedClient(
            "gRPC ran before the fork and cannot run in the child: start the process by spawn, or fork before the "
            "first client is made",
            field="client",
        )


@dataclass(frozen=True)
class _Status:
    """How a call ended: gRPC's code, text and trailing metadata."""

    code: grpc.StatusCode
    details: str | None
    metadata: Iterable[tuple[str, bytes]] | None


class _PeerStatus:
    """The status that the peer sent for a call with a stream of requests.

    When a peer ends such a call while a write is under way, the write's failure may overwrite the status that came,
    and with it the reason, or come a moment before it (grpcio 1.85: both are set, one after the other).
    """

    def __init__(self, call: Any) -> None:
        self._status: _Status | None = None
        self._came = asyncio.Event()
        call.add_done_callback(self._note)

    async def status(self) -> _Status | None:
        """Returns what the peer said; None if only gRPC itself spoke."""
        with suppress(asyncio.TimeoutError):
            await within(STATUS_AFTER_WRITE_S, self._came.wait())
        return self._status

    def _note(self, call: Any) -> None:
        status = _Status(_at_once(call.code()), _at_once(call.details()), _at_once(call.trailing_metadata()))
        if status.details != WRITE_FAILED and status.code is not grpc.StatusCode.OK:
            self._status = status
            self._came.set()


def _at_once(ready: Coroutine[Any, Any, Any]) -> Any:
    """Returns the value of a coroutine that need not wait."""
    try:
        ready.send(None)
    except StopIteration as done:
        return done.value
    finally:
        ready.close()
    return None


def error_of(failure: _Status, target: str) -> errors.KvStoreError:
    """Returns the error that a failed gRPC call stands for."""
    for key, value in failure.metadata or ():
        if key == ERROR_METADATA:
            try:
                return errors.from_detail(types.ErrorDetail.FromString(value))
            except DecodeError:
                break
    status = failure.code.name
    made = _BY_STATUS.get(status, errors.Internal)
    return made(f"{target} answered {status}: {failure.details}")


def channel_credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    """Returns what a channel needs to speak TLS. Raises InvalidArgument where the system has no roots."""
    return grpc.ssl_channel_credentials(tls.roots(), tls.key, tls.cert)


def _opened(options: ClientOptions) -> Any:
    """Makes the channel, which connects with the first call."""
    arguments = _channel_options(options)
    tls = tls_for(options.target, options.tls)
    if tls is None:
        return _AIO.insecure_channel(options.target, options=arguments)
    return _AIO.secure_channel(options.target, tls.grpc_credentials(), options=[*arguments, *tls.grpc_arguments()])


def _channel_options(options: ClientOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", options.connect_backoff_min_ms),
        ("grpc.max_reconnect_backoff_ms", options.connect_backoff_max_ms),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.dns_min_time_between_resolutions_ms", options.connect_backoff_max_ms),
        ("grpc.keepalive_time_ms", options.keepalive_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # A client's back-off is its own.
        ("grpc.enable_http_proxy", 0),  # A proxy meant for the web must not get the store's traffic.
        ("grpc.enable_retries", 0),  # Which calls may be tried again is decided in one place, not in two.
    ]


def _bound(channel: Any, method: Method) -> Any:
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    return kinds[method.requests, method.responses](method.path)


def _parsed(kind: type[Message], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise MalformedAnswer(f"is not a {kind.__name__}") from error


def _decoded(raw: bytes) -> memoryview | store.GetResponse:
    try:
        return decode_get(raw)
    except errors.InvalidArgument as error:
        raise MalformedAnswer("is not a GetResponse") from error
