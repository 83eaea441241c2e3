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
    rows: list[Row] = []
    handler = {count: asyncio.run(_handler_rates(count)) for count in (FEW, MANY)}
    server: dict[int, tuple[float, float]] = {}
    for count in (FEW, MANY):
        with serving(f"{(count + FILL_BLOCKS) * PART_BYTES // 4096 * 4096}B") as running:
            server[count], rss = asyncio.run(_server_costs(running, count))
        if count == MANY:
            rows.append(Row("RSS beyond the arena, 1 M one-part blocks", rss / count, "bytes/block", at_most=400))
    for i, (name, bound) in enumerate((("Match", 500_000), ("Acquire + Release", 250_000))):
        few, many = handler[FEW][i], handler[MANY][i]
        rows.append(Row(f"{name}, handler, 10 k blocks", few, "keys/s", at_least=bound))
        rows.append(Row(f"{name}, handler, 1 M blocks", many, "keys/s", at_least=bound))
        rows.append(Row(f"{name}, handler, cost a key 1 M over 10 k", few / many, "x", at_most=1.3))
        cheap, dear = server[FEW][i], server[MANY][i]
        rows.append(Row(f"{name}, server CPU over gRPC, 10 k blocks", 1 / cheap, "keys/CPU s"))
        rows.append(Row(f"{name}, server CPU over gRPC, 1 M blocks", 1 / dear, "keys/CPU s"))
        rows.append(Row(f"{name}, server CPU a key, 1 M over 10 k", dear / cheap, "x", at_most=1.3))
    return rows


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


async def _server_costs(running: Running, count: int) -> tuple[tuple[float, float], float]:
    """Returns CPU seconds of the server a key for both verbs, and the growth of its private memory in bytes."""
    store = RawStore(running.target)
    await store.open(spec(PART_BYTES))
    await _put(store, range(FILL_BLOCKS))  # First, so that the transport's own buffers are there before we look.
    before = running.status_bytes("RssAnon")
    for first in range(FILL_BLOCKS, count, FILL_BLOCKS):
        await _put(store, range(first, min(count, first + FILL_BLOCKS)))
    grown = (running.status_bytes("RssAnon") - before) * count / (count - FILL_BLOCKS)
    requests = [_keys(count, seed) for seed in range(CALLS)]
    match, acquire, release = store.call("Match"), store.call("Acquire"), store.call("Release")

    async def matches() -> None:
        for keys in requests:
            answer = await match(_match(store.session, store.namespace, keys))
            assert answer.prefix_blocks == BATCH

    async def leases() -> None:
        for keys in requests:
            call = acquire(_acquire(store.session, store.namespace, keys))
            answer = await call.read()
            assert len(answer.offsets) == BATCH
            await call.read()
            await release(pb.ReleaseRequest(session=store.session, leases=[answer.lease]))

    costs = []
    for act in (matches, leases):
        await act()
        used = []
        for _ in range(ROUNDS):
            start = running.cpu_s()
            await act()
            used.append(running.cpu_s() - start)
        costs.append(statistics.median(used) / (CALLS * BATCH))
    await store.close()
    return (costs[0], costs[1]), grown


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
