"""The verbs that only the fast channel has: greeting, the arena's memory, regions; and one connection's credit."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from google.protobuf.message import Message

from kvstore.service.framed.underway import parsed
from kvstore.service.shell import Shell
from kvstore_wire.errors import Denied, InvalidArgument, Unsupported
from kvstore_wire.frames import Verb
from kvstore_wire.v1 import channel_pb2 as channel

MIN_CREDIT_BYTES = 64 << 10
_MOST_DESCRIPTORS = 2  # One read can bring the end of a frame and the next frame, each with its own.


@dataclass(frozen=True)
class Peer:
    """Who is at the other end. `uid` is known on Unix sockets only."""

    name: str
    uid: int | None = None
    may_map: bool = False


class ChannelVerbs:
    """The channel's own side of one connection. Owns the descriptors that came and were not taken."""

    def __init__(self, shell: Shell, peer: Peer, *, frame_bytes: int, credit_bytes: int) -> None:
        self._shell, self._peer = shell, peer
        self._frame_bytes, self._credit_bytes = frame_bytes, credit_bytes
        self._ungranted = 0  # Payload that came and that the peer was not granted anew.
        self._descriptors: deque[int] = deque()
        self.greeted = False
        self.peer_credit = 0

    @property
    def peer(self) -> str:
        return self._peer.name

    def answer(self, verb: int, raw: bytes) -> tuple[Message, int | None]:
        """Answers a verb: the message, and the descriptor that goes with it, which stays ours. Raises KvStoreError."""
        if verb == Verb.HELLO:
            return self._hello(parsed(channel.Hello, raw)), None
        if verb == Verb.MAP_ARENA:
            return self._map_arena(parsed(channel.MapArenaRequest, raw))
        if verb == Verb.REGISTER_REGION:
            return self._register(raw), None
        raise Unsupported(f"this shard knows no verb {verb}", field="frame.verb")

    async def unregister(self, raw: bytes) -> Message:
        """Gives a region back once no copy uses it any more. Raises KvStoreError."""
        request = parsed(channel.UnregisterRegionRequest, raw)
        session = self._shell.session(request.session)
        return channel.UnregisterRegionResponse(known=await self._shell.regions.retire(session.id, request.region))

    def descriptor_came(self, descriptor: int) -> None:
        """Takes over a descriptor. Raises InvalidArgument where more come than frames ask for."""
        self._descriptors.append(descriptor)
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            raise stray_descriptor()

    @property
    def has_descriptor(self) -> bool:
        """Whether a descriptor came that no frame has taken yet."""
        return bool(self._descriptors)

    def consumed(self, payload_bytes: int) -> int:
        """Counts payload that came; returns what to grant now, 0 for nothing.

        Payload is in its slots when it is counted, so that nobody can send more than there is room for.
        """
        self._ungranted += payload_bytes
        if self._ungranted * 2 < self._credit_bytes:
            return 0
        granted, self._ungranted = self._ungranted, 0
        return granted

    def close(self) -> None:
        """Closes descriptors that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _hello(self, hello: channel.Hello) -> channel.HelloAnswer:
        if self.greeted:
            raise InvalidArgument("was said before", field="frame.verb")
        if hello.credit_bytes < MIN_CREDIT_BYTES:
            limit = f"at least {MIN_CREDIT_BYTES} bytes"
            raise InvalidArgument(f"is {hello.credit_bytes}", field="credit_bytes", limit=limit)
        if hello.session:
            self._shell.session(hello.session)
        self.greeted = True
        self.peer_credit = hello.credit_bytes
        return channel.HelloAnswer(
            generation=self._shell.generation,
            max_frame_bytes=self._frame_bytes,
            credit_bytes=self._credit_bytes,
            may_map=self._peer.may_map,
        )

    def _map_arena(self, request: channel.MapArenaRequest) -> tuple[Message, int]:
        self._shell.session(request.session)
        descriptor = self._shell.memory.read_only_fd
        if not self._peer.may_map or descriptor is None:
            raise Denied("this peer may not read every namespace of the shard", field="session")
        size = self._shell.memory.capacity_bytes
        return channel.MapArenaResponse(generation=self._shell.generation, size_bytes=size), descriptor

    def _register(self, raw: bytes) -> channel.RegisterRegionResponse:
        if not self._descriptors:
            raise InvalidArgument("no descriptor came with the frame", field="fd", limit="1")
        descriptor = self._descriptors.popleft()
        try:
            request = parsed(channel.RegisterRegionRequest, raw)
            session = self._shell.session(request.session)
        except BaseException:
            os.close(descriptor)
            raise
        regions = self._shell.regions
        number = regions.register(session.id, descriptor, offset=request.offset, length=request.length)
        return channel.RegisterRegionResponse(region=number)


def stray_descriptor() -> InvalidArgument:
    return InvalidArgument("a descriptor came with a frame that takes none", field="fd", limit="1 with REGISTER_REGION")
