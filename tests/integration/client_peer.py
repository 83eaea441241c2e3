"""A small shard in this process that can be told to misbehave: the client's fault-injecting peer.

It keeps blocks in a dict, speaks the whole contract that clients use, and runs on gRPC's threads, so that it serves
tests of the asynchronous client and of the blocking one alike.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import grpc
from xxhash import xxh3_64_intdigest

from kvstore_wire import errors
from kvstore_wire.methods import BLOCK_STORE, ERROR_METADATA, STORE_METHODS
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

MISSING, HOT, BEYOND = types.BLOCK_STATE_MISSING, types.BLOCK_STATE_HOT, types.BLOCK_STATE_BEYOND
CREATED, PRESENT, COMMITTED = types.PART_STATE_CREATED, types.PART_STATE_PRESENT, types.PART_STATE_COMMITTED
STALL_S = 30.0

LIMITS = types.Limits(
    max_match_blocks=1024,
    max_blocks=256,
    max_parts_per_block=64,
    max_part_bytes=64 << 20,
    max_call_bytes=128 << 20,
    max_wait_ms=10_000,
    default_lease_ms=10_000,
    max_lease_ms=60_000,
    max_message_bytes=4 << 20,
    chunk_bytes=256 << 10,
    session_open_ms=5000,
)

Part = tuple[bytes, int]  # Namespace digest and key.


@dataclass
class Faults:
    """What goes wrong. `stall`: methods that never answer. `errors`: methods that fail, once each. `answers`: changes
    an answer before it is sent. `corrupt`: keys whose bytes are damaged on the way. `cut_after`: payload bytes of a
    Get after which the stream ends. `refuse`: PartState of every new part.
    """

    stall: set[str] = field(default_factory=set)
    errors: dict[str, list[errors.KvStoreError]] = field(default_factory=dict)
    answers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    corrupt: set[bytes] = field(default_factory=set)
    cut_after: int | None = None
    refuse: int | None = None


@dataclass(eq=False)
class _Session:
    specs: dict[int, NamespaceSpec] = field(default_factory=dict)
    notices: SimpleQueue[store.SessionNotice | None] = field(default_factory=SimpleQueue)


@dataclass(eq=False)
class _WriteLease:
    spec: NamespaceSpec
    slots: list[tuple[bytes, int, int]]  # Key, part, bytes.


class FaultyPeer:
    """A shard for tests. `start` and `stop` may alternate; each start is another generation on the same address."""

    def __init__(self, limits: types.Limits = LIMITS, features: tuple[str, ...] = ("hints",)) -> None:
        self.limits, self.features = limits, features
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.requests: list[Any] = []
        self.blocks: dict[tuple[bytes, bytes], list[bytes | None]] = {}
        self.received_bytes = 0
        self.generation = 100
        self.target = ""
        self._ids = itertools.count(1)
        self._sessions: dict[bytes, _Session] = {}
        self._reads: dict[int, list[bytes]] = {}
        self._writes: dict[int, _WriteLease] = {}
        self._released = threading.Event()
        self._lock = threading.RLock()
        self._server: Any = None

    def start(self) -> FaultyPeer:
        self.generation += 1
        self._released = threading.Event()
        self._sessions, self._reads, self._writes = {}, {}, {}
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=48), options=[("grpc.max_receive_message_length", 64 << 20)]
        )
        handlers = {name: self._handler(name) for name in STORE_METHODS}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BLOCK_STORE, handlers),))
        port = self._server.add_insecure_port(self.target or "127.0.0.1:0")
        assert port, "the address could not be bound"
        self.target = f"127.0.0.1:{port}"
        self._server.start()
        return self

    def stop(self) -> None:
        self._released.set()
        for session in list(self._sessions.values()):
            session.notices.put(None)
        self._server.stop(0).wait(5)

    def notify(self, notice: store.SessionNotice) -> None:
        """Sends a notice to every session."""
        for session in list(self._sessions.values()):
            session.notices.put(notice)

    def drop_sessions(self) -> None:
        """Ends every session and its stream, as a shard does that has lost patience."""
        for session in list(self._sessions.values()):
            session.notices.put(None)
        self._sessions.clear()

    def forget_sessions(self) -> None:
        """Forgets every session but leaves their streams open."""
        self._sessions.clear()

    def seed(self, spec: NamespaceSpec, key: bytes, *parts: bytes) -> None:
        """Stores a block."""
        self.blocks[spec.digest, key] = list(parts)

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    # -- plumbing ------------------------------------------------------------------------------------------------

    def _handler(self, name: str) -> Any:
        method = STORE_METHODS[name]
        act = getattr(self, f"_{name.lower()}")

        def one(request: Any, context: Any) -> Any:
            self._before(name, request, context)
            with self._lock:
                answer = self._guarded(act, request, context)
            change = self.faults.answers.get(name)
            return change(answer) if change else answer

        def stream(request: Any, context: Any) -> Iterator[Any]:
            self._before(name, request, context)
            change = self.faults.answers.get(name)
            for answer in self._guarded(act, request, context):
                yield change(answer) if change else answer

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.requests, method.responses]
        return make(
            stream if method.responses else one,
            request_deserializer=method.request.FromString,
            response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        )

    def _before(self, name: str, request: Any, context: Any) -> None:
        self.calls[name] += 1
        if not STORE_METHODS[name].requests:
            self.requests.append(request)
        if name in self.faults.stall:
            self._released.wait(STALL_S)
        queued = self.faults.errors.get(name)
        if queued:
            _abort(context, queued.pop(0))

    def _guarded(self, act: Any, request: Any, context: Any) -> Any:
        try:
            return act(request, context)
        except errors.KvStoreError as error:
            _abort(context, error)

    def _spec(self, session: bytes, namespace: int) -> NamespaceSpec:
        known = self._sessions.get(session)
        if known is None:
            raise errors.UnknownSession("no such session")
        if namespace not in known.specs:
            raise errors.UnknownNamespace("no such namespace")
        return known.specs[namespace]

    # -- verbs ---------------------------------------------------------------------------------------------------

    def _attach(self, request: Any, context: Any) -> store.AttachResponse:
        spec = NamespaceSpec.from_message(request.namespace)
        token = request.session or os.urandom(16)
        if request.session and token not in self._sessions:
            raise errors.UnknownSession("no such session")
        session = self._sessions.setdefault(token, _Session())
        handle = next(self._ids)
        session.specs[handle] = spec
        return store.AttachResponse(
            version=1,
            session=token,
            generation=self.generation,
            namespace=handle,
            digest=spec.digest,
            limits=self.limits,
            transports=[store.Transport(name="grpc")],
            features=self.features,
            shard="peer",
        )

    def _session(self, pulses: Iterator[store.SessionPulse], context: Any) -> Iterator[store.SessionNotice]:
        session = self._sessions.get(next(pulses).session)
        if session is None:
            return
        yield store.SessionNotice(opened=store.SessionNotice.Opened())
        while context.is_active() and not self._released.is_set():
            try:
                notice = session.notices.get(timeout=0.1)
            except Empty:
                continue
            if notice is None:
                return
            yield notice

    def _held(self, spec: NamespaceSpec, key: bytes, chosen: list[int]) -> list[bytes] | None:
        parts = self.blocks.get((spec.digest, key), [])
        wanted = [parts[i] for i in chosen if i < len(parts)]
        return [p for p in wanted if p is not None] if len(wanted) == len(chosen) and None not in wanted else None

    def _look(self, request: Any) -> tuple[bytes, list[bytes], list[bytes]]:
        """Returns states, and for each part there its bytes and its key."""
        spec = self._spec(request.session, request.namespace)
        chosen = list(request.parts.parts) or list(range(spec.parts_per_block))
        states, found, keys, ended = bytearray(), [], [], False
        for key in request.chain.keys:
            held = None if ended else self._held(spec, key, chosen)
            states.append(BEYOND if ended else MISSING if held is None else HOT)
            ended = ended or (held is None and request.coverage == types.COVERAGE_PREFIX)
            found += held or []
            keys += [key] * len(held or [])
        return bytes(states), found, keys

    def _match(self, request: Any, context: Any) -> store.MatchResponse:
        states, _, _ = self._look(request)
        return store.MatchResponse(prefix_blocks=len(states) - len(states.lstrip(bytes((HOT,)))), states=states)

    def _acquire(self, request: Any, context: Any) -> Iterator[store.AcquireResponse]:
        states, found, _ = self._look(request)
        lease = types.Lease(id=next(self._ids), generation=self.generation, ttl_ms=10_000)
        self._reads[lease.id] = found
        half = len(states) // 2
        parts = len(found) // max(1, states.count(HOT))
        first = states[:half].count(HOT) * parts
        yield _granted(lease if first else None, 0, states[:half], found[:first], settled=False)
        yield _granted(lease if found else None, half, states[half:], found[first:], settled=True)

    def _renew(self, request: Any, context: Any) -> store.RenewResponse:
        return store.RenewResponse(valid=[x.id in self._reads or x.id in self._writes for x in request.leases])

    def _release(self, request: Any, context: Any) -> store.ReleaseResponse:
        if request.session not in self._sessions:
            raise errors.UnknownSession("no such session")
        return store.ReleaseResponse(valid=[self._reads.pop(x.id, None) is not None for x in request.leases])

    def _reserve(self, request: Any, context: Any) -> store.ReserveResponse:
        spec = self._spec(request.session, request.namespace)
        chosen = list(request.parts.parts) or list(range(spec.parts_per_block))
        sizes = list(request.lengths) or [spec.part_bytes] * len(request.chain.keys)
        states, slots = bytearray(), []
        for key, size in zip(request.chain.keys, sizes, strict=True):
            for part in chosen:
                there = self._held(spec, key, [part]) is not None
                fate = CREATED if self.faults.refuse is None else self.faults.refuse
                states.append(PRESENT if there else fate)
                if states[-1] == CREATED:
                    slots.append((key, part, size))
        if not slots:
            return store.ReserveResponse(states=bytes(states), retry_after_ms=7 if self.faults.refuse else 0)
        lease = types.Lease(id=next(self._ids), generation=self.generation, ttl_ms=10_000)
        self._writes[lease.id] = _WriteLease(spec, slots)
        return store.ReserveResponse(lease=lease, states=bytes(states), offsets=range(len(slots)))

    def _commit(self, request: Any, context: Any) -> store.CommitResponse:
        if request.lease.id not in self._writes:
            raise errors.LeaseExpired("no such lease")
        return store.CommitResponse(states=bytes((types.PART_STATE_UNFILLED,)) * len(request.checksums))

    def _abort(self, request: Any, context: Any) -> store.AbortResponse:
        return store.AbortResponse(valid=[self._writes.pop(x.id, None) is not None for x in request.leases])

    def _get(self, request: Any, context: Any) -> Iterator[bytes]:
        if request.WhichOneof("target") == "lease":
            if request.lease.id not in self._reads:
                raise errors.LeaseExpired("no such lease")
            states, found, keys = b"", self._reads[request.lease.id], list[bytes]()
        else:
            states, found, keys = self._look(request)
        return self._payload(states, found, keys)

    def _payload(self, states: bytes, found: list[bytes], keys: list[bytes]) -> Iterator[bytes]:
        header = store.GetHeader(
            states=states, lengths=[len(p) for p in found], checksums=[xxh3_64_intdigest(p) for p in found]
        )
        yield store.GetResponse(header=header).SerializeToString()
        sent = [_flipped(p) if k in self.faults.corrupt else p for p, k in zip(found, keys or found, strict=True)]
        data = b"".join(sent)[: self.faults.cut_after]
        for at in range(0, len(data), self.limits.chunk_bytes):
            yield store.GetResponse(data=data[at : at + self.limits.chunk_bytes]).SerializeToString()

    def _put(self, messages: Iterator[store.PutRequest], context: Any) -> store.PutResponse:
        header = next(messages).header
        self.requests.append(header)
        leased = header.WhichOneof("target") == "lease"
        states, write = self._planned(header, leased=leased)
        data, sums = bytearray(), None
        for message in messages:
            if message.WhichOneof("body") == "data":
                data += message.data
            else:
                sums = list(message.trailer.checksums)
        self.received_bytes += len(data)
        if sums is None:
            raise errors.InvalidArgument("no trailer", field="checksums")
        return store.PutResponse(states=self._store(write, bytes(data), sums, states))

    def _planned(self, header: store.PutHeader, *, leased: bool) -> tuple[bytearray | None, _WriteLease]:
        if leased:
            write = self._writes.pop(header.lease.id, None)
            if write is None:
                raise errors.LeaseExpired("no such lease")
            return None, write
        spec = self._spec(header.session, header.namespace)
        chosen = list(header.parts.parts) or list(range(spec.parts_per_block))
        sizes = list(header.lengths) if spec.kind is Kind.OPAQUE else [spec.part_bytes] * len(header.chain.keys)
        slots = [(k, p, s) for k, s in zip(header.chain.keys, sizes, strict=True) for p in chosen]
        return bytearray(len(slots)), _WriteLease(spec, slots)

    def _store(self, write: _WriteLease, data: bytes, sums: list[int], states: bytearray | None) -> bytes:
        at, out = 0, bytearray()
        if len(data) != sum(size for _, _, size in write.slots) or len(sums) != len(write.slots):
            raise errors.InvalidArgument("wrong number of bytes", field="data")
        for (key, part, size), checksum in zip(write.slots, sums, strict=True):
            value = data[at : at + size]
            at += size
            assert xxh3_64_intdigest(value) == checksum, "the client's checksum is wrong"
            parts = self.blocks.setdefault((write.spec.digest, key), [None] * write.spec.parts_per_block)
            if self.faults.refuse is not None:
                out.append(self.faults.refuse)
            else:
                out.append(COMMITTED if parts[part] is None else PRESENT)
                parts[part] = value
        return bytes(out)

    def _delete(self, request: Any, context: Any) -> store.DeleteResponse:
        spec = self._spec(request.session, request.namespace)
        gone = [self.blocks.pop((spec.digest, key), None) is not None for key in request.keys]
        return store.DeleteResponse(states=bytes(gone))

    def _over(self, request: Any, context: Any) -> store.OverResponse:
        self._spec(request.session, request.namespace)
        return store.OverResponse(blocks=len(request.chain.keys))

    def _explain(self, request: Any, context: Any) -> store.ExplainResponse:
        spec = self._spec(request.session, request.namespace)
        blocks = [store.ExplainedBlock(key=k, parts_total=spec.parts_per_block) for k in request.chain.keys]
        fields = [types.Fact(name=n, value=v) for n, v, _ in spec.canonical_fields()]
        return store.ExplainResponse(fields=fields, digest=spec.digest, blocks=blocks, first_missing=0)


def _granted(
    lease: types.Lease | None, first: int, states: bytes, parts: list[bytes], *, settled: bool
) -> store.AcquireResponse:
    return store.AcquireResponse(
        lease=lease,
        first=first,
        states=states,
        offsets=[4096 * i for i in range(len(parts))],
        lengths=[len(p) for p in parts],
        checksums=[xxh3_64_intdigest(p) for p in parts],
        settled=settled,
    )


def _flipped(value: bytes) -> bytes:
    return bytes((value[0] ^ 1,)) + value[1:] if value else value


def _abort(context: Any, error: errors.KvStoreError) -> None:
    context.set_trailing_metadata(((ERROR_METADATA, error.to_detail().SerializeToString()),))
    context.abort(grpc.StatusCode[error.status], str(error))
