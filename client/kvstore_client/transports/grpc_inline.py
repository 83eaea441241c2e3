"""Bytes inside gRPC streams: works wherever the door is reachable."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from kvstore_client.buffers import Slices
from kvstore_client.channel import Connection
from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer
from kvstore_client.grants import Grants
from kvstore_client.outgoing import Outgoing
from kvstore_client.transports.base import Receiver
from kvstore_wire.inline import encode_data
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store


class GrpcInline:
    """The inline streams of the contract."""

    name = "grpc"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def unary(self, name: str, request: Message, deadline: Deadline) -> Any:
        return await self._connection.unary(name, request, deadline)

    def answers(self, name: str, request: Message, deadline: Deadline) -> AsyncGenerator[Any, None]:
        return self._connection.answers(name, request, deadline)

    async def get(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        begun = False
        async with aclosing(self._connection.payload(request, deadline)) as messages:
            async for message in messages:
                if isinstance(message, memoryview):
                    if not begun:
                        raise MalformedAnswer("bytes came before the header")
                    receiver.feed(message)
                elif message.WhichOneof("body") == "header":
                    if begun:
                        raise MalformedAnswer("a second header came")
                    receiver.begin(message.header)
                    begun = True
                elif message.WhichOneof("body") == "trailer":
                    receiver.trail(message.trailer)
                elif message.WhichOneof("body") == "data":
                    # Unusual coding of a data message, as valid as the usual one.
                    if not begun:
                        raise MalformedAnswer("bytes came before the header")
                    receiver.feed(memoryview(message.data))
        if not begun:
            raise MalformedAnswer("the stream ended without a header")
        receiver.finish()

    def skips_what_is_stored(self, parts: Sequence[Slices]) -> bool:
        return False

    async def put(self, header: store.PutHeader, outgoing: Outgoing, deadline: Deadline) -> store.PutResponse:
        messages = _Messages(header, outgoing)
        answer = await self._connection.send(messages.all(), deadline)
        if not messages.complete and PartState.COMMITTED in answer.states:
            raise MalformedAnswer("the shard claims to have stored what it was not sent")
        return answer

    async def read(self, request: store.GetRequest, grants: Grants, receiver: Receiver, deadline: Deadline) -> None:
        await self.get(request, receiver, deadline)

    async def write(
        self, header: store.PutHeader, offsets: tuple[int, ...], outgoing: Outgoing, deadline: Deadline
    ) -> store.PutResponse:
        return await self.put(header, outgoing, deadline)


class _Messages:
    """The coded messages of one Put stream. `complete` once the trailer was taken."""

    def __init__(self, header: store.PutHeader, outgoing: Outgoing) -> None:
        self._header, self._outgoing = header, outgoing
        self.complete = False

    def all(self) -> Iterator[bytes]:
        yield store.PutRequest(header=self._header).SerializeToString()
        for views, size in self._outgoing.pieces():
            yield encode_data(views, size)
        trailer = store.PutTrailer(checksums=self._outgoing.checksums)
        self.complete = True
        yield store.PutRequest(trailer=trailer).SerializeToString()
