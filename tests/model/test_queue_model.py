"""TailFirstLru and BlockQueue against an OrderedDict a cohort, over one set of columns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.columns import BlockColumns, Ids, Places
from kvstore.core.eviction.base import NO_HINT, BlockQueue
from kvstore.core.eviction.lru import TailFirstLru
from kvstore.core.few import Rows

ROWS, COHORTS = 48, 3

rows = st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1, max_size=ROWS)
row = st.integers(0, ROWS - 1)
cohort = st.integers(0, COHORTS - 1)


def ids(blocks: list[int]) -> Ids:
    return np.array(blocks, np.int32)


# A few rows come as a list, many as an array: both must do for any number.
forms = st.sampled_from([list[int], ids])


class ModelCohort:
    """Blocks oldest first with the time of their last touch, and those parked."""

    def __init__(self) -> None:
        self.order: OrderedDict[int, float] = OrderedDict()
        self.parked: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self.order or block in self.parked

    def free(self, holds: list[int]) -> list[int]:
        return [b for b in self.order if not holds[b]]

    def park_before(self, block: int | None, holds: list[int]) -> None:
        """Parks the held blocks older than this one; all of them if there is none."""
        for other in list(self.order):
            if other == block:
                return
            if holds[other]:
                del self.order[other]
                self.parked.add(other)


class QueueMachine(RuleBasedStateMachine):
    """Three cohorts share the rows; a row moves between cohorts as it is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = BlockColumns(ROWS)
        self.policies = [TailFirstLru(self.columns) for _ in range(COHORTS)]
        self.model = [ModelCohort() for _ in range(COHORTS)]
        self.holds = [0] * ROWS
        self.now = 1.0

    def _of(self, block: int) -> int | None:
        return next((i for i, c in enumerate(self.model) if block in c), None)

    @rule(index=cohort, chosen=rows, times=st.sampled_from([1, 1, 1, 70, 700]), form=forms)
    def touch(self, index: int, chosen: list[int], times: int, form: Callable[[list[int]], Rows]) -> None:
        """Over and over, so that the log fills and is compacted."""
        mine = [b for b in chosen if self._of(b) in (None, index)]
        if not mine:
            return
        for _ in range(times):
            self.now += 1
            self.policies[index].touch(form(mine), self.now, NO_HINT)
            mine = mine[1:] + mine[:1]
        for block in mine[-1:] + mine[:-1]:
            self.model[index].parked.discard(block)
            self.model[index].order.pop(block, None)
            self.model[index].order[block] = self.now

    @rule(index=cohort, block=row)
    def remove(self, index: int, block: int) -> None:
        """A block in no cohort is ignored; one of another cohort is never named."""
        if self._of(block) in (None, index):
            self.policies[index].remove(block)
            self.model[index].order.pop(block, None)
            self.model[index].parked.discard(block)

    @rule(chosen=rows)
    def hold(self, chosen: list[int]) -> None:
        for block in chosen:
            self.holds[block] += 1
            self.columns.holds[block] += 1

    @precondition(lambda self: any(self.holds))
    @rule(chosen=rows)
    def unhold(self, chosen: list[int]) -> None:
        self.now += 1
        ended = [b for b in chosen if self.holds[b] == 1]
        for block in ended:
            self.holds[block] = 0
            self.columns.holds[block] = 0
        for index, model in enumerate(self.model):
            back = [b for b in ended if b in model.parked]
            self.policies[index].unpark(ids([b for b in ended if b in model]), self.now)
            for block in back:
                model.parked.remove(block)
                model.order[block] = self.now

    @rule(index=cohort, count=st.integers(0, ROWS))
    def take(self, index: int, count: int) -> None:
        model = self.model[index]
        free = model.free(self.holds)
        expected = free[:count]
        assert self.policies[index].take(count).tolist() == expected
        if count:
            model.park_before(expected[-1] if len(expected) == count else None, self.holds)
        for block in expected:
            del model.order[block]

    @rule(index=cohort)
    def idle_since(self, index: int) -> None:
        model = self.model[index]
        free = model.free(self.holds)
        expected = model.order[free[0]] if free else None
        assert self.policies[index].idle_since() == expected
        model.park_before(free[0] if free else None, self.holds)

    @rule(index=cohort, count=st.integers(1, ROWS))
    def peek(self, index: int, count: int) -> None:
        """Sees the next victims and moves nothing; never misses all of them behind held ones."""
        policy = self.policies[index]
        self.idle_since(index)
        free = self.model[index].free(self.holds)
        seen = policy.peek(count).tolist()
        assert seen == free[: len(seen)]
        assert bool(seen) == bool(free)

    @invariant()
    def lengths_agree(self) -> None:
        for policy, model in zip(self.policies, self.model, strict=True):
            assert len(policy) == len(model.order)


TestQueue = QueueMachine.TestCase


@given(gaps=st.lists(st.integers(0, 3), max_size=200), limit=st.integers(-1, 320), gone=st.sets(st.integers(0, 199)))
def test_the_expiry_queue_gives_exactly_the_leading_blocks_that_are_old_enough(
    gaps: list[int], limit: int, gone: set[int]
) -> None:
    times = np.cumsum(np.array(gaps, np.float64)) if gaps else np.empty(0)
    queue = BlockQueue(Places(len(gaps)))
    for block in range(len(gaps)):
        queue.append(ids([block]))
    left = [b for b in range(len(gaps)) if b not in gone]
    for block in gone & set(range(len(gaps))):
        queue.remove(block)
    due = [b for b in left if times[b] <= limit]
    assert queue.take_while_older(float(limit), times, 200).tolist() == due
    assert len(queue) == len(left) - len(due)
    assert queue.take_while_older(float("inf"), times, 200).tolist() == [b for b in left if times[b] > limit]
