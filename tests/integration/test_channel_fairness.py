"""Who is served when much is asked: counted in frames, never timed."""

from __future__ import annotations

import asyncio

import pytest

from kvstore_wire.errors import LeaseExpired
from kvstore_wire.frames import Verb
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from tests.contract.caller import HOT
from tests.integration.channel_scene import (
    BULK,
    KIB,
    PART_BYTES,
    UNIX,
    block,
    frame_of,
    got,
    is_answered,
    scene,
)
from tests.integration.server_process import until
from tests.shards import key, keys

pytestmark = pytest.mark.integration

each_kind = pytest.mark.parametrize("kind", [BULK, UNIX], ids=["bulk", "unix"])
BLOCKS = 64


async def test_a_small_get_passes_between_the_frames_of_a_large_one() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(BLOCKS)
        large = frame_of(Verb.GET, 5, at.caller.get_request(keys(0, BLOCKS)))
        small = frame_of(Verb.GET, 6, at.caller.get_request([key(9)]))
        match = frame_of(Verb.MATCH, 7, at.caller.match_request([key(9)]))
        await peer.send(large + small + match)
        order: list[int] = []
        while order.count(5) < BLOCKS:
            came = await peer.next()
            order.append(came.frame.request)
            assert len(came.payload) <= PART_BYTES
        assert sorted(set(order)) == [5, 6, 7]
        assert order.index(6) <= 3, "not after the large one"
        assert order.index(7) <= 3
        assert order[-1] == 5


async def test_what_is_asked_in_the_middle_of_a_large_get_passes_what_was_not_sent_yet() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(BLOCKS)
        await peer.ask(Verb.GET, 5, at.caller.get_request(keys(0, BLOCKS)))
        for _ in range(8):
            assert (await peer.next()).frame.request == 5
        await peer.ask(Verb.GET, 6, at.caller.get_request([key(9)]))
        after = 0
        while (came := await peer.next()).frame.request == 5:
            after += 1
        assert came.payload == block(9)
        # What the socket held when it was asked, and the quantum that one turn of the shard sends.
        assert after < BLOCKS // 2
        _, payload, error = await got(peer, 5)
        assert error is None
        assert payload.endswith(block(BLOCKS - 1))


async def test_gets_of_one_connection_take_turns() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(BLOCKS)
        many = 8
        request = at.caller.get_request(keys(0, BLOCKS))
        await peer.send(b"".join(frame_of(Verb.GET, 10 + i, request) for i in range(many)))
        came: dict[int, int] = {}
        payloads: dict[int, bytes] = {}
        for _ in range(many * BLOCKS):
            frame = await peer.next()
            number = frame.frame.request
            came[number] = came.get(number, 0) + 1
            payloads[number] = payloads.get(number, b"") + frame.payload
            assert max(came.values()) - min(came.get(10 + i, 0) for i in range(many)) <= 2
        whole = b"".join(block(i) for i in range(BLOCKS))
        assert payloads == {10 + i: whole for i in range(many)}


@each_kind
async def test_a_connection_full_of_gets_does_not_starve_another(kind: int) -> None:
    async with scene({"bulk.stall_timeout": "5s"}) as at, at.connected(kind) as busy, at.connected(kind) as other:
        await at.fill(BLOCKS)
        rounds = 32  # Of 4 MiB.
        await busy.send(
            b"".join(frame_of(Verb.GET, 10 + i, at.caller.get_request(keys(0, BLOCKS))) for i in range(rounds))
        )
        taken = 0

        async def take() -> None:
            nonlocal taken
            while taken < rounds * BLOCKS:
                assert (await busy.next()).payload
                taken += 1
                await busy.send(credit(PART_BYTES))

        taking = asyncio.ensure_future(take())
        await until(lambda: taken > 0, "it is not busy")
        for i in range(10):
            await other.ask(Verb.GET, 5, at.caller.get_request([key(i)]))
            assert (await got(other, 5))[1] == block(i)
        assert taken < rounds * BLOCKS // 2, "the other waited for most of what the first had asked"
        await taking


def credit(size_bytes: int) -> bytes:
    return frame_of(Verb.CREDIT, 0, channel.Credit(bytes=size_bytes))


@each_kind
async def test_a_flood_of_small_requests_does_not_starve_another(kind: int) -> None:
    async with scene({"bulk.stall_timeout": "5s"}) as at, at.connected(kind) as busy, at.connected(kind) as other:
        await at.fill(1)
        many = 20_000
        flood = asyncio.ensure_future(busy.send(frame_of(Verb.MATCH, 5, at.caller.match_request([key(0)])) * many))
        taken = 0

        async def take() -> None:
            nonlocal taken
            for _ in range(many):
                came = await busy.next()
                taken += 1
                assert list(pb.MatchResponse.FromString(came.message).states) == [HOT]

        taking = asyncio.ensure_future(take())
        await until(lambda: taken > 0, "it is not busy")
        counts = []
        for _ in range(10):
            before = taken
            assert await is_answered(other, at.caller)
            counts.append(taken - before)
        assert sorted(counts)[5] < 3000, f"answers of the flood for each of the other: {counts}"
        assert taken < many
        await taking
        await flood


async def test_a_get_whose_lease_ended_fails_though_no_credit_is_left() -> None:
    flags = {"lease.default": "300ms", "bulk.stall_timeout": "5s"}
    async with scene(flags) as at, at.connected(UNIX, credit_bytes=64 * KIB) as peer:
        await at.fill(8)
        await peer.ask(Verb.GET, 5, at.caller.get_request(keys(0, 8)))
        assert (await peer.next()).payload == block(0)
        await until(lambda: at.local.gauge("leases") == 0, "its lease lives on")
        match = at.caller.match_request([key(0)])
        await peer.ask(Verb.MATCH, 99, match)
        while (came := await peer.next()).frame.request != 5:
            await peer.ask(Verb.MATCH, 99, match)  # The shard looks at what it has to send when the peer moves.
        assert isinstance(came.error, LeaseExpired)
        await peer.send(credit(64 * KIB))
        await peer.ask(Verb.GET, 6, at.caller.get_request([key(3)]))
        assert (await got(peer, 6))[1:] == (block(3), None)
