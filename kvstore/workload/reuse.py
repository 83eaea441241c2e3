"""What a cache could reach on a trace, by plain replay: the figures a store's own replay is held against.

One request: all its blocks are looked up and counted, then they are touched or inserted, last block first, so that
eviction takes leaves before their parents.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple

from kvstore.workload.trace import Trace


class HitRates(NamedTuple):
    """Shares of all block look-ups, 0..1.

    block: the block is resident. prefix: it and every block before it in the request are; only this saves prefill.
    """

    block: float
    prefix: float


def infinite_hit_rate(trace: Trace) -> float:
    """Return the hit rate of a cache that never evicts: the ceiling for every policy. Block and prefix are equal."""
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        ids = request.block_ids.tolist()
        hits += sum(block_id in seen for block_id in ids)
        seen.update(ids)
    return hits / max(1, trace.accesses())


def tail_first_lru(trace: Trace, capacity_blocks: int) -> HitRates:
    """Return the hit rates of a least-recently-used cache whose touches are applied tail first.

    Raises: ValueError if capacity_blocks is below 1.
    """
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks: is {capacity_blocks}, below 1")
    cache: OrderedDict[int, None] = OrderedDict()
    block_hits = prefix_hits = 0
    for request in trace.requests:
        ids: list[int] = request.block_ids.tolist()
        found = [block_id in cache for block_id in ids]
        block_hits += sum(found)
        prefix_hits += sum(takewhile(bool, found))
        _touch_tail_first(cache, ids, capacity_blocks)
    accesses = max(1, trace.accesses())
    return HitRates(block=block_hits / accesses, prefix=prefix_hits / accesses)


def _touch_tail_first(cache: OrderedDict[int, None], ids: list[int], capacity_blocks: int) -> None:
    for block_id in reversed(ids):
        if block_id in cache:
            cache.move_to_end(block_id)
            continue
        if len(cache) >= capacity_blocks:
            cache.popitem(last=False)
        cache[block_id] = None
