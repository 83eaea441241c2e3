"""Does a small call wait behind large ones? A health ping every millisecond beside 1 GiB of Gets."""

from __future__ import annotations

import asyncio
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.report import Row
from bench.rig import MIB, percentile, serving
from bench.transfer import load_parts

PART_BYTES = 64 * MIB
PARTS = 4
GETS = 4  # 4 x 4 x 64 MiB = 1 GiB.
INTERVAL_S = 0.001


def run() -> list[Row]:
    """Measures pings alone and beside the Gets; the pinging process is not the reading one."""
    with serving("1GiB") as running:
        asyncio.run(load_parts(running.target, PART_BYTES, PARTS))
        quiet = asyncio.run(_pings(running.target, 1.0, None))
        busy = asyncio.run(_beside_gets(running.target))
    return [
        Row("health ping p50, idle", percentile(quiet, 0.5), "ms"),
        Row("health ping p99, idle", percentile(quiet, 0.99), "ms"),
        Row("health ping p50, beside 1 GiB of Gets of 64 MiB parts", percentile(busy, 0.5), "ms"),
        Row("health ping p99, beside 1 GiB of Gets of 64 MiB parts", percentile(busy, 0.99), "ms", at_most=20),
    ]


async def _beside_gets(target: str) -> list[float]:
    command = ["-m", "bench.transfer", target, str(PART_BYTES), str(PARTS), str(GETS)]
    reader = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert reader.stdout is not None
    assert await reader.stdout.readline() == b"reading\n"
    times = await _pings(target, None, reader)
    assert await reader.wait() == 0
    return times


async def _pings(target: str, seconds: float | None, beside: asyncio.subprocess.Process | None) -> list[float]:
    """Latencies in ms of pings sent on a fixed beat, whether the one before was answered or not."""
    times: list[float] = []
    async with grpc.aio.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest()
        await check(request)

        async def ping() -> None:
            start = time.perf_counter()
            await check(request)
            times.append((time.perf_counter() - start) * 1e3)

        tasks: set[asyncio.Task[None]] = set()
        end = None if seconds is None else time.perf_counter() + seconds
        while (end is None or time.perf_counter() < end) and (beside is None or beside.returncode is None):
            task = asyncio.create_task(ping())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(INTERVAL_S)
        await asyncio.gather(*tasks)
    return times
