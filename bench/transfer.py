"""Inline Get and Put of 2 MiB parts through the client library, beside a bare grpc.aio stream of the same bytes.

As a program, it reads: `python -m bench.transfer TARGET PART_BYTES PARTS ROUNDS` (the load of bench.ping).
Both processes of both sides keep freed memory (kvstore_wire.malloc), so that the allocator is in neither figure.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from functools import partial

import uvloop

from bench.bare import BareClient, bare_server
from bench.report import Row
from bench.rig import MIB, memcpy_gb_per_s, seeded, serving, spec, timed, warm
from kvstore_client import AsyncClient, AsyncNamespace, ClientOptions
from kvstore_wire.malloc import keep_freed_memory

PART_BYTES = 2 * MIB
PARTS = 128
TOTAL = PART_BYTES * PARTS
ROUNDS = 25
CHUNKS = (512 << 10, MIB)
DEADLINE_MS = 60_000


def run() -> list[Row]:
    """Measures in turn, round by round, so that drift of the machine hits both sides alike."""
    keep_freed_memory()
    rows: list[Row] = uvloop.run(_run())
    return rows


async def _run() -> list[Row]:
    get, put = list[float](), list[float]()
    bare_get: dict[int, list[float]] = {c: [] for c in CHUNKS}
    bare_put: dict[int, list[float]] = {c: [] for c in CHUNKS}
    target, source = warm(TOTAL), seeded(TOTAL)
    with serving("1GiB") as running, bare_server(CHUNKS[0]) as first, bare_server(CHUNKS[1]) as second:
        bares = {c: BareClient(a, c) for c, a in zip(CHUNKS, (first, second), strict=True)}
        async with AsyncClient(_options(running.target)) as client:
            store = client.namespace(spec(PART_BYTES))
            for _ in range(ROUNDS):
                put.append(await _put(store, source))
                for chunk, bare in bares.items():
                    bare_put[chunk].append(await timed(partial(bare.put, TOTAL)))
                get.append(await timed(partial(_get, store, target)))
                for chunk, bare in bares.items():
                    bare_get[chunk].append(await timed(partial(bare.get, target)))
            await _get(store, target)
            assert target == source, "the bytes differ"
            single = [await timed(partial(_get_one, store, target, i)) for i in range(PARTS)]
        for bare in bares.values():
            await bare.close()
    return [
        Row("memcpy, one thread", memcpy_gb_per_s(), "GB/s"),
        _beside(f"inline Get, {PARTS} x 2 MiB a call, verified", get, bare_get),
        _beside(f"inline Put, {PARTS} x 2 MiB a call", put, bare_put),
        Row("inline Get of one 2 MiB part, p50", statistics.median(single) * 1e3, "ms"),
    ]


def _options(target: str) -> ClientOptions:
    """Inline means gRPC, also where a faster way is offered."""
    return ClientOptions(target=target, default_deadline_ms=DEADLINE_MS, transports=("grpc",))


def _beside(name: str, ours: list[float], bare: dict[int, list[float]]) -> Row:
    """A figure beside the faster of the bare streams; the first round of each warms up."""
    best = min(bare.values(), key=lambda times: statistics.median(times[1:]))
    paired = statistics.median(b / o for o, b in zip(ours[1:], best[1:], strict=True))
    return Row(name, _rate(ours), "GB/s", _rate(best), "bare stream", at_least=0.8, paired=paired)


def _rate(times: list[float]) -> float:
    return TOTAL / statistics.median(times[1:]) / 1e9


def _keys(parts: int) -> list[bytes]:
    return [i.to_bytes(32, "little") for i in range(1, parts + 1)]


async def _put(store: AsyncNamespace, source: memoryview) -> float:
    """Seconds of one Put of all parts, none of them stored before."""
    await store.delete(_keys(PARTS))
    values = [source[i * PART_BYTES : (i + 1) * PART_BYTES] for i in range(PARTS)]

    async def put() -> None:
        result = await store.put(_keys(PARTS), values)
        assert result.failure is None, result.failure
        assert result.stored == PARTS, result

    return await timed(put)


async def _get(store: AsyncNamespace, target: memoryview) -> None:
    into = [target[i * PART_BYTES : (i + 1) * PART_BYTES] for i in range(PARTS)]
    result = await store.get(_keys(PARTS), into=into)
    assert result.prefix_blocks == PARTS, result


async def _get_one(store: AsyncNamespace, target: memoryview, index: int) -> None:
    result = await store.get([_keys(PARTS)[index]], into=[target[:PART_BYTES]])
    assert result.prefix_blocks == 1, result


async def load_parts(target: str, part_bytes: int, parts: int) -> None:
    """Stores parts for a reader."""
    async with AsyncClient(_options(target)) as client:
        store = client.namespace(spec(part_bytes))
        for key in _keys(parts):
            result = await store.put([key], [bytes(part_bytes)])
            assert result.stored == 1, result


async def _read(target: str, part_bytes: int, parts: int, *, rounds: int) -> None:
    into = [warm(part_bytes) for _ in range(parts)]
    async with AsyncClient(_options(target)) as client:
        store = client.namespace(spec(part_bytes))
        print("reading", flush=True)
        for _ in range(rounds):
            result = await store.get(_keys(parts), into=into)
            assert result.prefix_blocks == parts, result


if __name__ == "__main__":
    keep_freed_memory()
    asyncio.run(_read(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), rounds=int(sys.argv[4])))
