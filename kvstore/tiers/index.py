"""The durable index of the warm tier, in RocksDB: which block lies where. Payload never passes through it.

Rules
- What is in the index lies in a sealed segment, whole. A change is one atomic batch.
- One thread at a time changes it; any thread may look things up meanwhile.
- It can be thrown away: the tables of the segments say the same, but for what was deleted since (tombstones.py).
- So no change waits for the disk. A kill of the process loses none; a loss of power loses the last ones, in the order
  they were made: the database takes back its log up to the first record that is not whole, and before it makes a table
  of newer changes durable, of any family, it makes the log durable that they came from. A log with a hole before such a
  table is refused when the database is opened, and the index is made anew. Recovery takes in sealed segments whose
  change was lost, drops what lies in lives that have ended, and asks the tombstones for every block.
- A change runs with the interpreter lock (rocksdict 0.3.29; 1,000 blocks take 1 ms), so it is small, and the database
  must not hold it up: one that would wait is refused, and tried again without the lock. Looking up releases it.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rocksdict import (
    BlockBasedOptions,
    Cache,
    DataBlockIndexType,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from kvstore.tiers.segment import BLOCK_BYTES, TAG_BYTES, blocks_of

_LOG = logging.getLogger("kvstore.index")
_BLOCKS, _SEGMENTS, _NAMESPACES = "blocks", "segments", "namespaces"
_FAMILIES = (_BLOCKS, _SEGMENTS, _NAMESPACES)
_ID = struct.Struct(">I")  # Big-endian, so that a namespace's blocks are one range of keys.
_BLOCK = struct.Struct("<ddIQ")
_PART = struct.Struct("<HQIQ")
_SEALED_PART = struct.Struct(f"<HQIQ{TAG_BYTES}s")
_IS_SEALED = b"\1"  # Behind the last part; without it a record has an even length.
_SEGMENT = struct.Struct("<QQQ")
_BLOOM_BITS = 10  # One look-up in a hundred of what is not there reads a block.
_BLOCK_BYTES = 2048  # Read for each block that is looked up, where the cache does not have it.
_HASH_RATIO = 0.75  # Entries for each place of a data block's hash table.
_WRITE_BUFFER_BYTES = 16 << 20
_LOG_BYTES = 64 << 20
_OPEN_FILES = 256
MOST_CHANGES = 1000  # Of one batch, where nothing asks for more: the interpreter lock is held for so long.
_ROWS = 1 << 14  # Read at a time.
_BUSY = "Result incomplete"  # How the database says that a change would have to wait.
_BUSY_S = 0.01
_START = 30  # Where a record has the offset of its first part.


class IndexBroken(Exception):
    """The database cannot be opened, read or written. The text says why."""


class PartAt(NamedTuple):
    """Where one part lies in its segment; `offset` and `length` in bytes. `tag`: where it is sealed."""

    part: int
    offset: int
    length: int
    checksum: int
    tag: bytes = b""


class Located(NamedTuple):
    """A block on disk: all of its parts that are there, at least one, in one segment, one after another.

    `sequence` is that of the segment's life in which they were written. Times in seconds of the wall clock; `expires`
    0 = never.
    """

    created: float
    expires: float
    segment: int
    sequence: int
    parts: tuple[PartAt, ...]

    @property
    def life(self) -> tuple[int, int]:
        return self.segment, self.sequence

    @property
    def start(self) -> int:
        """Where the first part begins."""
        return self.parts[0].offset

    @property
    def size_bytes(self) -> int:
        """What the block takes on disk."""
        last = self.parts[-1]
        return last.offset + blocks_of(last.length) * BLOCK_BYTES - self.start

    def to_bytes(self) -> bytes:
        head = _BLOCK.pack(self.created, self.expires, self.segment, self.sequence)
        if self.parts[0].tag:  # All parts lie in one segment, so all are sealed or none is.
            return head + b"".join([_SEALED_PART.pack(*part) for part in self.parts]) + _IS_SEALED
        return head + b"".join([_PART.pack(*part[:-1]) for part in self.parts])

    @staticmethod
    def of_bytes(raw: bytes) -> Located:
        is_sealed = len(raw) % 2
        form, end = (_SEALED_PART, len(raw) - len(_IS_SEALED)) if is_sealed else (_PART, len(raw))
        parts = tuple([PartAt(*row) for row in form.iter_unpack(raw[_BLOCK.size : end])])
        created, expires, segment, sequence = _BLOCK.unpack_from(raw)
        return Located(created, expires, segment, sequence, parts)


class SegmentAt(NamedTuple):
    """A sealed segment as the index knows it. `part_count` and `used_bytes`: of parts that the index has."""

    sequence: int
    part_count: int
    used_bytes: int


class NamespaceAt(NamedTuple):
    """A namespace that blocks are stored in: its number here, and the message that it is made from."""

    id: int
    spec: bytes


class IndexRows(NamedTuple):
    """Some blocks of the index, a column each. `key`: the namespace's number, and the block's key; see `key_of`.

    `start` and `size_bytes`: of the block, in its segment.
    """

    key: list[bytes]
    created: npt.NDArray[np.float64]
    expires: npt.NDArray[np.float64]
    segment: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]


def key_of(row: bytes) -> tuple[int, bytes]:
    """Returns a namespace's number and a block's key."""
    return _ID.unpack_from(row)[0], row[_ID.size :]


class Change:
    """One atomic change, made by `Index.change` and given to `Index.apply`."""

    def __init__(self, handles: dict[str, Any]) -> None:
        self._handles = handles  # The index's own: a database lives as long as a handle does.
        self._puts: list[tuple[str, bytes, bytes]] = []
        self._drops: list[tuple[str, bytes]] = []
        self._ranges: list[tuple[str, bytes, bytes]] = []

    def put_block(self, namespace_id: int, key: bytes, located: Located) -> None:
        self._puts.append((_BLOCKS, _ID.pack(namespace_id) + key, located.to_bytes()))

    def drop_block(self, namespace_id: int, key: bytes) -> None:
        self._drops.append((_BLOCKS, _ID.pack(namespace_id) + key))

    def drop_blocks_of(self, namespace_id: int) -> None:
        """Drops all blocks of a namespace, at the cost of one."""
        self._ranges.append((_BLOCKS, _ID.pack(namespace_id), _ID.pack(namespace_id + 1)))

    def put_segment(self, number: int, segment: SegmentAt) -> None:
        self._puts.append((_SEGMENTS, _ID.pack(number), _SEGMENT.pack(*segment)))

    def drop_segment(self, number: int) -> None:
        self._drops.append((_SEGMENTS, _ID.pack(number)))

    def put_namespace(self, digest: bytes, namespace: NamespaceAt) -> None:
        self._puts.append((_NAMESPACES, digest, _ID.pack(namespace.id) + namespace.spec))

    def drop_namespace(self, digest: bytes) -> None:
        self._drops.append((_NAMESPACES, digest))

    @property
    def count(self) -> int:
        return len(self._puts) + len(self._drops) + len(self._ranges)

    def to_batch(self) -> WriteBatch:
        """What is dropped goes before what is put, the later of two puts counts. A batch is good for one try."""
        batch, handles = WriteBatch(raw_mode=True), self._handles
        for family, first, end in self._ranges:
            batch.delete_range(first, end, handles[family])
        for family, key in self._drops:
            batch.delete(key, handles[family])
        for family, key, value in self._puts:
            batch.put(key, value, handles[family])
        return batch


class Index:
    """Owns the database in a folder from construction to `close`. `cache_bytes` bounds what it keeps in memory of it.

    Raises IndexBroken.
    """

    def __init__(self, path: Path, *, cache_bytes: int) -> None:
        self.path, self._cache_bytes = path, cache_bytes
        self._options = WriteOptions()
        self._options.no_slowdown = True
        self._db: Any = None
        self._families: dict[str, Any] = {}
        self._handles: dict[str, Any] = {}
        self._open()

    def _open(self) -> None:
        try:
            cache = Cache(self._cache_bytes)
            self._db = Rdict(str(self.path), _options(cache), {name: _options(cache) for name in _FAMILIES})
            self._families = {name: self._db.get_column_family(name) for name in _FAMILIES}
            self._handles = {name: self._db.get_column_family_handle(name) for name in _FAMILIES}
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise IndexBroken(f"{self.path}: {error}") from None

    def reopen(self) -> None:
        """Closes the database and opens it anew: once a write of its own failed it takes none. Raises IndexBroken."""
        self.close()
        self._open()

    def find(self, namespace_id: int, keys: Sequence[bytes]) -> list[Located | None]:
        """Returns where blocks lie, None for those that are not stored. Raises IndexBroken."""
        prefix = _ID.pack(namespace_id)
        try:
            found: Any = self._families[_BLOCKS].get([prefix + key for key in keys])
        except Exception as error:  # noqa: BLE001 - likewise
            raise IndexBroken(f"a look-up failed: {error}") from None
        return [None if raw is None else Located.of_bytes(raw) for raw in found]

    def segments(self) -> dict[int, SegmentAt]:
        """Raises IndexBroken."""
        return {_ID.unpack(k)[0]: SegmentAt(*_SEGMENT.unpack(v)) for k, v in self._items(_SEGMENTS)}

    def namespaces(self) -> dict[bytes, NamespaceAt]:
        """Returns them by digest. Raises IndexBroken."""
        return {k: NamespaceAt(_ID.unpack_from(v)[0], v[_ID.size :]) for k, v in self._items(_NAMESPACES)}

    def blocks(self, namespace_id: int | None = None) -> Iterator[tuple[int, bytes, Located]]:
        """Yields (namespace id, key, place) of every block, or of one namespace's. Raises IndexBroken.

        As they are when the first is asked for, whatever changes meanwhile.
        """
        first = None if namespace_id is None else _ID.pack(namespace_id)
        for k, v in self._items(_BLOCKS, first):
            if first is not None and not k.startswith(first):
                return
            yield *key_of(k), Located.of_bytes(v)

    def rows(self) -> Iterator[IndexRows]:
        """Yields every block, many at a time. Raises IndexBroken."""
        items = self._items(_BLOCKS)
        while some := list(islice(items, _ROWS)):
            by_size: dict[int, list[tuple[bytes, bytes]]] = {}
            for item in some:
                by_size.setdefault(len(item[1]), []).append(item)
            for size, alike in by_size.items():
                yield _rows_of(size, alike)

    def change(self) -> Change:
        """Begins a change. Raises IndexBroken once closed."""
        if not self._families:
            raise IndexBroken("it is closed")
        return Change(self._handles)

    def apply(self, change: Change) -> None:
        """Makes a change, or nothing of it. Waits where the database is behind. Raises IndexBroken."""
        while True:
            try:
                self._db.write(change.to_batch(), self._options)
            except Exception as error:  # noqa: BLE001 - likewise
                if _BUSY not in str(error):
                    raise IndexBroken(f"a change failed: {error}") from None
            else:
                return
            threading.Event().wait(_BUSY_S)

    def close(self) -> None:
        """Gives the folder back. Idempotent."""
        families, self._families = self._families, {}
        self._handles.clear()
        for family in (*families.values(), *([self._db] if families else [])):
            try:
                family.close()
            except Exception as error:  # noqa: BLE001 - likewise
                _LOG.warning("%s was not closed as it should be: %s", self.path, error)
        self._db = None  # What could not be closed ends with the last reference to it.

    def _items(self, family: str, first: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        last = first
        try:
            for item in self._families[family].items(from_key=first):
                last = item[0]
                yield item
            self._check_end(family, last)
        except Exception as error:  # noqa: BLE001 - likewise
            raise IndexBroken(f"reading {family} failed: {error}") from None

    def _check_end(self, family: str, last: bytes | None) -> None:
        """Raises where what follows a key is damaged: looking through a family ends there without a word."""
        at = self._families[family].iter()
        if last is None:
            at.seek_to_first()
        else:
            at.seek(last)
            if at.valid():
                at.next()
        if not at.valid():
            at.status()


def _rows_of(size: int, items: list[tuple[bytes, bytes]]) -> IndexRows:
    """Takes records of one size apart, all at once."""
    part = _SEALED_PART if size % 2 else _PART
    last = _BLOCK.size + ((size - _BLOCK.size) // part.size - 1) * part.size + _START - _BLOCK.size
    form = {
        "names": ("created", "expires", "segment", "sequence", "start", "last", "length"),
        "formats": ("<f8", "<f8", "<u4", "<u8", "<u8", "<u8", "<u4"),
        "offsets": (0, 8, 16, 20, _START, last, last + 8),
        "itemsize": size,
    }
    found: Any = np.frombuffer(b"".join([v for _, v in items]), np.dtype(form))  # type: ignore[call-overload]
    start, end = found["start"].astype(np.int64), found["last"].astype(np.int64)
    end += -(-found["length"].astype(np.int64) // BLOCK_BYTES) * BLOCK_BYTES
    segment, sequence = found["segment"].astype(np.int64), found["sequence"].astype(np.int64)
    return IndexRows([k for k, _ in items], found["created"], found["expires"], segment, sequence, start, end - start)


def _options(cache: Cache) -> Options:
    options, table = Options(raw_mode=True), BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_bloom_filter(_BLOOM_BITS, block_based=False)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    table.set_data_block_hash_ratio(_HASH_RATIO)
    table.set_block_size(_BLOCK_BYTES)
    options.set_block_based_table_factory(table)
    options.set_optimize_filters_for_hits(True)  # What is asked for is there, nearly always: the residents said so.
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())  # Keys are hashes.
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_total_wal_size(_LOG_BYTES)
    options.set_max_open_files(_OPEN_FILES)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    return options
