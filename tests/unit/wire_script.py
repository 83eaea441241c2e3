"""What a shard says on the fast channel, as bytes: for tests of the client's side of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from google.protobuf.message import Message
from xxhash import xxh3_64_intdigest

from kvstore_client.fast.dial import Dialed
from kvstore_client.fast.wire import Wire
from kvstore_wire.errors import KvStoreError
from kvstore_wire.frames import END, ERROR, HEADER, HEADER_BYTES, Frame, Verb, head
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import channel_pb2 as channel

GENERATION = 77
CREDIT_BYTES, FRAME_BYTES = 1 << 20, 64 << 10


def nothing() -> None:
    return


def frame(verb: int, request: int, message: Message | None = None, *, flags: int = END, payload: bytes = b"") -> bytes:
    raw = b"" if message is None else message.SerializeToString()
    return head(verb, request, raw, flags=flags, payload_bytes=len(payload)) + payload


def hello_answer(credit_bytes: int = CREDIT_BYTES, frame_bytes: int = FRAME_BYTES) -> channel.HelloAnswer:
    return channel.HelloAnswer(generation=GENERATION, max_frame_bytes=frame_bytes, credit_bytes=credit_bytes)


def credit(size: int) -> bytes:
    return frame(Verb.CREDIT, 0, channel.Credit(bytes=size))


def goodbye(error: KvStoreError) -> bytes:
    return frame(Verb.GOODBYE, 0, channel.Goodbye(why=error.to_detail()))


def refused(verb: int, request: int, error: KvStoreError) -> bytes:
    return frame(verb, request, error.to_detail(), flags=ERROR)


def got(request: int, values: Sequence[bytes], *, states: bytes | None = None, frame_bytes: int = 1000) -> bytes:
    """The answer to a Get: a header, then the payload in frames."""
    header = store.GetHeader(
        states=bytes((BlockState.HOT,)) * len(values) if states is None else states,
        lengths=list(map(len, values)),
        checksums=[xxh3_64_intdigest(v) for v in values],
    )
    payload = b"".join(values)
    pieces = [payload[at : at + frame_bytes] for at in range(0, len(payload), frame_bytes)] or [b""]
    made = b""
    for i, piece in enumerate(pieces):
        message = store.GetResponse(header=header) if i == 0 else None
        made += frame(Verb.GET, request, message, flags=END if i == len(pieces) - 1 else 0, payload=piece)
    return made


def greeted_wire(credit_bytes: int = CREDIT_BYTES, frame_bytes: int = FRAME_BYTES) -> Wire:
    """A connection that has been greeted, with nothing to send."""
    wire = Wire()
    exchange = wire.hello(nothing)
    sent_of(wire)
    feed(wire, frame(Verb.HELLO, exchange.request, hello_answer(credit_bytes, frame_bytes)))
    wire.greeted(exchange)
    return wire


def feed(wire: Wire, data: bytes, step: int = 1 << 30) -> None:
    """Lets bytes come, at most `step` at a time."""
    at = 0
    while at < len(data):
        view = wire.reader.wanted()
        size = min(step, len(view), len(data) - at)
        view[:size] = data[at : at + size]
        wire.reader.landed(size)
        at += size


def sent_of(wire: Wire, most_bytes: int = 1 << 30) -> bytes:
    """Takes what the connection wants to send."""
    made = b""
    while len(made) < most_bytes and (buffers := wire.pending()):
        piece = b"".join(map(bytes, buffers))[: most_bytes - len(made)]
        wire.sent(len(piece))
        made += piece
    return made


def frames_of(data: bytes, *, cut_bytes: int = 0) -> list[tuple[Frame, bytes, bytes]]:
    """Cuts bytes into frames: header, message, payload. At most `cut_bytes` may be left of one that is not whole."""
    found = []
    while len(data) >= HEADER_BYTES:
        _, _, verb, flags, _, request, timeout_ms, message_bytes, payload_bytes = HEADER.unpack_from(data)
        end = HEADER_BYTES + message_bytes + payload_bytes
        if len(data) < end:
            break
        message = data[HEADER_BYTES : HEADER_BYTES + message_bytes]
        made = Frame(verb, flags, request, timeout_ms, message_bytes, payload_bytes)
        found.append((made, message, data[HEADER_BYTES + message_bytes : end]))
        data = data[end:]
    assert len(data) <= cut_bytes, "a frame is cut short"
    return found


@contextmanager
def scripted(script: Callable[[socket.socket], None], wire: Wire | None = None) -> Iterator[Dialed]:
    """A connection to a peer that does as the script says, in a thread of its own, and hangs up at its end."""
    ours, theirs = socket.socketpair()

    def play() -> None:
        with theirs:
            try:
                script(theirs)
            except OSError:
                return

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    try:
        yield Dialed(ours, wire or greeted_wire(), hello_answer())
    finally:
        ours.close()
        thread.join(5)
        assert not thread.is_alive()
