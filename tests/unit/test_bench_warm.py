"""What the warm tier's benchmarks are made of: bounds, rounds in turn, bare reads and writes, a disk that counts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import index, warm
from bench.disk import (
    BLOCK_BYTES,
    LEAST_ROUNDS,
    OWN,
    RAW,
    CountingDisk,
    RawFile,
    RawReader,
    RawWriter,
    Read,
    folder_on_disk,
    in_turn,
    share_row,
)
from bench.slots import DESCRIBED, Slots, key_of, neighbours, tier_in, write_all
from kvstore.tiers.device import aligned
from kvstore.tiers.index import Located, PartAt
from kvstore.tiers.warm import Wanted
from tests.disks import MemoryDisk

MIB = 1 << 20


def place(segment: int, offset: int, length: int = 2 * MIB) -> Located:
    return Located(0.0, 0.0, segment, segment + 1, (PartAt(0, offset, length, 0),))


def memory(value: int, size: int) -> memoryview:
    made = aligned(size)
    made[:] = bytes([value]) * len(made)
    return made


# -- bounds --------------------------------------------------------------------------------------------------------


def test_the_bounds_are_what_is_required() -> None:
    assert (warm.DEMOTION, warm.PROMOTION, warm.WARM_GET) == (0.85, 0.85, 0.75)
    assert (warm.WRITTEN_OVER_DEMOTED, warm.PING_MS) == (1.05, 20.0)
    assert (index.MANY_OVER_FEW, index.FEW, index.MANY, index.FULL_BLOCKS) == (2.0, 100_000, 1_000_000, 10_000_000)


def test_a_share_is_the_median_of_neighbouring_rounds() -> None:
    row = share_row("a", {OWN: [1.0, 2.0, 4.0], RAW: [0.5, 1.8, 4.0]}, 10**9, at_least=0.85)
    assert (row.ratio, row.holds) == (0.9, True)
    assert (row.value, row.ceiling) == (0.5, 1 / 1.8)


# -- rounds in turn ------------------------------------------------------------------------------------------------


def test_another_one_begins_each_round_and_warm_ups_do_not_count() -> None:
    played: list[str] = []

    def act(name: str) -> float:
        played.append(name)
        return float(len(played))

    times = in_turn({"a": lambda: act("a"), "b": lambda: act("b")}, rounds=3, seconds=60, warm_up=2)
    assert played == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b"]
    assert times == {"a": [5.0, 8.0, 9.0], "b": [6.0, 7.0, 10.0]}


def test_rounds_end_when_the_time_is_over_but_some_are_always_played() -> None:
    times = in_turn({"a": lambda: 1.0}, rounds=1000, seconds=0.0)
    assert len(times["a"]) == LEAST_ROUNDS


# -- what is read and written --------------------------------------------------------------------------------------


def test_neighbours_are_read_together_up_to_a_limit_and_within_one_segment() -> None:
    two = 2 * MIB
    places = [place(0, i * two) for i in range(5)] + [place(1, 5 * two), place(1, 7 * two), place(1, 6 * two)]
    assert neighbours(places, 4 * two) == [[0, 1, 2, 3], [4], [5], [6], [7]]
    assert neighbours([], 1) == []
    assert neighbours([place(0, 0, 8 * MIB)], 1) == [[0]], "one block is a read of its own, however long"


def test_bare_writes_lie_as_a_segment_does_and_bare_reads_bring_them_back() -> None:
    with folder_on_disk("test") as folder:
        made = RawFile(folder / "a", MIB)
        pieces = [memory(1, 2 * BLOCK_BYTES), memory(2, BLOCK_BYTES), memory(3, BLOCK_BYTES)]
        RawWriter([made], MIB, table_blocks=2).write_s([[pieces[:2], pieces[2:]]])
        made.close()
        raw = (folder / "a").read_bytes()
        assert raw[BLOCK_BYTES : 5 * BLOCK_BYTES] == b"".join(pieces)
        assert len(raw) == MIB, "nothing is written beyond the footer"
        first, second = memory(0, 2 * BLOCK_BYTES), memory(0, 2 * BLOCK_BYTES)
        with RawReader(2) as reader:
            file = reader.file(folder / "a")
            assert reader.file(folder / "a") is file
            reader.read_s([Read(file, BLOCK_BYTES, [first]), Read(file, 3 * BLOCK_BYTES, [second])])
        assert b"".join([first, second]) == b"".join(pieces)
    assert not folder.exists()


def test_a_bare_read_that_fails_is_no_fast_one() -> None:
    with folder_on_disk("test") as folder, RawReader(1) as reader:
        RawFile(folder / "a", MIB).close()
        with pytest.raises(OSError, match="were moved"):
            reader.read_s([Read(reader.file(folder / "a"), MIB - BLOCK_BYTES, [memory(0, 2 * BLOCK_BYTES)])])


def test_every_written_byte_is_counted() -> None:
    disk = CountingDisk(MemoryDisk())
    made = disk.create("a", MIB)
    made.write(0, [memory(1, BLOCK_BYTES), memory(2, 2 * BLOCK_BYTES)])
    made.sync()
    disk.open("a").write(BLOCK_BYTES, [memory(3, BLOCK_BYTES)])
    found = memory(0, BLOCK_BYTES)
    made.read(2 * BLOCK_BYTES, [found])
    assert bytes(found) == bytes([2]) * BLOCK_BYTES
    assert disk.written_bytes == 4 * BLOCK_BYTES


def test_a_tier_takes_what_the_slots_hold_and_all_that_it_writes_is_counted(tmp_path: Path) -> None:
    with (
        Slots(3) as slots,
        tier_in(tmp_path, segment_bytes=16 * MIB, segment_count=3, rewrite_share=0.0) as (tier, disk),
    ):
        slots.stamp(1, 77)
        assert int.from_bytes(slots.pieces[1][:8], "little") == 77
        places = write_all(tier, [slots.block(i % 3, i) for i in range(9)])
        tier.flush().result(60)
        assert tier.has(DESCRIBED.digest, [key_of(i) for i in range(10)]) == [True] * 9 + [False]
        for piece in slots.pieces:
            piece[:8] = bytes(8)
        wanted = [Wanted(DESCRIBED.digest, key_of(i), places[i], [slots.pieces[i % 3]]) for i in (0, 1, 5)]
        assert tier.read(wanted).result(60) == [True] * 3
        assert int.from_bytes(slots.pieces[1][:8], "little") == 77
        frames = disk.written_bytes - 9 * 2 * MIB
        assert 0 < frames <= 2 * 5 * BLOCK_BYTES, "header, namespaces, table, footer of each of two segments"


# -- an index without segments -------------------------------------------------------------------------------------


def test_an_index_is_opened_as_at_a_start_and_finds_what_is_there_and_nothing_else(tmp_path: Path) -> None:
    index.make(tmp_path / "a", 500)
    tier = index._tier(tmp_path / "a", 500)
    try:
        for what in (index.HAS, index.ABSENT, index.LOCATE):
            assert index._round_s(tier, what, random.Random(1), 500) > 0
        with pytest.raises(RuntimeError, match="were found"):
            index._round_s(tier, index.HAS, random.Random(1), 501 * 2)
    finally:
        tier.close()


def test_segments_without_payload_hold_as_many_blocks_as_real_ones() -> None:
    disk = index.FramesDisk(2 * index.PER_SEGMENT + 5)
    assert disk.counts == [index.PER_SEGMENT, index.PER_SEGMENT, 5]
    with pytest.raises(OSError, match="only header and footer"):
        disk.open(disk.names()[0]).read(BLOCK_BYTES, [memory(0, BLOCK_BYTES)])
