"""How large the shard is that a replay starts, and the flags that make it so."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.replay.plan import Plan

SLOT_UNIT_BYTES = 4096
MIN_CAPACITY_BYTES = 1 << 20
MIN_PAGE_BYTES, MAX_PAGE_BYTES = 64 << 10, 64 << 20
PAGES = 4096  # About so many at most, where the part allows it.
MIN_CALL_BYTES, MAX_CALL_BYTES = 1 << 30, 64 << 30
MIN_CALL_BLOCKS, MAX_CALL_BLOCKS = 4096, 65536


class SizingError(ValueError):
    """The shard asked for cannot be. The message names the flag."""


@dataclass(frozen=True)
class ShardSize:
    """Capacity of a shard in whole slots of one size."""

    slot_bytes: int
    capacity_blocks: int

    @property
    def capacity_bytes(self) -> int:
        return self.slot_bytes * self.capacity_blocks


def slot_bytes(part_bytes: int) -> int:
    """Returns the room that a part takes: rounded up to 4 KiB."""
    return -(-part_bytes // SLOT_UNIT_BYTES) * SLOT_UNIT_BYTES


def size_by_share(share: float, *, distinct_blocks: int, part_bytes: int) -> ShardSize:
    """Returns the shard that holds a share of a trace's distinct blocks. Raises SizingError."""
    return _checked(ShardSize(slot_bytes(part_bytes), round(share * distinct_blocks)), f"{100 * share:g}%")


def size_by_bytes(capacity_bytes: int, *, part_bytes: int) -> ShardSize:
    """Returns the shard of at most this size in whole slots. Raises SizingError."""
    slot = slot_bytes(part_bytes)
    return _checked(ShardSize(slot, capacity_bytes // slot), f"{capacity_bytes} bytes")


def server_flags(size: ShardSize, plan: Plan) -> list[str]:
    """Returns the flags of `kvstore serve` for a shard of this size that takes every request in one call."""
    page_bytes = _page_bytes(size)
    call_bytes = min(MAX_CALL_BYTES, max(MIN_CALL_BYTES, plan.longest_blocks * size.slot_bytes))
    call_blocks = min(MAX_CALL_BLOCKS, max(MIN_CALL_BLOCKS, plan.longest_blocks))
    options = {
        "server.listen": "127.0.0.1:0",
        "server.admin_listen": "127.0.0.1:0",
        "bulk.listen": "127.0.0.1:0",
        "server.drain_timeout": "0s",
        "server.log_level": "warning",
        "hot.capacity": size.capacity_bytes,
        "hot.page": page_bytes,
        "limits.max_part": size.slot_bytes,
        "limits.max_call_bytes": call_bytes,
        "limits.max_blocks_per_call": call_blocks,
    }
    return [item for key, value in options.items() for item in (f"--{key}", str(value))]


def _page_bytes(size: ShardSize) -> int:
    """Small pages, so that a page that another size class takes is a small loss."""
    fair = power_of_two(-(-size.capacity_bytes // PAGES))
    return min(MAX_PAGE_BYTES, max(MIN_PAGE_BYTES, power_of_two(size.slot_bytes), fair))


def power_of_two(number: int) -> int:
    """Returns the smallest one that is at least this."""
    return 1 << max(0, number - 1).bit_length()


def _checked(size: ShardSize, asked: str) -> ShardSize:
    if size.slot_bytes > MAX_PAGE_BYTES:
        raise SizingError(f"--part-size: is {size.slot_bytes} bytes, above {MAX_PAGE_BYTES}")
    smallest_bytes = max(MIN_CAPACITY_BYTES, 2 * size.slot_bytes)
    if size.capacity_bytes < smallest_bytes:
        larger = slot_bytes(-(-smallest_bytes // max(2, size.capacity_blocks))) // 1024
        raise SizingError(
            f"--capacity: {asked} is {size.capacity_blocks} blocks of {size.slot_bytes} bytes, less than the smallest "
            f"server of {smallest_bytes} bytes: give more, or --part-size {larger}KiB"
        )
    return size
