"""The warm tier on a disk in memory: blocks written, found, read, given up and deleted, and the faults of the disk."""

from __future__ import annotations

import errno
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.core.segments import SegmentBook, SegmentRules
from kvstore.tiers.device import aligned
from kvstore.tiers.index import IndexBroken, Located
from kvstore.tiers.recovery import Clock, recover
from kvstore.tiers.segment import BLOCK_BYTES, Described, blocks_of
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.warm import Clocks, Wanted, WarmSettings, WarmTier
from kvstore.tiers.writer import BlockOut
from tests.disks import FaultyDisk, MemoryDisk

STORE, SIZE, CACHE = b"store of 16 byte", 1 << 20, 8 << 20
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")
PART = 100_000  # Ten to a segment.
WAIT_S = 30.0


def value(number: int, length: int = PART) -> bytes:
    return random.Random(number).randbytes(length)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def memory(length: int) -> memoryview:
    return aligned(length)[: blocks_of(length) * BLOCK_BYTES]


def block(number: int, *lengths: int, described: Described = ONE, expires: float = 0.0) -> BlockOut:
    sizes = lengths or (PART,)
    values = [value(number * 10 + i, n) for i, n in enumerate(sizes)]
    pieces = [memory(n) for n in sizes]
    for piece, one in zip(pieces, values, strict=True):
        piece[: len(one)] = one
    sums = [xxh3_64_intdigest(one) for one in values]
    return BlockOut(
        described, key(number), range(len(sizes)), sizes, sums, pieces, created=time.time(), expires=expires
    )


class Scene:
    """A tier, and the folder that it leaves to the next one."""

    def __init__(self, path: Path) -> None:
        self.path, self.disk = path, FaultyDisk(MemoryDisk())
        self.now = 1000.0
        self.hot: set[bytes] = set()
        self.tier: WarmTier | None = None

    def open(self, *, capacity_count: int = 4, rules: SegmentRules | None = None, **settings: int) -> WarmTier:
        self.book = SegmentBook(rules or SegmentRules(segment_bytes=SIZE), capacity_count * SIZE)
        tombstones = Tombstones(self.path / "deleted.log")
        clock = Clock(now=self.now, wall=time.time())
        self.found = recover(
            self.disk,
            self.book,
            tombstones,
            index_path=self.path / "index",
            cache_bytes=CACHE,
            store_id=STORE,
            clock=clock,
        )
        chosen = WarmSettings(is_hot=lambda digest, key: key in self.hot, **settings)
        self.tier = WarmTier(
            self.disk,
            self.book,
            self.found.index,
            tombstones,
            namespaces=self.found.namespaces,
            store_id=STORE,
            settings=chosen,
            clocks=Clocks(now=lambda: self.now, wall=time.time),
        )
        return self.tier

    def write(self, *blocks: BlockOut) -> list[bool]:
        assert self.tier is not None
        futures = [self.tier.write(one) for one in blocks]
        return [future.result(WAIT_S) is not None for future in futures]

    def find(self, *numbers: int, described: Described = ONE) -> list[Located | None]:
        assert self.tier is not None
        keys = [key(n) for n in numbers]
        return self.tier.locate(described.digest, keys).result(WAIT_S)

    def fill(self, first: int, last: int) -> None:
        """Writes blocks one after the other, each a second later."""
        for i in range(first, last):
            self.now += 1
            assert self.write(block(i)) == [True]

    def read(self, *numbers: int, described: Described = ONE) -> list[bytes | None]:
        """Reads blocks of one part: its bytes, or None."""
        assert self.tier is not None
        keys = [key(n) for n in numbers]
        wanted, places = [], []
        for i, located in enumerate(self.find(*numbers, described=described)):
            if located is not None:
                wanted.append(Wanted(described.digest, keys[i], located, [memory(p.length) for p in located.parts]))
                places.append(i)
        found: list[bytes | None] = [None] * len(keys)
        for i, want, good in zip(places, wanted, self.tier.read(wanted).result(WAIT_S), strict=True):
            if good:
                found[i] = bytes(want.pieces[0][: want.located.parts[0].length])
        return found

    def there(self, first: int, last: int) -> set[int]:
        """Which blocks can be found; what is found must be right."""
        found = self.read(*range(first, last))
        for i, one in enumerate(found, first):
            assert one in (None, value(i * 10)), "a wrong byte"
        return {i for i, one in enumerate(found, first) if one is not None}

    def close(self) -> None:
        tier, self.tier = self.tier, None
        if tier is not None:
            tier.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.disk.faults.thaw()
    made.close()


def test_what_was_written_is_found_and_read_before_and_after_it_is_sealed(scene: Scene) -> None:
    tier = scene.open()
    assert scene.write(block(0), block(1, 5000), block(2, described=TWO)) == [True] * 3
    for _ in range(2):
        assert scene.read(0, 1, 5) == [value(0), value(10, 5000), None]
        assert scene.read(2, described=TWO) == [value(20)]
        assert scene.read(2) == [None], "a block of another namespace"
        tier.flush().result(WAIT_S)
    assert tier.counts["written_blocks"] == 3
    assert tier.counts["sealed_segments"] == 1
    assert tier.queued_bytes == 0


def test_a_block_of_several_parts_comes_back_part_by_part(scene: Scene) -> None:
    tier = scene.open()
    assert scene.write(block(0, 5000, 0, 4096, 1)) == [True]
    (located,) = scene.find(0)
    assert located is not None
    assert [(p.part, p.length) for p in located.parts] == [(0, 5000), (1, 0), (2, 4096), (3, 1)]
    pieces = [memory(p.length) for p in located.parts]
    assert tier.read([Wanted(ONE.digest, key(0), located, pieces)]).result(WAIT_S) == [True]
    assert [bytes(m[: p.length]) for m, p in zip(pieces, located.parts, strict=True)] == [
        value(i, n) for i, n in enumerate((5000, 0, 4096, 1))
    ]


def test_a_clean_stop_leaves_everything_to_the_next_start(scene: Scene) -> None:
    scene.open()
    scene.fill(0, 15)
    scene.close()
    scene.open()
    assert scene.there(0, 20) == set(range(15))
    assert scene.found.counts == {}
    assert scene.found.block_count == 15


def test_the_disk_is_bounded_and_the_least_live_segment_goes(scene: Scene) -> None:
    tier = scene.open(capacity_count=4)
    for i in range(200):
        scene.now += 1
        assert scene.write(block(i)) == [True]
        assert len(scene.disk.names()) <= 4
    there = scene.there(0, 200)
    assert there >= set(range(180, 200))
    assert len(there) <= 40
    assert tier.counts["given_up_segments"] >= 15
    assert tier.counts["rewritten_blocks"] <= 0.34 * tier.counts["written_blocks"]


def test_blocks_that_are_used_stay_as_long_as_their_share_allows(scene: Scene) -> None:
    scene.open(capacity_count=5)
    scene.fill(0, 10)
    for i in range(10, 150):
        scene.fill(i, i + 1)
        assert scene.there(0, 3) == {0, 1, 2}, f"a block in use was given up after {i}"
    assert scene.book.rewritten_bytes <= 0.25 * scene.book.written_bytes


def test_what_is_in_memory_is_not_written_again(scene: Scene) -> None:
    tier = scene.open(capacity_count=4)
    scene.hot = {key(i) for i in range(300)}
    scene.fill(0, 100)
    assert tier.counts["rewritten_blocks"] == 0


def test_a_block_written_twice_is_found_at_its_later_place(scene: Scene) -> None:
    scene.open()
    scene.fill(0, 3)
    (first,) = scene.find(1)
    assert scene.write(block(1)) == [True]
    (second,) = scene.find(1)
    assert first != second
    assert scene.there(0, 3) == {0, 1, 2}
    scene.close()
    scene.open()
    assert scene.there(0, 3) == {0, 1, 2}
    assert scene.found.block_count == 3


@pytest.mark.parametrize("sealed", [False, True])
def test_what_was_deleted_is_gone_and_stays_gone(scene: Scene, sealed: bool) -> None:
    tier = scene.open()
    scene.fill(0, 5)
    if sealed:
        tier.flush().result(WAIT_S)
    written = tier.write(block(5))  # Asked for before the deletion: it goes as well.
    deleted = tier.delete(ONE.digest, [key(1), key(5), key(77)])
    later = tier.write(block(6))
    assert written.result(WAIT_S) is not None
    assert deleted.result(WAIT_S) == 2, "77 never was here"
    assert later.result(WAIT_S) is not None
    assert scene.there(0, 8) == {0, 2, 3, 4, 6}
    assert scene.write(block(1)) == [True], "it can be written anew"
    scene.close()
    scene.open()
    assert scene.there(0, 8) == {0, 1, 2, 3, 4, 6}
    (scene.path / "index" / "CURRENT").write_bytes(b"broken")
    scene.close()
    scene.open()
    assert scene.found.rebuilt
    assert 5 not in scene.there(0, 8)


def test_a_purge_takes_a_namespace_and_nothing_else(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 12)
    assert scene.write(block(50, described=TWO)) == [True]
    tier.purge(ONE.digest).result(WAIT_S)
    tier.purge(b"never seen" * 3 + b"00").result(WAIT_S)
    assert scene.there(0, 12) == set()
    assert scene.read(50, described=TWO) == [value(500)]
    assert sum(s.block_count for s in scene.book.sealed) == 0
    scene.close()
    scene.open()
    assert scene.there(0, 12) == set()
    assert scene.read(50, described=TWO) == [value(500)]


def test_a_block_whose_time_is_over_is_not_found(scene: Scene) -> None:
    scene.open()
    assert scene.write(block(0, expires=time.time() + 1000), block(1, expires=time.time() - 1)) == [True] * 2
    assert scene.there(0, 2) == {0}


def test_a_block_that_no_segment_holds_is_refused(scene: Scene) -> None:
    tier = scene.open()
    assert scene.write(block(0, SIZE), block(1)) == [False, True]
    assert tier.counts["refused_blocks"] == 1
    assert tier.fault is None


def test_bytes_that_changed_on_disk_are_a_miss_and_the_block_goes(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    scene.disk.faults.flips = 1
    assert scene.read(1) == [None]
    tier.flush().result(WAIT_S)
    assert scene.there(0, 3) == {0, 2}
    assert tier.counts["corrupt_blocks"] == 1
    assert scene.write(block(1)) == [True]
    assert scene.there(0, 3) == {0, 1, 2}


def test_a_read_error_is_a_miss_and_nothing_more(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    scene.disk.faults.read_error = errno.EIO
    assert scene.read(0, 1) == [None, None]
    scene.disk.faults.read_error = 0
    assert scene.there(0, 3) == {0, 1, 2}
    assert (tier.counts["read_errors"], tier.fault) == (1, None)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_no_writes_refuses_them_and_serves_reads_until_it_heals(scene: Scene, error: int) -> None:
    tier = scene.open()
    scene.fill(0, 12)  # The first ten are sealed.
    scene.disk.faults.write_error = error
    assert scene.write(block(20)) == [False]
    assert isinstance(tier.fault, OSError)
    assert scene.write(block(21)) == [False]
    assert scene.there(0, 10) == set(range(10))
    with pytest.raises(OSError, match="to fail"):
        tier.heal().result(WAIT_S)
    assert tier.fault is not None
    scene.disk.faults.write_error = 0
    tier.heal().result(WAIT_S)
    assert tier.fault is None
    scene.fill(30, 45)
    assert scene.there(0, 50) >= {*range(10), *range(30, 45)}
    scene.close()
    scene.open()
    assert scene.there(0, 50) >= {*range(10), *range(30, 45)}


def test_a_disk_that_hangs_holds_up_nobody_who_looks_and_the_queue_is_bounded(scene: Scene) -> None:
    tier = scene.open(queue_bytes=5 * 102_400)
    scene.fill(0, 3)
    scene.disk.faults.freeze()
    futures = [tier.write(block(10 + i)) for i in range(20)]
    refused = [f for f in futures if f.done()]
    assert len(refused) == 15
    assert not any(f.result() for f in refused)
    assert tier.has(ONE.digest, [key(0), key(99)]) == [True, False]
    assert scene.find(99) == [None]
    reading = tier.read([])
    assert reading.result(WAIT_S) == []
    scene.disk.faults.thaw()
    assert all(f.result(WAIT_S) is not None for f in futures if f not in refused)


def test_closing_does_not_wait_for_a_disk_that_hangs(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    scene.disk.faults.freeze()
    tier.write(block(5))
    began_s = time.monotonic()
    tier.close(timeout_s=0.2)
    assert time.monotonic() - began_s < 10
    assert tier.write(block(6)).result(WAIT_S) is None
    with pytest.raises(OSError, match="closed"):
        tier.flush().result(WAIT_S)
    scene.disk.faults.thaw()


def test_the_tier_can_be_made_smaller_and_larger_while_it_works(scene: Scene) -> None:
    tier = scene.open(capacity_count=8)
    scene.fill(0, 75)
    tier.resize(3 * SIZE).result(WAIT_S)
    assert len(scene.disk.names()) == 3
    there = scene.there(0, 75)
    assert there
    assert max(there) == 74
    tier.resize(6 * SIZE).result(WAIT_S)
    scene.fill(75, 125)
    assert len(scene.disk.names()) == 6
    assert scene.there(75, 125) >= set(range(95, 125))


def test_a_segment_whose_table_is_damaged_is_given_up_with_all_that_the_index_has_in_it(scene: Scene) -> None:
    scene.open(capacity_count=3)
    scene.fill(0, 10)
    scene.fill(10, 12)
    inner = scene.disk.inner
    assert isinstance(inner, MemoryDisk)
    inner.files["0000000000.seg"].content[-2 * BLOCK_BYTES + 50] ^= 1
    scene.fill(12, 60)
    live = {(s.number, s.sequence) for s in scene.book.sealed}
    assert {located.life for _, _, located in scene.found.index.blocks()} <= live
    assert scene.there(0, 60) >= set(range(45, 60))


def test_readers_and_the_writer_work_beside_one_another(scene: Scene) -> None:
    """Segments are given up under reads all the time: what is read is right or a miss."""
    tier = scene.open(capacity_count=3, readers=3)
    rng = random.Random(1)
    pending: list[tuple[list[int], list[Wanted], Callable[[], list[bool]]]] = []
    for i in range(150):
        scene.now += 1
        tier.write(block(i))
        numbers = sorted({rng.randrange(max(0, i - 30), i + 1) for _ in range(6)})
        located = scene.find(*numbers)
        chosen = [(n, at) for n, at in zip(numbers, located, strict=True) if at is not None]
        wanted = [Wanted(ONE.digest, key(n), at, [memory(PART)]) for n, at in chosen]
        future = tier.read(wanted)
        pending.append(([n for n, _ in chosen], wanted, lambda f=future: f.result(WAIT_S)))  # type: ignore[misc]
    hits = 0
    for numbers, wanted, result in pending:
        for number, want, good in zip(numbers, wanted, result(), strict=True):
            hits += good
            assert not good or bytes(want.pieces[0][:PART]) == value(number * 10), "a wrong byte"
    assert hits > 50
    assert tier.counts["corrupt_blocks"] == 0


def test_an_index_that_fails_is_a_fault_and_not_an_error_of_the_caller(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    tier.flush().result(WAIT_S)
    scene.found.index.close()
    assert scene.find(0, 9) == [None, None]
    assert isinstance(tier.fault, IndexBroken)
    assert scene.write(block(5)) == [False]
