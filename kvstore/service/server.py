"""One shard as a running server: its doors, its tick, its probe, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.config import Address
from kvstore.config.place_kinds import AUTO
from kvstore.config.runtime_dir import shm_socket_path
from kvstore.service import grpc_door
from kvstore.service.admin import AdminHandlers
from kvstore.service.framed.door import ChannelSettings, FramedDoor
from kvstore.service.handlers import StoreHandlers
from kvstore.service.probe import Probe
from kvstore.service.shell import Shell
from kvstore.service.tls import ServerTls
from kvstore.service.transfer import InlineTransfer, Transfers
from kvstore_wire.methods import ADMIN, BLOCK_STORE
from kvstore_wire.v1 import block_store_pb2 as pb

_LOG = logging.getLogger("kvstore.server")
TICK_S = 0.1
AUDIT_S = 10.0  # Between recounts of the arena, made only while no lease is open.
STOP_GRACE_S = 1.0


@dataclass(frozen=True)
class ChannelPlaces:
    """Where the fast channel listens: TCP addresses, what clients are told of them, and the option `shm.socket`."""

    bulk: Sequence[Address]
    advertise: str
    shm_socket: str

    def shm_path(self, grpc_bound: Sequence[str]) -> str | None:
        """Returns the path of the Unix socket, None for none. Raises OSError where there is no safe place for it."""
        addresses = [Address.parse(text) for text in grpc_bound]
        port = next((a.port for a in addresses if a.unix_path is None), 0)
        beside = next((a.unix_path for a in addresses if a.unix_path is not None), None)
        if self.shm_socket == AUTO and not port and beside is not None:
            return f"{beside}.fast"
        return shm_socket_path(self.shm_socket, grpc_port=port, uid=os.getuid(), environ=os.environ)


@dataclass(frozen=True)
class Bound:
    """The addresses that a server listens at."""

    store: list[str]
    admin: list[str]
    channel: list[str]


class Server:
    """Owns the doors of one shard from `start` to `stop`."""

    def __init__(
        self,
        shell: Shell,
        *,
        options: Sequence[tuple[str, str, str]],
        send_budget_bytes: int,
        probe_interval_s: float,
        probe_timeout_s: float,
        channel: ChannelSettings,
        tls: ServerTls | None = None,
    ) -> None:
        self.shell = shell
        self.tls = tls
        self.handlers = StoreHandlers(shell)
        self.transfers = Transfers(shell, self.handlers)
        self.transfer = InlineTransfer(shell, self.transfers, send_budget_bytes=send_budget_bytes)
        self.channel = FramedDoor(shell, self.handlers, self.transfers, channel)
        self._admin = AdminHandlers(shell, options, self.channel)
        self._health = health.aio.HealthServicer()
        self._probe = Probe(
            shell,
            self.handlers,
            self.transfer,
            interval_s=probe_interval_s,
            timeout_s=probe_timeout_s,
            report=self._set_ready,
        )
        self.ready = False
        self._doors: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, listen: Sequence[Address], admin_listen: Sequence[Address], channel: ChannelPlaces | None = None
    ) -> Bound:
        """Binds all doors and starts serving; returns the addresses bound. Raises OSError when one is taken."""
        store = grpc_door.store_service(self.shell, self.handlers, self.transfer)
        try:
            bound = await self._open(store, BLOCK_STORE, listen)
            channel_bound = self._open_channel(channel, bound) if channel is not None else []
            admin_bound = await self._open(grpc_door.admin_service(self.shell, self._admin), ADMIN, admin_listen)
        except OSError:
            await self.stop()
            raise
        self._tasks.append(asyncio.create_task(self._tick()))
        await self._probe.check()
        self._tasks.append(asyncio.create_task(self._probe.run()))
        return Bound(bound, admin_bound, channel_bound)

    async def drain(self, timeout_s: float) -> None:
        """Admits nothing new, tells the clients, and waits until their leases have ended or the time is over.

        Then the blocks of memory go to the warm tier, within a time of their own.
        """
        self.shell.draining = True
        self.shell.store.writer.draining = True
        self._set_ready(False)
        notice = pb.SessionNotice(draining=pb.SessionNotice.Draining(within_ms=int(timeout_s * 1000)))
        for board in self.shell.boards.values():
            board.post(notice)
        end = self.shell.now() + timeout_s
        while len(self.shell.store.leases) and self.shell.now() < end:
            await asyncio.sleep(0.02)
        _LOG.info("drained with %d leases left", len(self.shell.store.leases))
        if self.shell.tiering is not None:
            await self.shell.tiering.flush()

    async def stop(self) -> None:
        """Closes the doors and ends the background work. The arena is the caller's to close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.stop()
        await asyncio.gather(*(door.stop(STOP_GRACE_S) for door in self._doors))
        if self.shell.tiering is not None:
            await self.shell.tiering.close()
        self.shell.copier.close()
        self.shell.regions.close()

    async def _open(self, service: grpc.GenericRpcHandler, name: str, listen: Sequence[Address]) -> list[str]:
        limit = ("grpc.max_receive_message_length", self.shell.limits.max_message_bytes)
        door = grpc.aio.server(options=(*grpc_door.SERVER_OPTIONS, limit))
        door.add_generic_rpc_handlers((service,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, door)
        reflection.enable_server_reflection((name, health.SERVICE_NAME, reflection.SERVICE_NAME), door)
        bound = []
        for address in listen:
            _refuse_live_socket(address)
            try:
                port = self._add_port(door, address)
            except RuntimeError as error:
                raise OSError(f"cannot listen on {address}: {error}") from None
            bound.append(str(address if address.unix_path is not None else replace(address, port=port)))
        await door.start()
        self._doors.append(door)
        return bound

    def _open_channel(self, places: ChannelPlaces, grpc_bound: Sequence[str]) -> list[str]:
        """Binds the sockets of the fast channel. Raises OSError."""
        bound = []
        tls = None if self.tls is None else self.tls.ssl_context()
        for address in places.bulk:
            bound.append(self.channel.listen_tcp(address, places.advertise, tls))
        path = places.shm_path(grpc_bound)
        if path is not None:
            bound.append(self.channel.listen_unix(Path(path)))
        self.channel.start()
        return bound

    def _add_port(self, door: grpc.aio.Server, address: Address) -> int:
        """Opens a port, encrypted where TLS is set; a Unix socket stays plain. Raises RuntimeError if it is taken."""
        if self.tls is None or address.unix_path is not None:
            return int(door.add_insecure_port(address.grpc_target()))
        return int(door.add_secure_port(address.grpc_target(), self.tls.grpc_credentials()))

    async def _tick(self) -> None:
        audited = self.shell.now()
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.shell.tick()
            except Exception:  # noqa: BLE001 - the outermost loop: without it nothing would expire any more
                _LOG.exception("a tick failed")
            if self.shell.now() - audited >= AUDIT_S and not len(self.shell.store.leases):
                self.shell.audit()
                audited = self.shell.now()

    def _set_ready(self, healthy: bool) -> None:
        healthy = healthy and not self.shell.draining
        if healthy != self.ready:
            _LOG.info("ready: %s", healthy)
        self.ready = healthy
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", BLOCK_STORE, ADMIN):
            asyncio.ensure_future(self._health.set(name, status))  # noqa: RUF006 - completes at once, on this loop


def _refuse_live_socket(address: Address) -> None:
    """Raises OSError if a process listens at a Unix socket: gRPC would take its place without a word."""
    if address.unix_path is None:
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(address.unix_path)
        raise OSError(f"cannot listen on {address}: another process does")
