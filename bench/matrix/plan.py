"""What one run of the matrix measures: which cells, and what memory they need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.jobs import BULK, GRPC, OWN, SHM, VIEWS
from bench.rig import MIB
from bench.worker import GET, MATCH, MIXED, PUT, fresh_count
from kvstore.config.units import parse_size

WORKLOADS = (GET, PUT, MIXED, MATCH)
SIZES, FEW_SIZES = "64KiB,640KiB,2MiB,5MiB", "64KiB,2MiB,5MiB"
BATCHES = "1,16,64,256"
CLIENTS, FEW_CLIENTS = "1,2,8", "1,8"
SET_BYTES = 256 * MIB
CORNER_CALL_BYTES = 128 * MIB
SECONDS = 0.3
ROUND_CALLS = 1024  # Of one client.
ARENA_SPARE, ARENA_EXTRA_BYTES = 1.1, 256 * MIB
MEMORY_SHARE = 0.85
MAX_SIZE_BYTES, MAX_BATCH, MAX_CLIENTS = 32 * MIB, 4096, 64


@dataclass(frozen=True)
class Plan:
    """All of them: each workload with each transport, size, batch and number of clients.

    `corner_call_bytes`: of each size, only the least batch and the largest whose calls move no more; None = all.
    `seconds`: how long each cell is played at least.
    """

    workloads: tuple[str, ...]
    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    clients: tuple[int, ...]
    corner_call_bytes: int | None = None
    seconds: float = SECONDS

    def groups(self, size_bytes: int, memory_bytes: int) -> tuple[list[Group], list[tuple[int, int, str]]]:
        """What is played of one size, and (clients, batch, reason) of what is not."""
        groups, left_out = [], []
        for clients in self.clients:
            batches = []
            for batch in self.batches_of(size_bytes):
                needed = Group(size_bytes, clients, (batch,)).memory_bytes
                if needed > memory_bytes:
                    reason = f"needs {needed / 1e9:.0f} GB of memory, there are {memory_bytes / 1e9:.0f}"
                    left_out.append((clients, batch, reason))
                else:
                    batches.append(batch)
            if batches:
                groups.append(Group(size_bytes, clients, tuple(batches)))
        return groups, left_out

    def batches_of(self, size_bytes: int) -> tuple[int, ...]:
        """The batches that are measured with one size."""
        if self.corner_call_bytes is None:
            return self.batches
        fit = [batch for batch in self.batches if batch * size_bytes <= self.corner_call_bytes]
        return tuple(sorted({min(self.batches), max(fit, default=min(self.batches))}))

    def cells(self, size_bytes: int) -> list[tuple[str, str]]:
        """(transport, workload) of one size; views only read, and a match moves no parts: one size is enough."""
        workloads = [w for w in self.workloads if w != MATCH or size_bytes == min(self.sizes)]
        return [(t, w) for t in self.transports for w in workloads if t != VIEWS or w == GET]


@dataclass(frozen=True)
class Group:
    """Cells that share buffers: one size, one number of clients, several batches."""

    part_bytes: int
    clients: int
    batches: tuple[int, ...]

    @property
    def part_count(self) -> int:
        """Parts of one client. The set of all clients together is larger than caches, and one batch at least."""
        most = max(self.batches)
        wanted = -(-SET_BYTES // (self.clients * self.part_bytes))
        return -(-wanted // most) * most

    @property
    def fresh_count(self) -> int:
        calls = {batch: min(ROUND_CALLS, -(-self.part_count // batch)) for batch in self.batches}
        return max(fresh_count(calls[batch], batch) for batch in self.batches)

    @property
    def set_bytes(self) -> int:
        return self.clients * self.part_count * self.part_bytes

    @property
    def arena_bytes(self) -> int:
        """Room for all clients' parts, what their mixed rounds add, and the ends of pages that no part fits."""
        stored = self.clients * (self.part_count + self.fresh_count) * self.part_bytes
        return (int(stored * ARENA_SPARE) // MIB + 1) * MIB + ARENA_EXTRA_BYTES

    @property
    def memory_bytes(self) -> int:
        """Arena, and the buffers that each client puts from and gets into."""
        return self.arena_bytes + 2 * self.set_bytes


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Checks the command line. Raises ValueError naming the option and its limit."""
    full = arguments.full
    chosen = arguments.sizes is not None or arguments.batches is not None
    return Plan(
        workloads=_names("--workloads", arguments.workloads, WORKLOADS),
        transports=_names("--transports", arguments.transports, OWN),
        sizes=_numbers("--sizes", arguments.sizes or (SIZES if full else FEW_SIZES), MAX_SIZE_BYTES),
        batches=_numbers("--batches", arguments.batches or BATCHES, MAX_BATCH),
        clients=_numbers("--clients", arguments.clients or (CLIENTS if full else FEW_CLIENTS), MAX_CLIENTS),
        corner_call_bytes=None if full or chosen else CORNER_CALL_BYTES,
        seconds=arguments.seconds,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the matrix."""
    group = parser.add_argument_group("matrix")
    group.add_argument(
        "--full",
        action="store_true",
        help="every cell; else the least batch of each size and the largest of calls of 128 MiB",
    )
    group.add_argument("--workloads", metavar="NAMES", help=f"of {','.join(WORKLOADS)} (default all)")
    transports = ", ".join((SHM, VIEWS, BULK, GRPC))
    group.add_argument("--transports", metavar="NAMES", help=f"of {transports}, commas between (default all)")
    group.add_argument("--sizes", metavar="SIZES", help=f"part sizes (default {FEW_SIZES}; --full: {SIZES})")
    group.add_argument("--batches", metavar="COUNTS", help=f"parts a call (default of {BATCHES}; see --full)")
    group.add_argument("--clients", metavar="COUNTS", help=f"processes (default {FEW_CLIENTS}; --full: {CLIENTS})")
    group.add_argument("--seconds", metavar="S", type=float, default=SECONDS, help=f"a cell (default {SECONDS})")


def available_bytes() -> int:
    """Memory that a run may take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * MEMORY_SHARE)
    raise LookupError("MemAvailable")


def _names(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(known)
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if name in wanted)


def _numbers(option: str, text: str, high: int) -> tuple[int, ...]:
    found = []
    for word in text.split(","):
        value = parse_size(word.strip()) if option == "--sizes" else int(word)
        if not 1 <= value <= high:
            raise ValueError(f"{option}: {value} is not within 1-{high}")
        found.append(value)
    return tuple(sorted(set(found)))
