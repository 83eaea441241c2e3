"""The fast channel over TCP within a host, as the kernel sees its sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

from kvstore_client import Client
from kvstore_wire.pacing import UNPACED
from tests.integration.client_cases import keys, kv_spec
from tests.integration.transport_scene import options_of, sharded


def connections_of(port: int) -> Iterator[tuple[bool, bytes]]:
    """Of this process's connections with a port at an end: whether it is the near one, and the congestion control."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ends = sock.getsockname()[1], sock.getpeername()[1]
            if port in ends:
                yield port == ends[0], sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_neither_end_of_a_connection_within_the_host_is_paced() -> None:
    with sharded() as shard:
        with Client(options_of(shard.target, "bulk")) as client:
            assert client.namespace(kv_spec()).match(keys(1)).failure is None
            found = set(connections_of(int(shard.bulk.rpartition(":")[2])))
        assert found == {(True, UNPACED), (False, UNPACED)}
