"""The fast channel's frames (docs/fast-channel.md): a fixed header, one protobuf message, raw payload.

This is the codec of both sides. It does no I/O: a driver asks `FrameReader.wanted` where the next bytes go, puts them
there, and says how many came. Payload goes straight to where the frame's receiver wants it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore_wire.errors import InvalidArgument

MAGIC = 0x564B  # "KV" in the order of the wire.
VERSION = 1
HEADER = struct.Struct("<HBBHHIIII")
HEADER_BYTES = HEADER.size

END = 1  # The last frame of its request, or of its answer.
ERROR = 2  # The message is an ErrorDetail; nothing follows. Answers only.
_FLAGS = END | ERROR

MAX_OPEN_REQUESTS = 1024  # On one connection.
MAX_DESCRIPTORS = 1  # That come with one frame.


class Verb(IntEnum):
    """What a frame is about. Numbers are added, never reused."""

    HELLO = 1
    GOODBYE = 2
    CREDIT = 3
    CANCEL = 4
    MAP_ARENA = 8
    REGISTER_REGION = 9
    UNREGISTER_REGION = 10
    ATTACH = 16
    SESSION = 17
    MATCH = 18
    ACQUIRE = 19
    RENEW = 20
    RELEASE = 21
    RESERVE = 22
    COMMIT = 23
    ABORT = 24
    GET = 25
    PUT = 26
    DELETE = 27
    OVER = 28
    EXPLAIN = 29


VERB_OF_METHOD = {verb.name.title(): verb for verb in Verb if verb >= Verb.ATTACH}


class Frame(NamedTuple):
    """The header of a frame. Units: `timeout_ms` from when it was sent, 0 = none; sizes in bytes."""

    verb: int
    flags: int
    request: int
    timeout_ms: int
    message_bytes: int
    payload_bytes: int

    @property
    def ends(self) -> bool:
        return bool(self.flags & (END | ERROR))


class Sink(Protocol):
    """Where the payload of a frame goes."""

    def room(self, most: int) -> memoryview:
        """Returns where the next bytes go: writable, at least one byte, at most `most`."""

    def landed(self, size: int) -> None:
        """Tells that the first `size` bytes of the last `room` have come."""


class FrameReceiver(Protocol):
    """Takes frames as they come. Whatever it raises ends the connection."""

    def frame(self, frame: Frame, message: memoryview) -> Sink | None:
        """Takes a frame's message, valid during this call only; returns where its payload goes, if it has any."""

    def payload_landed(self, frame: Frame) -> None:
        """Tells that all of the frame's payload has come."""


class Discard:
    """A sink for payload that nobody wants."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(64 << 10))

    def room(self, most: int) -> memoryview:
        return self._view[:most]

    def landed(self, size: int) -> None:
        return


def header(
    verb: int, request: int, *, flags: int = 0, timeout_ms: int = 0, message_bytes: int = 0, payload_bytes: int = 0
) -> bytes:
    """Returns the coded header of a frame."""
    return HEADER.pack(MAGIC, VERSION, verb, flags, 0, request, timeout_ms, message_bytes, payload_bytes)


def head(
    verb: int, request: int, message: bytes = b"", *, flags: int = 0, timeout_ms: int = 0, payload_bytes: int = 0
) -> bytes:
    """Returns all of a frame but its payload."""
    size = len(message)
    return HEADER.pack(MAGIC, VERSION, verb, flags, 0, request, timeout_ms, size, payload_bytes) + message


class FrameReader:
    """Cuts a stream of bytes into frames. Raises InvalidArgument, naming the field, for what is no frame.

    Small things pass through a scratch buffer of `scratch_bytes`, so that one read can bring many frames; payload
    beyond what a read of the scratch brought lands at once in its sink.
    """

    def __init__(
        self,
        receiver: FrameReceiver,
        *,
        max_message_bytes: int,
        max_payload_bytes: int,
        scratch_bytes: int = 16 << 10,
    ) -> None:
        self._receiver = receiver
        self._max_message_bytes, self._max_payload_bytes = max_message_bytes, max_payload_bytes
        self._scratch = memoryview(bytearray(max(scratch_bytes, 2 * HEADER_BYTES)))
        self._start = self._end = 0  # What of the scratch was read and not yet taken.
        self._frame: Frame | None = None  # Its header is there, its message not yet.
        self._message: memoryview | None = None  # A message too long for the scratch, and how much of it is there.
        self._filled = 0
        self._sink: Sink | None = None
        self._left = 0  # Payload of the frame that is still to come.
        self._paying: Frame | None = None

    @property
    def between_frames(self) -> bool:
        """Whether nothing of an unfinished frame is there."""
        return self._frame is None and not self._left and self._start == self._end

    def wanted(self) -> memoryview:
        """Returns where to read the next bytes to, at least one."""
        if self._left:
            assert self._sink is not None
            return self._sink.room(self._left)
        if self._message is not None:
            return self._message[self._filled :]
        return self._scratch[self._end :]

    @property
    def payload_left(self) -> int:
        """Bytes of payload that must come before anything else can."""
        return self._left

    def landed(self, size: int) -> None:
        """Takes the first `size` bytes of the last `wanted`."""
        if self._left:
            assert self._sink is not None
            self._sink.landed(size)
            self._left -= size
            if not self._left:
                self._paid()
        elif self._message is not None:
            self._filled += size
            if self._filled == len(self._message):
                message, self._message = self._message, None
                self._deliver(message)
        else:
            self._end += size
            self._take_scratch()

    def _take_scratch(self) -> None:
        while self._start < self._end or (self._frame is not None and not self._frame.message_bytes):
            if self._frame is None:
                if self._end - self._start < HEADER_BYTES:
                    break
                self._frame = self._checked(HEADER.unpack_from(self._scratch, self._start))
                self._start += HEADER_BYTES
            size, here = self._frame.message_bytes, self._end - self._start
            if here < size:
                if size > len(self._scratch):
                    self._take_long(size, here)
                    return
                break
            message = self._scratch[self._start : self._start + size]
            self._start += size
            self._deliver(message)
            if self._left:
                self._pay_from_scratch()
                if self._left:
                    return
        self._compact()

    def _take_long(self, size: int, here: int) -> None:
        """Gives a message that the scratch cannot hold memory of its own."""
        self._message = memoryview(bytearray(size))
        self._message[:here] = self._scratch[self._start : self._end]
        self._filled = here
        self._start = self._end = 0

    def _compact(self) -> None:
        here = self._end - self._start
        if here and self._start:
            self._scratch[:here] = bytes(self._scratch[self._start : self._end])
        self._start, self._end = 0, here

    def _deliver(self, message: memoryview) -> None:
        frame = self._frame
        assert frame is not None
        self._frame = None
        sink = self._receiver.frame(frame, message)
        if frame.payload_bytes:
            assert sink is not None, "payload without a place to go"
            self._sink, self._left, self._paying = sink, frame.payload_bytes, frame

    def _pay_from_scratch(self) -> None:
        assert self._sink is not None
        while self._left and self._start < self._end:
            room = self._sink.room(min(self._left, self._end - self._start))
            size = len(room)
            room[:] = self._scratch[self._start : self._start + size]
            self._start += size
            self._left -= size
            self._sink.landed(size)
        if not self._left:
            self._paid()
        else:
            self._start = self._end = 0

    def _paid(self) -> None:
        frame, self._paying, self._sink = self._paying, None, None
        assert frame is not None
        self._receiver.payload_landed(frame)

    def _checked(self, fields: Sequence[int]) -> Frame:
        magic, version, verb, flags, reserved, request, timeout_ms, message_bytes, payload_bytes = fields
        if magic != MAGIC:
            raise InvalidArgument(f"is {magic:#06x}", field="frame.magic", limit=f"{MAGIC:#06x}")
        if version != VERSION:
            raise InvalidArgument(f"is {version}", field="frame.version", limit=f"{VERSION}")
        if flags & ~_FLAGS:
            raise InvalidArgument(f"is {flags:#06x}", field="frame.flags", limit=f"{_FLAGS:#06x}")
        if reserved:
            raise InvalidArgument(f"is {reserved}", field="frame.reserved", limit="0")
        if message_bytes > self._max_message_bytes:
            limit = f"{self._max_message_bytes} bytes"
            raise InvalidArgument(f"is {message_bytes}", field="frame.message_bytes", limit=limit)
        if payload_bytes > self._max_payload_bytes:
            limit = f"{self._max_payload_bytes} bytes"
            raise InvalidArgument(f"is {payload_bytes}", field="frame.payload_bytes", limit=limit)
        return Frame(verb, flags, request, timeout_ms, message_bytes, payload_bytes)
