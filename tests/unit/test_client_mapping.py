"""The arena as a client maps it: read-only, sealed, inside its bounds, gone when the last view is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore_client.errors import MalformedAnswer
from kvstore_client.mapping import ArenaMapping
from kvstore_wire.errors import LeaseExpired
from tests.unit.sealed_memory import SIZES, memory_file, noise

DATA = noise(3 << 20)


def mapped(data: bytes = DATA) -> ArenaMapping:
    return ArenaMapping(memory_file(data), len(data), generation=7)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def is_mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any("memfd:test-arena" in line and line.split()[4] == str(inode) for line in lines)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_a_view_shows_exactly_what_was_asked(size: int, offset: int) -> None:
    mapping = mapped()
    size = min(size, len(DATA) - offset)
    view = mapping.view(offset, size)
    assert view.tobytes() == DATA[offset : offset + size]
    assert bytes(mapping.array[offset : offset + size]) == DATA[offset : offset + size]
    assert (mapping.size_bytes, mapping.generation, len(mapping.array)) == (len(DATA), 7, len(DATA))


def test_the_end_can_be_seen_and_nothing_behind_it() -> None:
    mapping = mapped()
    assert mapping.view(len(DATA) - 1, 1) == DATA[-1:]
    assert bytes(mapping.view(len(DATA), 0)) == b""
    for offset, length in ((len(DATA), 1), (len(DATA) + 1, 0), (0, len(DATA) + 1), (-1, 1), (1, -1), (1 << 64, 1)):
        with pytest.raises(MalformedAnswer, match="outside"):
            mapping.view(offset, length)
    with pytest.raises(MalformedAnswer):
        mapping.view(np.uint64(2**64 - 1), np.uint64(2))  # Must not wrap around.


def test_less_than_the_file_can_be_mapped() -> None:
    mapping = ArenaMapping(memory_file(DATA), 5000, generation=1)
    assert len(mapping.array) == 5000
    with pytest.raises(MalformedAnswer):
        mapping.view(4999, 2)


def test_nothing_can_be_written() -> None:
    mapping = mapped()
    view = mapping.view(0, 8)
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        mapping.array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        mapping.array.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(view, np.uint8)[0] = 1
    assert mapping.view(0, 8) == DATA[:8]


@pytest.mark.parametrize("seals", [0, 4])  # 4 seals against growing alone.
def test_memory_that_may_shrink_is_refused(seals: int) -> None:
    fd = memory_file(DATA, seals=seals)
    with pytest.raises(MalformedAnswer, match="shrinking"):
        ArenaMapping(fd, len(DATA), generation=1)
    assert not is_open(fd)


@pytest.mark.parametrize("size", [len(DATA) + 1, 1 << 62, 0, -1])
def test_a_size_that_the_file_has_not_is_refused(size: int) -> None:
    fd = memory_file(DATA)
    with pytest.raises(MalformedAnswer, match="announced"):
        ArenaMapping(fd, size, generation=1)
    assert not is_open(fd)


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    reading, writing = os.pipe()
    for fd in (os.open(path, os.O_RDONLY), reading):
        with pytest.raises(MalformedAnswer, match="no sealed memory"):
            ArenaMapping(fd, 1, generation=1)
        assert not is_open(fd)
    os.close(writing)


def test_the_descriptor_is_closed_once_mapped() -> None:
    fd = memory_file(DATA)
    mapping = ArenaMapping(fd, len(DATA), generation=1)
    assert not is_open(fd)
    assert mapping.view(0, 4) == DATA[:4]


def test_closing_ends_the_map_and_may_be_repeated() -> None:
    fd = memory_file(DATA)
    inode = os.fstat(fd).st_ino
    mapping = ArenaMapping(fd, len(DATA), generation=1)
    assert is_mapped(inode)
    assert not mapping.closed
    mapping.close()
    mapping.close()
    assert mapping.closed
    assert not is_mapped(inode)
    with pytest.raises(LeaseExpired, match="mapped no more"):
        mapping.view(0, 1)
    with pytest.raises(LeaseExpired, match="mapped no more"):
        _ = mapping.array


def test_views_that_are_out_keep_the_map_until_the_last_is_gone() -> None:
    fd = memory_file(DATA)
    inode = os.fstat(fd).st_ino
    mapping = ArenaMapping(fd, len(DATA), generation=1)
    view, array = mapping.view(10, 4), mapping.array[20:24]
    mapping.close()
    assert mapping.closed
    assert view == DATA[10:14]
    del view
    assert array.tobytes() == DATA[20:24]
    assert is_mapped(inode)
    del array
    assert not is_mapped(inode)


def test_two_lives_of_a_shard_are_mapped_side_by_side() -> None:
    first, second = mapped(b"a" * 5000), mapped(b"b" * 9000)
    old = first.view(0, 3)
    first.close()
    assert (bytes(old), bytes(second.view(8997, 3))) == (b"aaa", b"bbb")
