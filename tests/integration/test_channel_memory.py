"""Memory over the fast channel: descriptors that pass with frames, regions of the client's own, the arena's mapping."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvstore_wire.errors import Denied, InvalidArgument, TableFull, UnknownSession
from kvstore_wire.frames import END, Verb, head
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import COMMITTED, EACH, HOT, MISSING, Caller, checksum
from tests.integration.channel_scene import (
    BULK,
    PART_BYTES,
    SPEC,
    UNIX,
    Scene,
    block,
    frame_of,
    got,
    is_answered,
    open_fds,
    put_frames,
    scene,
    states,
)
from tests.integration.raw_peer import RawPeer
from tests.integration.server_process import until
from tests.shards import key, keys

pytestmark = pytest.mark.integration


@contextmanager
def memory(size_bytes: int) -> Iterator[int]:
    fd = os.memfd_create("region", os.MFD_CLOEXEC)
    os.truncate(fd, size_bytes)
    try:
        yield fd
    finally:
        os.close(fd)


def asked(at: Scene, length: int, *, offset: int = 0, session: bytes | None = None) -> bytes:
    """A frame that registers a region."""
    request = channel.RegisterRegionRequest(session=session or at.caller.session, offset=offset, length=length)
    return frame_of(Verb.REGISTER_REGION, 3, request)


async def registered(at: Scene, peer: RawPeer, fd: int, length: int) -> int:
    """Registers a region and returns its number."""
    peer.send_with(asked(at, length), fd)
    came = await peer.next()
    assert came.error is None
    return channel.RegisterRegionResponse.FromString(came.message).region


def slices(region: int, offsets: list[int], length: int = PART_BYTES) -> types.RegionSlices:
    return types.RegionSlices(region=region, offsets=offsets, lengths=[length] * len(offsets))


def put_from(at: Scene, chain: list[bytes], source: types.RegionSlices, values: list[bytes]) -> bytes:
    """A whole Put whose bytes the shard takes from a region."""
    header = at.caller.put_header(chain)
    header.source.CopyFrom(source)
    trailer = pb.PutRequest(trailer=pb.PutTrailer(checksums=[checksum(v) for v in values]))
    return put_frames(5, header, [])[0] + frame_of(Verb.PUT, 5, trailer)


def get_into(at: Scene, chain: list[bytes], into: types.RegionSlices) -> pb.GetRequest:
    request = at.caller.get_request(chain, coverage=EACH)
    request.into.CopyFrom(into)
    return request


# -- descriptors ---------------------------------------------------------------------------------------------------


async def test_descriptors_that_nobody_asked_for_are_closed_and_their_sender_is_cut() -> None:
    async with scene() as at:
        match = frame_of(Verb.MATCH, 5, at.caller.match_request([key(0)]))
        register = asked(at, 4096)
        with memory(4096) as fd:
            for data, count in ((match, 1), (match, 4), (match, 40), (register, 2), (register, 40), (register, 250)):
                before = open_fds()
                async with at.connected(UNIX) as peer:
                    peer.send_with(data, *[fd] * count)
                    why = await peer.end()
                    assert isinstance(why, InvalidArgument)
                    assert why.field == "fd"
                await until(lambda before=before: open_fds() == before, "a descriptor is left")  # type: ignore[misc]
        assert at.local.server.shell.regions.region_count == 0


async def test_a_descriptor_without_a_whole_frame_is_kept_only_as_long_as_the_connection() -> None:
    async with scene() as at:
        before = open_fds()
        with memory(4096) as fd:
            async with at.connected(UNIX) as peer:
                peer.send_with(asked(at, 4096)[:30], fd)
                await until(lambda: open_fds() == before + 4, "it did not come")  # Two sockets, the file, and its copy.
            await until(lambda: open_fds() == before + 1, "it is left")


async def test_a_frame_cut_in_two_still_has_its_descriptor() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        with memory(4096) as fd:
            for cut in (1, 23, 24, 30):
                raw = asked(at, 4096)
                peer.send_with(raw[:cut], fd)
                await asyncio.sleep(0.02)
                await peer.send(raw[cut:])
                assert (await peer.next()).error is None
            for _ in range(3):  # Several in one go, each with its own.
                peer.send_with(asked(at, 4096), fd)
            assert [(await peer.next()).error for _ in range(3)] == [None] * 3
        assert at.local.server.shell.regions.region_count == 7


async def test_a_registration_that_fails_closes_its_descriptor_and_the_connection_lives() -> None:
    async with scene({"shm.max_regions": "2", "shm.max_region_bytes": "64KiB"}) as at, at.connected(UNIX) as peer:
        pipe, plain = os.pipe(), os.open("/etc/hostname", os.O_RDONLY)
        with memory(4096) as fd, memory(128 << 10) as large:
            before = open_fds()
            cases: list[tuple[bytes, int, type[Exception], str]] = [
                (asked(at, 4096, session=bytes(16)), fd, UnknownSession, "session"),
                (head(Verb.REGISTER_REGION, 3, b"\xff", flags=END), fd, InvalidArgument, "message"),
                (asked(at, 4097), fd, InvalidArgument, "length"),
                (asked(at, 0), fd, InvalidArgument, "length"),
                (asked(at, 1, offset=2**64 - 1), fd, InvalidArgument, "length"),
                (asked(at, 2**64 - 1), fd, TableFull, "max_region_bytes"),
                (asked(at, 65537), large, TableFull, "max_region_bytes"),
                (asked(at, 1), pipe[0], InvalidArgument, "fd"),
                (asked(at, 1), plain, InvalidArgument, "fd"),
                (asked(at, 1), peer.sock.fileno(), InvalidArgument, "fd"),
            ]
            for data, given, kind, field in cases:
                peer.send_with(data, given)
                came = await peer.next()
                assert isinstance(came.error, kind), field
                assert came.error.field == field
                assert open_fds() == before
            await peer.send(asked(at, 4096))
            missing = (await peer.next()).error
            assert isinstance(missing, InvalidArgument)
            assert missing.field == "fd"
            for expected in (type(None), type(None), TableFull):
                peer.send_with(asked(at, 4096), fd)
                assert isinstance((await peer.next()).error, expected)
        for opened in (*pipe, plain):
            os.close(opened)


async def test_no_descriptor_passes_over_tcp() -> None:
    async with scene() as at, at.connected(BULK) as peer:
        await peer.send(asked(at, 4096))
        came = await peer.next()
        assert isinstance(came.error, InvalidArgument)
        assert came.error.field == "fd"
        assert await is_answered(peer, at.caller)


# -- regions -------------------------------------------------------------------------------------------------------


async def test_bytes_come_from_a_region_and_go_to_a_region() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        with memory(4 * PART_BYTES) as fd:
            values = [block(i) for i in range(2)]
            os.pwrite(fd, values[1] + values[0], 0)
            number = await registered(at, peer, fd, 4 * PART_BYTES)
            await peer.send(put_from(at, keys(0, 2), slices(number, [PART_BYTES, 0]), values))
            assert states((await peer.next()).message) == [COMMITTED] * 2
            assert (await at.caller.get(keys(0, 2))).parts == values
            chain = [key(1), key(9), key(0)]
            await peer.ask(Verb.GET, 6, get_into(at, chain, slices(number, [2 * PART_BYTES, 0, 3 * PART_BYTES])))
            header, payload, error = await got(peer, 6)
            assert (list(header.states), payload, error) == ([HOT, MISSING, HOT], b"", None)
            assert list(header.checksums) == [checksum(values[1]), checksum(values[0])]
            found = os.pread(fd, 4 * PART_BYTES, 0)
            assert found == values[1] + values[0] + values[1] + values[0], "what was not granted stayed as it was"
            lease = await at.caller.lease([key(1)])
            request = at.caller.get_request(lease=lease)
            request.into.CopyFrom(slices(number, [PART_BYTES]))
            await peer.ask(Verb.GET, 7, request)
            assert (await got(peer, 7))[2] is None
            assert os.pread(fd, PART_BYTES, PART_BYTES) == values[1]
            await at.caller.release(lease)


async def test_a_region_that_shrinks_under_a_call_fails_the_call_alone() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(1)
        with memory(2 * PART_BYTES) as fd:
            number = await registered(at, peer, fd, 2 * PART_BYTES)
            os.truncate(fd, PART_BYTES + 100)
            await peer.ask(Verb.GET, 6, get_into(at, [key(0)], slices(number, [PART_BYTES])))
            error = (await got(peer, 6))[2]
            assert isinstance(error, InvalidArgument)
            assert error.field == "into"
            assert os.fstat(fd).st_size == PART_BYTES + 100, "the shard does not make it longer again"
            await peer.send(put_from(at, [key(5)], slices(number, [PART_BYTES]), [block(5)]))
            error = (await peer.next_of(5)).error
            assert isinstance(error, InvalidArgument)
            assert error.field == "source"
            await peer.ask(Verb.GET, 6, get_into(at, [key(0)], slices(number, [0])))
            assert (await got(peer, 6))[2] is None
            assert os.pread(fd, PART_BYTES, 0) == block(0)
        await at.free_again()
        assert await at.caller.match([key(5)]) == [MISSING]


async def test_slices_outside_their_region_touch_nothing() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(1)
        with memory(2 * PART_BYTES) as fd:
            number = await registered(at, peer, fd, PART_BYTES)
            for at_byte in (1, PART_BYTES, 2**63, 2**64 - PART_BYTES, 2**64 - 1):
                await peer.ask(Verb.GET, 6, get_into(at, [key(0)], slices(number, [at_byte])))
                assert isinstance((await got(peer, 6))[2], InvalidArgument)
                await peer.send(put_from(at, [key(5)], slices(number, [at_byte]), [block(5)]))
                assert isinstance((await peer.next_of(5)).error, InvalidArgument)
            assert os.pread(fd, 2 * PART_BYTES, 0) == bytes(2 * PART_BYTES)
        assert await is_answered(peer, at.caller)


async def test_payload_beside_a_source_is_refused() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        at.local.failpoints.arm("region.fill", "delay:50ms")
        with memory(PART_BYTES) as fd:
            number = await registered(at, peer, fd, PART_BYTES)
            header = at.caller.put_header([key(0)])
            header.source.CopyFrom(slices(number, [0]))
            await peer.send(b"".join(put_frames(5, header, [block(0)])))
            came = await peer.next_of(5)
            assert isinstance(came.error, InvalidArgument)
            assert came.error.field == "frame.payload_bytes"
            await asyncio.sleep(0.1)
            assert await is_answered(peer, at.caller)
        assert await at.caller.match([key(0)]) == [MISSING]


async def test_a_region_is_given_back_when_no_copy_uses_it() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(1)
        with memory(PART_BYTES) as fd:
            before = open_fds()
            number = await registered(at, peer, fd, PART_BYTES)
            assert open_fds() == before + 1
            at.local.failpoints.arm("region.drain", "delay:200ms")
            await peer.ask(Verb.GET, 6, get_into(at, [key(0)], slices(number, [0])))
            unregister = channel.UnregisterRegionRequest(session=at.caller.session, region=number)
            await peer.ask(Verb.UNREGISTER_REGION, 7, unregister)
            assert channel.UnregisterRegionResponse.FromString((await peer.next_of(7)).message).known
            assert os.pread(fd, PART_BYTES, 0) == block(0), "the memory is the client's alone again"
            assert open_fds() == before
            assert (await got(peer, 6))[2] is None
            for known in (False, False):
                came = await peer.call(Verb.UNREGISTER_REGION, 8, unregister)
                assert channel.UnregisterRegionResponse.FromString(came.message).known == known
            await peer.ask(Verb.GET, 6, get_into(at, [key(0)], slices(number, [0])))
            assert isinstance((await got(peer, 6))[2], InvalidArgument)


async def test_regions_end_with_their_session_and_not_with_their_connection() -> None:
    async with scene() as at:
        await at.fill(1)
        owner, regions = await Caller.open(at.caller.door, SPEC), at.local.server.shell.regions
        with memory(PART_BYTES) as fd:
            before = open_fds()
            async with at.connected(UNIX) as peer:
                peer.send_with(asked(at, PART_BYTES, session=owner.session), fd)
                assert (await peer.next()).error is None
            await until(lambda: at.local.server.channel.connection_count == 0, "the connection is left")
            assert regions.region_count == 1
            request = owner.get_request([key(0)])
            request.into.CopyFrom(slices(1, [0]))
            async with at.connected(BULK) as peer:
                await peer.ask(Verb.GET, 6, request)
                assert (await got(peer, 6))[2] is None
                assert os.pread(fd, PART_BYTES, 0) == block(0)
                await owner.close()
                await until(lambda: regions.region_count == 0, "the region is left")
                await peer.ask(Verb.GET, 6, request)
                assert isinstance((await got(peer, 6))[2], UnknownSession)
            await until(lambda: open_fds() <= before, "its descriptor is left")


# -- the arena -----------------------------------------------------------------------------------------------------


async def mapped(at: Scene, peer: RawPeer) -> tuple[int, channel.MapArenaResponse]:
    came = await peer.call(Verb.MAP_ARENA, 9, channel.MapArenaRequest(session=at.caller.session))
    assert came.error is None
    (fd,) = peer.descriptors
    return fd, channel.MapArenaResponse.FromString(came.message)


async def test_the_arena_can_be_read_and_nothing_else() -> None:
    async with scene() as at, at.connected(UNIX) as peer:
        await at.fill(2)
        fd, answer = await mapped(at, peer)
        assert answer.generation == at.local.server.shell.generation
        (granted,) = await at.caller.acquire(keys(0, 2))
        with mmap.mmap(fd, answer.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as arena:
            for i, offset in enumerate(granted.offsets):
                assert offset + PART_BYTES <= answer.size_bytes
                assert arena[offset : offset + PART_BYTES] == block(i)
        await at.caller.release(granted.lease)
        before = (os.fstat(fd).st_size, os.pread(fd, 100, 0))
        with pytest.raises(OSError):  # noqa: PT011 - each kernel has its own word for it
            mmap.mmap(fd, answer.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        for change in (
            lambda f: os.pwrite(f, b"x", 0),
            lambda f: os.truncate(f, 0),
            lambda f: os.truncate(f, 1 << 30),
            lambda f: os.posix_fallocate(f, 0, 1 << 30),
            lambda f: fcntl.fcntl(f, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(OSError):  # noqa: PT011
                change(fd)
        for mode in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            with suppress(OSError):
                again = os.open(f"/proc/self/fd/{fd}", mode)
                with pytest.raises(OSError):  # noqa: PT011
                    os.pwrite(again, b"x", 0)
                with pytest.raises(OSError):  # noqa: PT011
                    os.truncate(again, 0)
                with pytest.raises(OSError):  # noqa: PT011
                    mmap.mmap(again, answer.size_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE)
                os.close(again)
        assert (os.fstat(fd).st_size, os.pread(fd, 100, 0)) == before
        assert (await at.caller.get(keys(0, 2))).parts == [block(0), block(1)]


async def test_the_arena_is_for_those_who_may_map_it() -> None:
    async with scene() as at:
        async with at.connected(BULK) as peer:
            came = await peer.call(Verb.MAP_ARENA, 9, channel.MapArenaRequest(session=at.caller.session))
            assert isinstance(came.error, Denied), "no descriptor passes over TCP"
        async with at.connected(UNIX) as peer:
            came = await peer.call(Verb.MAP_ARENA, 9, channel.MapArenaRequest(session=bytes(16)))
            assert isinstance(came.error, UnknownSession)
            assert not peer.descriptors
    for map_uids in ("none", "54321"):
        async with scene({"shm.map_uids": map_uids}) as at, at.connected(UNIX, greets=False) as peer:
            assert not (await peer.hello()).may_map
            came = await peer.call(Verb.MAP_ARENA, 9, channel.MapArenaRequest(session=at.caller.session))
            assert isinstance(came.error, Denied)
            assert not peer.descriptors
            assert await is_answered(peer, at.caller), "it is served all the same"


async def test_the_arena_s_descriptor_comes_with_its_own_frame_among_many() -> None:
    """One that pipelines can tell which frame it belongs to: it comes with the first byte of the answer."""
    async with scene() as at, at.connected(UNIX) as peer:
        match = frame_of(Verb.MATCH, 5, at.caller.match_request([key(0)]))
        ask = frame_of(Verb.MAP_ARENA, 9, channel.MapArenaRequest(session=at.caller.session))
        await peer.send(match * 20 + ask + match * 20 + ask)
        for _ in range(42):
            await peer.next()
        assert len(peer.descriptors) == 2
        assert {os.fstat(fd).st_ino for fd in peer.descriptors} == {os.fstat(at.local.server.shell.memory.fd).st_ino}
