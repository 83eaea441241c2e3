"""What every benchmark needs: a server in its own process, raw calls to it, warm buffers, medians."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore_wire.limits import PROTOCOL_VERSION
from kvstore_wire.methods import STORE_METHODS, Method
from kvstore_wire.namespace import Geometry, NamespaceSpec
from kvstore_wire.v1 import block_store_pb2 as pb

MIB = 1 << 20
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@dataclass(frozen=True)
class Running:
    """A server process: its doors, its pid."""

    target: str
    admin: str
    pid: int

    def status_bytes(self, name: str) -> int:
        """One line of /proc/PID/status, in bytes (RssAnon, VmLck, ...)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise LookupError(name)

    def cpu_s(self) -> float:
        """CPU seconds that the process's threads have used."""
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's living threads, to the nanosecond (/proc/PID/stat counts in 10 ms)."""
    runs = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(run.read_text().split()[0]) for run in runs) / 1e9


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keeps this process, and those that it starts meanwhile, on the first `count` of its cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def serving(capacity: str, *flags: str) -> Iterator[Running]:
    """Runs `kvstore serve` with a prefaulted arena on free ports; stops it at the end."""
    command = [sys.executable, "-m", "kvstore", "serve", "--server.listen", "127.0.0.1:0"]
    command += [
        "--bulk.listen",
        "127.0.0.1:0",
        "--server.admin_listen",
        "127.0.0.1:0",
        "--server.log_level",
        "error",
        "--hot.capacity",
        capacity,
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        target = admin = ""
        for line in process.stdout:
            if line.startswith("listening on "):
                target, admin = line.split()[2].rstrip(";,"), line.split()[-1]
            if "prefaulted 100 %" in line or ("off" in flags and target):
                break
        yield Running(target, admin, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def spec(part_bytes: int) -> NamespaceSpec:
    """A namespace of one part a block."""
    geometry = Geometry(block_tokens=16, dtype="bfloat16", layers=1, kv_heads=1, head_dim=64)
    return NamespaceSpec(name="bench", model="bench", part_bytes=part_bytes, geometry=geometry)


class RawStore:
    """The contract's calls on a bare channel: no client library between the benchmark and the server."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self.session = b""
        self.namespace = 0
        self._pulse: Any = None

    async def open(self, namespace: NamespaceSpec) -> pb.AttachResponse:
        """Attaches and holds the session open."""
        request = pb.AttachRequest(
            min_version=PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, client="bench", namespace=namespace.to_message()
        )
        answer: pb.AttachResponse = await self.call("Attach")(request)
        self.session, self.namespace = answer.session, answer.namespace
        self._pulse = self.call("Session")()
        await self._pulse.write(pb.SessionPulse(session=self.session))
        await self._pulse.read()
        return answer

    async def close(self) -> None:
        self._pulse.cancel()
        await self.channel.close()

    def call(self, name: str) -> Any:
        """The callable of one method."""
        method: Method = STORE_METHODS[name]
        kind = ("stream" if method.requests else "unary") + "_" + ("stream" if method.responses else "unary")
        return getattr(self.channel, kind)(
            method.path,
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=method.response.FromString,
        )


def warm(size_bytes: int) -> memoryview:
    """A writable buffer whose pages are there."""
    buffer = np.empty(size_bytes, np.uint8)
    buffer.fill(1)
    return buffer.data


def seeded(size_bytes: int) -> memoryview:
    """The same bytes in every run."""
    return memoryview(np.random.default_rng(7).bytes(size_bytes))


def memcpy_gb_per_s(size_bytes: int = 256 * MIB, rounds: int = 5) -> float:
    """One thread, 2 MiB blocks, warm to warm."""
    source, target = seeded(size_bytes), warm(size_bytes)

    def copy() -> None:
        for at in range(0, size_bytes, 2 * MIB):
            target[at : at + 2 * MIB] = source[at : at + 2 * MIB]

    return size_bytes / median_s(copy, rounds) / 1e9


def median_s(act: Callable[[], object], rounds: int) -> float:
    """Median seconds of `rounds` runs after one warm-up."""
    act()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def timed(act: Callable[[], Awaitable[object]]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    await act()
    return time.perf_counter() - start


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
