"""A client process: a few actors over one client, which now and then breaks its own sockets. Acts until killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable

from bench.soak.actor import Actor
from bench.soak.rooms import ROOM_BYTES, Rooms
from bench.soak.tally import Tally
from bench.soak.thread_actor import ThreadActor
from kvstore_client import AsyncClient, Client, ClientOptions

ACTORS = 3
DEADLINE_MS = 2000
TELL_S = 1.0
_WAYS = (("shm", "bulk", "grpc"), ("shm", "bulk", "grpc"), ("shm",), ("bulk", "grpc"), ("bulk",), ("grpc",))


def main(target: str, seed: int) -> None:
    """Acts until killed; prints a tally of all of it every second."""
    chosen = random.Random(seed)
    options = ClientOptions(target, default_deadline_ms=DEADLINE_MS, transports=chosen.choice(_WAYS))
    if chosen.random() < 0.5:
        asyncio.run(_in_loop(options, chosen))
    else:
        _in_threads(options, chosen)


async def _in_loop(options: ClientOptions, chosen: random.Random) -> None:
    async with AsyncClient(options) as client:
        memories, tallies = _memories(client.register, chosen), [Tally() for _ in range(ACTORS)]
        _told(tallies, chosen)
        actors = [
            Actor(client, Rooms(memory, tally), chosen.randrange(1 << 30))
            for memory, tally in zip(memories, tallies, strict=True)
        ]
        await asyncio.gather(*(_forever(actor) for actor in actors))


async def _forever(actor: Actor) -> None:
    while True:
        await actor.act()


def _in_threads(options: ClientOptions, chosen: random.Random) -> None:
    client = Client(options)
    memories, tallies = _memories(client.register, chosen), [Tally() for _ in range(ACTORS)]
    threads = []
    for memory, tally in zip(memories, tallies, strict=True):
        actor = ThreadActor(client, Rooms(memory, tally), chosen.randrange(1 << 30))
        threads.append(threading.Thread(target=_act_forever, args=(actor,)))
        threads[-1].start()
    _told(tallies, chosen)
    for thread in threads:
        thread.join()


def _act_forever(actor: ThreadActor) -> None:
    try:
        while True:
            actor.act()
    except BaseException:  # noqa: BLE001 - the outermost place of the thread
        traceback.print_exc()
        os._exit(1)  # All of it, so that somebody notices.


def _memories(register: Callable[[int], object], chosen: random.Random) -> list[list[memoryview]]:
    """Memory for each actor: of its own, in a region, or both."""
    fd = os.memfd_create("soak-region")
    os.ftruncate(fd, ACTORS * ROOM_BYTES)
    region = register(fd)
    os.close(fd)
    shared: memoryview = region.memory  # type: ignore[attr-defined]
    made = []
    for i in range(ACTORS):
        both = [shared[i * ROOM_BYTES :][:ROOM_BYTES], memoryview(bytearray(ROOM_BYTES))]
        made.append(chosen.choice((both, both[:1], both[1:])))
    return made


def _told(tallies: list[Tally], chosen: random.Random) -> None:
    """Prints every second what was seen so far, and breaks a socket now and then, in a thread beside the actors."""
    breaks = chosen.random() < 0.5

    def tell() -> None:
        while True:
            time.sleep(TELL_S)
            if breaks and chosen.random() < 0.3:
                tallies[0].broken += _break_a_socket(chosen)
            total = Tally()
            for tally in tallies:
                total.add(tally.line())
            print(total.line(), flush=True)

    threading.Thread(target=tell, daemon=True).start()


def _break_a_socket(chosen: random.Random) -> int:
    """Shuts one of this process's connections down, whatever is under way on it."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sockets.append(int(name))
    if not sockets:
        return 0
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(chosen.choice(sockets))) as sock:
        if sock.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6) and sock.getpeername():
            sock.shutdown(socket.SHUT_RDWR)
            return 1
    return 0
