"""Reads from a thread by the shortest way: whole blocks of one part into the caller's buffers.

What is little comes through the socket in one frame; what is more is copied out of the shard's arena, where that is
mapped, and else comes in many frames.

The answer is the one that `GetCall` gives; whatever is not plain - another shape, no connection, a wrong argument, an
answer that does not fit - is left to it by returning None, before or instead of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64

from kvstore_client.buffers import Entry
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.errors import MalformedAnswer
from kvstore_client.fast.busy import FILL_BYTES
from kvstore_client.fast.lane import BlockingLane, Plain
from kvstore_client.fast.pools import BlockingLanes
from kvstore_client.fast.wire import OneMessage
from kvstore_client.landing import Landing
from kvstore_client.leases import HOT
from kvstore_client.options import Verify
from kvstore_client.question import Keys
from kvstore_client.reading import bounded_wait_ms, chosen_wait_ms
from kvstore_client.results import GetResult, leading
from kvstore_client.session import Binding
from kvstore_client.transports.framed import Arena, FramedTransport
from kvstore_wire.errors import DeadlineExceeded, KvStoreError
from kvstore_wire.frames import Verb
from kvstore_wire.limits import MAX_KEY_BYTES, MIN_KEY_BYTES
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

MOST_BLOCKS, MOST_COPIED_BLOCKS = 16, 256


def quick_get(
    core: DirectCore,
    spec: NamespaceSpec,
    keys: Keys,
    *,
    into: Sequence[Entry],
    coverage: Coverage,
    wait_ms: int | None,
    deadline: Deadline,
) -> GetResult | None:
    """Returns what a get brought, None where the long way must be gone; then nothing was counted."""
    views = _plain(spec, keys, into) if isinstance(coverage, Coverage) else None
    binding = core.keeper.ready(spec)
    if views is None or binding is None or core.closed:
        return None
    waits_ms = chosen_wait_ms(wait_ms, binding, core.options)
    if not isinstance(waits_ms, int) or waits_ms < 0 or (waits_ms and waits_ms > binding.limits.max_wait_ms):
        return None
    transport, size = core.made_transport(binding), len(views) * spec.part_bytes
    if transport is None:
        return None
    arena = transport.arena if size > transport.quick_bytes else None
    verify = core.options.verify
    in_one = size <= transport.quick_bytes and len(views) <= MOST_BLOCKS and verify is Verify.ON
    if len(views) > binding.limits.max_blocks or not (arena is not None or in_one or transport.streams):
        return None
    lanes = transport.lanes
    if not isinstance(lanes, BlockingLanes):
        return None
    entered = False
    lane: BlockingLane | None = None
    states: bytes | None = None
    try:
        entered = core.try_enter()
        if not entered:
            return None
        lane = lanes.borrow(size if arena is None and in_one else 0)
        if lane is not None:
            asked = _Asked(binding, keys, coverage, views, deadline, waits_ms)
            if arena is not None:
                states = _copy(lane, asked, arena, core, transport)
            else:
                states = _read(lane, asked) if in_one else _stream(lane, asked, verify)
            if states is not None:
                lanes.worked()
    except DeadlineExceeded as error:
        core.stats.calls["get"] += 1
        core.stats.fetched_blocks_asked += len(views)
        core.stats.failed(error)
        return GetResult.failed(len(views), 1, error)
    except (OSError, KvStoreError):
        return None
    finally:
        if lane is not None:
            lanes.give_back(lane)
        if entered:
            core.leave()
    return None if states is None else _result(core, states, spec.part_bytes)


class _Asked(NamedTuple):
    """One call."""

    binding: Binding
    keys: Keys
    coverage: Coverage
    views: list[memoryview]
    deadline: Deadline
    wait_ms: int

    def fill(self, request: store.GetRequest | store.AcquireRequest) -> bytes:
        """Returns the request with what both kinds have."""
        request.session, request.namespace = self.binding.session, self.binding.namespace
        request.chain.keys.extend(self.keys)  # type: ignore[arg-type]
        request.coverage = int(self.coverage)  # type: ignore[assignment]
        if self.wait_ms:
            request.wait_ms = bounded_wait_ms(self.wait_ms, self.deadline)
        return request.SerializeToString()


def _read(lane: BlockingLane, asked: _Asked) -> bytes | None:
    """Returns the states of an answer whose every part landed as it was written, None for any other; then, or where
    this raises, the lane is closed, since something of the answer may be left in it."""
    views, deadline = asked.views, asked.deadline
    done = False
    try:
        answer = lane.ask(Verb.GET, asked.fill(store.GetRequest()), deadline)
        header = None if answer is None else _header(answer.message, views)
        if answer is None or header is None:
            return None
        states = header.states
        hits = views if states.count(BlockState.HOT) == len(views) else _hits(states, views)
        if len(hits) * len(views[0]) != len(answer.payload) + answer.left:
            return None
        sums = _land(lane, answer, hits, deadline)
        done = True
    finally:
        if not done:
            lane.close()
    return states if sums == list(header.checksums) else None


def _stream(lane: BlockingLane, asked: _Asked, verify: Verify) -> bytes | None:
    """As `_read`, of an answer of many frames."""
    taker, done = _Streaming(asked.views, verify), False
    try:
        done = lane.stream(Verb.GET, asked.fill(store.GetRequest()), taker, asked.deadline)
    finally:
        if not done:
            lane.close()
    return taker.states if done and taker.is_whole() else None


class _Streaming(OneMessage):
    """Puts the payload of a Get's answer where it belongs, and hashes each piece there while a core's cache has it."""

    def __init__(self, views: list[memoryview], verify: Verify) -> None:
        super().__init__()
        self._views, self._verify = views, verify
        self._landing: Landing | None = None
        self.states = b""

    def is_whole(self) -> bool:
        """Whether all of it fits the question, came, and is as it was written. To be asked once, at the end."""
        if self._landing is None:
            return False
        try:
            self._landing.finish()
        except MalformedAnswer:
            return False
        return not self._landing.corrupt

    def message(self, raw: bytes) -> None:
        header = None if self._landing is not None else _header(raw, self._views)
        if header is None:
            raise MalformedAnswer("is not the header of the answer to this question")
        self.states = header.states
        targets = [[view] for view in _hits(self.states, self._views)]
        self._landing = Landing(
            lengths=list(header.lengths), checksums=list(header.checksums), targets=targets, verify=self._verify
        )

    def room(self, most: int) -> memoryview:
        if self._landing is None:
            raise MalformedAnswer("bytes came before the header")
        return self._landing.room(min(most, FILL_BYTES))

    def landed(self, size: int) -> None:
        assert self._landing is not None
        self._landing.landed(size)


def _copy(
    lane: BlockingLane, asked: _Asked, arena: Arena, core: DirectCore, transport: FramedTransport
) -> bytes | None:
    """As `_read`, out of the arena under a lease. What is leased is copied as the shard tells of it, while it brings
    the rest from its disk. Nobody waits for the end of the lease where checksums prove the bytes.

    A lease that a broken lane leaves behind ends at the call's deadline.
    """
    verify = core.options.verify
    limit = asked.binding.limits.max_lease_ms
    request = store.AcquireRequest(lease_ms=max(1, min(asked.deadline.remaining_ms(), limit)))
    landing = _Landing(asked.views, arena, verify)
    done = False
    proved = True  # Or of no interest any more: then nobody waits for the answer.
    try:
        if not lane.ask_all(Verb.ACQUIRE, asked.fill(request), landing, asked.deadline):
            return None
        done = True
        proved = verify is Verify.ON or not landing.is_whole
    finally:  # However it ends: an interrupt mostly comes here, where most of the time goes.
        if landing.lease is not None and proved:
            _let_go(lane, asked, landing.lease, core, transport)
        if not done:
            lane.close()
    states = landing.states if landing.is_whole else None
    if proved or landing.lease is None:
        return states
    return states if _was_valid(lane, _release(asked, landing.lease), asked.deadline) else None


def _release(asked: _Asked, lease: types.Lease) -> bytes:
    return store.ReleaseRequest(session=asked.binding.session, leases=[lease]).SerializeToString()


def _let_go(
    lane: BlockingLane, asked: _Asked, lease: types.Lease, core: DirectCore, transport: FramedTransport
) -> None:
    """Ends a lease without waiting for what the shard says of it."""
    if lane.wire.failure is not None or not lane.tell(Verb.RELEASE, _release(asked, lease)):
        core.background(transport.end_lease("Acquire", asked.binding.session, lease))


class _Landing(OneMessage):
    """Copies what each message of an Acquire's answer leases. `is_good`: all of it fits the question, and no checksum
    said otherwise; nothing is copied any more once it is not."""

    def __init__(self, views: list[memoryview], arena: Arena, verify: Verify) -> None:
        super().__init__()
        self._views, self._arena, self._verify = views, arena, verify
        self.states = b""
        self.lease: types.Lease | None = None
        self.settled, self.is_good = False, True

    @property
    def is_whole(self) -> bool:
        """Whether all that was asked for was told, and all that was leased landed."""
        return self.is_good and self.settled

    def message(self, raw: bytes) -> None:
        answer = store.AcquireResponse()
        try:
            answer.ParseFromString(raw)
        except DecodeError:
            raise MalformedAnswer("is not an AcquireResponse") from None
        if answer.HasField("lease"):
            self.lease = answer.lease
        if self.is_good:
            self.is_good = not self.settled and self._copied(answer)
        self.settled = answer.settled

    def _copied(self, answer: store.AcquireResponse) -> bool:
        states, first = answer.states, len(self.states)
        end = first + len(states)
        is_one = len(states) == len(self._views)
        if answer.first != first or end > len(self._views) or (answer.settled and end < len(self._views)):
            return False
        views = self._views if is_one else self._views[first:end]
        if not _fits(states, answer.lengths, len(answer.checksums), len(self._views[0])):
            return False
        self.states = states if is_one else self.states + states
        hits = views if states.count(BlockState.HOT) == len(views) else _hits(states, views)
        try:
            return not self._arena.copier.copy_out(
                self._arena.array,
                offsets=answer.offsets,
                lengths=answer.lengths,
                checksums=answer.checksums,
                targets=[[view] for view in hits],
                verify=self._verify,
            )
        except KvStoreError:
            return False


def _was_valid(lane: BlockingLane, release: bytes, deadline: Deadline) -> bool:
    """Ends a lease and tells whether it had lasted; where that is not known the lane is closed."""
    valid: list[bool] = []
    try:
        plain = lane.ask(Verb.RELEASE, release, deadline)
        if plain is not None and not plain.payload and not plain.left:
            with suppress(DecodeError):
                valid = list(store.ReleaseResponse.FromString(bytes(plain.message)).valid)
    finally:
        if len(valid) != 1:
            lane.close()
    return valid == [True]


def _land(lane: BlockingLane, answer: Plain, hits: list[memoryview], deadline: Deadline) -> list[int]:
    """Puts the payload where it belongs - first what came with the message, then what is still to come - and returns
    the checksum of each part, of what landed."""
    came, at, sums = answer.payload, 0, []
    for view in hits:
        digest, here = xxh3_64(), min(len(view), len(came) - at)
        if here:
            view[:here] = came[at : at + here]
            at += here
            digest.update(view[:here])
        if here < len(view):
            lane.take(view[here:], deadline, digest.update)
        sums.append(digest.intdigest())
    if lane.wire.has_pending:
        lane.settle(deadline)
    return sums


def _header(message: bytes | memoryview, views: list[memoryview]) -> store.GetHeader | None:
    """Returns the header of a whole answer, None if it does not fit the question."""
    answer = store.GetResponse()
    try:
        answer.ParseFromString(bytes(message))
    except DecodeError:
        return None
    header = answer.header
    is_whole = len(header.states) == len(views)
    return header if is_whole and _fits(header.states, header.lengths, len(header.checksums), len(views[0])) else None


def _fits(states: bytes, lengths: Sequence[int], checksum_count: int, size: int) -> bool:
    """Whether these are states of an answer with what each hit needs, a length and a checksum."""
    hits = len(lengths)
    if states.count(BlockState.HOT) != hits or checksum_count != hits:
        return False
    if any(length != size for length in lengths):
        return False
    return hits == len(states) or (max(states) <= BlockState.BEYOND and BlockState.BUSY not in states)


def _hits(states: bytes, views: list[memoryview]) -> list[memoryview]:
    return [view for view, state in zip(views, states, strict=True) if state == BlockState.HOT]


def _plain(spec: NamespaceSpec, keys: Keys, into: Sequence[Entry]) -> list[memoryview] | None:
    """Returns the callers' buffers as flat views, None if the call is not plain."""
    if spec.parts_per_block != 1 or spec.kind is not Kind.KV:
        return None
    if not isinstance(keys, list) or not isinstance(into, list) or not 0 < len(keys) <= MOST_COPIED_BLOCKS:
        return None
    size = spec.part_bytes
    if len(into) != len(keys) or not size:
        return None
    first = len(keys[0]) if isinstance(keys[0], bytes) else 0
    if not MIN_KEY_BYTES <= first <= MAX_KEY_BYTES:
        return None
    views = []
    for key, entry in zip(keys, into, strict=True):
        if type(key) is not bytes or len(key) != first:
            return None
        if isinstance(entry, np.ndarray) and entry.dtype == np.uint8 and entry.ndim == 1 and entry.flags.c_contiguous:
            entry = entry.data
        if not isinstance(entry, memoryview) or entry.format != "B" or entry.ndim != 1 or entry.readonly:
            return None
        if len(entry) != size or not entry.c_contiguous:
            return None
        views.append(entry)
    return views


def _result(core: DirectCore, states: bytes, size: int) -> GetResult:
    hits = states.count(BlockState.HOT)
    lengths = np.zeros((len(states), 1), np.int64)
    if hits == len(states):
        lengths[:] = size
        prefix = hits
    else:
        lengths[[i for i, s in enumerate(states) if s == BlockState.HOT]] = size
        prefix = leading(states, HOT)
    stats = core.stats
    stats.calls["get"] += 1
    stats.fetched_blocks_asked += len(states)
    stats.fetched_blocks += hits
    stats.fetched_bytes += hits * size
    if core.options.verify is Verify.OFF:
        stats.unverified_parts += hits
    return GetResult(states, prefix, lengths, None, hits * size)
