"""Flat columns: what the shard knows of each block and part, one numpy array a fact.

Arrays are made at their full length at start and touched lazily by the kernel, so that no growth ever copies them;
resident memory follows the highest number of blocks stored at once. Identifiers are plain indexes and are reused only
after the record was cleared.

Each column is there twice over the same memory: as an array for many rows at once, and under `cell` as a memoryview for
one row, which reads a number as an int in a fifth of the array's time.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]

# States of a part. A part is visible to readers in PRESENT only.
ABSENT, RESERVED, PRESENT = 0, 1, 2


class Places:
    """A column of places that many queues share, and the numbers that nobody has had yet.

    No two queues ever use one number, so that a row which moved to another queue is known to be stale in the first.
    """

    __slots__ = ("_next", "at", "cell")

    def __init__(self, rows: int) -> None:
        self.at: Longs = np.zeros(rows, np.int64)  # > 0: in a queue; 0: in none.
        self.cell = self.at.data
        self._next = 1

    def take(self, count: int) -> int:
        """Returns the first of `count` numbers that are the caller's alone."""
        first, self._next = self._next, self._next + count
        return first


class BlockCells:
    """The columns of blocks, row by row."""

    __slots__ = (
        "asked",
        "created",
        "disk_segment",
        "disk_sequence",
        "disk_start",
        "doomed",
        "entered",
        "first_part",
        "holds",
        "kind",
        "namespace",
        "present",
        "reserved",
        "reuses",
        "session_tag",
        "shared",
        "slot_units",
        "touched",
        "touches",
        "writing",
    )

    def __init__(self, columns: BlockColumns) -> None:
        self.namespace = columns.namespace.data
        self.first_part = columns.first_part.data
        self.slot_units = columns.slot_units.data
        self.present = columns.present.data
        self.reserved = columns.reserved.data
        self.holds = columns.holds.data
        self.reuses = columns.reuses.data
        self.touches = columns.touches.data
        self.asked = columns.asked.data.cast("B").cast("d")
        self.kind = columns.kind.data
        self.session_tag = columns.session_tag.data
        self.shared = columns.shared.data.cast("B").cast("?")
        self.disk_segment = columns.disk_segment.data
        self.disk_sequence = columns.disk_sequence.data
        self.disk_start = columns.disk_start.data
        self.doomed = columns.doomed.data.cast("B").cast("?")
        self.writing = columns.writing.data.cast("B").cast("?")
        self.entered = columns.entered.data.cast("B").cast("d")
        self.created = columns.created.data.cast("B").cast("d")
        self.touched = columns.touched.data.cast("B").cast("d")


class BlockColumns:
    """One row a block. `key` is None where the row is free."""

    def __init__(self, rows: int) -> None:
        self.key: list[bytes | None] = []  # Grows with use; shares its bytes with the namespace's index.
        self.namespace: Ids = np.zeros(rows, np.int32)
        self.first_part: Ids = np.zeros(rows, np.int32)
        self.slot_units: Ids = np.zeros(rows, np.int32)  # Slot size of its parts, in SLOT_UNIT_BYTES.
        self.present: Ids = np.zeros(rows, np.int32)  # Parts in state PRESENT.
        self.reserved: Ids = np.zeros(rows, np.int32)  # Parts in state RESERVED.
        self.holds: Ids = np.zeros(rows, np.int32)  # Leases that name it; > 0 = neither evicted nor moved.
        self.doomed: Flags = np.zeros(rows, np.bool_)  # Unlinked; freed when the last hold ends.
        self.reuses: Ids = np.zeros(rows, np.int32)  # Requests that touched it after the one that made it.
        # Owned by the eviction policies.
        self.touches: Bytes = np.zeros(rows, np.uint8)
        self.asked: Floats = np.zeros(rows, np.float64)
        self.kind: Bytes = np.zeros(rows, np.uint8)
        self.session_tag: Words = np.zeros(rows, np.uint64)
        self.shared: Flags = np.zeros(rows, np.bool_)
        self.writing: Flags = np.zeros(rows, np.bool_)  # Its slots are being written to disk; they stay until then.
        # Where its copy on disk lies, written from just the parts that are present; sequence 0 = there is none.
        self.disk_segment: Ids = np.zeros(rows, np.int32)
        self.disk_sequence: Longs = np.zeros(rows, np.int64)
        self.disk_start: Longs = np.zeros(rows, np.int64)
        self.entered: Floats = np.zeros(rows, np.float64)  # When it came into memory, again if it had left it.
        self.created: Floats = np.zeros(rows, np.float64)
        self.touched: Floats = np.zeros(rows, np.float64)
        self.queue_place = Places(rows)  # Owned by the eviction policies.
        self.ttl_place = Places(rows)  # Owned by the namespaces' expiry queues.
        self.cell = BlockCells(self)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.key) - len(self._free)

    def add(self, key: bytes) -> int | None:
        """Takes a free row for `key`, None if there is none; its columns are as `remove` left them (zero)."""
        if self._free:
            row = self._free.pop()
            self.key[row] = key
            return row
        if len(self.key) >= len(self.holds):
            return None
        self.key.append(key)
        return len(self.key) - 1

    def remove(self, row: int) -> None:
        """Clears a row and makes it free."""
        self.key[row] = None
        cell = self.cell
        cell.present[row] = cell.reserved[row] = cell.holds[row] = cell.reuses[row] = cell.disk_sequence[row] = 0
        self.queue_place.cell[row] = self.ttl_place.cell[row] = 0
        cell.session_tag[row] = 0
        cell.doomed[row] = cell.writing[row] = cell.shared[row] = False
        self._free.append(row)


class PartCells:
    """The columns of parts, row by row."""

    __slots__ = ("block", "checksum", "length", "offset", "state")

    def __init__(self, columns: PartColumns) -> None:
        self.state = columns.state.data
        self.offset = columns.offset.data
        self.length = columns.length.data
        self.checksum = columns.checksum.data
        self.block = columns.block.data


class PartColumns:
    """One row a part; the parts of one block are neighbours, so a block of n parts takes a run of n rows."""

    def __init__(self, rows: int) -> None:
        self.state: Bytes = np.zeros(rows, np.uint8)
        self.offset: Longs = np.zeros(rows, np.int64)
        self.length: Longs = np.zeros(rows, np.int64)
        self.checksum: Words = np.zeros(rows, np.uint64)
        self.block: Ids = np.zeros(rows, np.int32)
        self.cell = PartCells(self)
        self._used = 0
        self._free: dict[int, list[int]] = {}  # Length of a run -> first rows.

    @property
    def capacity(self) -> int:
        return len(self.state)

    def add(self, count: int, block: int) -> int | None:
        """Takes `count` neighbouring rows in state ABSENT; None if no such run is free."""
        runs = self._free.get(count)
        if not runs and self._used + count > self.capacity:
            self._coalesce(count)
            runs = self._free.get(count)
        if runs:
            first = runs.pop()
        elif self._used + count <= self.capacity:
            first = self._used
            self._used += count
        else:
            return None
        self.block[first : first + count] = block
        return first

    def remove(self, first: int, count: int) -> None:
        """Gives neighbouring rows back."""
        self.state[first : first + count] = ABSENT
        self._free.setdefault(count, []).append(first)

    def _coalesce(self, count: int) -> None:
        """Joins free neighbours and cuts one run of `count` rows out of the first that is long enough."""
        pieces = sorted((first, size) for size, firsts in self._free.items() for first in firsts)
        joined: list[list[int]] = []
        for first, size in pieces:
            if joined and joined[-1][0] + joined[-1][1] == first:
                joined[-1][1] += size
            else:
                joined.append([first, size])
        if joined and sum(joined[-1]) == self._used:
            self._used = joined.pop()[0]
        self._free = {}
        cut = next((run for run in joined if run[1] > count), None)
        if cut is not None and not any(run[1] == count for run in joined):
            self._free[count] = [cut[0]]
            cut[0], cut[1] = cut[0] + count, cut[1] - count
        for first, size in joined:
            self._free.setdefault(size, []).append(first)
