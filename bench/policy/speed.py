"""Touches a second of the store's own policies on one core, evictions included, by how many blocks are resident.

Requests are chains of one length: some of blocks that are there, the others of new ones, for which others go.
"""

from __future__ import annotations

import time

import numpy as np

from bench.policy.play import MakePolicy
from bench.report import Row, say
from kvstore.core.columns import BlockColumns, Ids
from kvstore.core.eviction import POLICIES
from kvstore.core.eviction.base import NO_HINT
from kvstore.core.few import as_rows

CHAIN = 64
HIT_SHARES = (0.9, 0.5)
RESIDENT, FULL_RESIDENT = 1_000_000, 10_000_000
TOUCHES = 2_000_000
LEAST_PER_S = {"lru": 1e6, "expected": 5e5}
MOST_SLOWER = 1.5  # Ten times as many blocks, of which less is in the caches.
_FILL, _STEP_S = 1000, 0.01


def run(*, full: bool) -> list[Row]:
    """Measures each policy with a million blocks resident; `full`: with ten million as well."""
    rows = []
    for name, make in POLICIES.items():
        for share in HIT_SHARES:
            say(f"{name}, {100 * share:.0f} % of the requests find their blocks")
            rate = touches_per_s(make, RESIDENT, share)
            title = f"{name}, {100 * share:.0f} % hits, requests of {CHAIN} blocks"
            rows.append(Row(f"{title}, a million resident", rate, "touches/s", at_least=LEAST_PER_S.get(name)))
            if full:
                more = touches_per_s(make, FULL_RESIDENT, share)
                rows.append(Row(f"{title}, ten million", rate / more, "times the time a touch", at_most=MOST_SLOWER))
    return rows


def touches_per_s(make: MakePolicy, resident: int, hit_share: float) -> float:
    """Plays chains against a full policy."""
    columns = BlockColumns(2 * resident)
    columns.key = [number.to_bytes(8, "little") for number in range(2 * resident)]
    policy, now = make(columns), 1.0
    for first in range(0, resident, _FILL):
        policy.touch(np.arange(first, first + _FILL, dtype=np.int32), now, NO_HINT)
        now += _STEP_S
    requests = _requests(columns, resident, hit_share)
    began_s = time.perf_counter()
    for rows in requests:
        now += _STEP_S
        policy.touch(as_rows(rows), now, NO_HINT)
        over = len(policy) - resident
        if over > 0:
            policy.take(over)
    return len(requests) * CHAIN / (time.perf_counter() - began_s)


def _requests(columns: BlockColumns, resident: int, hit_share: float) -> list[Ids]:
    """Chains, tail first: of the later half of what is there, or of rows further on, around and around."""
    rng = np.random.default_rng(7)
    count, chains = TOUCHES // CHAIN, resident // CHAIN
    new, made = chains, []
    for is_hit in rng.random(count) < hit_share:
        chain = int(rng.integers(max(0, new - chains // 2), new)) if is_hit else new
        new += not is_hit
        first = chain * CHAIN % (2 * resident - CHAIN)
        made.append(np.arange(first + CHAIN - 1, first - 1, -1, dtype=np.int32))
    return made
