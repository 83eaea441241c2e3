"""Copies between regions and the arena: exact bytes, whatever becomes of the file, of the caller or of the lease."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.leases import WriteLease
from kvstore.service.copier import MAPPED_SLICE_BYTES, PIECE_BYTES, SMALL_BYTES, Copying, RegionCopier, _apart
from kvstore.service.failpoints import Failpoints
from kvstore.service.regions import Copies, Region, RegionTable
from kvstore.tiers.memory import ArenaMemory
from kvstore_wire.errors import Draining, Internal, InvalidArgument, LeaseExpired
from kvstore_wire.states import PartState
from tests.shards import PAGE_BYTES, Client, Shard, keys, kv_spec
from tests.unit.test_service_regions import ONE, is_open, maps_of, memfd, open_fds, sealed_memfd, shm_file

MIB = 1 << 20
ARENA_BYTES = 32 * MIB
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_PUNCH_HOLE = 3  # With FALLOC_FL_KEEP_SIZE.
SIZES = [1, 511, 4095, 4096, 4097, 3_098_112]
# Copied from by system calls, and by memcpy.
KINDS: dict[str, Callable[[int], int]] = {
    "memfd": memfd,
    "file": lambda size: shm_file(size, os.O_RDWR),
    "sealed": sealed_memfd,
}
CALL_S = 20.0


@dataclass(eq=False)
class Bench:
    """An arena, a table of regions and a copier; all closed at the end of the test."""

    memory: ArenaMemory
    table: RegionTable
    copier: RegionCopier
    failpoints: Failpoints

    def region(self, fd: int, *, offset: int = 0, length: int | None = None) -> Region:
        size = os.fstat(fd).st_size - offset if length is None else length
        return self.table.get(ONE, self.table.register(ONE, fd, offset=offset, length=size))


def _bench(threads: int = 2) -> Bench:
    failpoints, memory = Failpoints(), ArenaMemory(ARENA_BYTES)
    table = RegionTable(max_regions=4096, max_region_bytes=1 << 40)
    return Bench(memory, table, RegionCopier(memory, failpoints, threads=threads), failpoints)


def _close(bench: Bench) -> None:
    bench.copier.close()
    bench.table.close()
    bench.memory.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = _bench()
    yield made
    _close(made)


def _copies(*rows: tuple[int, int, int]) -> Copies:
    """Rows are (arena offset, region offset, length)."""
    arena, region, lengths = np.array(rows, np.int64).reshape(-1, 3).T
    return Copies(arena, region, lengths)


def _large() -> Copies:
    """A copy of 1 GiB, for regions that are all hole: the same slots again and again."""
    return _copies(*((at % (16 * MIB), at, PIECE_BYTES) for at in range(0, 1 << 30, PIECE_BYTES)))


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    """Polls, and lets no event loop of this thread run, until something holds."""
    end_s = time.monotonic() + CALL_S
    while not holds():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.001)


def _punch(fd: int, at: int, size: int) -> None:
    assert _LIBC.fallocate(fd, _PUNCH_HOLE, at, size) == 0


def _noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
async def test_exactly_the_bytes_go_there_and_back(bench: Bench, size: int, kind: str) -> None:
    region = bench.region(KINDS[kind](2 * size + 300), offset=100)
    data = _noise(size)
    os.pwrite(region.fd, data, 100 + 7)
    bench.memory.view[: size + 8192] = b"\xee" * (size + 8192)
    await bench.copier.fill(region, _copies((4096, 7, size)))
    assert bench.memory.view[4096 : 4096 + size] == data
    assert bench.memory.view[:4096] == b"\xee" * 4096
    assert bench.memory.view[4096 + size : size + 8192] == b"\xee" * 4096
    await bench.copier.drain(region, _copies((4096, size + 50, size)))
    whole = os.pread(region.fd, 2 * size + 300, 0)
    expected = bytearray(2 * size + 300)
    expected[107 : 107 + size] = data
    expected[100 + size + 50 : 100 + size + 50 + size] = data
    assert whole == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "size", "stride"), [(5000, 1000, 1024), (600, 40_000, 40_960), (50, 40_000, 40_960)])
async def test_slices_in_any_order_land_where_they_belong(
    bench: Bench, kind: str, count: int, size: int, stride: int
) -> None:
    """More slices than one system call takes, and few, side by side in the region, shuffled."""
    dice = random.Random(5)
    data = _noise(count * size)
    region = bench.region(KINDS[kind](count * size))
    os.pwrite(region.fd, data, 0)
    places = dice.sample(range(count), count)
    rows = [(place * stride, i * size, size) for i, place in enumerate(places)]
    dice.shuffle(rows)
    await bench.copier.fill(region, _copies(*rows))
    for place, at, _ in rows:
        assert bench.memory.view[place : place + size] == data[at : at + size]
    _punch(region.fd, 0, count * size)
    await bench.copier.drain(region, _copies(*rows))
    assert os.pread(region.fd, count * size, 0) == data


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 70_000) | st.sampled_from([3 * MIB, PIECE_BYTES + 1]), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from(sorted(KINDS)),
)
def test_any_layout_is_copied_as_a_loop_would(sizes: list[int], dice: random.Random, is_dense: bool, kind: str) -> None:
    async def run(bench: Bench) -> None:
        gap = 0 if is_dense else 13
        total = sum(sizes) + gap * len(sizes)
        order, rows, at = dice.sample(range(len(sizes)), len(sizes)), [], 0
        starts = dict[int, int]()
        for i in order:
            starts[i], at = at, at + sizes[i] + gap
        at = 0
        for i, size in enumerate(sizes):
            rows.append((at, starts[i], size))
            at += size + gap
        region, data = bench.region(KINDS[kind](total)), _noise(total)
        os.pwrite(region.fd, data, 0)
        await bench.copier.fill(region, _copies(*rows))
        for arena, start, size in rows:
            assert bench.memory.view[arena : arena + size] == data[start : start + size]
        target = bench.region(KINDS[kind](total))
        await bench.copier.drain(target, _copies(*rows))
        expected = bytearray(total)
        for _, start, size in rows:
            expected[start : start + size] = data[start : start + size]
        assert os.pread(target.fd, total, 0) == expected

    bench = _bench()
    try:
        asyncio.run(run(bench))
    finally:
        _close(bench)


@pytest.mark.parametrize("kind", KINDS)
async def test_many_calls_at_once_do_not_mix_their_bytes(bench: Bench, kind: str) -> None:
    size = 2 * MIB + 17
    regions = [bench.region(KINDS[kind](size)) for _ in range(4)]
    for i, region in enumerate(regions):
        os.pwrite(region.fd, bytes([i + 1]) * size, 0)
    await asyncio.gather(*(bench.copier.fill(r, _copies((i * 3 * MIB, 0, size))) for i, r in enumerate(regions)))
    target = bench.region(memfd(4 * size))
    await asyncio.gather(*(bench.copier.drain(target, _copies((i * 3 * MIB, i * size, size))) for i in range(4)))
    assert os.pread(target.fd, 4 * size, 0) == b"".join(bytes([i + 1]) * size for i in range(4))


async def test_nothing_to_copy_is_done_at_once(bench: Bench) -> None:
    region = bench.region(memfd(1))
    await bench.copier.fill(region, _copies())
    await bench.copier.drain(region, _copies())
    assert region.copies == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hole_reads_as_zeros(bench: Bench, kind: str) -> None:
    size = 8 * MIB
    region = bench.region(KINDS[kind](size))
    bench.memory.view[:size] = b"\xee" * size
    await bench.copier.fill(region, _copies((0, 0, size)))
    assert bench.memory.view[:size] == bytes(size)


@pytest.mark.parametrize("size", [SMALL_BYTES, 8 * MIB])
async def test_slices_are_read_from_the_mapping_where_they_are_long_on_average(bench: Bench, size: int) -> None:
    """What is mapped is taken for other bytes here, so that it shows which of the two was read."""
    region = bench.region(memfd(size))
    os.pwrite(region.fd, b"f" * size, 0)
    region.mapped = np.full(size, ord("m"), np.uint8)
    count, step = 16, MAPPED_SLICE_BYTES

    async def read(lengths: list[int]) -> bytes:
        """What came by one run of the region, in slots apart."""
        places, rows, at = range(0, 2 * step * count, 2 * step), list[tuple[int, int, int]](), 0
        for place, length in zip(places, lengths, strict=False):
            rows.append((place, at, length))
            at += length
        bench.memory.view[: 2 * step * count] = bytes(2 * step * count)
        await bench.copier.fill(region, _copies(*rows))
        return b"".join(bench.memory.view[place : place + length] for place, _, length in rows)

    if size == SMALL_BYTES:  # What is done at once.
        count = 4
    assert await read([step] * count) == b"m" * step * count
    assert await read([1, 2 * step - 1] * (count // 2)) == b"m" * step * count
    assert await read([step] * (count - 1) + [step - 1]) == b"f" * (step * count - 1)
    assert await read([step - 1]) == b"f" * (step - 1)


@pytest.mark.parametrize("row", [(ARENA_BYTES, 0, 8192), (-1, 0, 10), (0, -1, 10), (0, 4090, 10), (0, 0, 0)])
async def test_a_slice_outside_is_the_shard_s_own_fault(bench: Bench, row: tuple[int, int, int]) -> None:
    region = bench.region(memfd(8192), length=4096)
    with pytest.raises(ValueError, match="outside"):
        await bench.copier.fill(region, _copies(row))
    assert region.copies == 0


async def test_holes_of_a_mapped_region_stay_holes(bench: Bench) -> None:
    """To look at them by the mapping would make pages, at the shard's cost."""
    size, page = 8 * MIB, 4096
    region = bench.region(sealed_memfd(size + 100), offset=100)
    bench.memory.view[:size] = b"\xee" * size
    await bench.copier.fill(region, _copies((0, 0, size)))
    assert bench.memory.view[:size] == bytes(size)
    assert os.fstat(region.fd).st_blocks == 0
    for at in (0, 3 * MIB + 17, size - 1):
        os.pwrite(region.fd, b"\x77", 100 + at)
    blocks = os.fstat(region.fd).st_blocks
    await bench.copier.fill(region, _copies((0, 0, size)))
    expected = bytearray(size)
    expected[0] = expected[3 * MIB + 17] = expected[size - 1] = 0x77
    assert bench.memory.view[:size] == expected
    assert os.fstat(region.fd).st_blocks == blocks
    assert not region.is_whole(0, size)
    assert region.is_whole(3 * MIB + 17, 1)
    assert not region.is_whole(3 * MIB + 17 + page, 1)


@pytest.mark.parametrize("cut", [10, 2 * PIECE_BYTES + 10])
async def test_the_end_that_is_told_is_the_file_s_own(bench: Bench, cut: int) -> None:
    size = 4 * PIECE_BYTES
    region = bench.region(memfd(size))
    os.ftruncate(region.fd, cut)
    with pytest.raises(InvalidArgument, match=f"ended at byte {cut} of the region"):
        await bench.copier.fill(region, _copies((0, 0, size)))


async def test_a_copy_cancelled_as_its_delay_ends_is_cancelled(bench: Bench) -> None:
    bench.failpoints.arm("region.fill", "delay:1ms*1")
    region = bench.region(memfd(MIB))
    copying = bench.copier.fill(region, _copies((0, 0, MIB)))
    assert copying.delay is not None
    await asyncio.wait({copying.delay})
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert region.copies == 0


# -- files that change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL_BYTES, 8 * MIB])
async def test_a_file_cut_short_is_told_by_its_new_end(bench: Bench, size: int) -> None:
    region = bench.region(memfd(100 + size), offset=100)
    os.ftruncate(region.fd, 100 + size - 4321)
    with pytest.raises(InvalidArgument, match=f"ended at byte {size - 4321} of the region") as caught:
        await bench.copier.fill(region, _copies((0, 0, size)))
    assert (caught.value.field, caught.value.limit) == ("source", f"{size} bytes")
    with pytest.raises(InvalidArgument, match=f"ended at byte {size - 4321} of the region") as caught:
        await bench.copier.drain(region, _copies((0, 0, size)))
    assert caught.value.field == "into"
    assert os.fstat(region.fd).st_size == 100 + size - 4321, "a Get made the file longer"
    os.ftruncate(region.fd, 50)
    with pytest.raises(InvalidArgument, match="ended at byte 0 of the region"):
        await bench.copier.drain(region, _copies((0, 10, size - 10)))
    assert region.copies == 0


@pytest.mark.parametrize("verb", ["fill", "drain"])
async def test_a_file_cut_short_between_the_check_and_the_copy(bench: Bench, verb: str) -> None:
    bench.failpoints.arm(f"region.{verb}", "delay:20ms")
    region = bench.region(memfd(MIB))
    copying = asyncio.ensure_future(getattr(bench.copier, verb)(region, _copies((0, 0, MIB))))
    await asyncio.sleep(0)
    os.ftruncate(region.fd, 10)
    with pytest.raises(InvalidArgument, match="ended at byte 10 of the region"):
        await copying


@pytest.mark.parametrize("verb", ["fill", "drain"])
async def test_a_file_cut_short_or_punched_at_any_moment_never_ends_the_shard(bench: Bench, verb: str) -> None:
    size = 8 * MIB
    region = bench.region(memfd(size))
    stop = threading.Event()

    def meddle() -> None:
        dice = random.Random(3)
        while not stop.is_set():
            os.ftruncate(region.fd, dice.randrange(size))
            os.ftruncate(region.fd, size)
            assert _LIBC.fallocate(region.fd, _PUNCH_HOLE, dice.randrange(size // 2), dice.randrange(1, size // 2)) == 0

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        for _ in range(60):
            try:
                await getattr(bench.copier, verb)(region, _copies((0, 0, size)))
            except InvalidArgument as error:
                assert "ended at byte" in error.message  # noqa: PT017 - either end will do, and no other
    finally:
        stop.set()
        meddler.join()
    assert region.copies == 0
    os.ftruncate(region.fd, size)
    await getattr(bench.copier, verb)(region, _copies((0, 0, size)))


@pytest.mark.parametrize("slice_bytes", [4096, 8 * MIB])
async def test_a_sealed_file_punched_under_a_copy_gives_zeros_or_its_bytes(bench: Bench, slice_bytes: int) -> None:
    """A signal would end this process."""
    size = 8 * MIB
    region, data = bench.region(sealed_memfd(size)), b"\x5a" * size
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, size - 1)
    rows = [((size - slice_bytes - at), at, slice_bytes) for at in range(0, size, slice_bytes)]

    async def seen() -> set[int]:
        bench.memory.view[:size] = b"\xee" * size
        await bench.copier.fill(region, _copies(*rows))
        return set(np.unique(np.frombuffer(bench.memory.view[:size], np.uint8)).tolist())

    assert await seen() == {0}
    os.pwrite(region.fd, data, 0)
    assert await seen() == {0x5A}
    _punch(region.fd, 0, size)
    assert await seen() == {0}
    stop = threading.Event()

    def meddle() -> None:
        dice = random.Random(3)
        while not stop.is_set():
            _punch(region.fd, dice.randrange(size // 2), dice.randrange(1, size // 2))
            os.pwrite(region.fd, data[: dice.randrange(1, size // 2)], dice.randrange(size // 2))

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        for _ in range(60):
            assert await seen() <= {0, 0x5A}
    finally:
        stop.set()
        meddler.join()
    assert region.copies == 0


async def test_what_the_kernel_refuses_is_told_with_its_place(bench: Bench) -> None:
    size, limit = 4 * MIB, 3 * MIB // 2
    region = bench.region(memfd(size, os.MFD_ALLOW_SEALING))
    bench.memory.view[:size] = b"\x11" * size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(InvalidArgument, match=f"File too large at byte {limit} of the region") as caught:
            await bench.copier.drain(region, _copies((0, 0, size)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.field == "into"
    assert os.pread(region.fd, size, 0) == b"\x11" * limit + bytes(size - limit)
    fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(InvalidArgument, match="not permitted at byte 0 of the region"):
        await bench.copier.drain(region, _copies((0, 0, size)))


async def test_a_descriptor_open_the_wrong_way_is_refused_before_any_byte(bench: Bench) -> None:
    bench.failpoints.arm("region.fill", "fail")
    bench.failpoints.arm("region.drain", "fail")
    read_only = bench.region(shm_file(4096, os.O_RDONLY))
    with pytest.raises(InvalidArgument) as caught:
        await bench.copier.drain(read_only, _copies((0, 0, 1)))
    assert caught.value.field == "into"
    write_only = bench.region(shm_file(4096, os.O_WRONLY))
    with pytest.raises(InvalidArgument) as caught:
        await bench.copier.fill(write_only, _copies((0, 0, 1)))
    assert caught.value.field == "source"


async def test_failpoints_strike_once_a_call_and_leave_nothing_in_use(bench: Bench) -> None:
    region = bench.region(memfd(MIB))
    for verb in ("fill", "drain"):
        bench.failpoints.arm(f"region.{verb}", "fail*1")
        with pytest.raises(Internal):
            await getattr(bench.copier, verb)(region, _copies((0, 0, MIB)))
        await getattr(bench.copier, verb)(region, _copies((0, 0, MIB)))
    assert region.copies == 0


# -- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memfd", "sealed"])
@pytest.mark.parametrize("verb", ["fill", "drain"])
async def test_a_cancelled_copy_is_over_when_its_caller_hears_of_it(bench: Bench, verb: str, kind: str) -> None:
    """A thousand cancellations at random moments: what is written after each stays, and no descriptor is left."""
    dice, size, halves, cancelled = random.Random(7), 2 * MIB, (0, 16 * MIB), 0
    shared, marks = KINDS[kind](32 * MIB), b"\xaa" * (2 * MIB)

    def mark(at: int) -> None:
        if verb == "fill":
            bench.memory.view[at : at + size] = marks
        else:
            os.pwrite(shared, marks, at)

    def is_marked(at: int) -> bool:
        return (bench.memory.view[at : at + size] if verb == "fill" else os.pread(shared, size, at)) == marks

    mark(halves[1])
    before = open_fds()
    for i in range(1000):
        at, other = halves[i % 2], halves[1 - i % 2]
        number = bench.table.register(ONE, os.dup(shared), offset=0, length=32 * MIB)
        region = bench.table.get(ONE, number)
        copying = asyncio.ensure_future(getattr(bench.copier, verb)(region, _copies((at, at, size))))
        await asyncio.sleep(dice.choice([0, 0.00005, 0.0001, 0.0003]))
        copying.cancel()
        assert bench.table.unregister(ONE, number)
        ((outcome,), _) = await asyncio.gather(asyncio.gather(copying, return_exceptions=True), asyncio.sleep(0))
        cancelled += isinstance(outcome, asyncio.CancelledError)
        assert not is_open(region.fd)
        assert region.mapped is None
        mark(at)
        assert is_marked(other), "a cancelled copy wrote after its end"
    assert cancelled > 100
    assert (open_fds(), bench.table.region_count, maps_of(os.fstat(shared).st_ino)) == (before, 0, [])
    os.close(shared)


async def test_a_caller_that_is_told_twice_to_stop_still_waits_for_the_threads(bench: Bench) -> None:
    size = 24 * MIB
    region = bench.region(memfd(size))
    copying = asyncio.ensure_future(bench.copier.drain(region, _copies((0, 0, size))))
    await asyncio.sleep(0.0005)
    copying.cancel()
    await asyncio.sleep(0)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert region.copies == 0
    os.ftruncate(region.fd, 0)
    await asyncio.sleep(0.01)
    assert os.fstat(region.fd).st_size == 0


async def test_a_caller_that_is_cancelled_before_the_copy_begins_lets_go(bench: Bench) -> None:
    bench.failpoints.arm("region.fill", "delay:60s")
    region = bench.region(memfd(MIB))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(bench.copier.fill(region, _copies((0, 0, MIB))), 0.01)
    assert region.copies == 0


async def test_a_region_given_back_is_not_copied_any_more(bench: Bench) -> None:
    region = bench.region(memfd(MIB))
    bench.table.end_session(ONE)
    for copy in (bench.copier.fill, bench.copier.drain):
        with pytest.raises(InvalidArgument) as caught:
            await copy(region, _copies((0, 0, MIB)))
        assert caught.value.field == "region"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_that_ends_under_a_copy_does_not_take_its_descriptor(bench: Bench, kind: str) -> None:
    size = 16 * MIB
    region = bench.region(KINDS[kind](size))
    is_mapped = region.mapped is not None
    os.pwrite(region.fd, b"\x77" * size, 0)
    copying = bench.copier.fill(region, _copies((0, 0, size)))
    bench.table.end_session(ONE)
    assert is_open(region.fd)
    assert (region.mapped is not None) == is_mapped
    await copying
    assert bench.memory.view[:size] == b"\x77" * size
    assert not is_open(region.fd)
    assert maps_of(region.file[1]) == []


async def test_a_copier_that_closes_ends_its_calls_and_takes_no_more() -> None:
    before = set(threading.enumerate())
    bench = _bench()
    regions = [bench.region(memfd(1 << 30)) for _ in range(3)]
    copying = [asyncio.ensure_future(bench.copier.fill(r, _large())) for r in regions]
    await asyncio.sleep(0)
    bench.copier.close()
    outcomes = await asyncio.gather(*copying, return_exceptions=True)
    assert {type(o) for o in outcomes} <= {Draining, type(None)}
    assert Draining in {type(o) for o in outcomes}
    with pytest.raises(Draining):
        await bench.copier.fill(regions[0], _copies((0, 0, MIB)))
    assert [r.copies for r in regions] == [0, 0, 0]
    assert set(threading.enumerate()) <= before
    _close(bench)  # Closing again does no harm.


@pytest.mark.parametrize("threads", [1, 2])
async def test_a_small_call_does_not_wait_for_the_end_of_a_large_one(threads: int) -> None:
    bench = _bench(threads)
    try:
        large, small = bench.region(memfd(1 << 30)), bench.region(memfd(MIB))
        order: list[str] = []

        async def run(name: str, region: Region, copies: Copies) -> None:
            await bench.copier.fill(region, copies)
            order.append(name)

        calls = [run("large", large, _large()), run("small", small, _copies((24 * MIB, 0, MIB)))]
        await asyncio.gather(*calls)
        assert order == ["small", "large"]
    finally:
        _close(bench)


async def test_the_loop_goes_on_while_bytes_move(bench: Bench) -> None:
    region = bench.region(memfd(1 << 30))
    copying = asyncio.ensure_future(bench.copier.fill(region, _large()))
    turns = 0
    while not copying.done():
        await asyncio.sleep(0)
        turns += 1
    await copying
    assert turns > 10


# -- a copy under way ----------------------------------------------------------------------------------------------

# What a copy may be made of: rows, of which the threads make pieces, and rows that are pieces already.
LAYOUTS = {"few": [(0, 0, 8 * MIB)], "many": [(2 * at, at, 4096) for at in range(0, 8 * MIB, 4096)]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_copy_has_begun_when_its_caller_has_it(bench: Bench, kind: str, layout: str) -> None:
    """The loop does not run, and the bytes are there; it hears of the end only when it runs again."""
    size, rows = 8 * MIB, LAYOUTS[layout]
    region, data = bench.region(KINDS[kind](size)), _noise(size)
    os.pwrite(region.fd, data, 0)
    filling = bench.copier.fill(region, _copies(*rows))
    _until(
        lambda: all(bench.memory.view[at : at + n] == data[start : start + n] for at, start, n in rows),
        "nothing is copied while the loop stands",
    )
    assert (filling.done(), region.copies) == (False, 1)
    await filling
    _punch(region.fd, 0, size)
    draining = bench.copier.drain(region, _copies(*rows))
    _until(lambda: os.pread(region.fd, size, 0) == data, "nothing is copied while the loop stands")
    assert (draining.done(), region.copies) == (False, 1)
    await draining
    assert region.copies == 0


async def test_a_small_copy_is_done_when_its_caller_has_it(bench: Bench) -> None:
    region = bench.region(sealed_memfd(SMALL_BYTES))
    os.pwrite(region.fd, b"\x11" * SMALL_BYTES, 0)
    for copying in (bench.copier.fill(region, _copies((0, 0, SMALL_BYTES))), bench.copier.fill(region, _copies())):
        assert copying.done()
        assert (copying.cancel(), copying.cancelled(), copying.result()) == (False, False, None)
    assert bench.memory.view[:SMALL_BYTES] == b"\x11" * SMALL_BYTES


async def test_a_small_copy_beside_another_call_is_left_to_the_threads(bench: Bench) -> None:
    region, busy = bench.region(sealed_memfd(100)), bench.region(memfd(MIB))
    os.pwrite(region.fd, b"\x11" * 100, 0)
    bench.copier._queue.written.add(busy.file)  # So that no thread can begin with it.
    other = bench.copier.drain(busy, _copies((0, 0, MIB)))
    small = bench.copier.fill(region, _copies((4096, 0, 100)))
    assert not small.done(), "the loop's thread copied, where it may have to wait"
    await small
    assert bench.memory.view[4096:4197] == b"\x11" * 100 + b"\0"
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other


@pytest.mark.parametrize("verb", ["fill", "drain"])
async def test_a_copy_can_be_cancelled_until_it_is_done(bench: Bench, verb: str) -> None:
    region = bench.region(sealed_memfd(1 << 30))
    copying: Copying = getattr(bench.copier, verb)(region, _copies((0, 0, 16 * MIB)))
    assert [copying.cancel(), copying.cancel()] == [True, True]
    assert (copying.done(), region.copies) == (False, 1)
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert (copying.cancel(), copying.cancelled(), region.copies) == (False, True, 0)
    again: Copying = getattr(bench.copier, verb)(region, _copies((0, 0, 16 * MIB)))
    await again
    assert (again.cancel(), again.cancelled(), again.result()) == (False, False, None)


async def test_a_copy_cancelled_when_all_of_it_has_moved_is_cancelled(bench: Bench) -> None:
    """The loop has not heard of its end yet, and told the caller that it stops."""
    size = 8 * MIB
    region = bench.region(sealed_memfd(size))
    os.pwrite(region.fd, b"\x22" * size, 0)
    copying = bench.copier.fill(region, _copies((0, 0, size)))
    _until(lambda: not bench.copier.is_busy, "it does not end")
    assert copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert region.copies == 0


async def test_a_file_cut_short_is_raised_where_the_copy_is_awaited(bench: Bench) -> None:
    for size in (SMALL_BYTES, 8 * MIB):
        region = bench.region(memfd(size))
        os.ftruncate(region.fd, size - 10)
        for begin in (bench.copier.fill, bench.copier.drain):
            copying = begin(region, _copies((0, 0, size)))
            with pytest.raises(InvalidArgument, match=f"ended at byte {size - 10} of the region"):
                await copying
            assert isinstance(copying.exception(), InvalidArgument)
            assert (copying.cancel(), region.copies) == (False, 0)


OUTCOMES: dict[str, Callable[[Bench], Copying]] = {
    "done at once": lambda bench: bench.copier.fill(bench.region(memfd(100)), _copies((0, 0, 100))),
    "done by threads": lambda bench: bench.copier.fill(bench.region(sealed_memfd(MIB)), _copies((0, 0, MIB))),
    "cancelled": lambda bench: _cancelled(bench.copier.fill(bench.region(memfd(1 << 30)), _large())),
    "failed": lambda bench: bench.copier.fill(_cut(bench.region(memfd(MIB))), _copies((0, 0, MIB))),
    "failed at once": lambda bench: bench.copier.fill(_cut(bench.region(memfd(100))), _copies((0, 0, 100))),
}


def _cancelled(copying: Copying) -> Copying:
    assert copying.cancel()
    return copying


def _cut(region: Region) -> Region:
    os.ftruncate(region.fd, 0)
    return region


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_who_waits_for_a_copy_is_called_in_the_loop_when_the_region_is_free(bench: Bench, outcome: str) -> None:
    copying, told = OUTCOMES[outcome](bench), asyncio.Event()
    heard: list[tuple[bool, int, int]] = []

    def ended(done: asyncio.Future[None]) -> None:
        heard.append((done is copying, threading.get_ident(), copying.call.region.copies))
        assert asyncio.get_running_loop() is copying.get_loop()
        told.set()

    copying.add_done_callback(ended)
    assert not heard
    await asyncio.wait_for(told.wait(), CALL_S)
    assert heard == [(True, threading.get_ident(), 0)]
    assert copying.cancelled() == (outcome == "cancelled")
    failure = None if copying.cancelled() else copying.exception()
    assert (failure is not None) == outcome.startswith("failed")


@pytest.mark.parametrize("has_begun_to_wait", [False, True])
async def test_a_copy_cancelled_while_it_is_held_up_lets_go_of_its_region(
    bench: Bench, has_begun_to_wait: bool
) -> None:
    bench.failpoints.arm("region.fill", "delay:60s")
    number = bench.table.register(ONE, sealed_memfd(MIB), offset=0, length=MIB)
    region = bench.table.get(ONE, number)
    os.pwrite(region.fd, b"\x33" * MIB, 0)
    copying = bench.copier.fill(region, _copies((0, 0, MIB)))
    if has_begun_to_wait:
        await asyncio.sleep(0.01)
    bench.table.unregister(ONE, number)
    assert (region.copies, is_open(region.fd), bench.copier.is_busy) == (1, True, False)
    assert [copying.cancel(), copying.cancel()] == [True, True]
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(copying, CALL_S)
    assert (region.copies, is_open(region.fd), maps_of(region.file[1])) == (0, False, [])
    assert bench.memory.view[:MIB] == bytes(MIB)


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpus", [{0}, {3}, {0, 1}, {1, 4, 5, 9}, set(range(17))])
def test_threads_have_cpus_of_their_own_as_long_as_there_are_enough(
    cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    for threads in range(1, 2 * len(cpus) + 2):
        sets = _apart(threads)
        assert (len(sets), set().union(*sets)) == (threads, cpus)
        if threads <= len(cpus):
            assert sum(map(len, sets)) == len(cpus), "two threads share a CPU"
            assert max(map(len, sets)) - min(map(len, sets)) <= 1
        else:
            assert {len(each) for each in sets} == {1}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_runs_on_its_cpus_and_the_loop_on_all(threads: int) -> None:
    before = os.sched_getaffinity(0)
    bench = _bench(threads)
    try:
        ids = [thread.native_id for thread in bench.copier._threads]
        assert len(ids) == threads
        _until(
            lambda: [os.sched_getaffinity(number or 0) for number in ids] == _apart(threads), "a thread runs elsewhere"
        )
        assert os.sched_getaffinity(0) == before
    finally:
        _close(bench)


# -- leases --------------------------------------------------------------------------------------------------------


def _reserved(client: Client, start: int, count: int, *, lease_s: float) -> WriteLease:
    space = client.attach(kv_spec("n"))
    lease = client.reserve(space, keys(start, start + count), lease_s=lease_s).lease
    assert lease is not None
    return lease


async def test_a_writer_that_stops_past_its_lease_never_touches_another_key(bench: Bench) -> None:
    """Its copy begins late, when others already want the slots; they get others, and keep their bytes."""
    count = PAGE_BYTES // 4096
    shard = Shard(capacity_bytes=2 * PAGE_BYTES)
    stopped, other = shard.client(), shard.client()
    lease = _reserved(stopped, 0, count, lease_s=1.0)
    shard.store.pin(lease)
    bench.failpoints.arm("region.fill", "delay:30ms*1")
    late, new = (bench.region(memfd(PAGE_BYTES)) for _ in range(2))
    os.pwrite(late.fd, b"\x0a" * PAGE_BYTES, 0)
    os.pwrite(new.fd, b"\x0b" * PAGE_BYTES, 0)

    def copies_of(owner: WriteLease) -> Copies:
        offsets = shard.store.part_views(owner.parts)[0]
        return _copies(*((offset, i * 4096, 4096) for i, offset in enumerate(offsets)))

    writing = asyncio.ensure_future(bench.copier.fill(late, copies_of(lease)))
    await asyncio.sleep(0)
    shard.pass_time(2.0)
    taken = _reserved(other, 100, count, lease_s=60.0)
    await bench.copier.fill(new, copies_of(taken))
    taken.landed[:] = b"\x01" * count
    assert other.commit(taken) == [PartState.COMMITTED] * count
    await writing
    lease.landed[:] = b"\x01" * count
    with pytest.raises(LeaseExpired):
        stopped.commit(lease)
    shard.store.unpin(lease, shard.now)
    shard.store.check()
    reading = other.acquire(other.attach(kv_spec("n")), keys(100, 100 + count))[0].lease
    assert reading is not None
    for offset in shard.store.part_views(reading.parts)[0]:
        assert bench.memory.view[offset : offset + 4096] == b"\x0b" * 4096
