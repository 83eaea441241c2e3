"""Figures of the matrix: what one cell reached, and the ceiling that stands beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.compare.figures import quantile
from bench.crew import Played
from bench.jobs import BARE_GRPC, BULK, GRPC, MEMCPY, RAW_TCP, RAW_UNIX, SHM
from bench.worker import GET, MATCH, MIXED

CEILING_OF = {SHM: MEMCPY, BULK: RAW_TCP, GRPC: BARE_GRPC}
EXCHANGE_OF = {SHM: RAW_UNIX, BULK: RAW_TCP}


@dataclass(frozen=True)
class Round:
    """One round of all clients together; `wall_s` from the first start to the last end."""

    wall_s: float
    parts: int
    client_cpu_s: float
    server_cpu_s: float
    calls_ms: Sequence[float]


@dataclass(frozen=True)
class Figure:
    """One cell. Rates are of the median round; latencies of all calls of all rounds.

    `gb_per_s` and CPU seconds a GB: 1e9 bytes of payload; both None where no payload moves. `ceiling` is in the unit
    of the rate, the mean of what was measured before and after.
    """

    name: str
    workload: str
    part_bytes: int
    batch: int
    clients: int
    keys_per_s: float
    gb_per_s: float | None
    p50_ms: float
    p99_ms: float
    p999_ms: float
    calls: int
    rounds: int
    client_cpu_s_per_gb: float | None
    server_cpu_s_per_gb: float | None
    client_cpu_us_per_key: float
    server_cpu_us_per_key: float
    ceiling_name: str = ""
    ceiling: float | None = None
    ceiling_before: float | None = None
    ceiling_after: float | None = None
    ratio: float | None = None

    @property
    def rate(self) -> float:
        return self.keys_per_s if self.gb_per_s is None else self.gb_per_s

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.part_bytes, self.batch, self.clients


@dataclass(frozen=True)
class Skip:
    """Cells that were not measured, and why."""

    what: str
    reason: str


@dataclass
class Report:
    """All of one run; grows while it runs."""

    machine: dict[str, str]
    cells: list[Figure] = field(default_factory=list)
    ceilings_before: list[Figure] = field(default_factory=list)
    ceilings_after: list[Figure] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


def together(played: Sequence[Played], server_cpu_s: float) -> Round:
    """One round from what each client did in it."""
    start = min(each.end_s - each.seconds for each in played)
    return Round(
        wall_s=max(each.end_s for each in played) - start,
        parts=sum(each.parts for each in played),
        client_cpu_s=sum(each.cpu_s for each in played),
        server_cpu_s=server_cpu_s,
        calls_ms=[ms for each in played for ms in each.calls_ms],
    )


def figure_of(
    name: str, workload: str, *, part_bytes: int, batch: int, clients: int, rounds: Sequence[Round]
) -> Figure:
    """The figure of a cell's rounds."""
    keys_per_s = statistics.median(each.parts / each.wall_s for each in rounds)
    parts = sum(each.parts for each in rounds)
    client_s, server_s = sum(each.client_cpu_s for each in rounds), sum(each.server_cpu_s for each in rounds)
    calls_ms = [ms for each in rounds for ms in each.calls_ms]
    part_gb = None if workload == MATCH else part_bytes / 1e9
    return Figure(
        name,
        workload,
        part_bytes,
        batch,
        clients,
        keys_per_s=keys_per_s,
        gb_per_s=None if part_gb is None else keys_per_s * part_gb,
        p50_ms=quantile(calls_ms, 0.5),
        p99_ms=quantile(calls_ms, 0.99),
        p999_ms=quantile(calls_ms, 0.999),
        calls=len(calls_ms),
        rounds=len(rounds),
        client_cpu_s_per_gb=None if part_gb is None else client_s / parts / part_gb,
        server_cpu_s_per_gb=None if part_gb is None else server_s / parts / part_gb,
        client_cpu_us_per_key=client_s / parts * 1e6,
        server_cpu_us_per_key=server_s / parts * 1e6,
    )


def ceiling_key(figure: Figure) -> tuple[str, str, tuple[int, int, int]] | None:
    """Which ceiling stands beside a cell; None where there is none, as for views, which move nothing."""
    names = EXCHANGE_OF if figure.workload == MATCH else CEILING_OF
    name = names.get(figure.name)
    workload = GET if figure.workload == MIXED else figure.workload
    return None if name is None else (name, workload, figure.shape)
