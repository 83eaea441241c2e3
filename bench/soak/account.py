"""What a server has: by its own count, and by the kernel's."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

import grpc

from bench.rig import CHANNEL_OPTIONS, Running
from kvstore_client import AsyncClient, ClientOptions, Geometry, NamespaceSpec
from kvstore_wire.methods import ADMIN_METHODS
from kvstore_wire.v1 import admin_pb2 as admin

PROBE_SESSIONS = 1
CLEAN_S = 40.0  # Longer than any lease a client asks for.
# gRPC and the event loop's helpers start threads as they are needed and keep some of them.
SPARE_THREADS = 4
MEMORY_SLACK_BYTES = 32 << 20  # Allocators keep what they once needed; a leak grows with the calls and passes it soon.
_WARM = NamespaceSpec(
    name="warm",
    model="soak",
    part_bytes=1 << 20,
    geometry=Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=4, head_dim=64),
)


@dataclass(frozen=True)
class Account:
    """One look at a server."""

    counters: dict[str, int]
    gauges: dict[str, int]
    fds: int
    threads: int
    private_bytes: int


async def look(running: Running) -> Account:
    """Asks a server, and the kernel about it."""
    method = ADMIN_METHODS["GetStats"]
    async with grpc.aio.insecure_channel(running.admin, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary(method.path, response_deserializer=admin.Stats.FromString)
        answer = await call(b"")
        fds = len(os.listdir(f"/proc/{running.pid}/fd"))
        threads = len(os.listdir(f"/proc/{running.pid}/task"))
    return Account(
        {c.name: c.value for c in answer.counters},
        {g.name: g.value for g in answer.gauges},
        fds=fds,
        threads=threads,
        private_bytes=running.status_bytes("RssAnon"),
    )


async def warmed(running: Running) -> Account:
    """Lets one client of each kind come and go, and returns what is there then."""
    for transports in (("shm",), ("bulk",), ("grpc",)):
        async with AsyncClient(
            ClientOptions(running.target, default_deadline_ms=5000, transports=transports)
        ) as client:
            namespace = client.namespace(_WARM)
            await namespace.put([b"k" * 32], [bytes(1 << 20)])
            await namespace.get([b"k" * 32])
            await namespace.delete([b"k" * 32])
    return await settled(running, audits=0)


async def settled(running: Running, *, audits: int = 1) -> Account:
    """Waits until dead clients' leases are over, their connections closed, and the server has audited itself since."""
    end = time.monotonic() + CLEAN_S
    first = (await look(running)).counters["audits"]
    while True:
        account = await look(running)
        g = account.gauges
        used = ("leased_bytes", "reserved_bytes", "leases", "regions", "channel_connections")
        idle = not any(g[name] for name in used) and g["sessions"] == PROBE_SESSIONS
        if (idle and account.counters["audits"] >= first + audits) or time.monotonic() > end:
            return account
        await asyncio.sleep(0.5)


def faults(before: Account, after: Account) -> dict[str, int]:
    """What is not as it should be, each 0 where it is."""
    g = after.gauges
    return {
        "leased bytes left": g["leased_bytes"],
        "reserved bytes left": g["reserved_bytes"],
        "leases left": g["leases"],
        "sessions left": g["sessions"] - PROBE_SESSIONS,
        "acquires left waiting": g["waiting_acquires"],
        "regions left": g["regions"],
        "region bytes left": g["region_bytes"],
        "connections left": g["channel_connections"],
        "descriptors left": max(0, after.fds - before.fds),
        "threads left": max(0, after.threads - before.threads - SPARE_THREADS),
        "bytes missing from the account": g["capacity_bytes"] - g["free_bytes"] - g["evictable_bytes"],
        "audit faults": after.counters["audit_faults"],
        "audits missing": int(after.counters["audits"] == 0),
    }
