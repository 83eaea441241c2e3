"""A peer of the fast channel that may do anything: it sends bytes as told, and gives what comes frame by frame."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from google.protobuf.message import Message

from kvstore_wire.errors import KvStoreError, from_detail
from kvstore_wire.frames import END, ERROR, Frame, FrameReader, Verb, head
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import within

WAIT_S = 15.0  # What takes longer is a failed test.
CREDIT_BYTES = 64 << 20


@dataclass
class Came:
    """One frame from the shard."""

    frame: Frame
    message: bytes
    payload: bytes = b""

    @property
    def error(self) -> KvStoreError | None:
        return from_detail(types.ErrorDetail.FromString(self.message)) if self.frame.flags & ERROR else None


class RawPeer:
    """One connection. Frames are taken in the order they come, CREDIT among them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.descriptors: list[int] = []
        self._came: deque[Came] = deque()
        self._partial: Came | None = None
        self._room = memoryview(b"")
        self._reader = FrameReader(self, max_message_bytes=64 << 20, max_payload_bytes=4 << 20)

    async def hello(self, credit_bytes: int = CREDIT_BYTES) -> channel.HelloAnswer:
        came = await self.call(Verb.HELLO, 1, channel.Hello(credit_bytes=credit_bytes))
        assert came.error is None
        return channel.HelloAnswer.FromString(came.message)

    async def send(self, data: bytes) -> None:
        await within(WAIT_S, asyncio.get_running_loop().sock_sendall(self.sock, data))

    async def ask(self, verb: int, request: int, message: Message, *, flags: int = END, timeout_ms: int = 0) -> None:
        await self.send(head(verb, request, message.SerializeToString(), flags=flags, timeout_ms=timeout_ms))

    async def call(self, verb: int, request: int, message: Message) -> Came:
        """Asks and returns the next frame, which must be the answer."""
        await self.ask(verb, request, message)
        came = await self.next()
        assert (came.frame.verb, came.frame.request) == (verb, request)
        return came

    def send_with(self, data: bytes, *descriptors: int) -> None:
        """Sends bytes, and descriptors with the first of them."""
        rights = array.array("i", descriptors)
        assert self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]) == len(data)

    async def next(self) -> Came:
        """The next frame. Raises ConnectionError at the end of the connection."""
        while not self._came:
            await self._receive()
        return self._came.popleft()

    async def next_of(self, request: int) -> Came:
        """The next frame of a request; drops those of others."""
        while (came := await self.next()).frame.request != request:
            pass
        return came

    async def end(self) -> KvStoreError | None:
        """Reads until the shard closes the connection; returns why, where it said so."""
        why: KvStoreError | None = None
        with contextlib.suppress(ConnectionError):
            while True:
                came = await self.next()
                if came.frame.verb == Verb.GOODBYE:
                    why = from_detail(channel.Goodbye.FromString(came.message).why)
        return why

    def close(self) -> None:
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.sock.fileno(), _resolve, readable)
        try:
            await asyncio.wait({readable}, timeout=WAIT_S)
        finally:
            loop.remove_reader(self.sock.fileno())
        assert readable.done(), "nothing came"
        data, ancillary, _, _ = self.sock.recvmsg(256 << 10, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
        for _, _, rights in ancillary:
            self.descriptors += array.array("i", rights)
        if not data:
            raise ConnectionError("the shard closed the connection")
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            room = self._reader.wanted()
            size = min(len(room), len(data) - at)
            room[:size] = data[at : at + size]
            at += size
            self._reader.landed(size)

    # -- a receiver of frames ------------------------------------------------------------------------------------

    def frame(self, frame: Frame, message: memoryview) -> RawPeer:
        self._partial = Came(frame, bytes(message))
        if not frame.payload_bytes:
            self._came.append(self._partial)
        return self

    def room(self, most: int) -> memoryview:
        self._room = memoryview(bytearray(most))
        return self._room

    def landed(self, size: int) -> None:
        assert self._partial is not None
        self._partial.payload += self._room[:size]

    def payload_landed(self, frame: Frame) -> None:
        assert self._partial is not None
        self._came.append(self._partial)


@asynccontextmanager
async def connected(address: str, *, credit_bytes: int = CREDIT_BYTES, greets: bool = True) -> AsyncIterator[RawPeer]:
    """A connection to "host:port" or "unix:path", greeted unless told."""
    peer = RawPeer(await _connect(address))
    try:
        if greets:
            await peer.hello(credit_bytes)
        yield peer
    finally:
        peer.close()


async def _connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        sock, where = socket.socket(socket.AF_UNIX), address.removeprefix("unix:")
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
        return sock
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
