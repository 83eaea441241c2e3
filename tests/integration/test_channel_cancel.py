"""CANCEL on the fast channel: a request that was not answered gets one error, one that was gets nothing more."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvstore_wire.errors import DeadlineExceeded, UnknownSession
from kvstore_wire.frames import END, ERROR, Verb, head
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import COMMITTED, MISSING, attach_request, value
from tests.integration.channel_scene import (
    BULK,
    MIB,
    PART_BYTES,
    SPEC,
    UNIX,
    block,
    frame_of,
    got,
    is_answered,
    put_frames,
    scene,
    states,
)
from tests.integration.raw_peer import RawPeer
from tests.integration.server_process import until
from tests.shards import key, keys, kv_spec

pytestmark = pytest.mark.integration

each_kind = pytest.mark.parametrize("kind", [BULK, UNIX], ids=["bulk", "unix"])


async def cancel(peer: RawPeer, request: int) -> None:
    await peer.send(head(Verb.CANCEL, request, flags=END))


async def ends_cancelled(peer: RawPeer, verb: int, request: int) -> None:
    """The next frame is the error that ends a cancelled request."""
    came = await peer.next()
    assert (came.frame.verb, came.frame.request, came.frame.flags) == (verb, request, ERROR)
    assert isinstance(came.error, DeadlineExceeded)


@each_kind
async def test_what_is_not_known_is_not_answered(kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        await peer.ask(Verb.MATCH, 5, at.caller.match_request([key(0)]))
        assert (await peer.next()).frame.request == 5
        for request in (0, 5, 99, 2**32 - 1):
            await cancel(peer, request)
        assert await is_answered(peer, at.caller)


@each_kind
async def test_a_get_that_waits_for_its_writer(kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        reserved = await at.caller.reserve([key(0)])
        for verb, request in (
            (Verb.GET, at.caller.get_request([key(0)], wait_ms=5000)),
            (Verb.ACQUIRE, at.caller.acquire_request([key(0)], wait_ms=5000)),
        ):
            for _ in range(3):  # The number may be used again at once.
                await peer.ask(verb, 5, request)
                await until(lambda: at.local.gauge("waiting_acquires") == 1, "it does not wait")
                await cancel(peer, 5)
                await cancel(peer, 5)
                await ends_cancelled(peer, verb, 5)
                assert at.local.gauge("waiting_acquires") == 0, "it is over when it is answered"
        assert await is_answered(peer, at.caller)
        await at.caller.abort(reserved.lease)


async def test_a_get_that_waits_for_credit() -> None:
    async with scene() as at, at.connected(UNIX, credit_bytes=PART_BYTES) as peer:
        await at.fill(8)
        await peer.ask(Verb.GET, 5, at.caller.get_request(keys(0, 8)))
        first = await peer.next()
        assert (first.payload, first.frame.ends) == (block(0), False)
        assert at.local.gauge("leases") == 1
        await cancel(peer, 5)
        await ends_cancelled(peer, Verb.GET, 5)
        assert at.local.gauge("leases") == 0, "nobody waits for the deadline of its lease"
        assert await is_answered(peer, at.caller)


@pytest.mark.parametrize("blocks", [1, 2])
async def test_a_get_in_the_middle_of_a_frame(blocks: int) -> None:
    """The frame is finished, so that what follows can be read, but not with bytes of slots that may be others' now."""
    spec = kv_spec("big", part_bytes=MIB)
    flags = {"hot.page": "1MiB", "limits.max_part": "1MiB", "bulk.frame": "1MiB", "limits.max_call_bytes": "4MiB"}
    async with scene({**flags, "bulk.stall_timeout": "5s"}, spec) as at, at.connected(UNIX) as peer:
        values = [value(i, MIB) for i in range(2)]
        assert await at.caller.put(keys(0, 2), values) == [COMMITTED] * 2
        await peer.ask(Verb.GET, 5, at.caller.get_request(keys(0, blocks)))
        await until(lambda: at.local.gauge("leases") == 1, "it does not begin")
        await asyncio.sleep(0.05)
        await cancel(peer, 5)
        await until(lambda: at.local.gauge("leases") == 0, "its lease lives on")
        came = await peer.next()
        assert len(came.payload) == MIB
        sent = next(i for i in range(MIB, 0, -1) if came.payload[i - 1])
        assert 0 < sent < MIB, "some was on its way, and the rest is nothing"
        assert came.payload[:sent] == values[0][:sent]
        if blocks == 1:
            assert came.frame.flags == END, "it was the last frame: no error follows it"
        else:
            assert came.frame.flags == 0
            await ends_cancelled(peer, Verb.GET, 5)
        assert await is_answered(peer, at.caller)
        await peer.ask(Verb.GET, 6, at.caller.get_request([key(1)]))
        assert (await got(peer, 6))[1] == values[1]


@each_kind
@pytest.mark.parametrize("frames", [1, 2, 3])
async def test_a_put_before_its_trailer(frames: int, kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        whole = put_frames(5, at.caller.put_header(keys(0, 2)), [block(0), block(1)])
        for _ in range(2):
            await peer.send(b"".join(whole[:frames]))
            await until(lambda: at.local.gauge("leases") == 1, "it does not begin")
            await cancel(peer, 5)
            await ends_cancelled(peer, Verb.PUT, 5)
            assert at.local.gauge("leases") == 0
        assert await at.caller.match(keys(0, 2)) == [MISSING] * 2
        await peer.send(b"".join(whole))
        assert states((await peer.next_of(5)).message) == [COMMITTED] * 2


async def test_a_put_after_its_trailer() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        at.local.failpoints.arm("put.commit", "delay:10s")
        whole = b"".join(put_frames(5, at.caller.put_header([key(0)]), [block(0)]))
        await peer.send(whole)
        await until(lambda: at.local.gauge("leases") == 1, "it does not begin")
        await asyncio.sleep(0.05)
        await cancel(peer, 5)
        await ends_cancelled(peer, Verb.PUT, 5)
        await at.free_again()
        assert await at.caller.match([key(0)]) == [MISSING]
        at.local.failpoints.disarm("put.commit")
        await peer.send(whole + head(Verb.CANCEL, 5, flags=END))
        assert states((await peer.next()).message) == [COMMITTED]
        assert await is_answered(peer, at.caller), "a cancel that came too late is not answered"


@each_kind
async def test_a_put_that_was_refused(kind: int) -> None:
    """The cancel stands for the rest of its frames."""
    async with scene() as at, at.connected(kind) as peer:
        header = at.caller.put_header([key(0)])
        header.session = bytes(16)
        for _ in range(3):
            await peer.send(b"".join(put_frames(5, header, [block(0)])[:2]) + head(Verb.CANCEL, 5, flags=END))
            came = await peer.next()
            assert isinstance(came.error, UnknownSession)
            assert await is_answered(peer, at.caller)


@each_kind
async def test_a_session_ends_before_its_cancel_is_answered(kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        attached = pb.AttachResponse.FromString((await peer.call(Verb.ATTACH, 4, attach_request(SPEC))).message)
        await peer.ask(Verb.SESSION, 5, pb.SessionPulse(session=attached.session), flags=0)
        assert pb.SessionNotice.FromString((await peer.next()).message).HasField("opened")
        await peer.send(b"".join(put_frames(6, own_header(attached), [block(0)])[:2]))
        await until(lambda: at.local.gauge("leases") == 1, "the Put did not begin")
        sessions = at.local.gauge("sessions")
        await cancel(peer, 5)
        await ends_cancelled(peer, Verb.SESSION, 5)
        assert (at.local.gauge("sessions"), at.local.gauge("leases")) == (sessions - 1, 0)
        await peer.send(head(Verb.PUT, 6, payload_bytes=1) + b"x")
        came = await peer.next()
        assert (came.frame.request, came.frame.flags) == (6, ERROR), "its Put has lost its lease"
        await cancel(peer, 6)
        assert await is_answered(peer, at.caller)


async def test_a_session_that_the_caller_ends() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        attached = pb.AttachResponse.FromString((await peer.call(Verb.ATTACH, 4, attach_request(SPEC))).message)
        pulse = pb.SessionPulse(session=attached.session)
        await peer.ask(Verb.SESSION, 5, pulse, flags=0)
        assert not (await peer.next()).frame.ends
        for _ in range(5000):
            await peer.ask(Verb.SESSION, 5, pulse, flags=0)
        await peer.ask(Verb.SESSION, 5, pulse)
        came = await peer.next()
        assert (came.frame.request, came.frame.flags, came.message) == (5, END, b"")
        assert await is_answered(peer, at.caller)


@pytest.mark.parametrize("name", ["Delete", "Explain", "Match"])
async def test_a_call_that_takes_its_time(name: str) -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        session, namespace, chain = at.caller.session, at.caller.namespace, types.Chain(keys=[key(0)])
        request = {
            "Delete": pb.DeleteRequest(session=session, namespace=namespace, keys=[key(0)]),
            "Explain": pb.ExplainRequest(session=session, namespace=namespace, chain=chain),
            "Match": pb.MatchRequest(session=session, namespace=namespace, chain=chain),
        }[name]
        at.local.failpoints.arm(f"before.{name}", "delay:10s*1")
        await peer.ask(Verb[name.upper()], 5, request)
        await cancel(peer, 5)
        await ends_cancelled(peer, Verb[name.upper()], 5)
        assert await is_answered(peer, at.caller)


@pytest.mark.parametrize("verb", [Verb.GET, Verb.PUT])
async def test_a_copy_to_or_from_a_region_is_over_when_its_cancel_is_answered(verb: Verb) -> None:
    point = "region.drain" if verb == Verb.GET else "region.fill"
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(1)
        fd = os.memfd_create("region")
        os.truncate(fd, PART_BYTES)
        asked = channel.RegisterRegionRequest(session=at.caller.session, length=PART_BYTES)
        peer.send_with(frame_of(Verb.REGISTER_REGION, 3, asked), fd)
        number = channel.RegisterRegionResponse.FromString((await peer.next()).message).region
        region = at.local.server.shell.regions.get(at.caller.session, number)
        at.local.failpoints.arm(point, "delay:10s*1")
        slices = types.RegionSlices(region=number, offsets=[0], lengths=[PART_BYTES])
        if verb == Verb.GET:
            get = at.caller.get_request([key(0)])
            get.into.CopyFrom(slices)
            await peer.ask(verb, 5, get)
        else:
            header = at.caller.put_header([key(1)])
            header.source.CopyFrom(slices)
            begun, trailer = put_frames(5, header, [])
            await peer.send(begun + trailer)
        await until(lambda: region.copies == 1, "the copy did not begin")
        await cancel(peer, 5)
        await ends_cancelled(peer, verb, 5)
        assert verb == Verb.PUT or region.copies == 0, "the shard may still write to the client's memory"
        await until(lambda: region.copies == 0, "a copy is under way")
        await at.free_again()
        assert os.pread(fd, PART_BYTES, 0) == bytes(PART_BYTES)
        assert await at.caller.match([key(1)]) == [MISSING]
        os.close(fd)


def own_header(attached: pb.AttachResponse) -> pb.PutHeader:
    return pb.PutHeader(session=attached.session, namespace=attached.namespace, chain=types.Chain(keys=[key(0)]))
