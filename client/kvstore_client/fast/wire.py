"""One connection of the fast channel as a state machine without I/O (docs/fast-channel.md).

A driver sends what `pending` gives, reads to where `reader.wanted` says, and looks at the exchanges it began. Several
exchanges may be under way; answers are matched by request number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from kvstore_client.errors import MalformedAnswer
from kvstore_wire.errors import KvStoreError, Unreachable, from_detail
from kvstore_wire.frames import END, ERROR, Discard, Frame, FrameReader, Sink, Verb, head
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types

MAX_MESSAGE_BYTES = 64 << 20
CREDIT_BYTES = 64 << 20  # Payload on its way to this side at most, as far as this side limits it.
DEFAULT_FRAME_BYTES = 4 << 20  # Until HELLO is answered; the most that any shard can be set to.
_SCRATCH_BYTES = 4096  # Small, so that little payload passes through it.

# Each: the views of one frame's payload, their bytes, a message, and whether it is the last frame.
Piece: TypeAlias = "tuple[list[memoryview], int, bytes, bool]"


class Pieces(Protocol):
    """What a Put sends after its header, frame by frame. `is_slow`: what came before is sent before it is asked."""

    is_slow: bool

    def __next__(self) -> Piece: ...


MakePieces: TypeAlias = "Callable[[int], Pieces]"  # Of the largest payload of one frame.


class Taker(Sink, Protocol):
    """Takes one request's answer. Raising MalformedAnswer fails the exchange, not the connection."""

    def message(self, raw: bytes) -> None:
        """Takes a message of the answer."""

    def late(self, raw: bytes) -> None:
        """Takes a message that came after the exchange was given up. Must touch nothing of the caller's."""


class OneMessage:
    """Takes an answer of one message."""

    def __init__(self) -> None:
        self.raw = b""

    def late(self, raw: bytes) -> None:
        return

    def message(self, raw: bytes) -> None:
        self.raw = raw

    def room(self, most: int) -> memoryview:
        raise MalformedAnswer("payload came where none belongs")

    def landed(self, size: int) -> None:
        return


class Messages(OneMessage):
    """Takes an answer of several messages."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[bytes] = []

    def message(self, raw: bytes) -> None:
        self.all.append(raw)


@dataclass(eq=False)
class Exchange:
    """One request and its answer. `ended` is called once, when `error` or the whole answer is there."""

    verb: int
    request: int
    taker: Taker
    source: Pieces | None
    ended: Callable[[], None]
    done: bool = False
    error: KvStoreError | None = None

    def room(self, most: int) -> memoryview:
        return self.taker.room(most)

    def landed(self, size: int) -> None:
        self.taker.landed(size)


class Wire:
    """Owns the exchanges of one connection. The first one must be `hello`."""

    def __init__(self) -> None:
        self._exchanges: dict[int, Exchange] = {}
        self._last_request = 0
        self._discard = Discard()
        self._buffers: list[memoryview] = []
        self._paying: Exchange | None = None  # Whose payload is in `_buffers`.
        self._whole: deque[bytes] = deque()
        self._sources: deque[Exchange] = deque()
        self._payload_came = 0
        self.credit = 0  # Payload that the shard takes before it grants more.
        self.frame_bytes = 0
        self.failure: KvStoreError | None = None
        self.reader = FrameReader(
            self,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_payload_bytes=DEFAULT_FRAME_BYTES,
            scratch_bytes=_SCRATCH_BYTES,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, so that the next exchange starts from a clean state."""
        return not (self._exchanges or self._buffers or self._whole) and self.reader.between_frames

    # -- requests ------------------------------------------------------------------------------------------------

    def hello(self, ended: Callable[[], None]) -> Exchange:
        """Begins with the greeting; `greeted` takes its answer."""
        message = channel.Hello(credit_bytes=CREDIT_BYTES)  # Each request names its session itself.
        return self.begin(Verb.HELLO, message.SerializeToString(), taker=OneMessage(), ended=ended)

    def greeted(self, exchange: Exchange) -> channel.HelloAnswer:
        """Returns the answer to `hello`. Raises KvStoreError."""
        if exchange.error is not None:
            raise exchange.error
        taker = exchange.taker
        assert isinstance(taker, OneMessage)
        answer = channel.HelloAnswer()
        try:
            answer.ParseFromString(taker.raw)
        except DecodeError:
            raise MalformedAnswer("is not a HelloAnswer") from None
        if not answer.credit_bytes or not answer.max_frame_bytes:
            raise MalformedAnswer("HELLO was answered without limits")
        self.credit, self.frame_bytes = answer.credit_bytes, answer.max_frame_bytes
        return answer

    def begin(
        self,
        verb: int,
        message: bytes,
        *,
        taker: Taker,
        ended: Callable[[], None],
        timeout_ms: int = 0,
        source: MakePieces | None = None,
    ) -> Exchange:
        """Begins an exchange; `source` makes what a Put sends after `message`."""
        if self.failure is not None:
            raise self.failure
        pieces = None if source is None else source(self.frame_bytes)
        request = self.next_request()
        exchange = Exchange(verb, request, taker, pieces, ended)
        self._exchanges[request] = exchange
        flags = END if source is None else 0
        self._whole.append(head(verb, request, message, flags=flags, timeout_ms=timeout_ms))
        if source is not None:
            self._sources.append(exchange)
        return exchange

    def resume(self, verb: int, request: int, *, taker: Taker, ended: Callable[[], None]) -> Exchange:
        """Takes on an exchange whose request, of that number, was sent past this wire."""
        exchange = self._exchanges[request] = Exchange(verb, request, taker, None, ended)
        return exchange

    def tell(self, verb: int, message: bytes) -> None:
        """Says something that the shard does not answer: a RELEASE."""
        if self.failure is not None:
            raise self.failure
        self._whole.append(head(verb, 0, message, flags=END))

    def next_request(self) -> int:
        """Returns a number that no open request has."""
        self._last_request = self._last_request % 0xFFFFFFFF + 1
        return self._last_request

    def cancel(self, exchange: Exchange) -> None:
        """Gives up an exchange: the taker is not touched any more, and the shard is told."""
        if exchange.done:
            return
        exchange.done = True
        self._drop_source(exchange)
        self._whole.append(head(Verb.CANCEL, exchange.request, flags=END))

    def fail(self, error: KvStoreError) -> None:
        """Ends every exchange: the connection is gone."""
        self.failure = self.failure or error
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            self._end(exchange, error)

    # -- out -----------------------------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether `pending` may have something; a quick look."""
        return bool(self._buffers or self._whole or self._sources)

    def pending(self) -> list[memoryview]:
        """Returns the buffers to send next; empty where there is nothing, or credit is missing."""
        if not self._buffers:
            while self._whole:
                self._buffers.append(memoryview(self._whole.popleft()))
            if self._sources:
                self._add_payload()
        return self._buffers

    def sent(self, size: int) -> None:
        """Takes away the first `size` bytes of `pending`."""
        drop_first(self._buffers, size)
        if not self._buffers:
            self._paying = None

    @property
    def needs_credit(self) -> bool:
        """Whether payload waits for the shard to grant more."""
        return bool(self._sources) and self.credit <= 0

    def _add_payload(self) -> None:
        while self._sources and self.credit > 0:
            exchange = self._sources[0]
            assert exchange.source is not None
            if exchange.source.is_slow and self._buffers:
                return
            self._sources.popleft()
            views, size, message, last = next(exchange.source)
            flags = END if last else 0
            self._buffers.append(
                memoryview(head(exchange.verb, exchange.request, message, flags=flags, payload_bytes=size))
            )
            self._buffers.extend(views)
            self.credit -= size
            if not last:
                self._sources.append(exchange)
            if size:
                self._paying = exchange
                return

    def _drop_source(self, exchange: Exchange) -> None:
        """Takes no more of an exchange's source; what is left of a frame under way is sent from memory of our own."""
        if exchange in self._sources:
            self._sources.remove(exchange)
        if self._paying is exchange:
            self._buffers = [memoryview(bytes(buffer)) for buffer in self._buffers]
            self._paying = None

    # -- in (a receiver of frames) -------------------------------------------------------------------------------

    def frame(self, frame: Frame, message: memoryview) -> Sink | None:
        if frame.verb == Verb.CREDIT:
            self.credit += _parsed(channel.Credit(), bytes(message)).bytes
            return self._discard
        if frame.verb == Verb.GOODBYE:
            self.fail(_goodbye(bytes(message)))
            return self._discard
        exchange = self._exchanges.get(frame.request)
        if exchange is None or exchange.verb != frame.verb:
            raise MalformedAnswer(f"an answer to request {frame.request}, verb {frame.verb}, came unasked")
        if frame.flags & ERROR:
            del self._exchanges[frame.request]
            error = from_detail(_parsed(types.ErrorDetail(), bytes(message)))
            self._drop_source(exchange)
            if not exchange.done and exchange.source is not None:
                self._whole.append(head(Verb.CANCEL, exchange.request, flags=END))  # No more payload will come.
            self._end(exchange, error)
            return self._discard
        if exchange.done:
            exchange.taker.late(bytes(message))
        elif frame.message_bytes:
            try:
                exchange.taker.message(bytes(message))
            except KvStoreError as error:
                self.guard(exchange, error)
        if frame.ends and not frame.payload_bytes:
            self._finish(frame.request)
        if exchange.done or not frame.payload_bytes:
            return self._discard
        return _GuardedSink(self, exchange)

    def payload_landed(self, frame: Frame) -> None:
        self.took(frame.payload_bytes)
        if frame.ends:
            self._finish(frame.request)

    def took(self, payload_bytes: int) -> None:
        """Counts payload that came, and grants the shard as much anew, a part of the credit at a time."""
        self._payload_came += payload_bytes
        if self._payload_came * 2 >= CREDIT_BYTES:
            granted, self._payload_came = self._payload_came, 0
            message = channel.Credit(bytes=granted).SerializeToString()
            self._whole.append(head(Verb.CREDIT, 0, message, flags=END))

    def guard(self, exchange: Exchange, error: KvStoreError) -> None:
        """Fails one exchange by what its taker raised; the rest of its answer is dropped."""
        self._drop_source(exchange)
        if not exchange.done:
            self._whole.append(head(Verb.CANCEL, exchange.request, flags=END))
        self._end(exchange, error)

    def discarded(self, most: int) -> memoryview:
        return self._discard.room(most)

    def _finish(self, request: int) -> None:
        exchange = self._exchanges.pop(request, None)
        if exchange is not None:
            self._drop_source(exchange)
            self._end(exchange, None)

    @staticmethod
    def _end(exchange: Exchange, error: KvStoreError | None) -> None:
        if not exchange.done:
            exchange.done, exchange.error = True, error
            exchange.ended()


class _GuardedSink:
    """The payload of one exchange; dropped once the exchange was given up or its taker refused it."""

    def __init__(self, wire: Wire, exchange: Exchange) -> None:
        self._wire, self._exchange = wire, exchange
        self._dropping = False

    def room(self, most: int) -> memoryview:
        self._dropping = self._exchange.done
        if not self._dropping:
            try:
                return self._exchange.taker.room(most)
            except KvStoreError as error:
                self._wire.guard(self._exchange, error)
                self._dropping = True
        return self._wire.discarded(most)

    def landed(self, size: int) -> None:
        if not self._dropping and not self._exchange.done:
            self._exchange.taker.landed(size)


def drop_first(buffers: list[memoryview], size: int) -> None:
    """Takes the first `size` bytes of buffers away, in place."""
    at = 0
    while at < len(buffers) and size >= len(buffers[at]):
        size -= len(buffers[at])
        at += 1
    del buffers[:at]
    if size:
        buffers[0] = buffers[0][size:]


def _goodbye(raw: bytes) -> KvStoreError:
    why = _parsed(channel.Goodbye(), raw).why
    return Unreachable(f"the shard closed the connection: {from_detail(why)}")


def _parsed(message: types.ErrorDetail | channel.Credit | channel.Goodbye, raw: bytes) -> Any:
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise MalformedAnswer(f"is not a {type(message).__name__}") from None
    return message
