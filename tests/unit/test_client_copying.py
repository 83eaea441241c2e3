"""Parts copied out of an arena and hashed: exact bytes, damage named, threads that never outlive a call."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore_client import InvalidArgument, MalformedAnswer, Verify
from kvstore_client.buffers import Slices
from kvstore_client.copying import CHUNK_BYTES, MAX_THREADS, SPREAD_HASH_BYTES, Copier
from kvstore_client.moving import HASH_STEP_BYTES, HOLD_S, SMALL_BYTES, STALL_S, Mover
from tests.unit.sealed_memory import SIZES, Shelf, noise

KIB, MIB = 1 << 10, 1 << 20
ALL_SIZES = (*SIZES, SMALL_BYTES, SMALL_BYTES + 1, HASH_STEP_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 1)
LARGE = [MIB] * 12  # Bytes of parts that are spread over threads.


@contextmanager
def shelf_of(sizes: list[int]) -> Iterator[Shelf]:
    shelf = Shelf([noise(size, seed=i) for i, size in enumerate(sizes)])
    yield shelf
    shelf.close()


@contextmanager
def copier_of(threads: int) -> Iterator[Copier]:
    copier = Copier(threads)
    yield copier
    copier.close()


def read(copier: Copier, shelf: Shelf, targets: Sequence[Slices | None], verify: Verify = Verify.ON) -> list[int]:
    grants = shelf.grants
    return copier.copy_out(
        shelf.mapping.array,
        offsets=grants.offsets,
        lengths=grants.lengths,
        checksums=grants.checksums,
        targets=targets,
        verify=verify,
    )


def rooms_of(shelf: Shelf, more_bytes: int = 0) -> list[bytearray]:
    return [bytearray(b"\xee" * (len(part) + more_bytes)) for part in shelf.parts]


def whole(rooms: list[bytearray]) -> list[Slices]:
    return [[memoryview(room)] for room in rooms]


def cut(room: bytearray, rng: random.Random) -> Slices:
    places = sorted(rng.randint(0, len(room)) for _ in range(rng.randint(1, 5)))
    view = memoryview(room)
    return [view[a:b] for a, b in zip([0, *places], [*places, len(room)], strict=True)]


def helpers() -> int:
    return sum(thread.name == "kvstore-copy" for thread in threading.enumerate())


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("size", ALL_SIZES)
def test_exactly_the_part_lands_and_what_is_behind_it_stays(size: int, verify: Verify) -> None:
    with shelf_of([size]) as shelf, copier_of(2) as copier:
        rooms = rooms_of(shelf, more_bytes=9)
        assert read(copier, shelf, whole(rooms), verify) == []
        assert bytes(rooms[0]) == shelf.parts[0] + b"\xee" * 9


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threads", [1, 3])
def test_slices_of_any_cut_are_filled_in_order(seed: int, threads: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice(ALL_SIZES) for _ in range(12)]
    with shelf_of(sizes) as shelf, copier_of(threads) as copier:
        rooms = rooms_of(shelf, more_bytes=rng.choice([0, 5]))
        assert read(copier, shelf, [cut(room, rng) for room in rooms]) == []
        assert [bytes(room[: len(part)]) for room, part in zip(rooms, shelf.parts, strict=True)] == shelf.parts
        assert all(set(room[len(part) :]) <= {0xEE} for room, part in zip(rooms, shelf.parts, strict=True))


@pytest.mark.parametrize("threads", [1, 4])
def test_damage_is_found_and_named(threads: int) -> None:
    with shelf_of([*LARGE, 1, CHUNK_BYTES + 1]) as shelf, copier_of(threads) as copier:
        for part in (13, 0, 7, 12):
            shelf.damage(part)
        rooms = rooms_of(shelf)
        assert read(copier, shelf, whole(rooms)) == [0, 7, 12, 13]
        assert read(copier, shelf, whole(rooms), Verify.OFF) == []
        assert bytes(rooms[1]) == shelf.parts[1]


def test_parts_without_a_target_are_passed_over() -> None:
    with shelf_of([4, 5, 6]) as shelf, copier_of(2) as copier:
        shelf.damage(0)
        room = bytearray(5)
        assert read(copier, shelf, [None, [memoryview(room)], None]) == []
        assert bytes(room) == shelf.parts[1]
        assert read(copier, shelf, [None, None, None]) == []


def test_sizes_are_refused_before_a_byte_moves() -> None:
    with shelf_of([3900, 3900]) as shelf, copier_of(1) as copier:
        rooms = [bytearray(15500), bytearray(1000)]
        with pytest.raises(InvalidArgument, match=r"into\[1\]: has 1000 bytes .*at least 3900"):
            read(copier, shelf, whole(rooms))
        with pytest.raises(InvalidArgument, match="has 1 entries"):
            read(copier, shelf, whole(rooms[:1]))
        assert rooms == [bytearray(15500), bytearray(1000)]


@pytest.mark.parametrize(
    ("offsets", "lengths", "sums"),
    [([4, 9000], [4, 4], [0, 0]), ([4, -1], [4, 4], [0, 0]), ([4, 4], [4, -4], [0, 0]), ([4, 4], [4, 4], [0])],
)
def test_parts_outside_of_the_arena_are_refused(offsets: list[int], lengths: list[int], sums: list[int]) -> None:
    with shelf_of([4096]) as shelf, copier_of(1) as copier:
        rooms = [bytearray(4), bytearray(4)]
        with pytest.raises(MalformedAnswer):
            copier.copy_out(
                shelf.mapping.array,
                offsets=offsets,
                lengths=lengths,
                checksums=sums,
                targets=whole(rooms),
                verify=Verify.OFF,
            )
        assert rooms == [bytearray(4), bytearray(4)]


@pytest.mark.parametrize("threads", [1, 4])
def test_hashes_are_those_of_the_parts(threads: int) -> None:
    values = [noise(size, seed=size) for size in (*ALL_SIZES, SPREAD_HASH_BYTES)]
    rng = random.Random(3)
    with copier_of(threads) as copier:
        wanted = [xxh3_64_intdigest(value) for value in values]
        assert copier.hash_parts([[memoryview(value)] for value in values]) == wanted
        assert copier.hash_parts([cut(bytearray(value), rng) for value in values]) == wanted
        assert copier.hash_parts([]) == []
        assert copier.hash_parts([[]]) == [xxh3_64_intdigest(b"")]


def test_helpers_come_with_the_first_large_batch_and_go_with_close() -> None:
    before = helpers()
    with shelf_of(LARGE) as shelf, shelf_of([4096, 4096, 9 * MIB]) as small:
        copier = Copier(3)
        read(copier, small, [*whole(rooms_of(small))[:2], None])
        assert helpers() == before
        rooms = rooms_of(shelf)
        assert read(copier, shelf, whole(rooms)) == []
        assert helpers() == before + 2
        copier.close()
        copier.close()
        assert helpers() == before
        rooms = rooms_of(shelf)
        assert read(copier, shelf, whole(rooms)) == []
        assert [bytes(room) for room in rooms] == shelf.parts
        assert helpers() == before


def test_helpers_of_a_forgotten_copier_end() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with shelf_of(LARGE) as shelf:
        copier = Copier(2)
        read(copier, shelf, whole(rooms_of(shelf)))
        (helper,) = [t for t in threading.enumerate() if t.ident not in before]
        del copier
        gc.collect()
        helper.join(10)
        assert not helper.is_alive()


@pytest.mark.parametrize("threads", [0, -1, MAX_THREADS + 1])
def test_the_number_of_threads_is_bounded(threads: int) -> None:
    with pytest.raises(InvalidArgument, match="threads"):
        Copier(threads)
    assert 1 <= Copier().threads <= 4


def test_many_threads_share_one_copier() -> None:
    wrong: list[object] = []
    with shelf_of(LARGE) as shelf, copier_of(3) as copier:
        shelf.damage(5)

        def work() -> None:
            rooms = rooms_of(shelf)
            for _ in range(10):
                found = read(copier, shelf, whole(rooms))
                good = all(bytes(rooms[i]) == shelf.parts[i] for i in range(len(rooms)) if i != 5)
                if found != [5] or not good:
                    wrong.append((found, good))
                for room in rooms:
                    room[:] = bytes(len(room))
                    room.append(1)  # Fails where any thread still holds the buffer.
                    room.pop()

        workers = [threading.Thread(target=work) for _ in range(5)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
    assert wrong == []


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_is_raised_when_nothing_touches_the_buffers_any_more(threads: int) -> None:
    with shelf_of(LARGE) as shelf, copier_of(threads) as copier:
        for bad in range(len(LARGE)):
            rooms = rooms_of(shelf)
            targets = whole(rooms)
            targets[bad] = [memoryview(bytes(len(shelf.parts[bad])))]
            with pytest.raises(ValueError, match="read-only"):
                read(copier, shelf, targets)
            seen = [bytes(room) for room in rooms]
            untouched = b"\xee" * MIB
            assert all(room in (part, untouched) for room, part in zip(seen, shelf.parts, strict=True))
        rooms = rooms_of(shelf)
        assert read(copier, shelf, whole(rooms)) == []
        assert [bytes(room) for room in rooms] == shelf.parts


class Interrupted(Exception):
    pass


@contextmanager
def alarm(after_s: float, action: Callable[[], None]) -> Iterator[None]:
    def struck(number: int, frame: FrameType | None) -> None:
        action()

    before = signal.signal(signal.SIGALRM, struck)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_leaves_no_thread_at_work() -> None:
    def interrupt() -> None:
        raise Interrupted

    with shelf_of([MIB] * 24) as shelf, copier_of(3) as copier:
        # Helpers are there before: an interrupt while a thread is being started upsets Python itself.
        read(copier, shelf, whole(rooms_of(shelf)))
        interrupted = 0
        for after_us in range(200, 6000, 200):
            rooms = rooms_of(shelf)
            try:
                with alarm(after_us / 1e6, interrupt):
                    corrupt = read(copier, shelf, whole(rooms))  # Inside an assert, pytest would keep the views.
                assert corrupt == []
            except Interrupted:
                interrupted += 1
            for room in rooms:
                room.append(1)  # Fails where any thread still holds the buffer.
        assert interrupted > 0
        rooms = rooms_of(shelf)
        assert read(copier, shelf, whole(rooms)) == []
        assert [bytes(room) for room in rooms] == shelf.parts


def in_child(work: Callable[[], bool]) -> int:
    """Runs `work` in a forked child and returns its exit status, 0 for True. A child that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit(0 if work() else 1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_copies_and_closes_by_itself() -> None:
    with shelf_of(LARGE) as shelf, copier_of(3) as copier:
        stop = threading.Event()

        def hammer() -> None:
            rooms = rooms_of(shelf)
            while not stop.is_set():
                read(copier, shelf, whole(rooms))

        def child() -> bool:
            for _ in range(2):
                rooms = rooms_of(shelf)
                if read(copier, shelf, whole(rooms)) or [bytes(room) for room in rooms] != shelf.parts:
                    return False
                copier.close()
            return True

        workers = [threading.Thread(target=hammer) for _ in range(2)]
        for worker in workers:
            worker.start()
        statuses = [in_child(child) for _ in range(6)]
        stop.set()
        for worker in workers:
            worker.join(20)
        assert statuses == [0] * 6
        rooms = rooms_of(shelf)
        assert read(copier, shelf, whole(rooms)) == []
        assert [bytes(room) for room in rooms] == shelf.parts


def test_arrays_are_taken_as_targets() -> None:
    with shelf_of(LARGE) as shelf, copier_of(2) as copier:
        room = np.zeros((len(LARGE), MIB), np.uint8)
        assert read(copier, shelf, [[row.data] for row in room]) == []
        assert [row.tobytes() for row in room] == shelf.parts


class Clock:
    """Goes on by `step_s` each time it is read."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 0.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def moves_exactly(mover: Mover, data: bytes) -> bool:
    room = bytearray(len(data))
    mover.copy(memoryview(room), memoryview(data))
    return bytes(room) == data and mover.hash(memoryview(room)) == xxh3_64_intdigest(data)


@pytest.mark.parametrize("size", ALL_SIZES)
def test_stalled_steps_make_the_next_ones_hold_the_lock_for_a_while(size: int) -> None:
    data, clock = noise(size), Clock()
    mover = Mover(clock)
    assert moves_exactly(mover, data)
    assert not mover.holds
    clock.step_s = STALL_S * 1.01
    assert moves_exactly(mover, data)  # A copy and a hash.
    clock.step_s = 0.0
    assert mover.holds is (size > HASH_STEP_BYTES)
    assert moves_exactly(mover, data)
    clock.now_s += HOLD_S
    assert not mover.holds
    assert moves_exactly(mover, data)


def test_a_single_stalled_step_changes_nothing() -> None:
    data, clock = noise(MIB), Clock()
    mover, room = Mover(clock), memoryview(bytearray(MIB))
    for _ in range(3):
        clock.step_s = STALL_S * 1.01
        mover.copy(room, memoryview(data))
        clock.step_s = 0.0
        mover.copy(room, memoryview(data))
        assert not mover.holds


def test_parts_land_beside_a_thread_that_never_rests() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    spinner = threading.Thread(target=spin)
    spinner.start()
    with shelf_of(LARGE) as shelf, copier_of(3) as copier:
        shelf.damage(3)
        for _ in range(3):
            rooms = rooms_of(shelf)
            assert read(copier, shelf, whole(rooms)) == [3]
            assert copier.hash_parts(whole(rooms)) == [xxh3_64_intdigest(room) for room in rooms]
            assert [bytes(room) for room in rooms[4:]] == shelf.parts[4:]
    stop.set()
    spinner.join(20)
