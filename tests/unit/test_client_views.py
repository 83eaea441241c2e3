"""Leased blocks seen in place: what they show, what they refuse, and what the end of a lease does to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any

import numpy as np
import pytest

from kvstore_client.errors import MalformedAnswer
from kvstore_client.grants import Grants
from kvstore_client.views import BlockViews
from kvstore_wire.errors import InvalidArgument, LeaseExpired
from kvstore_wire.states import BlockState
from tests.unit.sealed_memory import SIZES, Shelf, noise

HOT, MISSING, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND


@dataclass
class Life:
    """A lease as its session knows it."""

    ended: bool = False
    valid: bool = True
    reports: list[list[int]] = field(default_factory=list)

    def release(self, corrupt: Sequence[int]) -> bool:
        self.ended = True
        self.reports.append(list(corrupt))
        return self.valid


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf([noise(4096, seed=i) for i in range(6)])
    yield made
    made.close()


def views_of(shelf: Shelf, life: Life, states: bytes = bytes((HOT, HOT, HOT)), parts_per_block: int = 2) -> BlockViews:
    return BlockViews(
        shelf.mapping,
        states=states,
        grants=shelf.grants,
        parts_per_block=parts_per_block,
        life=life,
        release=life.release,
    )


def test_parts_show_their_bytes(shelf: Shelf) -> None:
    with views_of(shelf, Life()) as views:
        assert len(views) == 6
        assert [view.tobytes() for view in views] == shelf.parts
        assert views[2] is views[2]
        assert views[-1] is views[5]
        assert [bytes(part) for part in views.block(1)] == shelf.parts[2:4]
        with pytest.raises(IndexError, match="part 6 of 6"):
            _ = views[6]
        with pytest.raises(IndexError):
            views.block(3)


def test_parts_of_every_size_can_be_seen() -> None:
    shelf = Shelf([noise(size, seed=size) for size in SIZES])
    with views_of(shelf, Life(), bytes((HOT,)) * len(SIZES), parts_per_block=1) as views:
        assert [bytes(view) for view in views] == shelf.parts
        assert [views.array(i).tobytes() for i in range(len(views))] == shelf.parts
        assert views.verify() == ()
    shelf.close()


def test_blocks_that_are_not_leased_have_no_parts(shelf: Shelf) -> None:
    with views_of(shelf, Life(), bytes((HOT, MISSING, HOT, BEYOND, HOT))) as views:
        assert views.prefix_blocks == 1
        assert [len(views.block(i)) for i in range(5)] == [2, 0, 2, 0, 2]
        assert [bytes(part) for part in views.block(4)] == shelf.parts[4:]
        assert [bytes(part) for part in views.block(-1)] == shelf.parts[4:]


def test_arrays_have_dtype_and_shape_and_cannot_be_written(shelf: Shelf) -> None:
    with views_of(shelf, Life()) as views:
        array = views.array(3, np.float16, (2, 32, 32))
        assert (array.dtype, array.shape) == (np.dtype(np.float16), (2, 32, 32))
        assert array.tobytes() == shelf.parts[3]
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(TypeError):
            views[0][0] = 1
        for dtype, shape, field_ in (("V3", None, "dtype"), (object, None, "dtype"), (np.int32, (5, 5), "shape")):
            with pytest.raises(InvalidArgument, match=f"^{field_}"):
                views.array(0, dtype, shape)


@pytest.mark.parametrize("valid", [True, False])
def test_close_answers_whether_the_lease_was_valid_and_says_so_again(shelf: Shelf, valid: bool) -> None:
    life = Life(valid=valid)
    views = views_of(shelf, life)
    assert (views.held, views.valid) == (True, None)
    assert views.close() is valid
    assert views.close() is valid
    assert (views.held, views.valid, life.reports) == (False, valid, [[]])


def accesses(views: BlockViews) -> list[Callable[[], object]]:
    return [
        lambda: views[0],
        lambda: views.array(0),
        lambda: views.block(0),
        lambda: views.block(1),
        lambda: views.verify(),
        lambda: list(views),
    ]


def test_nothing_can_be_seen_once_closed(shelf: Shelf) -> None:
    with views_of(shelf, Life(), bytes((HOT, MISSING, HOT, HOT))) as views:
        seen, array = views[0], views.array(1)
    for access in accesses(views):
        with pytest.raises(LeaseExpired, match="closed"):
            access()
    with pytest.raises(ValueError, match="released"):
        _ = seen[0]
    assert array.tobytes() == shelf.parts[1]
    assert (views.prefix_blocks, len(views)) == (1, 6)


def test_a_lease_that_ended_by_itself_makes_the_read_a_miss(shelf: Shelf) -> None:
    life = Life()
    views = views_of(shelf, life)
    seen, kept = views[0], views[1]
    array, hold = np.frombuffer(seen, np.uint8), PickleBuffer(kept)
    life.ended = True
    assert not views.held
    for access in accesses(views):
        with pytest.raises(LeaseExpired, match="drop what was read"):
            access()
    with pytest.raises(ValueError, match="released"):
        _ = seen[0]
    # What was made from a view cannot be taken back, nor can a view that other code has a hold on.
    assert array.tobytes() == shelf.parts[0]
    assert bytes(kept) == shelf.parts[1]
    hold.release()
    assert views.close() is False
    assert life.reports == []


def test_damage_is_found_once_asked_for_and_reported_on_close(shelf: Shelf) -> None:
    life = Life()
    for part in (4, 1):
        shelf.damage(part)
    views = views_of(shelf, life)
    assert views.verify([0, 4, -1]) == (4,)
    assert views.verify() == (1, 4)
    assert views.verify([]) == ()
    with pytest.raises(IndexError):
        views.verify([6])
    assert views.close() is True
    assert life.reports == [[1, 4]]


def test_what_was_not_asked_for_is_not_reported(shelf: Shelf) -> None:
    life = Life()
    shelf.damage(2)
    with views_of(shelf, life) as views:
        assert views.verify([0, 1]) == ()
    assert life.reports == [[]]


def test_an_error_inside_ends_the_lease_too(shelf: Shelf) -> None:
    life = Life()
    with pytest.raises(ZeroDivisionError), views_of(shelf, life) as views:
        raise ZeroDivisionError
    assert (life.reports, views.valid) == ([[]], True)


def test_a_release_that_fails_is_raised_and_leaves_a_miss(shelf: Shelf) -> None:
    life = Life()

    def fails(_: Sequence[int]) -> bool:
        raise OSError("gone")

    views = BlockViews(
        shelf.mapping, states=bytes((HOT,)) * 3, grants=shelf.grants, parts_per_block=2, life=life, release=fails
    )
    with pytest.raises(OSError, match="gone"):
        views.close()
    assert views.close() is False


def test_grants_that_fit_neither_states_nor_arena_are_refused(shelf: Shelf) -> None:
    with pytest.raises(MalformedAnswer, match="6 parts for 2 blocks of 2"):
        views_of(shelf, Life(), bytes((HOT, HOT)))
    size = shelf.mapping.size_bytes
    for offset, length in ((size, 1), (2**64 - 1, 2), (0, 2**64 - 1), (1, size)):
        grants = Grants.of([0, offset], [1, length], [0, 0])
        life = Life()
        with pytest.raises(MalformedAnswer, match=r"part 1: .* outside"):
            BlockViews(
                shelf.mapping, states=bytes((HOT,)), grants=grants, parts_per_block=2, life=life, release=life.release
            )
    grants = Grants.of([size], [0], [0])
    life = Life()
    with BlockViews(
        shelf.mapping, states=bytes((HOT,)), grants=grants, parts_per_block=1, life=life, release=life.release
    ) as views:
        assert bytes(views[0]) == b""


def test_no_grants_are_no_views(shelf: Shelf) -> None:
    life = Life()
    grants = Grants.of([], [], [])
    with BlockViews(
        shelf.mapping, states=bytes((MISSING,)), grants=grants, parts_per_block=2, life=life, release=life.release
    ) as views:
        assert (list(views), views.block(0), views.verify(), views.prefix_blocks) == ([], (), (), 0)


def test_views_outlive_the_closing_of_their_mapping(shelf: Shelf) -> None:
    views = views_of(shelf, Life())
    seen = views[0]
    shelf.mapping.close()
    assert seen == shelf.parts[0]
    for access in (lambda: views[1], lambda: views.array(1)):
        with pytest.raises(LeaseExpired, match="mapped no more"):
            access()
    assert views.close() is True


def test_bytes_that_changed_hands_are_not_reported_as_damage(shelf: Shelf) -> None:
    life = Life()
    views = views_of(shelf, life)
    os.pwrite(shelf.fd, noise(4096, seed=99), int(shelf.grants.offsets[0]))

    class EndsWhenHashed(list[int]):
        def __getitem__(self, part: Any) -> Any:
            life.ended = True
            return super().__getitem__(part)

    views._checksums = EndsWhenHashed(views._checksums)
    with pytest.raises(LeaseExpired):
        views.verify([0])
    assert views.close() is False
    assert life.reports == []


def test_threads_that_look_while_one_closes_see_the_bytes_or_the_end(shelf: Shelf) -> None:
    wrong: list[object] = []
    for _ in range(30):
        life = Life()
        views = views_of(shelf, life)
        closed: list[bool] = []

        def look(views: BlockViews = views) -> None:
            try:
                for _ in range(200):
                    for part in range(6):
                        if views.array(part).tobytes() != shelf.parts[part]:
                            wrong.append(part)
                    wrong.extend(views.verify([0]))
            except LeaseExpired:
                return

        def close(views: BlockViews = views, closed: list[bool] = closed) -> None:
            closed.append(views.close())

        threads = [threading.Thread(target=target) for target in (look, look, close, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert (closed, life.reports) == ([True, True], [[]])
    assert wrong == []
