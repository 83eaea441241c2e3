"""Clients of a server with a warm tier: `python -m bench.warm_clients KIND TARGET BLOCKS SETS`, and our end of them.

One gets sets of blocks that a folder was filled with, one stores blocks that nobody stored before, one looks up a key
every 5 ms. Each says when it is ready, is told from when to when to play, and prints what it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, cycle

from bench.compare.processes import ROOT, die_with_parent, stop
from bench.jobs import Buffers, cut
from bench.players import DEADLINE_MS
from bench.rig import warm
from bench.slots import NAMESPACE, PART_BYTES, key_of
from kvstore_client import Client, ClientOptions
from kvstore_wire.malloc import keep_freed_memory

GET, PUT, PING = "get", "put", "ping"
PUT_BLOCKS = 16
PING_S = 0.005
TOGETHER_S = 0.05
ANSWER_S = 60.0
WAIT_MS = 20_000


@dataclass
class Done:
    """What one client did. `blocks`: got or stored, of those `asked`; `calls_ms`: of each call."""

    seconds: float = 0.0
    blocks: int = 0
    asked: int = 0
    calls_ms: list[float] = field(default_factory=list)

    def note(self, start: float, blocks: int, asked: int) -> None:
        self.calls_ms.append((time.perf_counter() - start) * 1e3)
        self.blocks += blocks
        self.asked += asked


@contextmanager
def playing(kinds: Sequence[str], *arguments: object) -> Iterator[Callable[[float], list[Done]]]:
    """Starts clients; what is yielded lets them play together for some seconds. Raises RuntimeError where one ends."""
    processes = [_started([kind, *map(str, arguments)]) for kind in kinds]
    try:
        for kind, process in zip(kinds, processes, strict=True):
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the client that is to {kind} ended")

        def play(seconds: float) -> list[Done]:
            at = time.perf_counter() + TOGETHER_S
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{at} {at + seconds}\n")
                process.stdin.flush()
            said = [process.communicate(timeout=seconds + ANSWER_S)[0] for process in processes]
            return [_heard(kind, text) for kind, text in zip(kinds, said, strict=True)]

        yield play
    finally:
        for process in processes:
            if process.poll() is None:
                stop(process)


def _started(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.warm_clients", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )


def _heard(kind: str, text: str) -> Done:
    if not text:
        raise RuntimeError(f"the client that is to {kind} failed")
    return Done(**json.loads(text))


# -- the program ---------------------------------------------------------------------------------------------------

Call = Callable[[Done], None]


def _get(client: Client, block_count: int, set_count: int) -> Call:
    namespace = client.namespace(NAMESPACE)
    targets = cut(warm(block_count * PART_BYTES), PART_BYTES, block_count)
    sets = [[key_of(first + i) for i in range(block_count)] for first in range(0, set_count * block_count, block_count)]
    turn = cycle(sets)

    def get(done: Done) -> None:
        start = time.perf_counter()
        result = namespace.get(next(turn), into=targets, wait_ms=WAIT_MS)
        done.note(start, result.prefix_blocks, block_count)

    return get


def _put(client: Client, block_count: int, set_count: int) -> Call:
    namespace = client.namespace(NAMESPACE)
    buffers = Buffers(PUT_BLOCKS * PART_BYTES, 1)
    client.register(buffers.fd, length=buffers.size_bytes, buffer=buffers.source)
    sources, numbers = cut(buffers.source, PART_BYTES, PUT_BLOCKS), count()
    own = os.getpid().to_bytes(8, "little")

    def put(done: Done) -> None:
        keys = [own + next(numbers).to_bytes(24, "little") for _ in range(PUT_BLOCKS)]
        start = time.perf_counter()
        result = namespace.put(keys, sources)
        done.note(start, result.stored, PUT_BLOCKS)

    return put


def _ping(client: Client, block_count: int, set_count: int) -> Call:
    namespace, keys = client.namespace(NAMESPACE), [key_of(0)]

    def ping(done: Done) -> None:
        time.sleep(PING_S)
        start = time.perf_counter()
        result = namespace.match(keys)
        if result.failure is not None:
            raise result.failure
        done.note(start, result.prefix_blocks, 1)

    return ping


def main() -> None:
    kind, target, blocks, sets = sys.argv[1:]
    options = ClientOptions(target=target, default_deadline_ms=DEADLINE_MS, transports=("shm",))
    with closing(Client(options)) as client:
        call = {GET: _get, PUT: _put, PING: _ping}[kind](client, int(blocks), int(sets))
        call(Done())  # Connects.
        if client.transport != "shm":
            raise RuntimeError(f"asked for shm, but bytes would go by {client.transport}")
        print("ready", flush=True)
        at, end = map(float, sys.stdin.readline().split())
        time.sleep(max(0.0, at - time.perf_counter()))
        done, start = Done(), time.perf_counter()
        while time.perf_counter() < end:
            call(done)
        done.seconds = time.perf_counter() - start
        print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    keep_freed_memory()
    main()
