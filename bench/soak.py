"""Random clients, kills, stalls and cancellations under memory pressure: `python -m bench.soak [--seconds 600]`.

A real server with a small arena; client processes that match, get, put, acquire, stall past their leases, cancel, and
delete, in three namespaces (one part a block, four parts a block, values of any size); a tormentor that kills, stops
and resumes them. Every byte read is checked against its key. At the end every client is gone and the account must be
as at the start: nothing leased or reserved, no session but the probe's, every arena byte free or evictable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import grpc

from bench.rig import CHANNEL_OPTIONS, Running, serving
from kvstore.workload.payload import check_payload, fill_payload
from kvstore_client import AsyncClient, AsyncNamespace, Chains, ClientOptions, Coverage, Geometry, Kind, NamespaceSpec
from kvstore_wire.methods import ADMIN_METHODS
from kvstore_wire.v1 import admin_pb2 as admin

CLIENTS = 4
CAPACITY = "64MiB"
PROBE_SESSIONS = 1
CHAINS, CHAIN_BLOCKS = 8, 48
CLEAN_S = 40.0  # Longer than any lease a client asks for.


def specs() -> tuple[NamespaceSpec, ...]:
    """The namespaces every client uses."""
    one = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=4, head_dim=64)
    four = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=4, head_dim=64, layer_groups=2, head_shards=2)
    return (
        NamespaceSpec(name="one", model="soak", part_bytes=65_536, geometry=one),
        NamespaceSpec(name="four", model="soak", part_bytes=20_000, geometry=four),
        NamespaceSpec(name="any", model="soak", part_bytes=256 << 10, kind=Kind.OPAQUE, chains=Chains.NONE),
    )


def key(space: int, chain: int, block: int) -> bytes:
    """A block's key; its bytes follow from it."""
    return random.Random(f"{space}/{chain}/{block}").randbytes(32)


def size(space: int, spec: NamespaceSpec, key_: bytes) -> int:
    """Bytes of a part: fixed, or drawn from the key."""
    return int.from_bytes(key_[:4], "little") % spec.part_bytes if spec.kind is Kind.OPAQUE else spec.part_bytes


# -- one client process ---------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What one client saw."""

    calls: int = 0
    read_parts: int = 0
    wrong: int = 0
    corrupt: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def note(self, failure: Exception | None) -> None:
        if failure is not None:
            name = type(failure).__name__
            self.failures[name] = self.failures.get(name, 0) + 1


class Actor:
    """Does one random thing after another."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self._random = random.Random(seed)
        self._client = client
        self._spaces = [(i, spec, client.namespace(spec)) for i, spec in enumerate(specs())]
        self.tally = Tally()

    async def act(self) -> None:
        """One call, cancelled at a random moment now and then."""
        self.tally.calls += 1
        space, spec, namespace = self._random.choice(self._spaces)
        chain, first = self._random.randrange(CHAINS), 0 if spec.kind is Kind.KV else self._random.randrange(40)
        count = self._random.randrange(1, CHAIN_BLOCKS if spec.kind is Kind.KV else 8)
        keys = [key(space, chain, b) for b in range(first, first + count)]
        doing = self._random.choices(
            (self._put, self._get, self._hold, self._match, self._delete, self._abandon), (6, 8, 3, 4, 1, 2)
        )[0]
        task = asyncio.ensure_future(doing(space, spec, namespace, keys))
        if self._random.random() < 0.15:
            await asyncio.sleep(self._random.random() * 0.02)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _put(self, space: int, spec: NamespaceSpec, namespace: AsyncNamespace, keys: list[bytes]) -> None:
        result = await namespace.put(keys, self._values(space, spec, keys))
        self.tally.note(result.failure)

    async def _get(self, space: int, spec: NamespaceSpec, namespace: AsyncNamespace, keys: list[bytes]) -> None:
        coverage = Coverage.PREFIX if spec.kind is Kind.KV else Coverage.EACH
        result = await namespace.get(keys, coverage=coverage, wait_ms=self._random.choice((0, 0, 50)))
        self.tally.note(result.failure)
        self.tally.corrupt += result.corrupt_blocks
        parts = spec.parts_per_block
        for i, value in enumerate(result.values or ()):
            if value is not None:
                self._check(space, spec, keys[i // parts], i % parts, value)

    async def _hold(self, space: int, spec: NamespaceSpec, namespace: AsyncNamespace, keys: list[bytes]) -> None:
        lease = await namespace.acquire(keys, lease_ms=self._random.choice((50, 500)))
        self.tally.note(lease.failure)
        await asyncio.sleep(self._random.random() * 0.1)
        if self._random.random() < 0.7:
            await lease.release()

    async def _match(self, space: int, spec: NamespaceSpec, namespace: AsyncNamespace, keys: list[bytes]) -> None:
        self.tally.note((await namespace.match(keys)).failure)

    async def _delete(self, space: int, spec: NamespaceSpec, namespace: AsyncNamespace, keys: list[bytes]) -> None:
        self.tally.note((await namespace.delete(keys[:3])).failure)

    async def _abandon(self, space: int, spec: NamespaceSpec, namespace: AsyncNamespace, keys: list[bytes]) -> None:
        """Reserves, waits, and then commits late, aborts, or forgets."""
        lengths = [size(space, spec, k) for k in keys] if spec.kind is Kind.OPAQUE else []
        lease = await namespace.reserve(keys, lengths=lengths, lease_ms=self._random.choice((50, 400)))
        self.tally.note(lease.failure)
        await asyncio.sleep(self._random.random() * 0.2)
        if self._random.random() < 0.5:
            await lease.abort()

    def _values(self, space: int, spec: NamespaceSpec, keys: list[bytes]) -> list[bytearray]:
        values = []
        for k in keys:
            for part in range(spec.parts_per_block):
                value = bytearray(size(space, spec, k))
                if value:
                    fill_payload(k, part, memoryview(value))
                values.append(value)
        return values

    def _check(self, space: int, spec: NamespaceSpec, key_: bytes, part: int, value: memoryview) -> None:
        self.tally.read_parts += 1
        right = len(value) == size(space, spec, key_) and (not len(value) or check_payload(key_, part, value))
        self.tally.wrong += not right


async def client_main(target: str, seed: int) -> None:
    """Acts until killed; prints a tally every second."""
    options = ClientOptions(target=target, default_deadline_ms=2000)
    async with AsyncClient(options) as client:
        actor = Actor(client, seed)
        shown = time.monotonic()
        while True:
            await actor.act()
            if time.monotonic() - shown > 1:
                shown = time.monotonic()
                t = actor.tally
                failures = ",".join(f"{n}={c}" for n, c in sorted(t.failures.items())) or "-"
                print(t.calls, t.read_parts, t.wrong, t.corrupt, failures, flush=True)
                actor.tally = Tally()


# -- the tormentor --------------------------------------------------------------------------------------------------


class Crew:
    """Client processes, replaced as they are killed."""

    def __init__(self, target: str, seed: int) -> None:
        self._target, self._random = target, random.Random(seed)
        self._processes: list[subprocess.Popen[str]] = []
        self._outputs: list[asyncio.Task[None]] = []
        self.total = Tally()
        self.killed = self.stopped = self.died = 0

    def fill(self) -> None:
        while len(self._processes) < CLIENTS:
            command = [
                sys.executable,
                "-m",
                "bench.soak",
                "--client",
                self._target,
                str(self._random.randrange(1 << 30)),
            ]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # Its stderr is ours: loud.
            self._processes.append(process)
            self._outputs.append(asyncio.ensure_future(asyncio.to_thread(self._read, process)))

    async def torment(self) -> None:
        """Kills, stops or spares one client; starts another where one has gone."""
        await asyncio.sleep(self._random.random() * 3)
        for process in [p for p in self._processes if p.poll() is not None]:
            self.died += 1
            self._processes.remove(process)
        victim = self._random.choice(self._processes) if self._processes else None
        choice = self._random.random()
        if victim is not None and choice < 0.5:
            victim.kill()
            victim.wait()
            self._processes.remove(victim)
            self.killed += 1
        elif victim is not None and choice < 0.8:
            victim.send_signal(signal.SIGSTOP)
            self.stopped += 1
            await asyncio.sleep(self._random.random() * 3)
            victim.send_signal(signal.SIGCONT)
        self.fill()

    async def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        await asyncio.gather(*self._outputs)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            calls, parts, wrong, corrupt, failures = line.split()
            self.total.calls += int(calls)
            self.total.read_parts += int(parts)
            self.total.wrong += int(wrong)
            self.total.corrupt += int(corrupt)
            for item in failures.split(",") if failures != "-" else []:
                name, _, count = item.partition("=")
                self.total.failures[name] = self.total.failures.get(name, 0) + int(count)


async def stats(admin_target: str) -> tuple[dict[str, int], dict[str, int]]:
    """Returns (counters, gauges) of a server."""
    method = ADMIN_METHODS["GetStats"]
    async with grpc.aio.insecure_channel(admin_target, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary(method.path, response_deserializer=admin.Stats.FromString)
        answer = await call(b"")
    return {c.name: c.value for c in answer.counters}, {g.name: g.value for g in answer.gauges}


async def soak(running: Running, seconds: float, seed: int) -> int:
    """Torments clients for a while, then looks at what is left. Returns an exit code."""
    crew, start = Crew(running.target, seed), time.monotonic()
    crew.fill()
    shown = start
    while time.monotonic() - start < seconds:
        await crew.torment()
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            rss = running.status_bytes("RssAnon") >> 20
            print(
                f"{shown - start:5.0f} s  {crew.total.calls:,} calls  {crew.total.read_parts:,} parts read  "
                f"{crew.total.wrong} wrong  {crew.killed} killed  {crew.stopped} stopped  server {rss} MiB",
                flush=True,
            )
    await crew.end()
    return _verdict(crew, running, *await _settled(running))


async def _settled(running: Running) -> tuple[dict[str, int], dict[str, int]]:
    """Waits until the dead clients' leases are over and the idle server has recounted its arena since."""
    end = time.monotonic() + CLEAN_S
    first = (await stats(running.admin))[0]["audits"]
    while True:
        counters, gauges = await stats(running.admin)
        idle = gauges["leased_bytes"] == gauges["reserved_bytes"] == gauges["leases"] == 0
        if (idle and counters["audits"] > first) or time.monotonic() > end:
            return counters, gauges
        await asyncio.sleep(0.5)


def _verdict(crew: Crew, running: Running, counters: dict[str, int], gauges: dict[str, int]) -> int:
    spare = gauges["free_bytes"] + gauges["evictable_bytes"] - gauges["capacity_bytes"]
    faults = {
        "wrong bytes": crew.total.wrong,
        "corrupt parts": crew.total.corrupt,
        "clients that died by themselves": crew.died,
        "leased bytes left": gauges["leased_bytes"],
        "reserved bytes left": gauges["reserved_bytes"],
        "leases left": gauges["leases"],
        "sessions left": gauges["sessions"] - PROBE_SESSIONS,
        "acquires left waiting": gauges["waiting_acquires"],
        "bytes missing from the account": -spare,
        "audit faults": counters["audit_faults"],
        "audits missing": int(counters["audits"] == 0),
        "internal errors": crew.total.failures.get("Internal", 0),
    }
    evicted = sum(v for n, v in counters.items() if n.startswith("evicted_"))
    print(
        f"{crew.total.calls:,} calls, {crew.total.read_parts:,} parts read, {evicted:,} blocks evicted, "
        f"{counters['lost_parts']:,} parts lost, {counters['abandoned_parts']:,} abandoned, "
        f"{counters['read_leases_expired'] + counters['write_leases_expired']:,} leases expired, "
        f"{crew.killed} clients killed, {crew.stopped} stopped; failures told: {crew.total.failures}"
    )
    for name, value in faults.items():
        print(f"{name}: {value}")
    return int(any(faults.values()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--client", nargs=2, metavar=("TARGET", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        asyncio.run(client_main(arguments.client[0], int(arguments.client[1])))
        return 0
    print(f"seed {arguments.seed}")
    flags = ("--hot.max_leased_share", "0.6", "--lease.max", "30s", "--lease.default", "5s")
    with serving(CAPACITY, *flags) as running:
        return asyncio.run(soak(running, arguments.seconds, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
