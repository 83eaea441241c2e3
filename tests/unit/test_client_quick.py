"""The short way of small reads: it takes plain calls only, and anything unexpected is left to the long way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore_client import ClientOptions, Coverage, Verify
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.fast.dial import Dialed
from kvstore_client.fast.lane import BlockingLane
from kvstore_client.fast.pools import BlockingLanes
from kvstore_client.fast.wire import Wire
from kvstore_client.quick import MOST_BLOCKS, MOST_COPIED_BLOCKS, quick_get
from kvstore_client.stats import Counters
from kvstore_client.transports.framed import FramedTransport
from kvstore_wire.errors import DeadlineExceeded, UnknownSession
from kvstore_wire.frames import END, ERROR, HEADER, HEADER_BYTES, Verb, head
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import channel_pb2 as channel
from tests.shards import keys, kv_spec, opaque_spec

SIZE = 1000
SPEC = kv_spec("quick", part_bytes=SIZE)
HOT, MISS, BEYOND, BUSY = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND, BlockState.BUSY
VALUES = [bytes((i + 1,)) * SIZE for i in range(3)]

MOST_BYTES = FramedTransport.quick_bytes
FIRST = 1  # The number of a lane's first request.


class Lanes(BlockingLanes):
    """Connections that give one answer: these bytes, and silence or the end of the connection after them."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, _Worked()), busy_poll_s=0.0)
        self.answer = right()
        self.ends = False
        self.requests: list[store.GetRequest] = []
        self.given_back: list[BlockingLane] = []
        self._peers: list[socket.socket] = []

    def borrow(self, size_bytes: int) -> BlockingLane:
        own, peer = socket.socketpair()
        wire = Wire()
        wire.frame_bytes = 1 << 20
        peer.sendall(self.answer)
        if self.ends:
            peer.shutdown(socket.SHUT_WR)
        self._peers.append(peer)
        return BlockingLane(Dialed(own, wire, channel.HelloAnswer()))

    def give_back(self, lane: BlockingLane) -> None:
        raw = self._peers.pop().recv(1 << 16)
        size = HEADER.unpack_from(raw)[7]  # A CANCEL may follow.
        self.requests.append(store.GetRequest.FromString(raw[HEADER_BYTES : HEADER_BYTES + size]))
        self.given_back.append(lane)


class _Worked:
    def worked(self, path: object) -> None:
        return


class _Keeper:
    def __init__(self, binding: object) -> None:
        self.binding: object | None = binding

    def ready(self, spec: NamespaceSpec) -> object | None:
        return self.binding


@dataclass
class _Limits:
    max_blocks: int = 100


@dataclass
class _Binding:
    session: bytes = b"s" * 16
    namespace: int = 1
    limits: _Limits = field(default_factory=_Limits)


@dataclass
class Core:
    """What `quick_get` needs of a core."""

    lanes: Lanes = field(default_factory=Lanes)
    options: ClientOptions = field(default_factory=lambda: ClientOptions("h:1"))
    stats: Counters = field(default_factory=Counters)
    keeper: _Keeper = field(default_factory=lambda: _Keeper(_Binding()))
    path: object | None = field(default_factory=object)
    closed: bool = False
    slots: int = 1
    quick_bytes: int = MOST_BYTES

    def made_transport(self, binding: object) -> FramedTransport | None:
        if self.path is None:
            return None
        made = FramedTransport("bulk", self.lanes, cast(Any, None))
        made.quick_bytes = self.quick_bytes
        return made

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


def get(core: Core, blocks: Any, into: Any, *, spec: NamespaceSpec = SPEC, deadline_ms: int = 1000) -> Any:
    chosen = cast(DirectCore, core)
    deadline = Deadline.after(deadline_ms)
    return quick_get(chosen, spec, blocks, into=into, coverage=Coverage.PREFIX, wait_ms=0, deadline=deadline)


def rooms(count: int = 3, size: int = SIZE) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def header(states: bytes, values: list[bytes]) -> store.GetResponse:
    sums = [xxh3_64_intdigest(v) for v in values]
    return store.GetResponse(header=store.GetHeader(states=states, lengths=list(map(len, values)), checksums=sums))


def saying(states: bytes, values: list[bytes], payload: bytes, *, flags: int = END) -> bytes:
    message = header(states, values).SerializeToString()
    return head(Verb.GET, FIRST, message, flags=flags, payload_bytes=len(payload)) + payload


def right() -> bytes:
    return saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES))


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
    core.lanes.answer = saying(bytes((HOT, MISS, BEYOND)), VALUES[:1], VALUES[0])
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
        (keys(0, 101), rooms(101), SPEC),
        (keys(0, MOST_COPIED_BLOCKS + 1), rooms(MOST_COPIED_BLOCKS + 1), SPEC),
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
    core.path = None
    assert get(core, keys(0, 3), rooms()) is None
    core.path, core.closed = object(), True
    assert get(core, keys(0, 3), rooms()) is None
    core.closed, core.slots = False, 0
    assert get(core, keys(0, 3), rooms()) is None
    core.slots = 1
    assert core.lanes.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",  # The connection ended.
        head(Verb.GET, FIRST, UnknownSession("gone").to_detail().SerializeToString(), flags=ERROR),
        saying(bytes((HOT,) * 3), VALUES, b"\x09" * 3 * SIZE),  # Damaged.
        saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES))[:-1],  # Cut.
        saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES)[:-1]),  # Less than was announced.
        saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES) + b"x"),  # More than was announced.
        saying(bytes((HOT,) * 3), VALUES, b"".join(VALUES), flags=0),  # More frames are to come.
        saying(bytes((HOT,) * 3), VALUES[:2], b"".join(VALUES[:2])),  # A length is missing.
        saying(bytes((HOT,) * 2), VALUES[:2], b"".join(VALUES[:2])),  # A state is missing.
        saying(bytes((HOT, 77, MISS)), VALUES[:1], VALUES[0]),  # No state at all.
        saying(bytes((HOT, BUSY, MISS)), VALUES[:1], VALUES[0]),  # To be asked for again.
        saying(bytes((HOT,) * 3), [v[:-1] for v in VALUES], b"".join(v[:-1] for v in VALUES)),
        saying(b"", [], b""),
        head(Verb.GET, FIRST, b"\xff\xff", flags=END),
        head(Verb.MATCH, FIRST, flags=END),
        head(Verb.GET, FIRST + 1, flags=END),
        b"no frame at all, but long enough",
    ],
)
def test_an_answer_that_does_not_fit_is_left_to_the_long_way(core: Core, answer: bytes) -> None:
    core.lanes.answer, core.lanes.ends = answer, True
    assert get(core, keys(0, 3), rooms()) is None
    assert core.stats.snapshot() == Counters().snapshot(), "it is counted where it is answered"
    (lane,) = core.lanes.given_back
    damaged = answer == saying(bytes((HOT,) * 3), VALUES, b"\x09" * 3 * SIZE)
    assert lane.broken != damaged, "a lane that something is left in must not be used again"


def test_the_deadline_is_an_answer(core: Core) -> None:
    core.lanes.answer = right()[:-1]
    found = get(core, keys(0, 3), rooms(), deadline_ms=30)
    assert isinstance(found.failure, DeadlineExceeded)
    assert (found.states, found.prefix_blocks) == (bytes(3), 0)
    assert core.stats.failures == {"DeadlineExceeded": 1}
    assert (core.stats.calls["get"], core.stats.fetched_blocks_asked, core.stats.fetched_blocks) == (1, 3, 0)
    assert core.lanes.given_back[0].broken


# -- answers of many frames ------------------------------------------------------------------------------------------


def in_frames(states: bytes, values: list[bytes], payload: bytes, size: int = 700) -> bytes:
    """An answer whose frames carry at most so much payload each; the header comes with the first."""
    message, out = header(states, values).SerializeToString(), b""
    for at in range(0, max(1, len(payload)), size):
        piece = payload[at : at + size]
        flags = END if at + size >= len(payload) else 0
        out += head(Verb.GET, FIRST, b"" if at else message, flags=flags, payload_bytes=len(piece)) + piece
    return out


@pytest.mark.parametrize("size", [1, 7, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE])
@pytest.mark.parametrize("verify", [Verify.ON, Verify.OFF])
def test_an_answer_of_many_frames_lands_in_its_rooms(core: Core, size: int, verify: Verify) -> None:
    core.quick_bytes, core.options = 0, ClientOptions("h:1", verify=verify)
    core.lanes.answer = in_frames(bytes((HOT,) * 3), VALUES, b"".join(VALUES), size)
    into = rooms()
    found = get(core, keys(0, 3), into)
    assert [bytes(room) for room in into] == VALUES
    assert (found.prefix_blocks, found.size_bytes, found.failure) == (3, 3 * SIZE, None)
    assert core.stats.unverified_parts == (0 if verify is Verify.ON else 3)
    (lane,) = core.lanes.given_back
    assert lane.is_fit


@pytest.mark.parametrize("count", [MOST_BLOCKS + 1, 100])
def test_many_blocks_and_large_ones_come_in_many_frames(core: Core, count: int) -> None:
    values = [bytes((i,)) * SIZE for i in range(count)]
    core.lanes.answer = in_frames(bytes((HOT,) * count), values, b"".join(values), 2048)
    into = rooms(count)
    assert get(core, keys(0, count), into).prefix_blocks == count
    assert [bytes(room) for room in into] == values


def test_without_verification_nothing_is_hashed(core: Core) -> None:
    core.options = ClientOptions("h:1", verify=Verify.OFF)
    core.lanes.answer = in_frames(bytes((HOT,) * 3), VALUES, bytes(3 * SIZE))
    assert get(core, keys(0, 3), rooms()).prefix_blocks == 3
    assert core.stats.unverified_parts == 3


def test_misses_come_in_frames_too(core: Core) -> None:
    core.quick_bytes = 0
    core.lanes.answer = in_frames(bytes((MISS, BEYOND, BEYOND)), [], b"")
    assert get(core, keys(0, 3), rooms()).prefix_blocks == 0
    core.lanes.answer = in_frames(bytes((HOT, MISS, BEYOND)), VALUES[:1], VALUES[0])
    into = rooms()
    assert get(core, keys(0, 3), into).prefix_blocks == 1
    assert [bytes(room) for room in into] == [VALUES[0], bytes(SIZE), bytes(SIZE)]


@pytest.mark.parametrize(
    ("answer", "is_fit"),
    [
        (b"", False),
        (head(Verb.GET, FIRST, UnknownSession("gone").to_detail().SerializeToString(), flags=ERROR), False),
        (in_frames(bytes((HOT,) * 3), VALUES, b"\x09" * 3 * SIZE), True),  # Damaged.
        (in_frames(bytes((HOT,) * 3), VALUES, b"".join(VALUES))[:-1], False),  # Cut.
        (in_frames(bytes((HOT,) * 3), VALUES, b"".join(VALUES)[:-1]), True),  # Less than was announced.
        (in_frames(bytes((HOT,) * 3), VALUES, b"".join(VALUES) + b"x"), False),  # More than was announced.
        (in_frames(bytes((HOT,) * 3), VALUES[:2], b"".join(VALUES[:2])), False),  # A length is missing.
        (in_frames(bytes((HOT,) * 2), VALUES[:2], b"".join(VALUES[:2])), False),  # A state is missing.
        (in_frames(bytes((HOT, BUSY, MISS)), VALUES[:1], VALUES[0]), False),  # To be asked for again.
        (head(Verb.GET, FIRST, b"", payload_bytes=3) + b"abc" + right(), False),  # Bytes before the header.
        (head(Verb.GET, FIRST, header(bytes((HOT,) * 3), VALUES).SerializeToString()) + right(), False),  # Two headers.
        (head(Verb.GET, FIRST, b"\xff\xff", flags=END), False),
        (head(Verb.MATCH, FIRST, flags=END), False),
        (b"no frame at all, but long enough", False),
    ],
)
def test_frames_that_do_not_fit_are_left_to_the_long_way(core: Core, answer: bytes, is_fit: bool) -> None:
    core.quick_bytes = 0
    core.lanes.answer, core.lanes.ends = answer, True
    assert get(core, keys(0, 3), rooms()) is None
    assert core.stats.snapshot() == Counters().snapshot(), "it is counted where it is answered"
    (lane,) = core.lanes.given_back
    assert lane.is_fit == is_fit


def test_the_deadline_ends_an_answer_of_many_frames(core: Core) -> None:
    core.quick_bytes = 0
    core.lanes.answer = in_frames(bytes((HOT,) * 3), VALUES, b"".join(VALUES))[:-1]
    found = get(core, keys(0, 3), rooms(), deadline_ms=30)
    assert isinstance(found.failure, DeadlineExceeded)
    assert core.lanes.given_back[0].broken
