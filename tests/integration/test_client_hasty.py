"""Calls that give a shard less time than a connection or a registration takes: they end in time, what they began goes
on, and later calls have it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from kvstore.service.framed.requests import Requests
from kvstore_client import BlockState, Client
from kvstore_client.deadline import Deadline
from kvstore_client.direct import run_now
from kvstore_client.errand import MOST_THREADS, THREAD_NAME
from kvstore_client.errors import PathDown
from kvstore_client.fast import dial as dialing
from kvstore_client.fast.dial import CONNECT_S, Endpoint, dial
from kvstore_client.tls import TlsOptions
from kvstore_client.transports import shm
from kvstore_client.transports.shm import RETIRE_MS
from kvstore_wire.errors import DeadlineExceeded, KvStoreError
from kvstore_wire.frames import END, Frame, Verb, head
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.server_process import LocalServer
from tests.integration.shard import closed_address
from tests.integration.transport_scene import (
    MIB,
    Driver,
    Proxy,
    Rooms,
    Shard,
    driven,
    options_of,
    region_of,
    sharded,
    unregister,
    until,
)

pytestmark = pytest.mark.integration
SIZE = 300_000  # More than what goes through the socket where memory is shared.
SPEC = kv_spec(part_bytes=SIZE)
COUNT = 2
BLOCKS, VALUES = keys(COUNT), [value(("hasty", i), SIZE) for i in range(COUNT)]
KINDS = ("blocking", "asyncio")
HASTY_MS = 20
IN_TIME_S = 1.5  # Far above a hasty call's deadline, below what a connection may take.
GREETS_AFTER_S = 0.6
BY_COPY = {"shm.map_uids": "none"}  # The arena is mapped by nobody: the shard copies to and from regions.
GENERATION = 7  # Of no shard: nothing here is greeted by one.


@contextmanager
def swallowing() -> Iterator[str]:
    """An address that swallows every packet: it listens, and its queue of connections is full."""
    with socket.socket() as listening, socket.socket() as queued:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        queued.connect(listening.getsockname())
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def endpoint_of(address: str, *, host: str = "127.0.0.1", tls: TlsOptions | None = None) -> Endpoint:
    return Endpoint("bulk", host=host, port=int(address.rpartition(":")[2]), tls=tls)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Gives every host these addresses."""
    places = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
    found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place) for place in places]
    monkeypatch.setattr(dialing.socket, "getaddrinfo", lambda *_, **__: found)  # type: ignore[attr-defined]


# -- dialing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address_of", [swallowing, silent])
def test_a_connection_that_takes_longer_than_the_caller_has_says_nothing_about_the_shard(
    address_of: Callable[[], AbstractContextManager[str]],
) -> None:
    with address_of() as address:
        for left_ms in (50, 1):
            began_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="while connecting"):
                dial(endpoint_of(address), GENERATION, Deadline.after(left_ms))
            assert time.monotonic() - began_s < IN_TIME_S


@pytest.mark.parametrize("address_of", [swallowing, silent])
def test_an_address_that_does_not_answer_a_patient_caller_is_down(
    address_of: Callable[[], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing, "CONNECT_S", 0.2)
    with address_of() as address:
        began_s = time.monotonic()
        with pytest.raises(PathDown, match="timed out"):
            dial(endpoint_of(address), GENERATION, Deadline.after(20_000))
        assert time.monotonic() - began_s < 5


def test_a_refused_connection_is_down_unless_the_caller_has_no_time_left() -> None:
    endpoint = endpoint_of(closed_address())
    with pytest.raises(PathDown, match="refused"):
        dial(endpoint, GENERATION, Deadline.after(20_000))
    with pytest.raises(DeadlineExceeded):
        dial(endpoint, GENERATION, Deadline(time.monotonic()))


@pytest.mark.parametrize(("left_ms", "error"), [(250, DeadlineExceeded), (60_000, PathDown)])
def test_all_addresses_of_a_host_are_tried_within_one_limit(
    monkeypatch: pytest.MonkeyPatch, left_ms: int, error: type[KvStoreError]
) -> None:
    monkeypatch.setattr(dialing, "CONNECT_S", 0.3)
    with swallowing() as address:
        resolve_to(monkeypatch, *[address] * 30)
        began_s = time.monotonic()
        with pytest.raises(error):
            dial(endpoint_of(address, host="many.example"), GENERATION, Deadline.after(left_ms))
        assert time.monotonic() - began_s < 3  # 7.5 s and more if each had the limit of its own.


def test_an_address_that_refuses_leaves_the_next_one_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharded() as shard:
        resolve_to(monkeypatch, closed_address(), shard.bulk)
        generation = shard.ask(lambda local: local.server.shell.generation)
        dialed = dial(endpoint_of(shard.bulk, host="two.example"), generation, Deadline.after(20_000))
        assert dialed.sock.getpeername()[1] == int(shard.bulk.rpartition(":")[2])
        assert dialed.sock.gettimeout() is None
        dialed.sock.close()
        monkeypatch.undo()


def test_a_handshake_has_what_the_connection_left_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes connections late, and is silent then."""
    connect = socket.socket.connect

    def late(sock: socket.socket, address: Any) -> None:
        time.sleep(CONNECT_S - 0.2)
        connect(sock, address)

    with silent() as address:
        monkeypatch.setattr(socket.socket, "connect", late)
        began_s = time.monotonic()
        with pytest.raises(PathDown, match="timed out"):
            dial(endpoint_of(address, tls=TlsOptions()), GENERATION, Deadline.after(20_000))
        assert time.monotonic() - began_s < CONNECT_S + 1


# -- connections that go on -------------------------------------------------------------------------------------------


class SlowToGreet(Proxy):
    """A way to a shard on which the first answer comes late. `connections` counts those it took."""

    connections = 0

    def _pass(self, pair: Any, source: socket.socket, target: socket.socket, limit: str) -> None:
        if limit == "most_bytes":  # Towards the client.
            self.connections += 1
            time.sleep(GREETS_AFTER_S)
        super()._pass(pair, source, target, limit)


@contextmanager
def slow_to_greet() -> Iterator[tuple[SlowToGreet, Shard]]:
    proxy = SlowToGreet()
    try:
        with sharded({"shm.socket": "off", "bulk.advertise": proxy.address}) as shard:
            proxy.lead_to(shard.bulk)
            yield proxy, shard
    finally:
        proxy.close()


def client_of(driver: Driver) -> Client:
    assert isinstance(driver.client, Client)
    return driver.client


def attached(driver: Driver) -> None:
    """Attaches, without a call and without a connection of the fast channel."""
    run_now(client_of(driver).direct.bind(SPEC, Deadline.after(20_000)))


class Hasty:
    """Makes calls in a hurry and looks at what becomes of them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._before = set(threading.enumerate())

    @property
    def falls(self) -> int:
        """How often a way was found not to work."""
        return client_of(self._driver).direct.paths.falls

    def call(self, number: int, *, deadline_ms: int = HASTY_MS) -> KvStoreError | None:
        """Makes one call, of one kind or another by its number. Returns how it failed."""
        calls: list[Callable[[Any], Any]] = [
            lambda ns: ns.match(BLOCKS, deadline_ms=deadline_ms),
            lambda ns: ns.get(BLOCKS, into=[bytearray(SIZE) for _ in BLOCKS], deadline_ms=deadline_ms),
            lambda ns: ns.put(keys(1, "new"), VALUES[:1], deadline_ms=deadline_ms),
            lambda ns: ns.reserve(keys(1, "slot"), deadline_ms=deadline_ms),
        ]
        began_s = time.monotonic()
        failure: KvStoreError | None = self._driver.run(SPEC, calls[number % len(calls)]).failure
        assert time.monotonic() - began_s < IN_TIME_S
        assert self.threads() <= 1
        return failure

    def threads(self) -> int:
        """How many threads do something on the side."""
        return sum(t.name == THREAD_NAME and t not in self._before for t in threading.enumerate())


def test_a_way_too_slow_for_calls_in_a_hurry_is_found_out_on_the_side() -> None:
    with (
        swallowing() as address,
        sharded({"shm.socket": "off", "bulk.advertise": address}) as shard,
        driven("blocking", options_of(shard.target, "bulk", "grpc")) as driver,
        ThreadPoolExecutor(4) as pool,
    ):
        attached(driver)
        hasty = Hasty(driver)
        assert isinstance(hasty.call(0), DeadlineExceeded)
        assert (hasty.falls, hasty.threads()) == (0, 1)
        end_s, call_count = time.monotonic() + 15, 1
        while not hasty.falls:
            assert time.monotonic() < end_s, "nobody finds out"
            failures = list(pool.map(hasty.call, range(16)))
            call_count += len(failures)
            if not hasty.falls:
                assert {type(failure) for failure in failures} == {DeadlineExceeded}
        # By gRPC now. When the way is tried again, calls in a hurry fail for a while.
        until(lambda: hasty.call(0, deadline_ms=200) is None, "no other way is taken")
        assert driver.client.transport == "grpc"
        assert driver.put(SPEC, BLOCKS, VALUES).ok
        assert (driver.get(SPEC, BLOCKS).prefix_blocks, driver.client.transport) == (COUNT, "grpc")
        assert driver.client.stats().path_changes <= hasty.falls < call_count


def test_a_connection_that_came_too_late_for_one_call_serves_the_next() -> None:
    """None of the calls in a hurry could wait for a connection of its own."""
    with slow_to_greet() as (proxy, shard), driven("blocking", options_of(shard.target, "bulk")) as driver:
        attached(driver)
        hasty = Hasty(driver)
        hurry_ms = int(GREETS_AFTER_S * 500)
        assert isinstance(hasty.call(0, deadline_ms=hurry_ms), DeadlineExceeded)
        until(lambda: hasty.call(0, deadline_ms=hurry_ms) is None, "no connection is left for later calls")
        connections = proxy.connections
        for _ in range(10):
            assert driver.run(SPEC, lambda ns: ns.match(BLOCKS)).failure is None
        assert proxy.connections == connections
        assert (hasty.falls, driver.client.stats().path_changes, driver.client.transport) == (0, 0, "bulk")


def test_a_connection_that_comes_once_the_client_is_closed_is_closed_too() -> None:
    with slow_to_greet() as (proxy, shard), driven("blocking", options_of(shard.target, "bulk")) as driver:
        attached(driver)
        hasty = Hasty(driver)
        assert isinstance(hasty.call(0), DeadlineExceeded)
        assert hasty.threads() == 1
        driver.close()
        until(lambda: not hasty.threads(), "it goes on")
        assert proxy.connections == 2
        shard.check_nothing_is_left()


# -- what is asked for once -------------------------------------------------------------------------------------------

_CHANNEL_VERB = Requests._channel_verb


class LateAnswers:
    """Holds back what shards answer to a verb of the channel, once they did what it says, until let go."""

    def __init__(self, verb: Verb) -> None:
        self._verb, self._may_go = verb, asyncio.Event()
        self.asked = 0

    def let_go(self, shard: Shard) -> None:
        shard.ask(lambda _: self._may_go.set())

    def channel_verb(self, requests: Any, frame: Frame, message: memoryview) -> None:
        """In place of `Requests._channel_verb`."""
        if frame.verb != self._verb:
            _CHANNEL_VERB(requests, frame, message)
            return
        self.asked += 1
        answer, descriptor = requests._verbs.answer(frame.verb, bytes(message))
        made = head(frame.verb, frame.request, answer.SerializeToString(), flags=END)

        async def later() -> None:
            await self._may_go.wait()
            if descriptor is None:
                requests._outbox.add(made)
            else:
                requests._outbox.add_with_descriptor(made, descriptor)

        requests._start(frame, later())


@contextmanager
def late(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, kind: str, flags: dict[str, str]
) -> Iterator[tuple[LateAnswers, Shard, Driver]]:
    """A shard that has stored the blocks and answers one verb late, and a client of it that has time to wait."""
    answers = LateAnswers(verb)
    monkeypatch.setattr(Requests, "_channel_verb", lambda *args: answers.channel_verb(*args))
    monkeypatch.setattr(shm, "OPEN_MS", 60_000)
    with sharded(flags) as shard, driven(kind, options_of(shard.target, "shm", deadline_ms=20_000)) as driver:
        assert driver.put(SPEC, BLOCKS, VALUES).ok
        yield answers, shard, driver


def region_count(local: LocalServer) -> int:
    return local.server.shell.regions.region_count


def registered_count(local: LocalServer) -> int:
    return local.server.shell.regions.registered_count


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_registered_once_however_many_calls_could_not_wait_for_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        late(Verb.REGISTER_REGION, monkeypatch, kind, BY_COPY) as (answers, shard, driver),
        region_of(driver.client, 8 * MIB) as region,
    ):
        rooms, new = Rooms(region.memory), keys(COUNT, "new")
        source, into = rooms.holding(VALUES), rooms.of([SIZE] * COUNT)
        until(lambda: put_hastily(driver, new, source) and answers.asked == 1, "it is not registered")
        for _ in range(15):
            began_s = time.monotonic()
            assert put_hastily(driver, new, source)
            assert get_hastily(driver, into)
            assert time.monotonic() - began_s < IN_TIME_S
        assert (answers.asked, shard.ask(registered_count), shard.ask(region_count)) == (1, 1, 1)
        answers.let_go(shard)
        calls: dict[str, Callable[[Any], Any]] = {
            "region.fill": lambda ns: ns.put(new, source),
            "region.drain": lambda ns: ns.get(new, into=into),
        }
        for point, call in calls.items():
            shard.arm(point, "delay:1ms*1")
            assert driver.run(SPEC, call).failure is None
            shard.until_hit(point)  # Its bytes went from and to the region.
        assert [bytes(room) for room in into] == VALUES
        rooms.check()
        assert (answers.asked, shard.ask(registered_count), shard.ask(region_count)) == (1, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_unregistered_before_its_registration_was_answered_is_let_go_afterwards(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        late(Verb.REGISTER_REGION, monkeypatch, kind, BY_COPY) as (answers, shard, driver),
        region_of(driver.client, 4 * MIB) as region,
    ):
        source = Rooms(region.memory).holding(VALUES)
        until(lambda: put_hastily(driver, keys(COUNT, "new"), source) and answers.asked == 1, "it is not registered")
        began_s = time.monotonic()
        unregister(driver, region)
        assert time.monotonic() - began_s < 5
        time.sleep(2 * RETIRE_MS / 1000)  # It may wait on the side.
        assert shard.ask(region_count) == 1
        answers.let_go(shard)
        shard.until(lambda local: region_count(local) == 0, "it is still there", within_s=10)
        assert (answers.asked, shard.ask(registered_count)) == (1, 1)


def test_memory_is_let_go_when_unregister_returns_if_its_registration_is_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "RETIRE_MS", 20_000)
    with (
        late(Verb.REGISTER_REGION, monkeypatch, "blocking", BY_COPY) as (answers, shard, driver),
        region_of(driver.client, 4 * MIB) as region,
        ThreadPoolExecutor(1) as pool,
    ):
        source = Rooms(region.memory).holding(VALUES)
        until(lambda: put_hastily(driver, keys(COUNT, "new"), source) and answers.asked == 1, "it is not registered")
        ending = pool.submit(unregister, driver, region)
        time.sleep(0.1)
        assert not ending.done()
        answers.let_go(shard)
        ending.result(15)
        assert shard.ask(region_count) == 0


def get_hastily(driver: Driver, into: list[Any]) -> bool:
    """Whether a get failed for lack of time, as it must."""
    failure = driver.run(SPEC, lambda ns: ns.get(BLOCKS, into=into, deadline_ms=HASTY_MS)).failure
    return isinstance(failure, DeadlineExceeded)


def put_hastily(driver: Driver, blocks: list[bytes], source: list[memoryview]) -> bool:
    """Whether a put failed for lack of time, as it must."""
    failure = driver.run(SPEC, lambda ns: ns.put(blocks, source, deadline_ms=HASTY_MS)).failure
    return isinstance(failure, DeadlineExceeded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_arena_is_asked_for_once_however_many_calls_could_not_wait_for_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late(Verb.MAP_ARENA, monkeypatch, kind, {}) as (answers, shard, driver):
        into = [bytearray(SIZE) for _ in BLOCKS]
        until(lambda: get_hastily(driver, into) and answers.asked == 1, "it is not asked for")
        for _ in range(30):
            began_s = time.monotonic()
            assert get_hastily(driver, into)
            assert time.monotonic() - began_s < IN_TIME_S
        answers.let_go(shard)
        assert driver.get(SPEC, BLOCKS, into).prefix_blocks == COUNT
        assert into == VALUES
        assert answers.asked == 1
        assert driver.client.transport == "shm"


# -- reports ----------------------------------------------------------------------------------------------------------


def damage(local: LocalServer, stored: bytes) -> None:
    """Changes a bit of what the shard holds."""
    view = local.server.shell.memory.view
    at = bytes(view).index(stored)
    view[at : at + 1] = bytes((view[at] ^ 1,))


def corrupt_blocks(local: LocalServer) -> int:
    return local.server.shell.store.counters()["corrupt_blocks"]


def get_damaged(driver: Driver, shard: Shard) -> None:
    """Gets blocks of which the shard has damaged the second."""
    assert driver.put(SPEC, BLOCKS, VALUES).ok
    assert driver.get(SPEC, BLOCKS).prefix_blocks == COUNT
    shard.ask(lambda local: damage(local, VALUES[1]))
    got = driver.get(SPEC, BLOCKS)
    assert got.failure is None
    assert (got.states, got.corrupt_blocks) == (bytes((BlockState.HOT, BlockState.MISSING)), 1)


@pytest.mark.parametrize("point", ["before.Acquire", "before.Release"])
def test_a_shard_that_does_not_take_a_report_holds_up_no_get(point: str) -> None:
    with sharded() as shard, driven("blocking", options_of(shard.target, "bulk", deadline_ms=30_000)) as driver:
        shard.arm(point, f"delay:60s*{MOST_THREADS}")
        began_s = time.monotonic()
        get_damaged(driver, shard)
        assert time.monotonic() - began_s < 10
        for _ in range(5):  # Nor the next ones, of which each has something to report.
            assert driver.get(SPEC, BLOCKS).corrupt_blocks == 1
        assert time.monotonic() - began_s < 10
        shard.until_hit(point)
        assert shard.ask(corrupt_blocks) == 0
        began_s = time.monotonic()
        client_of(driver).close(2000)
        assert time.monotonic() - began_s < 10
        assert shard.cut() >= 1


@pytest.mark.parametrize("transport", ["shm", "bulk"])
def test_a_report_made_on_the_side_arrives(transport: str) -> None:
    with sharded() as shard, driven("blocking", options_of(shard.target, transport)) as driver:
        get_damaged(driver, shard)
        shard.until(lambda local: corrupt_blocks(local) == 1, "nothing is reported")
        assert driver.run(SPEC, lambda ns: ns.match(BLOCKS)).prefix_blocks == 1
        assert driver.put(SPEC, BLOCKS, VALUES).ok
        assert driver.get(SPEC, BLOCKS).prefix_blocks == COUNT
        assert shard.ask(corrupt_blocks) == 1


def test_a_client_that_is_closed_waits_for_its_reports() -> None:
    with sharded() as shard, driven("blocking", options_of(shard.target, "bulk")) as driver:
        shard.arm("before.Acquire", "delay:300ms*1")
        get_damaged(driver, shard)
        client_of(driver).close(40_000)
        assert shard.ask(corrupt_blocks) == 1
