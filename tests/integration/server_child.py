"""Clients that die or freeze: run as processes of their own by ChildClient, one role each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

from kvstore_wire.errors import KvStoreError
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import Caller, as_stream, checksum, value
from tests.contract.doors import GrpcDoor
from tests.shards import key, keys, kv_spec

PART_BYTES = 64 << 10
SPEC = kv_spec("a", part_bytes=PART_BYTES)


async def half_put(caller: Caller) -> None:
    """Sends half of a Put and then nothing."""

    async def messages() -> AsyncIterator[pb.PutRequest]:
        yield pb.PutRequest(header=caller.put_header(keys(0, 4)))
        yield pb.PutRequest(data=value("dead", 2 * PART_BYTES))
        say("half")
        await asyncio.Event().wait()

    await caller.door.send("Put", messages())


async def late_commit(caller: Caller) -> None:
    """Fills a reserved slot, waits to be told and only then commits."""
    reserved = await caller.reserve([key(0)], lease_ms=500)
    late = value("late", PART_BYTES)
    header = pb.PutRequest(header=caller.put_header(lease=reserved.lease))
    await error_of(caller.door.send("Put", as_stream([header, pb.PutRequest(data=late)])))
    say(f"landed {reserved.offsets[0]}")
    await asyncio.to_thread(sys.stdin.readline)
    say(await error_of(caller.commit(reserved.lease, [checksum(late)])))
    say(await error_of(caller.fill(reserved.lease, [late])))


async def hold(caller: Caller) -> None:
    """Leases blocks for reading and reserves others, and stays."""
    await caller.lease([key(0)], lease_ms=60_000)
    await caller.reserve([key(1)], lease_ms=60_000)
    say("holding")
    await asyncio.Event().wait()


async def error_of(call: Awaitable[object]) -> str:
    """The reason for which a call fails, "none" if it does not."""
    try:
        await call
    except KvStoreError as error:
        return types.Reason.Name(error.reason)
    return "none"


def say(text: str) -> None:
    print(text, flush=True)


ROLES: dict[str, Callable[[Caller], Awaitable[None]]] = {
    "half_put": half_put,
    "late_commit": late_commit,
    "hold": hold,
}


async def main(target: str, role: str) -> None:
    door = GrpcDoor(target, target)
    await ROLES[role](await Caller.open(door, SPEC))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
