"""Cutting a batch into pieces that a shard's limits allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore_wire.errors import InvalidArgument


def runs(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields consecutive half-open ranges that cover 0:count, each of at most `most`."""
    for first in range(0, count, most):
        yield first, min(first + most, count)


def sized_runs(sizes: Sequence[int], *, most: int, most_bytes: int, field: str) -> Iterator[tuple[int, int]]:
    """Yields consecutive half-open ranges of at most `most` items and `most_bytes` bytes together.

    Raises InvalidArgument (field) if one item alone is larger.
    """
    first = total = 0
    for i, size in enumerate(sizes):
        if size > most_bytes:
            raise InvalidArgument(f"block {i} has {size} bytes", field=field, limit=f"{most_bytes} bytes a call")
        if i > first and (i - first == most or total + size > most_bytes):
            yield first, i
            first, total = i, 0
        total += size
    if first < len(sizes):
        yield first, len(sizes)


def check_most(field: str, value: int, most: int) -> None:
    """Raises InvalidArgument (field, limit) if `value` is above `most`."""
    if value > most:
        raise InvalidArgument(
            f"is {value}" if field.endswith("_ms") else f"{value} given", field=field, limit=f"{most}"
        )
