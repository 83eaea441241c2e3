"""The book of segments: lives, choice of what to give up, and what may be written again."""

from __future__ import annotations

import random

import pytest

from kvstore.core.segments import Segment, SegmentBook, SegmentRules, SegmentState

MIB = 1 << 20
UNIT = 4096
RULES = SegmentRules(segment_bytes=100 * UNIT)


def book(count: int = 4, rules: SegmentRules = RULES) -> SegmentBook:
    return SegmentBook(rules, count * rules.segment_bytes)


def filled(made: SegmentBook, *touched: float) -> Segment:
    """Writes a segment with a block for each time, and seals it."""
    segment = made.open()
    assert segment is not None
    for i, at in enumerate(touched):
        segment.add(10 * UNIT * i, 10 * UNIT, at)
    made.seal(segment)
    return segment


def test_segments_are_made_up_to_the_capacity_and_then_one_must_go() -> None:
    made = book(3)
    segments = [filled(made, float(i)) for i in range(3)]
    assert [(s.number, s.sequence) for s in segments] == [(0, 1), (1, 2), (2, 3)]
    assert made.open() is None
    assert made.give_up(segments[1]) is False
    again = made.open()
    assert again is segments[1]
    assert (again.sequence, len(again), again.state) == (4, 0, SegmentState.OPEN)


def test_a_life_that_is_over_is_not_found() -> None:
    made = book()
    segment = filled(made, 1.0)
    assert made.get(0, 1) is segment
    assert made.get(0, 2) is None
    assert made.get(9, 1) is None
    made.give_up(segment)
    assert made.get(0, 1) is None
    made.touch(0, 1, 0, 5.0)  # As a read that comes too late does.
    made.drop(0, 1, 0)


def test_what_was_found_at_start_is_never_given_its_sequence_again() -> None:
    made = book(5)
    made.load(0, 17).add(0, UNIT, 1.0)
    made.load_free(1, 40)
    made.load_bad(2)
    assert made.oldest_sequence == 0, "nobody knows what the bad one holds"
    opened = made.open()
    assert opened is not None
    assert (opened.number, opened.sequence) == (1, 41)
    made.seal(opened)
    fresh = made.open()
    assert fresh is not None
    assert fresh.number == 3, "a bad segment was taken"
    assert [s.number for s in made.sealed] == [0, 1]
    assert made.count(SegmentState.BAD) == 1


def test_a_segment_that_failed_is_left_alone() -> None:
    made = book(2)
    segment = made.open()
    assert segment is not None
    made.fail(segment)
    other = made.open()
    assert other is not None
    assert other.number == 1
    made.seal(other)
    assert made.victim(0.0) is other
    assert made.open() is None


def test_fewer_segments_are_allowed_than_there_are() -> None:
    made = book(5)
    segments = [filled(made, float(i)) for i in range(5)]
    made.resize(3 * RULES.segment_bytes)
    assert made.excess_count == 2
    assert made.open() is None
    assert made.give_up(segments[0])
    assert made.give_up(segments[3])
    assert (made.excess_count, len(made)) == (0, 3)
    assert made.open() is None
    assert made.give_up(segments[1]) is False
    opened = made.open()
    assert opened is segments[1]
    made.resize(10 * RULES.segment_bytes)
    assert [made.open() is not None for _ in range(3)] == [True] * 3
    made.resize(0)
    assert made.capacity_count == 2


def test_of_too_many_segments_those_that_are_free_go_first() -> None:
    made = book(5)
    segments = [filled(made, float(i)) for i in range(5)]
    assert made.drop_free() is None
    made.give_up(segments[1])
    made.give_up(segments[3])
    assert made.drop_free() is None, "there are not too many"
    made.resize(4 * RULES.segment_bytes)
    assert made.drop_free() is segments[1]
    assert (made.drop_free(), len(made), made.count(SegmentState.FREE)) == (None, 4, 1)
    made.resize(2 * RULES.segment_bytes)
    assert (made.drop_free(), made.drop_free(), made.excess_count) == (segments[3], None, 1)


def test_a_block_is_found_by_where_it_begins() -> None:
    segment = Segment(0)
    for i in range(1000):
        assert segment.add(7 * UNIT * i, 7 * UNIT - i % 4000, float(i)) == i
    assert segment.row_at(7 * UNIT * 999) == 999
    assert segment.row_at((7 * 3 + 1) * UNIT) is None
    assert segment.row_at(21 * UNIT + 1) is None
    assert segment.row_at(7000 * UNIT) is None
    assert segment.drop(3)
    assert not segment.drop(3), "it had gone"
    assert segment.row_at(21 * UNIT) is None
    assert (len(segment), segment.block_count, segment.alive_bytes) == (1000, 999, 6993 * UNIT)
    assert segment.start_of(999) == 6993 * UNIT, "growing lost a row"
    segment.trim()
    assert (len(segment.rows), segment.row_at(6993 * UNIT)) == (1000, 999)


def test_live_is_what_an_lru_of_that_share_would_keep() -> None:
    made = book(4, SegmentRules(segment_bytes=100 * UNIT, live_share=0.5, least_live_share=0.5))
    filled(made, 1.0, 9.0, 3.0)
    filled(made, 4.0, 8.0, 2.0)
    since = made.live_since()
    assert since == 4.0
    assert [s.live_bytes(since) for s in made.sealed] == [10 * UNIT, 20 * UNIT]


def test_what_was_used_is_worth_writing_again_the_latest_first() -> None:
    made = book()
    segment = filled(made, 1.0, 2.0, 3.0, 4.0)
    assert segment.worth_rewriting(0.0) == []
    for row, now in ((0, 7.0), (2, 9.0), (3, 5.0)):
        made.touch(0, 1, 10 * UNIT * row, now)
    assert segment.worth_rewriting(0.0) == [2, 0, 3]
    assert segment.worth_rewriting(6.0) == [2, 0]
    assert made.drop(0, 1, 20 * UNIT)
    assert not made.drop(0, 1, 20 * UNIT)
    assert segment.worth_rewriting(0.0) == [0, 3]
    segment.add(40 * UNIT, 10 * UNIT, 8.0, used=True)
    assert segment.worth_rewriting(0.0) == [4, 0, 3]


def test_where_nothing_is_stored_everything_would_be_live() -> None:
    assert book().live_since() == float("-inf")
    assert book().victim(0.0) is None


def test_the_segment_with_the_fewest_live_bytes_goes_and_of_equals_the_oldest() -> None:
    made = book(4)
    filled(made, 9.0, 9.0, 1.0)
    filled(made, 9.0, 1.0, 1.0)
    filled(made, 1.0, 9.0, 1.0)
    assert made.victim(5.0) is made[1]
    made.touch(1, 2, 10 * UNIT, 9.0)
    assert made.victim(5.0) is made[2]
    made.touch(2, 3, 0, 9.0)
    assert made.victim(5.0) is made[0], "of equals the oldest"
    made.drop(2, 3, 0)
    made.drop(2, 3, 10 * UNIT)
    assert made.victim(5.0) is made[2]


def test_an_open_segment_is_no_victim() -> None:
    made = book()
    opened = made.open()
    assert opened is not None
    assert made.victim(0.0) is None
    made.seal(opened)
    assert made.victim(0.0) is opened


def test_rewriting_keeps_to_its_share() -> None:
    made = book(2, SegmentRules(segment_bytes=100 * UNIT, rewrite_share=0.25))
    assert not made.may_rewrite(1)
    made.wrote(75)
    assert made.may_rewrite(25)
    assert not made.may_rewrite(26)
    made.wrote(25, again=True)
    assert not made.may_rewrite(1)
    made.wrote(100)
    assert made.may_rewrite(33)


@pytest.mark.parametrize("seed", range(5))
def test_sampling_many_blocks_finds_nearly_the_same_time(seed: int) -> None:
    rng = random.Random(seed)
    made = SegmentBook(SegmentRules(segment_bytes=MIB, live_share=0.85, least_live_share=0.85), 40 * MIB)
    times = []
    for _ in range(40):
        segment = made.open()
        assert segment is not None
        for i in range(5000):
            times.append(rng.random())
            segment.add(i * UNIT, UNIT, times[-1])
        made.seal(segment)
    exact = sorted(times, reverse=True)[int(0.85 * len(times))]
    assert abs(made.live_since() - exact) < 0.01


@pytest.mark.parametrize(("used", "share"), [(0.0, 0.95), (0.6, 0.95), (0.8, 0.875), (1.0, 0.8), (2.0, 0.8)])
def test_less_counts_as_live_the_more_of_what_may_be_rewritten_is_used(used: float, share: float) -> None:
    made = book(4, SegmentRules(segment_bytes=100 * UNIT, rewrite_share=0.25))
    made.wrote(1_000_000 - int(used * 250_000))
    made.wrote(int(used * 250_000), again=True)
    assert made.live_share == pytest.approx(share)


def test_where_nothing_may_be_rewritten_the_least_counts_as_live() -> None:
    made = book(4, SegmentRules(segment_bytes=100 * UNIT, rewrite_share=0.0))
    made.wrote(1_000_000)
    assert made.live_share == pytest.approx(0.8)
