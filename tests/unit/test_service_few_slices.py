"""Copies of few slices are planned one by one, of many by columns: both plan the same and refuse the same."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.service import copier, regions
from kvstore.service.copier import _Rows
from kvstore.service.regions import Copies, Region
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import types_pb2 as types

LENGTH = 1000
NUMBERS = st.integers(0, LENGTH + 2)


def planned(slices: types.RegionSlices, lengths: list[int], offsets: list[int]) -> Any:
    region = Region(os.open(os.devnull, os.O_RDONLY), 0, LENGTH, (0, 0), is_readable=True, is_writable=True)
    try:
        made = regions.plan(slices, region, lengths, offsets, field="source")
        return [column.tolist() for column in (made.arena, made.region, made.lengths)]
    except InvalidArgument as error:
        return str(error)
    finally:
        os.close(region.fd)


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(-1, 1), st.integers(-1, 5000)), max_size=6),
    st.integers(-1, 1),
)
def test_plans_are_the_same_one_by_one_and_by_columns(parts: list[tuple[int, int, int, int]], surplus: int) -> None:
    slices = types.RegionSlices(offsets=[p[0] for p in parts], lengths=[p[1] for p in parts])
    lengths = [-1 if p[2] < 0 else p[1] + p[2] * (p[1] % 3 == 0) for p in parts] + [7] * max(0, surplus)
    offsets = [p[3] for p in parts] + [0] * max(0, surplus)
    if surplus < 0:
        lengths, offsets = lengths[:-1], offsets[:-1]
    few = planned(slices, lengths, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "_FEW_SLICES", -1)
        assert planned(slices, lengths, offsets) == few


def rows(copies: Copies) -> list[Any]:
    made = _Rows.of(copies, 64)
    return [column.tolist() for column in (made.arena, made.region, made.lengths, made.starts, made.ends)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 200)), min_size=1, max_size=8))
def test_rows_are_the_same_one_by_one_and_by_columns(parts: list[tuple[int, int, int]]) -> None:
    """Small numbers, so that slices follow one another by chance."""
    table = np.array(parts, np.int64).T
    copies = Copies(table[0] * 20, table[1] * 20, table[2])
    few = rows(copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "_FEW_SLICES", -1)
        assert rows(copies) == few


def test_slices_that_follow_one_another_are_one_run() -> None:
    copies = Copies(np.array([100, 0, 50]), np.array([60, 0, 50]), np.array([100, 50, 10]))
    arena, region, lengths, starts, ends = rows(copies)
    assert (arena, region, lengths) == ([0, 100, 164], [0, 60, 124], [60, 64, 36])
    assert starts == [True, False, False]
    assert ends == [60, 124, 160]
