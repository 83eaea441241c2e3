"""The disk behind a world's shard: what is written to it ahead of eviction, and what comes back, each some time later.

It does what the service's demotion and promotion do, on the world's clock and with words for bytes. Segments are
written one after another; the oldest is given up for the next.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.core.cleaning import Cleaner, CleaningRules
from kvstore.core.columns import Longs
from kvstore.core.leases import WriteLease
from kvstore.core.namespaces import Namespace
from kvstore.core.sessions import Session
from kvstore.core.sight import Ask
from kvstore.core.writing import ReserveRequest
from kvstore_wire.namespace import Kind
from kvstore_wire.states import PartState
from tests.shards import KIB, Shard

SEGMENTS, SEGMENT_BLOCKS = 12, 32
DAMAGED = 0.04  # Of the blocks read.
REFUSED = 0.05  # Of the blocks written.


@dataclass(frozen=True)
class Word:
    """What stands in a slot: whose bytes they are, and which write put them there."""

    space: str
    key: bytes
    part: int
    write: int


class Place(NamedTuple):
    """Where a block lies on disk."""

    segment: int
    sequence: int
    start: int


@dataclass(frozen=True)
class Copy:
    """A block on disk."""

    place: Place
    words: tuple[Word, ...]
    lengths: tuple[int, ...]
    created: float


@dataclass(eq=False)
class _Write:
    """A block on its way to disk: what stood in its slots when that began. `is_void`: deleted meanwhile."""

    row: int
    namespace: Namespace
    key: bytes
    slots: list[tuple[int, Word]]
    lengths: tuple[int, ...]
    created: float
    ends_at: float
    is_void: bool = False


@dataclass(frozen=True)
class _Fetch:
    """Blocks of a chain that were found on disk and have no slots yet."""

    namespace: Namespace
    chain: Sequence[bytes]
    found: dict[bytes, Copy]
    begins_at: float


@dataclass(frozen=True)
class _Landing:
    """Blocks on their way to slots under one lease: of each its key, its copy and the indexes of its parts."""

    lease: WriteLease
    blocks: list[tuple[bytes, Copy, range]]
    offsets: list[int]
    ends_at: float


class Disk:
    """What it holds, and what is on its way. `words` is the shard's memory."""

    def __init__(self, shard: Shard, words: dict[int, Word], chance: random.Random, tally: Counter[str]) -> None:
        self.shard, self.store, self.words, self.random, self.tally = shard, shard.store, words, chance, tally
        self.cleaner = Cleaner(self.store.records, CleaningRules(share=0.25), shard.now)
        self.lives: Longs = np.zeros(SEGMENTS, np.int64)
        self.copies: dict[tuple[str, bytes], Copy] = {}
        self._places: dict[Place, Copy] = {}
        self._next = 0
        self._writes: list[_Write] = []
        self._fetches: list[_Fetch] = []
        self._landings: list[_Landing] = []
        self._session = Session(b"warm tier", "warm tier", frozenset(), None)
        self.store.sessions.keep_internal(self._session)
        self.store.reader.elsewhere = self.has
        self.store.records.on_evict = self._evicted

    def has(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """Tells of each key whether its block is here and may live still."""
        found = [self.copies.get((namespace.spec.name, key)) for key in keys]
        return [copy is not None and self._is_young(namespace, copy.created) for copy in found]

    def step(self) -> None:
        """Ends what is due, and now and then begins to write."""
        now = self.shard.now
        for write in [w for w in self._writes if w.ends_at <= now]:
            self._end(write)
        for fetch in [f for f in self._fetches if f.begins_at <= now]:
            self._fetches.remove(fetch)
            self._reserve(fetch)
        for landing in [o for o in self._landings if o.ends_at <= now]:
            self._land(landing)
        if self.random.random() < 0.02:
            self._begin()

    def fetch(self, ask: Ask) -> None:
        """Begins to bring what an Acquire waits for and only the disk has."""
        name = ask.namespace.spec.name
        under_way = {(f.namespace.spec.name, key) for f in self._fetches for key in f.found}
        wanted = [ask.keys[at] for at in self.store.reader.wanted_from_disk(ask)]
        found = {key: self.copies[name, key] for key in wanted if (name, key) not in under_way}
        if found:
            begins_at = self.shard.now + self.random.choice([0.0, 0.05, 0.5])
            self._fetches.append(_Fetch(ask.namespace, ask.keys, found, begins_at))

    def under_way(self) -> list[tuple[Namespace, list[bytes]]]:
        """What was found and has no slots yet."""
        return [(fetch.namespace, list(fetch.found)) for fetch in self._fetches]

    def forget(self, namespace: Namespace, keys: Sequence[bytes], *, created_before: float = float("inf")) -> None:
        """Deletes blocks, those that are on their way to disk included."""
        name = namespace.spec.name
        for key in keys:
            copy = self.copies.get((name, key))
            if copy is not None and copy.created < created_before:
                del self.copies[name, key]
        for write in self._writes:
            if write.namespace is namespace and write.key in keys and write.created < created_before:
                write.is_void = True

    def finish(self) -> None:
        """Waits for all that is on its way."""
        self.shard.now = max([w.ends_at for w in self._writes] + [o.ends_at for o in self._landings] + [self.shard.now])
        for write in list(self._writes):
            self._end(write)
        self._fetches.clear()
        for landing in list(self._landings):
            self._land(landing)
        assert not self._session.leases
        assert not self.store.records.blocks.writing.any()

    def check(self) -> None:
        """What is being written stands as it stood; every copy that a block is said to have is that block's."""
        for write in self._writes:
            self._verify(write)
        cell = self.store.records.blocks.cell
        for namespace in self.store.namespaces:
            for row in namespace.blocks.values():
                segment, sequence = cell.disk_segment[row], cell.disk_sequence[row]
                if sequence and self.lives[segment] == sequence:
                    copy = self._places[Place(segment, sequence, cell.disk_start[row])]
                    offsets, lengths = self._slots(namespace, row)
                    assert tuple(self.words[offset] for offset in offsets) == copy.words, "a copy of other bytes"
                    assert tuple(lengths) == copy.lengths

    # -- to disk -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        room = self.random.choice([16, 128, 1024]) * KIB
        for row in self.cleaner.choose(room, self.lives):
            namespace, key = self._namespace(row), self.store.records.blocks.key[row]
            assert key is not None
            offsets, lengths = self._slots(namespace, row)
            slots = [(offset, self.words[offset]) for offset in offsets]
            whole = [(namespace.spec.name, key, part) for part in namespace.all_parts]
            assert [(w.space, w.key, w.part) for _, w in slots] == whole, "to be written is not what is stored"
            room -= len(slots) * self.store.records.slot_bytes(row)
            self.store.records.begin_writing(row)
            created = self.store.records.blocks.cell.created[row]
            ends_at = self.shard.now + self.random.choice([0.0, 0.05, 0.5, 4.0])
            self._writes.append(_Write(row, namespace, key, slots, tuple(lengths), created, ends_at))
            self.tally["writes begun"] += 1
        assert room >= 0, "more was chosen than there was room for"

    def _end(self, write: _Write) -> None:
        self._verify(write)
        self._writes.remove(write)
        at = write.namespace.blocks.get(write.key)
        self.tally["writes ended, block held"] += self.store.records.blocks.cell.holds[write.row] > 0
        is_stored = self.store.records.end_writing(write.row)
        assert is_stored == (at == write.row)
        self.tally["writes ended, block " + ("there" if is_stored else "gone" if at is None else "made anew")] += 1
        if write.is_void or self.random.random() < REFUSED:
            return
        place = self._next_place()
        copy = Copy(place, tuple(word for _, word in write.slots), write.lengths, write.created)
        self.copies[write.namespace.spec.name, write.key] = self._places[place] = copy
        if is_stored:
            self._note(write.row, place)

    def _verify(self, write: _Write) -> None:
        assert all(self.words[offset] == word for offset, word in write.slots), "bytes changed while they were written"

    def _next_place(self) -> Place:
        """The place of the next block; where a segment begins, all that it held goes."""
        life, start = divmod(self._next, SEGMENT_BLOCKS)
        self._next += 1
        place = Place(life % SEGMENTS, life + 1, start)
        if self.lives[place.segment] != place.sequence:
            self.lives[place.segment] = place.sequence
            self.copies = {name: c for name, c in self.copies.items() if c.place.segment != place.segment}
            self._places = {at: c for at, c in self._places.items() if at.segment != place.segment}
            self.tally["segments given up"] += life >= SEGMENTS
        return place

    def _note(self, row: int, place: Place) -> None:
        cell = self.store.records.blocks.cell
        cell.disk_segment[row], cell.disk_sequence[row], cell.disk_start[row] = place

    def _evicted(self, row: int) -> None:
        cell, key = self.store.records.blocks.cell, self.store.records.blocks.key[row]
        assert key is not None
        assert self._namespace(row).blocks[key] == row, "it is told of before it goes"
        has_copy = cell.disk_sequence[row] and self.lives[cell.disk_segment[row]] == cell.disk_sequence[row]
        how = "with a copy" if has_copy else "while it was written" if cell.writing[row] else "unwritten"
        self.tally[f"evicted {how}"] += 1

    # -- from disk -----------------------------------------------------------------------------------------------

    def _reserve(self, fetch: _Fetch) -> None:
        """Takes slots for what may be brought; the chain's whole blocks in memory are named too, so that they stay."""
        namespace, name, now = fetch.namespace, fetch.namespace.spec.name, self.shard.now
        usable = {
            key: copy
            for key, copy in fetch.found.items()
            if key not in namespace.blocks
            and self.copies.get((name, key)) is copy
            and self._is_young(namespace, copy.created)
        }
        self.tally["blocks vanished before they had slots"] += len(fetch.found) - len(usable)
        keys = [key for key in fetch.chain if key in usable or self._is_settled(namespace, key)]
        lengths = []
        if namespace.spec.kind is Kind.OPAQUE:
            lengths = [usable[key].lengths[0] if key in usable else 0 for key in keys]
        request = ReserveRequest(keys, self.random.choice([0.3, 2.0, 60.0, 60.0]), lengths=lengths)
        reserved = self.store.writer.reserve(self._session, namespace, request, now)
        width = namespace.parts_per_block
        got = [key for i, key in enumerate(keys) if reserved.states[i * width] == PartState.CREATED]
        if reserved.lease is None:
            return
        assert len(reserved.lease.parts) == width * len(got)
        offsets, _, _ = self.store.part_views(reserved.lease.parts)
        cell, owner = self.store.records.blocks.cell, self.store.records.parts.cell.block
        blocks = []
        for number, key in enumerate(got):
            # Not looked up by its key: a block that was made may have gone with a page that the next one needed.
            cell.created[owner[int(reserved.lease.parts[number * width])]] = usable[key].created
            blocks.append((key, usable[key], range(number * width, (number + 1) * width)))
        size = self.random.randrange(1, 8)
        for batch in (blocks[at : at + size] for at in range(0, len(blocks), size)):
            self.store.pin(reserved.lease)
            ends_at = now + self.random.choice([0.01, 0.1, 0.4, 3.0])
            self._landings.append(_Landing(reserved.lease, batch, offsets, ends_at))

    def _land(self, landing: _Landing) -> None:
        """Bytes land under the pin whatever became of the lease; what was read whole becomes visible."""
        self._landings.remove(landing)
        lease, now = landing.lease, self.shard.now
        landed = []
        for key, copy, indexes in landing.blocks:
            is_good = self.lives[copy.place.segment] == copy.place.sequence and self.random.random() >= DAMAGED
            for index, word in zip(indexes, copy.words, strict=True):
                self.words[landing.offsets[index]] = word if is_good else Word("damaged", key, word.part, 0)
            landed += [(key, copy, indexes)] if is_good else []
        self.tally["promoted under an ended lease" if lease.ended else "promoted damaged"] += len(landing.blocks)
        if not lease.ended:
            self.tally["promoted damaged"] -= len(landed)
            self._commit(lease, landed)
        left = [i for _, _, indexes in landing.blocks for i in indexes if lease.open[i]]
        if left and not lease.ended:
            self.store.writer.drop(lease, left, now)
            if lease.ended:
                self.store.sessions.forget_leases(self._session.id, [lease.id])
        self.store.unpin(lease, now)

    def _commit(self, lease: WriteLease, landed: list[tuple[bytes, Copy, range]]) -> None:
        indexes = [index for _, _, at in landed for index in at]
        if not indexes:
            return
        for index in indexes:
            lease.landed[index] = 1
        states = self.store.commit(self._session, lease, indexes, checksums=[7] * len(indexes), now=self.shard.now)
        width = lease.namespace.parts_per_block
        for number, (key, copy, _) in enumerate(landed):
            state = states[number * width]
            self.tally[f"promoted {PartState(state).name}"] += 1
            if state == PartState.COMMITTED:
                self._note(lease.namespace.blocks[key], copy.place)

    # -- looking -------------------------------------------------------------------------------------------------

    def _is_settled(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a block in memory may be named in a Reserve without any part of it being made."""
        row, cell = namespace.blocks.get(key), self.store.records.blocks.cell
        if row is None or not self._is_young(namespace, cell.created[row]):
            return False
        return cell.present[row] + cell.reserved[row] == namespace.parts_per_block

    def _is_young(self, namespace: Namespace, created: float) -> bool:
        return namespace.rules.ttl_s is None or created + namespace.rules.ttl_s > self.shard.now

    def _namespace(self, row: int) -> Namespace:
        return self.store.records.namespaces[self.store.records.blocks.cell.namespace[row]]

    def _slots(self, namespace: Namespace, row: int) -> tuple[list[int], list[int]]:
        """Where a block's parts stand, and their lengths."""
        first = self.store.records.blocks.cell.first_part[row]
        offsets, lengths, _ = self.store.part_views(list(range(first, first + namespace.parts_per_block)))
        return offsets, lengths
