"""The fast channel over TLS: the same frames, and nothing for those who do not speak it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import pytest

from kvstore_wire.errors import DeadlineExceeded
from kvstore_wire.frames import END, Verb, head
from kvstore_wire.v1 import channel_pb2 as channel
from tests.certificates import HOST, Authority, tls_flags
from tests.contract.caller import COMMITTED, HOT, Caller, value
from tests.contract.doors import FramedDoor
from tests.integration.raw_peer import connected
from tests.integration.server_process import serve_here, until
from tests.shards import keys, kv_spec

pytestmark = pytest.mark.integration

MIB = 1 << 20
SPEC = kv_spec("tls", part_bytes=MIB)
FLAGS = {"hot.capacity": "64MiB", "hot.page": "1MiB", "limits.max_part": "1MiB", "bulk.stall_timeout": "500ms"}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.ca.decode())


async def test_large_values_go_both_ways_in_many_requests_at_once(tmp_path: Path) -> None:
    authority = Authority()
    async with serve_here({**FLAGS, **tls_flags(tmp_path, authority.pair(HOST))}) as local:
        door = FramedDoor(local.channel[0], local.admin_target, trusting(authority))
        caller = await Caller.open(door, SPEC)
        values = [value(i, MIB) for i in range(16)]
        puts = [caller.put(keys(i, i + 4), values[i : i + 4]) for i in range(0, 16, 4)]
        assert await asyncio.gather(*puts) == [[COMMITTED] * 4] * 4
        assert await caller.match(keys(0, 16)) == [HOT] * 16
        for i in range(0, 16, 4):
            assert (await caller.get(keys(i, i + 4))).parts == values[i : i + 4]
        assert (await caller.get(keys(0, 16))).parts == values
        await caller.close()
        await door.close()
        await until(lambda: local.server.channel.connection_count == 0, "a connection is left")
        await local.until_idle()
        assert dict(local.server.channel.cut) == {}


async def test_a_reader_that_stops_is_cut(tmp_path: Path) -> None:
    authority = Authority()
    async with serve_here({**FLAGS, **tls_flags(tmp_path, authority.pair(HOST))}) as local:
        door = FramedDoor(local.channel[0], local.admin_target, trusting(authority))
        caller = await Caller.open(door, SPEC)
        for i in range(0, 32, 4):
            await caller.put(keys(i, i + 4), [value(n, MIB) for n in range(i, i + 4)])
        reader = FramedDoor(local.channel[0], local.admin_target, trusting(authority))
        getting = reader.stream("Get", caller.get_request(keys(0, 32)))
        await anext(getting)
        assert reader._pump is not None
        reader._pump.cancel()
        await until(lambda: dict(local.server.channel.cut) == {DeadlineExceeded.__name__: 1}, "it is not cut")
        await local.until_idle()
        assert await caller.match(keys(0, 32)) == [HOT] * 32, "others are served"
        await caller.close()
        for opened in (door, reader):
            await opened.close()


async def test_a_slow_reader_is_served_on_beside_one_that_asks_for_little(tmp_path: Path) -> None:
    """What TLS could not send is tried again in a turn that may move less: with no less than before."""
    authority = Authority()
    flags = {**FLAGS, "bulk.stall_timeout": "5s", **tls_flags(tmp_path, authority.pair(HOST))}
    async with serve_here(flags) as local:
        door = FramedDoor(local.channel[0], local.admin_target, trusting(authority))
        caller = await Caller.open(door, SPEC)
        small = await Caller.open(door, kv_spec("small", part_bytes=100))
        values = [value(i, MIB) for i in range(32)]
        for i in range(0, 32, 4):
            await caller.put(keys(i, i + 4), values[i : i + 4])
        await small.put(keys(0, 1), [value(0, 100)])
        slow = await asyncio.to_thread(greeted, local.channel[0], trusting(authority))
        request = caller.get_request(keys(0, 32)).SerializeToString()
        await asyncio.sleep(0.1)  # Nobody else was served lately: the first turn may move much, and is stopped in it.
        await asyncio.to_thread(slow.sendall, head(Verb.GET, 2, request, flags=END))
        await asyncio.sleep(0.1)
        came = 0
        while came < 32 * MIB:  # More than the sockets hold: the shard is stopped again and again.
            assert (await small.get(keys(0, 1))).parts == [value(0, 100)]
            data = await asyncio.to_thread(slow.recv, 256 << 10)
            assert data, f"cut after {came} bytes: {local.server.channel.cut}"
            came += len(data)
        slow.close()
        await small.close()
        await caller.close()
        await door.close()
        await local.until_idle()
        assert dict(local.server.channel.cut) == {}


def greeted(address: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Returns a connection that has said HELLO and takes any amount of payload. Blocks."""
    host, _, port = address.rpartition(":")
    sock = context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=HOST)
    hello = channel.Hello(credit_bytes=1 << 30).SerializeToString()
    sock.sendall(head(Verb.HELLO, 1, hello, flags=END))
    assert sock.recv(4096)
    return sock


@pytest.mark.parametrize("said", [b"", b"KV", bytes(100)], ids=["nothing", "little", "frames"])
async def test_who_does_not_speak_tls_is_cut(tmp_path: Path, said: bytes) -> None:
    flags = {**FLAGS, **tls_flags(tmp_path, Authority().pair(HOST)), "lease.session_open_timeout": "300ms"}
    async with serve_here(flags) as local, connected(local.channel[0], greets=False) as peer:
        await peer.send(said)
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(peer.sock, 4096):
                pass
        await until(lambda: local.server.channel.connection_count == 0, "it is left")


async def test_a_connection_too_many_is_closed_without_a_word(tmp_path: Path) -> None:
    authority = Authority()
    flags = {**FLAGS, **tls_flags(tmp_path, authority.pair(HOST)), "bulk.max_connections": "1"}
    async with serve_here(flags) as local, connected(local.channel[1]):
        async with connected(local.channel[0], greets=False) as peer:
            assert await asyncio.get_running_loop().sock_recv(peer.sock, 4096) == b""
        assert dict(local.server.channel.cut) == {"TableFull": 1}
