"""A shard, a caller that behaves, and peers of the fast channel that do not: at the end all is as it was before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from google.protobuf.message import Message

from kvstore_wire.errors import KvStoreError
from kvstore_wire.frames import END, Verb, head
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import block_store_pb2 as pb
from tests.contract.caller import COMMITTED, HOT, Caller, checksum, value
from tests.contract.doors import GrpcDoor
from tests.integration.raw_peer import RawPeer, connected
from tests.integration.server_process import LocalServer, serve_here, until
from tests.shards import key, keys, kv_spec

KIB, MIB = 1 << 10, 1 << 20
PART_BYTES = 64 * KIB
SPEC = kv_spec("a", part_bytes=PART_BYTES)
FLAGS = {
    "hot.capacity": "16MiB",
    "bulk.frame": "64KiB",
    "bulk.credit": "1MiB",
    "bulk.stall_timeout": "400ms",
    "limits.chunk": "64KiB",
    "server.max_message": "256KiB",
}
BULK, UNIX = 0, 1  # Places in `LocalServer.channel`.


@dataclass(frozen=True)
class Scene:
    """The shard under attack, and a caller on a gRPC connection whose session peers may use."""

    local: LocalServer
    caller: Caller

    def connected(
        self, kind: int, *, credit_bytes: int = 64 << 20, greets: bool = True
    ) -> AbstractAsyncContextManager[RawPeer]:
        return connected(self.local.channel[kind], credit_bytes=credit_bytes, greets=greets)

    @property
    def cut(self) -> dict[str, int]:
        """Connections that the shard has cut, by the name of the error."""
        return dict(self.local.server.channel.cut)

    async def fill(self, count: int) -> None:
        """Stores blocks 0 to `count` of the caller's namespace."""
        for at in range(0, count, 8):
            chain = keys(at, min(at + 8, count))
            values = [block(i) for i in range(at, min(at + 8, count))]
            assert await self.caller.put(chain, values) == [COMMITTED] * len(chain)

    async def free_again(self) -> None:
        """Waits until nothing is leased, while peers may still be connected."""
        await self.local.until_idle()


@asynccontextmanager
async def scene(flags: Mapping[str, str] | None = None, spec: NamespaceSpec = SPEC) -> AsyncIterator[Scene]:
    """At the end checks that no lease, connection, region, descriptor or task is left and that others are served."""
    async with serve_here({**FLAGS, **(flags or {})}) as local:
        door = GrpcDoor(local.target, local.admin_target)
        caller = await Caller.open(door, spec)
        assert await caller.match([key(0)]) != [HOT]
        fds, tasks = open_fds(), len(asyncio.all_tasks())
        yield Scene(local, caller)
        channel, regions = local.server.channel, local.server.shell.regions
        await until(lambda: channel.connection_count == 0, "a connection is left")
        await local.until_idle()
        await until(lambda: len(asyncio.all_tasks()) <= tasks, f"tasks are left: {asyncio.all_tasks()}")
        served = value("after all", spec.part_bytes)
        assert await caller.put([key(10**6)], [served]) == [COMMITTED]
        assert (await caller.get([key(10**6)])).parts == [served]
        await caller.close()
        await until(lambda: not regions.region_count, "a region is left")
        await until(lambda: open_fds() <= fds, "a descriptor is left")
        await local.until_idle()
        local.server.shell.audit()
        assert local.server.shell.audit_faults == 0
        await door.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def block(number: int) -> bytes:
    """What `Scene.fill` stores as a block."""
    return value(number, PART_BYTES)


def frame_of(verb: int, request: int, message: Message, *, flags: int = END, payload: bytes = b"") -> bytes:
    return head(verb, request, message.SerializeToString(), flags=flags, payload_bytes=len(payload)) + payload


def put_frames(request: int, header: pb.PutHeader, values: Sequence[bytes]) -> list[bytes]:
    """A Put as frames: header, one frame of payload a value, trailer."""
    trailer = pb.PutTrailer(checksums=[checksum(v) for v in values])
    return [
        frame_of(Verb.PUT, request, pb.PutRequest(header=header), flags=0),
        *(head(Verb.PUT, request, payload_bytes=len(v)) + v for v in values),
        frame_of(Verb.PUT, request, pb.PutRequest(trailer=trailer)),
    ]


async def got(peer: RawPeer, request: int) -> tuple[pb.GetHeader, bytes, KvStoreError | None]:
    """Reads a Get's answer to its end: its header, its bytes and the error that ended it, if one did."""
    header, payload = pb.GetHeader(), b""
    while True:
        came = await peer.next_of(request)
        if came.error is not None:
            return header, payload, came.error
        if came.message:
            answer = pb.GetResponse.FromString(came.message)
            header = answer.header if answer.HasField("header") else header
        payload += came.payload
        if came.frame.ends:
            return header, payload, None


async def is_answered(peer: RawPeer, caller: Caller, request: int = 900_000) -> bool:
    """Whether a connection still works: a Match comes back, and nothing else before it but CREDIT."""
    await peer.ask(Verb.MATCH, request, caller.match_request([key(0)]))
    while (came := await peer.next()).frame.verb == Verb.CREDIT:
        pass
    return came.frame.request == request and came.error is None


def states(raw: bytes) -> list[int]:
    return list(pb.PutResponse.FromString(raw).states)
