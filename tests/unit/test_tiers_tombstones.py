"""The log of what was deleted: durable when told, torn tails dropped, forgotten with its segments."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.tiers.tombstones import RECORD_BYTES, Graveyard, Tombstone, Tombstones

ONE, TWO = b"1" * 32, b"2" * 32


def key(number: int, size: int = 32) -> bytes:
    return random.Random(number).randbytes(size)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deleted.log"


@pytest.fixture
def log(path: Path) -> Iterator[Tombstones]:
    made = Tombstones(path)
    yield made
    made.close()
    made.close()


def test_what_was_added_is_read_by_the_next_process(path: Path, log: Tombstones) -> None:
    assert (log.count, list(log.read())) == (0, [])
    first = [Tombstone(3, ONE, key(0, 16)), Tombstone(4, TWO, key(1, 64), 77)]
    log.add(first)
    log.add([Tombstone(5, ONE)])
    again = Tombstones(path)
    assert list(again.read()) == [*first, Tombstone(5, ONE)]
    assert (again.count, again.damaged_count) == (3, 0)
    again.close()


@pytest.mark.parametrize("cut", [1, RECORD_BYTES // 2, RECORD_BYTES - 1])
def test_a_torn_last_record_is_dropped_and_the_next_is_whole(path: Path, log: Tombstones, cut: int) -> None:
    log.add([Tombstone(1, ONE, key(0)), Tombstone(2, ONE, key(1))])
    os.truncate(path, 2 * RECORD_BYTES - cut)
    again = Tombstones(path)
    again.add([Tombstone(3, TWO, key(2))])
    assert list(again.read()) == [Tombstone(1, ONE, key(0)), Tombstone(3, TWO, key(2))]
    again.close()


@pytest.mark.parametrize("at", [0, 8, 12, 13, 45, RECORD_BYTES - 1])
def test_a_damaged_record_is_counted_and_the_others_are_read(path: Path, log: Tombstones, at: int) -> None:
    log.add([Tombstone(i, ONE, key(i)) for i in range(3)])
    raw = bytearray(path.read_bytes())
    raw[RECORD_BYTES + at] ^= 1
    path.write_bytes(raw)
    assert [t.sequence for t in log.read()] == [0, 2]
    assert log.damaged_count == 1


def test_records_of_segments_that_are_gone_are_forgotten(path: Path, log: Tombstones) -> None:
    log.add([Tombstone(i, ONE, key(i)) for i in range(10)])
    log.forget_below(7)
    log.add([Tombstone(11, TWO)])
    assert [t.sequence for t in log.read()] == [7, 8, 9, 11]
    again = Tombstones(path)
    assert [t.sequence for t in again.read()] == [7, 8, 9, 11]
    again.close()
    assert os.listdir(path.parent) == [path.name]


def test_a_log_that_cannot_be_rewritten_stays_as_it_is(path: Path, log: Tombstones) -> None:
    log.add([Tombstone(i, ONE, key(i)) for i in range(4)])
    (path.parent / f".new-{path.name}").mkdir()
    with pytest.raises(OSError, match=r"."):
        log.forget_below(2)
    assert [t.sequence for t in log.read()] == [0, 1, 2, 3]


def test_a_full_disk_adds_nothing() -> None:
    log = Tombstones(Path("/dev/full"))
    with pytest.raises(OSError, match="No space"):
        log.add([Tombstone(1, ONE)])
    assert log.count == 0
    log.close()


def test_a_block_is_dead_in_the_segments_its_tombstone_speaks_of() -> None:
    yard = Graveyard([Tombstone(5, ONE, key(0)), Tombstone(3, ONE, key(0)), Tombstone(4, TWO)])
    assert yard.has(ONE, key(0), 5)
    assert not yard.has(ONE, key(0), 6), "it was written again since"
    assert not yard.has(ONE, key(1), 1)
    assert yard.has(TWO, key(9), 4)
    assert not yard.has(TWO, key(9), 5)
    assert not Graveyard([]).has(ONE, key(0), 0)
    assert (yard.last_sequence, Graveyard([]).last_sequence) == (5, 0)


def test_a_block_that_was_written_behind_the_place_of_its_tombstone_is_not_dead() -> None:
    yard = Graveyard([Tombstone(5, ONE, key(0), 40), Tombstone(4, ONE, key(0)), Tombstone(5, TWO, b"", 7)])
    assert yard.has(ONE, key(0), 5, 39)
    assert not yard.has(ONE, key(0), 5, 40), "it was written again since, into the same segment"
    assert yard.has(ONE, key(0), 4, 1000)
    assert yard.has(TWO, key(3), 5, 6)
    assert not yard.has(TWO, key(3), 5, 7)


def test_the_bytes_are_those_of_the_page() -> None:
    raw = Tombstone(0x0102030405060708, ONE, b"k" * 16, 0x0A0B0C0D).to_bytes()
    assert (len(raw), RECORD_BYTES) == (117, 117)
    assert raw[:13].hex() == "0807060504030201" + "0d0c0b0a" + "10"
    assert raw[13:45] == ONE
    assert raw[45:109] == b"k" * 16 + bytes(48)
    assert raw[109:] == xxh3_64_intdigest(raw[:109]).to_bytes(8, "little")
