"""The matrix as tables, for a terminal, for a page and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.compare.tables import Grid
from bench.matrix.figures import Figure, Report
from bench.worker import GET, MATCH, MIXED, PUT
from kvstore.config.units import format_size

TITLES = {
    GET: "Get",
    PUT: "Put",
    MIXED: "Mixed: nine Gets, one Put",
    MATCH: "Match, in keys a second",
}
NOTHING = "-"


def grids(report: Report) -> list[Grid]:
    """One table a workload, the ceilings, and what was not measured."""
    made = [_cells(title, [f for f in report.cells if f.workload == workload]) for workload, title in TITLES.items()]
    made += [_ceilings(report), Grid("Not measured", ("what", "why"), tuple((s.what, s.reason) for s in report.skips))]
    return [grid for grid in made if grid.rows]


def to_dict(report: Report) -> dict[str, Any]:
    """Every figure with its ceilings, for JSON."""
    return asdict(report)


def _cells(title: str, figures: Sequence[Figure]) -> Grid:
    header = (
        "transport",
        "part",
        "parts a call",
        "clients",
        "keys/s" if figures and figures[0].gb_per_s is None else "GB/s",
        "ceiling before → after",
        "ratio",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "calls",
        "client CPU s/GB",
        "server CPU s/GB",
    )
    if figures and figures[0].gb_per_s is None:
        header = (*header[:-2], "client CPU µs/key", "server CPU µs/key")
    return Grid(title, header, tuple(_row(figure) for figure in figures))


def _row(figure: Figure) -> tuple[str, ...]:
    keys = figure.gb_per_s is None
    client = figure.client_cpu_us_per_key if keys else figure.client_cpu_s_per_gb
    server = figure.server_cpu_us_per_key if keys else figure.server_cpu_s_per_gb
    ceiling = NOTHING
    if figure.ceiling_before is not None and figure.ceiling_after is not None:
        ceiling = f"{_rate(figure.ceiling_before)} → {_rate(figure.ceiling_after)} {figure.ceiling_name}"
    return (
        figure.name,
        format_size(figure.part_bytes),
        str(figure.batch),
        str(figure.clients),
        _rate(figure.rate),
        ceiling,
        NOTHING if figure.ratio is None else f"{figure.ratio:.2f}",
        *(f"{ms:.3g}" for ms in (figure.p50_ms, figure.p99_ms, figure.p999_ms)),
        f"{figure.calls:,}",
        NOTHING if client is None else f"{client:.3f}",
        NOTHING if server is None else f"{server:.3f}",
    )


def _ceilings(report: Report) -> Grid:
    after = {(f.name, f.workload, f.shape): f for f in report.ceilings_after}
    header = ("ceiling", "op", "part", "parts a call", "clients", "before", "after", "unit", "p50 / p99 ms before")
    rows = []
    for figure in report.ceilings_before:
        later = after.get((figure.name, figure.workload, figure.shape))
        rows.append(
            (
                figure.name,
                figure.workload,
                format_size(figure.part_bytes),
                str(figure.batch),
                str(figure.clients),
                _rate(figure.rate),
                NOTHING if later is None else _rate(later.rate),
                "keys/s" if figure.gb_per_s is None else "GB/s",
                f"{figure.p50_ms:.3g} / {figure.p99_ms:.3g}",
            )
        )
    return Grid("Ceilings, directly before and after the cells of their size", header, tuple(rows))


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
