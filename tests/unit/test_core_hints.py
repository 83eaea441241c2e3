"""What callers say of the next use: promises, ends, and what becomes of those that do not hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.columns import BlockColumns
from kvstore.core.eviction.base import NO_HINT, OVER, TouchHint
from kvstore.core.eviction.expected import GRACE_S, MOST_LEVEL, OVERDUE, PROMISED, ExpectedReuse
from kvstore.core.few import as_rows
from kvstore.core.namespaces import Namespace
from kvstore.core.reading import AcquireRequest
from kvstore.core.writing import ReserveRequest
from kvstore_wire.states import Coverage
from tests.shards import PAGE_BYTES, Client, Shard, fill, keys, kv_spec

ROWS = 2048
SOON, LATER, LONG = 4, 6, 10  # Within 8, 32 and 512 seconds.


class Cohort:
    """A policy on a clock, whose rows are its keys."""

    def __init__(self) -> None:
        self.columns = BlockColumns(ROWS)
        self.columns.key = [number.to_bytes(8, "little") for number in range(ROWS)]
        self.policy = ExpectedReuse(self.columns)
        self.now = 100.0

    def touch(
        self, chain: Iterable[int], use: int | None = None, *, tag: int = 0, after_s: float = 1.0, asked: bool = True
    ) -> None:
        """One request, its blocks given head first."""
        self.now += after_s
        hint = NO_HINT if use is None and not tag else TouchHint(use, tag)
        self.policy.touch(as_rows(list(chain)[::-1]), self.now, hint, asked=asked)

    def take(self, count: int) -> list[int]:
        taken: list[int] = self.policy.take(count).tolist()
        return taken

    def over(self, chain: Iterable[int], tag: int = 0) -> int:
        return self.policy.over(np.array(list(chain)[::-1], np.int32), tag)

    def kinds(self, *blocks: int) -> list[int]:
        found: list[int] = self.columns.kind[list(blocks)].tolist()
        return found


@pytest.fixture
def cohort() -> Cohort:
    return Cohort()


def test_what_is_over_goes_first_the_oldest_session_and_its_deepest_block(cohort: Cohort) -> None:
    cohort.touch(range(4))
    cohort.touch(range(10, 13), 0, tag=1)
    cohort.touch(range(20, 23), 0, tag=2)
    assert cohort.policy.peek(7).tolist() == [12, 11, 10, 22, 21, 20, 3]
    assert cohort.take(7) == [12, 11, 10, 22, 21, 20, 3]


def test_what_is_promised_for_the_furthest_time_goes_before_what_is_promised_sooner(cohort: Cohort) -> None:
    for _ in range(30):  # Promises that hold.
        cohort.touch(range(100, 104), SOON, tag=9)
    cohort.touch(range(4), LONG, tag=1)
    cohort.touch(range(10, 14), SOON, tag=2)
    cohort.touch(range(20, 24), LATER, tag=3)
    assert cohort.take(6) == [3, 2, 1, 0, 23, 22]
    assert cohort.policy.peek(2).tolist() == [21, 20]


def test_a_promise_weighs_what_promises_turned_out_to_be_worth(cohort: Cohort) -> None:
    for turn in range(200):  # Nobody comes back as promised; those that promise nothing do.
        cohort.touch(range(1000 + 4 * (turn % 200), 1004 + 4 * (turn % 200)), SOON, tag=100 + turn)
        cohort.touch(range(4), tag=1)
    assert cohort.policy._promises.p < 0.05
    cohort.touch(range(500, 504), SOON, tag=7)
    assert set(cohort.take(500)).isdisjoint(range(4))


def test_a_promise_that_is_not_kept_in_time_is_overdue_and_counts_when_it_is_kept(cohort: Cohort) -> None:
    cohort.touch(range(4), SOON, tag=1)
    due_s = cohort.now + 8.0
    cohort.touch([50], tag=2, after_s=8.0 + GRACE_S / 2)
    assert cohort.kinds(0, 3) == [PROMISED + SOON] * 2
    cohort.touch([51], tag=2, after_s=GRACE_S)
    assert cohort.kinds(0, 3) == [OVERDUE] * 2
    assert cohort.columns.touched[:4].tolist() == [due_s] * 4
    promises, overdue = cohort.policy._promises.again, cohort.policy._kinds[OVERDUE].again
    cohort.touch(range(4), tag=1)
    assert cohort.policy._promises.again == pytest.approx(promises + 4, abs=0.01)
    assert cohort.policy._kinds[OVERDUE].again == pytest.approx(overdue + 4, abs=0.01)
    assert max(cohort.kinds(0, 1, 2, 3)) < OVERDUE


def test_overdue_blocks_of_one_chain_go_tail_first(cohort: Cohort) -> None:
    cohort.touch(range(40), SOON, tag=1)
    cohort.touch(range(100, 140), SOON, tag=2)
    cohort.touch([500], tag=3, after_s=60.0)
    order = [block for block in cohort.policy.order().tolist() if block != 500]
    assert order == [*range(39, -1, -1), *range(139, 99, -1)]


def test_longer_promises_than_an_hour_count_as_about_one(cohort: Cohort) -> None:
    cohort.touch([1], 32, tag=1)
    assert cohort.kinds(1) == [PROMISED + MOST_LEVEL]


def test_the_rest_of_a_request_does_not_take_back_what_it_said(cohort: Cohort) -> None:
    cohort.touch(range(4), LATER, tag=1)
    cohort.touch(range(6), after_s=0.01)
    assert cohort.kinds(0, 3) == [PROMISED + LATER] * 2
    cohort.touch(range(6), LATER, tag=1, after_s=0.01, asked=False)
    assert cohort.kinds(0, 5) == [PROMISED + LATER] * 2
    came = cohort.policy._promises.came
    cohort.touch(range(6), LATER, tag=1, after_s=0.01)
    assert cohort.policy._promises.came == came, "it is one promise"


def test_a_touch_digs_up_what_was_over(cohort: Cohort) -> None:
    cohort.touch(range(4), 0, tag=1)
    cohort.touch(range(4), tag=1)
    assert max(cohort.kinds(0, 1, 2, 3)) < OVERDUE


def test_what_others_asked_for_is_not_over(cohort: Cohort) -> None:
    cohort.touch(range(2), tag=1)
    cohort.touch(range(2), tag=2)
    cohort.touch(range(6), 0, tag=1)
    assert [kind == OVER for kind in cohort.kinds(*range(6))] == [False, False, True, True, True, True]


def test_the_earliest_promise_for_a_shared_block_holds(cohort: Cohort) -> None:
    cohort.touch([0], SOON, tag=1)
    cohort.touch([0], LONG, tag=2)
    assert cohort.kinds(0) == [PROMISED + SOON]
    cohort.touch([0], tag=3)
    assert cohort.kinds(0) == [PROMISED + SOON], "nor does silence take it back"
    cohort.touch([0], 1, tag=4)
    assert cohort.kinds(0) == [PROMISED + 1]


def test_late_ends_are_void_where_the_session_was_not_the_last_to_ask(cohort: Cohort) -> None:
    cohort.touch(range(4), tag=1)
    cohort.touch(range(10, 14), tag=2)
    assert cohort.over(range(4), 2) == 0
    assert cohort.over(range(4), 1) == 4
    assert cohort.over(range(4), 1) == 0
    assert cohort.take(4) == [3, 2, 1, 0]
    assert cohort.over(range(4), 1) == 0, "they have gone"


def test_without_a_tag_only_what_was_asked_for_once_is_over(cohort: Cohort) -> None:
    cohort.touch(range(4))
    cohort.touch(range(2))
    assert cohort.over(range(4)) == 2
    assert [kind == OVER for kind in cohort.kinds(0, 1, 2, 3)] == [False, False, True, True]


def test_a_namespace_whose_ends_are_mostly_wrong_is_not_believed_any_more(cohort: Cohort) -> None:
    for _ in range(40):
        cohort.touch(range(8), 0, tag=1)
    assert max(cohort.kinds(*range(8))) < OVERDUE
    cohort.touch(range(20, 24), 0, tag=2)
    assert max(cohort.kinds(20, 21, 22, 23)) < OVERDUE
    assert cohort.over(range(20, 24), 2) == 0


def test_what_went_is_credited_to_what_was_said_of_it(cohort: Cohort) -> None:
    cohort.touch(range(100, 110), SOON, tag=2)
    cohort.touch(range(4), LONG, tag=1)
    assert cohort.take(4) == [3, 2, 1, 0]
    again = cohort.policy._promises.again
    cohort.touch(range(4), tag=1)
    assert cohort.policy._promises.again == pytest.approx(again + 4, abs=0.01)
    assert cohort.columns.touches[:4].tolist() == [2] * 4


def test_held_blocks_are_passed_over_and_come_back_to_their_promise(cohort: Cohort) -> None:
    cohort.touch(range(4), LATER, tag=1)
    cohort.touch(range(10, 12), 0, tag=2)
    for block in (2, 3, 11):
        cohort.columns.holds[block] = 1
    assert cohort.take(10) == [10, 1, 0]
    assert len(cohort.policy) == 0
    for block in (2, 3, 11):
        cohort.columns.holds[block] = 0
    cohort.policy.unpark(np.array([3, 2, 11], np.int32), cohort.now + 1)
    assert len(cohort.policy) == 3
    assert cohort.take(10) == [11, 3, 2]


def test_a_writer_s_end_is_not_that_of_what_others_wrote(cohort: Cohort) -> None:
    cohort.touch(range(10), tag=1, asked=False)
    cohort.touch(range(12), 0, tag=2, asked=False, after_s=10.0)
    assert [kind == OVER for kind in cohort.kinds(0, 9, 10, 11)] == [False, False, True, True]
    assert cohort.over(range(10), 1) == 0, "the other one named them since"
    assert cohort.over(range(10), 2) == 0


def test_a_chain_that_is_continued_comes_up_again(cohort: Cohort) -> None:
    cohort.touch(range(3), tag=7)
    assert cohort.over(range(3), 7) == 3
    cohort.touch(range(6), tag=8, asked=False, after_s=5.0)
    assert max(cohort.kinds(*range(6))) < OVERDUE
    assert cohort.take(3) == [5, 4, 3]


def test_the_hottest_prefix_is_shared_however_often_it_is_asked_for(cohort: Cohort) -> None:
    for tag in range(1, 200):
        cohort.touch([0], tag=tag, after_s=0.05)
    assert cohort.over([0], 199) == 0
    assert cohort.columns.touches[0] > 50


def test_one_far_promise_does_not_take_a_hot_shared_block_away(cohort: Cohort) -> None:
    for turn in range(40):
        cohort.touch(range(3), tag=1 + turn, after_s=5.0)
        cohort.touch(range(1000 + 4 * turn, 1004 + 4 * turn), tag=1 + turn)
    cohort.touch(range(3), MOST_LEVEL, tag=500)
    assert max(cohort.kinds(0, 1, 2)) < OVERDUE
    cohort.touch([0], SOON, tag=501)
    cohort.touch([0], tag=502)
    cohort.touch(range(2000, 2004), tag=600)
    assert set(cohort.take(4)).isdisjoint(range(3))


def test_touches_of_a_promised_block_are_counted_once_a_request(cohort: Cohort) -> None:
    for tag in (1, 2):
        cohort.touch([0], SOON, tag=tag)
    touches, again = int(cohort.columns.touches[0]), cohort.policy._promises.again
    for _ in range(20):
        cohort.touch([0], tag=3, after_s=0.001)
    assert cohort.columns.touches[0] == touches
    assert cohort.policy._promises.again == again


def test_what_was_asked_for_again_before_the_first_hint_is_nobody_s_own(cohort: Cohort) -> None:
    for _ in range(5):
        cohort.touch(range(4))
        cohort.touch(range(10, 14))
    assert cohort.over(range(4)) == 0
    assert cohort.over(range(10, 14)) == 0
    cohort.touch(range(10, 14), 0, tag=1)
    assert max(cohort.kinds(10, 11, 12, 13)) < OVERDUE


def test_a_chain_names_the_session_that_asked_for_it_last(cohort: Cohort) -> None:
    cohort.touch(range(3), SOON, tag=7)
    cohort.touch(range(6), SOON, tag=8)
    assert cohort.over(range(6)) == 3, "those that session 8 alone had"
    assert [kind == OVER for kind in cohort.kinds(0, 2, 3, 5)] == [False, False, True, True]


def test_disbelief_wears_off(cohort: Cohort) -> None:
    for _ in range(40):
        cohort.touch(range(8), 0, tag=1)
    assert not cohort.policy._believes_over
    for _ in range(600):
        cohort.touch(range(100, 164), tag=2)
    assert cohort.policy._believes_over


def test_a_cohort_with_what_is_over_gives_before_others(cohort: Cohort) -> None:
    cohort.touch(range(4), tag=1)
    assert cohort.policy.idle_since() == cohort.now
    cohort.touch(range(10, 12), 0, tag=2)
    assert cohort.policy.idle_since() == float("-inf")


def test_a_shard_without_hints_decides_as_one_that_never_knew_of_them() -> None:
    plain, tagged = Cohort(), Cohort()
    rng = np.random.default_rng(3)
    for _ in range(400):
        first, size = int(rng.integers(0, 40)) * 40, int(rng.integers(1, 40))
        after_s = float(rng.exponential(3.0)) + 0.2
        plain.touch(range(first, first + size), after_s=after_s)
        tagged.touch(range(first, first + size), tag=1, after_s=after_s)  # Says who it is, and nothing of the next use.
        over = len(plain.policy) - 300
        if over > 0:
            assert plain.take(over) == tagged.take(over)
    assert plain.policy.peek(100).tolist() == tagged.policy.peek(100).tolist()


Move: TypeAlias = "tuple[Any, ...]"
chains = st.tuples(st.integers(0, 30), st.integers(1, 40))
moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("touch"),
            chains,
            st.sampled_from([None, None, 0, 1, SOON, LATER, 32]),
            st.integers(0, 3),
            st.sampled_from([0.01, 0.5, 12.0]),
            st.booleans(),
        ),
        st.tuples(st.just("take"), st.integers(1, 80)),
        st.tuples(st.just("over"), chains, st.integers(0, 3)),
        st.tuples(st.just("hold"), st.integers(0, 1500)),
        st.tuples(st.just("free"), st.integers(0, 1500)),
        st.tuples(st.just("remove"), st.integers(0, 1500)),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(moves)
def test_whatever_is_said_every_block_is_in_one_queue_and_goes_once(game: list[Move]) -> None:
    cohort = Cohort()
    for move in game:
        if move[0] == "touch":
            (first, size), use, tag, after_s, asked = move[1:]
            cohort.touch(range(40 * first, 40 * first + size), use, tag=tag, after_s=after_s, asked=asked)
        elif move[0] == "take":
            taken = cohort.take(move[1])
            assert not cohort.columns.holds[taken].any()
            assert len(set(taken)) == len(taken)
        elif move[0] == "over":
            (first, size), tag = move[1:]
            cohort.over(range(40 * first, 40 * first + size), tag)
        elif move[0] == "hold":
            cohort.columns.holds[move[1]] = 1
        elif move[0] == "free":
            cohort.columns.holds[move[1]] = 0
            cohort.policy.unpark(np.array([move[1]], np.int32), cohort.now)
        else:
            cohort.policy.remove(move[1])
        here = np.flatnonzero(cohort.columns.queue_place.at > 0)
        assert len(cohort.policy) == len(here)
        assert sorted(cohort.policy.order().tolist()) == here.tolist()
        cohort.policy.idle_since()
    cohort.columns.holds[:] = 0
    parked = np.flatnonzero(cohort.columns.queue_place.at < 0).astype(np.int32)
    cohort.policy.unpark(parked, cohort.now)
    left = len(cohort.policy)
    assert len(set(cohort.take(ROWS))) == left
    assert len(cohort.policy) == 0


# -- through a shard -------------------------------------------------------------------------------------------------


def _asks(shard: Shard, client: Client, space: Namespace, chain: list[bytes], hint: TouchHint) -> None:
    request = AcquireRequest(chain, 60.0, coverage=Coverage.EACH, hint=hint)
    acquisition = shard.store.reader.begin(client.session, space, request)
    shard.store.reader.finish(acquisition, shard.now)
    assert acquisition.lease is not None
    shard.store.release(client.session, acquisition.lease.id, shard.now)


def _makes(shard: Shard, client: Client, space: Namespace, chain: list[bytes], hint: TouchHint) -> None:
    reserved = shard.store.writer.reserve(client.session, space, ReserveRequest(chain, 60.0, hint=hint), shard.now)
    assert reserved.lease is not None
    fill(reserved.lease)
    client.commit(reserved.lease)


def test_a_session_is_over_by_its_tag_but_for_what_another_asked_for() -> None:
    shard = Shard(capacity_bytes=4 * PAGE_BYTES, policy="expected")
    client = shard.client()
    space, other = client.attach(kv_spec("one")), client.attach(kv_spec("other"))
    for of in (space, other):
        _makes(shard, client, of, keys(0, 6), TouchHint(None, 7))
        shard.now += 1
        _asks(shard, client, of, keys(0, 2), TouchHint(None, 8))
        shard.now += 1
        _asks(shard, client, of, keys(0, 6), TouchHint(None, 7))
    assert shard.store.over(space, [], 0) == 0
    assert shard.store.over(space, [], 8) == 0, "the other one asked last"
    assert shard.store.over(space, [], 7) == 4
    kinds = {k: int(shard.store.records.blocks.kind[block]) for k, block in space.blocks.items()}
    assert [k for k, kind in kinds.items() if kind == OVER] == keys(2, 6)
    assert shard.store.over(other, [], 7) == 4, "each namespace for itself"
    shard.store.check()


def test_blocks_of_what_is_over_make_room_first() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES, policy="expected")
    client = shard.client()
    space = client.attach(kv_spec("one"))
    client.put(space, keys(0, 8))
    client.put(space, keys(100, 108))
    assert shard.store.over(space, keys(100, 108), 0) == 8
    client.put(space, keys(200, 206))
    assert shard.stored(space, keys(0, 8)) == keys(0, 8)
    assert shard.stored(space, keys(100, 108)) == keys(100, 102)
    shard.store.check()
