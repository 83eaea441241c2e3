"""The ceiling of inline transfers: a bare grpc.aio stream of raw bytes, nothing decoded, nothing looked up.

As a program, it is the server: `python -m bench.bare CHUNK_BYTES`. Both sides do what a store cannot avoid: the
receiver copies what came into a warm buffer.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from bench.rig import CHANNEL_OPTIONS, warm
from kvstore_wire.malloc import keep_freed_memory

SERVICE = "bench.Bare"


class BareClient:
    """Moves bytes to and from a bare server."""

    def __init__(self, target: str, chunk_bytes: int) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._down = self._channel.unary_stream(f"/{SERVICE}/Down")
        self._up = self._channel.stream_unary(f"/{SERVICE}/Up")
        self._chunk = bytes(chunk_bytes)

    async def get(self, into: memoryview) -> None:
        """Fills a buffer from the server's stream."""
        at = 0
        async for piece in self._down(len(into).to_bytes(8, "little")):
            into[at : at + len(piece)] = piece
            at += len(piece)
        assert at == len(into)

    async def put(self, size_bytes: int) -> None:
        """Sends the same piece until enough was sent."""

        async def pieces() -> AsyncIterator[bytes]:
            for left in range(size_bytes, 0, -len(self._chunk)):
                yield self._chunk if left >= len(self._chunk) else self._chunk[:left]

        assert int.from_bytes(await self._up(pieces()), "little") == size_bytes

    async def close(self) -> None:
        await self._channel.close()


@contextlib.contextmanager
def bare_server(chunk_bytes: int) -> Iterator[str]:
    """Runs the bare server in its own process; yields its address."""
    command = [sys.executable, "-m", "bench.bare", str(chunk_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=30)


async def _serve(chunk_bytes: int) -> None:
    chunk, sink = bytes(chunk_bytes), warm(256 << 20)

    async def down(request: bytes, context: Any) -> AsyncIterator[bytes]:
        left = int.from_bytes(request, "little")
        while left:
            size = min(left, chunk_bytes)
            left -= size
            yield chunk if size == chunk_bytes else chunk[:size]

    async def up(pieces: AsyncIterator[bytes], context: Any) -> bytes:
        total = 0
        async for piece in pieces:
            at = total % len(sink)
            sink[at : at + len(piece)] = piece
            total += len(piece)
        return total.to_bytes(8, "little")

    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    methods = {
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "Up": grpc.stream_unary_rpc_method_handler(up),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    import uvloop

    keep_freed_memory()
    uvloop.run(_serve(int(sys.argv[1])))
