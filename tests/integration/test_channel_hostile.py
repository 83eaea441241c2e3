"""Peers of the fast channel that break its rules: each is told why and cut, and nothing of theirs is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from kvstore.service.framed.requests import HELD_MESSAGES
from kvstore_wire.errors import DeadlineExceeded, Denied, InvalidArgument, TableFull, UnknownSession, Unsupported
from kvstore_wire.frames import END, ERROR, HEADER, MAGIC, MAX_OPEN_REQUESTS, VERSION, Verb, head, header
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from tests.contract.caller import COMMITTED, HOT, MISSING, Caller, value
from tests.contract.doors import GrpcDoor
from tests.integration.channel_scene import (
    BULK,
    KIB,
    MIB,
    PART_BYTES,
    UNIX,
    Scene,
    block,
    frame_of,
    got,
    is_answered,
    put_frames,
    scene,
    states,
)
from tests.integration.raw_peer import RawPeer, connected
from tests.integration.server_process import serving, until
from tests.shards import key, keys, kv_spec

pytestmark = pytest.mark.integration

each_kind = pytest.mark.parametrize("kind", [BULK, UNIX], ids=["bulk", "unix"])


def two_blocks(at: Scene, request: int = 7) -> list[bytes]:
    """A whole Put of two blocks: header, two frames of payload, trailer."""
    return put_frames(request, at.caller.put_header(keys(0, 2)), [block(0), block(1)])


# -- streams that end or stop in the middle ------------------------------------------------------------------------

# How many whole frames of the Put are sent, and how many bytes of the next.
CUTS = {
    "in a header": (0, 10),
    "in a message": (0, 34),
    "between frames": (1, 0),
    "in a later header": (1, 23),
    "in a payload": (2, 1000),
    "before the trailer": (3, 0),
    "in the trailer": (3, 30),
}


def cut(frames: list[bytes], where: str) -> bytes:
    whole, more = CUTS[where]
    return b"".join(frames[:whole]) + frames[whole][:more]


@each_kind
@pytest.mark.parametrize("where", sorted(CUTS))
async def test_a_peer_that_goes_in_the_middle_leaves_nothing(where: str, kind: int) -> None:
    async with scene() as at:
        async with at.connected(kind) as peer:
            await peer.send(cut(two_blocks(at), where))
            if CUTS[where][0]:
                await until(lambda: at.local.gauge("leases") == 1, "the Put did not begin")
        await at.free_again()
        assert await at.caller.match(keys(0, 2)) == [MISSING] * 2
        assert at.cut == {}, "who closes is not cut"


@each_kind
@pytest.mark.parametrize("where", sorted(CUTS))
async def test_a_peer_that_stops_in_the_middle_is_cut_and_its_slots_come_back(where: str, kind: int) -> None:
    async with scene() as at:
        async with at.connected(kind) as peer:
            await peer.send(cut(two_blocks(at), where))
            assert isinstance(await peer.end(), DeadlineExceeded)
            await at.free_again()
        assert at.cut == {"DeadlineExceeded": 1}
        assert await at.caller.match(keys(0, 2)) == [MISSING] * 2


async def test_a_slow_peer_that_moves_is_not_cut() -> None:
    async with scene({"bulk.stall_timeout": "300ms"}) as at, at.connected(UNIX) as peer:
        raw = b"".join(two_blocks(at))
        step = len(raw) // 8 + 1
        for begin in range(0, len(raw), step):
            await peer.send(raw[begin : begin + step])
            await asyncio.sleep(0.1)
        came = await peer.next_of(7)
        assert states(came.message) == [COMMITTED] * 2
        await asyncio.sleep(0.6)
        assert await is_answered(peer, at.caller), "who is idle owes nothing"


# -- what is no frame, and frames that break a rule ----------------------------------------------------------------


def bad_headers() -> dict[str, bytes]:
    match = (Verb.MATCH, END, 0, 5, 0, 0, 0)
    return {
        "frame.magic": HEADER.pack(MAGIC ^ 0x0100, VERSION, *match),
        "frame.version": HEADER.pack(MAGIC, VERSION + 1, *match),
        "frame.flags": HEADER.pack(MAGIC, VERSION, Verb.MATCH, 8, 0, 5, 0, 0, 0),
        "frame.flags ": header(Verb.MATCH, 5, flags=ERROR),
        "frame.flags  ": header(Verb.MATCH, 5),
        "frame.reserved": HEADER.pack(MAGIC, VERSION, Verb.MATCH, END, 1, 5, 0, 0, 0),
        "frame.message_bytes": header(Verb.MATCH, 5, flags=END, message_bytes=256 * KIB + 1),
        "frame.payload_bytes": header(Verb.PUT, 5, payload_bytes=64 * KIB + 1),
        "frame.payload_bytes ": header(Verb.MATCH, 5, flags=END, payload_bytes=1),
        "frame.payload_bytes  ": header(Verb.CREDIT, 0, flags=END, payload_bytes=1),
        "frame.payload_bytes   ": header(Verb.SESSION, 5, payload_bytes=1),
        "frame.payload_bytes    ": header(99, 5, flags=END, payload_bytes=1),
        "frame.request": header(Verb.MATCH, 0, flags=END),
        "message": head(Verb.CREDIT, 0, b"\xff", flags=END),
    }


@each_kind
@pytest.mark.parametrize("name", sorted(bad_headers()))
async def test_what_breaks_the_framing_is_named_and_cut(name: str, kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        await peer.send(bad_headers()[name] + bytes(100))
        why = await peer.end()
        assert isinstance(why, InvalidArgument)
        assert why.field == name.rstrip()
        assert at.cut == {"InvalidArgument": 1}


async def test_what_was_answered_before_the_fault_is_still_told() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        asked = frame_of(Verb.MATCH, 5, at.caller.match_request([key(0)]))
        await peer.send(asked + bytes(24))
        assert (await peer.next()).frame.request == 5
        assert isinstance(await peer.end(), InvalidArgument)


@each_kind
async def test_frames_of_two_requests_that_share_a_number_are_cut(kind: int) -> None:
    async with scene() as at:
        reserved = await at.caller.reserve([key(0)])
        waiting = frame_of(Verb.GET, 5, at.caller.get_request([key(0)], wait_ms=5000))
        begun = put_frames(5, at.caller.put_header([key(1)]), [block(1)])
        session = frame_of(Verb.SESSION, 5, pb.SessionPulse(session=at.caller.session), flags=0)
        at.local.failpoints.arm("before.Session", "delay:2s")
        again = frame_of(Verb.MATCH, 5, at.caller.match_request([key(0)]))
        for first in (waiting, begun[0], session):
            for second in (again, waiting, begun[0] if first == session else session):
                async with at.connected(kind) as peer:
                    await peer.send(first + second)
                    why = await peer.end()
                    assert isinstance(why, InvalidArgument)
                    assert why.field == "frame.request"
        await at.caller.abort(reserved.lease)


async def test_no_frame_follows_the_last_of_its_request() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        at.local.failpoints.arm("put.commit", "delay:5s")
        await peer.send(b"".join(two_blocks(at)) + head(Verb.PUT, 7, payload_bytes=3) + b"abc")
        assert isinstance(await peer.end(), InvalidArgument)
        at.local.failpoints.disarm("put.commit")


@each_kind
async def test_nothing_comes_before_the_greeting(kind: int) -> None:
    async with scene() as at:
        for verb in (Verb.MATCH, Verb.CREDIT, Verb.CANCEL, Verb.PUT, 99):
            async with at.connected(kind, greets=False) as peer:
                await peer.send(header(verb, 1, flags=END))
                why = await peer.end()
                assert isinstance(why, InvalidArgument)
                assert (why.field, why.limit) == ("frame.verb", "1")


@each_kind
async def test_who_does_not_greet_is_cut_in_time(kind: int) -> None:
    for said in (b"", b"K"):
        async with (
            scene({"lease.session_open_timeout": "300ms"}) as at,
            at.connected(kind, greets=False) as silent,
        ):
            await silent.send(said)
            assert isinstance(await silent.end(), DeadlineExceeded)


async def test_a_greeting_that_is_refused_leaves_the_connection_open() -> None:
    async with scene() as at, at.connected(UNIX, greets=False) as peer:
        for hello, error in (
            (channel.Hello(credit_bytes=65535), InvalidArgument),
            (channel.Hello(session=bytes(16), credit_bytes=65536), UnknownSession),
        ):
            assert isinstance((await peer.call(Verb.HELLO, 1, hello)).error, error)
        answer = await peer.hello()
        assert answer.generation == at.local.server.shell.generation
        assert (answer.max_frame_bytes, answer.credit_bytes, answer.may_map) == (64 * KIB, MIB, True)
        twice = await peer.call(Verb.HELLO, 2, channel.Hello(credit_bytes=65536))
        assert isinstance(twice.error, InvalidArgument)
        assert await is_answered(peer, at.caller)


@each_kind
async def test_an_unknown_verb_is_answered_and_the_connection_lives(kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        for verb in (0, 5, 11, 30, 255):
            await peer.send(head(verb, 3, b"whatever", flags=END))
            came = await peer.next()
            assert came.frame.verb == verb
            assert isinstance(came.error, Unsupported)
            assert came.error.status == "UNIMPLEMENTED"
        assert await is_answered(peer, at.caller)


async def test_messages_that_cannot_be_read_are_answered_and_the_connection_lives() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        for verb in (v for v in Verb if v not in (Verb.GOODBYE, Verb.CREDIT, Verb.CANCEL)):
            await peer.send(head(verb, 3, b"\xff\xff\xff", flags=END))
            came = await peer.next()
            assert (came.frame.verb, came.frame.request) == (verb, 3)
            assert isinstance(came.error, InvalidArgument), verb
        assert await is_answered(peer, at.caller)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_goodbye_is_taken_at_its_word(goes_on: bool) -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        *begun, trailer = two_blocks(at)
        await peer.send(b"".join(begun))
        await until(lambda: at.local.gauge("leases") == 1, "the Put did not begin")
        await peer.send(head(Verb.GOODBYE, 0, flags=END) + trailer * goes_on)
        assert isinstance(await peer.end(), InvalidArgument if goes_on else type(None))
        assert await at.caller.match(keys(0, 2)) == [MISSING] * 2
        assert at.cut == ({"InvalidArgument": 1} if goes_on else {})


# -- Puts that go wrong --------------------------------------------------------------------------------------------


@each_kind
async def test_a_put_that_was_refused_takes_the_rest_of_its_bytes_and_the_connection_lives(kind: int) -> None:
    async with scene() as at, at.connected(kind) as peer:
        wrong = at.caller.put_header(keys(0, 2))
        wrong.namespace = 77
        begun, *payload, trailer = put_frames(7, wrong, [block(0), block(1)])
        too_long = put_frames(8, at.caller.put_header([key(0)]), [block(0), block(1)])
        for frames, field in (([begun, *payload, trailer], "namespace"), (too_long, "data")):
            await peer.send(b"".join(frames))
            while (came := await peer.next()).frame.verb == Verb.CREDIT:
                pass
            assert came.error is not None
            assert came.error.field == field
            assert await is_answered(peer, at.caller)
        await peer.send(b"".join(put_frames(7, at.caller.put_header([key(0)]), [block(0)])))
        assert states((await peer.next_of(7)).message) == [COMMITTED]


async def test_a_put_in_an_odd_order_is_refused_and_stores_nothing() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        begun, payload, trailer = put_frames(7, at.caller.put_header([key(0)]), [block(0)])
        data = frame_of(Verb.PUT, 7, pb.PutRequest(data=b"x"))
        early = trailer[:4] + b"\0" + trailer[5:]  # A trailer that is not the last.
        for frames in (
            [trailer],
            [payload, trailer],
            [begun, begun, trailer],
            [begun, trailer],
            [begun, payload, early, trailer],
            [begun, payload, data],
            [begun, payload, header(Verb.PUT, 7, flags=END)],
            [begun, header(Verb.PUT, 7), header(Verb.PUT, 7, flags=END)],
        ):
            await peer.send(b"".join(frames))
            came = await peer.next_of(7)
            assert isinstance(came.error, InvalidArgument)
            assert came.frame.flags == ERROR
            assert await is_answered(peer, at.caller), "one answer and no more"
        assert await at.caller.match([key(0)]) == [MISSING]


async def test_more_payload_than_the_credit_is_taken_as_it_comes() -> None:
    """Credit bounds what is on its way; here payload is in its slots when it is counted, and granted anew at once."""
    async with scene() as at, at.connected(UNIX) as peer:
        blocks = 64
        values = [block(i) for i in range(blocks)]
        sending = asyncio.ensure_future(
            peer.send(b"".join(put_frames(7, at.caller.put_header(keys(0, blocks)), values)))
        )
        granted = 0
        while (came := await peer.next()).frame.verb == Verb.CREDIT:
            granted += channel.Credit.FromString(came.message).bytes
        await sending
        assert states(came.message) == [COMMITTED] * blocks
        assert granted == blocks * PART_BYTES


# -- many ----------------------------------------------------------------------------------------------------------


@each_kind
async def test_a_thousand_requests_may_be_open_and_go_with_their_connection(kind: int) -> None:
    async with scene({"limits.max_wait": "60s"}) as at:
        reserved = await at.caller.reserve([key(0)], lease_ms=60_000)
        request = at.caller.get_request([key(0)], wait_ms=60_000)
        async with at.connected(kind) as peer:
            await peer.send(b"".join(frame_of(Verb.GET, i, request) for i in range(2, 2 + MAX_OPEN_REQUESTS)))
            await until(lambda: at.local.gauge("waiting_acquires") == MAX_OPEN_REQUESTS, "not all of them wait")
            assert await at.caller.match([key(1)]) == [MISSING], "others are served"
        await until(lambda: at.local.gauge("waiting_acquires") == 0, "some still wait")
        async with at.connected(kind) as peer:
            await peer.send(b"".join(frame_of(Verb.GET, i, request) for i in range(2, 3 + MAX_OPEN_REQUESTS)))
            why = await peer.end()
            assert isinstance(why, InvalidArgument)
            assert (why.field, why.limit) == ("frame.request", f"{MAX_OPEN_REQUESTS}")
        async with at.connected(kind) as peer:
            await peer.send(b"".join(frame_of(Verb.GET, i, request, flags=END) for i in range(2, 100)))
            await until(lambda: at.local.gauge("waiting_acquires") == 98, "not all of them wait")
            await at.caller.fill(reserved.lease, [block(0)])
            for i in range(2, 100):
                assert (await got(peer, i))[1:] == (block(0), None)


async def test_gets_whose_deadline_passes_are_answered_and_forgotten() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        reserved = await at.caller.reserve([key(0)])
        request = at.caller.get_request([key(0)], wait_ms=20_000).SerializeToString()
        numbers = range(2, 502)
        await peer.send(b"".join(head(Verb.GET, i, request, flags=END, timeout_ms=50) for i in numbers))
        for i in numbers:
            header, payload, error = await got(peer, i)
            assert error is None
            assert (list(header.states), payload) == ([2 + 1], b"") or list(header.states) == [MISSING]
        await at.caller.abort(reserved.lease)


async def test_messages_of_requests_that_wait_are_bounded() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        reserved = await at.caller.reserve([key(0)])
        request = at.caller.get_request([key(0)] * 1024, wait_ms=20_000)
        fit = HELD_MESSAGES * 256 * KIB // request.ByteSize()
        for i in range(fit + 2):
            await peer.ask(Verb.GET, 10 + i, request)
        for i in range(2):
            came = await peer.next()
            assert came.frame.request == 10 + fit + i
            assert isinstance(came.error, TableFull)
        assert at.local.gauge("waiting_acquires") == fit
        await at.caller.abort(reserved.lease)
        for i in range(fit):
            assert (await got(peer, 10 + i))[2] is None
        await peer.ask(Verb.GET, 5, request)
        assert (await got(peer, 5))[2] is None


async def test_connections_are_counted_and_one_too_many_is_told_so() -> None:
    async with scene({"bulk.max_connections": "2"}) as at:
        async with at.connected(BULK) as first, at.connected(UNIX):
            for kind in (BULK, UNIX):
                async with at.connected(kind, greets=False) as third:
                    why = await third.end()
                    assert isinstance(why, TableFull)
                    assert (why.field, why.limit) == ("bulk.max_connections", "2")
            assert await is_answered(first, at.caller)
        await until(lambda: at.local.server.channel.connection_count == 0, "a connection is left")
        async with at.connected(BULK) as again:
            assert await is_answered(again, at.caller)


async def test_who_may_not_connect_is_told_so() -> None:
    async with scene({"shm.allow_uids": "54321"}) as at:
        async with at.connected(UNIX, greets=False) as stranger:
            why = await stranger.end()
            assert isinstance(why, Denied)
            assert why.field == "shm.allow_uids"
        async with at.connected(BULK) as peer:
            assert await is_answered(peer, at.caller), "TCP has no uids"


# -- peers that do not read ----------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("credit_bytes", [64 * KIB, 64 << 20])
async def test_a_reader_that_never_reads_is_cut_and_its_leases_end(kind: int, credit_bytes: int) -> None:
    """With little credit the shard waits for a grant, with much for the socket."""
    spec = kv_spec("big", part_bytes=MIB)
    flags = {"hot.capacity": "64MiB", "hot.page": "1MiB", "limits.max_part": "1MiB"}
    async with scene(flags, spec) as at, at.connected(kind, credit_bytes=credit_bytes) as peer:
        for i in range(0, 32, 4):
            await at.caller.put(keys(i, i + 4), [value(n, MIB) for n in range(i, i + 4)])
        shrink(peer)
        for i in range(2, 10):
            await peer.ask(Verb.GET, i, at.caller.get_request(keys(0, 32)))
        await until(lambda: at.local.gauge("leases") == 8, "they do not read yet")
        assert (await at.caller.get([key(3)])).parts == [value(3, MIB)], "others are served meanwhile"
        await at.free_again()
        assert at.cut == {"DeadlineExceeded": 1}
        assert await at.caller.match(keys(0, 32)) == [HOT] * 32, "no stored block went"


def shrink(peer: RawPeer) -> None:
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


async def test_answers_that_nobody_reads_stop_the_reading_of_requests() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        flood, sent = header(99, 3, flags=END) * 4096, 0
        with contextlib.suppress(ConnectionError):
            while sent < 16 * MIB:
                await peer.send(flood)
                sent += len(flood)
        assert sent < 16 * MIB, "it read on and on"
        assert at.cut == {"DeadlineExceeded": 1}


async def test_slow_readers_cost_no_memory_and_no_stored_block() -> None:
    """32 readers ask for 256 MiB each, 8 GiB in all, and do not read."""
    flags = {"hot.capacity": "64MiB", "bulk.stall_timeout": "1s"}
    with serving(flags) as process:
        door = GrpcDoor(process.target, process.admin_target)
        caller = await Caller.open(door, kv_spec("a", part_bytes=MIB))
        for i in range(0, 32, 8):
            await caller.put(keys(i, i + 8), [value(n, MIB) for n in range(i, i + 8)])
        offers = {t.name: t.address for t in caller.attached.transports}
        port = offers["bulk"].rpartition(":")[2]
        before = process.rss_anon_bytes()
        peers = []
        for i in range(32):
            address = f"unix:{offers['shm']}" if i % 2 else f"127.0.0.1:{port}"
            context = connected(address)
            peers.append((context, await context.__aenter__()))
            await peers[-1][1].ask(Verb.GET, 2, caller.get_request(keys(0, 32) * 8))
        peak = before
        for _ in range(10):
            await asyncio.sleep(0.05)
            peak = max(peak, process.rss_anon_bytes())
        assert peak - before < 32 * MIB, f"{(peak - before) >> 20} MiB for readers that do not read"
        assert await caller.match(keys(0, 32)) == [HOT] * 32
        for _ in range(200):
            if await caller.gauge("leased_bytes") == 0:
                break
            await asyncio.sleep(0.05)
        assert await caller.gauge("leased_bytes") == 0
        assert (await caller.get(keys(0, 4))).parts == [value(i, MIB) for i in range(4)]
        for context, _ in peers:
            await context.__aexit__(None, None, None)
        await caller.close()
        await door.close()
