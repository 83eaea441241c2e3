"""Each test of the contract runs through every door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from kvstore_wire.namespace import NamespaceSpec
from tests.contract.caller import Caller
from tests.contract.doors import DirectDoor, Door, FramedDoor, GrpcDoor
from tests.integration.server_process import LocalServer, serve_here
from tests.shards import kv_spec

# Small enough that a test reaches each limit with a handful of keys.
FLAGS = {
    "hot.page": "256KiB",
    "limits.max_part": "256KiB",
    "limits.max_blocks_per_call": "8",
    "limits.max_match_blocks": "16",
    "limits.max_parts_per_block": "4",
    "limits.max_call_bytes": "1MiB",
    "limits.max_wait": "5s",
    "limits.chunk": "64KiB",
    "bulk.frame": "64KiB",
    "bulk.credit": "1MiB",
    "server.max_message": "256KiB",
    "lease.default": "10s",
    "lease.max": "20s",
}


@dataclass(frozen=True)
class Shard:
    """A shard under test behind one kind of door."""

    local: LocalServer
    open_door: Callable[[], Door]
    stack: AsyncExitStack

    async def caller(self, spec: NamespaceSpec | None = None) -> Caller:
        """A session of its own, on a connection of its own."""
        caller = await Caller.open(self.door(), spec or kv_spec("a"))
        self.stack.push_async_callback(caller.close)
        return caller

    def door(self) -> Door:
        door = self.open_door()
        self.stack.push_async_callback(door.close)
        return door


OpenShard = Callable[..., Awaitable[Shard]]


@pytest.fixture(params=["direct", "grpc", "bulk", "unix"])
async def open_shard(request: pytest.FixtureRequest) -> AsyncIterator[OpenShard]:
    """Starts shards; arguments are options that differ from FLAGS."""
    async with AsyncExitStack() as stack:

        async def start(options: dict[str, str] | None = None) -> Shard:
            local = await stack.enter_async_context(serve_here({**FLAGS, **(options or {})}))
            doors: dict[str, Callable[[], Door]] = {
                "direct": lambda: DirectDoor(local),
                "grpc": lambda: GrpcDoor(local.target, local.admin_target),
                "bulk": lambda: FramedDoor(local.channel[0], local.admin_target),
                "unix": lambda: FramedDoor(local.channel[1], local.admin_target),
            }
            inner = await stack.enter_async_context(AsyncExitStack())
            return Shard(local, doors[request.param], inner)

        yield start


@pytest.fixture
async def shard(open_shard: OpenShard) -> Shard:
    return await open_shard()
