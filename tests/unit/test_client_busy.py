"""Looking for an answer before sleeping: what it receives, and when it stops looking."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvstore_client.fast.busy import FILL_BYTES, BusyPoll

LATE, SHORT = 4, 8  # Answers that turn it off, and on again.
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU nothing is looked for")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, peer = socket.socketpair()
    yield own, peer
    own.close()
    peer.close()


def room(size: int = 100) -> memoryview:
    return memoryview(bytearray(size))


@needs_two_cpus
def test_what_is_there_is_received(pair: tuple[socket.socket, socket.socket]) -> None:
    own, peer = pair
    view = room()
    peer.sendall(b"answer")
    assert BusyPoll(0.001).receive(own, view) == 6
    assert bytes(view[:6]) == b"answer"


@needs_two_cpus
def test_the_end_of_the_stream_is_no_miss(pair: tuple[socket.socket, socket.socket]) -> None:
    own, peer = pair
    peer.close()
    assert BusyPoll(0.001).receive(own, room()) == 0


@needs_two_cpus
def test_it_stops_where_answers_are_late_and_goes_on_where_they_would_be_in_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    own, peer = pair
    poll = BusyPoll(0.001)
    for _ in range(LATE - 1):
        assert poll.receive(own, room()) == -1
    peer.sendall(b"x")
    assert poll.receive(own, room()) == 1, "one in time: the late ones are counted anew"
    for _ in range(LATE):
        assert poll.is_on
        assert poll.receive(own, room()) == -1
    assert not poll.is_on
    for _ in range(SHORT - 1):
        poll.slept(0.0001)
    poll.slept(0.5)
    for _ in range(SHORT):
        assert not poll.is_on
        poll.slept(0.0001)
    assert poll.is_on


def test_no_time_is_no_looking() -> None:
    poll = BusyPoll(0.0)
    for _ in range(2 * SHORT):
        poll.slept(0.0)
    assert not poll.is_on


@needs_two_cpus
def test_pieces_are_gathered_up_to_what_is_worth_hashing(pair: tuple[socket.socket, socket.socket]) -> None:
    own, peer = pair
    poll, view = BusyPoll(0.001), room(FILL_BYTES + 10)
    assert poll.fill(own, view) == 0
    peer.sendall(b"ab")
    peer.sendall(b"cd")
    assert poll.fill(own, view) == 4
    assert bytes(view[:5]) == b"abcd\0"
    peer.sendall(b"efgh")
    assert poll.fill(own, view[4:7]) == 3, "not a byte beyond the room"
    assert bytes(view[4:8]) == b"efg\0"
    peer.close()
    assert poll.fill(own, view) == 1
    assert poll.fill(own, view) == 0, "the end is left to who receives next"
    assert own.recv(1) == b""
