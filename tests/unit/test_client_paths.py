"""Which way is taken: what was offered, what is wanted, what failed and for how long it is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvstore_client import ClientOptions
from kvstore_client.errors import PathDown
from kvstore_client.fast.dial import Endpoint
from kvstore_client.paths import FIRST_PAUSE_S, LONGEST_PAUSE_S, Path, Paths, no_way
from kvstore_client.quiet import QuietLog
from kvstore_client.session import Binding
from kvstore_wire.v1 import types_pb2 as types

DOWN = PathDown("refused")
OFFERS = {"shm": "/run/kvstore.sock", "bulk": "10.0.0.1:7072"}


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def paths_of(*transports: str, clock: Clock | None = None) -> Paths:
    options = ClientOptions("10.0.0.9:7070", transports=transports)
    return Paths(options, QuietLog("test"), clock=clock or Clock(), probe=lambda _: None, aside=lambda work: work())


def binding(offers: dict[str, str], generation: int = 1) -> Binding:
    return Binding(b"session", generation, 1, types.Limits(), frozenset(), offers)


def best(paths: Paths, bound: Binding) -> str:
    path = paths.best(bound)
    return "grpc" if path is None else path.name


def taken(paths: Paths, bound: Binding) -> Path:
    path = paths.best(bound)
    assert path is not None
    return path


@pytest.mark.parametrize(
    ("wanted", "offered", "expected"),
    [
        (("shm", "bulk", "grpc"), ("shm", "bulk"), "shm"),
        (("shm", "bulk", "grpc"), ("bulk",), "bulk"),
        (("shm", "bulk", "grpc"), (), "grpc"),
        (("bulk", "shm", "grpc"), ("shm", "bulk"), "bulk"),
        (("grpc", "shm", "bulk"), ("shm", "bulk"), "grpc"),
        (("grpc",), ("shm", "bulk"), "grpc"),
        (("bulk", "grpc"), ("shm",), "grpc"),
    ],
)
def test_the_callers_order_of_what_is_offered_counts(
    wanted: tuple[str, ...], offered: tuple[str, ...], expected: str
) -> None:
    assert best(paths_of(*wanted), binding({name: OFFERS[name] for name in offered})) == expected


@pytest.mark.parametrize(
    ("name", "address", "expected"),
    [
        ("shm", "/run/x.sock", "unix:/run/x.sock"),
        ("shm", "run/x.sock", None),
        ("shm", "", None),
        ("bulk", ":7072", "10.0.0.9:7072"),
        ("bulk", "10.1.1.1:7072", "10.1.1.1:7072"),
        ("bulk", "[fd00::1]:7072", "fd00::1:7072"),
        ("bulk", "host:90abc", None),
        ("bulk", "host:", None),
        ("bulk", "host:0", None),
        ("bulk", "host:70000", None),
        ("bulk", "host", None),
    ],
)
def test_an_offer_that_makes_no_sense_is_no_way(name: str, address: str, expected: str | None) -> None:
    endpoint = Endpoint.of_offer(name, address, ClientOptions("10.0.0.9:7070"))
    assert (None if endpoint is None else str(endpoint)) == expected
    assert best(paths_of("shm", "bulk", "grpc"), binding({name: address})) == ("grpc" if expected is None else name)


def test_a_way_that_fails_is_left_out_longer_each_time(clock: Clock) -> None:
    paths, bound = paths_of("shm", "grpc", clock=clock), binding(OFFERS)
    pause_s = FIRST_PAUSE_S
    for _ in range(9):
        paths.failed(taken(paths, bound), DOWN)
        assert best(paths, bound) == "grpc"
        clock.now_s += pause_s - 0.01
        assert best(paths, bound) == "grpc"
        clock.now_s += 0.02
        assert best(paths, bound) == "shm"
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert paths.falls == 9
    paths.worked(taken(paths, bound))
    paths.failed(taken(paths, bound), DOWN)
    clock.now_s += FIRST_PAUSE_S + 0.01
    assert best(paths, bound) == "shm", "what worked in between begins anew"


def test_many_calls_that_fail_at_once_count_once(clock: Clock) -> None:
    paths, bound = paths_of("shm", "bulk", "grpc", clock=clock), binding(OFFERS)
    path = taken(paths, bound)
    threads = [threading.Thread(target=paths.failed, args=(path, DOWN)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths.falls == 1
    assert best(paths, bound) == "bulk"
    paths.failed(taken(paths, bound), DOWN)
    assert best(paths, bound) == "grpc"
    clock.now_s += FIRST_PAUSE_S + 0.01
    assert best(paths, bound) == "shm"


def test_without_grpc_to_fall_back_to_the_pause_stays_short(clock: Clock) -> None:
    """A shard that was away for long is found again within the longest back-off of the client."""
    paths, bound = paths_of("bulk", clock=clock), binding(OFFERS)
    for _ in range(12):
        paths.failed(taken(paths, bound), DOWN)
        assert paths.best(bound) is None
        clock.now_s += ClientOptions("h:1").connect_backoff_max_ms / 1000 + 0.01
    assert not paths.takes_grpc()
    assert "none of bulk works at 10.0.0.9:7070" in str(no_way(paths.options))


class Aside:
    """Ways are tried when the test says so, and fail while they are in `down`."""

    def __init__(self, paths: Paths) -> None:
        self.waiting = list[Callable[[], None]]()
        self.down, self.tried = set[str](), list[str]()
        paths.aside, paths.probe = lambda work: self.waiting.append(work), self.probe

    def probe(self, path: Path) -> None:
        self.tried.append(path.name)
        if path.name in self.down:
            raise DOWN

    def run(self) -> None:
        due, self.waiting = self.waiting, []
        for work in due:
            work()


def test_a_way_that_failed_is_tried_on_the_side_while_calls_go_by_the_next(clock: Clock) -> None:
    paths, bound = paths_of("shm", "bulk", "grpc", clock=clock), binding(OFFERS)
    aside = Aside(paths)
    paths.failed(taken(paths, bound), DOWN)
    assert (best(paths, bound), aside.waiting) == ("bulk", [])
    clock.now_s += FIRST_PAUSE_S + 0.01
    assert [best(paths, bound) for _ in range(5)] == ["bulk"] * 5
    assert len(aside.waiting) == 1
    aside.run()
    assert (best(paths, bound), aside.tried) == ("shm", ["shm"])


def test_a_way_that_is_still_down_costs_no_call_and_is_tried_ever_more_seldom(clock: Clock) -> None:
    paths, bound = paths_of("bulk", "grpc", clock=clock), binding(OFFERS)
    aside = Aside(paths)
    aside.down.add("bulk")
    paths.failed(taken(paths, bound), DOWN)
    for _ in range(1200):
        clock.now_s += 0.5
        assert best(paths, bound) == "grpc"
        aside.run()
    assert 600 / LONGEST_PAUSE_S <= len(aside.tried) <= 600 / LONGEST_PAUSE_S + 8
    assert paths.falls == 1
    aside.down.clear()
    clock.now_s += LONGEST_PAUSE_S + 0.01
    best(paths, bound)
    aside.run()
    assert best(paths, bound) == "bulk"


def test_a_way_that_can_be_connected_to_but_fails_calls_is_left_out_longer_each_time(clock: Clock) -> None:
    paths, bound = paths_of("shm", "grpc", clock=clock), binding(OFFERS)
    aside = Aside(paths)
    for _ in range(400):
        if best(paths, bound) == "shm":
            paths.failed(taken(paths, bound), DOWN)
        aside.run()
        clock.now_s += 0.5
    assert 200 / LONGEST_PAUSE_S <= paths.falls <= 200 / LONGEST_PAUSE_S + 8


def test_where_no_other_way_is_left_a_call_tries_the_one_that_failed(clock: Clock) -> None:
    paths, bound = paths_of("bulk", clock=clock), binding(OFFERS)
    Aside(paths)
    paths.failed(taken(paths, bound), DOWN)
    assert paths.best(bound) is None
    clock.now_s += FIRST_PAUSE_S + 0.01
    assert best(paths, bound) == "bulk"


def test_without_a_thread_for_it_a_way_is_tried_another_time(clock: Clock) -> None:
    def no_thread(_: Callable[[], None]) -> None:
        raise PathDown("no thread can be begun")

    paths, bound = paths_of("bulk", "grpc", clock=clock), binding(OFFERS)
    paths.aside = no_thread
    paths.failed(taken(paths, bound), DOWN)
    clock.now_s += FIRST_PAUSE_S + 0.01
    assert [best(paths, bound) for _ in range(3)] == ["grpc"] * 3
    paths.aside = lambda work: work()
    assert best(paths, bound) == "bulk"


def test_another_life_of_the_shard_begins_without_blame() -> None:
    paths, old = paths_of("shm", "grpc"), binding(OFFERS, generation=1)
    before = taken(paths, old)
    paths.failed(before, DOWN)
    assert best(paths, old) == "grpc"
    new = binding(dict(OFFERS), generation=2)
    after = taken(paths, new)
    assert after != before
    assert after.generation == 2
    paths.failed(before, DOWN)  # A straggler of the old one.
    assert best(paths, new) == "shm"


def test_a_new_session_of_the_same_life_uses_the_same_ways() -> None:
    paths = paths_of("shm", "grpc")
    first = taken(paths, binding(dict(OFFERS)))
    second = taken(paths, binding(dict(OFFERS)))
    assert first == second
    assert hash(first) == hash(second)
    assert {first: 1}[second] == 1
