"""The codec of the fast channel: however a stream is cut, the same frames come; what is no frame is never delivered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_wire.errors import InvalidArgument
from kvstore_wire.frames import (
    END,
    ERROR,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Discard,
    Frame,
    FrameReader,
    Verb,
    head,
    header,
)

MAX_MESSAGE, MAX_PAYLOAD, SCRATCH = 400, 700, 128


@dataclass
class Taken:
    """A frame as it came."""

    frame: Frame
    message: bytes
    payload: bytes = b""
    whole: bool = False


@dataclass
class Receiver:
    """Keeps what comes; a sink that gives room of at most `room_bytes` at a time."""

    room_bytes: int = 1 << 20
    taken: list[Taken] = field(default_factory=list)
    _room: memoryview = field(default_factory=lambda: memoryview(b""))

    def frame(self, frame: Frame, message: memoryview) -> Receiver | None:
        assert not self.taken or self.taken[-1].whole, "a frame came before the one before was whole"
        self.taken.append(Taken(frame, bytes(message), whole=not frame.payload_bytes))
        return self if frame.payload_bytes else None

    def room(self, most: int) -> memoryview:
        assert most > 0
        self._room = memoryview(bytearray(min(most, self.room_bytes)))
        return self._room

    def landed(self, size: int) -> None:
        assert 0 < size <= len(self._room)
        self.taken[-1].payload += self._room[:size]

    def payload_landed(self, frame: Frame) -> None:
        assert frame is self.taken[-1].frame
        assert len(self.taken[-1].payload) == frame.payload_bytes
        self.taken[-1].whole = True


def reader(receiver: Receiver) -> FrameReader:
    return FrameReader(receiver, max_message_bytes=MAX_MESSAGE, max_payload_bytes=MAX_PAYLOAD, scratch_bytes=SCRATCH)


def feed(frames: FrameReader, data: bytes, sizes: Sequence[int]) -> None:
    """Gives a stream to a reader in reads of these sizes, over and over; each takes what the reader has room for."""
    at = turn = 0
    while at < len(data):
        room = frames.wanted()
        assert len(room) > 0
        size = min(len(room), len(data) - at, sizes[turn % len(sizes)])
        room[:size] = data[at : at + size]
        at, turn = at + size, turn + 1
        frames.landed(size)


@dataclass(frozen=True)
class Sent:
    """A frame to send."""

    verb: int
    request: int
    flags: int
    timeout_ms: int
    message: bytes
    payload: bytes

    def raw(self) -> bytes:
        start = head(
            self.verb,
            self.request,
            self.message,
            flags=self.flags,
            timeout_ms=self.timeout_ms,
            payload_bytes=len(self.payload),
        )
        return start + self.payload


numbers = st.integers(0, 2**32 - 1)
sent_frames = st.builds(
    Sent,
    verb=st.integers(0, 255),
    request=numbers,
    flags=st.sampled_from([0, END, ERROR, END | ERROR]),
    timeout_ms=numbers,
    message=st.one_of(st.just(b""), st.binary(max_size=60), st.binary(min_size=SCRATCH - 30, max_size=MAX_MESSAGE)),
    payload=st.one_of(st.just(b""), st.binary(max_size=60), st.binary(min_size=SCRATCH - 30, max_size=MAX_PAYLOAD)),
)
streams = st.lists(sent_frames, max_size=8)
reads = st.lists(st.integers(1, 300), min_size=1, max_size=6)


# -- any split -----------------------------------------------------------------------------------------------------


@given(streams, reads, st.integers(1, 300))
@settings(max_examples=300, deadline=None)
def test_any_split_of_any_stream_gives_the_same_frames(sent: list[Sent], sizes: list[int], room: int) -> None:
    receiver = Receiver(room)
    frames = reader(receiver)
    feed(frames, b"".join(s.raw() for s in sent), sizes)
    assert [(t.message, t.payload, t.whole) for t in receiver.taken] == [(s.message, s.payload, True) for s in sent]
    for taken, made in zip(receiver.taken, sent, strict=True):
        assert taken.frame == Frame(
            made.verb, made.flags, made.request, made.timeout_ms, len(made.message), len(made.payload)
        )
        assert taken.frame.ends == bool(made.flags)
    assert frames.between_frames


@given(streams, reads, st.data())
@settings(max_examples=200, deadline=None)
def test_a_stream_cut_anywhere_gives_the_frames_before_the_cut(
    sent: list[Sent], sizes: list[int], data: st.DataObject
) -> None:
    raw = b"".join(s.raw() for s in sent)
    cut = data.draw(st.integers(0, len(raw)))
    receiver = Receiver()
    frames = reader(receiver)
    feed(frames, raw[:cut], sizes)
    ends = [sum(len(s.raw()) for s in sent[: i + 1]) for i in range(len(sent))]
    assert sum(t.whole for t in receiver.taken) == sum(end <= cut for end in ends)
    assert frames.between_frames == (cut in (0, *ends))


@pytest.mark.parametrize("size", [0, 1, SCRATCH - HEADER_BYTES, SCRATCH - 1, SCRATCH, SCRATCH + 1, MAX_MESSAGE])
@pytest.mark.parametrize("payload", [0, 1, SCRATCH, MAX_PAYLOAD])
def test_messages_around_the_size_of_the_scratch(size: int, payload: int) -> None:
    sent = Sent(Verb.GET, 7, END, 0, bytes(range(256))[:size].ljust(size, b"m"), bytes(payload))
    for step in (1, 7, SCRATCH, 10_000):
        receiver = Receiver()
        feed(reader(receiver), sent.raw() * 3, [step])
        assert [(t.message, t.payload, t.whole) for t in receiver.taken] == [(sent.message, sent.payload, True)] * 3


def test_one_read_can_bring_many_frames_and_payload_beyond_it_lands_in_its_sink() -> None:
    small = head(Verb.CREDIT, 0, b"c", flags=END)
    paying = head(Verb.PUT, 9, b"", payload_bytes=600)
    receiver = Receiver()
    frames = reader(receiver)
    raw = small * 2 + paying + bytes(600)
    frames.wanted()[:SCRATCH] = raw[:SCRATCH]
    frames.landed(SCRATCH)
    assert [t.frame.verb for t in receiver.taken] == [Verb.CREDIT, Verb.CREDIT, Verb.PUT]
    came = SCRATCH - 2 * len(small) - len(paying)
    assert (len(receiver.taken[-1].payload), frames.payload_left) == (came, 600 - came)
    assert len(frames.wanted()) == 600 - came, "the rest has room of its own, and none of it passes through the scratch"
    assert not frames.between_frames


def test_frames_without_anything_are_frames() -> None:
    raw = b"".join(header(verb, verb) for verb in range(40))
    for step in (1, HEADER_BYTES, 1000):
        receiver = Receiver()
        feed(reader(receiver), raw, [step])
        assert [(t.frame.verb, t.frame.request, t.message) for t in receiver.taken] == [(v, v, b"") for v in range(40)]


def test_a_message_is_the_receiver_s_for_the_call_alone() -> None:
    """It lies in the scratch, which the next read overwrites."""
    kept: list[memoryview] = []

    class Keeping(Receiver):
        def frame(self, frame: Frame, message: memoryview) -> Receiver | None:
            kept.append(message)
            return super().frame(frame, message)

    receiver = Keeping()
    frames = reader(receiver)
    feed(frames, head(1, 1, b"first"), [1000])
    feed(frames, head(1, 2, b"other"), [1000])
    assert bytes(kept[0]) == b"other"
    assert [t.message for t in receiver.taken] == [b"first", b"other"]


def test_payload_that_nobody_wants_can_be_dropped() -> None:
    discard = Discard()

    class Dropping(Receiver):
        def frame(self, frame: Frame, message: memoryview) -> Discard | None:  # type: ignore[override]
            super().frame(frame, message)
            return discard if frame.payload_bytes else None

        def payload_landed(self, frame: Frame) -> None:
            self.taken[-1].whole = True

    receiver = Dropping()
    feed(reader(receiver), Sent(Verb.PUT, 1, END, 0, b"x", bytes(MAX_PAYLOAD)).raw() * 2, [333])
    assert [t.whole for t in receiver.taken] == [True, True]


# -- what is no frame ----------------------------------------------------------------------------------------------

BAD = {
    "frame.magic": HEADER.pack(MAGIC ^ 1, VERSION, 1, 0, 0, 1, 0, 0, 0),
    "frame.version": HEADER.pack(MAGIC, VERSION + 1, 1, 0, 0, 1, 0, 0, 0),
    "frame.flags": HEADER.pack(MAGIC, VERSION, 1, 4, 0, 1, 0, 0, 0),
    "frame.reserved": HEADER.pack(MAGIC, VERSION, 1, 0, 1, 1, 0, 0, 0),
    "frame.message_bytes": HEADER.pack(MAGIC, VERSION, 1, 0, 0, 1, 0, MAX_MESSAGE + 1, 0),
    "frame.payload_bytes": HEADER.pack(MAGIC, VERSION, 1, 0, 0, 1, 0, 0, MAX_PAYLOAD + 1),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_header_is_named_and_nothing_of_it_is_delivered(name: str) -> None:
    good = head(Verb.MATCH, 1, b"good", flags=END)
    for step in (1, 1000):
        receiver = Receiver()
        with pytest.raises(InvalidArgument) as caught:
            feed(reader(receiver), good + BAD[name] + good, [step])
        assert caught.value.field == name
        assert caught.value.limit
        assert [t.message for t in receiver.taken] == [b"good"]


def test_the_limits_are_inclusive() -> None:
    receiver = Receiver()
    feed(reader(receiver), Sent(1, 1, 0, 0, bytes(MAX_MESSAGE), bytes(MAX_PAYLOAD)).raw(), [1000])
    assert receiver.taken[0].whole


class Strict(Receiver):
    """Also refuses a frame whose header a careful reader would not have passed."""

    def frame(self, frame: Frame, message: memoryview) -> Receiver | None:
        assert frame.message_bytes == len(message) <= MAX_MESSAGE
        assert frame.payload_bytes <= MAX_PAYLOAD
        assert not frame.flags & ~(END | ERROR)
        return super().frame(frame, message)


@given(st.binary(max_size=600), reads)
@settings(max_examples=200, deadline=None)
def test_garbage_raises_only_what_it_should(garbage: bytes, sizes: list[int]) -> None:
    receiver = Strict()
    plausible = HEADER.pack(MAGIC, VERSION, *garbage[:1].ljust(1, b"\1"), 0, 0, 1, 0, len(garbage) % 50, 0)
    for raw in (garbage, plausible + garbage):
        try:
            feed(reader(receiver), raw, sizes)
        except InvalidArgument as error:
            assert error.field.startswith("frame.")  # noqa: PT017 - either end is right
        receiver = Strict()


@given(streams.filter(bool), reads, st.data())
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_is_refused_or_gives_frames_that_pass_every_check(
    sent: list[Sent], sizes: list[int], data: st.DataObject
) -> None:
    raw = bytearray(b"".join(s.raw() for s in sent))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    receiver = Strict()
    try:
        feed(reader(receiver), bytes(raw), sizes)
    except InvalidArgument as error:
        assert error.field.startswith("frame.")  # noqa: PT017
    begins = 0
    for i, made in enumerate(sent):
        begins += len(made.raw())
        if begins * 8 <= bit:
            assert (receiver.taken[i].message, receiver.taken[i].payload) == (made.message, made.payload)


def test_streams_of_valid_headers_with_wild_sizes_hold_no_more_than_they_may() -> None:
    """Thousands of headers that claim sizes at random: the reader takes what is allowed, and only that, to the byte."""
    rng = random.Random(7)
    for _ in range(300):
        receiver = Strict(room_bytes=rng.randrange(1, 64))
        frames = reader(receiver)
        expected = 0
        try:
            for _ in range(10):
                message, payload = rng.randrange(MAX_MESSAGE + 40), rng.randrange(MAX_PAYLOAD + 40)
                raw = header(rng.randrange(256), 1, message_bytes=message, payload_bytes=payload)
                feed(frames, raw + bytes(message) + bytes(payload), [rng.randrange(1, 500)])
                expected += 1
                assert message <= MAX_MESSAGE
                assert payload <= MAX_PAYLOAD
        except InvalidArgument:
            pass
        assert len(receiver.taken) == expected
        assert all(t.whole for t in receiver.taken)
