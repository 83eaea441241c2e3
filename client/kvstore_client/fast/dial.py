"""Opens connections of the fast channel: connect, TLS where it is wanted, greeting. Blocking, within a deadline."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore_client.deadline import Deadline
from kvstore_client.errors import PathDown
from kvstore_client.fast.wire import Wire
from kvstore_client.options import ClientOptions
from kvstore_client.tls import TlsOptions
from kvstore_wire.errors import KvStoreError
from kvstore_wire.pacing import unpace_within_host
from kvstore_wire.v1 import channel_pb2 as channel

CONNECT_S = 2.0  # An address that swallows packets must not eat the whole deadline.
OPEN_MS = 3000  # More than `dial` takes: for connections that no call waits for.
_TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 15_000),  # A peer that acknowledges nothing for so long is gone.
)


@dataclass(frozen=True)
class Endpoint:
    """Where a shard's fast channel listens: a Unix socket's `path`, or `host` and `port`."""

    transport: str
    path: str = ""
    host: str = ""
    port: int = 0
    tls: TlsOptions | None = None

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"

    @staticmethod
    def of_offer(transport: str, address: str, options: ClientOptions) -> Endpoint | None:
        """Returns what Attach offered as an endpoint; None if it makes no sense here."""
        if transport == "shm":
            return Endpoint(transport, path=address) if address.startswith("/") else None
        host, _, port = address.rpartition(":")
        if not port.isdigit() or not 1 <= int(port) <= 65535:
            return None
        host = host.strip("[]") or _host_of(options.target)
        return Endpoint(transport, host=host, port=int(port), tls=options.tls)


@dataclass(frozen=True)
class Dialed:
    """An open connection and how the shard greeted it. Owns: the socket, in blocking mode without a timeout."""

    sock: socket.socket
    wire: Wire
    answer: channel.HelloAnswer


def dial(endpoint: Endpoint, generation: int, deadline: Deadline) -> Dialed:
    """Connects and greets.

    Raises PathDown: nothing listens, or not the shard of that generation, or it did not answer within CONNECT_S;
    DeadlineExceeded: the caller gave it less, which says nothing about the shard.
    """
    limit = min(deadline, Deadline(time.monotonic() + CONNECT_S), key=lambda d: d.at_s)
    try:
        return _dialed(endpoint, generation, limit)
    except PathDown:
        deadline.check(f"connecting to {endpoint}")
        raise


def _dialed(endpoint: Endpoint, generation: int, limit: Deadline) -> Dialed:
    try:
        sock = _connected(endpoint, limit)
    except (OSError, ssl.SSLError) as error:
        raise PathDown(f"cannot connect to {endpoint}: {error}") from None
    try:
        wire = Wire()
        answer = _greeted(sock, wire, limit)
        if answer.generation != generation:
            raise PathDown(f"another shard listens at {endpoint}")
        sock.settimeout(None)
        return Dialed(sock, wire, answer)
    except (OSError, ssl.SSLError) as error:
        sock.close()
        raise PathDown(f"{endpoint} did not greet: {error}") from None
    except PathDown:
        sock.close()
        raise
    except KvStoreError as error:
        sock.close()
        raise PathDown(f"{endpoint} refused the greeting: {error}") from None
    except BaseException:
        sock.close()
        raise


def _connected(endpoint: Endpoint, limit: Deadline) -> socket.socket:
    if endpoint.path:
        return _connected_to(socket.AF_UNIX, endpoint.path, limit)
    sock = _connected_to_any(endpoint, limit)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        unpace_within_host(sock)
        if endpoint.tls is None:
            return sock
        _set_timeout(sock, limit)  # Of the whole handshake.
        return endpoint.tls.ssl_context().wrap_socket(sock, server_hostname=endpoint.tls.server_hostname(endpoint.host))
    except BaseException:
        sock.close()
        raise


def _connected_to_any(endpoint: Endpoint, limit: Deadline) -> socket.socket:
    """Tries the addresses of a host in turn, all within the limit."""
    failure: OSError = OSError("the host has no address")
    for family, _, _, _, address in socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM):
        try:
            return _connected_to(family, address, limit)
        except OSError as error:
            failure = error
    raise failure


def _connected_to(family: int, address: Any, limit: Deadline) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _set_timeout(sock, limit)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_timeout(sock: socket.socket, limit: Deadline) -> None:
    if limit.passed:
        raise TimeoutError("timed out")
    sock.settimeout(max(0.001, limit.remaining_s()))


def _greeted(sock: socket.socket, wire: Wire, limit: Deadline) -> channel.HelloAnswer:
    exchange = wire.hello(_nothing)
    _set_timeout(sock, limit)
    for buffer in wire.pending():
        sock.sendall(buffer)
    wire.sent(sum(map(len, wire.pending())))
    while not exchange.done:
        _set_timeout(sock, limit)
        size = sock.recv_into(wire.reader.wanted())
        if not size:
            raise ConnectionResetError("closed")
        wire.reader.landed(size)
    return wire.greeted(exchange)


def _host_of(target: str) -> str:
    if target.startswith("unix:"):
        return "127.0.0.1"
    return target.rpartition(":")[0].strip("[]")


def _nothing() -> None:
    return


def orphaned(dialed: Dialed) -> None:
    """Closes a connection that came after its deadline."""
    with suppress(OSError):
        dialed.sock.close()
