"""The durable index of the warm tier, in RocksDB: which block lies where. Payload never passes through it.

Rules
- What is in the index lies in a sealed segment, whole. A change is one atomic batch, durable when `apply` returns.
- One thread at a time changes it; any thread may look things up meanwhile.
- It can be thrown away: the tables of the segments say the same, but for what was deleted since (tombstones.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch, WriteOptions

from kvstore.tiers.segment import BLOCK_BYTES, blocks_of

_BLOCKS, _SEGMENTS, _NAMESPACES = "blocks", "segments", "namespaces"
_FAMILIES = (_BLOCKS, _SEGMENTS, _NAMESPACES)
_ID = struct.Struct(">I")  # Big-endian, so that a namespace's blocks are one range of keys.
_BLOCK = struct.Struct("<ddIQ")
_PART = struct.Struct("<HQIQ")
_SEGMENT = struct.Struct("<QQQ")
_BLOOM_BITS = 10  # One look-up in a hundred of what is not there reads a block.
_WRITE_BUFFER_BYTES = 16 << 20
_LOG_BYTES = 64 << 20
_OPEN_FILES = 256


class IndexBroken(Exception):
    """The database cannot be opened, read or written. The text says why."""


class PartAt(NamedTuple):
    """Where one part lies in its segment; `offset` and `length` in bytes."""

    part: int
    offset: int
    length: int
    checksum: int


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
        return head + b"".join([_PART.pack(*part) for part in self.parts])

    @staticmethod
    def of_bytes(raw: bytes) -> Located:
        parts = tuple([PartAt(*row) for row in _PART.iter_unpack(raw[_BLOCK.size :])])
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


class Change:
    """One atomic change, made by `Index.change` and given to `Index.apply`."""

    def __init__(self, batch: WriteBatch, handles: dict[str, Any]) -> None:
        self._batch, self._handles = batch, handles  # The index's own: a database lives as long as a handle does.

    def put_block(self, namespace_id: int, key: bytes, located: Located) -> None:
        self._batch.put(_ID.pack(namespace_id) + key, located.to_bytes(), self._handles[_BLOCKS])

    def drop_block(self, namespace_id: int, key: bytes) -> None:
        self._batch.delete(_ID.pack(namespace_id) + key, self._handles[_BLOCKS])

    def drop_blocks_of(self, namespace_id: int) -> None:
        """Drops all blocks of a namespace, at the cost of one."""
        self._batch.delete_range(_ID.pack(namespace_id), _ID.pack(namespace_id + 1), self._handles[_BLOCKS])

    def put_segment(self, number: int, segment: SegmentAt) -> None:
        self._batch.put(_ID.pack(number), _SEGMENT.pack(*segment), self._handles[_SEGMENTS])

    def drop_segment(self, number: int) -> None:
        self._batch.delete(_ID.pack(number), self._handles[_SEGMENTS])

    def put_namespace(self, digest: bytes, namespace: NamespaceAt) -> None:
        self._batch.put(digest, _ID.pack(namespace.id) + namespace.spec, self._handles[_NAMESPACES])

    def drop_namespace(self, digest: bytes) -> None:
        self._batch.delete(digest, self._handles[_NAMESPACES])

    @property
    def raw(self) -> WriteBatch:
        return self._batch


class Index:
    """Owns the database in a folder from construction to `close`. `cache_bytes` bounds what it keeps in memory of it.

    Raises IndexBroken.
    """

    def __init__(self, path: Path, *, cache_bytes: int) -> None:
        self.path = path
        try:
            cache = Cache(cache_bytes)
            self._db = Rdict(str(path), _options(cache), {name: _options(cache) for name in _FAMILIES})
            self._families = {name: self._db.get_column_family(name) for name in _FAMILIES}
            self._handles = {name: self._db.get_column_family_handle(name) for name in _FAMILIES}
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise IndexBroken(f"{path}: {error}") from None
        self._durably = WriteOptions()
        self._durably.sync = True

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

    def blocks(self) -> Iterator[tuple[int, bytes, Located]]:
        """Yields (namespace id, key, place) of every block: for checks, not for the data path. Raises IndexBroken."""
        for k, v in self._items(_BLOCKS):
            yield _ID.unpack_from(k)[0], k[_ID.size :], Located.of_bytes(v)

    def change(self) -> Change:
        """Begins a change. Raises IndexBroken once closed."""
        if not self._families:
            raise IndexBroken("it is closed")
        return Change(WriteBatch(raw_mode=True), self._handles)

    def apply(self, change: Change) -> None:
        """Makes a change durable, or nothing of it. Blocks. Raises IndexBroken."""
        try:
            self._db.write(change.raw, self._durably)
        except Exception as error:  # noqa: BLE001 - likewise
            raise IndexBroken(f"a change failed: {error}") from None

    def close(self) -> None:
        """Gives the folder back. Idempotent."""
        families, self._families = self._families, {}
        self._handles.clear()
        for family in families.values():
            family.close()
        if families:
            self._db.close()

    def _items(self, family: str) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from self._families[family].items()
        except Exception as error:  # noqa: BLE001 - likewise
            raise IndexBroken(f"reading {family} failed: {error}") from None


def _options(cache: Cache) -> Options:
    options, table = Options(raw_mode=True), BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_bloom_filter(_BLOOM_BITS, block_based=False)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options.set_block_based_table_factory(table)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())  # Keys are hashes.
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_total_wal_size(_LOG_BYTES)
    options.set_max_open_files(_OPEN_FILES)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    return options
