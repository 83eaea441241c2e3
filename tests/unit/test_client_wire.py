"""The client's side of the fast channel against scripted bytes: nothing lands beside a buffer, nothing hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client import MalformedAnswer, Verify
from kvstore_client.deadline import Deadline
from kvstore_client.errors import PathDown
from kvstore_client.fast.aio import AsyncLane
from kvstore_client.fast.dial import Endpoint, dial
from kvstore_client.fast.lane import BlockingLane
from kvstore_client.fast.wire import CREDIT_BYTES as OUR_CREDIT_BYTES
from kvstore_client.fast.wire import Exchange, OneMessage, Piece, Taker, Wire
from kvstore_client.outgoing import Outgoing
from kvstore_client.question import question
from kvstore_client.receivers import ChainReceiver
from kvstore_client.transports.framed import _GetTaker, _Leasing, _PutSource
from kvstore_wire.errors import DeadlineExceeded, Denied, Draining, InvalidArgument, KvStoreError, Unreachable
from kvstore_wire.frames import END, HEADER, MAGIC, VERSION, Verb, head
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import channel_pb2 as channel
from tests.shards import keys, kv_spec, opaque_spec
from tests.unit.wire_script import (
    GENERATION,
    credit,
    feed,
    frame,
    frames_of,
    goodbye,
    got,
    greeted_wire,
    hello_answer,
    nothing,
    refused,
    scripted,
    sent_of,
)

KIB, MIB = 1 << 10, 1 << 20
SIZE = 3000
SPEC = kv_spec("wire", part_bytes=SIZE)
VALUES = [bytes((i + 1,)) * SIZE for i in range(3)]
GUARD = b"\xee" * 16
STEPS = [1, 7, 4096, 1 << 30]


class Reading:
    """A get of three blocks into buffers with guards around them."""

    def __init__(self, size: int = SIZE, *, opaque: bool = False) -> None:
        self.memory = bytearray((GUARD + b"\x11" * size) * 3 + GUARD)
        step = len(GUARD) + size
        self.rooms = [memoryview(self.memory)[len(GUARD) + i * step :][:size] for i in range(3)]
        spec = opaque_spec("wire", part_bytes=size) if opaque else kv_spec("wire", part_bytes=size)
        self.receiver = ChainReceiver(question(spec, keys(0, 3)), [[room] for room in self.rooms], Verify.ON)
        self.taker: Taker = _GetTaker(self.receiver)
        self.exchange: Exchange | None = None

    def begin(self, wire: Wire) -> int:
        self.exchange = wire.begin(Verb.GET, b"get", taker=self.taker, ended=nothing)
        sent_of(wire)
        return self.exchange.request

    @property
    def error(self) -> KvStoreError | None:
        assert self.exchange is not None
        assert self.exchange.done
        return self.exchange.error

    def check_guards(self) -> None:
        step = len(GUARD) + len(self.rooms[0])
        assert all(bytes(self.memory[i * step :][: len(GUARD)]) == GUARD for i in range(4))

    @property
    def is_untouched(self) -> bool:
        return all(bytes(room) == b"\x11" * len(room) for room in self.rooms)


class Putting:
    """A put of some bytes."""

    def __init__(self, wire: Wire, data: bytearray) -> None:
        self.taker = OneMessage()
        source = _PutSource(Outgoing([[memoryview(data)]], 1 << 20))
        self.exchange = wire.begin(Verb.PUT, b"put", taker=self.taker, ended=nothing, source=source.begin)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("frame_bytes", [1, 999, 3000, 1 << 20])
def test_payload_lands_however_it_is_cut(step: int, frame_bytes: int) -> None:
    wire, reading = greeted_wire(), Reading()
    if frame_bytes == 1 and step == 1:
        frame_bytes = 10
    feed(wire, got(reading.begin(wire), VALUES, frame_bytes=frame_bytes), step)
    assert reading.error is None
    reading.receiver.finish()
    assert [bytes(room) for room in reading.rooms] == VALUES
    reading.check_guards()
    assert wire.is_idle


def test_answers_of_several_requests_may_be_mixed() -> None:
    wire, first, second = greeted_wire(), Reading(), Reading()
    one, two = first.begin(wire), second.begin(wire)
    mixed = [got(one, VALUES), got(two, VALUES[::-1])]
    cut = [[head_ + message + payload for head_, message, payload in _rebuilt(raw)] for raw in mixed]
    feed(wire, b"".join(a + b for a, b in zip(*cut, strict=True)), 100)
    assert (first.error, second.error) == (None, None)
    assert [bytes(room) for room in first.rooms] == VALUES
    assert [bytes(room) for room in second.rooms] == VALUES[::-1]


def _rebuilt(raw: bytes) -> list[tuple[bytes, bytes, bytes]]:
    return [
        (HEADER.pack(MAGIC, VERSION, f.verb, f.flags, 0, f.request, 0, f.message_bytes, f.payload_bytes), m, p)
        for f, m, p in frames_of(raw)
    ]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("values", "states"),
    [
        ([*VALUES, b"more"], bytes((BlockState.HOT,) * 3)),  # More lengths than blocks.
        ([*VALUES[:2], b"x" * (SIZE + 1)], None),  # A part longer than the rule.
        ([*VALUES[:2], b"x" * (SIZE - 1)], None),
        (VALUES, bytes((BlockState.HOT,) * 4)),  # More states than keys.
        (VALUES, bytes((BlockState.HOT, 200, BlockState.HOT))),
        ([], bytes((BlockState.HOT,) * 3)),
    ],
)
def test_a_header_that_does_not_fit_writes_nothing(step: int, values: list[bytes], states: bytes | None) -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    feed(wire, got(request, values, states=states), step)
    assert isinstance(reading.error, MalformedAnswer)
    assert reading.is_untouched
    reading.check_guards()
    assert [f.verb for f, _, _ in frames_of(sent_of(wire))] == [Verb.CANCEL]
    _works(wire)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("extra", [1, 5000, 100_000])
def test_more_payload_than_was_announced_is_dropped(step: int, extra: int) -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    header = store.GetHeader(states=bytes((BlockState.HOT,) * 3), lengths=[SIZE] * 3, checksums=[1, 2, 3])
    raw = frame(Verb.GET, request, store.GetResponse(header=header), payload=b"".join(VALUES) + b"\xaa" * extra)
    feed(wire, raw, step)
    assert isinstance(reading.error, MalformedAnswer)
    reading.check_guards()
    sent_of(wire)
    _works(wire)


@pytest.mark.parametrize("cut", [0, 1, 2999, 8999])
def test_less_payload_than_was_announced_is_no_answer(cut: int) -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    header = store.GetHeader(states=bytes((BlockState.HOT,) * 3), lengths=[SIZE] * 3, checksums=[1, 2, 3])
    feed(wire, frame(Verb.GET, request, store.GetResponse(header=header), payload=b"".join(VALUES)[:cut]))
    with pytest.raises(MalformedAnswer):
        reading.receiver.finish()


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff",
        store.GetResponse(trailer=store.GetTrailer(checksums=[1])).SerializeToString(),
        store.GetResponse(data=b"x").SerializeToString(),
        b"",
    ],
)
def test_payload_without_a_header_lands_nowhere(message: bytes) -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    feed(wire, head(Verb.GET, request, message, flags=END, payload_bytes=9000) + b"\xaa" * 9000)
    assert isinstance(reading.error, MalformedAnswer)
    assert reading.is_untouched
    sent_of(wire)
    _works(wire)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, END]),
            st.one_of(st.none(), st.lists(st.integers(0, 1 << 40), max_size=5), st.binary(max_size=30)),
            st.integers(0, 12_000),
        ),
        max_size=5,
    ),
    st.sampled_from([1, 50, 4096, 1 << 30]),
    st.booleans(),
)
def test_whatever_comes_nothing_is_written_beside_the_buffers(
    script: list[tuple[int, list[int] | bytes | None, int]], step: int, opaque: bool
) -> None:
    wire, reading = greeted_wire(), Reading(opaque=opaque)
    request = reading.begin(wire)
    with suppress(MalformedAnswer):  # An answer that nobody waits for any more ends the connection.
        for flags, said, payload_bytes in script:
            if isinstance(said, list):
                header = store.GetHeader(states=bytes((BlockState.HOT,) * 3), lengths=said, checksums=said)
                message = store.GetResponse(header=header).SerializeToString()
            else:
                message = said or b""
            made = head(Verb.GET, request, message, flags=flags, payload_bytes=payload_bytes)
            feed(wire, made + b"\xaa" * payload_bytes, max(step, payload_bytes // 50))
    reading.check_guards()


def _works(wire: Wire) -> None:
    """A connection on which one answer was wrong serves the next request."""
    reading = Reading()
    feed(wire, got(reading.begin(wire), VALUES))
    assert reading.error is None
    assert [bytes(room) for room in reading.rooms] == VALUES
    assert wire.failure is None


# -- what ends a connection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        frame(Verb.GET, 99),
        frame(Verb.MATCH, 2),  # The request is a Get.
        frame(Verb.GET, 0),
        frame(Verb.CREDIT, 0)[:-1] + b"\x01",  # A length of the payload that is absurd.
        b"\x00" * 24,
        HEADER.pack(MAGIC, 9, Verb.GET, END, 0, 2, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, Verb.GET, 0x8000, 0, 2, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, Verb.GET, END, 1, 2, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, Verb.GET, END, 0, 2, 0, 0xFFFFFFFF, 0),
        HEADER.pack(MAGIC, VERSION, Verb.GET, END, 0, 2, 0, 0, 0xFFFFFFFF),
        head(Verb.CREDIT, 0, b"\xff", flags=END),
        head(Verb.GOODBYE, 0, b"\xff", flags=END),
    ],
)
def test_what_cannot_be_understood_ends_the_connection(raw: bytes) -> None:
    wire, reading = greeted_wire(), Reading()
    assert reading.begin(wire) == 2
    with pytest.raises((MalformedAnswer, InvalidArgument)):
        feed(wire, raw)
    assert reading.is_untouched


def test_a_goodbye_ends_every_exchange_and_lets_none_begin() -> None:
    wire, reading = greeted_wire(), Reading()
    reading.begin(wire)
    putting = Putting(wire, bytearray(10))
    feed(wire, goodbye(Draining("it closes")))
    assert isinstance(reading.error, Unreachable)
    assert isinstance(putting.exchange.error, Unreachable)
    assert "it closes" in str(wire.failure)
    with pytest.raises(Unreachable):
        wire.begin(Verb.MATCH, b"", taker=OneMessage(), ended=nothing)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (frame(Verb.HELLO, 1, hello_answer(credit_bytes=0)), MalformedAnswer),
        (frame(Verb.HELLO, 1, hello_answer(frame_bytes=0)), MalformedAnswer),
        (head(Verb.HELLO, 1, b"\xff", flags=END), MalformedAnswer),
        (refused(Verb.HELLO, 1, Denied("not you")), Denied),
        (goodbye(Denied("not you")), Unreachable),
    ],
)
def test_a_greeting_may_fail(raw: bytes, kind: type[KvStoreError]) -> None:
    wire = Wire()
    exchange = wire.hello(nothing)
    sent_of(wire)
    feed(wire, raw)
    with pytest.raises(kind):
        wire.greeted(exchange)


# -- credit -----------------------------------------------------------------------------------------------------------


def test_no_more_is_sent_than_was_granted() -> None:
    data = bytearray(b"\x05" * (300 * KIB))
    wire = greeted_wire(credit_bytes=100 * KIB, frame_bytes=64 * KIB)
    putting = Putting(wire, data)
    sent = sent_of(wire)
    assert wire.needs_credit
    assert sum(f.payload_bytes for f, _, _ in frames_of(sent)) == 128 * KIB, "a frame may begin while a byte is left"
    for _ in range(20):
        feed(wire, credit(30 * KIB))
        sent += sent_of(wire)
    made = frames_of(sent)
    assert b"".join(payload for _, _, payload in made) == data
    assert [f.flags for f, _, _ in made] == [0] * (len(made) - 1) + [END]
    assert all(f.payload_bytes <= 64 * KIB for f, _, _ in made)
    feed(wire, frame(Verb.PUT, putting.exchange.request, store.PutResponse(states=b"\x01")))
    assert putting.exchange.done
    assert wire.is_idle


def test_what_landed_is_granted_anew() -> None:
    wire, granted = greeted_wire(), 0
    size = 4 * MIB
    landed = 0
    while landed < OUR_CREDIT_BYTES:
        reading = Reading(size)
        feed(wire, got(reading.begin(wire), [b"x" * size] * 3, frame_bytes=size))
        landed += 3 * size
        for made, message, _ in frames_of(sent_of(wire)):
            assert made.verb == Verb.CREDIT
            granted += channel.Credit.FromString(message).bytes
    assert landed - OUR_CREDIT_BYTES // 4 <= granted <= landed


def test_puts_take_turns() -> None:
    wire = greeted_wire(credit_bytes=1 << 30, frame_bytes=1000)
    puts = [Putting(wire, bytearray(bytes((i,)) * 3000)) for i in range(2)]
    made = frames_of(sent_of(wire))
    assert [f.request for f, _, p in made if p] == [puts[i % 2].exchange.request for i in range(6)]


# -- giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_that_crosses_a_cancel_touches_nothing(step: int) -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    assert reading.exchange is not None
    wire.cancel(reading.exchange)
    wire.cancel(reading.exchange)
    (said,) = frames_of(sent_of(wire))
    assert (said[0].verb, said[0].request) == (Verb.CANCEL, request)
    feed(wire, got(request, VALUES), step)
    assert reading.is_untouched
    assert wire.is_idle
    _works(wire)


@pytest.mark.parametrize("before", [30, 700, 5000, 9000])
def test_a_cancel_within_the_payload_stops_it_landing(before: int) -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    raw = got(request, VALUES, frame_bytes=20_000)
    feed(wire, raw[:before])
    assert reading.exchange is not None
    wire.cancel(reading.exchange)
    for room in reading.rooms:
        room[:] = b"\x11" * SIZE
    feed(wire, raw[before:])
    assert reading.is_untouched
    sent_of(wire)
    assert wire.is_idle
    _works(wire)


def test_a_request_is_forgotten_only_when_its_end_has_come() -> None:
    wire, reading = greeted_wire(), Reading()
    request = reading.begin(wire)
    assert reading.exchange is not None
    wire.cancel(reading.exchange)
    sent_of(wire)
    assert not wire.is_idle
    feed(wire, refused(Verb.GET, request, DeadlineExceeded("the caller cancelled it")))
    assert wire.is_idle


@pytest.mark.parametrize("sent_bytes", [10, 100, 40_000])
def test_a_put_given_up_within_a_frame_finishes_it_from_memory_of_its_own(sent_bytes: int) -> None:
    wire = greeted_wire(frame_bytes=64 * KIB)
    data = bytearray(b"\x05" * (200 * KIB))
    putting = Putting(wire, data)
    sent = sent_of(wire, sent_bytes)
    wire.cancel(putting.exchange)
    data[:] = b"\x06" * len(data)  # It is the caller's again.
    made = frames_of(sent + sent_of(wire))
    assert [f.verb for f, _, _ in made][-1] == Verb.CANCEL
    assert b"\x06" not in b"".join(payload for _, _, payload in made)
    assert sum(f.payload_bytes for f, _, _ in made) in (0, 64 * KIB)
    feed(wire, refused(Verb.PUT, putting.exchange.request, DeadlineExceeded("the caller cancelled it")))
    assert wire.is_idle
    _works(wire)


def test_an_error_in_the_middle_of_a_put_ends_it() -> None:
    wire = greeted_wire(credit_bytes=64 * KIB, frame_bytes=64 * KIB)
    putting = Putting(wire, bytearray(200 * KIB))
    sent_of(wire)
    feed(wire, refused(Verb.PUT, putting.exchange.request, Draining("no more")))
    assert putting.exchange.done
    assert isinstance(putting.exchange.error, Draining)
    assert [f.verb for f, _, _ in frames_of(sent_of(wire))] == [Verb.CANCEL]
    feed(wire, credit(1 << 20))
    assert sent_of(wire) == b""
    assert wire.is_idle
    _works(wire)


def test_a_lease_that_comes_too_late_is_told() -> None:
    wire, late = greeted_wire(), list[bytes]()
    exchange = wire.begin(Verb.ACQUIRE, b"", taker=_Leasing(late.append), ended=nothing)
    wire.cancel(exchange)
    sent_of(wire)
    answer = store.AcquireResponse(states=b"\x01", settled=True)
    feed(wire, frame(Verb.ACQUIRE, exchange.request, answer))
    assert late == [answer.SerializeToString()]


# -- over sockets -----------------------------------------------------------------------------------------------------


def _deadline() -> Deadline:
    return Deadline.after(150)


def _silent(peer: socket.socket) -> None:
    while peer.recv(65536):
        pass


def _dripping(peer: socket.socket) -> None:
    """Sends an answer so slowly that each byte alone is in time."""
    raw = got(2, [b"x" * SIZE] * 3)
    for byte in raw:
        peer.sendall(bytes((byte,)))
        time.sleep(0.02)


def _part_by_part(peer: socket.socket) -> None:
    """Sends an answer so slowly that each part alone is in time."""
    request = HEADER.unpack_from(peer.recv(65536))[5]
    raw = got(request, VALUES, frame_bytes=3 * SIZE)
    with suppress(OSError):  # The other side does not wait for all.
        peer.sendall(raw[: -3 * SIZE])
        for value in VALUES:
            time.sleep(0.1)
            peer.sendall(value)


def _garbage(peer: socket.socket) -> None:
    peer.recv(65536)
    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
    _silent(peer)


def _unasked(peer: socket.socket) -> None:
    peer.recv(65536)
    peer.sendall(frame(Verb.GET, 1234))
    _silent(peer)


def _leaving(peer: socket.socket) -> None:
    peer.recv(65536)
    peer.sendall(goodbye(Draining("it closes")))


def _hanging_up(peer: socket.socket) -> None:
    peer.recv(65536)
    peer.sendall(got(2, [b"x" * SIZE] * 3)[:4000])


SCRIPTS = [
    (_silent, DeadlineExceeded),
    (_dripping, DeadlineExceeded),
    (_part_by_part, DeadlineExceeded),
    (_garbage, PathDown),
    (_unasked, PathDown),
    (_leaving, PathDown),
    (_hanging_up, PathDown),
]


@pytest.mark.parametrize(("script", "kind"), SCRIPTS)
def test_a_blocking_call_ends_in_time(script: Callable[[socket.socket], None], kind: type[KvStoreError]) -> None:
    reading, began_s = Reading(), time.monotonic()
    with scripted(script) as dialed:
        lane = BlockingLane(dialed)
        with pytest.raises(kind):
            lane.exchange(Verb.GET, b"", taker=reading.taker, deadline=_deadline())
        assert not lane.is_fit
        lane.close()
    assert time.monotonic() - began_s < 2  # Far above 150 ms for a busy machine, far below a hang.
    reading.check_guards()


@pytest.mark.parametrize(("script", "kind"), SCRIPTS)
async def test_an_awaited_call_ends_in_time(script: Callable[[socket.socket], None], kind: type[KvStoreError]) -> None:
    reading, began_s = Reading(), time.monotonic()
    with scripted(script) as dialed:
        lane = AsyncLane(dialed)
        with pytest.raises(kind):
            await lane.exchange(Verb.GET, b"", taker=reading.taker, deadline=_deadline())
        assert lane.broken is (kind is PathDown)
        lane.close()
        with pytest.raises(PathDown):
            await lane.exchange(Verb.GET, b"", taker=Reading().taker, deadline=_deadline())
    assert time.monotonic() - began_s < 2
    reading.check_guards()


def test_payload_taken_part_by_part_ends_in_time() -> None:
    with scripted(_part_by_part) as dialed:
        lane, deadline = BlockingLane(dialed), _deadline()
        answer = lane.ask(Verb.GET, b"get", deadline)
        assert answer is not None
        assert answer.left == 3 * SIZE
        landed: list[int] = []

        def take_all() -> None:
            for _ in range(3):
                lane.take(memoryview(bytearray(SIZE)), deadline, lambda piece: landed.append(len(piece)))

        with pytest.raises(DeadlineExceeded):
            take_all()
        assert sum(landed) < 3 * SIZE
        lane.close()


async def test_a_fault_within_a_callback_ends_the_connection_once(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(OneMessage):
        def message(self, raw: bytes) -> None:
            raise ValueError("a fault")

    def answers(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(frame(Verb.MATCH, 2, store.MatchResponse(states=b"\x01")))
        _silent(peer)

    with scripted(answers) as dialed:
        lane = AsyncLane(dialed)
        with pytest.raises(PathDown, match="a fault"):
            await lane.exchange(Verb.MATCH, b"", taker=Faulty(), deadline=Deadline.after(5000))
        assert lane.broken
    assert len(caplog.records) == 1


async def test_a_cancelled_put_does_not_take_others_along() -> None:
    """One connection: a put whose frame is half sent is cancelled, a get beside it is answered all the same."""
    taken = list[bytes]()

    def slow(peer: socket.socket) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        time.sleep(0.1)
        while data := peer.recv(1 << 20):
            taken.append(data)
            if any(f.verb == Verb.GET for f, _, _ in frames_of(b"".join(taken), cut_bytes=8 * MIB)):
                peer.sendall(got(3, VALUES))

    data, reading = bytearray(b"\x05" * (4 * MIB)), Reading()
    with scripted(slow, greeted_wire(credit_bytes=1 << 30, frame_bytes=1 << 20)) as dialed:
        lane = AsyncLane(dialed)
        source = _PutSource(Outgoing([[memoryview(data)]], 1 << 20))
        put = asyncio.ensure_future(
            lane.exchange(Verb.PUT, b"", taker=OneMessage(), deadline=Deadline.after(5000), source=source.begin)
        )
        await asyncio.sleep(0.02)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        data[:] = b"\x06" * len(data)
        await lane.exchange(Verb.GET, b"", taker=reading.taker, deadline=Deadline.after(5000))
        assert [bytes(room) for room in reading.rooms] == VALUES
        lane.close()
    assert b"\x06" not in b"".join(taken)


@pytest.mark.parametrize("delay_s", [0.05, 10.0])
def test_greetings_end_in_time_too(tmp_path: object, delay_s: float) -> None:
    """A shard that accepts and greets byte by byte, or not at all."""
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        began_s = time.monotonic()
        if delay_s < 1:

            def drip() -> None:
                peer, _ = listening.accept()
                with peer:
                    for byte in frame(Verb.HELLO, 1, hello_answer()):
                        time.sleep(delay_s)
                        try:
                            peer.sendall(bytes((byte,)))
                        except OSError:
                            return

            threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(DeadlineExceeded):  # The caller's hurry, and no fault of the shard's.
            dial(Endpoint("shm", path=path), GENERATION, Deadline.after(200))
        assert time.monotonic() - began_s < 1.5


def test_a_put_whose_source_is_slow_sends_what_came_before_first() -> None:
    class Slow:
        is_slow = True
        asked = 0

        def begin(self, frame_bytes: int) -> Slow:
            return self

        def __next__(self) -> Piece:
            self.asked += 1
            return [], 0, b"trailer", True

    wire, slow = greeted_wire(), Slow()
    wire.begin(Verb.PUT, b"header", taker=OneMessage(), ended=nothing, source=slow.begin)
    buffers = wire.pending()
    assert slow.asked == 0
    wire.sent(sum(map(len, buffers)))
    assert [m for _, m, _ in frames_of(sent_of(wire))] == [b"trailer"]
    assert slow.asked == 1
