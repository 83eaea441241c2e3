"""A RELEASE without a number ends leases and is answered by nothing, whatever is wrong with it."""

from __future__ import annotations

import pytest

from kvstore_wire.frames import END, Verb, head
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.integration.channel_scene import BULK, UNIX, Scene, is_answered, scene
from tests.integration.raw_peer import RawPeer
from tests.integration.server_process import until
from tests.shards import keys

QUIET = 0


async def _leased(at: Scene, peer: RawPeer) -> types.Lease:
    await at.fill(2)
    asked = at.caller.get_request(keys(0, 2))
    acquire = pb.AcquireRequest(session=asked.session, namespace=asked.namespace, chain=asked.chain, lease_ms=10_000)
    came = await peer.call(Verb.ACQUIRE, 5, acquire)
    assert at.local.gauge("leases") == 1
    return pb.AcquireResponse.FromString(came.message).lease


@pytest.mark.parametrize("kind", [BULK, UNIX])
async def test_the_lease_ends_and_the_next_answer_is_that_of_the_next_request(kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        lease = await _leased(at, peer)
        request = pb.ReleaseRequest(session=at.caller.session, leases=[lease])
        await peer.ask(Verb.RELEASE, QUIET, request)
        assert (await peer.call(Verb.MATCH, 6, at.caller.match_request(keys(0, 2)))).frame.request == 6
        await until(lambda: at.local.gauge("leases") == 0, "the lease is left")
        await peer.ask(Verb.RELEASE, QUIET, request)  # It has ended: not valid, which nobody asks.
        assert await is_answered(peer, at.caller)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff",
        pb.ReleaseRequest(session=b"no session here!", leases=[types.Lease(id=1)]).SerializeToString(),
        pb.ReleaseRequest(corrupt=[pb.CorruptPart(lease=9)]).SerializeToString(),
    ],
)
async def test_what_is_wrong_with_it_harms_nobody(raw: bytes) -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        lease = await _leased(at, peer)
        await peer.send(head(Verb.RELEASE, QUIET, raw, flags=END))
        assert await is_answered(peer, at.caller)
        assert at.local.gauge("leases") == 1
        answer = await peer.call(Verb.RELEASE, 9, pb.ReleaseRequest(session=at.caller.session, leases=[lease]))
        assert list(pb.ReleaseResponse.FromString(answer.message).valid) == [True]
        assert at.cut == {}


@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.MATCH, Verb.ABORT, Verb.GET])
async def test_no_other_request_goes_without_a_number(verb: Verb) -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await peer.send(head(verb, QUIET, flags=END))
        why = await peer.end()
        assert why is not None
        assert why.field == "frame.request"
