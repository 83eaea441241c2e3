"""Policies of libCacheSim, where it is installed (`pip install libcachesim`), fed as the store's own: tail first."""

from __future__ import annotations

from typing import Any

from bench.policy.play import Played
from kvstore.workload.reuse import HitRates

NAMES = {"arc": "ARC", "fifo": "FIFO", "lirs": "LIRS", "s3fifo": "S3FIFO", "sieve": "Sieve", "gdsf": "GDSF"}


def library() -> Any | None:
    """The module, None where it is not installed."""
    try:
        import libcachesim
    except ImportError:
        return None
    return libcachesim


def play_other(trace: Played, name: str, capacity_blocks: int) -> HitRates:
    """Returns the hit rates of a policy of the library, of blocks that are all one size."""
    lib = library()
    assert lib is not None
    cache, request = getattr(lib, NAMES[name])(cache_size=capacity_blocks), lib.Request()
    request.obj_size, request.next_access_vtime = 1, -2
    block_hits = prefix_hits = touches = 0
    for rows in trace.rows:
        blocks: list[int] = rows.tolist()
        found = []
        for block in blocks:
            request.obj_id = block
            found.append(cache.find(request, False) is not None)
        block_hits += sum(found)
        prefix_hits += found.index(False) if False in found else len(found)
        for block in reversed(blocks):
            touches += 1
            request.obj_id, request.clock_time = block, touches
            cache.get(request)
    return HitRates(block_hits / max(1, trace.accesses), prefix_hits / max(1, trace.accesses))
