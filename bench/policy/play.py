"""A trace played through one of the store's own eviction policies, without a store around it.

A request's blocks are all looked up and counted, then touched or inserted, last block first; what is too much goes.
Rows stand for the distinct blocks of the trace, so that looking up is one array index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np

from kvstore.core.columns import BlockColumns, Ids
from kvstore.core.eviction.base import NO_HINT, EvictionPolicy, TouchHint
from kvstore.core.few import as_rows
from kvstore.workload.reuse import HitRates
from kvstore.workload.trace import Trace

MakePolicy: TypeAlias = "Callable[[BlockColumns], EvictionPolicy]"
_FIRST_S = 1.0  # The clock when a trace begins: later than a block that was never touched.


@dataclass(frozen=True)
class Played:
    """A trace with its blocks numbered from 0. `rows[i]` are those of request i, head first, at `times_s[i]`."""

    name: str
    rows: Sequence[Ids]
    times_s: Sequence[float]
    blocks: int
    accesses: int
    hints: Sequence[TouchHint] = ()  # What the caller of each request says; empty: nothing.

    @staticmethod
    def of(trace: Trace) -> Played:
        every = [request.block_ids for request in trace.requests]
        ids, numbers = np.unique(np.concatenate(every), return_inverse=True)
        ends = np.cumsum([len(some) for some in every])[:-1]
        rows = np.split(numbers.astype(np.int32), ends)
        times_s = [_FIRST_S + request.time_s for request in trace.requests]
        return Played(trace.name, rows, times_s, len(ids), len(numbers))

    def capacity(self, percent: float) -> int:
        """So many percent of the distinct blocks, at least one."""
        return max(1, round(self.blocks * percent / 100))


def play(trace: Played, make: MakePolicy, capacity_blocks: int) -> HitRates:
    """Returns the hit rates of a policy that has room for so many blocks."""
    columns = BlockColumns(trace.blocks)
    columns.key = [number.to_bytes(8, "little") for number in range(trace.blocks)]
    policy, place = make(columns), columns.queue_place.at
    block_hits = prefix_hits = 0
    hints = trace.hints or repeat(NO_HINT)
    for rows, now, hint in zip(trace.rows, trace.times_s, hints, strict=False):
        if not len(rows):
            continue
        is_here = place[rows] != 0
        hits = int(np.count_nonzero(is_here))
        block_hits += hits
        prefix_hits += hits if hits == len(rows) else int(np.argmin(is_here))
        policy.touch(as_rows(rows[::-1]), now, hint)
        over = len(policy) - capacity_blocks
        if over > 0:
            policy.take(over)
    return HitRates(block_hits / max(1, trace.accesses), prefix_hits / max(1, trace.accesses))
