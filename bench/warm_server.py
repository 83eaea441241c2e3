"""A server with a warm tier: Gets of what only its disk has, and small calls while that disk is busy both ways."""

from __future__ import annotations

import statistics
import time
from itertools import count
from pathlib import Path

from bench.disk import OWN, RAW, RawReader, folder_on_disk, in_turn, share_row
from bench.jobs import cut
from bench.players import DEADLINE_MS
from bench.report import Row
from bench.rig import MIB, Running, percentile, serving, warm
from bench.slots import (
    NAMESPACE,
    PART_BYTES,
    READERS,
    SEGMENT_BYTES,
    Slots,
    filled,
    key_of,
    raw_reads,
    used_pages_taken,
)
from bench.warm_clients import GET, PING, PUT, WAIT_MS, playing
from kvstore.replay.admin import admin_peer
from kvstore_client import Client, ClientOptions

GET_BLOCKS, GET_SETS = 64, 8
HOT_SETS = 3  # Less than all: each has left memory before its turn comes again.
HOT, PROMOTE_QUEUE, CAPACITY_BYTES = HOT_SETS * GET_BLOCKS * PART_BYTES, "128MiB", 2048 * MIB
FOUND = 0.9
BESIDE_HOT, BESIDE_CAPACITY_BYTES, BESIDE_SETS = "512MiB", 4096 * MIB, 8


def warm_gets(*, rounds: int, seconds: float, at_least: float) -> list[Row]:
    """Gets of blocks that only the disk has: it serves what a server before it left there, and memory is small.

    The bare reads go round memory of the same kind and size.
    """
    with folder_on_disk("warm") as folder:
        places = filled(folder / "warm", CAPACITY_BYTES, set_count=GET_SETS, block_count=GET_BLOCKS)
        flags = _flags(folder / "warm", CAPACITY_BYTES)
        with (
            used_pages_taken(),
            serving(str(HOT), *flags, "--warm.promote_queue", PROMOTE_QUEUE) as running,
            RawReader(READERS) as reader,
            Slots(HOT_SETS * GET_BLOCKS) as slots,
            _Gets(running) as gets,
        ):
            sets = [slots.pieces[at : at + GET_BLOCKS] for at in range(0, len(slots.pieces), GET_BLOCKS)]
            segments = folder / "warm" / "segments"
            bare = [raw_reads(reader, segments, one, sets[i % HOT_SETS]) for i, one in enumerate(places)]
            turn = count()
            before = counted(running)["warm_promoted_blocks"]
            acts = {OWN: gets.get_s, RAW: lambda: reader.read_s(bare[next(turn) % GET_SETS])}
            times = in_turn(acts, rounds=rounds, seconds=seconds)
            promoted = counted(running)["warm_promoted_blocks"] - before
    name = f"warm Get, {GET_BLOCKS} x 2 MiB a call: disk to the caller's buffers, shm, verified"
    return [
        share_row(name, times, GET_BLOCKS * PART_BYTES, at_least=at_least),
        Row(f"{name}, p50", statistics.median(times[OWN]) * 1e3, "ms"),
        Row("blocks of these Gets that came from disk", promoted / gets.block_count, "of all", at_least=1.0),
    ]


def _flags(path: Path, capacity_bytes: int) -> list[str]:
    options = {
        "warm.path": path,
        "warm.capacity": capacity_bytes,
        "warm.segment": SEGMENT_BYTES,
        "warm.flush_timeout": "0s",  # Nobody starts on this folder again.
        "hot.max_leased_share": "1.0",
    }
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


class _Gets:
    """A blocking client that gets one set after the other. Owns the client, until the block is left."""

    def __init__(self, running: Running) -> None:
        options = ClientOptions(target=running.target, default_deadline_ms=DEADLINE_MS, transports=("shm",))
        self._client = Client(options)
        self._namespace = self._client.namespace(NAMESPACE)
        self._targets = cut(warm(GET_BLOCKS * PART_BYTES), PART_BYTES, GET_BLOCKS)
        self._turn = count()
        self.block_count = 0

    def __enter__(self) -> _Gets:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get_s(self) -> float:
        first = next(self._turn) % GET_SETS * GET_BLOCKS
        keys = [key_of(first + i) for i in range(GET_BLOCKS)]
        start = time.perf_counter()
        result = self._namespace.get(keys, into=self._targets, wait_ms=WAIT_MS)
        taken = time.perf_counter() - start
        if result.failure is not None:
            raise result.failure
        found = [int.from_bytes(target[:8], "little") for target in self._targets]
        if result.prefix_blocks != GET_BLOCKS or found != list(range(first, first + GET_BLOCKS)):
            raise RuntimeError(f"a get brought {result.prefix_blocks} of {GET_BLOCKS} blocks")
        if self._client.transport != "shm":
            raise RuntimeError(f"the bytes went by {self._client.transport}")
        self.block_count += GET_BLOCKS
        return taken


def counted(running: Running) -> dict[str, int]:
    """Counters and gauges of a server by name."""
    with admin_peer(running.admin) as peer:
        stats = peer.stats()
    return {one.name: one.value for one in (*stats.counters, *stats.gauges)}


def small_calls(*, idle_s: float, busy_s: float, at_most_ms: float) -> list[Row]:
    """Look-ups of one key while one client stores as fast as it can, and another one reads what only the disk has."""
    with folder_on_disk("warm") as folder:
        filled(folder / "warm", BESIDE_CAPACITY_BYTES, set_count=BESIDE_SETS, block_count=GET_BLOCKS)
        with serving(BESIDE_HOT, *_flags(folder / "warm", BESIDE_CAPACITY_BYTES)) as running:
            with playing([PING], running.target, GET_BLOCKS, BESIDE_SETS) as play:
                quiet = play(idle_s)[0]
            with playing([PING, GET, PUT], running.target, GET_BLOCKS, BESIDE_SETS) as play:
                before, start = counted(running), time.perf_counter()
                busy, gets, puts = play(busy_s)
                after, seconds = counted(running), time.perf_counter() - start
    rates = {
        name: (after[f"warm_{name}_blocks"] - before[f"warm_{name}_blocks"]) * PART_BYTES / seconds / 1e9
        for name in ("promoted", "written")
    }
    if not all(rates.values()):
        raise RuntimeError(f"the disk was not busy both ways: {rates}")
    name = "Match of one key, fast channel"
    return [
        Row(f"{name}, p50, idle", percentile(quiet.calls_ms, 0.5), "ms"),
        Row(f"{name}, p99, idle", percentile(quiet.calls_ms, 0.99), "ms"),
        Row("read from disk beside it", rates["promoted"], "GB/s"),
        Row("written to disk beside it", rates["written"], "GB/s"),
        Row("stored by the one that puts", puts.blocks * PART_BYTES / puts.seconds / 1e9, "GB/s"),
        Row("found by the one that gets", gets.blocks / max(1, gets.asked), "of all", at_least=FOUND),
        Row(f"{name}, p50, beside them", percentile(busy.calls_ms, 0.5), "ms"),
        Row(
            f"{name}, p99 of {len(busy.calls_ms):,}, beside them",
            percentile(busy.calls_ms, 0.99),
            "ms",
            at_most=at_most_ms,
        ),
        Row(f"{name}, longest, beside them", max(busy.calls_ms), "ms"),
    ]
