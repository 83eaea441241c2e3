"""Congestion control of TCP within a host, on real sockets."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from kvstore_wire.pacing import UNPACED, unpace_within_host


class _Elsewhere:
    """A socket whose peer is another host; nothing may be set on it."""

    def __init__(self, own: str, peer: str) -> None:
        self._own, self._peer = own, peer
        self.family = socket.AF_INET6 if ":" in own else socket.AF_INET

    def getsockname(self) -> tuple[str, int]:
        return self._own, 1

    def getpeername(self) -> tuple[str, int]:
        return self._peer, 2

    def setsockopt(self, *_: object) -> None:
        raise AssertionError("the congestion control of a path is the operator's choice")


class _Local(_Elsewhere):
    """A socket whose peer is this host; it notes what was set."""

    def __init__(self, own: str, peer: str) -> None:
        super().__init__(own, peer)
        self.set: list[object] = []

    def setsockopt(self, *option: object) -> None:
        self.set.append(option)


def congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_both_ends_of_a_connection_within_the_host_are_not_paced(address: str) -> None:
    listener = socket.create_server((address, 0))
    with listener, socket.create_connection(listener.getsockname()[:2]) as client, listener.accept()[0] as served:
        assert unpace_within_host(client)
        assert unpace_within_host(served)
        assert congestion(client) == congestion(served) == UNPACED


@pytest.mark.parametrize(
    ("own", "peer"),
    [("10.0.0.1", "10.0.0.2"), ("fe80::1%eth0", "fe80::2%eth0"), ("::ffff:10.0.0.1", "::ffff:10.0.0.2")],
)
def test_a_connection_to_another_host_is_left_alone(own: str, peer: str) -> None:
    assert not unpace_within_host(cast(socket.socket, _Elsewhere(own, peer)))


@pytest.mark.parametrize(
    ("own", "peer"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:127.0.0.1", "::ffff:127.0.0.2"), ("127.0.0.1", "127.0.0.9"), ("::1", "::1")],
)
def test_a_host_that_speaks_to_itself_is_known_by_its_addresses(own: str, peer: str) -> None:
    sock = _Local(own, peer)
    assert unpace_within_host(cast(socket.socket, sock))
    assert sock.set == [(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)]


def test_a_socket_that_is_gone_or_of_another_kind_is_left_as_it_is() -> None:
    closed = socket.socket()
    assert not unpace_within_host(closed)  # Not connected.
    closed.close()
    assert not unpace_within_host(closed)
    here, there = socket.socketpair()
    with here, there:
        assert not unpace_within_host(here)
