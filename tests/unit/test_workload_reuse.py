"""Reference hit rates, on traces small enough to follow by hand and on a generated one."""

from __future__ import annotations

import pytest

from kvstore.workload.generate import generate_trace
from kvstore.workload.profiles import CHAT
from kvstore.workload.reuse import infinite_hit_rate, tail_first_lru
from kvstore.workload.trace import Trace, TraceRequest, as_block_ids


def trace_of(*chains: list[int]) -> Trace:
    requests = tuple(
        TraceRequest(
            time_s=float(second),
            session=None,
            turn=1,
            input_tokens=16 * len(ids),
            output_tokens=1,
            block_ids=as_block_ids(ids),
        )
        for second, ids in enumerate(chains)
    )
    return Trace(name="hand-made", block_tokens=16, requests=requests)


def test_a_cache_that_holds_all_reaches_the_ceiling() -> None:
    trace = trace_of([1, 2, 3], [1, 2, 4], [1, 2, 3, 5])
    assert infinite_hit_rate(trace) == pytest.approx(5 / 10)
    assert tail_first_lru(trace, trace.distinct_blocks()) == pytest.approx((0.5, 0.5))


def test_eviction_takes_the_leaf_and_leaves_the_head() -> None:
    # Capacity 3: touching [1, 2, 3] tail first makes 3 the oldest, so 9 costs the leaf and the prefix 1, 2 survives.
    rates = tail_first_lru(trace_of([1, 2, 3], [9], [1, 2, 3]), 3)
    assert rates == pytest.approx((2 / 7, 2 / 7))


def test_blocks_are_looked_up_before_any_is_touched() -> None:
    # Each block of a new request is a miss even if the request names it twice.
    trace = trace_of([1, 1])
    assert tail_first_lru(trace, 4) == (0.0, 0.0)
    assert infinite_hit_rate(trace) == 0.0


def test_a_block_behind_a_hole_is_a_block_hit_and_no_prefix_hit() -> None:
    rates = tail_first_lru(trace_of([2], [1, 2]), 4)
    assert rates.block == pytest.approx(1 / 3)
    assert rates.prefix == 0.0


def test_a_request_longer_than_the_cache_keeps_its_head() -> None:
    rates = tail_first_lru(trace_of([1, 2, 3, 4], [1, 2, 3, 4]), 2)
    assert rates == pytest.approx((2 / 8, 2 / 8))


def test_a_generated_trace_loses_no_prefix_to_eviction_order() -> None:
    trace = generate_trace(CHAT, seed=1, seconds=900)
    distinct = trace.distinct_blocks()
    ceiling = infinite_hit_rate(trace)
    assert ceiling == pytest.approx(1 - distinct / trace.accesses())
    rates = [tail_first_lru(trace, max(1, distinct * percent // 100)) for percent in (1, 5, 20, 100)]
    assert [rate.prefix for rate in rates] == sorted(rate.prefix for rate in rates)
    for rate in rates:
        assert 0 <= rate.block - rate.prefix < 0.001
    assert rates[-1].block == pytest.approx(ceiling)
    assert rates[1].prefix < ceiling


def test_a_trace_without_requests() -> None:
    empty = trace_of()
    assert (empty.accesses(), empty.distinct_blocks(), empty.span_s()) == (0, 0, 0.0)
    assert infinite_hit_rate(empty) == 0.0
    assert tail_first_lru(empty, 1) == (0.0, 0.0)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_blocks"):
        tail_first_lru(trace_of([1]), 0)
