"""Regions: only shared memory is taken, within limits, by its own session, and each descriptor is closed once."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.service import regions
from kvstore.service.regions import Region, RegionTable, plan
from kvstore_wire.errors import InvalidArgument, TableFull
from kvstore_wire.limits import MAX_CALL_SLICES
from kvstore_wire.v1 import types_pb2 as types

ONE, OTHER = b"1" * 16, b"2" * 16


def memfd(size_bytes: int, flags: int = 0) -> int:
    fd = os.memfd_create("region", os.MFD_CLOEXEC | flags)
    os.ftruncate(fd, size_bytes)
    return fd


def sealed_memfd(size_bytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """A memfd that, as a rule, can never become shorter."""
    fd = memfd(size_bytes, os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def shm_file(size_bytes: int, flags: int) -> int:
    """A file of the memory file system, opened as told; its name is gone."""
    made, name = tempfile.mkstemp(dir="/dev/shm")
    os.ftruncate(made, size_bytes)
    fd = os.open(name, flags)
    os.unlink(name)
    os.close(made)
    return fd


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps_of(inode: int) -> list[str]:
    """How each mapping of a memfd in this process may be used, as "r--s"."""
    lines = map(str.split, Path("/proc/self/maps").read_text().splitlines())
    return [words[1] for words in lines if words[4] == f"{inode}" and "memfd:" in words[-2]]


@pytest.fixture
def table() -> Iterator[RegionTable]:
    made = RegionTable(max_regions=4, max_region_bytes=1 << 20)
    yield made
    made.close()


# -- registering ---------------------------------------------------------------------------------------------------


def test_regions_are_numbered_from_one_and_a_number_never_comes_back(table: RegionTable) -> None:
    assert [table.register(ONE, memfd(4096), offset=0, length=4096) for _ in range(3)] == [1, 2, 3]
    assert table.unregister(ONE, 3)
    assert not table.unregister(ONE, 3)
    assert table.register(ONE, memfd(4096), offset=0, length=1) == 4
    assert table.register(OTHER, memfd(4096), offset=0, length=1) == 1
    assert (table.region_count, table.region_bytes, table.registered_count) == (4, 2 * 4096 + 2, 5)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDONLY, os.O_WRONLY])
def test_files_of_the_memory_file_system_are_taken_for_what_they_are_open_for(table: RegionTable, flags: int) -> None:
    region = table.get(ONE, table.register(ONE, shm_file(4096, flags), offset=0, length=4096))
    assert (region.is_readable, region.is_writable) == (flags != os.O_WRONLY, flags != os.O_RDONLY)


def test_what_would_not_be_written_in_place_counts_as_read_only(table: RegionTable) -> None:
    sealed = memfd(4096, os.MFD_ALLOW_SEALING)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    for fd in (sealed, shm_file(4096, os.O_RDWR | os.O_APPEND)):
        region = table.get(ONE, table.register(ONE, fd, offset=0, length=4096))
        assert (region.is_readable, region.is_writable) == (True, False)


def test_huge_pages_can_be_read_and_not_written(table: RegionTable) -> None:
    try:
        fd = memfd(2 << 20, os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    region = table.get(ONE, table.register(ONE, fd, offset=0, length=4096))
    assert (region.is_readable, region.is_writable) == (True, False)


def _disk_file() -> int:
    fd, name = tempfile.mkstemp(dir=Path(__file__).parent)
    os.unlink(name)
    os.ftruncate(fd, 4096)
    return fd


def _socket() -> int:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours.detach()


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


STRANGERS: dict[str, Callable[[], int]] = {
    "disk": _disk_file,
    "zero": lambda: os.open("/dev/zero", os.O_RDWR),
    "socket": _socket,
    "pipe": _pipe,
    "directory": lambda: os.open("/dev/shm", os.O_RDONLY),
    "path": lambda: os.open("/dev/shm", os.O_PATH),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_not_shared_memory_is_refused_and_closed(table: RegionTable, kind: str) -> None:
    fd = STRANGERS[kind]()
    with pytest.raises(InvalidArgument) as caught:
        table.register(ONE, fd, offset=0, length=1)
    assert caught.value.field == "fd"
    assert not is_open(fd)
    assert table.region_count == 0


def test_a_number_that_is_no_descriptor_is_refused(table: RegionTable) -> None:
    fd = memfd(1)
    os.close(fd)
    with pytest.raises(InvalidArgument) as caught:
        table.register(ONE, fd, offset=0, length=1)
    assert caught.value.field == "fd"


@pytest.mark.parametrize(
    ("offset", "length", "limit"),
    [(0, 0, 4096), (0, 4097, 4096), (4095, 2, 1), (4096, 1, 0), (1 << 63, 1, 0), (0, (1 << 64) - 1, 4096)],
)
def test_a_region_beyond_its_file_is_refused(offset: int, length: int, limit: int) -> None:
    table = RegionTable(max_regions=4, max_region_bytes=1 << 64)
    fd = memfd(4096)
    with pytest.raises(InvalidArgument) as caught:
        table.register(ONE, fd, offset=offset, length=length)
    assert (caught.value.field, caught.value.limit) == ("length", f"1-{limit} bytes")
    assert not is_open(fd)


def test_a_session_has_so_many_regions_and_so_many_bytes_of_them(table: RegionTable) -> None:
    for _ in range(4):
        table.register(ONE, memfd(1 << 18), offset=0, length=1 << 18)
    refused = memfd(1)
    with pytest.raises(TableFull) as caught:
        table.register(ONE, refused, offset=0, length=1)
    assert (caught.value.field, caught.value.limit) == ("max_regions", "4")
    table.unregister(ONE, 1)
    with pytest.raises(TableFull) as caught:
        table.register(ONE, memfd(1 << 20), offset=0, length=(1 << 18) + 1)
    assert (caught.value.field, caught.value.limit) == ("max_region_bytes", f"{1 << 20} bytes")
    assert not is_open(refused)
    assert table.register(OTHER, memfd(1 << 20), offset=0, length=1 << 20) == 1
    assert table.region_count == 4


def test_two_sessions_do_not_know_each_other_s_regions(table: RegionTable) -> None:
    number = table.register(ONE, memfd(4096), offset=0, length=4096)
    for session, asked in ((OTHER, number), (ONE, number + 1), (ONE, 0)):
        with pytest.raises(InvalidArgument) as caught:
            table.get(session, asked)
        assert caught.value.field == "region"
    assert not table.unregister(OTHER, number)
    table.end_session(OTHER)
    assert table.get(ONE, number).length == 4096


# -- mapping -------------------------------------------------------------------------------------------------------


def _reopened(fd: int, flags: int) -> int:
    """The same file, open in another way."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)


SHRINK, FUTURE_WRITE = fcntl.F_SEAL_SHRINK, 0x10
MAPPED: dict[str, Callable[[], int]] = {
    "cannot shrink": lambda: sealed_memfd(4096),
    "cannot shrink or grow": lambda: sealed_memfd(4096, SHRINK | fcntl.F_SEAL_GROW),
    "cannot shrink, nor be sealed further": lambda: sealed_memfd(4096, SHRINK | fcntl.F_SEAL_SEAL),
    "opened again": lambda: _reopened(sealed_memfd(4096), os.O_RDWR),
}
UNMAPPED: dict[str, Callable[[], int]] = {
    "not sealed": lambda: memfd(4096),
    "may be sealed": lambda: memfd(4096, os.MFD_ALLOW_SEALING),
    "can only not grow": lambda: sealed_memfd(4096, fcntl.F_SEAL_GROW),
    "cannot be written": lambda: sealed_memfd(4096, SHRINK | fcntl.F_SEAL_WRITE),
    "cannot be written from now on": lambda: sealed_memfd(4096, SHRINK | FUTURE_WRITE),
    "read-only": lambda: _reopened(sealed_memfd(4096), os.O_RDONLY),
    "write-only": lambda: _reopened(sealed_memfd(4096), os.O_WRONLY),
    "appending": lambda: _reopened(sealed_memfd(4096), os.O_RDWR | os.O_APPEND),
    "file": lambda: shm_file(4096, os.O_RDWR),
}


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel gives a page to any hole, whatever it does here."""
    monkeypatch.setattr(regions, "_is_overcommit_strict", lambda: False)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("kind", [*MAPPED, *UNMAPPED])
def test_only_memory_that_cannot_shrink_is_mapped(table: RegionTable, kind: str) -> None:
    fd = {**MAPPED, **UNMAPPED}[kind]()
    region = table.get(ONE, table.register(ONE, fd, offset=0, length=4096))
    assert (region.mapped is not None) == (kind in MAPPED)
    assert maps_of(region.file[1]) == ["r--s"] * (kind in MAPPED)


def test_nothing_is_mapped_where_the_kernel_may_refuse_a_page(
    table: RegionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "_is_overcommit_strict", lambda: True)
    region = table.get(ONE, table.register(ONE, sealed_memfd(4096), offset=0, length=4096))
    assert region.mapped is None
    assert (region.is_readable, region.is_writable) == (True, True)


def test_the_kernel_says_whether_it_may_refuse_a_page() -> None:
    assert regions._is_overcommit_strict() == (Path("/proc/sys/vm/overcommit_memory").read_text() == "2\n")


@pytest.mark.usefixtures("lenient")
def test_huge_pages_are_not_mapped(table: RegionTable) -> None:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if int(memory.get("HugePages_Free", "0")) < 1:
        pytest.skip("no huge pages here")
    fd = memfd(2 << 20, os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHRINK)
    region = table.get(ONE, table.register(ONE, fd, offset=0, length=4096))
    assert region.mapped is None


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 4097, 12_345])
@pytest.mark.parametrize("length", [1, 4096, 7000])
def test_a_region_is_mapped_at_its_own_bytes(table: RegionTable, offset: int, length: int) -> None:
    data = os.urandom(20_000)
    fd = sealed_memfd(len(data))
    os.pwrite(fd, data, 0)
    mapped = table.get(ONE, table.register(ONE, fd, offset=offset, length=length)).mapped
    assert mapped is not None
    assert mapped.tobytes() == data[offset : offset + length]
    os.pwrite(fd, b"new", offset)
    assert mapped[:3].tobytes() == b"new"[:length]


@pytest.mark.usefixtures("lenient")
def test_what_is_mapped_can_only_be_read_and_stays_out_of_core_dumps(table: RegionTable) -> None:
    region = table.get(ONE, table.register(ONE, sealed_memfd(4096), offset=0, length=4096))
    assert region.mapped is not None
    with pytest.raises(ValueError, match="read-only"):
        region.mapped[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        region.mapped.setflags(write=True)
    assert maps_of(region.file[1]) == ["r--s"]
    _, _, about = Path("/proc/self/smaps").read_text().partition(f" {region.file[1]} ")
    flags = next(line for line in about.splitlines() if line.startswith("VmFlags:"))
    assert "dd" in flags.split()


@pytest.mark.usefixtures("lenient")
def test_a_region_that_finds_no_room_is_taken_unmapped() -> None:
    size, used = 8 << 30, int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    table, before = RegionTable(max_regions=1, max_region_bytes=size), open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, hard))
    try:
        region = table.get(ONE, table.register(ONE, sealed_memfd(size), offset=0, length=size))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert (region.mapped, region.is_readable, region.is_writable) == (None, True, True)
    assert open_fds() == before + 1
    table.close()
    assert open_fds() == before


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("end", ["unregister", "end_session", "close"])
def test_a_mapping_goes_with_the_descriptor(end: str) -> None:
    before, table = open_fds(), RegionTable(max_regions=4, max_region_bytes=1 << 20)
    region, other = (
        table.get(session, table.register(session, sealed_memfd(4096), offset=0, length=4096))
        for session in (ONE, OTHER)
    )
    if end == "unregister":
        table.unregister(ONE, 1)
    elif end == "end_session":
        table.end_session(ONE)
    else:
        table.close()
    assert region.mapped is None
    assert maps_of(region.file[1]) == []
    assert len(maps_of(other.file[1])) == (end != "close")
    table.close()
    assert open_fds() == before


@pytest.mark.usefixtures("lenient")
def test_a_copy_under_way_keeps_the_mapping(table: RegionTable) -> None:
    region = table.get(ONE, table.register(ONE, sealed_memfd(4096), offset=0, length=4096))
    region.use()
    table.end_session(ONE)
    assert region.mapped is not None
    assert maps_of(region.file[1]) == ["r--s"]
    region.unuse()
    assert maps_of(region.file[1]) == []


@pytest.mark.usefixtures("lenient")
def test_a_region_that_is_refused_is_not_mapped(table: RegionTable) -> None:
    fd = sealed_memfd(4096)
    inode = os.fstat(fd).st_ino
    with pytest.raises(InvalidArgument):
        table.register(ONE, fd, offset=0, length=4097)
    assert maps_of(inode) == []


# -- closing -------------------------------------------------------------------------------------------------------


def test_a_region_s_descriptor_is_closed_when_it_is_given_back() -> None:
    before = open_fds()
    table = RegionTable(max_regions=8, max_region_bytes=1 << 20)
    for session in (ONE, OTHER):
        for _ in range(3):
            table.register(session, memfd(4096), offset=0, length=4096)
    assert open_fds() == before + 6
    table.unregister(ONE, 2)
    assert open_fds() == before + 5
    table.end_session(ONE)
    table.end_session(ONE)
    assert (open_fds(), table.region_count) == (before + 3, 3)
    table.close()
    assert (open_fds(), table.region_count, table.region_bytes) == (before, 0, 0)


def test_a_copy_under_way_keeps_the_descriptor(table: RegionTable) -> None:
    region = table.get(ONE, table.register(ONE, memfd(4096), offset=0, length=4096))
    region.use()
    region.use()
    table.end_session(ONE)
    with pytest.raises(InvalidArgument):
        table.get(ONE, 1)
    with pytest.raises(InvalidArgument) as caught:
        region.use()
    assert caught.value.field == "region"
    region.unuse()
    assert is_open(region.fd)
    region.unuse()
    assert not is_open(region.fd)


async def test_who_retires_a_region_waits_for_its_copies(table: RegionTable) -> None:
    region = table.get(ONE, table.register(ONE, memfd(4096), offset=0, length=4096))
    region.use()
    retiring = asyncio.create_task(table.retire(ONE, 1))
    await asyncio.sleep(0)
    assert table.region_count == 0
    assert not retiring.done()
    region.unuse()
    assert await retiring
    assert not await table.retire(ONE, 1)


# -- slices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def region(table: RegionTable) -> Region:
    return table.get(ONE, table.register(ONE, memfd(1000), offset=100, length=900))


def _slices(rows: Sequence[tuple[int, int]], counts: Sequence[int] = ()) -> types.RegionSlices:
    return types.RegionSlices(offsets=[r[0] for r in rows], lengths=[r[1] for r in rows], counts=counts)


def _rows(region: Region, slices: types.RegionSlices, parts: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """(arena, region, length) of each copy planned; `parts` are (length, arena offset)."""
    copies = plan(slices, region, [p[0] for p in parts], [p[1] for p in parts], field="source")
    columns = copies.lists()
    return list(zip(*columns, strict=True))


def test_one_slice_a_part_without_counts(region: Region) -> None:
    planned = _rows(region, _slices([(800, 100), (0, 7)]), [(100, 4096), (7, 0)])
    assert planned == [(4096, 800, 100), (0, 0, 7)]


def test_several_slices_fill_a_part_one_after_another(region: Region) -> None:
    slices = _slices([(0, 10), (500, 20), (100, 0), (30, 5), (40, 6)], counts=[3, 0, 2])
    assert _rows(region, slices, [(30, 8192), (0, 100), (11, 0)]) == [
        (8192, 0, 10),
        (8202, 500, 20),
        (0, 30, 5),
        (5, 40, 6),
    ]


def test_parts_that_have_no_slot_are_skipped_but_must_fit(region: Region) -> None:
    slices = _slices([(0, 10), (10, 20), (30, 40)])
    assert _rows(region, slices, [(10, -1), (20, 4096), (40, -1)]) == [(4096, 10, 20)]
    with pytest.raises(InvalidArgument):
        _rows(region, slices, [(11, -1), (20, 4096), (40, -1)])


def test_a_part_of_unknown_length_is_skipped_and_may_have_any(region: Region) -> None:
    slices = _slices([(0, 900), (10, 20)])
    assert _rows(region, slices, [(-1, -1), (20, 4096)]) == [(4096, 10, 20)]
    assert _rows(region, slices, [(-1, 0), (20, 4096)]) == [(4096, 10, 20)]
    with pytest.raises(InvalidArgument):
        _rows(region, _slices([(1, 900), (10, 20)]), [(-1, -1), (20, 4096)])


def test_no_parts_make_no_copies(region: Region) -> None:
    assert _rows(region, _slices([]), []) == []


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("rows", "counts", "said"),
    [
        ([(0, 10)], (), "1 slices for 2 parts"),
        ([(0, 10), (0, 10), (0, 10)], (), "3 slices for 2 parts"),
        ([(0, 10), (0, 10)], (2,), "1 counts"),
        ([(0, 10), (0, 10)], (1, 2), "2 counts of 3 slices"),
        ([(0, 10), (0, 9)], (), "part 1: slices of 9 bytes"),
        ([(0, 11), (0, 10)], (), "part 0: a slice of 11 bytes"),
        ([(0, 10), (0, 5), (0, 6)], (1, 2), "part 1: slices of 11 bytes"),
        ([(0, 10)], (1, 0), "part 1: slices of 0 bytes"),
        ([(0, 10), (891, 10)], (), "part 1: 10 bytes from byte 891"),
        ([(HUGE, 10), (0, 10)], (), "part 0: 10 bytes from byte"),
        ([(10, HUGE), (0, 10)], (), "part 0"),
        ([(HUGE, HUGE), (0, 10)], (), "part 0"),
    ],
)
def test_slices_that_do_not_fit_are_refused_by_name(
    region: Region, rows: list[tuple[int, int]], counts: tuple[int, ...], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        plan(_slices(rows, counts), region, [10, 10], [0, 4096], field="into")
    assert caught.value.field == "into"
    assert caught.value.limit


def test_offsets_and_lengths_come_in_pairs(region: Region) -> None:
    with pytest.raises(InvalidArgument, match="2 offsets for 1 lengths"):
        plan(types.RegionSlices(offsets=[0, 0], lengths=[10]), region, [10, 10], [0, 4096], field="into")


def test_a_call_has_so_many_slices(region: Region) -> None:
    rows = [(0, 0)] * MAX_CALL_SLICES
    assert _rows(region, _slices(rows, [MAX_CALL_SLICES]), [(0, 0)]) == []
    with pytest.raises(InvalidArgument) as caught:
        plan(_slices([*rows, (0, 0)], [len(rows) + 1]), region, [0], [0], field="source")
    assert caught.value.limit == f"{MAX_CALL_SLICES} slices a call"


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=4), st.booleans()), max_size=12
    )
)
def test_a_plan_is_what_a_loop_over_parts_and_slices_gives(parts: list[tuple[list[tuple[int, int]], bool]]) -> None:
    table = RegionTable(max_regions=1, max_region_bytes=1000)
    region = table.get(ONE, table.register(ONE, memfd(1000), offset=0, length=1000))
    slices = _slices([row for rows, _ in parts for row in rows], [len(rows) for rows, _ in parts])
    sizes = [sum(size for _, size in rows) for rows, _ in parts]
    slots = [4096 * i if has_slot else -1 for i, (_, has_slot) in enumerate(parts)]
    expected = []
    for (rows, has_slot), slot in zip(parts, slots, strict=True):
        for at, size in rows:
            if has_slot and size:
                expected.append((slot, at, size))
            slot += size
    try:
        assert _rows(region, slices, list(zip(sizes, slots, strict=True))) == expected
    finally:
        table.close()
