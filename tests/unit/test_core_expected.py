"""Expected reuse: what it learns, which block goes first, and what it remembers of those that went."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.columns import BlockColumns, Bytes
from kvstore.core.eviction import expected
from kvstore.core.eviction.base import NO_HINT, SAME_REQUEST_S
from kvstore.core.eviction.expected import GHOSTS_PER_BLOCK, KINDS, ExpectedReuse
from kvstore.core.eviction.ghosts import WAYS, GhostTable
from kvstore.core.few import Rows

ROWS = 4096
WAYS_OF = (0, 24, 1 << 20)  # How many blocks are handled one by one: none, as it is, all.


class Cohort:
    """A policy on a clock, whose rows are its keys: a row that went comes back as the same block."""

    def __init__(self, *, many: int = 24) -> None:
        self.columns = BlockColumns(ROWS)
        self.columns.key = [number.to_bytes(8, "little") for number in range(ROWS)]
        self.policy = ExpectedReuse(self.columns)
        self.now, self._many = 100.0, many

    def touch(self, *chain: int, after_s: float = 1.0, asked: bool = True) -> None:
        """One request, its blocks given head first."""
        self.now += after_s
        rows: Rows = list(chain[::-1])
        before, expected._MANY = expected._MANY, self._many
        try:
            self.policy.touch(rows, self.now, NO_HINT, asked=asked)
        finally:
            expected._MANY = before

    def take(self, count: int) -> list[int]:
        taken: list[int] = self.policy.take(count).tolist()
        return taken

    def is_here(self, block: int) -> bool:
        return bool(self.columns.queue_place.at[block])

    def learned(self) -> list[tuple[float, float, float, int]]:
        return [(k.came, k.again, k.gaps_s, len(k.queue)) for k in self.policy._kinds]


@pytest.fixture(params=WAYS_OF, ids=["at once", "as it is", "one by one"])
def cohort(request: pytest.FixtureRequest) -> Cohort:
    return Cohort(many=request.param)


def test_of_one_request_the_deepest_block_goes_first(cohort: Cohort) -> None:
    cohort.touch(*range(40))
    assert cohort.take(5) == [39, 38, 37, 36, 35]
    assert len(cohort.policy) == 35
    assert cohort.policy.peek(3).tolist() == [34, 33, 32]


def test_what_is_asked_for_again_outlives_what_never_is(cohort: Cohort) -> None:
    for turn in range(60):
        cohort.touch(*range(8))
        cohort.touch(*range(100 + 4 * turn, 104 + 4 * turn))
    once, _, often, _ = cohort.policy._kinds
    assert once.p < 0.2 < 0.8 < often.p
    assert often.tau_s == pytest.approx(2.0, abs=0.2)
    cohort.touch(*range(1000, 1004))
    cohort.now += 1.0
    assert len(cohort.take(len(cohort.policy) - 8)) == 4 * 61
    assert all(cohort.is_here(block) for block in range(8))


def test_a_block_that_stays_away_much_longer_than_its_kind_goes_before_new_ones(cohort: Cohort) -> None:
    for _ in range(60):
        cohort.touch(0, 1)
        cohort.touch(2, 3)
    for _ in range(40):
        cohort.touch(2, 3, after_s=5.0)
    cohort.touch(10, 11)
    assert cohort.take(2) == [1, 0]


def test_a_touch_soon_after_another_is_of_the_same_request(cohort: Cohort) -> None:
    cohort.touch(0, 1)
    before = cohort.learned()
    cohort.touch(0, 1, after_s=SAME_REQUEST_S / 2)
    assert cohort.learned() == before
    cohort.touch(0, 1, after_s=2 * SAME_REQUEST_S)
    assert cohort.learned() != before


def test_a_writer_s_own_chain_is_not_asked_for(cohort: Cohort) -> None:
    cohort.touch(*range(30), asked=False)
    assert cohort.columns.touches[:30].tolist() == [1] * 30
    before = cohort.learned()
    cohort.touch(*range(30), after_s=5.0, asked=False)
    assert cohort.learned() == before
    gone = cohort.take(10)
    cohort.touch(*range(32), after_s=5.0, asked=False)
    assert cohort.columns.touches[gone].tolist() == [2] * 10, "what is made anew is wanted again"
    assert cohort.columns.touches[30:32].tolist() == [1, 1]
    assert cohort.columns.touches[:20].tolist() == [2] * 20, "as often as what is behind it"


def test_what_went_is_known_when_it_comes_back(cohort: Cohort) -> None:
    cohort.touch(*range(20))
    gone = cohort.take(10)
    cohort.touch(*range(20), after_s=7.0)
    once = cohort.policy._kinds[0]
    assert cohort.columns.touches[gone].tolist() == [2] * 10
    assert once.again == pytest.approx(1 * 0.5 ** (20 / expected.HALF_LIFE) + 20)
    assert once.gaps_s == pytest.approx(60.0 * 0.5 ** (20 / expected.HALF_LIFE) + 20 * 7.0)


def test_what_went_long_ago_is_new_again(cohort: Cohort) -> None:
    cohort.touch(*range(8))
    assert cohort.take(1) == [7]
    for number in range(GHOSTS_PER_BLOCK * 8 + 8):
        cohort.touch(100 + number)
        cohort.take(1)
    cohort.touch(7)
    assert cohort.columns.touches[7] == 1


def test_a_chain_has_no_hole_where_a_block_of_it_was_forgotten(cohort: Cohort) -> None:
    for _ in range(5):
        cohort.touch(*range(30))
    cohort.policy._kinds[KINDS - 1].queue.remove(10)  # As if it had gone and were not remembered.
    cohort.touch(*range(30))
    assert cohort.columns.touches[10] == cohort.columns.touches[11]
    assert cohort.take(30) == list(range(29, -1, -1))


def test_counts_end_somewhere(cohort: Cohort) -> None:
    for _ in range(100):
        cohort.touch(0)
    assert cohort.columns.touches[0] == 63
    assert len(cohort.policy) == 1


def test_held_blocks_stay_and_come_back(cohort: Cohort) -> None:
    cohort.touch(*range(30))
    for block in (29, 28, 5):
        cohort.columns.holds[block] = 1
    assert cohort.take(4) == [27, 26, 25, 24]
    assert len(cohort.policy) == 24
    cohort.touch(28, after_s=3.0)  # While it is parked.
    assert len(cohort.policy) == 25
    for block in (29, 28, 5):
        cohort.columns.holds[block] = 0
    cohort.now += 1.0
    cohort.policy.unpark(np.array([29], np.int32), cohort.now)
    assert len(cohort.policy) == 26
    assert sorted(cohort.take(100)) == [*range(24), 28, 29]
    assert len(cohort.policy) == 0
    assert cohort.policy.take(1).tolist() == []
    assert cohort.policy.idle_since() is None


def test_removed_blocks_are_not_victims_and_are_not_remembered(cohort: Cohort) -> None:
    cohort.touch(*range(4))
    cohort.policy.remove(3)
    cohort.policy.remove(3)
    cohort.policy.remove(900)
    assert (len(cohort.policy), cohort.take(2)) == (3, [2, 1])
    cohort.touch(3)
    assert cohort.columns.touches[3] == 1


def test_a_cohort_is_as_old_as_its_next_victim(cohort: Cohort) -> None:
    for _ in range(60):
        cohort.touch(0, 1)
        cohort.touch(*range(100, 104))
        cohort.take(4)
    cohort.touch(*range(200, 204))
    since = cohort.policy.idle_since()
    (victim,) = cohort.take(1)
    assert since == cohort.columns.touched[victim]


def test_what_is_asked_for_all_the_time_counts_as_asked_for_again(cohort: Cohort) -> None:
    for _ in range(40):
        cohort.touch(0, after_s=SAME_REQUEST_S / 2)
    assert cohort.columns.touches[0] >= 13


chains = st.integers(0, 40).flatmap(lambda head: st.integers(1, 60).map(lambda size: (head * 50, size)))
Move: TypeAlias = "tuple[Any, ...]"
moves = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), chains, st.sampled_from([0.01, 0.5, 30.0]), st.booleans()),
        st.tuples(st.just("take"), st.integers(1, 80)),
        st.tuples(st.just("hold"), st.integers(0, 2099)),
        st.tuples(st.just("free"), st.integers(0, 2099)),
        st.tuples(st.just("remove"), st.integers(0, 2099)),
    ),
    max_size=60,
)


def _played(game: list[Move], many: int) -> list[object]:
    cohort = Cohort(many=many)
    told: list[object] = []
    for move in game:
        if move[0] == "touch":
            (first, size), after_s, asked = move[1:]
            cohort.touch(*range(first, first + size), after_s=after_s, asked=asked)
        elif move[0] == "take":
            taken = cohort.take(move[1])
            assert not cohort.columns.holds[taken].any()
            assert len(set(taken)) == len(taken)
            told.append(taken)
        elif move[0] == "hold":
            cohort.columns.holds[move[1]] = 1
        elif move[0] == "free":
            cohort.columns.holds[move[1]] = 0
            cohort.policy.unpark(np.array([move[1]], np.int32), cohort.now)
        elif cohort.is_here(move[1]):
            cohort.policy.remove(move[1])
        here = int(np.count_nonzero(cohort.columns.queue_place.at > 0))
        assert len(cohort.policy) == here == len(cohort.policy.order())
        told.append((cohort.learned(), cohort.policy.idle_since(), cohort.policy.peek(10).tolist()))
    return told


@settings(max_examples=60, deadline=None)
@given(moves)
def test_one_by_one_and_at_once_decide_alike(game: list[Move]) -> None:
    assert _played(game, 0) == _played(game, 1 << 20)


# -- ghosts ----------------------------------------------------------------------------------------------------------


def _hashes(count: int, seed: int = 1) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(-(1 << 63), (1 << 63) - 1, count, dtype=np.int64).tolist()
    return found


def _ones(count: int, of: int = 1) -> Bytes:
    return np.full(count, of, np.uint8)


@pytest.mark.parametrize("horizon", [1, 100, 10_000])
def test_ghosts_are_remembered_up_to_the_horizon_and_hardly_lost_before(horizon: int) -> None:
    table = GhostTable()
    table.fit(horizon)
    names = _hashes(3 * horizon)
    for number, name in enumerate(names):
        table.add([name], _ones(1, 1 + number % 200), np.array([float(number)]))
    assert table.places <= max(64 * WAYS, 4 * horizon)
    late = range(2 * horizon, 3 * horizon)
    found = [table.take(names[number]) for number in late]
    kept = [(number, at) for number, at in zip(late, found, strict=True) if at is not None]
    assert len(kept) >= 0.97 * horizon
    assert all(at == (1 + number % 200, float(number)) for number, at in kept)
    assert [table.take(names[number]) for number in range(2 * horizon - 1)] == [None] * (2 * horizon - 1)
    assert [table.take(names[number]) for number in late] == [None] * horizon, "each is found once"


def test_one_and_many_find_the_same() -> None:
    names, tables = _hashes(500), (GhostTable(), GhostTable())
    for table in tables:
        table.fit(400)
        table.add(names[:450], _ones(450, 3), np.arange(450.0))
    counts, times = tables[0].take_many(names)
    one = [tables[1].take(name) or (0, None) for name in names]
    assert counts.tolist() == [count for count, _ in one]
    assert [t for t, c in zip(times.tolist(), counts, strict=True) if c] == [t for c, t in one if c]
    assert tables[0].take_many(names)[0].sum() == 0


def test_a_table_grows_without_a_search_and_never_shrinks() -> None:
    table, names = GhostTable(), _hashes(200)
    table.fit(200)
    table.add(names, _ones(200, 2), np.arange(200.0))
    places = table.places
    table.fit(100)
    assert np.count_nonzero(table.take_many(names[100:])[0]) >= 97, "within the horizon, where nothing grew"
    table.fit(20_000)
    assert table.places > places
    assert len(table) == 0
    table.fit(10)
    assert table.places > 20_000


def test_numbers_may_wrap_around() -> None:
    table = GhostTable()
    table.fit(10)
    table._went = (1 << 32) - 3
    names = _hashes(6)
    table.add(names, _ones(6), np.arange(6.0))
    assert [table.take(name) is not None for name in names] == [True] * 6
