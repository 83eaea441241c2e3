"""One actor in a thread: random calls that block."""

from __future__ import annotations

import random
import time

from bench.soak.blocks import Space, spaces
from bench.soak.rooms import Rooms
from kvstore_client import Client, Coverage, Namespace


class ThreadActor:
    """Shares a client with the actors of other threads; `rooms` and their tally are its own."""

    def __init__(self, client: Client, rooms: Rooms, seed: int) -> None:
        self._random = random.Random(seed)
        self._client, self._rooms, self._tally = client, rooms, rooms.tally
        self._spaces = [(space, client.namespace(space.spec)) for space in spaces()]

    def act(self) -> None:
        """One call; its buffers must stay as they are left."""
        self._tally.calls += 1
        space, namespace = self._random.choice(self._spaces)
        keys = space.keys(self._random)
        doing = self._random.choices((self._put, self._get, self._view, self._slots, self._ticket), (5, 8, 3, 1, 2))[0]
        rooms = self._rooms.of(space.sizes(keys), self._random)
        doing(space, namespace, keys, rooms)
        self._tally.by_transport[self._client.transport or "none"] += 1
        self._rooms.watch(rooms)

    def _put(self, space: Space, namespace: Namespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        space.fill(keys, rooms)
        self._tally.note(namespace.put(keys, rooms, deadline_ms=self._deadline_ms()).failure)

    def _get(self, space: Space, namespace: Namespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        count = self._random.choice((1, 2, len(keys)))
        keys, rooms = keys[:count], rooms[: count * space.spec.parts_per_block]
        found = namespace.get(keys, into=rooms, coverage=Coverage.EACH, deadline_ms=self._deadline_ms())
        self._tally.note(found.failure)
        self._tally.corrupt += found.corrupt_blocks
        parts = space.spec.parts_per_block
        for i, length in enumerate(found.lengths.reshape(-1).tolist()):
            if found.states[i // parts] == 1:
                self._check(space, keys[i // parts], i % parts, rooms[i][:length])

    def _view(self, space: Space, namespace: Namespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        with namespace.view(keys) as views:
            arrays = [views.array(i) for i in range(len(views))] if views.held else []
            time.sleep(self._random.choice((0, 0, 0, 0.3)))
            hot = [k for k, state in zip(keys, views.states, strict=True) if state == 1]
            parts = space.spec.parts_per_block
            right = [space.is_right(hot[i // parts], i % parts, memoryview(a)) for i, a in enumerate(arrays)]  # type: ignore[arg-type]
        if views.valid:
            self._tally.viewed_parts += len(right)
            self._tally.wrong += right.count(False)

    def _slots(self, space: Space, namespace: Namespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        """Reserves, and then writes late, or lets the `with` block abort."""
        lengths = [] if space.is_fixed else space.sizes(keys)
        with namespace.reserve(keys, lengths=lengths, lease_ms=self._random.choice((50, 400))) as lease:
            self._tally.note(lease.failure)
            space.fill(keys, rooms)
            time.sleep(self._random.random() * 0.1)
            if self._random.random() < 0.6 and lease.held:
                self._tally.note(namespace.write(lease, [rooms[i] for i in lease.created]).failure)

    def _ticket(self, space: Space, namespace: Namespace, keys: list[bytes], rooms: list[memoryview]) -> None:
        """Submits, and waits, or cancels and waits."""
        space.fill(keys, rooms)
        ticket = namespace.submit_put(keys, rooms)
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * 0.01)
            self._tally.cancelled += self._client.cancel(ticket)
        done = self._client.wait(ticket, 30_000)
        self._tally.note(done.failure if done is not None else TimeoutError("a ticket does not end"))

    def _deadline_ms(self) -> int:
        return self._random.choice((3, 2000, 2000, 2000))

    def _check(self, space: Space, key_: bytes, part: int, value: memoryview) -> None:
        self._tally.read_parts += 1
        self._tally.wrong += not space.is_right(key_, part, value)
