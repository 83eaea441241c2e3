"""Does a small call wait behind large ones? A health ping every millisecond beside 1 GiB of Gets.

Pings go one at a time, a millisecond apart: on two cores three busy processes leave no room for a backlog of pings,
which would only measure itself. The longest single wait is shown too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.report import Row
from bench.rig import MIB, percentile, serving
from bench.transfer import load_parts

PART_BYTES = 64 * MIB
PARTS = 4
GETS = 4  # 4 x 4 x 64 MiB = 1 GiB.
INTERVAL_S = 0.001
QUIET_S = 1.0


def run() -> list[Row]:
    """Measures pings alone and beside the Gets; the pinging process is not the reading one."""
    with serving("1GiB") as running:
        return asyncio.run(_run(running.target))


async def _run(target: str) -> list[Row]:
    await load_parts(target, PART_BYTES, PARTS)
    end = time.perf_counter() + QUIET_S
    quiet = await _pings(target, lambda: time.perf_counter() < end)
    command = ["-m", "bench.transfer", target, str(PART_BYTES), str(PARTS), str(GETS)]
    reader = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert reader.stdout is not None
    assert await reader.stdout.readline() == b"reading\n"
    start = time.perf_counter()
    busy = await _pings(target, lambda: reader.returncode is None)
    assert await reader.wait() == 0
    moved = PART_BYTES * PARTS * GETS / (time.perf_counter() - start) / 1e9
    return [
        Row("health ping p50, idle", percentile(quiet, 0.5), "ms"),
        Row("health ping p99, idle", percentile(quiet, 0.99), "ms"),
        Row("Gets of 64 MiB parts beside the pings", moved, "GB/s"),
        Row("health ping p50, beside the Gets", percentile(busy, 0.5), "ms"),
        Row("health ping p99, beside the Gets", percentile(busy, 0.99), "ms", at_most=20),
        Row("health ping, longest, beside the Gets", max(busy), "ms"),
    ]


async def _pings(target: str, wanted: Callable[[], bool]) -> list[float]:
    """Latencies in ms of one ping after another for as long as they are wanted."""
    times: list[float] = []
    async with grpc.aio.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest()
        await check(request)
        while wanted():
            start = time.perf_counter()
            await check(request)
            times.append((time.perf_counter() - start) * 1e3)
            await asyncio.sleep(INTERVAL_S)
    return times
