"""A Get whose answer is one frame is sent at once and without a lease; what the socket does not take is leased."""

from __future__ import annotations

import pytest

from kvstore.core.sessions import Session
from kvstore_wire.errors import TableFull
from kvstore_wire.frames import END, Verb, head
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from tests.contract.caller import COMMITTED, checksum, value
from tests.integration.channel_scene import BULK, MIB, UNIX, Scene, got, is_answered, scene
from tests.integration.raw_peer import RawPeer
from tests.integration.server_process import until
from tests.shards import key, keys, kv_spec

SPEC = kv_spec("large", part_bytes=MIB)
FLAGS = {"hot.capacity": "16MiB", "bulk.frame": "2MiB", "bulk.credit": "8MiB", "bulk.stall_timeout": "20s"}
ONE = value(0, MIB)


async def _ask(at: Scene, peer: RawPeer, request: int, *, timeout_ms: int = 0) -> None:
    """Asks for a block; a Unix socket takes a fifth of it."""
    await peer.ask(Verb.GET, request, at.caller.get_request([key(0)]), timeout_ms=timeout_ms)


async def _leases(at: Scene, count: int) -> None:
    await until(lambda: at.local.gauge("leases") == count, f"there are {at.local.gauge('leases')} leases")


def _read_bytes(at: Scene) -> int:
    return at.local.server.shell.store.counters()["read_bytes"]


async def _stored(at: Scene) -> None:
    assert await at.caller.put([key(0)], [ONE]) == [COMMITTED]


async def test_what_the_socket_does_not_take_stays_where_it_is_until_it_was_sent() -> None:
    async with scene(FLAGS, SPEC) as at, at.connected(UNIX) as peer:
        await _stored(at)
        await _ask(at, peer, 7)
        await _leases(at, 1)
        await at.caller.delete([key(0)])
        others = keys(100, 114)  # All other slots, twice.
        for _ in range(2):
            for other in others:
                assert await at.caller.put([other], [value(1, MIB)]) == [COMMITTED]
            await at.caller.delete(others)
        header, payload, error = await got(peer, 7)
        assert (payload, list(header.checksums), error) == (ONE, [checksum(ONE)], None)
        await _leases(at, 0)
        assert await is_answered(peer, at.caller)


@pytest.mark.parametrize("kind", [BULK, UNIX])
async def test_bytes_count_once_however_they_leave(kind: int) -> None:
    async with scene(FLAGS, SPEC) as at, at.connected(kind) as peer:
        await _stored(at)
        for request in range(2, 12):
            before = _read_bytes(at)
            await _ask(at, peer, request)
            assert (await got(peer, request))[1:] == (ONE, None)
            assert _read_bytes(at) - before == MIB
        counters = at.local.server.shell.store.counters()
        assert counters["acquire_calls"] == counters["acquire_asked_blocks"] == 10


async def test_a_lease_that_ends_under_the_frame_cuts_the_connection() -> None:
    """The frame claims to be the last: zeros in place of bytes must not pass for them."""
    async with scene(FLAGS, SPEC) as at, at.connected(UNIX) as peer:
        await _stored(at)
        await _ask(at, peer, 7, timeout_ms=300)
        await _leases(at, 1)
        await _leases(at, 0)
        with pytest.raises(ConnectionError):
            await got(peer, 7)
        assert at.cut == {"LeaseExpired": 1}


async def test_a_session_without_room_for_a_lease_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: Session) -> None:
        raise TableFull("too many leases", field="leases")

    async with scene(FLAGS, SPEC) as at, at.connected(UNIX) as peer:
        await _stored(at)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "check_room", no_room)
            await _ask(at, peer, 7)
            header, payload, error = await got(peer, 7)
        assert (payload, list(header.checksums), error) == (ONE, [checksum(ONE)], None)
        assert await is_answered(peer, at.caller)


async def test_a_cancelled_one_finishes_its_frame_and_lets_go() -> None:
    async with scene(FLAGS, SPEC) as at, at.connected(UNIX) as peer:
        await _stored(at)
        await _ask(at, peer, 7)
        await _leases(at, 1)
        await peer.send(head(Verb.CANCEL, 7, flags=END))
        await _leases(at, 0)
        came = await peer.next_of(7)
        assert (came.frame.ends, len(came.payload)) == (True, MIB)
        assert came.payload[: MIB // 16] == ONE[: MIB // 16]
        assert await is_answered(peer, at.caller)


async def test_answers_one_after_the_other_go_on_where_the_socket_is_full() -> None:
    async with scene(FLAGS, SPEC) as at, at.connected(UNIX, credit_bytes=64 << 20) as peer:
        await _stored(at)
        for request in range(2, 10):
            await _ask(at, peer, request)
        await until(lambda: at.local.gauge("leases") > 1, "they are not under way")
        for request in range(2, 10):
            assert (await got(peer, request))[1:] == (ONE, None)
        await _leases(at, 0)


async def test_no_more_than_was_granted_is_sent_at_once() -> None:
    async with scene(FLAGS, SPEC) as at, at.connected(BULK, credit_bytes=MIB // 2) as peer:
        await _stored(at)
        await _ask(at, peer, 7)
        first = await peer.next_of(7)
        assert (first.frame.ends, first.payload) == (False, ONE[: MIB // 2])
        grant = channel.Credit(bytes=MIB)
        await peer.send(head(Verb.CREDIT, 0, grant.SerializeToString(), flags=END))
        rest = await peer.next_of(7)
        assert (rest.frame.ends, rest.payload) == (True, ONE[MIB // 2 :])
        assert not pb.GetResponse.FromString(rest.message).HasField("header")


@pytest.mark.parametrize("count", [1022, 1023, 1024, 2000])
async def test_more_parts_than_one_system_call_takes_come_whole(count: int) -> None:
    spec = kv_spec("tiny", part_bytes=512)
    async with scene(FLAGS, spec) as at, at.connected(BULK) as peer:
        chain, values = keys(0, count), [value(i, 512) for i in range(count)]
        assert await at.caller.put(chain, values) == [COMMITTED] * count
        await peer.ask(Verb.GET, 7, at.caller.get_request(chain))
        header, payload, error = await got(peer, 7)
        assert (payload, list(header.checksums), error) == (b"".join(values), [checksum(v) for v in values], None)
        await _leases(at, 0)
        assert await is_answered(peer, at.caller)
