"""What the warm tier's index costs: a million blocks (`--full`: ten million) of 4 KiB beside a hundred thousand.

The index is real, on the disk of the working directory; of the segments only what a start reads of them is there,
header and footer. As a program it makes such an index, `python -m bench.index make FOLDER BLOCKS`, or opens one as a
server does at its start, `python -m bench.index open FOLDER BLOCKS`, tells what that took, and then does one round of
look-ups for each line that it is sent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.channel import CORES
from bench.compare.figures import paired
from bench.compare.processes import ROOT, die_with_parent, stop
from bench.disk import folder_on_disk, in_turn
from bench.report import Row, say
from bench.rig import MIB, on_cores
from bench.slots import CACHE_BYTES, CLOCKS, DESCRIBED, SEGMENT_BYTES, WAIT_S
from kvstore.core.segments import SegmentBook, SegmentRules
from kvstore.replay.warm import ENTRIES_PER_BLOCK, WarmSize
from kvstore.tiers.index import Index, Located, NamespaceAt, PartAt, SegmentAt
from kvstore.tiers.recovery import Clock, name_of, recover
from kvstore.tiers.segment import BLOCK_BYTES, Footer, Header
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.warm import WarmTier

FEW, MANY, FULL_BLOCKS, QUICK_BLOCKS = 100_000, 1_000_000, 10_000_000, 200_000
ROUNDS, QUICK_ROUNDS, ROUNDS_S = 25, 3, 20.0
BATCH, CALLS = 256, 64
PER_SEGMENT = WarmSize(BLOCK_BYTES, SEGMENT_BYTES, 1).blocks_per_segment
STORE_ID = bytes(16)
CHANGE_BLOCKS = 10_000  # Written to the index at once.
NAMESPACE_ID = 1
MANY_OVER_FEW = 2.0
HAS, ABSENT, LOCATE = "has", "has, absent", "locate"
MAKE_S = 600.0


@dataclass(frozen=True)
class Plan:
    """How many blocks, and how many rounds of look-ups."""

    blocks: int = MANY
    rounds: int = ROUNDS


QUICK, FULL = Plan(QUICK_BLOCKS, QUICK_ROUNDS), Plan(FULL_BLOCKS)


def run(plan: Plan | None = None) -> list[Row]:
    """Makes both, opens each in a process of its own, and looks things up in turn."""
    plan = Plan() if plan is None else plan
    with on_cores(CORES), folder_on_disk("index") as folder, ExitStack() as stack:
        opened = {}
        for count in (FEW, plan.blocks):
            say(f"{count:,} blocks")
            path = folder / str(count)
            _make(path, count)
            opened[count] = stack.enter_context(_opened(path, count))
        few, many = opened[FEW], opened[plan.blocks]
        rows = [*_costs(few, FEW), *_costs(many, plan.blocks)]
        say("look-ups")
        for what in (HAS, ABSENT, LOCATE):
            acts = {"few": lambda what=what: few.round_s(what), "many": lambda what=what: many.round_s(what)}
            times = in_turn(acts, rounds=plan.rounds, seconds=ROUNDS_S)
            cost, beside = (sorted(times[who])[len(times[who]) // 2] * 1e6 / BATCH / CALLS for who in ("many", "few"))
            name = f"{what}, {BATCH} keys a call, {plan.blocks:,} blocks"
            ratio = paired(times["few"], times["many"])
            rows.append(Row(name, cost, "us/key", beside, f"{FEW:,} blocks", at_most=MANY_OVER_FEW, paired=ratio))
        rows.append(Row(f"memory after that, {plan.blocks:,} blocks", many.memory_bytes() / MIB, "MiB"))
    return rows


def _costs(opened: Opened, count: int) -> list[Row]:
    cost = opened.cost
    return [
        Row(f"start with {count:,} blocks", cost["seconds"], "s"),
        Row(f"memory at start, {count:,} blocks", cost["memory_bytes"] / MIB, "MiB"),
        Row(f"memory at start, {count:,} blocks", cost["memory_bytes"] / count, "bytes/block"),
        Row(f"most memory while starting, {count:,} blocks", cost["most_bytes"] / MIB, "MiB"),
    ]


# -- our end -------------------------------------------------------------------------------------------------------


class Opened:
    """A process that has opened an index. `cost`: what that took."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.cost: dict[str, Any] = self._hear()

    def round_s(self, what: str) -> float:
        """Seconds of one round of look-ups."""
        return float(self._ask(what)["seconds"])

    def memory_bytes(self) -> int:
        """What the process has more than before it opened anything."""
        return int(self._ask("memory")["memory_bytes"])

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that has the index ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def _opened(path: Path, count: int) -> Iterator[Opened]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.index", "open", str(path), str(count)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield Opened(process)
    finally:
        stop(process)


def _make(path: Path, count: int) -> None:
    command = [sys.executable, "-m", "bench.index", "make", str(path), str(count)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=MAKE_S, preexec_fn=die_with_parent)


# -- the program ---------------------------------------------------------------------------------------------------


class FramesDisk:
    """Segments of which nothing is there but header and footer: full ones of one namespace, the last one less so."""

    def __init__(self, block_count: int) -> None:
        self.counts = [min(PER_SEGMENT, block_count - at) for at in range(0, block_count, PER_SEGMENT)]

    def names(self) -> list[str]:
        return [name_of(number) for number in range(len(self.counts))]

    def open(self, name: str) -> FramesDevice:
        number = self.names().index(name)
        return FramesDevice(number, self.counts[number])

    def create(self, name: str, size_bytes: int) -> FramesDevice:
        raise OSError(errno.ENOSPC, "nothing is written here", name)

    def remove(self, name: str) -> None:
        raise OSError(errno.EROFS, "nothing is removed here", name)

    def free_bytes(self) -> int:
        return 0


class FramesDevice:
    size_bytes = SEGMENT_BYTES

    def __init__(self, number: int, block_count: int) -> None:
        sequence, payload = number + 1, (1 + block_count) * BLOCK_BYTES
        header = Header(STORE_ID, number, sequence, SEGMENT_BYTES, created_ns=0)
        footer = Footer(STORE_ID, number, sequence, 1, -(-block_count // ENTRIES_PER_BLOCK), block_count, payload, 0)
        self._blocks = {0: header.to_block(), SEGMENT_BYTES - BLOCK_BYTES: footer.to_block()}

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        if offset not in self._blocks or [len(piece) for piece in pieces] != [BLOCK_BYTES]:
            raise OSError(errno.EIO, "only header and footer are here")
        pieces[0][:] = self._blocks[offset]

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        raise OSError(errno.EROFS, "nothing is written here")

    def sync(self) -> None:
        return

    def close(self) -> None:
        return


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def make(path: Path, block_count: int) -> None:
    """Writes an index as if each segment had been sealed in its turn."""
    path.mkdir()
    index, now, first = Index(path / "index", cache_bytes=CACHE_BYTES), time.time(), 0
    for number, count in enumerate(FramesDisk(block_count).counts):
        for at in range(0, count, CHANGE_BLOCKS):
            change = index.change()
            for i in range(at, min(at + CHANGE_BLOCKS, count)):
                part = PartAt(0, (1 + i) * BLOCK_BYTES, BLOCK_BYTES, first + i)
                change.put_block(NAMESPACE_ID, key_of(first + i), Located(now, 0.0, number, number + 1, (part,)))
            change.put_namespace(DESCRIBED.digest, NamespaceAt(NAMESPACE_ID, DESCRIBED.spec))
            change.put_segment(number, SegmentAt(number + 1, count, count * BLOCK_BYTES))
            index.apply(change)
        first += count
    index.close()


def serve(path: Path, block_count: int) -> None:
    """Opens an index, then answers a line with a line until there are no more."""
    before = _status_bytes("VmRSS")
    start = time.perf_counter()
    tier = _tier(path, block_count)
    seconds = time.perf_counter() - start
    memory, most = _status_bytes("VmRSS") - before, _status_bytes("VmHWM") - before
    _say({"seconds": seconds, "memory_bytes": memory, "most_bytes": most})
    draw = random.Random(7)
    try:
        for line in sys.stdin:
            what = line.strip()
            if what == "memory":
                _say({"memory_bytes": _status_bytes("VmRSS") - before})
            else:
                _say({"seconds": _round_s(tier, what, draw, block_count)})
    finally:
        tier.close()


def _tier(path: Path, block_count: int) -> WarmTier:
    disk = FramesDisk(block_count)
    book = SegmentBook(SegmentRules(segment_bytes=SEGMENT_BYTES), (len(disk.counts) + 2) * SEGMENT_BYTES)
    tombstones = Tombstones(path / "deleted.log")
    found = recover(
        disk,
        book,
        tombstones,
        index_path=path / "index",
        cache_bytes=CACHE_BYTES,
        store_id=STORE_ID,
        clock=Clock(CLOCKS.now(), CLOCKS.wall()),
    )
    if (found.block_count, found.rebuilt) != (block_count, False):
        raise RuntimeError(f"{found.block_count} of {block_count} blocks were found: {dict(found.counts)}")
    return WarmTier(disk, book, found.index, tombstones, namespaces=found.namespaces, store_id=STORE_ID, clocks=CLOCKS)


def _round_s(tier: WarmTier, what: str, draw: random.Random, block_count: int) -> float:
    """Seconds of calls for keys anywhere among all; each must find what is there, and nothing else."""
    first = block_count if what == ABSENT else 0
    batches = [[key_of(first + draw.randrange(block_count)) for _ in range(BATCH)] for _ in range(CALLS)]
    ask: dict[str, Callable[[list[bytes]], Sequence[object]]] = {
        HAS: lambda keys: tier.has(DESCRIBED.digest, keys),
        ABSENT: lambda keys: tier.has(DESCRIBED.digest, keys),
        LOCATE: lambda keys: tier.locate(DESCRIBED.digest, keys).result(WAIT_S),
    }
    act = ask[what]
    start = time.perf_counter()
    found = [act(keys) for keys in batches]
    taken = time.perf_counter() - start
    hits = sum(1 for answer in found for one in answer if one)
    if hits != (0 if what == ABSENT else BATCH * CALLS):
        raise RuntimeError(f"{what}: {hits} of {BATCH * CALLS} keys were found")
    return taken


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    {"make": make, "open": serve}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
