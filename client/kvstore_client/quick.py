"""Small reads from a thread by the shortest way: whole blocks of one part, few and small, into the caller's buffers.

The answer is the one that `GetCall` gives; whatever is not plain - another shape, no connection, a wrong argument, an
answer that does not fit - is left to it by returning None, before or instead of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from kvstore_client.buffers import Entry
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore, run_now
from kvstore_client.errors import MalformedAnswer
from kvstore_client.leases import HOT
from kvstore_client.options import Verify
from kvstore_client.question import Keys
from kvstore_client.results import GetResult, leading
from kvstore_client.transports.framed import FramedTransport
from kvstore_wire.errors import DeadlineExceeded, KvStoreError
from kvstore_wire.frames import Verb
from kvstore_wire.limits import MAX_KEY_BYTES, MIN_KEY_BYTES
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

MOST_BLOCKS = 16
MOST_BYTES = 256 << 10  # Through the socket even on the shard's own host.


def quick_get(
    core: DirectCore, spec: NamespaceSpec, keys: Keys, *, into: Sequence[Entry], coverage: Coverage, deadline: Deadline
) -> GetResult | None:
    """Returns what a get brought, None where the long way must be gone; then nothing was counted."""
    views = _plain(core, spec, keys, into)
    binding = core.keeper.ready(spec)
    if views is None or binding is None or core.closed:
        return None
    path = core.paths.best(binding)
    transport = None if path is None else core.transport(binding)
    if not isinstance(transport, FramedTransport) or not core.try_enter():
        return None
    request = store.GetRequest(
        session=binding.session,
        namespace=binding.namespace,
        chain=types.Chain(keys=keys),  # type: ignore[arg-type]
        coverage=int(coverage),  # type: ignore[arg-type]
    )
    taker = _Taker(views, spec.part_bytes)
    try:
        run_now(transport.lanes.exchange(Verb.GET, request.SerializeToString(), taker=taker, deadline=deadline))
        states = taker.checked()
    except DeadlineExceeded as error:
        core.stats.calls["get"] += 1
        core.stats.fetched_blocks_asked += len(views)
        core.stats.failed(error)
        return GetResult.failed(len(views), 1, error)
    except KvStoreError:
        return None
    finally:
        core.leave()
    return None if states is None else _result(core, states, spec.part_bytes)


def _plain(core: DirectCore, spec: NamespaceSpec, keys: Keys, into: Sequence[Entry]) -> list[memoryview] | None:
    """Returns the callers' buffers as flat views, None if the call is not plain."""
    if spec.parts_per_block != 1 or spec.kind is not Kind.KV or core.options.verify is not Verify.ON:
        return None
    if not isinstance(keys, list) or not isinstance(into, list) or not 0 < len(keys) <= MOST_BLOCKS:
        return None
    size = spec.part_bytes
    if len(into) != len(keys) or size * len(keys) > MOST_BYTES or not size:
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


class _Taker:
    """Takes an answer whose every part has the same size. Anything unexpected makes it unfit, not wrong."""

    def __init__(self, views: list[memoryview], size: int) -> None:
        self._views, self._size = views, size
        self._header: store.GetHeader | None = None
        self._hits: list[int] = []
        self._at = self._done = 0

    def message(self, raw: bytes) -> None:
        answer = store.GetResponse()
        try:
            answer.ParseFromString(raw)
        except DecodeError:
            raise MalformedAnswer("is not a GetResponse") from None
        header = answer.header
        if self._header is not None or len(header.states) != len(self._views):
            raise MalformedAnswer("not one header came, or not of this call")
        self._header = header
        self._hits = [i for i, state in enumerate(header.states) if state == BlockState.HOT]
        if list(header.lengths) != [self._size] * len(self._hits):
            raise MalformedAnswer("a part has another length")

    def late(self, raw: bytes) -> None:
        return

    def room(self, most: int) -> memoryview:
        if self._at == len(self._hits):
            raise MalformedAnswer("more bytes came than were announced")
        view = self._views[self._hits[self._at]]
        return view[self._done : self._done + most]

    def landed(self, size: int) -> None:
        self._done += size
        if self._done == self._size:
            self._at, self._done = self._at + 1, 0

    def checked(self) -> bytes | None:
        """Returns the states where all that was announced landed as it was written."""
        header = self._header
        if header is None or self._at < len(self._hits) or len(header.checksums) != len(self._hits):
            return None
        for i, told in zip(self._hits, header.checksums, strict=True):
            if xxh3_64_intdigest(self._views[i]) != told:
                return None
        states = header.states
        return states if max(states) <= BlockState.BEYOND and BlockState.BUSY not in states else None


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
