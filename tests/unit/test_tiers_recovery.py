"""Opening a folder: what is whole is found, what is not costs itself and nothing else, and every count is right."""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.core.segments import SegmentBook, SegmentRules, SegmentState
from kvstore.tiers.device import aligned, read_bytes
from kvstore.tiers.index import Index, Located, NamespaceAt, PartAt, SegmentAt
from kvstore.tiers.recovery import Clock, Recovered, name_of, recover
from kvstore.tiers.segment import BLOCK_BYTES, Described, Header, blocks_of
from kvstore.tiers.tombstones import Tombstone, Tombstones
from kvstore.tiers.writer import BlockOut, SegmentWriter
from tests.disks import FaultyDisk, MemoryDisk

STORE, SIZE, CACHE = b"store of 16 byte", 1 << 20, 8 << 20
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")
CLOCK = Clock(now=1000.0, wall=1_700_000_000.0)
Key = tuple[bytes, bytes]


def block(number: int, *lengths: int, described: Described = ONE, expires: float = 0.0) -> BlockOut:
    values = [random.Random(number * 100 + i).randbytes(n) for i, n in enumerate(lengths or (5000,))]
    pieces = []
    for value in values:
        size = blocks_of(len(value)) * BLOCK_BYTES
        piece = aligned(size)[:size]
        piece[: len(value)] = value
        pieces.append(piece)
    key = hashlib.sha256(str(number).encode()).digest()
    sums = [xxh3_64_intdigest(value) for value in values]
    sizes = [len(value) for value in values]
    created = CLOCK.wall - 500 + number
    return BlockOut(described, key, range(len(sizes)), sizes, sums, pieces, created=created, expires=expires)


class Ground:
    """A folder between two lives of a server."""

    def __init__(self, path: Path) -> None:
        self.path, self.disk = path, MemoryDisk()
        self.namespaces: dict[bytes, int] = {}

    @property
    def index_path(self) -> Path:
        return self.path / "index"

    def write(self, number: int, sequence: int, *blocks: BlockOut, seal: bool = True, known: bool = True) -> None:
        """Writes a segment; `known`: the index hears of it, as it does once it is sealed."""
        header = Header(STORE, number, sequence, SIZE, created_ns=1)
        writer = SegmentWriter.begin(self.disk, name_of(number), header)
        placed = writer.write(blocks)
        assert len(placed) == len(blocks)
        if not seal:
            return
        writer.seal(5)
        if not known:
            return
        index = Index(self.index_path, cache_bytes=CACHE)
        change = index.change()
        for out, offsets in placed:
            spec = out.described
            name = self.namespaces.setdefault(spec.digest, len(self.namespaces) + 1)
            change.put_namespace(spec.digest, NamespaceAt(name, spec.spec))
            rows = zip(out.parts, offsets, out.lengths, out.checksums, strict=True)
            parts = tuple(PartAt(*row) for row in rows)
            change.put_block(name, out.key, Located(out.created, out.expires, number, sequence, parts))
        count, size = sum(len(b.parts) for b in blocks), sum(sum(b.lengths) for b in blocks)
        change.put_segment(number, SegmentAt(sequence, count, size))
        index.apply(change)
        index.close()

    def lose_index(self) -> None:
        (self.index_path / "CURRENT").write_bytes(b"\xff")

    def bury(self, *tombstones: Tombstone) -> None:
        log = Tombstones(self.path / "deleted.log")
        log.add(tombstones)
        log.close()


class Life:
    """A folder that was opened."""

    def __init__(self, ground: Ground, disk: MemoryDisk | FaultyDisk, capacity_count: int) -> None:
        self.disk = disk
        self.book = SegmentBook(SegmentRules(segment_bytes=SIZE), capacity_count * SIZE)
        self.tombstones = Tombstones(ground.path / "deleted.log")
        self.found: Recovered = recover(
            disk,
            self.book,
            self.tombstones,
            index_path=ground.index_path,
            cache_bytes=CACHE,
            store_id=STORE,
            clock=CLOCK,
        )

    def held(self) -> dict[Key, list[bytes]]:
        """Every block that the index has, as read and checked."""
        digests = {n.id: digest for digest, n in self.found.namespaces.items()}
        held = {}
        for namespace, key, located in self.found.index.blocks():
            segment = self.book.get(*located.life)
            assert segment is not None, "a block in a segment that is not there"
            assert segment.row_at(located.start) is not None, "a block that the book does not know"
            device, parts = self.disk.open(name_of(located.segment)), []
            for part in located.parts:
                raw = bytes(read_bytes(device, part.offset, part.length))
                assert xxh3_64_intdigest(raw) == part.checksum, "a wrong byte"
                parts.append(raw)
            held[digests[namespace], key] = parts
        assert sum(s.block_count for s in self.book.sealed) == len(held) == self.found.block_count
        numbers = {int(name[:10]) for name in self.disk.names() if len(name) == len(name_of(0))}
        assert numbers == {n for n in range(100) if n in self.book._segments}, "disk and book differ"
        return held

    def close(self) -> None:
        self.found.index.close()
        self.tombstones.close()


def expected(*blocks: BlockOut) -> dict[Key, list[bytes]]:
    return {
        (b.described.digest, b.key): [bytes(p[:n]) for p, n in zip(b.pieces, b.lengths, strict=True)] for b in blocks
    }


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


@pytest.fixture
def opened(ground: Ground) -> Iterator[Callable[..., Life]]:
    lives: list[Life] = []

    def open_it(*, capacity_count: int = 10, disk: FaultyDisk | None = None) -> Life:
        if lives:
            lives[-1].close()
        lives.append(Life(ground, disk or ground.disk, capacity_count))
        return lives[-1]

    yield open_it
    for life in lives:
        life.close()


def test_an_empty_folder_is_a_beginning(opened: Callable[..., Life]) -> None:
    life = opened()
    assert (life.held(), life.found.counts, life.found.rebuilt) == ({}, {}, True)
    assert life.book.open() is not None


def test_what_was_sealed_is_found_again(ground: Ground, opened: Callable[..., Life]) -> None:
    blocks = [block(0, 5000, 1), block(1, described=TWO), block(2)]
    ground.write(0, 1, *blocks[:2])
    ground.write(1, 2, blocks[2])
    life = opened()
    assert life.held() == expected(*blocks)
    assert (life.found.counts, life.found.rebuilt) == ({}, False)
    assert life.found.namespaces[TWO.digest].spec == b"two"
    assert life.book[0].rows.touched[0] == CLOCK.now - 500, "its age went over to the other clock"
    opened_segment = life.book.open()
    assert opened_segment is not None
    assert opened_segment.sequence == 3


def test_what_was_not_sealed_is_nothing_and_its_room_is_used_again(ground: Ground, opened: Callable[..., Life]) -> None:
    ground.write(0, 1, block(0))
    ground.write(1, 2, block(1), seal=False)
    life = opened()
    assert life.held() == expected(block(0))
    assert life.found.counts == {"unsealed_segments": 1}
    again = life.book.open()
    assert again is not None
    assert again.number == 1


def test_a_sealed_segment_that_the_index_had_no_time_to_hear_of_is_taken_in(
    ground: Ground, opened: Callable[..., Life]
) -> None:
    ground.write(0, 1, block(0))
    ground.write(1, 2, block(1, 100, 200), block(2, described=TWO), known=False)
    life = opened()
    assert life.held() == expected(block(0), block(1, 100, 200), block(2, described=TWO))
    assert life.found.counts == {"adopted_segments": 1}
    assert opened().found.counts == {}, "it was not durable"


def test_of_two_places_the_later_one_counts(ground: Ground, opened: Callable[..., Life]) -> None:
    ground.write(1, 5, block(0), block(1))
    ground.write(0, 3, block(0), block(2), known=False)  # An older copy.
    ground.write(2, 7, block(1), known=False)  # A newer one.
    life = opened()
    assert life.held() == expected(block(0), block(1), block(2))
    assert life.found.counts == {"adopted_segments": 2, "older_blocks": 1}
    assert [s.block_count for s in life.book.sealed] == [1, 1, 1]


def test_an_index_that_cannot_be_opened_is_set_aside_and_made_anew(ground: Ground, opened: Callable[..., Life]) -> None:
    blocks = [block(i) for i in range(6)]
    ground.write(0, 1, *blocks[:3])
    ground.write(1, 2, *blocks[3:], block(0))
    for _ in range(2):  # The second time there is one aside already.
        ground.lose_index()
        life = opened()
        assert life.held() == expected(*blocks)
        assert life.found.rebuilt
        assert life.found.counts["broken_indexes"] == 1
        assert (ground.path / "index.broken").is_dir()
        life.close()


def test_what_was_deleted_does_not_come_back_with_a_new_index(ground: Ground, opened: Callable[..., Life]) -> None:
    ground.write(0, 1, block(0), block(1), block(2, described=TWO))
    ground.write(1, 2, block(3, described=TWO), block(1))
    ground.bury(
        Tombstone(1, ONE.digest, block(0).key), Tombstone(1, ONE.digest, block(1).key), Tombstone(1, TWO.digest)
    )
    ground.lose_index()
    life = opened()
    assert life.held() == expected(block(1), block(3, described=TWO)), "written since: they stay"
    assert life.found.counts["deleted_blocks"] == 3


def test_what_was_deleted_does_not_come_back_with_an_index_that_lost_its_last_changes(
    ground: Ground, opened: Callable[..., Life]
) -> None:
    """The records are durable, the index is not: it has the blocks still."""
    blocks = [block(i) for i in range(4)]
    ground.write(0, 1, *blocks[:2], block(5, described=TWO))
    ground.write(1, 2, *blocks[2:])
    second_end = 1 + 2 * blocks_of(
        5000
    )  # Behind the first block of the second segment, which begins behind its header.
    ground.bury(
        Tombstone(1, ONE.digest, blocks[1].key),
        Tombstone(2, ONE.digest, blocks[2].key, second_end),
        Tombstone(2, ONE.digest, blocks[3].key, 1 + blocks_of(5000)),
        Tombstone(1, TWO.digest),
    )
    for _ in range(2):
        life = opened()
        assert life.held() == expected(blocks[0], blocks[3]), "the last was written behind the place of its record"
        life.close()
    assert life.found.counts == {}


def test_no_sequence_number_is_given_again_that_a_record_or_an_unsealed_segment_bears(
    ground: Ground, opened: Callable[..., Life]
) -> None:
    ground.write(0, 5, block(0))
    ground.write(1, 9, block(1), seal=False)
    assert opened().book.last_sequence == 9
    ground.bury(Tombstone(20, ONE.digest, block(7).key))
    assert opened().book.last_sequence == 20


def test_records_stay_as_long_as_a_segment_cannot_be_read(ground: Ground, opened: Callable[..., Life]) -> None:
    ground.write(0, 5, block(0), block(1))
    ground.write(1, 9, block(2))
    ground.bury(Tombstone(5, ONE.digest, block(1).key))
    faulty = FaultyDisk(ground.disk)
    faulty.faults.read_error = errno.EIO
    life = opened(disk=faulty)
    faulty.faults.read_error = 0
    assert life.held() == {}
    life.close()
    assert opened().held() == expected(block(0), block(2)), "what was deleted is back"


def test_records_of_deletions_go_with_the_segments_they_speak_of(ground: Ground, opened: Callable[..., Life]) -> None:
    ground.write(0, 5, block(0))
    ground.bury(Tombstone(4, ONE.digest, block(1).key), Tombstone(5, ONE.digest, block(2).key))
    assert [t.sequence for t in opened().tombstones.read()] == [5]


def test_what_the_index_says_of_segments_that_are_not_there_is_dropped(
    ground: Ground, opened: Callable[..., Life]
) -> None:
    ground.write(0, 1, block(0))
    ground.write(1, 2, block(1))
    ground.write(2, 3, block(2))
    ground.disk.remove(name_of(1))
    ground.write(2, 9, block(3), seal=False)  # Another life had begun.
    life = opened()
    assert life.held() == expected(block(0))
    assert life.found.counts == {"lost_blocks": 2, "lost_segments": 2, "unsealed_segments": 1}
    assert list(life.found.index.segments()) == [0]


@pytest.mark.parametrize("damage", ["truncated", "zeroed", "noise", "swapped", "foreign", "format"])
def test_a_segment_that_is_not_what_it_was_costs_itself(
    ground: Ground, opened: Callable[..., Life], damage: str
) -> None:
    ground.write(0, 1, block(0))
    ground.write(1, 2, block(1))
    ground.write(2, 3, block(2))
    content = ground.disk.files[name_of(1)].content
    if damage == "truncated":
        del content[SIZE // 2 :]
    elif damage == "zeroed":
        content[:] = bytes(SIZE)
    elif damage == "noise":
        content[:] = random.Random(1).randbytes(SIZE)
    elif damage == "swapped":
        content[:] = ground.disk.files[name_of(2)].content
    else:
        header = Header(STORE, 1, 2, SIZE, 1)
        other = replace(header, store_id=b"another store 16").to_block() if damage == "foreign" else b""
        content[:BLOCK_BYTES] = other or _of_version(header, 2)
    life = opened()
    assert life.held() == expected(block(0), block(2))
    assert life.found.counts["lost_blocks"] == 1
    if damage == "truncated":
        assert name_of(1) not in ground.disk.names(), "a file of another size stays"
    else:
        assert life.book[1].state is SegmentState.FREE


def _of_version(header: Header, version: int) -> bytes:
    raw = bytearray(header.to_block())
    raw[8] = version
    raw[-8:] = xxh3_64_intdigest(bytes(raw[:-8])).to_bytes(8, "little")
    return bytes(raw)


def test_a_segment_that_cannot_be_read_is_left_alone_and_the_others_serve(
    ground: Ground, opened: Callable[..., Life]
) -> None:
    ground.write(0, 1, block(0))
    ground.write(1, 2, block(1))
    faulty = FaultyDisk(ground.disk)
    faulty.faults.read_error = errno.EIO
    life = opened(disk=faulty)
    faulty.faults.read_error = 0
    assert life.held() == {}
    assert life.found.counts["unreadable_segments"] == 2
    assert life.book.count(SegmentState.BAD) == 2


def test_files_that_are_no_segments_are_left_alone_and_counted(ground: Ground, opened: Callable[..., Life]) -> None:
    ground.write(0, 1, block(0))
    ground.disk.create("notes.txt", SIZE)
    ground.disk.create("12.seg", SIZE)
    life = opened()
    assert life.held() == expected(block(0))
    assert life.found.counts == {"stray_files": 2}
    assert "notes.txt" in ground.disk.names()


def test_a_smaller_capacity_is_honoured_at_once(ground: Ground, opened: Callable[..., Life]) -> None:
    for i in range(6):
        ground.write(i, i + 1, block(2 * i), block(2 * i + 1))
    life = opened(capacity_count=3)
    assert life.held() == expected(*(block(i) for i in range(6, 12))), "the oldest go first"
    assert len(ground.disk.names()) == 3
    assert life.found.counts == {"segments_over_capacity": 3}
    assert sorted(life.found.index.segments()) == [3, 4, 5]
    assert opened(capacity_count=8).held() == expected(*(block(i) for i in range(6, 12)))


def test_blocks_whose_time_is_over_do_not_come_back(ground: Ground, opened: Callable[..., Life]) -> None:
    old, young = block(0, expires=CLOCK.wall - 1), block(1, expires=CLOCK.wall + 1)
    ground.write(0, 1, old, young)
    life = opened()
    assert life.held() == expected(young)
    assert life.found.counts == {"expired_blocks": 1}
    ground.lose_index()
    life.close()
    assert opened().held() == expected(young)


def test_damage_in_a_table_costs_what_lies_in_it(ground: Ground, opened: Callable[..., Life]) -> None:
    blocks = [block(i, 10) for i in range(70)]
    ground.write(0, 1, *blocks, known=False)
    content = ground.disk.files[name_of(0)].content
    content[SIZE - 3 * BLOCK_BYTES + 99] ^= 1  # The second of three blocks of the table.
    life = opened()
    assert life.held() == expected(*blocks[:31], *blocks[62:])
    assert life.found.counts == {"adopted_segments": 1, "damaged_blocks": 1}
