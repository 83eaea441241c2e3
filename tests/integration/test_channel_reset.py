"""A connection that its peer resets while nothing is under way is closed, in every event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from kvstore_client.deadline import Deadline
from kvstore_client.errors import PathDown
from kvstore_client.fast.aio import AsyncLane
from kvstore_client.fast.dial import Dialed
from kvstore_client.fast.wire import OneMessage, Wire
from kvstore_wire.frames import END, Verb, head
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from tests.integration.channel_scene import BULK, Scene, scene
from tests.integration.server_process import until
from tests.shards import keys

Runner = Callable[[Coroutine[Any, Any, None]], None]
RUNNERS = [pytest.param(asyncio.run, id="asyncio"), pytest.param(uvloop.run, id="uvloop")]


def reset(sock: socket.socket) -> None:
    """Closes a socket so that its peer gets an error instead of an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("last", ["a release that has no answer", "a request", "half a frame", "nothing"])
def test_a_shard_closes_a_connection_that_was_reset_behind_its_last_words(run: Runner, last: str) -> None:
    async def play() -> None:
        async with scene() as at:
            host, port = at.local.channel[BULK].rsplit(":", 1)
            for _ in range(5):
                await _reset_after(at, (host, int(port)), last)
            await until(lambda: at.local.server.channel.connection_count == 0, "a connection is left")

    run(play())


async def _reset_after(at: Scene, address: tuple[str, int], last: str) -> None:
    hello = head(Verb.HELLO, 1, channel.Hello(credit_bytes=1 << 20).SerializeToString(), flags=END)
    match = head(Verb.MATCH, 2, at.caller.match_request(keys(0, 2)).SerializeToString(), flags=END)
    release = head(Verb.RELEASE, 0, pb.ReleaseRequest(session=at.caller.session).SerializeToString(), flags=END)
    peer = socket.create_connection(address)
    peer.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(peer, hello)
    assert await asyncio.get_running_loop().sock_recv(peer, 4096)
    words = {"a release that has no answer": release, "a request": match, "half a frame": match[:30], "nothing": b""}
    peer.send(words[last])
    reset(peer)


@pytest.mark.parametrize("run", RUNNERS)
def test_a_client_hears_of_a_reset_behind_the_beginning_of_an_answer(run: Runner) -> None:
    async def play() -> None:
        near, far = _pair()
        lane = AsyncLane(Dialed(near, Wire(), channel.HelloAnswer()))
        calling = asyncio.ensure_future(
            lane.exchange(Verb.MATCH, b"", taker=OneMessage(), deadline=Deadline.after(20_000))
        )
        await asyncio.sleep(0.01)
        assert far.recv(100)
        far.send(head(Verb.MATCH, 1, b"x" * 50, flags=END)[:40])
        reset(far)
        with pytest.raises(PathDown):
            await asyncio.wait_for(calling, 10)
        assert lane.broken

    run(play())


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]
