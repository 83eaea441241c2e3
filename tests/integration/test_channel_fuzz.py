"""A peer that greets and then sends frames at random, from printed seeds: it can only hurt itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstore_wire.frames import END, ERROR, MAGIC, Verb, header
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import HOT, Caller, checksum
from tests.contract.doors import GrpcDoor
from tests.integration.channel_scene import BULK, UNIX, Scene, block, scene
from tests.integration.raw_peer import RawPeer
from tests.integration.server_process import until
from tests.shards import keys, kv_spec

pytestmark = pytest.mark.integration

FRAMES = 400  # A connection's life, if it is not cut before.
TOTAL_FRAMES = 3000  # Of one seed, in as many connections as they need.
OWN = kv_spec("fuzz", part_bytes=4096)


class Fuzzer:
    """Frames of one connection, from a seed: most are nearly right, so that they get far."""

    def __init__(self, rng: random.Random, caller: Caller, leases: list[types.Lease], region: int) -> None:
        self._rng, self._caller, self._leases, self._region = rng, caller, leases, region
        self._verbs = [*Verb, Verb.PUT, Verb.PUT, Verb.PUT, Verb.PUT, Verb.GET, Verb.GET, Verb.CANCEL, Verb.CANCEL]

    def frame(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.002:
            return rng.randbytes(rng.randrange(1, 60))
        verb = rng.choice(self._verbs) if rng.random() < 0.98 else rng.randrange(256)
        if verb == Verb.GOODBYE and rng.random() < 0.9:
            verb = Verb.MATCH
        raw = bytearray(self._message(verb))
        if raw and verb != Verb.CREDIT and rng.random() < 0.05:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        payload = self._payload(verb)
        made = header(
            verb,
            self._request(verb),
            flags=self._flags(verb),
            timeout_ms=rng.choice([0, 0, 0, 1, 20, 2**32 - 1]),
            message_bytes=len(raw),
            payload_bytes=len(payload),
        )
        if rng.random() < 0.002:
            made = bytes([made[0] ^ (1 << rng.randrange(8))]) + made[1:]
            assert int.from_bytes(made[:2], "little") != MAGIC
        return made + bytes(raw) + payload

    def _request(self, verb: int) -> int:
        if verb in (Verb.CREDIT, Verb.GOODBYE):
            return 0
        if verb == Verb.PUT:
            return self._rng.randrange(1, 4)
        if verb == Verb.SESSION:
            return self._rng.randrange(4, 6)
        if verb == Verb.CANCEL:
            return self._rng.randrange(1, 2000)
        return self._rng.randrange(6, 1_000_000) if self._rng.random() < 0.999 else 0

    def _flags(self, verb: int) -> int:
        if self._rng.random() < 0.002:
            return self._rng.choice([ERROR, END | ERROR, 4, 0])
        return self._rng.choice([0, 0, END]) if verb in (Verb.PUT, Verb.SESSION) else END

    def _payload(self, verb: int) -> bytes:
        rng = self._rng
        if verb != Verb.PUT:
            return b"" if rng.random() < 0.998 else b"x"
        return rng.randbytes(rng.choice([0, 0, 1, 4095, 4096, 8192, 10_000]))

    def _message(self, verb: int) -> bytes:
        rng, caller = self._rng, self._caller
        chain = keys(first := rng.randrange(20), first + rng.randrange(0, 6))
        lease = rng.choice(self._leases) if rng.random() < 0.8 else types.Lease(id=rng.randrange(100), generation=1)
        slices = types.RegionSlices(
            region=self._region if rng.random() < 0.9 else rng.randrange(9),
            offsets=[rng.choice([0, 4096, 60_000, 2**63]) for _ in chain],
            lengths=[rng.choice([4096, 4096, 1]) for _ in chain],
        )
        common: dict[str, Any] = {"session": caller.session if rng.random() < 0.97 else rng.randbytes(16)}
        named: dict[str, Any] = {**common, "namespace": caller.namespace if rng.random() < 0.97 else rng.randrange(5)}
        own: Message | None = None
        if verb == Verb.PUT:
            return self._put(chain, lease, slices, named)
        if verb == Verb.GET:
            get = pb.GetRequest(**named, wait_ms=rng.choice([0, 0, 5, 100]), coverage=rng.randrange(2))  # type: ignore[arg-type]
            if rng.random() < 0.3:
                get.lease.CopyFrom(lease)
            else:
                get.chain.keys.extend(chain)
            if rng.random() < 0.2:
                get.into.CopyFrom(slices)
            elif rng.random() < 0.2:
                get.ranges.add(offset=rng.randrange(4096), length=rng.randrange(64), stride=64, count=rng.randrange(70))
            own = get
        elif verb == Verb.ACQUIRE:
            own = caller.acquire_request(chain, wait_ms=rng.choice([0, 0, 50]), lease_ms=rng.choice([0, 50, 500]))
        elif verb == Verb.RESERVE:
            own = pb.ReserveRequest(**named, chain=types.Chain(keys=chain), lease_ms=200)
        elif verb in (Verb.RELEASE, Verb.RENEW, Verb.ABORT):
            kinds = {Verb.RELEASE: pb.ReleaseRequest, Verb.RENEW: pb.RenewRequest, Verb.ABORT: pb.AbortRequest}
            own = kinds[Verb(verb)](**common, leases=[lease])
        elif verb == Verb.COMMIT:
            own = pb.CommitRequest(**common, lease=lease, checksums=[1, 2])
        elif verb == Verb.DELETE:
            own = pb.DeleteRequest(**named, keys=chain)
        elif verb in (Verb.MATCH, Verb.OVER, Verb.EXPLAIN):
            asked = {Verb.MATCH: pb.MatchRequest, Verb.OVER: pb.OverRequest, Verb.EXPLAIN: pb.ExplainRequest}
            own = asked[Verb(verb)](**named, chain=types.Chain(keys=chain))
        elif verb == Verb.CREDIT:
            own = channel.Credit(bytes=rng.choice([0, 1, 10_000, 1 << 20]))
        elif verb == Verb.SESSION:
            own = pb.SessionPulse(session=rng.randbytes(16))
        elif verb in (Verb.MAP_ARENA, Verb.REGISTER_REGION, Verb.UNREGISTER_REGION):
            own = pb.SessionPulse(**common)  # Field 1 is the session there too.
        return own.SerializeToString() if own is not None else rng.randbytes(rng.randrange(2))

    def _put(self, chain: list[bytes], lease: types.Lease, slices: types.RegionSlices, named: dict[str, Any]) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.4:
            return b""
        if kind < 0.6:
            sums = [checksum(b"") for _ in range(rng.randrange(2))]
            return pb.PutRequest(trailer=pb.PutTrailer(checksums=sums)).SerializeToString()
        put = pb.PutHeader(**named)
        if rng.random() < 0.4:
            put.lease.CopyFrom(lease)
        else:
            put.chain.keys.extend(chain)
        if rng.random() < 0.1:
            put.source.CopyFrom(slices)
        return pb.PutRequest(header=put).SerializeToString()


async def read_all(peer: RawPeer, taken: list[int]) -> None:
    """Takes what comes, until the end, and counts the frames."""
    with contextlib.suppress(ConnectionError):
        while True:
            await peer.next()
            taken[0] += 1


async def live(at: Scene, kind: int, fuzzer: Fuzzer, rng: random.Random) -> tuple[int, int]:
    """One connection's life; returns how many frames it sent and how many came back."""
    sent, taken = 0, [0]
    async with at.connected(kind, credit_bytes=1 << 20) as peer:
        reading = asyncio.ensure_future(read_all(peer, taken))
        with contextlib.suppress(ConnectionError):
            while sent < FRAMES:
                await peer.send(fuzzer.frame())
                sent += 1
                if rng.random() < 0.05:
                    await asyncio.sleep(0)
        await asyncio.sleep(0.02 * rng.randrange(2))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return sent, taken[0]


@pytest.mark.parametrize("kind", [BULK, UNIX], ids=["bulk", "unix"])
@pytest.mark.parametrize("seed", range(2))
async def test_random_frames_hurt_nobody_else(seed: int, kind: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(f"{seed} {kind}")
    with caplog.at_level(logging.ERROR):
        async with scene() as at:
            await at.fill(16)
            door = GrpcDoor(at.local.target, at.local.admin_target)
            attacker = await Caller.open(door, OWN)
            reserved = await attacker.reserve(keys(40, 44), lease_ms=10_000)
            await attacker.put(keys(0, 4), [bytes(4096)] * 4)
            leases = [reserved.lease, await attacker.lease(keys(0, 4), lease_ms=10_000)]
            fd = os.memfd_create("region")
            os.truncate(fd, 1 << 16)
            region = at.local.server.shell.regions.register(attacker.session, fd, offset=0, length=1 << 16)
            sent = came = 0
            while sent < TOTAL_FRAMES:
                one_sent, one_came = await live(at, kind, Fuzzer(rng, attacker, leases, region), rng)
                sent, came = sent + one_sent, came + one_came
            assert came > sent // 10, "it is cut too early to show anything"
            await until(lambda: at.local.server.channel.connection_count == 0, "a connection is left")
            assert await at.caller.match(keys(0, 16)) == [HOT] * 16
            assert (await at.caller.get(keys(0, 16))).parts == [block(i) for i in range(16)]
            await attacker.close()
            await door.close()
    assert not caplog.records, "a fault of the shard's own"
