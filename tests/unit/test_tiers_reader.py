"""Reading blocks back: neighbours in one piece, and nothing that is not what was written."""

from __future__ import annotations

import errno
import random

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.tiers.device import aligned
from kvstore.tiers.reader import MOST_RUN_BYTES, PartIn, Run, mismatched, read_run, runs_of
from kvstore.tiers.sealing import SegmentKey, read_keys
from kvstore.tiers.segment import BLOCK_BYTES, Header, blocks_of
from tests.disks import FaultyDisk, MemoryDisk


def part(block: int, offset: int, length: int, checksum: int = 0) -> PartIn:
    size = blocks_of(length) * BLOCK_BYTES
    return PartIn(block, offset, length, checksum, aligned(size)[:size])


def test_neighbours_are_read_in_one_piece_whatever_their_order() -> None:
    parts = [part(0, 0, 5000), part(1, 8192, 1), part(2, 16384, 4096), part(3, 20480, 10)]
    runs = list(runs_of([parts[2], parts[0], parts[3], parts[1]]))
    assert [(r.offset, [p.block for p in r.parts]) for r in runs] == [(0, [0, 1]), (16384, [2, 3])]
    assert list(runs_of([])) == []


def test_a_part_without_bytes_lies_where_the_next_one_begins() -> None:
    runs = list(runs_of([part(1, 4096, 0), part(2, 4096, 100), part(0, 0, 100)]))
    assert [[p.block for p in r.parts] for r in runs] == [[0, 1, 2]]


def test_runs_are_bounded_and_a_larger_part_is_one_of_its_own() -> None:
    size = MOST_RUN_BYTES // 4
    runs = list(runs_of([part(i, i * size, size) for i in range(9)]))
    assert [len(r.parts) for r in runs] == [4, 4, 1]
    large = [part(0, 0, 2 * MOST_RUN_BYTES), part(1, 2 * MOST_RUN_BYTES, 1)]
    assert [len(r.parts) for r in runs_of(large)] == [1, 1]


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(MemoryDisk())


def written(disk: FaultyDisk, *lengths: int) -> list[PartIn]:
    device = disk.create("a", 1 << 20)
    parts, at = [], 4096
    for i, length in enumerate(lengths):
        value = random.Random(i).randbytes(length)
        memory = aligned(length)[: blocks_of(length) * BLOCK_BYTES]
        memory[:length] = value
        if len(memory):
            device.write(at, [memory])
        parts.append(part(i, at, length, xxh3_64_intdigest(value)))
        at = parts[-1].end
    return parts


def landed(disk: FaultyDisk, run: Run, key: SegmentKey | None = None) -> list[int]:
    """Reads a run and returns the blocks that did not come as they were written."""
    read_run(disk.open("a"), run)
    return [part.block for part in mismatched(run.parts, key)]


def test_what_was_written_lands_and_is_right(disk: FaultyDisk) -> None:
    parts = written(disk, 5000, 0, 4096, 1, 70_000)
    (run,) = runs_of(parts)
    assert landed(disk, run) == []
    assert [bytes(p.piece[: p.length]) for p in parts] == [
        random.Random(i).randbytes(p.length) for i, p in enumerate(parts)
    ]
    assert disk.faults.calls["read"] == 1


def test_a_bit_that_changed_is_found_in_its_part(disk: FaultyDisk) -> None:
    parts = written(disk, 8192, 8192, 8192)
    (run,) = runs_of(parts)
    disk.open("a").write(parts[1].offset, [aligned(4096)])
    assert landed(disk, run) == [1]


def test_a_part_is_sealed_just_where_its_segment_is(disk: FaultyDisk) -> None:
    header = Header(b"store of 16 byte", 1, 1, 1 << 20, 0)
    _, key = read_keys("a1" * 32).begin(header)
    (run,) = runs_of(written(disk, 5000))
    assert landed(disk, run, key) == [0], "it was never sealed"
    sealed = Run(run.offset, [run.parts[0]._replace(tag=b"t" * 16)])
    assert landed(disk, sealed) == [0], "it cannot be opened"
    assert landed(disk, run) == []


def test_what_cannot_be_read_is_an_error(disk: FaultyDisk) -> None:
    (run,) = runs_of(written(disk, 8192))
    disk.faults.read_error = errno.EIO
    with pytest.raises(OSError, match="to fail"):
        read_run(disk.open("a"), run)
