"""The frames of Gets: each whole, in turn, and no byte of one whose lease has ended."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvstore.service.framed.outbox import GetAnswer, Outbox
from kvstore.service.outgoing import Reading
from kvstore_wire.errors import KvStoreError, LeaseExpired
from kvstore_wire.frames import END, ERROR, Frame, FrameReader
from kvstore_wire.v1 import block_store_pb2 as pb

FRAME = 1 << 20
SIZE = 10 * FRAME + 17


class _Bytes:
    """A reading of bytes that are `1` until its lease ends, and `2` from then on."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(b"\x01") * size
        self.header, self.trailer = pb.GetHeader(states=b"\x01", lengths=[size]), None
        self.left_bytes, self.alive, self.closed = size, True, 0

    def take(self, most: int) -> tuple[list[memoryview], int]:
        self.check()
        at, size = len(self.memory) - self.left_bytes, min(most, self.left_bytes)
        self.left_bytes -= size
        return [memoryview(self.memory)[at : at + size]], size

    def check(self) -> None:
        if not self.alive:
            raise LeaseExpired("ended", field="lease")

    def close(self) -> None:
        self.closed += 1

    def end(self) -> None:
        self.alive = False
        self.memory[:] = b"\x02" * len(self.memory)


class _Got:
    """What a peer makes of the bytes that were sent."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.payload: dict[int, bytearray] = {}
        self._reader = FrameReader(self, max_message_bytes=1 << 20, max_payload_bytes=4 << 20)
        self._room = memoryview(b"")
        self._request = 0

    def frame(self, frame: Frame, message: memoryview) -> _Got:
        self.frames.append(frame)
        self._request = frame.request
        return self

    def payload_landed(self, frame: Frame) -> None:
        return

    def room(self, most: int) -> memoryview:
        self._room = memoryview(bytearray(most))
        return self._room

    def landed(self, size: int) -> None:
        self.payload.setdefault(self._request, bytearray()).extend(self._room[:size])

    def take(self, piece: bytes) -> None:
        at = 0
        while at < len(piece):
            view = self._reader.wanted()
            size = min(len(view), len(piece) - at)
            view[:size] = piece[at : at + size]
            at += size
            self._reader.landed(size)


class _Peer:
    """An outbox and whoever takes what it sends."""

    def __init__(self, credit: int = 1 << 30) -> None:
        self.outbox, self.got = Outbox(frame_bytes=FRAME), _Got()
        self.outbox.credit = credit

    def ask(self, request: int, size: int) -> tuple[GetAnswer, _Bytes]:
        reading = _Bytes(size)
        answer = GetAnswer(request, cast(Reading, cast(Any, reading)), may_go=lambda _: True, ended=lambda: None)
        self.outbox.add_answer(answer)
        return answer, reading

    def send(self, most: int) -> int:
        """Sends up to so many bytes of what is pending now; returns how many were."""
        piece = b"".join(self.outbox.pending())[:most]
        self.outbox.sent(len(piece))
        self.got.take(piece)
        return len(piece)


def test_an_answer_comes_frame_by_frame() -> None:
    peer = _Peer()
    answer, reading = peer.ask(1, SIZE)
    sizes = []
    while size := peer.send(1 << 40):
        sizes.append(size)
    assert len(sizes) == 11
    assert peer.got.payload[1] == reading.memory
    assert [frame.flags for frame in peer.got.frames] == [0] * 10 + [END]
    assert (answer.done, reading.closed, peer.outbox.is_empty) == (True, 1, True)


def test_two_answers_take_turns_frame_by_frame() -> None:
    peer = _Peer()
    peer.ask(1, SIZE)
    peer.ask(2, SIZE)
    while peer.send(1 << 40):
        pass
    assert [frame.request for frame in peer.got.frames] == [1, 2] * 11


def test_no_more_is_made_than_there_is_credit_for() -> None:
    peer = _Peer(credit=FRAME + 5)
    _, reading = peer.ask(1, SIZE)
    while peer.send(1 << 40):
        pass
    assert (len(peer.got.payload[1]), peer.outbox.credit) == (FRAME + 5, 0)
    peer.outbox.credit += 1 << 30
    while peer.send(1 << 40):
        pass
    assert peer.got.payload[1] == reading.memory


@pytest.mark.parametrize("sent", [1, 100, FRAME, FRAME + 100, 3 * FRAME, 4 * FRAME, 7 * FRAME])
def test_nothing_is_sent_of_what_a_lease_has_ended_for(sent: int) -> None:
    peer = _Peer()
    _, reading = peer.ask(1, SIZE)
    left = sent
    while left:
        left -= peer.send(left)
    came = len(peer.got.payload.get(1, b""))
    reading.end()
    while peer.send(1 << 20):
        pass
    assert not peer.outbox.broken, "the frame that ends it was not made yet"
    got = peer.got.payload[1]
    assert got[:came] == b"\x01" * came
    assert not any(got[came:])
    assert peer.got.frames[-1].flags == ERROR


def test_where_the_last_frame_is_made_only_a_cut_tells_of_an_ended_lease() -> None:
    peer = _Peer()
    _, reading = peer.ask(1, FRAME)
    peer.send(100)
    reading.end()
    peer.outbox.pending()
    assert peer.outbox.broken


def test_a_dropped_answer_ends_with_zeros() -> None:
    peer = _Peer()
    answer, reading = peer.ask(1, FRAME)
    peer.send(FRAME // 2)
    came = len(peer.got.payload[1])
    peer.outbox.drop_answer(answer)
    reading.end()
    while peer.send(1 << 20):
        pass
    assert not peer.outbox.broken
    got = peer.got.payload[1]
    assert (len(got), any(got[came:])) == (FRAME, False)


def test_a_fault_ends_an_answer_after_what_was_made() -> None:
    peer = _Peer()
    answer, _ = peer.ask(1, SIZE)
    peer.send(100)
    answer.fault = KvStoreError("told to fail")
    while peer.send(1 << 40):
        pass
    assert [frame.flags for frame in peer.got.frames] == [0, ERROR]
