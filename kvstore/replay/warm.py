"""The warm tier of the server that a replay starts: how large, in which segments, and where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.config import format_size
from kvstore.replay.sizing import SizingError, power_of_two, slot_bytes

# A segment as docs/storage.md has it: multiples of 4 KiB; beside payload a table, header, namespaces and footer.
BLOCK_BYTES = 4096
ENTRIES_PER_BLOCK = 31
FRAME_BLOCKS = 3
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 1 << 20, 256 << 20
MIN_SEGMENTS = 64  # One is always free or being written, and a whole one is given up: small beside the capacity.
MIN_BUDGET_BYTES, MAX_BUDGET_BYTES = 64 << 10, 64 << 30  # A second.


@dataclass(frozen=True)
class WarmSize:
    """Capacity of a warm tier in whole segments, for parts that take slots of one size."""

    slot_bytes: int
    segment_bytes: int
    segment_count: int

    @property
    def capacity_bytes(self) -> int:
        return self.segment_bytes * self.segment_count

    @property
    def blocks_per_segment(self) -> int:
        """Parts that fit in a segment beside what describes them."""
        room = self.segment_bytes // BLOCK_BYTES - FRAME_BLOCKS
        return ENTRIES_PER_BLOCK * room // (ENTRIES_PER_BLOCK * (self.slot_bytes // BLOCK_BYTES) + 1)

    @property
    def capacity_blocks(self) -> int:
        return self.blocks_per_segment * self.segment_count


@dataclass(frozen=True)
class WarmOrder:
    """The warm tier that a server of one's own is to have. `path` is None for a temporary folder."""

    size: WarmSize
    path: Path | None = None
    budget_bytes_s: int | None = None

    @property
    def place(self) -> str:
        """Where it lies, for people."""
        return f"a temporary folder in {temporary_parent()}" if self.path is None else str(self.path)


def warm_by_share(share: float, *, distinct_blocks: int, part_bytes: int) -> WarmSize:
    """Returns the tier whose segments hold a share of a trace's distinct blocks when all are full.

    Raises SizingError.
    """
    slot, blocks = slot_bytes(part_bytes), round(share * distinct_blocks)
    segment = WarmSize(slot, _segment_bytes(blocks * slot), 1)
    count = -(-blocks // max(1, segment.blocks_per_segment))
    size = WarmSize(slot, segment.segment_bytes, count)
    return _checked(size, f"{100 * share:g}% is {blocks} blocks of {slot} bytes")


def warm_by_bytes(capacity_bytes: int, *, part_bytes: int) -> WarmSize:
    """Returns the tier of at most this size in whole segments. Raises SizingError."""
    segment_bytes = _segment_bytes(capacity_bytes)
    size = WarmSize(slot_bytes(part_bytes), segment_bytes, capacity_bytes // segment_bytes)
    return _checked(size, f"is {capacity_bytes} bytes")


def temporary_parent() -> Path:
    """Where temporary folders are made: $TMPDIR, else the working directory; /tmp is often memory, and no disk."""
    return Path(os.environ.get("TMPDIR") or ".").absolute()


@contextmanager
def warm_flags(order: WarmOrder | None) -> Iterator[list[str]]:
    """Gives the flags of `kvstore serve`, none for None; a temporary folder is removed on leaving. Raises OSError."""
    if order is None:
        yield []
    elif order.path is not None:
        yield _flags(order, order.path)
    else:
        with TemporaryDirectory(prefix="kvstore-replay-", dir=temporary_parent()) as folder:
            yield _flags(order, Path(folder))


def _flags(order: WarmOrder, folder: Path) -> list[str]:
    options = {
        "warm.path": folder,
        "warm.capacity": order.size.capacity_bytes,
        "warm.segment": order.size.segment_bytes,
        "warm.flush_timeout": "0s",  # No other replay asks for these keys.
    }
    if order.budget_bytes_s is not None:
        options["warm.write_budget"] = order.budget_bytes_s
    return [item for key, value in options.items() for item in (f"--{key}", str(value))]


def _segment_bytes(payload_bytes: int) -> int:
    """The largest of which there are enough."""
    fair = max(1, payload_bytes // MIN_SEGMENTS)
    return min(MAX_SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, 1 << (fair.bit_length() - 1)))


def _checked(size: WarmSize, asked: str) -> WarmSize:
    least_bytes = max(MIN_SEGMENT_BYTES, power_of_two(size.slot_bytes + (FRAME_BLOCKS + 1) * BLOCK_BYTES))
    if size.segment_bytes < least_bytes or size.segment_count < MIN_SEGMENTS:
        raise SizingError(
            f"--warm: {asked}, less than the smallest warm tier of {format_size(MIN_SEGMENTS * least_bytes)} in "
            f"{MIN_SEGMENTS} segments: give more, or another --part-size"
        )
    return size
