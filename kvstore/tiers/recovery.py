"""What a folder holds when a server opens it: the index against the segments, each made right by the other.

Rules
- A segment that is not sealed, is of another folder, number, size or format, or cannot be read, holds nothing; so does
  one whose key was not given, where the server is told to go on without it. Its file is used again, or removed where
  it has another size; nothing on disk stays that is not accounted for.
- The index is believed where the segment it names has that very life. What it says of other lives is dropped. A sealed
  segment that it does not know is taken in from its table.
- What was deleted is gone, whatever the index says: it may have lost its last changes.
- An index that cannot be opened is set aside and made anew from all tables, less what was deleted since.
- Of two places of one block, the one written later counts.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.core.columns import Flags
from kvstore.core.residents import fingerprint_of, seed_of
from kvstore.core.segments import Rows, SegmentBook
from kvstore.tiers.device import Device, Disk, read_bytes
from kvstore.tiers.index import (
    MOST_CHANGES,
    Change,
    Index,
    IndexBroken,
    IndexRows,
    Located,
    NamespaceAt,
    PartAt,
    SegmentAt,
    key_of,
)
from kvstore.tiers.sealing import Keyring, WrongKey, can_open
from kvstore.tiers.segment import (
    BLOCK_BYTES,
    UNSEALED,
    BadSegment,
    Described,
    Footer,
    Header,
    Table,
    keys_of,
    read_table,
    tags_of,
)
from kvstore.tiers.tombstones import Graveyard, Tombstones
from kvstore.tiers.writer import sealed_life

_LOG = logging.getLogger("kvstore.recovery")
_NAME = re.compile(r"(\d{10})\.seg")
_BROKEN = ".broken"
_NOTE = np.dtype([("start", "<i8"), ("size", "<i8"), ("created", "<f8"), ("expires", "<f8"), ("fingerprint", "<u8")])


def name_of(number: int) -> str:
    """Returns the name of a segment's device."""
    return f"{number:010d}.seg"


class Clock(NamedTuple):
    """The same moment on both clocks, in seconds: `now` on that of the book, `wall` on that of what is stored."""

    now: float
    wall: float


@dataclass
class Recovered:
    """What was found. `counts` says by reason what was not as it should be."""

    index: Index
    namespaces: dict[bytes, NamespaceAt]
    counts: Counter[str] = field(default_factory=Counter)
    block_count: int = 0
    rebuilt: bool = False


class _Found(NamedTuple):
    """A sealed segment on disk."""

    number: int
    sequence: int
    footer: Footer
    key_id: bytes = UNSEALED


def recover(
    disk: Disk,
    book: SegmentBook,
    tombstones: Tombstones,
    *,
    index_path: Path,
    cache_bytes: int,
    store_id: bytes,
    clock: Clock,
    keyring: Keyring | None = None,
    on_wrong_key: Literal["refuse", "empty"] = "refuse",
) -> Recovered:
    """Opens what is there, and fills an empty book. Blocks. Raises OSError and IndexBroken (not even a new index).

    Raises WrongKey where segments are sealed with keys that are not in `keyring`, unless those are to count as empty.
    """
    counts: Counter[str] = Counter()
    surveyed = _survey(disk, book, store_id, counts)
    sealed = [found for found in surveyed if can_open(keyring, found.key_id)]
    lost = [found for found in surveyed if not can_open(keyring, found.key_id)]
    if lost and on_wrong_key == "refuse":
        raise WrongKey([found.key_id for found in lost])
    _empty(lost, book, counts)
    index, rebuilt = _opened(index_path, cache_bytes, counts)
    graveyard = Graveyard(tombstones.read())
    book.pass_sequence(graveyard.last_sequence)  # What is written from now on is none of what was deleted.
    work = _Work(disk, book, index, clock, counts, graveyard)
    counts["damaged_tombstones"] += tombstones.damaged_count
    work.take(sealed)
    work.honour_capacity()
    tombstones.forget_below(book.oldest_sequence)
    return Recovered(index, work.namespaces, +counts, sum(s.block_count for s in book.sealed), rebuilt)


def _survey(disk: Disk, book: SegmentBook, store_id: bytes, counts: Counter[str]) -> list[_Found]:
    """Looks at every device; returns the sealed ones, the oldest first. The others go into the book."""
    found: list[_Found] = []
    for name in disk.names():
        match = _NAME.fullmatch(name)
        if match is None:
            _LOG.warning("%s is no segment and is left alone", name)
            counts["stray_files"] += 1
            continue
        number = int(match[1])
        try:
            device = disk.open(name)
        except OSError as error:
            _LOG.warning("segment %s cannot be opened and is left alone: %s", name, error)
            counts["unreadable_segments"] += 1
            book.load_bad(number)
            continue
        try:
            if device.size_bytes != book.rules.segment_bytes:
                _LOG.warning("segment %s has %d bytes and is removed", name, device.size_bytes)
                counts["wrong_size_segments"] += 1
                disk.remove(name)
                continue
            life = sealed_life(device, store_id=store_id, number=number)
            book.pass_sequence(Header.of_block(read_bytes(device, 0, BLOCK_BYTES)).sequence)
        except BadSegment as error:
            _LOG.warning("segment %s holds nothing: %s", name, error)
            counts["bad_segments"] += 1
            book.load_free(number)
        except OSError as error:
            _LOG.warning("segment %s cannot be read and is left alone: %s", name, error)
            counts["unreadable_segments"] += 1
            book.load_bad(number)
        else:
            if life is None:
                counts["unsealed_segments"] += 1
                book.load_free(number)
            else:
                found.append(_Found(number, life[0].sequence, life[1], life[0].key_id))
        finally:
            device.close()
    return sorted(found, key=lambda s: s.sequence)


def _empty(lost: list[_Found], book: SegmentBook, counts: Counter[str]) -> None:
    """Counts segments as empty whose keys were not given."""
    for found in lost:
        _LOG.warning("segment %s holds nothing: its key %s was not given", name_of(found.number), found.key_id.hex())
        counts["wrong_key_segments"] += 1
        book.load_free(found.number, found.sequence)


def _opened(path: Path, cache_bytes: int, counts: Counter[str]) -> tuple[Index, bool]:
    """Opens the index; one that is broken is set aside, the last such one only. Raises IndexBroken."""
    is_new = not path.exists()
    try:
        return Index(path, cache_bytes=cache_bytes), is_new
    except IndexBroken as error:
        _LOG.error("the index is set aside and made anew from the segments: %s", error)
    counts["broken_indexes"] += 1
    aside = path.with_name(path.name + _BROKEN)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
    path.rename(aside)
    return Index(path, cache_bytes=cache_bytes), True


class _Work:
    def __init__(
        self, disk: Disk, book: SegmentBook, index: Index, clock: Clock, counts: Counter[str], graveyard: Graveyard
    ) -> None:
        self._disk, self._book, self._index, self._clock = disk, book, index, clock
        self._counts, self._graveyard = counts, graveyard
        self.namespaces = index.namespaces()
        self._digests = {n.id: digest for digest, n in self.namespaces.items()}
        self._notes: dict[int, list[npt.NDArray[np.void]]] = {}  # By sequence: blocks, as _NOTE.
        self._superseded: dict[int, set[int]] = {}  # Likewise: where blocks begin that are noted, and elsewhere now.

    def take(self, sealed: list[_Found]) -> None:
        """Takes in what the index knows of these segments, then the segments that it does not know."""
        lives = {(s.number, s.sequence) for s in sealed}
        known = {(n, s.sequence) for n, s in self._index.segments().items()} & lives
        self._read_index(known)
        self._drop_segments(lives)
        for found in sealed:
            if (found.number, found.sequence) not in known:
                self._adopt(found)
        for found in sealed:
            self._load(found)

    def honour_capacity(self) -> None:
        """Gives up segments beyond the capacity, those that hold nothing first; in the index and then on disk."""
        while (free := self._book.drop_free()) is not None:
            self._disk.remove(name_of(free.number))
            self._counts["segments_over_capacity"] += 1
        given_up: list[tuple[int, int]] = []
        while self._book.excess_count and (victim := self._book.victim(self._book.live_since())) is not None:
            given_up.append((victim.number, victim.sequence))
            self._book.give_up(victim)
        if not given_up:
            return
        self._drop_blocks(given_up)
        for number, _ in given_up:
            self._disk.remove(name_of(number))
        self._counts["segments_over_capacity"] += len(given_up)

    def _read_index(self, known: set[tuple[int, int]]) -> None:
        """Notes where blocks lie; drops those that lie nowhere any more, were deleted, or whose time is over."""
        lives = np.array(sorted((sequence, number) for number, sequence in known), np.int64).reshape(-1, 2)
        change = self._index.change()
        for rows in self._index.rows():
            there = self._are_there(rows, lives)
            expired = (rows.expires > 0) & (rows.expires <= self._clock.wall)
            keeps = there & ~expired
            deleted = self._are_deleted(rows, keeps)
            self._counts["expired_blocks"] += int(np.count_nonzero(expired))
            self._counts["lost_blocks"] += int(np.count_nonzero(~there & ~expired))
            self._counts["deleted_blocks"] += int(np.count_nonzero(deleted))
            keeps &= ~deleted
            change = self._drop(rows, ~keeps, change)
            self._note_rows(rows, np.flatnonzero(keeps))
        self._index.apply(change)

    def _are_there(self, rows: IndexRows, lives: npt.NDArray[np.int64]) -> Flags:
        """Whether each block lies in one of these lives, and is of a namespace that is known."""
        if not len(lives):
            return np.zeros(len(rows.key), np.bool_)
        at = np.minimum(np.searchsorted(lives[:, 0], rows.sequence), len(lives) - 1)
        there: Flags = (lives[at, 0] == rows.sequence) & (lives[at, 1] == rows.segment)
        ids = {key_of(key)[0] for key in (rows.key[0], rows.key[-1])}
        if len(ids) > 1 or not ids <= self._digests.keys():
            there &= np.fromiter((key_of(key)[0] in self._digests for key in rows.key), np.bool_, len(rows.key))
        return there

    def _are_deleted(self, rows: IndexRows, asked: Flags) -> Flags:
        deleted: Flags = np.zeros(len(rows.key), np.bool_)
        if self._graveyard:
            for i in np.flatnonzero(asked).tolist():
                namespace, key = key_of(rows.key[i])
                start = int(rows.start[i]) // BLOCK_BYTES
                deleted[i] = self._graveyard.has(self._digests[namespace], key, int(rows.sequence[i]), start)
        return deleted

    def _note_rows(self, rows: IndexRows, places: npt.NDArray[np.intp]) -> None:
        """Notes the blocks in these places, put together by the segments that they lie in."""
        places = places[np.argsort(rows.sequence[places], kind="stable")]
        notes = np.zeros(len(places), _NOTE)
        notes["start"], notes["size"] = rows.start[places], rows.size_bytes[places]
        notes["created"], notes["expires"] = rows.created[places], rows.expires[places]
        seeds = {number.to_bytes(4, "big"): seed_of(digest) for number, digest in self._digests.items()}
        keys = [rows.key[i] for i in places.tolist()]
        notes["fingerprint"] = [xxh3_64_intdigest(key[4:], seeds[key[:4]]) or 1 for key in keys]
        sequences = rows.sequence[places]
        for first, end in pairwise([0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(places)]):
            if first < end:
                self._notes.setdefault(int(sequences[first]), []).append(notes[first:end])

    def _drop(self, rows: IndexRows, goes: Flags, change: Change) -> Change:
        """Takes blocks out of the index; returns the change to go on with."""
        for i in np.flatnonzero(goes).tolist():
            change.drop_block(*key_of(rows.key[i]))
            if change.count >= MOST_CHANGES:
                self._index.apply(change)
                change = self._index.change()
        return change

    def _drop_blocks(self, lives: list[tuple[int, int]]) -> None:
        """Takes what lies in these segments out of the index, and the segments with it."""
        change = self._index.change()
        for rows in self._index.rows():
            change = self._drop(rows, np.isin(rows.sequence, [sequence for _, sequence in lives]), change)
        for number, _ in lives:
            change.drop_segment(number)
        self._index.apply(change)

    def _drop_segments(self, lives: set[tuple[int, int]]) -> None:
        """Drops what the index says of segments that are not sealed on disk under that life."""
        change = self._index.change()
        for number, known in self._index.segments().items():
            if (number, known.sequence) not in lives:
                self._counts["lost_segments"] += 1
                change.drop_segment(number)
        self._index.apply(change)

    def _adopt(self, found: _Found) -> None:
        """Takes the blocks of a sealed segment into the index by its table."""
        try:
            table = self._table(found)
        except OSError as error:
            _LOG.warning("the table of segment %d cannot be read: %s", found.number, error)
            self._counts["unreadable_tables"] += 1
            return
        self._counts["damaged_blocks"] += table.damaged_blocks
        self._counts["adopted_segments"] += 1
        change, part_count, used_bytes = self._index.change(), 0, 0
        ids = [self._namespace_id(change, described.digest, described.spec) for described in table.namespaces]
        self._index.apply(change)
        rows = _blocks_of_table(table, found)
        for at in range(0, len(rows), MOST_CHANGES):
            change = self._index.change()
            notes = []
            for namespace, key, located in self._wanted(rows[at : at + MOST_CHANGES], ids, table, found):
                change.put_block(namespace, key, located)
                fingerprint = fingerprint_of(self._digests[namespace], key)
                notes.append((located.start, located.size_bytes, located.created, located.expires, fingerprint))
                part_count += len(located.parts)
                used_bytes += located.size_bytes
            self._notes.setdefault(found.sequence, []).append(np.array(notes, _NOTE))
            self._index.apply(change)
        change = self._index.change()
        change.put_segment(found.number, SegmentAt(found.sequence, part_count, used_bytes))
        self._index.apply(change)

    def _wanted(
        self, rows: list[tuple[int, bytes, Located]], ids: list[int], table: Table, found: _Found
    ) -> Iterable[tuple[int, bytes, Located]]:
        """Of a table's blocks, those that count: not deleted, not over, and nowhere else since."""
        asked: dict[int, list[bytes]] = {}
        for namespace, key, _ in rows:
            asked.setdefault(namespace, []).append(key)
        there = {}
        for namespace, keys in asked.items():
            for key, place in zip(keys, self._index.find(ids[namespace], keys), strict=True):
                there[namespace, key] = place
        for namespace, key, located in rows:
            digest, other = table.namespaces[namespace].digest, there[namespace, key]
            if self._graveyard.has(digest, key, found.sequence, located.start // BLOCK_BYTES):
                self._counts["deleted_blocks"] += 1
            elif 0 < located.expires <= self._clock.wall:
                self._counts["expired_blocks"] += 1
            elif other is not None and other.sequence > found.sequence:
                self._counts["older_blocks"] += 1
            else:
                if other is not None:
                    self._superseded.setdefault(other.sequence, set()).add(other.start)
                there[namespace, key] = located  # A table may have a block twice.
                yield ids[namespace], key, located

    def _namespace_id(self, change: Change, digest: bytes, spec: bytes) -> int:
        known = self.namespaces.get(digest)
        if known is None:
            known = NamespaceAt(max(self._digests, default=0) + 1, spec)
            self.namespaces[digest] = known
            self._digests[known.id] = digest
            change.put_namespace(digest, known)
        return known.id

    def _table(self, found: _Found) -> Table:
        device = self._disk.open(name_of(found.number))
        try:
            return _table_in(device, found.footer)
        finally:
            device.close()

    def _load(self, found: _Found) -> None:
        """Fills a segment of the book with the blocks that lie in it."""
        segment = self._book.load(found.number, found.sequence)
        notes = np.concatenate(self._notes.pop(found.sequence, [np.zeros(0, _NOTE)]))
        notes = notes[np.argsort(notes["start"], kind="stable")]
        superseded = self._superseded.get(found.sequence)
        if superseded:
            notes = notes[~np.isin(notes["start"], list(superseded))]
        segment.fill(
            Rows.of(
                starts=notes["start"],
                sizes=notes["size"],
                touched=notes["created"] - (self._clock.wall - self._clock.now),
                expires=notes["expires"],
                fingerprints=notes["fingerprint"],
            )
        )


def blocks_in(device: Device, *, store_id: bytes, number: int) -> tuple[list[tuple[Described, bytes, Located]], bool]:
    """Returns what a sealed segment says that it holds, and whether its table is whole. Raises OSError, BadSegment."""
    life = sealed_life(device, store_id=store_id, number=number)
    if life is None:
        return [], False
    header, footer = life
    table = _table_in(device, footer)
    found = _blocks_of_table(table, _Found(number, header.sequence, footer))
    blocks = [(table.namespaces[namespace], key, located) for namespace, key, located in found]
    return blocks, not table.damaged_blocks


def _table_in(device: Device, footer: Footer) -> Table:
    start = footer.tables_at(device.size_bytes)
    return read_table(read_bytes(device, start, device.size_bytes - BLOCK_BYTES - start), footer, device.size_bytes)


def _blocks_of_table(table: Table, found: _Found) -> list[tuple[int, bytes, Located]]:
    """Puts the parts of each block together again: they lie one after another, the first of them first."""
    entries, keys = table.entries, keys_of(table.entries)
    blocks: list[tuple[int, bytes, Located]] = []
    rows = entries[["namespace", "part", "offset", "length", "checksum", "created", "expires"]].tolist()
    tagged = zip(keys, tags_of(entries), rows, strict=True)
    for key, tag, (namespace, part, offset, length, checksum, created, expires) in tagged:
        place = PartAt(part, offset * BLOCK_BYTES, length, checksum, tag)
        last = blocks[-1] if blocks else None
        if last is not None and last[:2] == (namespace, key) and part > last[2].parts[-1].part:
            blocks[-1] = (namespace, key, last[2]._replace(parts=(*last[2].parts, place)))
        else:
            blocks.append((namespace, key, Located(created, expires, found.number, found.sequence, (place,))))
    return blocks
