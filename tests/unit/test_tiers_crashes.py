"""The warm tier killed, or its power cut, at every operation on its disk: what is found afterwards is right, whole, and
accounted for."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.core.segments import SegmentBook, SegmentRules
from kvstore.tiers import warm
from kvstore.tiers.device import aligned, read_bytes
from kvstore.tiers.recovery import Clock, name_of, recover
from kvstore.tiers.segment import BLOCK_BYTES, Described, blocks_of
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.warm import Clocks, Wanted, WarmTier
from kvstore.tiers.writer import BlockOut
from tests.disks import MemoryDisk

STORE, SIZE, CACHE, SEGMENTS = b"store of 16 byte", 1 << 20, 4 << 20, 4
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")
FATES = 3  # Of what was not synced, for each crash.


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def block(number: int, described: Described) -> BlockOut:
    rng = random.Random(number)
    values = [rng.randbytes(rng.choice((0, 300, 5000, 70_000, 120_000))) for _ in range(rng.randrange(1, 4))]
    pieces = []
    for value in values:
        size = blocks_of(len(value)) * BLOCK_BYTES
        piece = aligned(size)[:size]
        piece[: len(value)] = value
        pieces.append(piece)
    sums, lengths = [xxh3_64_intdigest(v) for v in values], [len(v) for v in values]
    return BlockOut(described, key(number), range(len(values)), lengths, sums, pieces, created=time.time())


class Witness:
    """Knows what may be found, and looks at what a crash here would leave."""

    def __init__(self, path: Path, disk: MemoryDisk) -> None:
        self.path, self.disk, self.rng = path, disk, random.Random(1)
        self.values: dict[tuple[bytes, bytes], list[bytes]] = {}
        self.gone: set[tuple[bytes, bytes]] = set()  # Their deletion was acknowledged.
        self.crashes = self.found = self.adopted = 0
        self.rebuilds = 0

    def knows(self, block: BlockOut) -> None:
        place = (block.described.digest, block.key)
        self.values[place] = [bytes(p[:n]) for p, n in zip(block.pieces, block.lengths, strict=True)]

    def crash(self, what: str, name: str) -> None:
        if what == "read":
            return
        for fate in range(FATES):
            self.crashes += 1
            copy = self.path / "copy"
            shutil.copytree(self.path / "index", copy / "index")
            shutil.copy(self.path / "deleted.log", copy / "deleted.log")
            if fate:
                self._lose_last_changes(copy / "index")
            if self.crashes % 5 == 0:
                (copy / "index" / "CURRENT").write_bytes(b"broken")
            self._look(copy, self.disk.after_crash(self.rng), at=f"crash {self.crashes}, at a {what} of {name}")
            shutil.rmtree(copy)

    def _lose_last_changes(self, index: Path) -> None:
        """As a cut of the power does: of the log that the database writes now, some of the end was not on disk yet."""
        log = max(index.glob("*.log"), key=lambda path: path.name)
        size = log.stat().st_size
        os.truncate(log, self.rng.choice((0, max(0, size - self.rng.randrange(2000)), self.rng.randrange(size + 1))))

    def _look(self, copy: Path, disk: MemoryDisk, *, at: str) -> None:
        book = SegmentBook(SegmentRules(segment_bytes=SIZE), SEGMENTS * SIZE)
        tombstones = Tombstones(copy / "deleted.log")
        found = recover(
            disk,
            book,
            tombstones,
            index_path=copy / "index",
            cache_bytes=CACHE,
            store_id=STORE,
            clock=Clock(0.0, time.time()),
        )
        self.rebuilds += found.rebuilt
        self.adopted += found.counts["adopted_segments"] if not found.rebuilt else 0
        digests, count, size = {n.id: d for d, n in found.namespaces.items()}, 0, 0
        for namespace, one, located in found.index.blocks():
            place = (digests[namespace], one)
            assert place not in self.gone, f"{at}: what was deleted is back"
            segment = book.get(*located.life)
            assert segment is not None, f"{at}: a block in no segment"
            assert segment.row_at(located.start) is not None, f"{at}: a block that is not accounted for"
            device = disk.open(name_of(located.segment))
            parts = [bytes(read_bytes(device, p.offset, p.length)) if p.length else b"" for p in located.parts]
            assert parts == self.values[place], f"{at}: a wrong byte"
            count, size = count + 1, size + located.size_bytes
        assert count == found.block_count == sum(s.block_count for s in book.sealed), at
        assert size == sum(s.alive_bytes for s in book.sealed), at
        assert {name_of(n) for n in range(100) if n in book._segments} == set(disk.names()), f"{at}: an orphan"
        assert len(disk.names()) <= SEGMENTS, at
        self.found += count
        found.index.close()
        tombstones.close()


def test_a_kill_at_any_operation_leaves_what_is_right_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "BATCH_BYTES", 4 * BLOCK_BYTES)  # So that several writes are under way at once.
    disk, book = MemoryDisk(), SegmentBook(SegmentRules(segment_bytes=SIZE), SEGMENTS * SIZE)
    tombstones = Tombstones(tmp_path / "deleted.log")
    found = recover(
        disk,
        book,
        tombstones,
        index_path=tmp_path / "index",
        cache_bytes=CACHE,
        store_id=STORE,
        clock=Clock(0.0, time.time()),
    )
    now = [0.0]
    tier = WarmTier(
        disk,
        book,
        found.index,
        tombstones,
        namespaces=found.namespaces,
        store_id=STORE,
        clocks=Clocks(now=lambda: now[0], wall=time.time),
    )
    witness = Witness(tmp_path, disk)
    failures: list[BaseException] = []
    one_at_a_time = threading.Lock()

    def watched(what: str, name: str) -> None:
        try:
            with one_at_a_time:
                if not failures:
                    witness.crash(what, name)
        except BaseException as error:  # noqa: BLE001 - in a thread of the tier: the test must hear of it
            failures.append(error)

    disk.before = watched
    rng = random.Random(7)
    for number in range(90):
        now[0] += 1
        described = TWO if number % 7 == 0 else ONE
        made = block(number, described)
        witness.knows(made)
        assert (tier.write(made).result(60) is not None) == any(made.lengths)
        wanted = [key(n) for n in (0, 1, 2, 8, rng.randrange(number + 1))]
        located = tier.locate(ONE.digest, wanted).result(60)
        tier.read(
            [
                Wanted(ONE.digest, k, at, [aligned(p.length)[: blocks_of(p.length) * BLOCK_BYTES] for p in at.parts])
                for k, at in zip(wanted, located, strict=True)
                if at is not None
            ]
        ).result(60)
        if number % 10 == 5:
            dead = [key(n) for n in (number - 2, number - 1)]
            tier.delete(ONE.digest, dead).result(60)
            witness.gone |= {(ONE.digest, k) for k in dead}
        if number % 10 == 6:  # One of them is written anew, as a rule into the same segment.
            again = block(number - 2, ONE)
            witness.gone.discard((ONE.digest, again.key))
            witness.knows(again)
            assert (tier.write(again).result(60) is not None) == any(again.lengths)
        if number in (35, 70):
            found.index._families["blocks"].flush()  # A table that is durable, of changes whose log is not all.
        if number == 60:
            tier.purge(TWO.digest).result(60)
            witness.gone |= {place for place in witness.values if place[0] == TWO.digest}
        if number % 25 == 20:
            tier.flush().result(60)
    tier.close()
    if failures:
        raise failures[0]
    assert tier.counts["given_up_segments"] > 3
    assert tier.counts["rewritten_blocks"] > 3
    assert witness.rebuilds > 50
    assert witness.adopted > 200
    assert witness.found > 5000
    if witness.crashes < 500:
        pytest.fail(f"only {witness.crashes} crashes: the test shows little")
