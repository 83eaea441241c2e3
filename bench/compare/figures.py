"""What a comparison measures: figures, each beside the ceiling and beside this store in the same turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

PUT, GET, LATENCY = "put", "get", "latency"
GB_PER_S, MS = "GB/s", "ms"


@dataclass(frozen=True)
class Figure:
    """One figure. `ratio` is figure to ceiling, the median over neighbouring rounds where there are such.

    `ours` is this store's fastest way of the same link in the same rounds, `ours_ratio` that to the figure. For
    latencies `value` is the p50.
    """

    title: str
    size_bytes: int
    op: str
    batch: int
    value: float
    unit: str
    p99: float | None = None
    ceiling: float | None = None
    ceiling_p99: float | None = None
    ceiling_name: str = ""
    ratio: float | None = None
    ours: float | None = None
    ours_name: str = ""
    ours_ratio: float | None = None


@dataclass(frozen=True)
class Beside:
    """What a neighbour of the same turn took: seconds a round, or milliseconds a call."""

    title: str
    times: Sequence[float]


@dataclass(frozen=True)
class Skip:
    """A row, or a size of it, that was not measured, and why."""

    title: str
    reason: str
    size_bytes: int | None = None


@dataclass
class Report:
    """All of one run; grows while it runs."""

    machine: dict[str, str]
    plan: dict[str, str]
    figures: list[Figure] = field(default_factory=list)
    ceilings_before: list[Figure] = field(default_factory=list)
    ceilings_after: list[Figure] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


def gb_per_s(size_bytes: int, times_s: Sequence[float]) -> float:
    """The rate of the median round."""
    return size_bytes / statistics.median(times_s) / 1e9


def paired(times: Sequence[float], beside: Sequence[float]) -> float:
    """How often the figure's rate goes into its neighbour's: the median over pairs of rounds."""
    return statistics.median(b / t for t, b in zip(times, beside, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not pass."""
    ordered = sorted(values)
    return ordered[max(0, int(len(ordered) * share) - 1)]


def rate_figure(
    title: str,
    *,
    size_bytes: int,
    set_bytes: int,
    op: str,
    batch: int,
    times_s: Sequence[float],
    ceiling: Beside | None,
    ours: Beside | None,
) -> Figure:
    """A rate from the rounds of one turn."""
    return Figure(
        title,
        size_bytes,
        op,
        batch,
        value=gb_per_s(set_bytes, times_s),
        unit=GB_PER_S,
        ceiling=None if ceiling is None else gb_per_s(set_bytes, ceiling.times),
        ceiling_name="" if ceiling is None else ceiling.title,
        ratio=None if ceiling is None else paired(times_s, ceiling.times),
        ours=None if ours is None else gb_per_s(set_bytes, ours.times),
        ours_name="" if ours is None else ours.title,
        ours_ratio=None if ours is None else 1 / paired(times_s, ours.times),
    )


def latency_figure(
    title: str, *, size_bytes: int, p50: float, p99: float, ceiling: Beside | None, ours: Beside | None
) -> Figure:
    """A latency from the calls of one turn."""
    ceiling_p50 = None if ceiling is None else quantile(ceiling.times, 0.5)
    ours_p50 = None if ours is None else quantile(ours.times, 0.5)
    return Figure(
        title,
        size_bytes,
        LATENCY,
        1,
        value=p50,
        unit=MS,
        p99=p99,
        ceiling=ceiling_p50,
        ceiling_p99=None if ceiling is None else quantile(ceiling.times, 0.99),
        ceiling_name="" if ceiling is None else ceiling.title,
        ratio=None if ceiling_p50 is None else p50 / ceiling_p50,
        ours=ours_p50,
        ours_name="" if ours is None else ours.title,
        ours_ratio=None if ours_p50 is None else ours_p50 / p50,
    )
