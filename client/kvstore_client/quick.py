"""Small reads from a thread by the shortest way: whole blocks of one part, few and small, into the caller's buffers.

The answer is the one that `GetCall` gives; whatever is not plain - another shape, no connection, a wrong argument, an
answer that does not fit - is left to it by returning None, before or instead of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64

from kvstore_client.buffers import Entry
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.fast.lane import BlockingLane, Plain
from kvstore_client.fast.pools import BlockingLanes
from kvstore_client.leases import HOT
from kvstore_client.options import Verify
from kvstore_client.question import Keys
from kvstore_client.results import GetResult, leading
from kvstore_wire.errors import DeadlineExceeded
from kvstore_wire.frames import Verb
from kvstore_wire.limits import MAX_KEY_BYTES, MIN_KEY_BYTES
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

MOST_BLOCKS = 16


def quick_get(
    core: DirectCore, spec: NamespaceSpec, keys: Keys, *, into: Sequence[Entry], coverage: Coverage, deadline: Deadline
) -> GetResult | None:
    """Returns what a get brought, None where the long way must be gone; then nothing was counted."""
    views = _plain(core, spec, keys, into)
    binding = core.keeper.ready(spec)
    if views is None or binding is None or core.closed:
        return None
    transport, size = core.made_transport(binding), len(views) * spec.part_bytes
    if transport is None or size > transport.quick_bytes:
        return None
    lanes = transport.lanes
    if not isinstance(lanes, BlockingLanes) or not core.try_enter():
        return None
    request = store.GetRequest(
        session=binding.session,
        namespace=binding.namespace,
        chain=types.Chain(keys=keys),  # type: ignore[arg-type]
        coverage=int(coverage),  # type: ignore[arg-type]
    )
    lane = lanes.borrow(size)
    states: bytes | None = None
    try:
        if lane is not None:
            states = _read(lane, request.SerializeToString(), views, deadline)
            if states is not None:
                lanes.worked()
    except DeadlineExceeded as error:
        core.stats.calls["get"] += 1
        core.stats.fetched_blocks_asked += len(views)
        core.stats.failed(error)
        return GetResult.failed(len(views), 1, error)
    except OSError:
        return None
    finally:
        core.leave()
        if lane is not None:
            lanes.give_back(lane)
    return None if states is None else _result(core, states, spec.part_bytes)


def _read(lane: BlockingLane, request: bytes, views: list[memoryview], deadline: Deadline) -> bytes | None:
    """Returns the states of an answer whose every part landed as it was written, None for any other; then, or where
    this raises, the lane is closed, since something of the answer may be left in it."""
    done = False
    try:
        answer = lane.ask(Verb.GET, request, deadline)
        header = None if answer is None else _header(answer.message, len(views), len(views[0]))
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


def _header(message: memoryview, block_count: int, size: int) -> store.GetHeader | None:
    """Returns the header of a whole answer, None if it does not fit the question."""
    answer = store.GetResponse()
    try:
        answer.ParseFromString(bytes(message))
    except DecodeError:
        return None
    header = answer.header
    states, hits = header.states, len(header.lengths)
    if len(states) != block_count or states.count(BlockState.HOT) != hits or len(header.checksums) != hits:
        return None
    if any(length != size for length in header.lengths):
        return None
    if hits < block_count and (max(states) > BlockState.BEYOND or BlockState.BUSY in states):
        return None
    return header


def _hits(states: bytes, views: list[memoryview]) -> list[memoryview]:
    return [view for view, state in zip(views, states, strict=True) if state == BlockState.HOT]


def _plain(core: DirectCore, spec: NamespaceSpec, keys: Keys, into: Sequence[Entry]) -> list[memoryview] | None:
    """Returns the callers' buffers as flat views, None if the call is not plain."""
    if spec.parts_per_block != 1 or spec.kind is not Kind.KV or core.options.verify is not Verify.ON:
        return None
    if not isinstance(keys, list) or not isinstance(into, list) or not 0 < len(keys) <= MOST_BLOCKS:
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
    return GetResult(states, prefix, lengths, None, hits * size)
