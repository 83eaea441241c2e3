"""One actor in an event loop: one random call after another, some of them cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from bench.soak.blocks import Space, spaces
from bench.soak.rooms import Rooms
from kvstore_client import AsyncClient, AsyncNamespace, Coverage, Range

CANCELLED_SHARE = 0.15
_HEAD = Range(offset=0, length=64)


class Actor:
    """Uses one client beside other actors; `rooms` are its own."""

    def __init__(self, client: AsyncClient, rooms: Rooms, seed: int) -> None:
        self._random = random.Random(seed)
        self._client, self._rooms, self._tally = client, rooms, rooms.tally
        self._spaces = [(space, client.namespace(space.spec)) for space in spaces()]

    async def act(self) -> None:
        """One call, cancelled at a random moment now and then; its buffers must stay as they are left."""
        self._tally.calls += 1
        space, namespace = self._random.choice(self._spaces)
        keys = space.keys(self._random)
        doings = (self._put, self._get, self._made, self._view, self._lease, self._match, self._delete, self._abandon)
        doing = self._random.choices((*doings, self._ranged), (6, 6, 3, 3, 3, 4, 1, 2, 1))[0]
        rooms = self._rooms.of(space.sizes(keys), self._random)
        task = asyncio.ensure_future(doing(space, namespace, keys, rooms))
        if self._random.random() < CANCELLED_SHARE:
            await asyncio.sleep(self._random.random() * 0.02)
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self._tally.cancelled += 1
        self._tally.by_transport[self._client.transport or "none"] += 1
        self._rooms.watch(rooms)

    async def _put(self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        space.fill(keys, rooms)
        self._tally.note((await namespace.put(keys, rooms)).failure)

    async def _get(self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        coverage = Coverage.PREFIX if space.is_fixed else Coverage.EACH
        wait_ms = self._random.choice((0, 0, 50))
        found = await namespace.get(keys, into=rooms, coverage=coverage, wait_ms=wait_ms)
        self._tally.note(found.failure)
        self._tally.corrupt += found.corrupt_blocks
        lengths = found.lengths.reshape(-1).tolist()
        hot = [state for state in found.states for _ in range(space.spec.parts_per_block)]
        self._check(space, keys, [r[:n] if s == 1 else None for r, n, s in zip(rooms, lengths, hot, strict=True)])

    async def _made(self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        found = await namespace.get(keys, coverage=Coverage.EACH)
        self._tally.note(found.failure)
        self._tally.corrupt += found.corrupt_blocks
        self._check(space, keys, found.values or ())

    async def _ranged(
        self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]
    ) -> None:
        if space.is_fixed:
            found = await namespace.get(keys, ranges=(_HEAD,))
            self._tally.note(found.failure)
            space.fill(keys, rooms)
            for value, room in zip(found.values or (), rooms, strict=False):
                self._tally.wrong += value is not None and value != room[: _HEAD.length]

    async def _view(self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        """Looks at blocks for longer than they are leased for at first; what was seen counts if the close says so."""
        viewed = await namespace.view(keys)
        arrays = [viewed.views.array(i) for i in range(len(viewed.views))] if viewed.views.held else []
        await asyncio.sleep(self._random.choice((0, 0, 0, 0.3)))
        hot = [k for k, state in zip(keys, viewed.views.states, strict=True) if state == 1]
        parts = space.spec.parts_per_block
        right = [space.is_right(hot[i // parts], i % parts, memoryview(a)) for i, a in enumerate(arrays)]  # type: ignore[arg-type]
        if await viewed.close():
            self._tally.viewed_parts += len(right)
            self._tally.wrong += right.count(False)

    async def _lease(self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        lease = await namespace.acquire(keys, lease_ms=self._random.choice((50, 500)))
        self._tally.note(lease.failure)
        await asyncio.sleep(self._random.random() * 0.1)
        parts = space.spec.parts_per_block
        hot = [k for k, state in zip(keys, lease.states, strict=True) if state == 1]
        if self._random.random() < 0.7 and lease.held:
            read = await namespace.read(lease, rooms[: len(hot) * parts] if space.is_fixed else None)
            values = rooms[: len(hot) * parts] if space.is_fixed else read.values
            if read.failure is None and await lease.release(corrupt=read.corrupt):
                self._tally.corrupt += len(read.corrupt)
                self._check(space, hot, values or ())

    async def _match(self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        self._tally.note((await namespace.match(keys)).failure)

    async def _delete(
        self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]
    ) -> None:
        self._tally.note((await namespace.delete(keys[:3])).failure)

    async def _abandon(
        self, space: Space, namespace: AsyncNamespace, keys: list[bytes], rooms: list[memoryview]
    ) -> None:
        """Reserves, waits, and then writes late, aborts, or forgets."""
        lengths = [] if space.is_fixed else space.sizes(keys)
        lease = await namespace.reserve(keys, lengths=lengths, lease_ms=self._random.choice((50, 400)))
        self._tally.note(lease.failure)
        space.fill(keys, rooms)
        await asyncio.sleep(self._random.random() * 0.2)
        choice = self._random.random()
        if choice < 0.4 and lease.held:
            self._tally.note((await namespace.write(lease, [rooms[i] for i in lease.created])).failure)
        elif choice < 0.7:
            await lease.abort()

    def _check(self, space: Space, keys: Sequence[bytes], values: Sequence[memoryview | None]) -> None:
        parts = space.spec.parts_per_block
        for i, value in enumerate(values):
            if value is not None:
                self._tally.read_parts += 1
                self._tally.wrong += not space.is_right(keys[i // parts], i % parts, value)
