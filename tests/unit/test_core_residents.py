"""What the warm tier holds, in memory: against a naive model, while segments come and go, and under readers."""

from __future__ import annotations

import hashlib
import random
import threading

from kvstore.core.residents import Residents, fingerprint_of
from kvstore.core.segments import Segment, SegmentBook, SegmentRules

UNIT = 4096
ONE, TWO = b"1" * 32, b"2" * 32


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def book(count: int = 1000) -> SegmentBook:
    return SegmentBook(SegmentRules(segment_bytes=1 << 20), count << 20)


def begun(made: SegmentBook) -> Segment:
    segment = made.open()
    assert segment is not None
    return segment


def place(segment: Segment, residents: Residents, number: int, *, digest: bytes = ONE, expires: float = 0.0) -> int:
    start = UNIT * (len(segment) + 1)
    row = segment.add(start, UNIT, 1.0, fingerprint=fingerprint_of(digest, key(number)), expires=expires)
    residents.put(segment, row)
    return row


def has(residents: Residents, *numbers: int, digest: bytes = ONE, wall: float = 50.0) -> list[bool]:
    return residents.has(digest, [key(n) for n in numbers], wall)


def test_what_was_placed_is_there_and_nothing_else() -> None:
    made = book()
    residents = Residents(made)
    assert has(residents, 0, 1) == [False, False]
    place(begun(made), residents, 0)
    assert has(residents, 0, 1, 0) == [True, False, True]
    assert has(residents, 0, digest=TWO) == [False], "a block of another namespace"
    assert has(residents) == []


def test_a_block_goes_with_its_row_and_with_its_segment() -> None:
    made = book()
    residents = Residents(made)
    first = begun(made)
    rows = [place(first, residents, i) for i in range(3)]
    first.drop(rows[1])
    assert has(residents, 0, 1, 2) == [True, False, True]
    made.seal(first)
    assert has(residents, 0, 1, 2) == [True, False, True], "trimming lost something"
    made.give_up(first)
    assert has(residents, 0, 1, 2) == [False] * 3
    again = begun(made)
    assert again is first
    place(again, residents, 2)
    assert has(residents, 0, 1, 2) == [False, False, True]


def test_a_block_whose_time_is_over_is_not_there() -> None:
    made = book()
    residents = Residents(made)
    segment = begun(made)
    place(segment, residents, 0)
    place(segment, residents, 1, expires=50.0)
    place(segment, residents, 2, expires=51.0)
    assert has(residents, 0, 1, 2, wall=50.0) == [True, False, True]
    made.seal(segment)
    residents.rebuild()
    assert has(residents, 0, 1, 2, wall=50.0) == [True, False, True]


def test_a_block_written_anew_goes_out_of_the_segment_that_had_it() -> None:
    made = book()
    residents = Residents(made)
    first = begun(made)
    for i in range(3):
        place(first, residents, i)
    made.seal(first)
    second = begun(made)
    place(second, residents, 1)
    place(second, residents, 1)
    assert (first.block_count, second.block_count, made.stored.block_count) == (2, 1, 3)
    assert made.stored.size_bytes == 3 * UNIT
    assert has(residents, 0, 1, 2) == [True] * 3
    made.give_up(first)
    assert has(residents, 0, 1, 2) == [False, True, False]


def test_of_two_blocks_of_one_fingerprint_the_later_is_there_and_the_other_a_miss() -> None:
    made = book()
    residents = Residents(made)
    segment = begun(made)
    for start in (UNIT, 2 * UNIT):
        residents.put(segment, segment.add(start, UNIT, 1.0, fingerprint=fingerprint_of(ONE, key(7))))
    assert has(residents, 7) == [True]
    assert (segment.row_at(UNIT), segment.row_at(2 * UNIT)) == (None, 1)


def test_it_grows_with_what_is_stored_and_does_not_with_what_has_gone() -> None:
    made = book()
    residents = Residents(made)
    slots = residents.slot_count
    numbers = iter(range(1 << 30))
    for _ in range(20):  # As much as the first slots take, over and over.
        segment = begun(made)
        for _ in range(slots // 4):
            place(segment, residents, next(numbers))
        made.seal(segment)
        made.give_up(segment)
    assert residents.slot_count == slots
    held = []
    for _ in range(8):
        segment = begun(made)
        mine = [next(numbers) for _ in range(slots // 4)]
        for number in mine:
            place(segment, residents, number)
        made.seal(segment)
        held += mine
    assert slots * 2 < residents.slot_count <= 8 * slots
    assert all(has(residents, *held))
    again = Residents(made)
    assert all(has(again, *held)), "made anew of what the book has"


def test_against_a_naive_model() -> None:
    rng = random.Random(1)
    made = book(12)
    residents, model = Residents(made), dict[int, tuple[Segment, int]]()
    opened = begun(made)
    for step in range(20_000):
        number = rng.randrange(6000)
        if rng.random() < 0.9:
            model[number] = (opened, place(opened, residents, number))
        elif number in model:
            segment, row = model.pop(number)
            assert segment.drop(row)
        if len(opened) == 900:
            made.seal(opened)
            if not made.has_room:
                victim = rng.choice(made.sealed)
                model = {n: at for n, at in model.items() if at[0] is not victim}
                made.give_up(victim)
            opened = begun(made)
        if step % 500 == 0:
            asked = range(6000)
            assert has(residents, *asked) == [n in model for n in asked]
            assert made.stored.block_count == len(model) == sum(s.block_count for s in made.held)
            assert made.stored.size_bytes == UNIT * len(model)


def test_who_asks_while_it_changes_always_finds_what_is_there() -> None:
    made = book(4000)
    residents = Residents(made)
    segment = begun(made)
    for i in range(500):
        place(segment, residents, i)
    made.seal(segment)
    stays, never = [key(i) for i in range(500)], [key(-1 - i) for i in range(500)]
    ended, wrong, asked = threading.Event(), list[str](), 0

    def ask() -> None:
        nonlocal asked
        while not ended.is_set() and not wrong:
            if not all(residents.has(ONE, stays, 1.0)):
                wrong.append("a block was not found")
            if any(residents.has(ONE, never, 1.0)):
                wrong.append("a block was found that never was there")
            asked += 1

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    number = 1000
    while asked < 200 and number < 400_000 and not wrong:
        segment = begun(made)
        for _ in range(300):
            row = place(segment, residents, number)
            if number % 3 == 0:
                segment.drop(row)
            number += 1
        made.seal(segment)
        if number % 600 == 100:
            made.give_up(segment)
        residents.rebuild()
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert asked
