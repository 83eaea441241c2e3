"""Strided reads: which bytes of a part a Get with ranges sends, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import types_pb2 as types

_LONG_RUN_BYTES = 4096  # From here on a view for each run costs less than gathering runs into one buffer.


def checked(ranges: Collection[types.Range], lengths: Sequence[int]) -> int:
    """Returns how many bytes the ranges take of each part. Raises InvalidArgument unless all lie within every part."""
    if len(ranges) > contract.MAX_RANGES:
        raise InvalidArgument(f"{len(ranges)} ranges", field="ranges", limit=f"{contract.MAX_RANGES}")
    shortest = min(lengths, default=None)
    total = 0
    for i, r in enumerate(ranges):
        if not r.length or not r.count:
            raise InvalidArgument("names no bytes", field=f"ranges[{i}]", limit="length and count of at least 1")
        if r.count > 1 and r.stride < r.length:
            limit = f"at least {r.length}, the length"
            raise InvalidArgument(f"is {r.stride}", field=f"ranges[{i}].stride", limit=limit)
        end = r.offset + (r.count - 1) * r.stride + r.length
        if shortest is not None and end > shortest:
            raise InvalidArgument(f"ends at {end}", field=f"ranges[{i}]", limit=f"{shortest} bytes, the shortest part")
        total += r.count * r.length
    return total


def pieces(part: memoryview, ranges: Collection[types.Range], most: int) -> Iterator[memoryview]:
    """Yields what the ranges take of one part, in pieces of at most `most` bytes."""
    for r in ranges:
        if r.length >= _LONG_RUN_BYTES or r.count == 1 or r.length > most:
            for start in range(r.offset, r.offset + r.count * (r.stride or r.length), r.stride or r.length):
                for at in range(start, start + r.length, most):
                    yield part[at : min(at + most, start + r.length)]
        else:
            yield from _gathered(part, r, most)


def _gathered(part: memoryview, r: types.Range, most: int) -> Iterator[memoryview]:
    """Copies short runs together: a view for each would cost more than the bytes."""
    source = np.frombuffer(part, np.uint8)
    runs = max(1, most // r.length)
    for first in range(0, r.count, runs):
        count = min(runs, r.count - first)
        start = r.offset + first * r.stride
        grid = np.lib.stride_tricks.as_strided(source[start:], (count, r.length), (r.stride, 1), writeable=False)
        yield np.ascontiguousarray(grid).reshape(-1).data
