"""Blocks of 2 MiB in memory as a server has them, a warm tier that takes them, and where they lie on disk."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from bench.disk import CountingDisk, RawReader, Read
from bench.jobs import cut
from bench.players import namespace_of
from bench.rig import MIB
from kvstore.core.segments import SegmentBook, SegmentRules
from kvstore.tiers.device import Folder
from kvstore.tiers.index import Located
from kvstore.tiers.memory import ArenaMemory
from kvstore.tiers.opening import OpenSettings, open_warm
from kvstore.tiers.recovery import Clock, name_of, recover
from kvstore.tiers.segment import Described
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.warm import BATCH_BYTES, Clocks, WarmTier
from kvstore.tiers.writer import BlockOut

PART_BYTES = 2 * MIB
NAMESPACE = namespace_of(PART_BYTES)
DESCRIBED = Described(NAMESPACE.digest, NAMESPACE.to_message().SerializeToString())
CLOCKS = Clocks(time.monotonic, time.time)
SEGMENT_BYTES = 256 * MIB  # The default of warm.segment.
IN_FLIGHT_BYTES = 128 * MIB  # The default of warm.queue.
READ_BYTES, READERS = 4 * MIB, 8  # As the server hands them to its reading threads, and how many it has.
CACHE_BYTES = 64 * MIB
USED_BYTES = 512 * MIB
WAIT_S = 60.0


class Slots:
    """Parts in an arena's memory, as a server has them: what is written lies here, and what is read lands here.

    Owns: the memory, until the block is left.
    """

    def __init__(self, slot_count: int) -> None:
        self._memory = ArenaMemory(slot_count * PART_BYTES)
        self._memory.prefault_in_background()
        while self._memory.is_prefaulting:
            time.sleep(0.01)
        self.pieces = cut(self._memory.view, PART_BYTES, slot_count)
        generator = np.random.default_rng(7)
        for piece in self.pieces:
            piece[:] = generator.bytes(PART_BYTES)
        self._checksums = [xxh3_64_intdigest(piece) for piece in self.pieces]

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self.pieces:
            piece.release()
        self._memory.close()

    def block(self, slot: int, number: int) -> BlockOut:
        """A block of one part, which lies in a slot. What it holds is known by the caller to differ, or not."""
        return BlockOut(
            *(DESCRIBED, key_of(number), [0], [PART_BYTES], [self._checksums[slot]], [self.pieces[slot]]),
            created=time.time(),
        )

    def stamp(self, slot: int, number: int) -> None:
        """Gives a slot other bytes for another block."""
        self.pieces[slot][:8] = number.to_bytes(8, "little")
        self._checksums[slot] = xxh3_64_intdigest(self.pieces[slot])


@contextmanager
def used_pages_taken() -> Iterator[None]:
    """Takes the pages that processes before have given back, so that what is compared inside of this has memory alike.

    Each CPU keeps such pages in the wrong order and hands them out first, and a virtual disk takes longer for memory
    whose pages do not follow one another.
    """
    cpus = os.sched_getaffinity(0)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = total // (8 * len(cpus)) + USED_BYTES  # The most that a CPU keeps (Linux 6.7), and what all have.
    fd = os.memfd_create("bench-pages", os.MFD_CLOEXEC)
    try:
        for i, cpu in enumerate(sorted(cpus)):
            os.sched_setaffinity(0, {cpu})
            os.posix_fallocate(fd, i * size, size)
        os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, cpus)
        os.close(fd)


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"warm/{number}".encode()).digest()


@contextmanager
def tier_in(
    path: Path, *, segment_bytes: int, segment_count: int, rewrite_share: float
) -> Iterator[tuple[WarmTier, CountingDisk]]:
    """A tier in a new folder, on a disk that counts what is written to it."""
    folder = Folder(path / "segments")
    disk = CountingDisk(folder)
    book = SegmentBook(
        SegmentRules(segment_bytes=segment_bytes, rewrite_share=rewrite_share), segment_count * segment_bytes
    )
    tombstones, store_id = Tombstones(path / "deleted.log"), bytes(16)
    found = recover(
        disk,
        book,
        tombstones,
        index_path=path / "index",
        cache_bytes=CACHE_BYTES,
        store_id=store_id,
        clock=Clock(CLOCKS.now(), CLOCKS.wall()),
    )
    tier = WarmTier(disk, book, found.index, tombstones, namespaces=found.namespaces, store_id=store_id, clocks=CLOCKS)
    try:
        yield tier, disk
    finally:
        tier.close()
        folder.close()


def write_all(tier: WarmTier, blocks: Sequence[BlockOut]) -> list[Located]:
    """Writes blocks, as many on their way at once as a server lets wait, and more as each batch is written.

    Returns where they lie.
    """
    ahead, step = (size // PART_BYTES for size in (IN_FLIGHT_BYTES, BATCH_BYTES))
    futures: list[Future[Located | None]] = []
    for first in range(0, len(blocks), step):
        if first >= ahead:
            futures[first - ahead + step - 1].result(WAIT_S)
        futures += [tier.write(block) for block in blocks[first : first + step]]
    places = [future.result(WAIT_S) for future in futures]
    found = [place for place in places if place is not None]
    if len(found) < len(places):
        raise RuntimeError(f"{len(places) - len(found)} of {len(places)} blocks were not written: {tier.fault}")
    return found


def neighbours(places: Sequence[Located], most_bytes: int) -> list[list[int]]:
    """Indexes of blocks that lie one after another, in groups of at most so many bytes."""
    groups: list[list[int]] = []
    size = 0
    for i, place in enumerate(places):
        last = places[i - 1]
        follows = i > 0 and (last.life, last.start + last.size_bytes) == (place.life, place.start)
        if follows and size + place.size_bytes <= most_bytes:
            groups[-1].append(i)
            size += place.size_bytes
        else:
            groups.append([i])
            size = place.size_bytes
    return groups


def raw_reads(reader: RawReader, segments: Path, places: Sequence[Located], pieces: Sequence[memoryview]) -> list[Read]:
    """Bare reads of the same places, in the same pieces."""
    return [
        Read(reader.file(segments / name_of(places[g[0]].segment)), places[g[0]].start, [pieces[i] for i in g])
        for g in neighbours(places, READ_BYTES)
    ]


def filled(path: Path, capacity_bytes: int, *, set_count: int, block_count: int) -> list[list[Located]]:
    """Writes sets of blocks as a server does before it stops; returns where they lie.

    Block i is that of `key_of(i)`, and its first 8 bytes are i.
    """
    settings = OpenSettings(
        path=path, capacity_bytes=capacity_bytes, segment_bytes=SEGMENT_BYTES, cache_bytes=CACHE_BYTES
    )
    opened = open_warm(settings, clocks=CLOCKS)
    try:
        with Slots(block_count) as slots:
            places = []
            for first in range(0, set_count * block_count, block_count):
                for slot in range(block_count):
                    slots.stamp(slot, first + slot)
                blocks = [slots.block(slot, first + slot) for slot in range(block_count)]
                places.append(write_all(opened.tier, blocks))
            opened.tier.flush().result(WAIT_S)
    finally:
        opened.close(timeout_s=WAIT_S)
    return places
