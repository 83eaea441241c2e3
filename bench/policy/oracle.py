"""What no policy can exceed: the block goes whose next use is furthest away, the deeper one of two in one request.

It knows the future, and need not keep what it was just given.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from bench.policy.play import Played
from kvstore.workload.reuse import HitRates

_NEVER = 1 << 40


def furthest_next_use(trace: Played, capacity_blocks: int) -> HitRates:
    """Returns the hit rates of Belady's rule."""
    upcoming = _next_uses(trace)
    kept: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    block_hits = prefix_hits = 0
    for rows, uses in zip(trace.rows, upcoming, strict=True):
        blocks: list[int] = rows.tolist()
        found = [block in kept for block in blocks]
        block_hits += sum(found)
        prefix_hits += found.index(False) if False in found else len(found)
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            kept[block] = use
            heappush(order, (-use, -depth, block))
        while len(kept) > capacity_blocks:
            use, _, block = heappop(order)
            if kept.get(block) == -use:
                del kept[block]
    return HitRates(block_hits / max(1, trace.accesses), prefix_hits / max(1, trace.accesses))


def _next_uses(trace: Played) -> list[list[int]]:
    """Returns, for each block of each request, the number of the request that uses it next."""
    following = np.full(trace.blocks, _NEVER, np.int64)
    found: list[list[int]] = []
    for number in range(len(trace.rows) - 1, -1, -1):
        rows = trace.rows[number]
        found.append(following[rows].tolist())
        following[rows] = number
    return found[::-1]
