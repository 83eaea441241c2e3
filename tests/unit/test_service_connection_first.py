"""The first bytes of many buffers: as many as asked for, and never a copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.service.framed.connection import _first


def _views(*pieces: bytes) -> list[memoryview]:
    return [memoryview(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        (1, [b"a"]),
        (2, [b"ab"]),
        (3, [b"abc"]),
        (4, [b"abc", b"d"]),
        (5, [b"abc", b"de"]),
        (6, [b"abc", b"de", b"f"]),
        (9, [b"abc", b"de", b"fghi"]),
        (10, [b"abc", b"de", b"fghi"]),
        (1 << 40, [b"abc", b"de", b"fghi"]),
    ],
)
def test_the_first_bytes_of_buffers(most: int, wanted: list[bytes]) -> None:
    assert [bytes(view) for view in _first(_views(b"abc", b"de", b"fghi"), most)] == wanted


def test_of_no_buffers_there_is_nothing() -> None:
    assert _first([], 1) == []


def test_where_all_is_wanted_the_list_is_given_back_as_it_is() -> None:
    views = _views(b"abc", b"de")
    assert _first(views, 5) is views
    assert _first(views, 6) is views


@given(st.lists(st.binary(max_size=6), max_size=8), st.integers(1, 60))
def test_it_is_what_a_slice_of_all_bytes_would_be(pieces: list[bytes], most: int) -> None:
    views = _views(*pieces)
    first = _first(views, most)
    assert b"".join(first) == b"".join(pieces)[:most]
    assert all(view.obj is piece for view, piece in zip(first, pieces, strict=False))
    assert [bytes(view) for view in views] == pieces  # Those that the outbox keeps are untouched.
    assert all(
        len(view) == len(piece) for view, piece in zip(first[:-1], pieces, strict=False)
    )  # Only the last is cut.
