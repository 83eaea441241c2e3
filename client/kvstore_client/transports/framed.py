"""The fast channel as a transport: the payload in frames, over TCP (`bulk`) or a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer
from kvstore_client.fast.wire import MakePieces, Messages, OneMessage, Piece, Taker
from kvstore_client.grants import Grants
from kvstore_client.outgoing import Outgoing
from kvstore_client.transports.base import Receiver
from kvstore_wire.frames import VERB_OF_METHOD, Verb
from kvstore_wire.methods import STORE_METHODS
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store


class Lanes(Protocol):
    """Connections of one kind to one shard."""

    async def exchange(
        self, verb: int, message: bytes, *, taker: Taker, deadline: Deadline, source: MakePieces | None = None
    ) -> None:
        """Makes one request and takes its answer. Raises KvStoreError; PathDown where the connection is to blame."""

    def close(self) -> None: ...


class FramedTransport:
    """All verbs over the frames of one kind of connection."""

    def __init__(self, name: str, lanes: Lanes) -> None:
        self.name, self.lanes = name, lanes

    async def unary(self, name: str, request: Message, deadline: Deadline) -> Any:
        """Calls a method that answers once. Raises KvStoreError."""
        taker = OneMessage()
        raw = request.SerializeToString()
        await self.lanes.exchange(VERB_OF_METHOD[name], raw, taker=taker, deadline=deadline)
        return _parsed(STORE_METHODS[name].response, taker.raw)

    async def answers(self, name: str, request: Message, deadline: Deadline) -> AsyncGenerator[Any, None]:
        """Yields the answers of a method that answers several times, once all are there. Raises KvStoreError."""
        taker = Messages()
        raw = request.SerializeToString()
        await self.lanes.exchange(VERB_OF_METHOD[name], raw, taker=taker, deadline=deadline)
        for message in taker.all:
            yield _parsed(STORE_METHODS[name].response, message)

    async def get(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        taker = _GetTaker(receiver)
        await self.lanes.exchange(Verb.GET, request.SerializeToString(), taker=taker, deadline=deadline)
        if not taker.begun:
            raise MalformedAnswer("the answer has no header")
        receiver.finish()

    async def put(self, header: store.PutHeader, outgoing: Outgoing, deadline: Deadline) -> store.PutResponse:
        taker = OneMessage()
        raw = store.PutRequest(header=header).SerializeToString()
        source = _PutSource(outgoing)
        await self.lanes.exchange(Verb.PUT, raw, taker=taker, deadline=deadline, source=source.begin)
        answer: store.PutResponse = _parsed(store.PutResponse, taker.raw)
        if not source.complete and PartState.COMMITTED in answer.states:
            raise MalformedAnswer("the shard claims to have stored what it was not sent")
        return answer

    async def read(self, request: store.GetRequest, grants: Grants, receiver: Receiver, deadline: Deadline) -> None:
        await self.get(request, receiver, deadline)

    async def write(
        self, header: store.PutHeader, offsets: tuple[int, ...], outgoing: Outgoing, deadline: Deadline
    ) -> store.PutResponse:
        return await self.put(header, outgoing, deadline)


class _GetTaker:
    """Passes the answer of a Get on to its receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.begun = False

    def message(self, raw: bytes) -> None:
        answer: store.GetResponse = _parsed(store.GetResponse, raw)
        kind = answer.WhichOneof("body")
        if kind == "header":
            if self.begun:
                raise MalformedAnswer("a second header came")
            self._receiver.begin(answer.header)
            self.begun = True
        elif kind == "trailer" and self.begun:
            self._receiver.trail(answer.trailer)
        else:
            raise MalformedAnswer("neither a header nor a trailer came")

    def room(self, most: int) -> memoryview:
        if not self.begun:
            raise MalformedAnswer("bytes came before the header")
        return self._receiver.room(most)

    def landed(self, size: int) -> None:
        self._receiver.landed(size)


class _PutSource:
    """The frames of a Put after its header. `complete` once the trailer was taken."""

    is_slow = False

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._pieces: Iterator[tuple[list[memoryview], int]] = iter(())
        self.complete = False

    def begin(self, frame_bytes: int) -> _PutSource:
        self._pieces, self.complete = self._outgoing.pieces(frame_bytes), False
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces, None)
        if piece is not None:
            return piece[0], piece[1], b"", False
        self.complete = True
        trailer = store.PutTrailer(checksums=self._outgoing.checksums)
        return [], 0, store.PutRequest(trailer=trailer).SerializeToString(), True


def _parsed(kind: type[Message], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise MalformedAnswer(f"is not a {kind.__name__}") from error
