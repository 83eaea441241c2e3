"""A server that is killed again and again under load: what its folder holds is right, or is not there."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from kvstore_client import Client, ClientOptions
from tests.integration.server_process import ServerProcess
from tests.integration.test_warm_restart import ask_stats, bytes_on_disk
from tests.integration.warm_scene import chain, flags
from tests.shards import kv_spec

PART_BYTES = 64 << 10
SPEC = kv_spec("crash", part_bytes=PART_BYTES, layer_groups=2)
KEYS = chain(7, 800)  # 100 MiB: more than the disk keeps, six times what memory does.
CALL = 4  # Blocks in one call.
CAPACITY_BYTES = 64 << 20
LIFE_S = 0.7  # At most, after it serves.
LIVES = 6
LONG_LIVES = int(os.environ.get("KVCOMMONS_LIVES", "200"))


def part_of(block: bytes, part: int) -> bytes:
    """What is stored as one part of a block: cheap to make, and no two are alike."""
    head = block + bytes([part])
    return (head * (PART_BYTES // len(head) + 1))[:PART_BYTES]


class Record:
    """What the clients know: which blocks must not be found any more."""

    def __init__(self) -> None:
        self.deleted: set[bytes] = set()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def check(self, keys: list[bytes], rooms: list[bytearray], prefix: int) -> None:
        for i in range(2 * prefix):
            if bytes(rooms[i]) != part_of(keys[i // 2], i % 2):
                self.wrong.append(f"part {i % 2} of {keys[i // 2].hex()} has other bytes")


def work(target: str, record: Record, keys: list[bytes], seed: int, stop: threading.Event) -> None:
    """Puts, gets and now and then deletes blocks of its own share of the keys, until the server is gone."""
    rng = random.Random(seed)
    with Client(ClientOptions(target, default_deadline_ms=3000)) as client:
        namespace = client.namespace(SPEC)
        while not stop.is_set():
            at = rng.randrange(0, len(keys) - CALL)
            some = keys[at : at + CALL]
            dice = rng.random()
            if dice < 0.5:
                some = [k for k in some if k not in record.deleted or rng.random() < 0.1]
                record.deleted.difference_update(some)  # Whatever becomes of the call, they may be there.
                namespace.put(some, [part_of(k, part) for k in some for part in (0, 1)])
            elif dice < 0.95:
                rooms = [bytearray(PART_BYTES) for _ in range(2 * CALL)]
                gone = record.deleted.intersection(some)
                got = namespace.get(some, into=rooms, wait_ms=2000)
                record.check(some, rooms, got.prefix_blocks)
                if gone.intersection(some[: got.prefix_blocks]):
                    record.wrong.append("a deleted block was found")
            elif namespace.delete(some).failure is None:
                record.deleted.update(some)


def check_all(process: ServerProcess, folder: Path, record: Record) -> None:
    """Looks at everything after a start, before anything else is asked of the server."""
    gauges = {c.name: c.value for c in ask_stats(process).gauges}
    assert bytes_on_disk(folder) <= CAPACITY_BYTES
    assert {p.suffix for p in (folder / "warm" / "segments").iterdir()} <= {".seg", ""}
    assert not [p.name for p in (folder / "warm").rglob(".new-*")]
    with Client(ClientOptions(process.target, default_deadline_ms=10_000)) as client:
        namespace = client.namespace(SPEC)
        there = [k for k in KEYS if namespace.match([k]).prefix_blocks]
        assert not record.deleted.intersection(there), "a deleted block is back"
        assert gauges["warm_stored_blocks"] == len(there)
        assert gauges["warm_stored_bytes"] == len(there) * 2 * PART_BYTES
        rng = random.Random(len(there))
        for k in rng.sample(there, min(60, len(there))):
            rooms = [bytearray(PART_BYTES), bytearray(PART_BYTES)]
            got = namespace.get([k], into=rooms, wait_ms=5000)
            assert got.prefix_blocks == 1, f"told of and not read: {got.failure}"
            record.check([k], rooms, 1)
    assert not record.wrong, record.wrong[:3]


def live(process: ServerProcess, record: Record, rng: random.Random) -> None:
    """Serves two clients for a while, and dies in the middle of it."""
    stop = threading.Event()
    halves = (KEYS[: len(KEYS) // 2], KEYS[len(KEYS) // 2 :])
    workers = [
        threading.Thread(target=work, args=(process.target, record, half, rng.random(), stop)) for half in halves
    ]
    for worker in workers:
        worker.start()
    time.sleep(rng.uniform(0.05, LIFE_S))
    process.kill()
    stop.set()
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers), "a client hangs"


def die_and_look(folder: Path, lives: int, seed: int) -> None:
    rng, record, found = random.Random(seed), Record(), 0
    options = flags(folder, warm__capacity="64MiB", hot__capacity="16MiB")
    for _ in range(lives + 1):
        process = ServerProcess(options)
        try:
            process.wait_for_start()
            assert "Traceback" not in process.stderr_text(), process.stderr_text()
            check_all(process, folder, record)
            live(process, record, rng)
            said = process.stderr_text()
            assert "Traceback" not in said, said
            found += " holds 0 blocks" not in said
        finally:
            process.close()
    assert not record.wrong, record.wrong[:3]
    assert found >= lives // 2, "hardly anything was kept: the lives are too short to say much"


def test_a_server_killed_at_random_moments_keeps_what_is_right_and_nothing_else(tmp_path: Path) -> None:
    die_and_look(tmp_path, LIVES, seed=1)


@pytest.mark.soak
def test_many_lives_end_and_nothing_wrong_is_ever_found(tmp_path: Path) -> None:
    die_and_look(tmp_path, LONG_LIVES, seed=int(time.time()))
