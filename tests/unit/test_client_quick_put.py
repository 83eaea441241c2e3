"""The short way of small writes: it takes plain calls only, and anything unexpected is left to the long way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.quick import MOST_BLOCKS
from kvstore_client.quick_put import quick_put
from kvstore_client.stats import Counters
from kvstore_client.transports.framed import FramedTransport
from kvstore_wire.errors import DeadlineExceeded, UnknownSession
from kvstore_wire.frames import END, ERROR, HEADER, HEADER_BYTES, Verb, head
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import channel_pb2 as channel
from tests.shards import keys, kv_spec, opaque_spec
from tests.unit.test_client_quick import FIRST, Core, Lanes, _Binding

SIZE = 1000
SPEC = kv_spec("quick", part_bytes=SIZE)
VALUES = [bytes((i + 1,)) * SIZE for i in range(3)]
MOST_BYTES = FramedTransport.quick_put_bytes
COMMITTED, PRESENT, FULL, CREATED = PartState.COMMITTED, PartState.PRESENT, PartState.FULL, PartState.CREATED


class TakingLanes(Lanes):
    """Lanes that keep what the shard was sent, and grant a credit."""

    credit = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.answer = stored(COMMITTED, COMMITTED, COMMITTED)
        self.sent: list[bytes] = []

    def borrow(self, size_bytes: int) -> Any:
        lane = super().borrow(size_bytes)
        lane.wire.credit = self.credit
        return lane

    def give_back(self, lane: Any) -> None:
        peer = self._peers.pop()
        peer.setblocking(False)
        try:
            self.sent.append(peer.recv(1 << 20))
        except BlockingIOError:
            self.sent.append(b"")
        self.given_back.append(lane)


def stored(*states: int, flags: int = END, retry_after_ms: int = 0) -> bytes:
    answer = store.PutResponse(states=bytes(states), retry_after_ms=retry_after_ms)
    return head(Verb.PUT, FIRST, answer.SerializeToString(), flags=flags)


@pytest.fixture
def core() -> Iterator[Core]:
    made = Core(lanes=TakingLanes())
    yield made
    assert made.slots == 1, "a slot was not given back"


def put(core: Core, blocks: Any, values: Any, *, spec: NamespaceSpec = SPEC, deadline_ms: int = 1000) -> Any:
    deadline = Deadline.after(deadline_ms)
    return quick_put(cast(DirectCore, core), spec, blocks, values=values, deadline=deadline)


def frames(raw: bytes) -> list[tuple[int, int, int, store.PutRequest, bytes]]:
    """Cuts what was sent: verb, flags, number, message and payload of each frame."""
    found = []
    while raw:
        _, _, verb, flags, _, number, _, size, payload = HEADER.unpack_from(raw)
        start, end = HEADER_BYTES + size, HEADER_BYTES + size + payload
        found.append((verb, flags, number, store.PutRequest.FromString(raw[HEADER_BYTES:start]), raw[start:end]))
        raw = raw[end:]
    return found


def lanes_of(core: Core) -> TakingLanes:
    return cast(TakingLanes, core.lanes)


@pytest.mark.parametrize(
    "values",
    [
        VALUES,
        [bytearray(v) for v in VALUES],
        [memoryview(v) for v in VALUES],
        [np.array(list(v), np.uint8) for v in VALUES],
    ],
)
def test_a_plain_call_is_two_frames_and_one_answer(core: Core, values: Any) -> None:
    done = put(core, keys(0, 3), values)
    assert (bytes(done.states), done.stored, done.present, done.failure) == (bytes((COMMITTED,) * 3), 3, 0, None)
    first, last = frames(lanes_of(core).sent[0])
    assert (first[:3], last[:3]) == ((Verb.PUT, 0, FIRST), (Verb.PUT, END, FIRST))
    assert list(first[3].header.chain.keys) == keys(0, 3)
    assert first[4] == b""
    assert last[4] == b"".join(VALUES)
    assert list(last[3].trailer.checksums) == [xxh3_64_intdigest(v) for v in VALUES]
    stats = core.stats
    assert (stats.calls["put"], stats.stored_parts, stats.stored_bytes) == (1, 3, 3 * SIZE)
    (lane,) = core.lanes.given_back
    assert not lane.broken
    assert lane.wire.credit == TakingLanes.credit - 3 * SIZE


def test_values_of_their_own_lengths_are_told_with_them(core: Core) -> None:
    core.lanes.answer = stored(COMMITTED, COMMITTED)
    spec = opaque_spec("q", part_bytes=SIZE)
    assert put(core, keys(0, 2), [b"", b"abc"], spec=spec).stored == 2
    first, last = frames(lanes_of(core).sent[0])
    assert list(first[3].header.lengths) == [0, 3]
    assert last[4] == b"abc"
    assert core.stats.stored_bytes == 3


def test_what_the_shard_refuses_is_part_of_the_answer(core: Core) -> None:
    core.lanes.answer = stored(COMMITTED, PRESENT, FULL, retry_after_ms=20)
    done = put(core, keys(0, 3), VALUES)
    assert (done.stored, done.present, done.retry_after_ms) == (1, 1, 20)
    assert core.stats.stored_bytes == SIZE


def test_credit_that_comes_with_the_answer_is_taken(core: Core) -> None:
    grant = channel.Credit(bytes=5000).SerializeToString()
    core.lanes.answer += head(Verb.CREDIT, 0, grant, flags=END)
    assert put(core, keys(0, 3), VALUES).stored == 3
    (lane,) = core.lanes.given_back
    assert lane.wire.credit == TakingLanes.credit - 3 * SIZE + 5000
    assert lane.is_fit


def test_a_goodbye_that_comes_with_the_answer_ends_the_lane_and_not_the_put(core: Core) -> None:
    core.lanes.answer += head(Verb.GOODBYE, 0, channel.Goodbye().SerializeToString(), flags=END)
    assert put(core, keys(0, 3), VALUES).stored == 3
    assert not core.lanes.given_back[0].is_fit


@pytest.mark.parametrize(
    ("blocks", "values", "spec"),
    [
        (tuple(keys(0, 3)), VALUES, SPEC),
        (keys(0, 3), tuple(VALUES), SPEC),
        (keys(0, 2), VALUES, SPEC),
        ([], [], SPEC),
        ([*keys(0, 2), b"short"], VALUES, SPEC),
        ([*keys(0, 2), ["no", "key"]], VALUES, SPEC),
        ([b"x"] * 3, VALUES, SPEC),
        (keys(0, 3), [v[1:] for v in VALUES], SPEC),
        (keys(0, 3), [v + b"x" for v in VALUES], SPEC),
        (keys(0, 3), [v + b"x" for v in VALUES], opaque_spec("q", part_bytes=SIZE)),
        (keys(0, 3), [[v] for v in VALUES], SPEC),
        (keys(0, 3), [memoryview(bytes(2 * SIZE))[::2]] * 3, SPEC),
        (keys(0, 3), [np.zeros(SIZE, np.int8)] * 3, SPEC),
        (keys(0, 3), ["text"] * 3, SPEC),
        (keys(0, MOST_BLOCKS + 1), [VALUES[0]] * (MOST_BLOCKS + 1), SPEC),
        (keys(0, 1), [bytes(MOST_BYTES + 1)], kv_spec("q", part_bytes=MOST_BYTES + 1)),
        (keys(0, 3), VALUES, kv_spec("q", part_bytes=SIZE, layer_groups=2)),
    ],
)
def test_what_is_not_plain_goes_the_long_way(core: Core, blocks: Any, values: Any, spec: NamespaceSpec) -> None:
    assert put(core, blocks, values, spec=spec) is None
    assert core.lanes.given_back == []
    assert core.stats.snapshot() == Counters().snapshot()


def test_where_nothing_is_ready_the_long_way_is_gone(core: Core) -> None:
    core.keeper.binding = None
    assert put(core, keys(0, 3), VALUES) is None
    core.keeper.binding = _Binding()
    core.path = None
    assert put(core, keys(0, 3), VALUES) is None
    core.path, core.closed = object(), True
    assert put(core, keys(0, 3), VALUES) is None
    core.closed, core.slots = False, 0
    assert put(core, keys(0, 3), VALUES) is None
    core.slots = 1
    assert core.lanes.given_back == []


def test_without_credit_nothing_is_sent(core: Core) -> None:
    lanes_of(core).credit = 3 * SIZE - 1
    assert put(core, keys(0, 3), VALUES) is None
    assert lanes_of(core).sent == [b""]
    assert not core.lanes.given_back[0].broken


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        head(Verb.PUT, FIRST, UnknownSession("gone").to_detail().SerializeToString(), flags=ERROR),
        stored(COMMITTED, COMMITTED),  # A state is missing.
        stored(COMMITTED, COMMITTED, PartState.LOST + 1),
        stored(COMMITTED, COMMITTED, COMMITTED, flags=0),
        stored(COMMITTED, COMMITTED, COMMITTED)[:-1],
        head(Verb.PUT, FIRST, b"\xff\xff", flags=END),
        head(Verb.PUT, FIRST + 1, flags=END),
        head(Verb.GET, FIRST, flags=END),
        head(
            Verb.PUT,
            FIRST,
            store.PutResponse(states=bytes((COMMITTED,) * 3)).SerializeToString(),
            flags=END,
            payload_bytes=1,
        ),
        stored(COMMITTED, COMMITTED, COMMITTED) + head(Verb.MATCH, 99, flags=END),  # An answer that nobody asked for.
    ],
)
def test_an_answer_that_does_not_fit_is_left_to_the_long_way(core: Core, answer: bytes) -> None:
    core.lanes.answer, core.lanes.ends = answer, True
    assert put(core, keys(0, 3), VALUES) is None
    assert core.stats.snapshot() == Counters().snapshot(), "it is counted where it is answered"
    assert core.lanes.given_back[0].broken


def test_the_deadline_is_an_answer(core: Core) -> None:
    core.lanes.answer = b""
    done = put(core, keys(0, 3), VALUES, deadline_ms=30)
    assert isinstance(done.failure, DeadlineExceeded)
    assert (bytes(done.states), done.stored) == (bytes(3), 0)
    assert core.stats.failures == {"DeadlineExceeded": 1}
    assert core.stats.calls["put"] == 1
    assert core.lanes.given_back[0].broken


def test_a_created_part_is_not_told_as_stored(core: Core) -> None:
    core.lanes.answer = stored(CREATED, COMMITTED, COMMITTED)
    done = put(core, keys(0, 3), VALUES)
    assert done.stored == 2
    assert done.states[0] == PartState.REFUSED
