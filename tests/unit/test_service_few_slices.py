"""Few slices are planned and made into rows one by one: with the same outcome as by columns, right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.service import copier, regions
from kvstore.service.copier import _Rows
from kvstore.service.regions import Copies, Region, _plan_few, listed, plan
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import types_pb2 as types

REGION_BYTES = 900
REGION = Region(-1, 100, REGION_BYTES, (0, 0), is_readable=True, is_writable=True)
HUGE = (1 << 64) - 1
BY_COLUMNS = -1  # So that not even no slices are few.


@contextmanager
def _few_slices(module: ModuleType, most: int) -> Iterator[None]:
    """Up to so many slices are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW_SLICES", most)
        yield


# -- plans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The arguments of one call of `plan`."""

    slice_offsets: Sequence[int]
    slice_lengths: Sequence[int]
    part_lengths: Sequence[int]
    arena_offsets: Sequence[int]

    def slices(self, counts: Sequence[int] = ()) -> types.RegionSlices:
        return types.RegionSlices(offsets=self.slice_offsets, lengths=self.slice_lengths, counts=counts)

    def few(self) -> Copies | None:
        return _plan_few(self.slices(), REGION, self.part_lengths, self.arena_offsets)

    def plan(self, counts: Sequence[int] = ()) -> Copies:
        return plan(self.slices(counts), REGION, self.part_lengths, self.arena_offsets, field="into")

    def by_arrays(self) -> Copies:
        lengths, offsets = (np.array(given, np.int64) for given in (self.part_lengths, self.arena_offsets))
        return plan(self.slices(), REGION, lengths, offsets, field="into")


def _asked(rows: Sequence[tuple[int, int, int, int]]) -> Asked:
    """Rows are (offset, length) of the slice and (length, arena offset) of the part."""
    return Asked(*([row[i] for row in rows] for i in range(4)))


@st.composite
def _right_rows(draw: st.DrawFn) -> tuple[int, int, int, int]:
    at = draw(st.integers(0, REGION_BYTES))
    size = draw(st.integers(0, min(REGION_BYTES - at, 20)) | st.just(REGION_BYTES - at))
    length = draw(st.sampled_from((size, size, size, -1)))
    offset = draw(st.just(-1) | st.integers(0, 1 << 45) | st.integers(0, 100))
    return at, size, length, offset


_NUMBERS = st.sampled_from((0, 1, 10, 11, 890, 891, 899, 900, 901, 1 << 32, 1 << 63, HUGE - 900, HUGE))
_PART_LENGTHS = st.sampled_from((-1, 0, 1, 10, 11, 900, 901, 1 << 62))
_ANY_ROWS = _right_rows() | st.tuples(_NUMBERS, _NUMBERS, _PART_LENGTHS, st.sampled_from((-1, 0, 4096)))


def _listed(copies: Copies) -> list[list[int]]:
    columns = copies.columns()
    assert {column.shape for column in columns} == {(len(copies),)}
    return list(copies.lists())


Outcome = object


def _outcome(make: Callable[[], Copies]) -> Outcome:
    """What came of a call: all of its copies, or all of its error."""
    try:
        return _listed(make())
    except InvalidArgument as error:
        return type(error), error.message, error.field, error.limit


def _is_same_by_columns(asked: Asked) -> bool:
    """Asserts that both ways have one outcome; says whether it is copies."""
    with _few_slices(regions, BY_COLUMNS):
        wanted = _outcome(asked.plan)
    assert _outcome(asked.plan) == wanted
    assert _outcome(asked.by_arrays) == wanted
    few = asked.few()
    if few is not None:
        assert _listed(few) == wanted
    return few is not None


@given(st.lists(_right_rows(), max_size=10))
@example([])
@example([(0, 10, 10, 0)] * 64)
@example([(0, 10, 10, 0)] * 65)
@example([(0, 0, 0, 0), (900, 0, -1, 0), (0, 900, 900, -1)])
def test_right_slices_give_the_same_copies(rows: list[tuple[int, int, int, int]]) -> None:
    asked = _asked(rows)
    assert _is_same_by_columns(asked)
    assert _outcome(lambda: asked.plan([1] * len(rows))) == _outcome(asked.plan)


def test_of_parts_without_a_place_or_a_length_nothing_is_copied() -> None:
    asked = _asked([(0, 10, 10, 50), (10, 10, -1, 60), (20, 10, 10, -1), (30, 0, 0, 70), (40, 5, 5, 0)])
    assert asked.plan().lists() == ([50, 0], [0, 40], [10, 5])


@given(st.lists(_ANY_ROWS, max_size=6))
def test_any_slices_have_the_same_outcome(rows: list[tuple[int, int, int, int]]) -> None:
    _is_same_by_columns(_asked(rows))


@given(st.lists(_right_rows(), max_size=5), st.tuples(*[st.integers(0, 2)] * 3))
def test_numbers_that_do_not_pair_have_the_same_outcome(
    rows: list[tuple[int, int, int, int]], dropped: tuple[int, int, int]
) -> None:
    """Offsets, lengths or parts are missing at the end."""
    whole = _asked(rows)
    at, sizes, parts = (max(0, len(rows) - count) for count in dropped)
    asked = Asked(
        whole.slice_offsets[:at], whole.slice_lengths[:sizes], whole.part_lengths[:parts], whole.arena_offsets[:parts]
    )
    assert _is_same_by_columns(asked) == (at == sizes == parts)


WRONG: dict[str, Callable[[list[tuple[int, int, int, int]], int], tuple[int, int, int, int]]] = {
    "outside": lambda rows, i: (REGION_BYTES + 1 - rows[i][1], *rows[i][1:]),
    "far outside": lambda rows, i: (HUGE, *rows[i][1:]),
    "longer than the region": lambda rows, i: (0, HUGE, HUGE >> 1, 0),
    "too long for its part": lambda rows, i: (0, rows[i][1] + 1, rows[i][1], rows[i][3]),
    "too short for its part": lambda rows, i: (*rows[i][:2], rows[i][1] + 1, rows[i][3]),
}


@pytest.mark.parametrize("kind", WRONG)
@given(rows=st.lists(_right_rows(), min_size=1, max_size=6), place=st.integers(0, 5))
def test_one_wrong_slice_among_right_ones_is_refused_alike(
    kind: str, rows: list[tuple[int, int, int, int]], place: int
) -> None:
    place %= len(rows)
    rows[place] = WRONG[kind](rows, place)
    asked = _asked(rows)
    assert not _is_same_by_columns(asked)
    with pytest.raises(InvalidArgument, match=f"part {place}: ") as caught:
        asked.plan()
    assert caught.value.field == "into"


@pytest.mark.parametrize("count", [0, 1, 2, 64, 65])
def test_slices_of_another_number_than_parts_are_refused(count: int) -> None:
    rows = [(0, 10, 10, 0)] * count
    asked = _asked(rows)
    short = Asked(asked.slice_offsets, asked.slice_lengths, [*asked.part_lengths, 10], [*asked.arena_offsets, 0])
    assert not _is_same_by_columns(short)
    with pytest.raises(InvalidArgument, match=f"{count} slices for {count + 1} parts"):
        short.plan()


# -- rows ----------------------------------------------------------------------------------------------------------


def _copies(rows: Sequence[tuple[int, int, int]]) -> Copies:
    """Rows are (arena offset, region offset, length)."""
    arena, region, lengths = np.array(rows, np.int64).reshape(-1, 3).T
    return Copies(arena, region, lengths)


def _columns(rows: _Rows) -> dict[str, list[int]]:
    return {each.name: listed(getattr(rows, each.name)) for each in fields(_Rows)}


def _by_columns(copies: Copies, piece_bytes: int) -> _Rows:
    with _few_slices(copier, BY_COLUMNS):
        return _Rows.of(copies, piece_bytes)


def _rows(rows: Sequence[tuple[int, int, int]], piece_bytes: int) -> list[tuple[int, int, int, bool, int]]:
    """The rows of copies, which are the same both ways."""
    copies = _copies(rows)
    few = _Rows._of_few(copies, piece_bytes)
    assert _columns(few) == _columns(_by_columns(copies, piece_bytes)) == _columns(_Rows.of(copies, piece_bytes))
    begins = [i in few.starts for i in range(len(few.lengths))]
    columns = (few.arena, few.region, few.lengths, begins, few.ends)
    return list(zip(*map(list, columns), strict=True))


@st.composite
def _chains(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Slices that often go on where the one before ends, in the arena, in the region or in both; in any order."""
    rows, arena_end, region_end = list[tuple[int, int, int]](), 0, 0
    for _ in range(draw(st.integers(0, 12))):
        arena = draw(st.just(arena_end) | st.integers(0, 200))
        region = draw(st.just(region_end) | st.integers(0, 200))
        size = draw(st.integers(1, 30))
        rows.append((arena, region, size))
        arena_end, region_end = arena + size, region + size
    return draw(st.permutations(rows)) if draw(st.booleans()) else rows


@given(_chains(), st.integers(1, 20) | st.just(1 << 20))
@example([], 1)
@example([(0, 0, 0)], 1)
@example([(0, 0, 10)] * 2, 3)
@example([(i * 10, i * 10, 10) for i in range(64)], 7)
@example([(i * 10, i * 10, 10) for i in range(65)], 7)
@example([(i * 10, (63 - i) * 10, 10) for i in range(64)], 1 << 20)
def test_few_slices_give_the_same_rows(rows: list[tuple[int, int, int]], piece_bytes: int) -> None:
    made = _rows(rows, piece_bytes)
    moved = [(arena + i, region + i) for arena, region, size, _, _ in made for i in range(size)]
    assert sorted(moved) == sorted((arena + i, region + i) for arena, region, size in rows for i in range(size))
    assert all(0 < size <= piece_bytes for _, _, size, _, _ in made)


def test_no_copies_are_no_rows() -> None:
    assert _rows([], 1) == []
    assert _rows([(10, 10, 0), (20, 5, 0)], 1) == []


def test_slices_come_in_the_order_of_the_region() -> None:
    assert _rows([(0, 50, 5), (10, 0, 5), (20, 30, 5)], 100) == [
        (10, 0, 5, True, 5),
        (20, 30, 5, True, 10),
        (0, 50, 5, True, 15),
    ]


def test_slices_that_go_on_in_both_are_joined() -> None:
    assert _rows([(110, 10, 5), (100, 0, 10), (115, 15, 5)], 100) == [(100, 0, 20, True, 20)]


def test_slices_that_go_on_in_the_region_alone_are_one_run_of_rows() -> None:
    assert _rows([(100, 0, 10), (50, 10, 5)], 100) == [(100, 0, 10, True, 10), (50, 10, 5, False, 15)]


def test_slices_that_go_on_in_the_arena_alone_are_runs_of_their_own() -> None:
    assert _rows([(100, 0, 10), (110, 20, 5)], 100) == [(100, 0, 10, True, 10), (110, 20, 5, True, 15)]


def test_long_slices_are_cut_at_the_length_of_a_piece() -> None:
    assert _rows([(100, 0, 6), (106, 6, 5), (0, 20, 4)], 4) == [
        (100, 0, 4, True, 4),
        (104, 4, 4, False, 8),
        (108, 8, 3, False, 11),
        (0, 20, 4, True, 15),
    ]


def test_slices_at_one_place_of_the_region_keep_their_order() -> None:
    """The last of them is what the region holds in the end."""
    assert [row[0] for row in _rows([(30, 7, 1), (10, 7, 1), (20, 7, 1)], 4)] == [30, 10, 20]
