"""A shard of its own for a test: a real `kvstore serve` process on free ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.replay.own_server import OwnServer, own_server

FLAGS = [
    "--server.listen",
    "127.0.0.1:0",
    "--server.admin_listen",
    "127.0.0.1:0",
    "--bulk.listen",
    "127.0.0.1:0",
    "--server.drain_timeout",
    "0s",
]


@contextmanager
def shard(capacity: str = "16MiB") -> Iterator[OwnServer]:
    """Runs a shard until left."""
    with own_server([*FLAGS, "--hot.capacity", capacity]) as server:
        yield server


def closed_address() -> str:
    """Returns an address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
