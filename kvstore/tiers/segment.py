"""The format of a segment: a file of fixed size that holds many parts (docs/storage.md, byte by byte). Pure: no I/O.

Rules
- Everything lies at multiples of `BLOCK_BYTES`, as O_DIRECT asks. What is not payload has a checksum in each block, so
  that damage costs what lies in that block and nothing else.
- A segment is *sealed* when its last block, the footer, bears the sequence number of its header. What is not sealed
  holds nothing: a segment is written once from its first block to its last, and lives again under another number.
- The table alone says what a sealed segment holds, so that an index can always be made anew.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore_wire.limits import DIGEST_BYTES, MAX_KEY_BYTES, MIN_KEY_BYTES

BLOCK_BYTES = 4096  # The largest sector of drives in use, and the page of a small-page kernel.
VERSION = 1
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 1 << 20, 1 << 34
STORE_ID_BYTES, KEY_ID_BYTES, SALT_BYTES, TAG_BYTES = 16, 16, 16, 16
UNSEALED = bytes(KEY_ID_BYTES)
ENTRY_SEALED = 1  # The flag of an entry whose part is sealed.
HEADER_MAGIC, FOOTER_MAGIC = b"KVSEGHDR", b"KVSEGFTR"
NAMESPACE_MAGIC, TABLE_MAGIC = b"KVSEGNSP", b"KVSEGTBL"
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct("<8sII16sQQQQ16s16s")
_FOOTER = struct.Struct("<8sII16sQQQQQQ")
_META = struct.Struct("<8sQII")  # Magic, sequence, index among its kind, how much of the block is used.
_META_ROOM = BLOCK_BYTES - _META.size - _CHECKSUM.size
_NAMESPACE = struct.Struct(f"<I{DIGEST_BYTES}s")

# One part. `offset` in blocks, `length` in bytes; `created` and `expires` in seconds of the wall clock, 0 = never.
ENTRY = np.dtype(
    {
        "names": (
            *("key_length", "flags", "part", "namespace", "offset", "length", "checksum"),
            *("created", "expires", "tag", "reserved", "key"),
        ),
        "formats": (
            "u1",
            "u1",
            "<u2",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "<f8",
            "<f8",
            f"V{TAG_BYTES}",
            "V8",
            f"V{MAX_KEY_BYTES}",
        ),
        "offsets": (0, 1, 2, 4, 8, 12, 16, 24, 32, 40, 56, 64),
        "itemsize": 128,
    }
)
ENTRIES_PER_BLOCK = _META_ROOM // ENTRY.itemsize
MAX_PART_BYTES = (1 << 32) - 1  # What an entry can say.
Entries: TypeAlias = "npt.NDArray[np.void]"


class BadSegment(Exception):
    """A block is not what it must be. `field` names what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


@dataclass(frozen=True)
class Header:
    """The first block. `sequence` is given once in the life of a store; the latest life of a segment has the highest.

    `key_id` names the key that payload is sealed with, `salt` is random for each life; zeros where it is not sealed.
    """

    store_id: bytes
    number: int
    sequence: int
    size_bytes: int
    created_ns: int
    key_id: bytes = UNSEALED
    salt: bytes = bytes(SALT_BYTES)

    def to_block(self) -> bytes:
        raw = _HEADER.pack(
            *(HEADER_MAGIC, VERSION, 0, self.store_id, self.number, self.sequence, self.size_bytes),
            *(self.created_ns, self.key_id, self.salt),
        )
        return _sealed_block(raw)

    @staticmethod
    def of_block(raw: bytes | memoryview) -> Header:
        """Raises BadSegment."""
        magic, version, flags, store_id, number, sequence, size, created_ns, key_id, salt = _HEADER.unpack(
            _checked(raw)[: _HEADER.size]
        )
        _check_kind("header", magic, HEADER_MAGIC, version, flags)
        if size % BLOCK_BYTES or not MIN_SEGMENT_BYTES <= size <= MAX_SEGMENT_BYTES:
            raise BadSegment("header.size", f"is {size}")
        return Header(store_id, number, sequence, size, created_ns, key_id, salt)


@dataclass(frozen=True)
class Footer:
    """The last block: where the table is. `payload_bytes` is where payload ends."""

    store_id: bytes
    number: int
    sequence: int
    namespace_blocks: int
    table_blocks: int
    entry_count: int
    payload_bytes: int
    sealed_ns: int

    def to_block(self) -> bytes:
        raw = _FOOTER.pack(
            *(FOOTER_MAGIC, VERSION, self.namespace_blocks, self.store_id, self.number, self.sequence),
            *(self.table_blocks, self.entry_count, self.payload_bytes, self.sealed_ns),
        )
        return _sealed_block(raw)

    @staticmethod
    def of_block(raw: bytes | memoryview) -> Footer:
        """Raises BadSegment."""
        magic, version, namespaces, store_id, number, sequence, tables, entries, payload, sealed_ns = _FOOTER.unpack(
            _checked(raw)[: _FOOTER.size]
        )
        _check_kind("footer", magic, FOOTER_MAGIC, version, 0)
        if entries > tables * ENTRIES_PER_BLOCK:
            raise BadSegment("footer.entries", f"are {entries} in {tables} blocks")
        return Footer(store_id, number, sequence, namespaces, tables, entries, payload, sealed_ns)

    def tables_at(self, size_bytes: int) -> int:
        """Returns where the namespaces begin; the table follows them, and this footer the table. Raises BadSegment."""
        start = size_bytes - (1 + self.table_blocks + self.namespace_blocks) * BLOCK_BYTES
        if not BLOCK_BYTES <= self.payload_bytes <= start:
            raise BadSegment("footer.payload", f"ends at {self.payload_bytes}, the table begins at {start}")
        return start


@dataclass(frozen=True)
class Described:
    """A namespace as a segment knows it: its digest, and the message that it is made from."""

    digest: bytes
    spec: bytes


def blocks_of(size_bytes: int) -> int:
    """Returns how many blocks so many bytes take."""
    return -(-size_bytes // BLOCK_BYTES)


class Layout:
    """Where the parts of one life of a segment go, and what its table will say of them."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes % BLOCK_BYTES or not MIN_SEGMENT_BYTES <= size_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"a segment of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.end_bytes = BLOCK_BYTES  # Of the payload so far.
        self.namespaces: list[Described] = []
        self._places: dict[bytes, int] = {}
        self._namespace_bytes = 0
        self._rows: list[Entries] = []
        self.entry_count = 0

    @property
    def is_empty(self) -> bool:
        return not self.entry_count

    def fits(self, lengths: Sequence[int], described: Described) -> bool:
        """Whether parts of one block, of these lengths in bytes, can be added."""
        more = 0 if described.digest in self._places else _NAMESPACE.size + len(described.spec)
        payload = sum(map(blocks_of, lengths))
        tables = -(-(self.entry_count + len(lengths)) // ENTRIES_PER_BLOCK)
        names = -(-(self._namespace_bytes + more) // _META_ROOM)
        return self.end_bytes + (payload + tables + names + 1) * BLOCK_BYTES <= self.size_bytes

    def offsets(self, lengths: Sequence[int]) -> list[int]:
        """Returns where parts of these lengths would go, in bytes."""
        sizes = [blocks_of(length) * BLOCK_BYTES for length in lengths]
        return [self.end_bytes + before for before in accumulate(sizes, initial=0)][:-1]

    def add(
        self,
        described: Described,
        key: bytes,
        *,
        parts: Sequence[int],
        lengths: Sequence[int],
        checksums: Sequence[int],
        created: float,
        expires: float = 0.0,
        tags: Sequence[bytes] = (),
    ) -> list[int]:
        """Places parts of one block, one after another; returns their offsets in bytes. Only what `fits`.

        `tags`: of each part, where they are sealed.
        """
        assert MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES
        rows = np.zeros(len(parts), ENTRY)
        rows["key_length"], rows["key"] = len(key), np.void(key.ljust(MAX_KEY_BYTES, b"\0"))
        rows["part"], rows["length"], rows["checksum"] = parts, lengths, np.array(checksums, np.uint64)
        rows["namespace"], rows["created"], rows["expires"] = self._place(described), created, expires
        if tags:
            rows["flags"], rows["tag"] = ENTRY_SEALED, np.frombuffer(b"".join(tags), f"V{TAG_BYTES}")
        offsets = self.offsets(lengths)
        self.end_bytes += sum(map(blocks_of, lengths)) * BLOCK_BYTES
        rows["offset"] = np.array(offsets, np.int64) // BLOCK_BYTES
        self._rows.append(rows)
        self.entry_count += len(rows)
        return offsets

    def entries(self) -> Entries:
        """Returns the table so far."""
        return np.concatenate(self._rows) if self._rows else np.zeros(0, ENTRY)

    def seal(self, header: Header, sealed_ns: int) -> tuple[int, bytes]:
        """Returns what ends a segment, namespaces, table and footer, and where it is to be written."""
        names = b"".join(_NAMESPACE.pack(len(d.spec), d.digest) + d.spec for d in self.namespaces)
        entries = self.entries()
        step = ENTRIES_PER_BLOCK
        pieces = [entries[at : at + step].tobytes() for at in range(0, len(entries), step)]
        name_blocks = list(_meta_blocks(NAMESPACE_MAGIC, header.sequence, _cut(names)))
        table_blocks = list(_meta_blocks(TABLE_MAGIC, header.sequence, pieces))
        footer = Footer(
            header.store_id,
            header.number,
            header.sequence,
            namespace_blocks=len(name_blocks),
            table_blocks=len(table_blocks),
            entry_count=len(entries),
            payload_bytes=self.end_bytes,
            sealed_ns=sealed_ns,
        )
        return footer.tables_at(self.size_bytes), b"".join([*name_blocks, *table_blocks, footer.to_block()])

    def _place(self, described: Described) -> int:
        place = self._places.get(described.digest)
        if place is None:
            place = self._places[described.digest] = len(self.namespaces)
            self.namespaces.append(described)
            self._namespace_bytes += _NAMESPACE.size + len(described.spec)
        return place


@dataclass(frozen=True)
class Table:
    """What a sealed segment says of itself. `damaged_blocks` of it could not be read, and what they said is lost."""

    namespaces: tuple[Described, ...]
    entries: Entries
    damaged_blocks: int


def read_table(raw: bytes | memoryview, footer: Footer, size_bytes: int) -> Table:
    """Reads what lies between the payload and the footer.

    Entries that cannot be right - of an unknown namespace, outside of the payload, a key of no length that keys have -
    are left out. So are all, where the list of namespaces is damaged: nobody could say whose they are.
    """
    names_end = footer.namespace_blocks * BLOCK_BYTES
    names, damaged = _read_meta(raw[:names_end], NAMESPACE_MAGIC, footer.sequence)
    pieces, lost = _read_meta(
        raw[names_end : names_end + footer.table_blocks * BLOCK_BYTES], TABLE_MAGIC, footer.sequence
    )
    if damaged:
        return Table((), np.zeros(0, ENTRY), damaged + lost)
    namespaces = tuple(_namespaces(b"".join(names)))
    whole = [piece for piece in pieces if len(piece) % ENTRY.itemsize == 0]
    entries = np.frombuffer(b"".join(whole), ENTRY)
    return Table(namespaces, entries[_plausible(entries, footer, len(namespaces))], lost + len(pieces) - len(whole))


def keys_of(entries: Entries) -> list[bytes]:
    """Returns the key of each entry."""
    raw, size = entries["key"].tobytes(), MAX_KEY_BYTES
    return [raw[i * size : i * size + n] for i, n in enumerate(entries["key_length"].tolist())]


def tags_of(entries: Entries) -> list[bytes]:
    """Returns the tag of each entry; none of those that are not sealed."""
    raw, size, flags = entries["tag"].tobytes(), TAG_BYTES, entries["flags"].tolist()
    return [raw[i * size : (i + 1) * size] if flag & ENTRY_SEALED else b"" for i, flag in enumerate(flags)]


def _plausible(entries: Entries, footer: Footer, namespace_count: int) -> npt.NDArray[np.bool_]:
    starts = entries["offset"].astype(np.int64) * BLOCK_BYTES
    lengths = entries["key_length"]
    right: npt.NDArray[np.bool_] = (
        (entries["namespace"] < namespace_count)
        & (starts >= BLOCK_BYTES)
        & (starts + entries["length"] <= footer.payload_bytes)
        & (lengths >= MIN_KEY_BYTES)
        & (lengths <= MAX_KEY_BYTES)
    )
    return right


def _namespaces(raw: bytes) -> Iterator[Described]:
    at = 0
    while at + _NAMESPACE.size <= len(raw):
        size, digest = _NAMESPACE.unpack_from(raw, at)
        at += _NAMESPACE.size
        yield Described(digest, raw[at : at + size])
        at += size


def _cut(raw: bytes) -> list[bytes]:
    return [raw[at : at + _META_ROOM] for at in range(0, len(raw), _META_ROOM)]


def _meta_blocks(magic: bytes, sequence: int, pieces: Iterable[bytes]) -> Iterator[bytes]:
    for index, piece in enumerate(pieces):
        yield _sealed_block(_META.pack(magic, sequence, index, len(piece)) + piece)


def _read_meta(raw: bytes | memoryview, magic: bytes, sequence: int) -> tuple[list[bytes], int]:
    """Returns what the blocks of one kind hold, and how many of them are damaged."""
    found, damaged = [], 0
    for index in range(len(raw) // BLOCK_BYTES):
        try:
            block = _checked(raw[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
        except BadSegment:
            damaged += 1
            continue
        size = _META.unpack_from(block)[3]
        if _META.unpack_from(block)[:3] != (magic, sequence, index) or size > _META_ROOM:
            damaged += 1
            continue
        found.append(bytes(block[_META.size : _META.size + size]))
    return found, damaged


def _sealed_block(raw: bytes) -> bytes:
    padded = raw.ljust(BLOCK_BYTES - _CHECKSUM.size, b"\0")
    return padded + _CHECKSUM.pack(xxh3_64_intdigest(padded))


def _checked(raw: bytes | memoryview) -> memoryview:
    """Returns a block without its checksum. Raises BadSegment."""
    block = memoryview(raw)
    if len(block) != BLOCK_BYTES:
        raise BadSegment("block", f"has {len(block)} bytes")
    body = block[: -_CHECKSUM.size]
    if xxh3_64_intdigest(body) != _CHECKSUM.unpack(block[-_CHECKSUM.size :])[0]:
        raise BadSegment("checksum", "does not match")
    return body


def _check_kind(name: str, magic: bytes, expected: bytes, version: int, flags: int) -> None:
    if magic != expected:
        raise BadSegment(f"{name}.magic", f"is {magic!r}")
    if version != VERSION:
        raise BadSegment(f"{name}.version", f"is {version}, this program knows {VERSION}")
    if flags:
        raise BadSegment(f"{name}.flags", f"are {flags:#x}, this program knows none")
