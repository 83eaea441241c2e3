"""A shard that moves to another address under its name, and a client that stays idle for long."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore_client import AsyncClient, ClientOptions
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.client_shard import ShardProcess

pytestmark = pytest.mark.integration
FOUND_S = 15.0
IDLE_S = 180.0
NAME = "shard.test"


class NameServer:
    """Answers every A query with one address, and says that it may not be kept."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, peer = self._socket.recvfrom(512)
                self._socket.sendto(self._answer(query), peer)
            except OSError:
                return

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", 12) + 5  # Header, name, type and class of the one question.
        is_a = query[end - 4 : end - 2] == b"\0\1"
        header = query[:2] + struct.pack(">HHHHH", 0x8180, 1, int(is_a), 0, 0)
        record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(self.address)
        return header + query[12:end] + (record if is_a else b"")


@pytest.fixture
def names() -> Iterator[NameServer]:
    made = NameServer("127.0.0.2")
    yield made
    made.close()


async def test_a_shard_that_moved_is_found_under_its_name(names: NameServer) -> None:
    first, second = ShardProcess(host="127.0.0.2").start(), None
    options = ClientOptions(f"{NAME}:{first.port}", default_deadline_ms=1000)
    # A name server of our own, by gRPC's spelling; operators give plain names.
    object.__setattr__(options, "target", f"dns://127.0.0.1:{names.port}/{NAME}:{first.port}")
    try:
        async with AsyncClient(options) as client:
            ns = client.namespace(kv_spec("n", part_bytes=1000))
            assert (await ns.put(keys(1, "a"), [value(1, 1000)])).ok
            first.kill()
            names.address = "127.0.0.3"
            second = ShardProcess(host="127.0.0.3", port=first.port).start()
            end = time.monotonic() + FOUND_S
            while not (stored := await ns.put(keys(1, "b"), [value(2, 1000)])).ok:
                assert time.monotonic() < end, stored.failure
                await asyncio.sleep(0.2)
            assert (await ns.match(keys(1, "b"))).prefix_blocks == 1
            assert (await ns.match(keys(1, "a"))).prefix_blocks == 0, "the old shard is gone, and its blocks with it"
    finally:
        first.kill()
        if second is not None:
            second.kill()


@pytest.mark.soak
async def test_an_idle_client_that_pings_as_often_as_it_may_is_not_dropped() -> None:
    shard = ShardProcess().start()
    try:
        async with AsyncClient(ClientOptions(shard.target, keepalive_ms=10_000)) as client:
            ns = client.namespace(kv_spec("n", part_bytes=1000))
            assert (await ns.put(keys(1, "a"), [value(1, 1000)])).ok
            attached = client.stats().reattaches
            await asyncio.sleep(IDLE_S)
            got = await ns.get(keys(1, "a"))
            assert (got.prefix_blocks, got.failure) == (1, None)
            assert client.stats().reattaches == attached, "the session did not live through the idle time"
    finally:
        shard.kill()
