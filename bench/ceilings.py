"""Players that are ceilings: memcpy, bare sockets, a bare gRPC stream. None of them stores anything."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from bench.bare import BareClient
from bench.jobs import KEY_BYTES, RAW_UNPACED, Buffers, Job, Player, keys_of
from bench.raw import RawClient
from bench.rig import MIB

BARE_CHUNK_BYTES = MIB


class Memory(Player):
    """memcpy of one thread, warm to warm, in blocks of at most 2 MiB."""

    BLOCK_BYTES = 2 * MIB

    def __init__(self, job: Job, buffers: Buffers) -> None:
        self._part_bytes = job.part_bytes
        self._held = np.ones(job.size_bytes, np.uint8)
        self._target = np.frombuffer(buffers.target, np.uint8)

    def put(self, first: int, last: int) -> None:
        self._copy(self._target, self._held, first, last)

    def get(self, first: int, last: int) -> None:
        self._copy(self._held, self._target, first, last)

    def _copy(self, source: Any, target: Any, *span: int) -> None:
        start, end = (index * self._part_bytes for index in span)
        for at in range(start, end, self.BLOCK_BYTES):
            to = min(end, at + self.BLOCK_BYTES)
            np.copyto(target[at:to], source[at:to])


class Raw(Player):
    """A bare socket; one request a call. A match is an exchange of as many bytes as the store's own."""

    def __init__(self, job: Job, buffers: Buffers) -> None:
        self._client = RawClient(job.address, unpaced=job.kind == RAW_UNPACED)
        self._part_bytes, self._start = job.part_bytes, job.owner * job.size_bytes
        self._target = buffers.target
        self._keys = b"".join(keys_of(job))

    def put(self, first: int, last: int) -> None:
        start, end = first * self._part_bytes, last * self._part_bytes
        self._client.put(self._start + start, self._target[start:end])

    def get(self, first: int, last: int) -> None:
        start, end = first * self._part_bytes, last * self._part_bytes
        self._client.get(self._start + start, self._target[start:end])

    def match(self, first: int, last: int) -> None:
        self._client.ask(self._keys[first * KEY_BYTES : last * KEY_BYTES], self._target[: last - first])

    def close(self) -> None:
        self._client.close()


class Bare(Player):
    """A bare grpc.aio stream of raw bytes."""

    def __init__(self, job: Job, buffers: Buffers) -> None:
        self._loop = asyncio.new_event_loop()
        self._part_bytes, self._target = job.part_bytes, buffers.target
        self._client = self._loop.run_until_complete(self._opened(job.address))

    async def _opened(self, address: str) -> BareClient:
        return BareClient(address, BARE_CHUNK_BYTES)

    def put(self, first: int, last: int) -> None:
        self._loop.run_until_complete(self._client.put((last - first) * self._part_bytes))

    def get(self, first: int, last: int) -> None:
        into = self._target[first * self._part_bytes : last * self._part_bytes]
        self._loop.run_until_complete(self._client.get(into))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
