"""The fast channel as a transport: the payload in frames, over TCP (`bulk`) or a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from kvstore_client.buffers import Slices
from kvstore_client.copying import Copier
from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer
from kvstore_client.fast.wire import MakePieces, Messages, OneMessage, Piece, Taker
from kvstore_client.grants import Grants
from kvstore_client.outgoing import Outgoing
from kvstore_client.transports.base import Receiver
from kvstore_wire.errors import KvStoreError
from kvstore_wire.frames import VERB_OF_METHOD, Verb
from kvstore_wire.methods import STORE_METHODS
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

LATE_MS = 1000  # For ending what nobody wants any more.

R = TypeVar("R")


class Lanes(Protocol):
    """Connections of one kind to one shard."""

    async def exchange(
        self,
        verb: int,
        message: bytes,
        *,
        taker: Taker,
        deadline: Deadline,
        source: MakePieces | None = None,
    ) -> None:
        """Makes one request and takes its answer. Raises KvStoreError; PathDown where the connection is to blame."""

    def tell(self, verb: int, message: bytes) -> bool:
        """Says something that the shard does not answer, on a connection that is open; false where none could take it
        at once."""

    def failed(self, error: KvStoreError) -> None:
        """Notes that this way to the shard does not work."""

    def retire(self) -> None:
        """Keeps no connection any more."""

    def close(self) -> None: ...


class Arena(NamedTuple):
    """The shard's memory as this process sees it, and who copies out of it."""

    array: npt.NDArray[np.uint8]
    copier: Copier


class Aside(Protocol):
    """Where work goes that would hold an event loop up. In a thread that may block anyway: nowhere."""

    async def run(self, work: Callable[[], R]) -> R:
        """Runs `work` and returns what it returns; when this returns or raises, it has ended."""

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs something whose outcome changes nothing."""


class FramedTransport:
    """All verbs over the frames of one kind of connection."""

    quick_bytes = 4 << 20  # Up to here a read of one frame goes through the socket by the shortest way.
    quick_put_bytes = 1 << 20  # Likewise a write.
    arena: Arena | None = None  # Where larger reads can be copied from at once.
    streams = True  # Larger reads come in frames.

    def __init__(self, name: str, lanes: Lanes, aside: Aside) -> None:
        self.name, self.lanes, self._aside = name, lanes, aside

    async def unary(self, name: str, request: Message, deadline: Deadline) -> Any:
        """Calls a method that answers once. Raises KvStoreError."""
        taker = self._leasing(name, request.session) if isinstance(request, store.ReserveRequest) else OneMessage()
        await self._exchange(name, request, taker, deadline)
        return _parsed(STORE_METHODS[name].response, taker.raw)

    async def answers(self, name: str, request: Message, deadline: Deadline) -> AsyncGenerator[Any, None]:
        """Yields the answers of a method that answers several times, once all are there. Raises KvStoreError."""
        taker = self._leasing(name, request.session) if isinstance(request, store.AcquireRequest) else Messages()
        await self._exchange(name, request, taker, deadline)
        for message in taker.all:
            yield _parsed(STORE_METHODS[name].response, message)

    async def _exchange(self, name: str, request: Message, taker: OneMessage, deadline: Deadline) -> None:
        raw = request.SerializeToString()
        try:
            await self.lanes.exchange(VERB_OF_METHOD[name], raw, taker=taker, deadline=deadline)
        except BaseException:
            if isinstance(taker, _Leasing):
                taker.drop()
            raise

    def _leasing(self, name: str, session: bytes) -> _Leasing:
        """Returns what takes the answer of a method that leases. What comes after the call was given up is ended."""

        def late(raw: bytes) -> None:
            with suppress(MalformedAnswer):
                answer = _parsed(STORE_METHODS[name].response, raw)
                if answer.HasField("lease"):
                    self._aside.background(self.end_lease(name, session, answer.lease))

        return _Leasing(late)

    async def end_lease(self, name: str, session: bytes, lease: types.Lease) -> None:
        """Ends what a Reserve or an Acquire leased, for a call that is over."""
        deadline = Deadline.after(LATE_MS)
        if name == "Reserve":
            await self.unary("Abort", store.AbortRequest(session=session, leases=[lease]), deadline)
        else:
            await self.unary("Release", store.ReleaseRequest(session=session, leases=[lease]), deadline)

    async def get(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        taker = _GetTaker(receiver)
        await self.lanes.exchange(Verb.GET, request.SerializeToString(), taker=taker, deadline=deadline)
        if not taker.begun:
            raise MalformedAnswer("the answer has no header")
        receiver.finish()

    def skips_what_is_stored(self, parts: Sequence[Slices]) -> bool:
        return False

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


class _Leasing(Messages):
    """Takes an answer that holds a lease. `late` gets its messages once the call was given up."""

    def __init__(self, late: Callable[[bytes], None]) -> None:
        super().__init__()
        self._late = late

    def message(self, raw: bytes) -> None:
        super().message(raw)
        self.raw = raw

    def late(self, raw: bytes) -> None:
        self._late(raw)

    def drop(self) -> None:
        """Lets go of what came: the call has failed all the same."""
        for raw in self.all:
            self._late(raw)


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

    def late(self, raw: bytes) -> None:
        return

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
