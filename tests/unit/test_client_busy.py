"""Looking for an answer: what is there is taken, what is late is slept for, and short sleeps make it look again."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from kvstore_client.fast.busy import _MISSES, _SHORT_SLEEPS, FILL_BYTES, BusyPoll

MOST_S = 0.002
PATIENT_S = 30.0  # Longer than any wait here: what ends sooner was not waited for.

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on an only CPU it never looks")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection's own end, which blocks, and the peer's."""
    own, peer = socket.socketpair()
    with own, peer:
        yield own, peer


@pytest.fixture
def own(pair: tuple[socket.socket, socket.socket]) -> socket.socket:
    return pair[0]


@pytest.fixture
def peer(pair: tuple[socket.socket, socket.socket]) -> socket.socket:
    return pair[1]


def _buffer(size_bytes: int = 64) -> memoryview:
    return memoryview(bytearray(size_bytes))


def _miss(poll: BusyPoll, own: socket.socket, times: int) -> None:
    for _ in range(times):
        assert poll.receive(own, _buffer()) == -1


def _hit(poll: BusyPoll, own: socket.socket, peer: socket.socket) -> None:
    peer.send(b"x")
    assert poll.receive(own, _buffer()) == 1


def _turned_off(own: socket.socket) -> BusyPoll:
    poll = BusyPoll(MOST_S)
    _miss(poll, own, _MISSES)
    assert not poll.is_on
    return poll


def _sleep(poll: BusyPoll, times: int, seconds: float = MOST_S / 2) -> None:
    for _ in range(times):
        poll.slept(seconds)


# -- one answer ----------------------------------------------------------------------------------------------------


def test_what_is_there_is_received_at_once(own: socket.socket, peer: socket.socket) -> None:
    poll, view = BusyPoll(PATIENT_S), _buffer()
    peer.send(b"answer")
    assert poll.receive(own, view) == 6
    assert bytes(view) == b"answer".ljust(64, b"\0")
    assert poll.is_on


def test_no_more_than_the_view_is_taken(own: socket.socket, peer: socket.socket) -> None:
    poll, all_of_it = BusyPoll(PATIENT_S), _buffer(8)
    peer.send(b"answer")
    assert poll.receive(own, all_of_it[2:5]) == 3
    assert bytes(all_of_it) == b"\0\0ans\0\0\0"
    assert poll.receive(own, all_of_it) == 3


def test_what_comes_while_it_looks_is_received(own: socket.socket, peer: socket.socket) -> None:
    sender = threading.Timer(0.005, peer.send, [b"late"])
    sender.start()
    try:
        assert BusyPoll(PATIENT_S).receive(own, _buffer()) == 4
    finally:
        sender.join()


def test_nothing_within_the_time_is_minus_one(own: socket.socket) -> None:
    poll = BusyPoll(MOST_S)
    assert poll.receive(own, _buffer()) == -1
    assert poll.is_on


def test_the_end_of_the_stream_is_no_bytes(own: socket.socket, peer: socket.socket) -> None:
    poll = BusyPoll(PATIENT_S)
    peer.send(b"last")
    peer.close()
    assert [poll.receive(own, _buffer()) for _ in range(3)] == [4, 0, 0]


def test_errors_pass(own: socket.socket, peer: socket.socket) -> None:
    poll = BusyPoll(PATIENT_S)
    own.send(b"never read")
    peer.close()
    with pytest.raises(ConnectionResetError):
        poll.receive(own, _buffer())
    own.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        poll.receive(own, _buffer())
    with pytest.raises(OSError, match="Bad file descriptor"):
        poll.fill(own, _buffer())


def test_a_broken_connection_fails_a_fill(own: socket.socket, peer: socket.socket) -> None:
    own.send(b"never read")
    peer.close()
    with pytest.raises(ConnectionResetError):
        BusyPoll(PATIENT_S).fill(own, _buffer())


# -- off and on again ----------------------------------------------------------------------------------------------


def test_so_many_late_answers_turn_it_off(own: socket.socket) -> None:
    poll = BusyPoll(MOST_S)
    _miss(poll, own, _MISSES - 1)
    assert poll.is_on
    _miss(poll, own, 1)
    assert not poll.is_on


def test_an_answer_in_time_starts_the_count_of_late_ones_anew(own: socket.socket, peer: socket.socket) -> None:
    poll = BusyPoll(MOST_S)
    for _ in range(3):
        _miss(poll, own, _MISSES - 1)
        _hit(poll, own, peer)
    assert poll.is_on
    _miss(poll, own, _MISSES)
    assert not poll.is_on


def test_so_many_short_sleeps_turn_it_on_again(own: socket.socket) -> None:
    poll = _turned_off(own)
    _sleep(poll, _SHORT_SLEEPS - 1)
    assert not poll.is_on
    _sleep(poll, 1)
    assert poll.is_on


@pytest.mark.parametrize("long_s", [MOST_S, 1.0])
def test_a_long_sleep_starts_the_count_of_short_ones_anew(own: socket.socket, long_s: float) -> None:
    poll = _turned_off(own)
    _sleep(poll, _SHORT_SLEEPS - 1)
    _sleep(poll, 1, long_s)
    _sleep(poll, _SHORT_SLEEPS - 1)
    assert not poll.is_on
    _sleep(poll, 1)
    assert poll.is_on


def test_on_again_it_takes_as_many_late_answers_to_turn_it_off(own: socket.socket) -> None:
    poll = _turned_off(own)
    _sleep(poll, _SHORT_SLEEPS)
    _miss(poll, own, _MISSES - 1)
    assert poll.is_on
    _miss(poll, own, 1)
    assert not poll.is_on
    _sleep(poll, _SHORT_SLEEPS - 1)
    assert not poll.is_on
    _sleep(poll, 1)
    assert poll.is_on


def test_sleeps_while_it_is_on_count_for_nothing(own: socket.socket) -> None:
    poll = BusyPoll(MOST_S)
    _miss(poll, own, _MISSES - 1)
    _sleep(poll, _SHORT_SLEEPS)
    _miss(poll, own, 1)
    assert not poll.is_on
    _sleep(poll, _SHORT_SLEEPS - 1)
    assert not poll.is_on


def test_no_time_to_look_is_never() -> None:
    poll = BusyPoll(0.0)
    assert not poll.is_on
    _sleep(poll, 4 * _SHORT_SLEEPS, 0.0)
    assert not poll.is_on


def test_on_an_only_cpu_it_never_looks() -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        poll = BusyPoll(MOST_S)
    finally:
        os.sched_setaffinity(0, cpus)
    assert not poll.is_on
    _sleep(poll, 4 * _SHORT_SLEEPS, 0.0)
    assert not poll.is_on


# -- payload -------------------------------------------------------------------------------------------------------


def test_a_fill_gathers_several_sends(own: socket.socket, peer: socket.socket) -> None:
    view = _buffer()
    for piece in (b"one ", b"two ", b"three"):
        peer.send(piece)
    assert BusyPoll(MOST_S).fill(own, view) == 13
    assert bytes(view[:13]) == b"one two three"


def test_a_fill_waits_for_the_rest_of_a_view(own: socket.socket, peer: socket.socket) -> None:
    def send() -> None:
        for byte in b"payload":
            peer.send(bytes((byte,)))

    view, sender = _buffer(7), threading.Timer(0.002, send)
    sender.start()
    try:
        assert BusyPoll(PATIENT_S).fill(own, view) == 7
    finally:
        sender.join()
    assert bytes(view) == b"payload"


def test_a_fill_never_writes_past_the_view(own: socket.socket, peer: socket.socket) -> None:
    around, rest = _buffer(10), _buffer()
    for piece in (b"abc", b"def", b"ghi"):
        peer.send(piece)
    assert BusyPoll(PATIENT_S).fill(own, around[2:6]) == 4
    assert bytes(around) == b"\0\0abcd\0\0\0\0"
    assert BusyPoll(MOST_S).fill(own, rest) == 5
    assert bytes(rest[:5]) == b"efghi"


def test_a_fill_ends_with_what_is_worth_hashing_at_once(own: socket.socket, peer: socket.socket) -> None:
    sent = os.urandom(3 * FILL_BYTES)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FILL_BYTES // 8)
    view, sender = _buffer(len(sent)), threading.Thread(target=peer.sendall, args=(sent,))
    sender.start()
    try:
        came = BusyPoll(PATIENT_S).fill(own, view)
        assert came == FILL_BYTES
        assert view[:came] == sent[:came]
        assert not any(view[came:])
        while came < len(sent):
            came += own.recv_into(view[came:])
    finally:
        own.close()
        sender.join()
    assert view == sent


def test_a_fill_where_nothing_comes_is_no_bytes(own: socket.socket) -> None:
    poll = BusyPoll(MOST_S)
    assert [poll.fill(own, _buffer()) for _ in range(2 * _MISSES)] == [0] * 2 * _MISSES
    assert poll.is_on  # Only the beginnings of answers count.


def test_a_fill_of_nothing_takes_nothing(own: socket.socket, peer: socket.socket) -> None:
    peer.send(b"x")
    assert BusyPoll(PATIENT_S).fill(own, _buffer(0)) == 0
    assert own.recv(2) == b"x"


def test_a_fill_leaves_the_end_of_the_stream_to_the_next_receive(own: socket.socket, peer: socket.socket) -> None:
    poll = BusyPoll(PATIENT_S)
    peer.send(b"la")
    peer.send(b"st")
    peer.close()
    assert poll.fill(own, _buffer()) == 4
    assert poll.fill(own, _buffer()) == 0
    assert poll.receive(own, _buffer()) == 0
    assert own.recv(1) == b""
