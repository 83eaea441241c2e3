"""Memory of a worker: one buffer a request under way, cut into parts, filled and checked in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.workload.payload import check_payload, fill_payload


class PartBuffer:
    """Room for the parts of the longest request. Memory is taken when it is first written to."""

    def __init__(self, *, part_bytes: int, part_count: int) -> None:
        memory = np.empty(part_bytes * part_count, np.uint8).data
        self.parts = [memory[i * part_bytes : (i + 1) * part_bytes] for i in range(part_count)]

    def fill(self, keys: Sequence[bytes]) -> list[memoryview]:
        """Writes the payload of each key and returns the parts that hold them."""
        filled = self.parts[: len(keys)]
        for key, part in zip(keys, filled, strict=True):
            fill_payload(key, 0, part)
        return filled

    def wrong_bytes(self, keys: Sequence[bytes], first: int = 0) -> int:
        """Returns how many bytes of the parts from `first` on differ from the payload of these keys."""
        parts = zip(keys, self.parts[first : first + len(keys)], strict=True)
        return sum(_difference(key, part) for key, part in parts if not check_payload(key, 0, part))


class BufferPool:
    """Hands out buffers, and makes one where all are in use."""

    def __init__(self, *, part_bytes: int, part_count: int) -> None:
        self._part_bytes, self._part_count = part_bytes, part_count
        self._free: list[PartBuffer] = []

    @contextmanager
    def lend(self) -> Iterator[PartBuffer]:
        """Lends one buffer; what it held before is left in it."""
        buffer = self._free.pop() if self._free else self._make()
        try:
            yield buffer
        finally:
            self._free.append(buffer)

    def _make(self) -> PartBuffer:
        return PartBuffer(part_bytes=self._part_bytes, part_count=self._part_count)


def _difference(key: bytes, part: memoryview) -> int:
    wanted = np.empty(len(part), np.uint8)
    fill_payload(key, 0, wanted)
    return int(np.count_nonzero(wanted != np.frombuffer(part, np.uint8)))
