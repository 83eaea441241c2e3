"""The warm tier on a disk in memory: blocks written, found, read, given up and deleted, and the faults of the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.core.segments import SegmentBook, SegmentRules
from kvstore.tiers import warm
from kvstore.tiers.device import Disk, Folder, aligned
from kvstore.tiers.index import IndexBroken, Located
from kvstore.tiers.recovery import Clock, recover
from kvstore.tiers.segment import BLOCK_BYTES, Described, blocks_of
from kvstore.tiers.tombstones import Tombstone, Tombstones
from kvstore.tiers.warm import Clocks, Purged, Wanted, WarmSettings, WarmTier
from kvstore.tiers.writer import BlockOut
from tests.disks import FaultyDisk, MemoryDisk

STORE, SIZE, CACHE = b"store of 16 byte", 1 << 20, 8 << 20
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")
PART = 100_000  # Ten to a segment.
WAIT_S = 30.0


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.001)


def value(number: int, length: int = PART) -> bytes:
    return random.Random(number).randbytes(length)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def memory(length: int) -> memoryview:
    return aligned(length)[: blocks_of(length) * BLOCK_BYTES]


def block(
    number: int, *lengths: int, described: Described = ONE, created: float | None = None, expires: float = 0.0
) -> BlockOut:
    sizes = lengths or (PART,)
    values = [value(number * 10 + i, n) for i, n in enumerate(sizes)]
    pieces = [memory(n) for n in sizes]
    for piece, one in zip(pieces, values, strict=True):
        piece[: len(one)] = one
    sums = [xxh3_64_intdigest(one) for one in values]
    made = time.time() if created is None else created
    return BlockOut(described, key(number), range(len(sizes)), sizes, sums, pieces, created=made, expires=expires)


class Log(Tombstones):
    """A log of deletions on a disk that may be full."""

    is_full = False

    def add(self, tombstones: Iterable[Tombstone]) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "a log that was to fail")
        super().add(tombstones)


class Scene:
    """A tier, and the folder that it leaves to the next one."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path, self.disk = path, FaultyDisk(disk or MemoryDisk())
        self.now = 1000.0
        self.hot: set[bytes] = set()
        self.tier: WarmTier | None = None

    def open(self, *, capacity_count: int = 4, rules: SegmentRules | None = None, **settings: int) -> WarmTier:
        self.book = SegmentBook(rules or SegmentRules(segment_bytes=SIZE), capacity_count * SIZE)
        tombstones = self.log = Log(self.path / "deleted.log")
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

    def has(self, *numbers: int, described: Described = ONE) -> list[bool]:
        assert self.tier is not None
        return self.tier.has(described.digest, [key(n) for n in numbers])

    def stop_writing(self) -> Future[Located | None]:
        """Lets the disk hang with the thread that writes in it; returns what that is writing."""
        assert self.tier is not None
        calls = self.disk.faults.calls
        before = calls["write"] + calls["create"]
        self.disk.faults.freeze()
        hanging = self.tier.write(block(999))
        wait_until(lambda: calls["write"] + calls["create"] > before)
        return hanging

    def restart(self, *, lose_index: bool = False, capacity_count: int = 4) -> WarmTier:
        self.close()
        if lose_index:
            (self.path / "index" / "CURRENT").write_bytes(b"broken")
        return self.open(capacity_count=capacity_count)

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
    assert scene.there(75, 125) >= set(range(105, 125))


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
    assert scene.has(0, 9) == [True, False]
    tier.heal().result(WAIT_S)
    assert tier.fault is None
    assert scene.write(block(5)) == [True]
    assert scene.there(0, 9) == {0, 1, 2, 5}


# -- looking up without the disk ---------------------------------------------------------------------------------------


def test_what_is_here_is_known_at_once_before_and_after_it_is_sealed_and_after_a_restart(scene: Scene) -> None:
    tier = scene.open()
    gone, stays = time.time() - 1, time.time() + 1000
    assert scene.write(block(0), block(1, expires=stays), block(2, expires=gone), block(3, described=TWO)) == [True] * 4
    for _ in range(3):
        assert scene.has(0, 1, 2, 3, 4) == [True, True, False, False, False]
        assert scene.has(3, described=TWO) == [True]
        tier.flush().result(WAIT_S)
        tier = scene.restart()
    assert tier.namespaces() == {ONE.digest: b"one", TWO.digest: b"two"}


def test_what_is_given_up_is_not_here_any_more(scene: Scene) -> None:
    tier = scene.open(capacity_count=3)
    scene.fill(0, 60)
    assert tier.counts["given_up_segments"] > 2
    here = scene.has(*range(60))
    assert {i for i in range(60) if here[i]} == scene.there(0, 60)
    assert sum(here) == tier.gauges()["stored_blocks"]


def test_a_place_holds_its_block_until_that_is_written_anew_deleted_or_given_up(scene: Scene) -> None:
    tier = scene.open(capacity_count=3)
    scene.fill(0, 15)
    places = [at for at in scene.find(*range(12)) if at is not None]
    assert [tier.still_has(at.life, at.start) for at in places] == [True] * 12
    assert not tier.still_has(places[0].life, places[0].start + BLOCK_BYTES)
    assert not tier.still_has((77, 1), places[0].start)
    assert scene.write(block(1)) == [True]
    tier.delete(ONE.digest, [key(2)]).result(WAIT_S)
    assert [tier.still_has(at.life, at.start) for at in places[:4]] == [True, False, False, True]
    scene.fill(100, 160)
    assert not any(tier.still_has(at.life, at.start) for at in places)
    assert tier.lives[places[0].segment] != places[0].sequence


def test_a_disk_that_hangs_is_seen_by_how_long_it_has(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    wait_until(lambda: tier.stalled_s == 0)
    hanging = scene.stop_writing()
    scene.now += 50
    assert tier.stalled_s == 50
    assert scene.find(77) == [None]  # The index was asked.
    assert tier.stalled_s == 50, "a call that came back ended another"
    scene.disk.faults.thaw()
    assert hanging.result(WAIT_S) is not None
    wait_until(lambda: tier.stalled_s == 0)


def test_the_gauges_are_what_is_there(scene: Scene) -> None:
    tier = scene.open(capacity_count=4)
    size = blocks_of(PART) * BLOCK_BYTES
    scene.fill(0, 12)
    assert scene.write(block(3), block(11), block(50, 5000, described=TWO)) == [True] * 3  # Two of them anew.
    tier.delete(ONE.digest, [key(4), key(99)]).result(WAIT_S)
    for _ in range(2):
        gauges = tier.gauges()
        assert gauges["stored_blocks"] == 12
        assert gauges["stored_bytes"] == 11 * size + 2 * BLOCK_BYTES
        assert gauges["stored_bytes"] == sum(s.alive_bytes for s in scene.book.held)
        assert (gauges["capacity_bytes"], gauges["namespaces"], gauges["queued_bytes"]) == (4 * SIZE, 2, 0)
        assert gauges["segments"] == len(scene.disk.names()) == 2
        tier = scene.restart()
    assert tier.gauges()["written_bytes"] == 0
    scene.fill(60, 62)
    assert tier.gauges()["written_bytes"] == tier.written_bytes == 2 * size


def test_uses_that_were_noted_keep_a_block(scene: Scene) -> None:
    tier = scene.open(capacity_count=4)
    scene.fill(0, 10)
    for i in range(10, 80):
        scene.fill(i, i + 1)
        for at in scene.find(0, 1):
            assert at is not None, f"a block in use was given up after {i}"
            tier.note(at.life, at.start, scene.now, used=True)
    tier.note((99, 99), 0, scene.now, used=True)  # As it comes where a segment has just gone.
    scene.fill(80, 82)
    assert scene.there(0, 3) == {0, 1}


def test_what_is_written_again_beside_a_write_under_way_stands_in_the_order_of_its_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "BATCH_BYTES", BLOCK_BYTES)  # One is given up while the next is begun.
    tier = scene.open(capacity_count=4)
    scene.fill(0, 10)
    for i in range(10, 80):
        scene.fill(i, i + 1)
        tier.resize(4 * SIZE).result(WAIT_S)  # Nothing changes; but whatever was begun before has ended.
        for number, at in zip((0, 1, i), scene.find(0, 1, i), strict=True):
            assert at is not None, f"{number} is gone after {i}"
            assert tier.still_has(at.life, at.start), f"{number} lies there and is not seen there, after {i}"
            if number < 2:
                tier.note(at.life, at.start, scene.now, used=True)
    assert tier.counts["rewritten_blocks"] > 2
    for segment in scene.book.held:
        starts = [segment.start_of(row) for row in range(len(segment))]
        assert starts == sorted(starts)


# -- what is being deleted ---------------------------------------------------------------------------------------------


def test_what_is_to_be_deleted_is_not_found_from_that_moment_until_it_is_written_anew(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 4)
    tier.flush().result(WAIT_S)
    hanging = scene.stop_writing()
    deleted = [tier.delete(ONE.digest, [key(1), key(2)]), tier.delete(ONE.digest, [key(2)])]
    assert scene.has(0, 1, 2, 3) == [True, False, False, True]
    assert [at is not None for at in scene.find(0, 1, 2, 3)] == [True, False, False, True]
    later = tier.write(block(1))
    assert scene.has(1) == [False]
    scene.disk.faults.thaw()
    assert hanging.result(WAIT_S) is not None
    assert [future.result(WAIT_S) for future in deleted] == [2, 0]
    assert later.result(WAIT_S) is not None
    assert scene.has(0, 1, 2, 3) == [True, True, False, True]
    assert scene.there(0, 4) == {0, 1, 3}


def test_a_namespace_that_is_being_purged_has_nothing_until_it_is_written_anew(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 4)
    assert scene.write(block(9, described=TWO)) == [True]
    hanging = scene.stop_writing()
    purged, later = tier.purge(ONE.digest), tier.write(block(2))
    assert scene.has(0, 1, 2, 3) == [False] * 4
    assert scene.find(0, 1) == [None, None]
    assert scene.has(9, described=TWO) == [True]
    scene.disk.faults.thaw()
    assert hanging.result(WAIT_S) is not None
    size = blocks_of(PART) * BLOCK_BYTES
    assert purged.result(WAIT_S) == Purged(5, 5 * size)
    assert later.result(WAIT_S) is not None
    assert scene.has(0, 1, 2, 3) == [False, False, True, False]
    scene.restart()
    assert scene.there(0, 4) == {2}, "what was written since, into the same segment, is gone"
    scene.restart(lose_index=True)
    assert scene.there(0, 4) == {2}
    assert scene.read(9, described=TWO) == [value(90)]


@pytest.mark.parametrize("lose_index", [False, True])
def test_a_purge_by_age_takes_what_was_made_before_and_leaves_the_rest(scene: Scene, lose_index: bool) -> None:
    tier = scene.open()
    assert scene.write(*(block(i, created=100.0 + i) for i in range(6))) == [True] * 6
    tier.flush().result(WAIT_S)
    assert scene.write(block(1, created=200.0), block(7, created=101.0), block(8, created=300.0)) == [True] * 3
    assert tier.purge(ONE.digest, 103.0).result(WAIT_S).block_count == 3  # 0, 2 and 7: of 1 there is a later one.
    assert scene.there(0, 10) == {1, 3, 4, 5, 8}
    scene.restart(lose_index=lose_index)
    assert scene.there(0, 10) == {1, 3, 4, 5, 8}
    assert scene.has(*range(10)) == [i in {1, 3, 4, 5, 8} for i in range(10)]


def test_what_could_not_be_deleted_stays_hidden_and_goes_when_the_disk_heals(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 6)
    tier.flush().result(WAIT_S)
    assert scene.write(block(9, described=TWO)) == [True]
    scene.log.is_full = True
    with pytest.raises(OSError, match="to fail"):
        tier.delete(ONE.digest, [key(1), key(2)]).result(WAIT_S)
    with pytest.raises(OSError, match="to fail"):
        tier.purge(TWO.digest).result(WAIT_S)
    for _ in range(2):
        assert scene.has(0, 1, 2, 3) == [True, False, False, True]
        assert scene.there(0, 6) == {0, 3, 4, 5}
        assert (scene.has(9, described=TWO), scene.find(9, described=TWO)) == ([False], [None])
        assert tier.fault is not None
        assert scene.write(block(1)) == [False]
        with pytest.raises(OSError, match="to fail"):
            tier.heal().result(WAIT_S)
    scene.log.is_full = False
    tier.heal().result(WAIT_S)
    assert tier.fault is None
    assert scene.write(block(1)) == [True]
    assert scene.there(0, 6) == {0, 1, 3, 4, 5}
    scene.restart(lose_index=True)
    assert scene.there(0, 6) == {0, 1, 3, 4, 5}
    assert scene.read(9, described=TWO) == [None]


def test_a_block_that_was_deleted_and_written_anew_side_by_side_is_the_later_one(scene: Scene) -> None:
    """Two records of one key lie one after the other in the table: they are two blocks, of which one counts."""
    tier = scene.open()
    assert scene.write(block(0), block(1)) == [True] * 2
    tier.delete(ONE.digest, [key(1)]).result(WAIT_S)
    assert scene.write(block(1), block(1), block(2)) == [True] * 3
    for lose_index in (False, True):
        tier = scene.restart(lose_index=lose_index)
        assert scene.there(0, 4) == {0, 1, 2}
        assert tier.gauges()["stored_blocks"] == scene.found.block_count == 3


def test_records_of_deletions_go_with_their_segments_while_the_tier_works(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.warm._FEW_TOMBSTONES", 20)
    tier = scene.open(capacity_count=3)
    for i in range(120):
        scene.fill(i, i + 1)
        if i % 2:
            tier.delete(ONE.digest, [key(i)]).result(WAIT_S)
    assert 0 < scene.log.count < 45
    scene.restart(lose_index=True)
    assert not any(n % 2 for n in scene.there(0, 120))


# -- what waits, and the end -------------------------------------------------------------------------------------------


def test_a_read_can_be_called_off_until_it_has_begun_and_a_write_never(scene: Scene) -> None:
    tier = scene.open(readers=1)
    scene.fill(0, 3)
    at = scene.find(0, 1)
    wanted = [Wanted(ONE.digest, key(i), one, [memory(PART)]) for i, one in enumerate(at) if one is not None]
    scene.disk.faults.freeze()
    reads = scene.disk.faults.calls["read"]
    first, second, third = (tier.read([wanted[0]]), tier.read([wanted[1]]), tier.locate(ONE.digest, [key(2)]))
    wait_until(lambda: scene.disk.faults.calls["read"] > reads)
    assert (first.cancel(), second.cancel()) == (False, True)
    writing, deleting = tier.write(block(5)), tier.delete(ONE.digest, [key(2)])
    assert (writing.cancel(), deleting.cancel()) == (False, False)
    scene.disk.faults.thaw()
    assert first.result(WAIT_S) == [True]
    assert third.result(WAIT_S)[0] in (None, *scene.find(2))
    assert bytes(wanted[1].pieces[0]) == bytes(len(wanted[1].pieces[0])), "it was read after all"
    assert (writing.result(WAIT_S) is not None, deleting.result(WAIT_S)) == (True, 1)


def test_closing_with_a_disk_that_hangs_ends_what_waits(scene: Scene) -> None:
    tier = scene.open(readers=1)
    scene.fill(0, 3)
    (at,) = scene.find(0)
    assert at is not None
    scene.stop_writing()
    reads = scene.disk.faults.calls["read"]
    wanted = [Wanted(ONE.digest, key(0), at, [memory(PART)])]
    tier.read(wanted)
    wait_until(lambda: scene.disk.faults.calls["read"] > reads)
    waiting = (tier.read(wanted), tier.locate(ONE.digest, [key(0)]), tier.write(block(5)), tier.delete(ONE.digest, []))
    began_s = time.monotonic()
    tier.close(timeout_s=0.2)
    assert time.monotonic() - began_s < 10
    assert [future.result(WAIT_S) for future in waiting[:3]] == [[False], [None], None]
    with pytest.raises(OSError, match="closed"):
        waiting[3].result(WAIT_S)
    assert tier.read(wanted).result(WAIT_S) == [False]
    assert tier.gauges()["queued_bytes"] == 0
    scene.disk.faults.thaw()


def test_a_process_whose_disk_hangs_can_end(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.test_tiers_warm import *\n"
        "scene = Scene(pathlib.Path(sys.argv[1]))\n"
        "tier = scene.open(readers=2)\n"
        "scene.fill(0, 3)\n"
        "(at,) = scene.find(0)\n"
        "scene.stop_writing()\n"
        "tier.read([Wanted(ONE.digest, key(0), at, [memory(PART)])])\n"
        "wait_until(lambda: scene.disk.faults.calls['read'] > 0)\n"
        "tier.close(timeout_s=0.1)\n"
        "print('ended')"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(root)], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"ended\n"), done.stderr


def test_a_block_without_a_byte_is_refused(scene: Scene) -> None:
    scene.open()
    assert scene.write(block(0, 0), block(1, 0, 5), block(2, 0, 0)) == [False, True, False]
    assert scene.has(0, 1, 2) == [False, True, False]


# -- a disk that fails -------------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Scene]:
    folder = Folder(tmp_path / "segments")
    made = Scene(tmp_path, folder)
    yield made
    made.close()
    folder.close()


def test_a_segment_that_somebody_removed_is_a_miss_and_its_room_is_used_again(real: Scene) -> None:
    real.open(capacity_count=4)
    real.fill(0, 25)
    tier = real.restart()
    places = real.find(*range(10))
    assert {at.segment for at in places if at is not None} == {0}
    (real.path / "segments" / "0000000000.seg").unlink()
    assert real.there(0, 25) == set(range(10, 25))
    assert real.read(3) == [None]
    tier.flush().result(WAIT_S)  # Behind what the reads have asked for.
    assert tier.counts["lost_segments"] == 1
    assert (tier.counts["read_errors"], tier.counts["corrupt_blocks"], tier.fault) == (0, 0, None)
    assert real.has(*range(25)) == [False] * 10 + [True] * 15
    assert {located.segment for _, _, located in real.found.index.blocks()} == {1, 2}
    assert tier.delete(ONE.digest, [key(3)]).result(WAIT_S) == 0
    real.fill(100, 130)
    assert "0000000000.seg" in real.disk.names()
    assert real.there(100, 130) >= set(range(110, 130))
    assert tier.fault is None


def test_a_segment_that_somebody_removed_is_given_up_like_any_other(real: Scene) -> None:
    real.open(capacity_count=3)
    real.fill(0, 25)
    tier = real.restart()
    for name in ("0000000000.seg", "0000000001.seg"):
        (real.path / "segments" / name).unlink()
    real.fill(100, 160)
    assert tier.counts["lost_segments"] == 2
    assert tier.fault is None
    assert real.there(0, 160) >= set(range(145, 160))
    assert tier.gauges()["stored_blocks"] == len(real.there(0, 160))


def test_a_disk_that_is_full_when_a_segment_is_begun_leaves_nothing_of_it(scene: Scene) -> None:
    tier = scene.open(capacity_count=5)
    scene.fill(0, 8)
    scene.disk.faults.create_error = errno.ENOSPC
    futures = [tier.write(block(i)) for i in range(8, 14)]
    written = [future.result(WAIT_S) is not None for future in futures]
    assert written[:2] == [True, True]
    assert not any(written[3:])
    assert isinstance(tier.fault, OSError)
    assert tier.fault.errno == errno.ENOSPC
    assert len(scene.disk.names()) == 1
    for _ in range(3):
        with pytest.raises(OSError, match="to fail"):
            tier.heal().result(WAIT_S)
    there = {i for i in range(14) if i < 8 or written[i - 8]}
    assert scene.there(0, 14) == there
    assert scene.has(*range(14)) == [i in there for i in range(14)]
    scene.disk.faults.create_error = 0
    tier.heal().result(WAIT_S)
    scene.fill(20, 60)
    assert scene.there(20, 60) >= set(range(30, 60))
    tier = scene.restart(capacity_count=5)
    assert not {"unsealed_segments", "lost_blocks", "lost_segments"} & scene.found.counts.keys()
    assert len(scene.disk.names()) == tier.gauges()["segments"] == 5


def test_what_is_known_at_once_and_what_is_looked_up_agree_when_an_open_segment_is_lost(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    tier.flush().result(WAIT_S)
    assert scene.write(block(1)) == [True]  # Its older copy is in the index still.
    scene.disk.faults.write_error = errno.EIO
    assert scene.write(block(5)) == [False]
    scene.disk.faults.write_error = 0
    tier.heal().result(WAIT_S)
    assert scene.has(0, 1, 2, 5) == [at is not None for at in scene.find(0, 1, 2, 5)] == [True, False, True, False]
    assert tier.gauges()["stored_blocks"] == 2


def test_healing_what_is_well_costs_nothing(scene: Scene) -> None:
    tier = scene.open()
    scene.fill(0, 3)
    tier.heal().result(WAIT_S)
    assert scene.there(0, 3) == {0, 1, 2}


@pytest.mark.parametrize("cut", [1, 100, 1 << 30])
def test_a_log_of_the_index_that_is_torn_costs_nothing_that_was_sealed(real: Scene, cut: int) -> None:
    tier = real.open(capacity_count=8)
    real.fill(0, 25)
    tier.delete(ONE.digest, [key(2)]).result(WAIT_S)
    tier.flush().result(WAIT_S)
    copy = real.path / "copy"
    shutil.copytree(real.path / "index", copy)  # As a kill leaves it.
    real.close()
    shutil.rmtree(real.path / "index")
    copy.rename(real.path / "index")
    log = max((real.path / "index").glob("*.log"), key=lambda path: path.name)
    os.truncate(log, max(0, log.stat().st_size - cut))
    real.open(capacity_count=8)
    assert not real.found.rebuilt
    assert real.there(0, 25) == set(range(25)) - {2}


@pytest.mark.parametrize("what", ["CURRENT", "MANIFEST-*"])
def test_an_index_that_is_damaged_is_made_anew_of_the_segments(real: Scene, what: str) -> None:
    tier = real.open(capacity_count=8)
    real.fill(0, 25)
    tier.delete(ONE.digest, [key(2)]).result(WAIT_S)
    real.close()
    for path in (real.path / "index").glob(what):
        path.write_bytes(path.read_bytes()[:-3] + b"\xff\xff\xff")
    tier = real.open(capacity_count=8)
    assert real.found.rebuilt
    assert (real.path / "index.broken").is_dir()
    assert real.there(0, 25) == set(range(25)) - {2}
    assert tier.gauges()["stored_blocks"] == 24
