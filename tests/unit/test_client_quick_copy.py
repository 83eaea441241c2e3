"""The short way of reads out of the shard's arena: no wait for the end of the lease, and nothing unproved counts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore_client import ClientOptions, Coverage, Verify
from kvstore_client.copying import Copier
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.fast.lane import BlockingLane
from kvstore_client.quick import MOST_COPIED_BLOCKS, quick_get
from kvstore_client.stats import Counters
from kvstore_client.transports.framed import Arena, FramedTransport
from kvstore_wire.errors import DeadlineExceeded, UnknownSession
from kvstore_wire.frames import END, ERROR, HEADER, HEADER_BYTES, Verb, head
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types
from tests.shards import keys, kv_spec
from tests.unit.test_client_quick import FIRST, Lanes, _Keeper, rooms

SIZE, GAP = 1000, 24
SPEC = kv_spec("quick", part_bytes=SIZE)
HOT, MISS, BEYOND, BUSY = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND, BlockState.BUSY
VALUES = [bytes((i + 1,)) * SIZE for i in range(3)]
OFFSETS = [GAP + i * (SIZE + GAP) for i in range(3)]
LEASE = types.Lease(id=7, generation=3)


class TakingLanes(Lanes):
    """Lanes that keep what the shard was sent, as frames: verb, number and message of each."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = leased()
        self.rest = b""  # Of the answer, that comes a moment later.
        self.frames: list[tuple[int, int, bytes]] = []

    def borrow(self, size_bytes: int) -> BlockingLane:
        lane = super().borrow(size_bytes)
        if self.rest:
            threading.Timer(0.002, self._peers[-1].sendall, (self.rest,)).start()
        return lane

    def give_back(self, lane: Any) -> None:
        raw = self._peers.pop().recv(1 << 16)
        while raw:
            _, _, verb, _, _, number, _, size, _ = HEADER.unpack_from(raw)
            self.frames.append((verb, number, raw[HEADER_BYTES : HEADER_BYTES + size]))
            raw = raw[HEADER_BYTES + size :]
        self.given_back.append(lane)

    @property
    def released(self) -> list[types.Lease]:
        """What was told to end, without a number that an answer could have."""
        told = [
            store.ReleaseRequest.FromString(m) for verb, number, m in self.frames if verb == Verb.RELEASE and not number
        ]
        return [lease for request in told for lease in request.leases]


@dataclass
class _Limits:
    max_lease_ms: int = 60_000
    max_blocks: int = 100


@dataclass
class _Binding:
    session: bytes = b"s" * 16
    namespace: int = 1
    limits: _Limits = field(default_factory=_Limits)


@dataclass
class Core:
    """What `quick_get` needs of a core, and an arena with the values."""

    lanes: TakingLanes = field(default_factory=TakingLanes)
    options: ClientOptions = field(default_factory=lambda: ClientOptions("h:1"))
    stats: Counters = field(default_factory=Counters)
    keeper: _Keeper = field(default_factory=lambda: _Keeper(_Binding()))
    arena: Any = None
    closed: bool = False
    background_work: list[Any] = field(default_factory=list)

    def made_transport(self, binding: object) -> FramedTransport:
        made = FramedTransport("shm", self.lanes, cast(Any, None))
        made.quick_bytes, made.arena, made.streams = 2 * SIZE, self.arena, False
        return made

    def try_enter(self) -> bool:
        return True

    def leave(self) -> None:
        return

    def background(self, work: Any) -> None:
        self.background_work.append(work)
        work.close()


@pytest.fixture
def core() -> Iterator[Core]:
    memory = np.zeros(OFFSETS[-1] + SIZE + GAP, np.uint8)
    for at, value in zip(OFFSETS, VALUES, strict=True):
        memory[at : at + SIZE] = np.frombuffer(value, np.uint8)
    made = Core(arena=Arena(memory, Copier(1)))
    yield made
    made.arena.copier.close()


def get(core: Core, blocks: Any, into: Any, *, deadline_ms: int = 1000) -> Any:
    chosen = cast(DirectCore, core)
    return quick_get(
        chosen, SPEC, blocks, into=into, coverage=Coverage.PREFIX, wait_ms=0, deadline=Deadline.after(deadline_ms)
    )


def leased(
    states: Sequence[int] = (HOT,) * 3,
    *,
    offsets: Sequence[int] = OFFSETS,
    lengths: Sequence[int] = (SIZE,) * 3,
    values: Sequence[bytes] = VALUES,
    lease: types.Lease | None = LEASE,
    first: int = 0,
    settled: bool = True,
    flags: int = END,
    payload: bytes = b"",
) -> bytes:
    answer = store.AcquireResponse(
        lease=lease,
        first=first,
        states=bytes(states),
        offsets=offsets,
        lengths=lengths,
        checksums=[xxh3_64_intdigest(v) for v in values],
        settled=settled,
    )
    message = answer.SerializeToString()
    return head(Verb.ACQUIRE, FIRST, message, flags=flags, payload_bytes=len(payload)) + payload


def test_blocks_are_copied_and_their_lease_ends_without_an_answer(core: Core) -> None:
    into = rooms()
    found = get(core, keys(0, 3), into)
    assert [bytes(room) for room in into] == VALUES
    assert (found.prefix_blocks, found.size_bytes, found.failure) == (3, 3 * SIZE, None)
    (verb, number, message), _ = core.lanes.frames
    request = store.AcquireRequest.FromString(message)
    assert (verb, number, list(request.chain.keys)) == (Verb.ACQUIRE, FIRST, keys(0, 3))
    assert 0 < request.lease_ms <= 1000, "a lease that is lost ends with the call's deadline"
    assert core.lanes.released == [LEASE]
    assert not core.lanes.given_back[0].broken
    assert (core.stats.calls["get"], core.stats.fetched_blocks, core.stats.fetched_bytes) == (1, 3, 3 * SIZE)


def test_a_lease_is_no_longer_than_the_shard_gives(core: Core) -> None:
    assert get(core, keys(0, 3), rooms(), deadline_ms=100_000) is not None
    assert store.AcquireRequest.FromString(core.lanes.frames[0][2]).lease_ms == 60_000


def test_misses_are_part_of_an_answer(core: Core) -> None:
    core.lanes.answer = leased((HOT, MISS, BEYOND), offsets=OFFSETS[:1], lengths=(SIZE,), values=VALUES[:1])
    into = rooms()
    found = get(core, keys(0, 3), into)
    assert (found.states, found.lengths.tolist()) == (bytes((HOT, MISS, BEYOND)), [[SIZE], [0], [0]])
    assert (bytes(into[0]), bytes(into[1])) == (VALUES[0], bytes(SIZE))
    assert core.lanes.released == [LEASE]


def test_an_answer_without_a_hit_has_nothing_to_end(core: Core) -> None:
    core.lanes.answer = leased((MISS, BEYOND, BEYOND), offsets=(), lengths=(), values=(), lease=None)
    assert get(core, keys(0, 3), rooms()).prefix_blocks == 0
    assert core.lanes.released == []


def test_bytes_that_others_have_overwritten_are_no_hit(core: Core) -> None:
    """The lease had ended, and the slot went to another block: only the checksum tells."""
    core.arena.array[OFFSETS[1] + SIZE - 1] ^= 1
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.released == [LEASE]
    assert core.stats.snapshot() == Counters().snapshot(), "it is counted where it is answered"


@pytest.mark.parametrize(
    "answer",
    [
        leased((HOT, HOT)),  # A state is missing.
        leased(lengths=(SIZE, SIZE)),
        leased(lengths=(SIZE, SIZE - 1, SIZE)),
        leased(values=VALUES[:2]),
        leased(offsets=OFFSETS[:2]),
        leased(offsets=[*OFFSETS[:2], 1 << 40]),  # Outside of the arena.
        leased((HOT, 77, MISS), offsets=OFFSETS[:1], lengths=(SIZE,), values=VALUES[:1]),
        leased((HOT, BUSY, MISS), offsets=OFFSETS[:1], lengths=(SIZE,), values=VALUES[:1]),
        leased(first=1),
        leased(settled=False),
    ],
)
def test_what_was_leased_by_an_answer_that_does_not_fit_is_let_go(core: Core, answer: bytes) -> None:
    core.lanes.answer = answer
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.released == [LEASE]
    assert not core.lanes.given_back[0].broken


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        head(Verb.ACQUIRE, FIRST, UnknownSession("gone").to_detail().SerializeToString(), flags=ERROR),
        leased(flags=0),  # More messages are to come.
        leased(payload=b"bytes that no Acquire has"),
        leased()[:-1],
        head(Verb.ACQUIRE, FIRST, b"\xff\xff", flags=END),
        head(Verb.GET, FIRST, flags=END),
    ],
)
def test_a_lane_that_another_answer_may_be_left_in_is_closed(core: Core, answer: bytes) -> None:
    core.lanes.answer, core.lanes.ends = answer, True
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.given_back[0].broken
    assert core.stats.snapshot() == Counters().snapshot()


def released(*valid: bool) -> bytes:
    return head(Verb.RELEASE, FIRST + 1, store.ReleaseResponse(valid=valid).SerializeToString(), flags=END)


def then_answer(core: Core, answer: bytes) -> None:
    """The shard's second answer comes after the copy, and nothing after it."""
    copy_out = core.arena.copier.copy_out

    def copy_first(*args: Any, **kwargs: Any) -> list[int]:
        peer = core.lanes._peers[-1]
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)
        return cast("list[int]", copy_out(*args, **kwargs))

    core.arena = core.arena._replace(copier=_Copying(copy_first, core.arena.copier))


def test_what_no_checksum_proves_counts_where_the_lease_lasted(core: Core) -> None:
    core.options = ClientOptions("h:1", verify=Verify.OFF)
    core.arena.array[OFFSETS[1]] ^= 1
    then_answer(core, released(True))
    assert get(core, keys(0, 3), rooms()).prefix_blocks == 3
    assert core.stats.unverified_parts == 3
    assert not core.lanes.given_back[0].broken


@pytest.mark.parametrize(
    "answer",
    [released(False), released(), released(True, True), head(Verb.RELEASE, FIRST + 1, b"\xff", flags=END), b""],
)
def test_what_no_checksum_proves_is_no_hit_where_the_lease_may_have_ended(core: Core, answer: bytes) -> None:
    core.options = ClientOptions("h:1", verify=Verify.OFF)
    then_answer(core, answer)
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.given_back[0].broken == (answer != released(False))
    assert core.stats.snapshot() == Counters().snapshot()


def test_a_lease_that_the_connection_does_not_take_back_is_ended_by_another(core: Core) -> None:
    lanes = core.lanes
    into = rooms()
    copy_out = core.arena.copier.copy_out

    def cut_first(*args: Any, **kwargs: Any) -> list[int]:
        lanes._peers[-1].close()
        return cast("list[int]", copy_out(*args, **kwargs))

    core.arena = core.arena._replace(copier=_Copying(cut_first, core.arena.copier))
    lanes.give_back = lanes.given_back.append  # type: ignore[method-assign, assignment]
    assert get(core, keys(0, 3), into).prefix_blocks == 3
    assert [bytes(room) for room in into] == VALUES
    assert len(core.background_work) == 1
    assert lanes.given_back[0].broken


@dataclass
class _Copying:
    copy_out: Any
    inner: Copier

    def close(self) -> None:
        self.inner.close()


def test_an_interrupt_in_the_middle_of_the_copy_lets_the_lease_go(core: Core) -> None:
    def interrupted(*_: Any, **__: Any) -> list[int]:
        raise KeyboardInterrupt

    core.arena = core.arena._replace(copier=_Copying(interrupted, core.arena.copier))
    with pytest.raises(KeyboardInterrupt):
        get(core, keys(0, 3), rooms())
    assert core.lanes.released == [LEASE]
    assert core.lanes.given_back[0].broken  # More of the answer may be to come.


def begun(count: int = 2, **kwargs: Any) -> bytes:
    """The first message of several: the first blocks are there, the rest is on its way."""
    of_each = {"offsets": OFFSETS[:count], "lengths": (SIZE,) * count, "values": VALUES[:count]}
    return leased((HOT,) * count, **(of_each | {"settled": False, "flags": 0} | kwargs))


def went_on(states: Sequence[int] = (HOT,), **kwargs: Any) -> bytes:
    """The last message after `begun`."""
    of_each = {"offsets": OFFSETS[2:], "lengths": (SIZE,), "values": VALUES[2:], "lease": None, "first": 2}
    return leased(states, **(of_each | kwargs))


def test_what_comes_first_is_copied_while_the_rest_is_on_its_way(core: Core) -> None:
    core.lanes.answer, into, peers = begun(), rooms(), core.lanes._peers
    landed: list[list[bytes]] = []
    copy_out = core.arena.copier.copy_out

    def copy_then_go_on(*args: Any, **kwargs: Any) -> list[int]:
        corrupt = copy_out(*args, **kwargs)
        landed.append([bytes(room) for room in into])
        if len(landed) == 1:
            peers[-1].sendall(went_on())  # Not before the first blocks have landed.
        return cast("list[int]", corrupt)

    core.arena = core.arena._replace(copier=_Copying(copy_then_go_on, core.arena.copier))
    got = get(core, keys(0, 3), into)
    assert (got.prefix_blocks, got.states) == (3, bytes((HOT,) * 3))
    assert landed == [[*VALUES[:2], bytes(SIZE)], VALUES]
    assert core.lanes.released == [LEASE]
    assert not core.lanes.given_back[0].broken


@pytest.mark.parametrize("states", [(HOT,), (MISS,)])
def test_however_the_messages_of_an_answer_are_cut_it_is_taken_whole(core: Core, states: tuple[int, ...]) -> None:
    hits = states.count(HOT)
    answer = (
        begun(0, lease=None)
        + begun()
        + went_on(states, offsets=OFFSETS[2 : 2 + hits], lengths=(SIZE,) * hits, values=VALUES[2 : 2 + hits])
    )
    for cut in range(HEADER_BYTES, len(answer), 5):  # Less than a header is left to the long way.
        core.lanes.answer, core.lanes.rest, into = answer[:cut], answer[cut:], rooms()
        core.lanes.frames.clear()
        got = get(core, keys(0, 3), into)
        assert got.prefix_blocks == 2 + hits, cut
        assert [bytes(room) for room in into] == [*VALUES[:2], VALUES[2] if hits else bytes(SIZE)], cut
        assert core.lanes.released == [LEASE]


@pytest.mark.parametrize(
    "answer",
    [
        begun() + went_on(first=1),
        begun() + went_on((HOT, MISS)),
        begun() + went_on((), offsets=(), lengths=(), values=()),
        begun() + went_on(values=[b"other"]),
        begun() + went_on(settled=False),
        begun() + went_on((BUSY,), offsets=(), lengths=(), values=()),
        begun() + begun(),
        begun(values=[VALUES[0], b"other"]) + went_on(),
        begun(settled=True) + went_on(),
        begun(3, settled=True, lease=LEASE) + went_on((), offsets=(), lengths=(), values=(), first=3),
    ],
)
def test_what_was_leased_by_messages_that_do_not_fit_together_is_let_go(core: Core, answer: bytes) -> None:
    core.lanes.answer, core.lanes.ends = answer, True
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.released == [LEASE] or core.background_work
    assert core.stats.snapshot() == Counters().snapshot()


@pytest.mark.parametrize(
    "end",
    [
        b"",
        head(Verb.ACQUIRE, FIRST, UnknownSession("gone").to_detail().SerializeToString(), flags=ERROR),
        head(Verb.ACQUIRE, FIRST, b"\xff\xff", flags=END),
        head(Verb.ACQUIRE, FIRST + 1, b"", flags=END),
        went_on(payload=b"bytes that no Acquire has"),
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(core: Core, end: bytes) -> None:
    core.lanes.answer, core.lanes.ends = begun() + end, True
    assert get(core, keys(0, 3), rooms()) is None
    assert core.stats.snapshot() == Counters().snapshot()


@pytest.mark.parametrize("begins", [begun(), begun() + went_on()])
def test_a_lease_of_a_connection_that_says_goodbye_is_ended_by_another(core: Core, begins: bytes) -> None:
    why = UnknownSession("the shard ends").to_detail()
    goodbye = head(Verb.GOODBYE, 0, channel.Goodbye(why=why).SerializeToString(), flags=END)
    core.lanes.answer, core.lanes.ends = begins + goodbye, True
    get(core, keys(0, 3), rooms())
    assert len(core.background_work) == 1
    assert core.lanes.given_back[0].broken


def test_an_answer_that_stops_half_way_ends_at_the_deadline(core: Core) -> None:
    core.lanes.answer = begun()
    got = get(core, keys(0, 3), rooms(), deadline_ms=50)
    assert isinstance(got.failure, DeadlineExceeded)
    assert core.lanes.given_back[0].broken, "the rest of the answer may come later"
    assert core.lanes.released == [LEASE]


@pytest.mark.parametrize("count", [162, 163, 164, MOST_COPIED_BLOCKS])
def test_an_answer_that_no_single_receive_holds_is_taken_whole(core: Core, count: int) -> None:
    """Its message is longer than the wire's own buffer."""
    core.keeper.binding.limits.max_blocks = MOST_COPIED_BLOCKS  # type: ignore[attr-defined]
    core.lanes.answer = leased(
        (HOT,) * count, offsets=OFFSETS[:1] * count, lengths=(SIZE,) * count, values=VALUES[:1] * count
    )
    into = rooms(count)
    assert get(core, keys(0, count), into).prefix_blocks == count
    assert {bytes(room) for room in into} == {VALUES[0]}
    assert core.lanes.released == [LEASE]
    assert not core.lanes.given_back[0].broken


def test_an_answer_of_an_unreasonable_length_closes_the_lane(core: Core) -> None:
    core.lanes.answer = head(Verb.ACQUIRE, FIRST, bytes(1 << 17), flags=END)
    assert get(core, keys(0, 3), rooms()) is None
    assert core.lanes.given_back[0].broken


def test_a_coverage_that_is_none_is_left_to_the_long_way_which_names_it(core: Core) -> None:
    chosen, into = cast(DirectCore, core), rooms()
    wrong = cast(Coverage, "each")
    assert (
        quick_get(chosen, SPEC, keys(0, 3), into=into, coverage=wrong, wait_ms=0, deadline=Deadline.after(1000)) is None
    )
    assert core.lanes.frames == []


def test_the_deadline_is_an_answer(core: Core) -> None:
    core.lanes.answer = b""
    found = get(core, keys(0, 3), rooms(), deadline_ms=30)
    assert isinstance(found.failure, DeadlineExceeded)
    assert core.lanes.given_back[0].broken


def test_what_is_little_or_has_no_arena_or_is_more_than_one_call_takes_goes_another_way(core: Core) -> None:
    core.lanes.answer, core.lanes.ends = b"", True
    assert get(core, keys(0, 2), rooms(2)) is None  # Asked for through the socket, which ended.
    assert core.lanes.frames.pop()[0] == Verb.GET
    assert get(core, keys(0, 101), rooms(101)) is None
    core.keeper.binding.limits.max_blocks = 1000  # type: ignore[attr-defined]
    most = MOST_COPIED_BLOCKS + 1
    assert get(core, keys(0, most), rooms(most)) is None
    core.arena, unmapped = None, core.arena
    assert get(core, keys(0, 3), rooms()) is None
    core.arena = unmapped
    assert core.lanes.frames == []
