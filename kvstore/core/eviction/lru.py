"""Tail-first LRU: the block whose last request is longest ago goes first; within one request the deepest goes first.

Because a request's blocks enter tail first, a chain's head is always younger than its tail, so that a stored prefix
has no holes and no child index is needed. Source: measured on public traces, head-first order loses up to 3.3 points
of prefix hit rate.
"""

from __future__ import annotations

from typing import ClassVar

from kvstore.core.columns import BlockColumns, Ids
from kvstore.core.eviction.base import BlockQueue, TouchHint
from kvstore.core.few import Rows


class TailFirstLru:
    """EvictionPolicy by recency alone; hints are not used."""

    __slots__ = ("_columns", "_queue")
    takes_hints: ClassVar[bool] = False

    def __init__(self, columns: BlockColumns) -> None:
        self._columns = columns
        self._queue = BlockQueue(columns.queue_place)

    def __len__(self) -> int:
        return len(self._queue)

    def touch(self, blocks: Rows, now: float, hint: TouchHint, *, asked: bool = True) -> None:
        if isinstance(blocks, list):
            touched = self._columns.cell.touched
            for block in blocks:
                touched[block] = now
        else:
            self._columns.touched[blocks] = now
        self._queue.append(blocks)

    def over(self, blocks: Ids, session_tag: int) -> int:
        return 0

    def remove(self, block: int) -> None:
        self._queue.remove(block)

    def take(self, count: int) -> Ids:
        return self._queue.take(count, self._columns.holds)

    def peek(self, count: int) -> Ids:
        return self._queue.peek(count, self._columns.holds)

    def order(self) -> Ids:
        return self._queue.order()

    def unpark(self, blocks: Ids, now: float) -> None:
        parked = self._queue.unpark(blocks)
        self._columns.touched[parked] = now  # They stand at the young end, and times follow the order.

    def idle_since(self) -> float | None:
        oldest = self._queue.oldest(self._columns.holds)
        return None if oldest is None else float(self._columns.touched[oldest])
