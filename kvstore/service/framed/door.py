"""The fast channel's listening sockets and all connections of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import Address
from kvstore.service.framed.channel import Peer
from kvstore.service.framed.connection import Connection
from kvstore.service.framed.turns import Turns
from kvstore.service.handlers import StoreHandlers
from kvstore.service.shell import Shell
from kvstore.service.transfer import Transfers
from kvstore_wire.errors import DeadlineExceeded, Denied, Draining, KvStoreError, TableFull
from kvstore_wire.frames import END, Verb, head
from kvstore_wire.pacing import unpace_within_host
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel

_LOG = logging.getLogger("kvstore.framed")
_BACKLOG = 128
_SWEEP_S = 0.25
_ACCEPT_AGAIN_S = 0.5  # After the kernel refused a descriptor: until one is free, asking at once is of no use.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class ChannelSettings:
    """Of one shard. `may_connect` says which users may use the Unix socket, `may_map` who of them gets the arena."""

    max_connections: int
    frame_bytes: int
    credit_bytes: int
    stall_s: float
    busy_poll_s: float
    may_connect: Callable[[int], bool]
    may_map: Callable[[int], bool]


@dataclass(frozen=True)
class _Listening:
    """A listening socket. `take` takes what was accepted; `is_plain` where TLS is not spoken."""

    sock: socket.socket
    take: Callable[[socket.socket], None]
    is_plain: bool


class FramedDoor:
    """Owns the listening sockets and the connections from `start` to `stop`."""

    def __init__(self, shell: Shell, handlers: StoreHandlers, transfers: Transfers, settings: ChannelSettings) -> None:
        self._shell, self._handlers, self._transfers = shell, handlers, transfers
        self._settings = settings
        self._listening: list[socket.socket] = []
        self._paths: list[Path] = []
        self._connections: set[Connection] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._turns: Turns | None = None
        self.opened_total = 0
        self.cut: Counter[str] = Counter()  # Connections that were cut, by the name of the error.

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def listen_tcp(self, address: Address, advertise: str, tls: ssl.SSLContext | None) -> str:
        """Binds a TCP address and offers it to clients; returns what was bound. Raises OSError."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.create_server((address.host, address.port or 0), family=family, backlog=_BACKLOG)
        port = sock.getsockname()[1]
        self._listen(sock, lambda accepted: self._tcp(accepted, tls), is_plain=tls is None)
        self._offer("bulk", advertise or f":{port}")
        host = f"[{address.host}]" if ":" in address.host else address.host
        return f"{host}:{port}"

    def listen_unix(self, path: Path) -> str:
        """Binds a Unix socket and offers it to clients of this host. Raises OSError where a process listens there."""
        _remove_dead_socket(path)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(str(path))
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        self._paths.append(path)
        os.chmod(path, 0o666)  # Who may connect is decided by the peer's credentials.
        self._listen(sock, self._unix, is_plain=True)
        self._offer("shm", str(path))
        return f"unix:{path}"

    def start(self) -> None:
        """Begins to watch over the connections."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Closes everything. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        loop = asyncio.get_running_loop()
        listening, self._listening = self._listening, []
        for sock in listening:
            loop.remove_reader(sock.fileno())
            sock.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths.clear()
        for connection in list(self._connections):
            connection.close(Draining("the shard has stopped"))

    # -- accepting -----------------------------------------------------------------------------------------------

    def _listen(self, sock: socket.socket, take: Callable[[socket.socket], None], *, is_plain: bool) -> None:
        sock.setblocking(False)
        self._listening.append(sock)
        self._listen_on(_Listening(sock, take, is_plain))

    def _listen_on(self, listening: _Listening) -> None:
        if listening.sock in self._listening:
            asyncio.get_running_loop().add_reader(listening.sock.fileno(), self._accept, listening)

    def _offer(self, name: str, address: str) -> None:
        """Tells clients of a socket, the fastest way first; of several of one kind, of the first."""
        offers = {t.name: t for t in self._shell.transports}
        offers.setdefault(name, pb.Transport(name=name, address=address))
        self._shell.transports[:] = sorted(offers.values(), key=lambda t: ("shm", "bulk", "grpc").index(t.name))

    def _accept(self, listening: _Listening) -> None:
        for _ in range(_BACKLOG):
            try:
                sock, _ = listening.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # Out of descriptors: connections wait in the backlog.
                _LOG.warning("cannot accept: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening.sock.fileno())
                loop.call_later(_ACCEPT_AGAIN_S, self._listen_on, listening)
                return
            try:
                self._check_room()
                sock.setblocking(False)
                listening.take(sock)
            except KvStoreError as error:
                self._turn_away(sock, error, is_plain=listening.is_plain)
            except OSError as error:
                _LOG.debug("a connection was gone before it was taken: %s", error)
                sock.close()

    def _tcp(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        unpace_within_host(sock)
        host, port = sock.getpeername()[:2]
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._take(sock, Peer(f"{host}:{port}"))

    def _unix(self, sock: socket.socket) -> None:
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if not self._settings.may_connect(uid):
            raise Denied(f"uid {uid} may not connect", field="shm.allow_uids")
        may_map = self._settings.may_map(uid) and self._shell.memory.read_only_fd is not None
        self._take(sock, Peer(f"pid {pid}, uid {uid}", uid=uid, may_map=may_map))

    def _check_room(self) -> None:
        if len(self._connections) >= self._settings.max_connections:
            limit = f"{self._settings.max_connections}"
            raise TableFull(f"{len(self._connections)} connections", field="bulk.max_connections", limit=limit)

    def _take(self, sock: socket.socket, peer: Peer) -> None:
        self.opened_total += 1
        self._connections.add(
            Connection(
                sock,
                peer,
                shell=self._shell,
                handlers=self._handlers,
                transfers=self._transfers,
                frame_bytes=self._settings.frame_bytes,
                credit_bytes=self._settings.credit_bytes,
                turns=self._shared_turns(),
                closed=self._closed,
            )
        )

    def _shared_turns(self) -> Turns:
        if self._turns is None:
            self._turns = Turns(
                asyncio.get_running_loop(),
                clock=self._shell.now,
                busy_poll_s=self._settings.busy_poll_s,
                others_work=lambda: self._shell.threads_work,
            )
        return self._turns

    def _turn_away(self, sock: socket.socket, error: KvStoreError, *, is_plain: bool) -> None:
        self.cut[type(error).__name__] += 1
        if is_plain:  # Where TLS is spoken nothing can be said before its handshake.
            message = channel.Goodbye(why=error.to_detail()).SerializeToString()
            with contextlib.suppress(OSError):
                sock.send(head(Verb.GOODBYE, 0, message, flags=END), socket.MSG_DONTWAIT)
        sock.close()

    def _closed(self, connection: Connection, why: KvStoreError | None) -> None:
        self._connections.discard(connection)
        if why is not None:
            self.cut[type(why).__name__] += 1
            _LOG.info("cut the connection of %s: %s", connection.peer, why)

    # -- watching ------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            due = self._shell.now() + _SWEEP_S
            await asyncio.sleep(_SWEEP_S)
            now = self._shell.now()
            if now - due > _SWEEP_S:
                continue  # The loop was held up, or the process stopped: what peers sent meanwhile is unread.
            try:
                self._cut_stalled(now)
            except Exception:  # noqa: BLE001 - the outermost loop: without it nothing would be cut any more
                _LOG.exception("a sweep failed")

    def _cut_stalled(self, now: float) -> None:
        """Cuts connections that never greeted, and those whose peer holds things up."""
        patience_s, stall_s = self._shell.limits.session_open_ms / 1000, self._settings.stall_s
        for connection in list(self._connections):
            if not connection.greeted and now - connection.opened_s > patience_s:
                connection.close(DeadlineExceeded(f"no HELLO within {patience_s:g} s", field="frame.verb"))
            elif connection.is_stalled(now, stall_s):
                connection.close(DeadlineExceeded(f"took and sent nothing for {stall_s:g} s"))


def _remove_dead_socket(path: Path) -> None:
    """Removes what a dead server left. Raises OSError if a process listens there, or if it is no socket."""
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(f"cannot listen on {path}: it is there and no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
    raise OSError(f"cannot listen on {path}: another process does")
