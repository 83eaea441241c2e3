"""Reads from memory while the warm tier's disk fails: they must go on as if there were no disk.

One client reads what is in memory, one puts new blocks, so that memory is written ahead and evicted all the time, and
one asks for what only the disk has. The server is a process of its own whose failpoints are armed and disarmed in turn;
each fault is played between two spells without one, and compared with both.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.channel import CORES
from bench.disk import folder_on_disk
from bench.report import Row, say
from bench.rig import MIB, on_cores
from bench.slots import NAMESPACE, PART_BYTES, key_of
from kvstore.build import build_server, channel_places
from kvstore.config import Address, load_config
from kvstore.replay.admin import admin_peer
from kvstore.service.failpoints import Failpoints
from kvstore.tiers.memory import ArenaMemory
from kvstore_client import Client, ClientOptions

FAULTS = {
    "a disk that is full": ("disk.write", "full"),
    "writes that fail": ("disk.write", "fail"),
    "reads that fail": ("disk.read", "fail"),
    "writes that hang": ("disk.write", "delay:1h"),
    "reads that hang": ("disk.read", "delay:1h"),
}
HOT_BLOCKS, SMALL = 192, 8  # In memory; those that are read there, each of 2 MiB.
ON, DEGRADED = 1, 2
AT_LEAST, SAID_S = 0.9, 5.0
FRESH, LONGEST_S = 1_000_000, 60.0


@dataclass(frozen=True)
class Spells:
    """Seconds of each spell, and of settling before it."""

    seconds: float = 4.0
    settle_s: float = 1.5


QUICK = Spells(1.0, 0.3)


def run(spells: Spells | None = None) -> list[Row]:
    """Measures all of it on two cores, in a folder of the working directory."""
    spells = Spells() if spells is None else spells
    rows: list[Row] = []
    with (
        on_cores(CORES),
        folder_on_disk("warm-faults") as folder,
        _server(folder / "warm") as server,
        _Load(server.target) as load,
    ):
        before = load.rate(spells)
        for name, (point, action) in FAULTS.items():
            say(name)
            server.tell(f"{point}={action}")
            said_s = server.until_state(DEGRADED, load)
            during = load.rate(spells)
            server.tell(f"-{point}")
            healed_s = server.until_state(ON, load)
            after = load.rate(spells)
            rows += [
                Row(
                    f"Gets from memory beside {name}",
                    during,
                    "Gets/s",
                    ceiling=statistics.mean((before, after)),
                    ceiling_name="without a fault",
                    at_least=AT_LEAST,
                ),
                Row(f"{name}: until the tier says so", said_s, "s", at_most=SAID_S),
                Row(f"{name}: until it is well again, once the fault ended", healed_s, "s"),
            ]
            before = after
        rows.append(Row("wrong bytes", load.wrong, "reads", at_most=0))
    return rows


class _Load:
    """Three clients: Gets from memory that are timed, Puts of new blocks, and Gets of what only the disk has."""

    def __init__(self, target: str) -> None:
        self._clients = [Client(ClientOptions(target, default_deadline_ms=2000)) for _ in range(3)]
        self._stored = 0  # New blocks, of which the last are in memory.
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.wrong = 0

    def __enter__(self) -> _Load:
        namespace = self._clients[0].namespace(NAMESPACE)
        self._hot = [key_of(i) for i in range(SMALL)]
        assert namespace.put(self._hot, [bytes([i + 1]) * PART_BYTES for i in range(SMALL)]).ok
        self._rooms = [bytearray(PART_BYTES) for _ in range(SMALL)]
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._put, self._get_cold)]
        for thread in self._threads:
            thread.start()
        while self._stored < 4 * HOT_BLOCKS:  # Until much has left memory.
            self.gets(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        for client in self._clients:
            client.close()

    def rate(self, spells: Spells) -> float:
        """Gets of blocks in memory a second."""
        self.gets(spells.settle_s)
        return self.gets(spells.seconds)

    def gets(self, seconds: float) -> float:
        """Gets for so long; returns how many there were a second."""
        namespace, end, gets = self._clients[0].namespace(NAMESPACE), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            at = gets % SMALL
            found = namespace.get([self._hot[at]], into=[self._rooms[at]], wait_ms=0)
            if found.prefix_blocks and (self._rooms[at][0], self._rooms[at][-1]) != (at + 1, at + 1):
                self.wrong += 1
            if not found.prefix_blocks:  # It cannot have left memory: it is always the last that was used.
                raise RuntimeError(f"a block in memory was not found: {list(found.states)}, {found.failure}")
            gets += 1
        return gets / seconds

    def _put(self) -> None:
        """New blocks, so that memory turns over and is written ahead all the time."""
        namespace, value = self._clients[1].namespace(NAMESPACE), bytes(PART_BYTES)
        while not self._stop.wait(0.02):
            namespace.put([key_of(FRESH + self._stored)], [value])
            self._stored += 1

    def _get_cold(self) -> None:
        namespace, room = self._clients[2].namespace(NAMESPACE), bytearray(PART_BYTES)
        for number in count():
            if self._stop.wait(0.05):
                return
            cold = self._stored - 2 * HOT_BLOCKS - number % HOT_BLOCKS  # It has left memory, and is on disk still.
            namespace.get([key_of(FRESH + max(0, cold))], into=[room])


class _Server:
    """The server's process, as its failpoints are told."""

    def __init__(self, pipe: Connection, target: str, admin_target: str) -> None:
        self._pipe, self.target, self._admin_target = pipe, target, admin_target

    def tell(self, point: str) -> None:
        """Arms `name=action`, or disarms `-name`."""
        self._pipe.send(point)

    def until_state(self, state: int, load: _Load) -> float:
        """Waits, under load, until the tier is in a state; returns for how long."""
        start = time.monotonic()
        with admin_peer(self._admin_target, deadline_s=5.0) as peer:
            while time.monotonic() - start < LONGEST_S:
                if next(g.value for g in peer.stats().gauges if g.name == "warm_state") == state:
                    break
                load.gets(0.05)
        return time.monotonic() - start


@contextmanager
def _server(folder: Path) -> Iterator[_Server]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(folder)), daemon=True)
    process.start()
    theirs.close()
    target, admin_target = ours.recv()
    try:
        yield _Server(ours, target, admin_target)
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _serve(pipe: Connection, folder: str) -> None:
    import uvloop

    uvloop.run(_serving(pipe, folder))


async def _serving(pipe: Connection, folder: str) -> None:
    options = {
        "hot.capacity": str(HOT_BLOCKS * PART_BYTES),
        "warm.path": folder,
        "warm.capacity": str(2048 * MIB),
        "warm.segment": str(64 * MIB),
        "limits.max_part": str(16 * MIB),
        "hot.page": str(16 * MIB),
        "bulk.listen": "127.0.0.1:0",
    }
    config = load_config(None, {}, options)
    memory, failpoints = ArenaMemory(config.hot.capacity), Failpoints()
    server = build_server(config, memory, failpoints)
    anywhere = Address("127.0.0.1", 0)
    bound = await server.start([anywhere], [anywhere], channel_places(config))
    pipe.send((bound.store[0], bound.admin[0]))
    ended = asyncio.Event()

    def told() -> None:
        try:
            text = pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            ended.set()
            return
        if text.startswith("-"):
            failpoints.disarm(text[1:])
        else:
            failpoints.arm(*text.split("=", 1))

    asyncio.get_running_loop().add_reader(pipe.fileno(), told)
    await ended.wait()
    await server.stop()
    memory.close()
