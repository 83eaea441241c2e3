"""Writing a segment, and what a crash at any moment leaves of it."""

from __future__ import annotations

import errno
import hashlib
import random
from dataclasses import replace

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.tiers.device import aligned, read_bytes
from kvstore.tiers.sealing import Keyring, read_keys
from kvstore.tiers.segment import BLOCK_BYTES, BadSegment, Described, Header, blocks_of, keys_of, read_table, tags_of
from kvstore.tiers.writer import BlockOut, SegmentWriter, sealed_life
from tests.disks import Crashed, FaultyDisk, MemoryDisk

STORE, NAME, SIZE = b"store of 16 byte", "0000000003.seg", 1 << 20
HEADER = Header(STORE, number=3, sequence=9, size_bytes=SIZE, created_ns=7)
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")


def block(number: int, *lengths: int, described: Described = ONE) -> BlockOut:
    rng = random.Random(number)
    values = [rng.randbytes(length) for length in lengths]
    pieces = []
    for value in values:
        piece = aligned(blocks_of(len(value)) * BLOCK_BYTES)[: blocks_of(len(value)) * BLOCK_BYTES]
        piece[: len(value)] = value
        pieces.append(piece)
    key = hashlib.sha256(str(number).encode()).digest()
    sums = [xxh3_64_intdigest(value) for value in values]
    return BlockOut(described, key, range(len(lengths)), lengths, sums, pieces, created=float(number))


def held(disk: MemoryDisk | FaultyDisk) -> dict[tuple[bytes, int], bytes] | None:
    """Every part that a sealed segment holds, as read and checked by its table; None if it is not sealed."""
    device = disk.open(NAME)
    life = sealed_life(device, store_id=STORE, number=3)
    if life is None:
        return None
    footer = life[1]
    start = footer.tables_at(SIZE)
    table = read_table(read_bytes(device, start, SIZE - BLOCK_BYTES - start), footer, SIZE)
    assert not table.damaged_blocks
    found = {}
    for key, entry in zip(keys_of(table.entries), table.entries, strict=True):
        raw = read_bytes(device, int(entry["offset"]) * BLOCK_BYTES, int(entry["length"])) if entry["length"] else b""
        assert xxh3_64_intdigest(raw) == int(entry["checksum"]), "a wrong byte"
        found[key, int(entry["part"])] = bytes(raw)
    return found


def expected(*blocks: BlockOut) -> dict[tuple[bytes, int], bytes]:
    return {
        (b.key, part): bytes(piece[:length])
        for b in blocks
        for part, length, piece in zip(b.parts, b.lengths, b.pieces, strict=True)
    }


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def test_what_was_written_is_held_once_it_is_sealed(disk: MemoryDisk) -> None:
    writer = SegmentWriter.begin(disk, NAME, HEADER)
    blocks = [block(0, 5000, 1), block(1, BLOCK_BYTES, described=TWO), block(2, 0), block(3, 7, 0, 9000)]
    placed = writer.write(blocks[:2]) + writer.write(blocks[2:])
    assert [p.block for p in placed] == blocks
    assert placed[1].offsets == [4 * BLOCK_BYTES]
    assert held(disk) is None
    writer.seal(11)
    assert held(disk) == expected(*blocks)
    writer.close()


@pytest.mark.parametrize("keyring", [None, read_keys("a1" * 32)], ids=["as it is", "sealed"])
def test_what_was_placed_is_told_as_an_index_keeps_it(disk: MemoryDisk, keyring: Keyring | None) -> None:
    writer = SegmentWriter.begin(disk, NAME, HEADER, keyring=keyring)
    one = block(0, 5000, 0, 1)
    (placed,) = writer.write([one])
    rows = list(placed.rows())
    offsets = [BLOCK_BYTES, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES]
    assert [row[:4] for row in rows] == list(zip(one.parts, offsets, one.lengths, one.checksums, strict=True))
    tags = [row[4] for row in rows]
    assert tags == tags_of(writer.layout.entries())
    assert {len(tag) for tag in tags} == ({0} if keyring is None else {16})
    assert len(set(tags)) == (1 if keyring is None else 3)


@pytest.mark.parametrize("keyring", [None, read_keys("a1" * 32)], ids=["as it is", "sealed"])
def test_no_more_is_taken_than_fits(disk: MemoryDisk, keyring: Keyring | None) -> None:
    writer = SegmentWriter.begin(disk, NAME, HEADER, keyring=keyring)
    blocks = [block(i, 100_000) for i in range(20)]
    placed = writer.write(blocks)
    assert 0 < len(placed) < 20
    assert writer.write(blocks[len(placed) :]) == []
    writer.seal(11)
    if keyring is None:
        assert held(disk) == expected(*blocks[: len(placed)])
    assert [offset for one in placed for offset in one.offsets] == [
        BLOCK_BYTES * (1 + i * blocks_of(100_000)) for i in range(len(placed))
    ], "sealing takes room"


def test_another_life_begins_with_nothing(disk: MemoryDisk) -> None:
    first = SegmentWriter.begin(disk, NAME, HEADER)
    first.write([block(0, 5000)])
    first.seal(11)
    second = SegmentWriter.begin(disk, NAME, replace(HEADER, sequence=10))
    assert held(disk) is None
    second.write([block(1, 6000)])
    second.seal(12)
    assert held(disk) == expected(block(1, 6000))


def test_a_segment_of_another_size_is_made_anew(disk: MemoryDisk) -> None:
    SegmentWriter.begin(disk, NAME, HEADER).seal(1)
    writer = SegmentWriter.begin(disk, NAME, replace(HEADER, size_bytes=2 * SIZE, sequence=10))
    assert disk.open(NAME).size_bytes == 2 * SIZE
    writer.seal(2)


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (replace(HEADER, store_id=b"another store 16"), "header.store"),
        (replace(HEADER, number=4), "header.number"),
        (replace(HEADER, size_bytes=2 * SIZE), "header.number"),
    ],
)
def test_a_segment_that_is_not_this_one_is_told(disk: MemoryDisk, header: Header, field: str) -> None:
    writer = SegmentWriter.begin(disk, NAME, HEADER)
    writer.device.write(0, [memoryview(bytearray(header.to_block()))])
    with pytest.raises(BadSegment) as why:
        sealed_life(writer.device, store_id=STORE, number=3)
    assert why.value.field == field


@pytest.mark.parametrize("what", ["write", "sync", "create"])
def test_an_error_of_the_disk_is_raised_and_nothing_is_held(disk: MemoryDisk, what: str) -> None:
    faulty = FaultyDisk(disk)
    if what == "create":
        faulty.faults.create_error = errno.ENOSPC
        with pytest.raises(OSError, match="to fail"):
            SegmentWriter.begin(faulty, NAME, HEADER)
        assert disk.names() == []
        return
    writer = SegmentWriter.begin(faulty, NAME, HEADER)
    writer.write([block(0, 5000)])
    setattr(faulty.faults, f"{what}_error", errno.EIO)
    with pytest.raises(OSError, match="to fail"):
        writer.seal(11)
    setattr(faulty.faults, f"{what}_error", 0)
    assert held(faulty) is None


def test_a_crash_at_any_moment_leaves_all_or_nothing() -> None:
    """Two lives of a segment, killed at every operation in turn, each with several fates of what was not synced."""
    first, second = [block(i, 5000, 300) for i in range(5)], [block(10 + i, 9000) for i in range(7)]

    def run(disk: MemoryDisk) -> None:
        for life, blocks in enumerate((first, second)):
            writer = SegmentWriter.begin(disk, NAME, replace(HEADER, sequence=9 + life))
            for one in blocks:
                writer.write([one])
            writer.seal(11)

    operations = _count(run)
    assert operations > 30
    seen = set()
    for at in range(operations):
        for fate in range(8):
            disk = MemoryDisk()
            _crash_at(disk, at)
            with pytest.raises(Crashed):
                run(disk)
            left = disk.after_crash(random.Random(at * 100 + fate))
            if NAME not in left.names():
                continue
            try:
                found = held(left)
            except BadSegment:  # Its header was never written.
                assert at < 4
                continue
            assert found in (None, expected(*first), expected(*second)), f"killed at {at}"
            seen.add(len(found or ()))
    assert seen == {0, 10, 7}, "no crash came after a seal: the test shows nothing"


def _count(run: object) -> int:
    disk, count = MemoryDisk(), [0]

    def one(what: str, name: str) -> None:
        count[0] += 1

    disk.before = one
    run(disk)  # type: ignore[operator]
    return count[0]


def _crash_at(disk: MemoryDisk, at: int) -> None:
    left = [at]

    def one(what: str, name: str) -> None:
        if not left[0]:
            raise Crashed
        left[0] -= 1

    disk.before = one
