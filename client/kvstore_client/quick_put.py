"""Small writes from a thread by the shortest way: whole blocks of one part, sent and answered in one go.

The answer is the one that `PutCall` gives; whatever is not plain is left to it by returning None. It may then write
what is stored already, and is told so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from kvstore_client.buffers import Entry
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore
from kvstore_client.fast.lane import BlockingLane
from kvstore_client.fast.pools import BlockingLanes
from kvstore_client.leases import written
from kvstore_client.question import Keys
from kvstore_client.quick import MOST_BLOCKS
from kvstore_client.results import PutResult
from kvstore_client.session import Binding
from kvstore_wire.errors import DeadlineExceeded, KvStoreError
from kvstore_wire.limits import MAX_KEY_BYTES, MIN_KEY_BYTES
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types


def quick_put(
    core: DirectCore, spec: NamespaceSpec, keys: Keys, *, values: Sequence[Entry], deadline: Deadline
) -> PutResult | None:
    """Returns what a put stored, None where the long way must be gone; then nothing was counted."""
    views = _plain(spec, keys, values)
    binding = core.keeper.ready(spec)
    if views is None or binding is None or core.closed:
        return None
    transport, size = core.made_transport(binding), sum(map(len, views))
    if transport is None or size > transport.quick_put_bytes:
        return None
    lanes = transport.lanes
    if not isinstance(lanes, BlockingLanes):
        return None
    entered = False
    lane: BlockingLane | None = None
    answer: store.PutResponse | None = None
    try:
        entered = core.try_enter()
        if not entered:
            return None
        lane = lanes.borrow(size)
        if lane is not None and lane.wire.credit >= size:
            answer = _write(lane, binding, spec, keys, views=views, deadline=deadline)
            if answer is not None:
                lanes.worked()
    except DeadlineExceeded as error:
        core.stats.calls["put"] += 1
        core.stats.failed(error)
        return PutResult.failed(len(views), error)
    except OSError:
        return None
    finally:
        if lane is not None:
            lanes.give_back(lane)
        if entered:
            core.leave()
    if answer is None:
        return None
    core.stats.calls["put"] += 1
    return written(core, answer.states, list(map(len, views)), answer.retry_after_ms)


def _write(
    lane: BlockingLane,
    binding: Binding,
    spec: NamespaceSpec,
    keys: Keys,
    *,
    views: list[memoryview],
    deadline: Deadline,
) -> store.PutResponse | None:
    """Returns a whole answer, None for any other; then, or where this raises, the lane is closed."""
    header = store.PutHeader(
        session=binding.session,
        namespace=binding.namespace,
        chain=types.Chain(keys=keys),  # type: ignore[arg-type]
        lengths=map(len, views) if spec.kind is Kind.OPAQUE else (),
    )
    trailer = store.PutTrailer(checksums=map(xxh3_64_intdigest, views))
    answer = store.PutResponse()
    done = False
    try:
        message = lane.put(
            store.PutRequest(header=header).SerializeToString(),
            store.PutRequest(trailer=trailer).SerializeToString(),
            views,
            deadline,
        )
        if message is not None:
            answer.ParseFromString(message)
            done = len(answer.states) == len(views) and max(answer.states) <= PartState.LOST
    except DeadlineExceeded:
        raise
    except (DecodeError, KvStoreError):
        return None
    finally:
        if not done:
            lane.close()
    return answer if done else None


def _plain(spec: NamespaceSpec, keys: Keys, values: Sequence[Entry]) -> list[memoryview] | None:
    """Returns the values as flat views, None if the call is not plain."""
    if spec.parts_per_block != 1 or not isinstance(keys, list) or not isinstance(values, list):
        return None
    if not 0 < len(keys) <= MOST_BLOCKS or len(values) != len(keys):
        return None
    first = len(keys[0]) if isinstance(keys[0], bytes) else 0
    if not MIN_KEY_BYTES <= first <= MAX_KEY_BYTES:
        return None
    views = []
    for key, value in zip(keys, values, strict=True):
        view = _flat(value)
        if type(key) is not bytes or len(key) != first or view is None:
            return None
        if len(view) > spec.part_bytes or (spec.kind is Kind.KV and len(view) != spec.part_bytes):
            return None
        views.append(view)
    return views


def _flat(value: Entry) -> memoryview | None:
    if isinstance(value, (bytes, bytearray)):
        return memoryview(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1 and value.flags.c_contiguous:
        return value.data
    if not isinstance(value, memoryview) or value.format != "B" or value.ndim != 1 or not value.c_contiguous:
        return None
    return value
