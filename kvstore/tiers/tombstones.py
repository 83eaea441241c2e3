"""What was deleted from the warm tier, in a log beside the segments, for an index that is made anew from their tables.

Rules
- A record is durable before the index forgets the block, so that no failure brings back what was deleted.
- A record speaks of all segments before a place, and of its own up to there: what is written behind it in the same
  segment stays. Once all of those segments are gone it says nothing any more.
- A torn last record was never acknowledged, and is dropped.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.tiers.device import sync_names
from kvstore_wire.limits import DIGEST_BYTES, MAX_KEY_BYTES

WHOLE = (1 << 32) - 1  # Behind the last block of every segment.
_RECORD = struct.Struct(f"<QIB{DIGEST_BYTES}s{MAX_KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + _CHECKSUM.size


class Tombstone(NamedTuple):
    """A block, or with an empty key all blocks of a namespace, gone from segments before `sequence`, and from that one
    where it begins before `end`, in blocks of the device."""

    sequence: int
    digest: bytes
    key: bytes = b""
    end: int = WHOLE

    def to_bytes(self) -> bytes:
        raw = _RECORD.pack(self.sequence, self.end, len(self.key), self.digest, self.key)
        return raw + _CHECKSUM.pack(xxh3_64_intdigest(raw))


class Tombstones:
    """Owns the log from construction to `close`. Raises OSError. Not thread-safe.

    `damaged_count`: records that could not be read; what they said is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_torn = False  # Something lies behind the last record, and cannot be cut off.
        sync_names(path.parent)  # Without its name the log could be gone after a loss of power.
        self.damaged_count = 0
        self._size = os.fstat(self._fd).st_size
        torn = self._size % RECORD_BYTES
        if torn:
            self._size -= torn
            os.ftruncate(self._fd, self._size)

    @property
    def count(self) -> int:
        return self._size // RECORD_BYTES

    def add(self, tombstones: Iterable[Tombstone]) -> None:
        """Adds records; they are durable when this returns. Raises OSError: then none of them counts."""
        if self._is_torn:
            raise OSError(errno.EIO, "the log of what was deleted is torn")
        raw = b"".join([t.to_bytes() for t in tombstones])
        try:
            written = os.write(self._fd, raw)
            if written < len(raw):
                raise OSError(errno.ENOSPC, "the log of what was deleted is full")
            os.fdatasync(self._fd)
        except OSError:
            self._is_torn = True
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
                self._is_torn = False
            raise
        self._size += len(raw)

    def read(self) -> Iterator[Tombstone]:
        """Yields the records, the oldest first. Raises OSError."""
        self.damaged_count = 0
        for at in range(0, self._size, RECORD_BYTES):
            raw = os.pread(self._fd, RECORD_BYTES, at)
            body = raw[: _RECORD.size]
            sum_ok = len(raw) == RECORD_BYTES and _CHECKSUM.unpack(raw[_RECORD.size :])[0] == xxh3_64_intdigest(body)
            nothing = (0, 0, MAX_KEY_BYTES + 1, b"", b"")
            sequence, end, key_length, digest, key = _RECORD.unpack(body) if sum_ok else nothing
            if key_length > MAX_KEY_BYTES:
                self.damaged_count += 1
            else:
                yield Tombstone(sequence, digest, key[:key_length], end)

    def forget_below(self, sequence: int) -> None:
        """Drops the records that speak only of segments before `sequence`. Raises OSError: then all stay."""
        kept = [t for t in self.read() if t.sequence >= sequence]
        if len(kept) == self.count:
            return
        new = self._path.with_name(f".new-{self._path.name}")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        raw = b"".join([t.to_bytes() for t in kept])
        try:
            if os.write(fd, raw) < len(raw):
                raise OSError(errno.ENOSPC, "no room to rewrite the log of what was deleted")
            os.fsync(fd)
            os.replace(new, self._path)
        except OSError:
            os.close(fd)
            with suppress(OSError):
                os.unlink(new)
            raise
        os.close(self._fd)
        self._fd, self._size = fd, len(raw)
        self._is_torn = True  # Until it is known that this is the log that the next start finds.
        sync_names(self._path.parent)
        self._is_torn = False

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Graveyard:
    """Tells of an entry whether it was deleted. `last_sequence`: the highest that a record speaks of, 0 for none."""

    def __init__(self, tombstones: Iterable[Tombstone]) -> None:
        self._last: dict[tuple[bytes, bytes], tuple[int, int]] = {}
        self.last_sequence = 0
        for t in tombstones:
            place = (t.digest, t.key)
            self._last[place] = max((t.sequence, t.end), self._last.get(place, (0, 0)))
            self.last_sequence = max(self.last_sequence, t.sequence)

    def __bool__(self) -> bool:
        return bool(self._last)

    def has(self, digest: bytes, key: bytes, sequence: int, start: int = 0) -> bool:
        """Whether a block that begins there, `start` in blocks of the device, was deleted since it was written."""
        last, here = self._last, (sequence, start)
        return here < last.get((digest, key), (0, 0)) or here < last.get((digest, b""), (0, 0))
