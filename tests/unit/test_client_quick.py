"""The short way of small reads: it takes plain calls only, and anything unexpected is left to the long way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore_client import ClientOptions, Coverage, Verify
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.errors import PathDown
from kvstore_client.fast.wire import Taker
from kvstore_client.quick import MOST_BLOCKS, MOST_BYTES, quick_get
from kvstore_client.stats import Counters
from kvstore_client.transports.framed import FramedTransport
from kvstore_wire.errors import DeadlineExceeded, KvStoreError, UnknownSession
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store
from tests.shards import keys, kv_spec, opaque_spec

SIZE = 1000
SPEC = kv_spec("quick", part_bytes=SIZE)
HOT, MISS, BEYOND, BUSY = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND, BlockState.BUSY
VALUES = [bytes((i + 1,)) * SIZE for i in range(3)]

Answer = Callable[[Taker], None]


class Lanes:
    """Connections that give one answer."""

    def __init__(self) -> None:
        self.answer: Answer = right
        self.requests: list[store.GetRequest] = []

    async def exchange(
        self, verb: int, message: bytes, *, taker: Taker, deadline: Deadline, source: object = None
    ) -> None:
        self.requests.append(store.GetRequest.FromString(message))
        self.answer(taker)

    def failed(self, error: KvStoreError) -> None:
        raise AssertionError

    def retire(self) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


class _Keeper:
    def __init__(self, binding: object) -> None:
        self.binding: object | None = binding

    def ready(self, spec: NamespaceSpec) -> object | None:
        return self.binding


@dataclass
class _Binding:
    session: bytes = b"s" * 16
    namespace: int = 1


class _Paths:
    path: object | None = object()

    def best(self, binding: object) -> object | None:
        return self.path


@dataclass
class Core:
    """What `quick_get` needs of a core."""

    lanes: Lanes = field(default_factory=Lanes)
    options: ClientOptions = field(default_factory=lambda: ClientOptions("h:1"))
    stats: Counters = field(default_factory=Counters)
    keeper: _Keeper = field(default_factory=lambda: _Keeper(_Binding()))
    paths: _Paths = field(default_factory=_Paths)
    closed: bool = False
    slots: int = 1

    def transport(self, binding: object) -> FramedTransport:
        return FramedTransport("bulk", self.lanes, cast(Any, None))

    def try_enter(self) -> bool:
        self.slots -= 1
        if self.slots < 0:
            self.slots = 0
            return False
        return True

    def leave(self) -> None:
        self.slots += 1


@pytest.fixture
def core() -> Iterator[Core]:
    made = Core()
    yield made
    assert made.slots == 1, "a slot was not given back"


def get(core: Core, blocks: Any, into: Any, *, spec: NamespaceSpec = SPEC) -> Any:
    chosen = cast(DirectCore, core)
    return quick_get(chosen, spec, blocks, into=into, coverage=Coverage.PREFIX, deadline=Deadline.after(1000))


def rooms(count: int = 3, size: int = SIZE) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def header(states: bytes, values: list[bytes]) -> store.GetResponse:
    sums = [xxh3_64_intdigest(v) for v in values]
    return store.GetResponse(header=store.GetHeader(states=states, lengths=list(map(len, values)), checksums=sums))


def lands(taker: Taker, answer: store.GetResponse, payload: bytes, step: int = 300) -> None:
    taker.message(answer.SerializeToString())
    while payload:
        room = taker.room(min(step, len(payload)))
        size = len(room)
        room[:] = payload[:size]
        taker.landed(size)
        payload = payload[size:]


def right(taker: Taker) -> None:
    lands(taker, header(bytes((HOT,) * 3), VALUES), b"".join(VALUES))


def test_a_plain_call_is_answered(core: Core) -> None:
    into = rooms()
    found = get(core, keys(0, 3), into)
    assert [bytes(room) for room in into] == VALUES
    assert (found.prefix_blocks, found.size_bytes, found.failure, found.values) == (3, 3 * SIZE, None, None)
    assert found.lengths.tolist() == [[SIZE]] * 3
    assert list(core.lanes.requests[0].chain.keys) == keys(0, 3)
    stats = core.stats
    assert (stats.calls["get"], stats.fetched_blocks_asked, stats.fetched_blocks) == (1, 3, 3)
    assert stats.fetched_bytes == 3 * SIZE


def test_misses_are_part_of_an_answer(core: Core) -> None:
    def answer(taker: Taker) -> None:
        lands(taker, header(bytes((HOT, MISS, BEYOND)), VALUES[:1]), VALUES[0])

    core.lanes.answer = answer
    into = [np.zeros(SIZE, np.uint8) for _ in range(3)]
    found = get(core, keys(0, 3), into)
    assert found.states == bytes((HOT, MISS, BEYOND))
    assert (found.prefix_blocks, found.lengths.tolist()) == (1, [[SIZE], [0], [0]])
    assert into[0].tobytes() == VALUES[0]
    assert not into[1].any()
    assert (core.stats.fetched_blocks_asked, core.stats.fetched_blocks) == (3, 1)


@pytest.mark.parametrize(
    ("blocks", "into", "spec"),
    [
        (tuple(keys(0, 3)), rooms(), SPEC),
        (keys(0, 2), rooms(), SPEC),
        ([], [], SPEC),
        ([*keys(0, 2), b"short"], rooms(), SPEC),
        ([*keys(0, 2), "text"], rooms(), SPEC),
        ([b"x"] * 3, rooms(), SPEC),
        ([b"x" * 65] * 3, rooms(), SPEC),
        (keys(0, 3), rooms(size=SIZE - 1), SPEC),
        (keys(0, 3), rooms(size=SIZE + 1), SPEC),
        (keys(0, 3), [[room] for room in rooms()], SPEC),
        (keys(0, 3), [bytearray(SIZE)] * 3, SPEC),
        (keys(0, 3), [memoryview(bytes(SIZE))] * 3, SPEC),
        (keys(0, 3), [memoryview(bytearray(2 * SIZE))[::2]] * 3, SPEC),
        (keys(0, 3), [np.zeros(2 * SIZE, np.uint8)[::2]] * 3, SPEC),
        (keys(0, 3), [np.zeros(SIZE, np.int8)] * 3, SPEC),
        (keys(0, 3), [np.zeros((SIZE, 1), np.uint8)] * 3, SPEC),
        (keys(0, MOST_BLOCKS + 1), rooms(MOST_BLOCKS + 1), SPEC),
        (keys(0, 2), rooms(2, MOST_BYTES // 2 + 1), kv_spec("q", part_bytes=MOST_BYTES // 2 + 1)),
        (keys(0, 3), rooms(), kv_spec("q", part_bytes=SIZE, layer_groups=2)),
        (keys(0, 3), rooms(), opaque_spec("q", part_bytes=SIZE)),
    ],
)
def test_what_is_not_plain_goes_the_long_way(core: Core, blocks: Any, into: Any, spec: NamespaceSpec) -> None:
    assert get(core, blocks, into, spec=spec) is None
    assert core.lanes.requests == []
    assert core.stats.snapshot() == Counters().snapshot()


def test_where_nothing_is_ready_the_long_way_is_gone(core: Core) -> None:
    core.keeper.binding = None
    assert get(core, keys(0, 3), rooms()) is None
    core.keeper.binding = _Binding()
    core.paths.path = None
    assert get(core, keys(0, 3), rooms()) is None
    core.paths.path, core.closed = object(), True
    assert get(core, keys(0, 3), rooms()) is None
    core.closed, core.slots = False, 0
    assert get(core, keys(0, 3), rooms()) is None
    core.slots = 1
    core.options = ClientOptions("h:1", verify=Verify.OFF)
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.requests == []


def _raising(error: KvStoreError) -> Answer:
    def answer(taker: Taker) -> None:
        raise error

    return answer


def _saying(states: bytes, values: list[bytes], payload: bytes) -> Answer:
    return lambda taker: lands(taker, header(states, values), payload)


def _twice(taker: Taker) -> None:
    right(taker)
    taker.message(header(bytes((HOT,) * 3), VALUES).SerializeToString())


@pytest.mark.parametrize(
    "answer",
    [
        _raising(PathDown("cut", sent=True)),
        _raising(UnknownSession("gone")),
        _saying(bytes((HOT,) * 3), VALUES, b"\x09" * 3 * SIZE),  # Damaged.
        _saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES)[:-1]),  # Cut.
        _saying(bytes((HOT,) * 3), VALUES[:2], b""),  # A length is missing.
        _saying(bytes((HOT,) * 2), VALUES[:2], b"".join(VALUES[:2])),  # A state is missing.
        _saying(bytes((HOT, 77, MISS)), VALUES[:1], VALUES[0]),  # No state at all.
        _saying(bytes((HOT, BUSY, MISS)), VALUES[:1], VALUES[0]),  # To be asked for again.
        _saying(bytes((HOT,) * 3), [v[:-1] for v in VALUES], b""),
        _saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES) + b"x"),  # More than was announced.
        _saying(b"", [], b""),
        _twice,
        lambda taker: taker.message(b"\xff\xff"),
        lambda taker: None,
    ],
)
def test_an_answer_that_does_not_fit_is_left_to_the_long_way(core: Core, answer: Answer) -> None:
    core.lanes.answer = answer
    assert get(core, keys(0, 3), rooms()) is None
    assert core.stats.snapshot() == Counters().snapshot(), "it is counted where it is answered"


def test_the_deadline_is_an_answer(core: Core) -> None:
    core.lanes.answer = _raising(DeadlineExceeded("late"))
    found = get(core, keys(0, 3), rooms())
    assert isinstance(found.failure, DeadlineExceeded)
    assert (found.states, found.prefix_blocks) == (bytes(3), 0)
    assert core.stats.failures == {"DeadlineExceeded": 1}
    assert (core.stats.calls["get"], core.stats.fetched_blocks_asked, core.stats.fetched_blocks) == (1, 3, 0)
