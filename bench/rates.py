"""Keys a second: Match, and Acquire with Release, on one core, at ten thousand and a million stored blocks.

Two views of the same verbs. *Handler*: serialised request in, serialised answer out, in one process on one core: what
any door costs without its transport. *Server*: through gRPC, CPU seconds of the server process a key.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable

from bench.report import Row
from bench.rig import RawStore, Running, serving, spec
from kvstore.build import build_server
from kvstore.config import load_config
from kvstore.service.handlers import StoreHandlers
from kvstore.service.server import Server
from kvstore.service.shell import Call
from kvstore.tiers.memory import ArenaMemory
from kvstore_wire import inline
from kvstore_wire.limits import PROTOCOL_VERSION
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types

PART_BYTES = 4096
BATCH = 256
CALLS = 300
ROUNDS = 5
FEW, MANY = 10_000, 1_000_000
FILL_BLOCKS = 4000


def key(index: int) -> bytes:
    """A 32-byte key, spread like a digest."""
    return random.Random(index).randbytes(32)


def run() -> list[Row]:
    """Measures both views at both sizes."""
    handler = {count: asyncio.run(_handler_rates(count)) for count in (FEW, MANY)}
    with serving(_capacity(FEW)) as few, serving(_capacity(MANY)) as many:
        costs, grown = asyncio.run(_server_costs(few, many))
    rows = [Row("RSS beyond the arena, 1 M one-part blocks", grown / MANY, "bytes/block", at_most=400)]
    for i, (name, bound) in enumerate((("Match", 500_000), ("Acquire + Release", 250_000))):
        fast, slow = handler[FEW][i], handler[MANY][i]
        rows.append(Row(f"{name}, handler, 10 k blocks", fast, "keys/s", at_least=bound))
        rows.append(Row(f"{name}, handler, 1 M blocks", slow, "keys/s", at_least=bound))
        rows.append(Row(f"{name}, handler, cost a key 1 M over 10 k", fast / slow, "x", at_most=1.3))
        cheap, dear = costs[i]
        rows.append(Row(f"{name}, server CPU over gRPC, 10 k blocks", 1 / statistics.median(cheap), "keys/CPU s"))
        rows.append(Row(f"{name}, server CPU over gRPC, 1 M blocks", 1 / statistics.median(dear), "keys/CPU s"))
        ratio = statistics.median(d / c for c, d in zip(cheap, dear, strict=True))
        rows.append(Row(f"{name}, server CPU a key, 1 M over 10 k", ratio, "x", at_most=1.3))
    return rows


def _capacity(count: int) -> str:
    return f"{(count + FILL_BLOCKS) * PART_BYTES}B"


# -- handlers in this process -------------------------------------------------------------------------------------


async def _handler_rates(count: int) -> tuple[float, float]:
    config = load_config(None, {}, {"hot.capacity": f"{(count + FILL_BLOCKS) * PART_BYTES}B", "lease.default": "5m"})
    memory = ArenaMemory(config.hot.capacity)
    server = build_server(config, memory)
    handlers = server.handlers
    session, handle = _attached(handlers)
    for first in range(0, count, FILL_BLOCKS):
        _store(server, session, handle, range(first, min(count, first + FILL_BLOCKS)))
    requests = [_keys(count, seed) for seed in range(CALLS)]
    match = [_match(session, handle, keys) for keys in requests]
    acquire = [_acquire(session, handle, keys) for keys in requests]

    def matches() -> None:
        for raw in match:
            answer = handlers.match(pb.MatchRequest.FromString(raw), Call())
            assert answer.prefix_blocks == BATCH
            answer.SerializeToString()

    def leases() -> None:
        for raw in acquire:
            _acquire_release(handlers, raw)

    rates = _rate(matches), _rate(leases)
    memory.close()
    return rates


def _acquire_release(handlers: StoreHandlers, raw: bytes) -> None:
    request = pb.AcquireRequest.FromString(raw)
    answers = handlers.acquire(request, Call())
    answer = _next(answers)
    assert answer is not None
    assert len(answer.offsets) == BATCH
    answer.SerializeToString()
    assert _next(answers) is None
    release = pb.ReleaseRequest(session=request.session, leases=[answer.lease]).SerializeToString()
    assert handlers.release(pb.ReleaseRequest.FromString(release), Call()).SerializeToString()


def _next(answers: AsyncIterator[pb.AcquireResponse]) -> pb.AcquireResponse | None:
    """Steps a generator that never suspends, since everything is in RAM; None at its end."""
    step = answers.__anext__().__await__()
    try:
        next(step)
    except StopIteration as stop:
        answer: pb.AcquireResponse = stop.value
        return answer
    except StopAsyncIteration:
        return None
    raise AssertionError("it suspended")


def _rate(act: Callable[[], None]) -> float:
    act()
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        act()
        times.append(time.process_time() - start)
    return CALLS * BATCH / statistics.median(times)


def _attached(handlers: StoreHandlers) -> tuple[bytes, int]:
    request = pb.AttachRequest(
        min_version=PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, namespace=spec(PART_BYTES).to_message()
    )
    answer = handlers.attach(request, Call())
    return answer.session, answer.namespace


def _store(server: Server, session: bytes, handle: int, indexes: range) -> None:
    """Reserves and commits blocks; their bytes do not matter here, so that nothing is copied."""
    chain = types.Chain(keys=[key(i) for i in indexes])
    handlers = server.handlers
    answer = handlers.reserve(pb.ReserveRequest(session=session, namespace=handle, chain=chain), Call())
    assert len(answer.offsets) == len(indexes)
    lease = handlers.write_lease(server.shell.session(session), answer.lease)
    lease.landed[:] = b"\x01" * len(lease.landed)
    request = pb.CommitRequest(session=session, lease=answer.lease, checksums=[0] * len(indexes))
    handlers.commit(request, Call())


# -- through gRPC ---------------------------------------------------------------------------------------------------


async def _server_costs(few: Running, many: Running) -> tuple[list[tuple[list[float], list[float]]], float]:
    """Returns, for both verbs, CPU seconds a key of both servers round by round, and the growth of the larger's
    private memory in bytes. The servers run side by side and are measured in turn: drift hits both alike."""
    loads = [_Load(few, FEW), _Load(many, MANY)]
    grown = [await load.fill() for load in loads]
    costs = []
    for verb in ("matches", "leases"):
        rounds = [[await load.cost(verb) for load in loads] for _ in range(ROUNDS + 1)][1:]
        costs.append(([r[0] for r in rounds], [r[1] for r in rounds]))
    for load in loads:
        await load.store.close()
    return costs, grown[1]


class _Load:
    """One server, its blocks, and the calls made to it."""

    def __init__(self, running: Running, count: int) -> None:
        self._running, self._count = running, count
        self.store = RawStore(running.target)
        self._requests = [_keys(count, seed) for seed in range(CALLS)]

    async def fill(self) -> float:
        """Stores the blocks; returns the bytes of private memory that they took."""
        await self.store.open(spec(PART_BYTES))
        await _put(self.store, range(FILL_BLOCKS))  # First, so that the transport's own buffers are there already.
        before = self._running.status_bytes("RssAnon")
        for first in range(FILL_BLOCKS, self._count, FILL_BLOCKS):
            await _put(self.store, range(first, min(self._count, first + FILL_BLOCKS)))
        grown = self._running.status_bytes("RssAnon") - before
        return grown * self._count / (self._count - FILL_BLOCKS)

    async def cost(self, verb: str) -> float:
        """CPU seconds of the server a key, over all requests once."""
        start = self._running.cpu_s()
        await (self._matches() if verb == "matches" else self._leases())
        return (self._running.cpu_s() - start) / (CALLS * BATCH)

    async def _matches(self) -> None:
        match = self.store.call("Match")
        for keys in self._requests:
            answer = await match(_match(self.store.session, self.store.namespace, keys))
            assert answer.prefix_blocks == BATCH

    async def _leases(self) -> None:
        acquire, release = self.store.call("Acquire"), self.store.call("Release")
        for keys in self._requests:
            call = acquire(_acquire(self.store.session, self.store.namespace, keys))
            answer = await call.read()
            assert len(answer.offsets) == BATCH
            await call.read()
            await release(pb.ReleaseRequest(session=self.store.session, leases=[answer.lease]))


async def _put(store: RawStore, indexes: range) -> None:
    part = bytes(PART_BYTES)
    chain = types.Chain(keys=[key(i) for i in indexes])

    async def messages() -> AsyncIterator[pb.PutRequest | bytes]:
        yield pb.PutRequest(header=pb.PutHeader(session=store.session, namespace=store.namespace, chain=chain))
        for at in range(0, len(indexes), BATCH):
            pieces = [part] * min(BATCH, len(indexes) - at)
            yield inline.encode_data(pieces, len(pieces) * PART_BYTES)
        yield pb.PutRequest(trailer=pb.PutTrailer(checksums=[0] * len(indexes)))

    answer = await store.call("Put")(messages())
    assert set(answer.states) == {types.PART_STATE_COMMITTED}


def _keys(count: int, seed: int) -> list[bytes]:
    """A chain of keys that were stored together, as a prompt's are."""
    first = random.Random(seed).randrange(count - BATCH)
    return [key(i) for i in range(first, first + BATCH)]


def _match(session: bytes, handle: int, keys: list[bytes]) -> bytes:
    return pb.MatchRequest(session=session, namespace=handle, chain=types.Chain(keys=keys)).SerializeToString()


def _acquire(session: bytes, handle: int, keys: list[bytes]) -> bytes:
    return pb.AcquireRequest(session=session, namespace=handle, chain=types.Chain(keys=keys)).SerializeToString()
