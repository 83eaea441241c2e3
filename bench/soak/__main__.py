"""The soak's command: servers, clients, torment, and the verdict."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass

import bench.soak
from bench.rig import Running, serving
from bench.soak import client
from bench.soak.account import MEMORY_SLACK_BYTES, Account, faults, look, settled, warmed
from bench.soak.crew import Crew
from bench.soak.cutter import Cutter

CAPACITY = "64MiB"
FLAGS = ("--hot.max_leased_share", "0.6", "--lease.max", "30s", "--lease.default", "2s", "--bulk.stall_timeout", "1s")
MAPS = {"mapped": "same", "not mapped": "none"}
SHOW_S = 10.0


@dataclass
class Site:
    """One server, the proxy before it, and how it was at the start and in the middle."""

    name: str
    running: Running
    cutter: Cutter
    before: Account
    middle: Account


async def soak(seconds: float, seed: int) -> int:
    """Torments clients for a while, then looks at what is left. Returns an exit code."""
    async with contextlib.AsyncExitStack() as stack:
        sites = [await _site(stack, name, seed + i) for i, name in enumerate(MAPS)]
        crew, start = Crew([site.running.target for site in sites], seed), time.monotonic()
        crew.fill()
        shown, is_halfway = start, False
        while time.monotonic() - start < seconds:
            await crew.torment()
            if not is_halfway and time.monotonic() - start > seconds / 2:
                is_halfway = True
                for site in sites:
                    site.middle = await look(site.running)
            if time.monotonic() - shown > SHOW_S:
                shown = time.monotonic()
                _show(crew, sites, shown - start)
        await crew.end()
        return await _verdict(crew, sites)


async def _site(stack: contextlib.AsyncExitStack, name: str, seed: int) -> Site:
    cutter, port = Cutter(seed), _free_port()
    cutter.lead_to(port)
    stack.push_async_callback(cutter.close)
    bulk = ("--bulk.advertise", await cutter.start(), "--bulk.listen", f"127.0.0.1:{port}")
    running = stack.enter_context(serving(CAPACITY, *FLAGS, "--shm.map_uids", MAPS[name], *bulk))
    before = await warmed(running)
    return Site(name, running, cutter, before, before)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _show(crew: Crew, sites: list[Site], passed_s: float) -> None:
    total, cut = crew.total, sum(site.cutter.cut for site in sites)
    memory = " and ".join(f"{site.running.status_bytes('RssAnon') >> 20} MiB" for site in sites)
    print(
        f"{passed_s:5.0f} s  {total.calls:,} calls  {total.read_parts:,} parts read  {total.wrong} wrong  "
        f"{total.touched} touched  {crew.killed} killed  {crew.stopped} stopped  {cut} cut  servers {memory}",
        flush=True,
    )


async def _verdict(crew: Crew, sites: list[Site]) -> int:
    total = crew.total
    ways = ", ".join(f"{name} {count:,}" for name, count in sorted(total.by_transport.items()))
    cut, stalled = sum(site.cutter.cut for site in sites), sum(site.cutter.stalled for site in sites)
    print(
        f"{total.calls:,} calls ({ways}), {total.read_parts:,} parts read, {total.viewed_parts:,} looked at in place, "
        f"{total.cancelled:,} calls cancelled, {cut} connections cut, {stalled} stalled, {total.broken} broken by "
        f"clients; {crew.killed} clients killed, {crew.stopped} stopped; failures told: {dict(total.failures)}"
    )
    found = {
        "wrong bytes": total.wrong,
        "buffers touched after their call": total.touched,
        "corrupt parts": total.corrupt,
        "clients that died by themselves": crew.died,
        "internal errors": total.failures["Internal"],
        "tickets that did not end": total.failures["TimeoutError"],
        "transports not used": len({"shm", "bulk", "grpc"} - set(total.by_transport)),
    }
    _print(found)
    for site in sites:
        after = await settled(site.running)
        print(_told(site, after))
        own = faults(site.before, after) | {"memory that grew": _growth(site, after)}
        _print(own)
        found |= {f"{site.name}: {name}": value for name, value in own.items()}
    return int(any(found.values()))


def _print(values: dict[str, int]) -> None:
    for name, value in values.items():
        print(f"  {name}: {value}")


def _told(site: Site, after: Account) -> str:
    c = after.counters
    evicted = sum(value for name, value in c.items() if name.startswith("evicted_"))
    expired = c["read_leases_expired"] + c["write_leases_expired"]
    return (
        f"server {site.name}: {evicted:,} blocks evicted, {c['lost_parts']:,} parts lost, "
        f"{c['abandoned_parts']:,} abandoned, {expired:,} leases expired, "
        f"{after.gauges['channel_opened_total']:,} connections, {after.gauges['regions_registered']:,} regions; "
        f"descriptors {site.before.fds} -> {after.fds}, threads {site.before.threads} -> {after.threads}, "
        f"memory {site.before.private_bytes >> 20} -> {site.middle.private_bytes >> 20} -> "
        f"{after.private_bytes >> 20} MiB"
    )


def _growth(site: Site, after: Account) -> int:
    """Bytes by which a server grew in the second half, where it is more than allocators explain."""
    grown = after.private_bytes - site.middle.private_bytes
    return grown if grown > MEMORY_SLACK_BYTES else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=bench.soak.__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--client", nargs=2, metavar=("TARGET", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        client.main(arguments.client[0], int(arguments.client[1]))
        return 0
    print(f"seed {arguments.seed}")
    return asyncio.run(soak(arguments.seconds, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
