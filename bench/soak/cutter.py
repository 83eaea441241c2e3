"""A proxy before a server's bulk port that cuts connections in the middle of whatever they carry, and stalls some."""

from __future__ import annotations

import asyncio
import contextlib
import random

_PIECE_BYTES = 64 << 10
_MEAN_BYTES = 20 << 20  # That pass in one direction before a connection is cut.
_STALLED_SHARE = 0.02  # Of those that would be cut: they stand still instead, for longer than a server bears.
_STALL_S = 3.0


class Cutter:
    """Listens from `start` to `close`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self.cut = self.stalled = 0

    async def start(self) -> str:
        """Returns the address where it listens."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def lead_to(self, port: int) -> None:
        self._port = port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        finally:
            self._tasks.discard(task)
        passing = [
            asyncio.ensure_future(self._pass(reader, far_writer)),
            asyncio.ensure_future(self._pass(far_reader, writer)),
        ]
        self._tasks.update(passing)
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in passing:
                one.cancel()
            self._tasks.difference_update(passing)
            for end in (writer, far_writer):
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = int(self._random.expovariate(1 / _MEAN_BYTES))
        with contextlib.suppress(OSError):
            while data := await reader.read(min(_PIECE_BYTES, left) or 1):
                writer.write(data)
                await writer.drain()
                left -= len(data)
                if left > 0:
                    continue
                if self._random.random() > _STALLED_SHARE:
                    self.cut += 1
                    return
                self.stalled += 1
                await asyncio.sleep(_STALL_S)
                left = _MEAN_BYTES
