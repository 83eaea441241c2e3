"""A report as tables, for a terminal, for a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare.figures import GET, LATENCY, PUT, Figure, Report, Skip
from bench.compare.peers import ROWS
from kvstore.config.units import format_size

Cell = Callable[[Figure], str]
NOTHING = "-"
WIDTH = 170


@dataclass(frozen=True)
class Grid:
    """One table of text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(report: Report) -> list[Grid]:
    """The tables of a report that have rows."""
    made = [
        _grid("Rates in GB/s and their share of the ceiling of the same rounds", report.figures, cell=share_cell),
        _grid(
            "This store's fastest way of the same link in the same rounds, and how many times the rival's figure it is",
            [figure for figure in report.figures if figure.ours is not None],
            cell=ours_cell,
        ),
        _ceilings(report),
        _skips(report.skips),
    ]
    return [grid for grid in made if grid.rows]


def share_cell(figure: Figure) -> str:
    """A figure with its part of the ceiling: a share of the rate, a multiple of the latency."""
    if figure.op == LATENCY:
        times = "" if figure.ratio is None else f" ({figure.ratio:.1f} x)"
        return f"{_latency(figure.value, figure.p99)}{times}"
    return f"{figure.value:.2f}" + ("" if figure.ratio is None else f" ({figure.ratio:.0%})")


def ours_cell(figure: Figure) -> str:
    """What this store did beside the figure, and the ratio of both."""
    if figure.ours is None or figure.ours_ratio is None:
        return NOTHING
    return f"{figure.ours:.{3 if figure.op == LATENCY else 2}f} ({figure.ours_ratio:.2f} x)"


def show(report: Report, console: Console) -> None:
    """Prints the tables."""
    for grid in grids(report):
        table = Table(title=grid.title, title_justify="left")
        for i, column in enumerate(grid.header):
            table.add_column(column, justify="left" if i == 0 or column == "why" else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


def to_json(report: Report) -> str:
    """Every figure with its ceiling, the ceilings before and after, and what was skipped."""
    return json.dumps(asdict(report), indent=2) + "\n"


def to_markdown(report: Report) -> str:
    """The same tables for a page, with the machine, the method and the notes that the rows need."""
    parts = ["# This store beside others", _facts(report.machine), _facts(report.plan)]
    for grid in grids(report):
        lines = [f"## {grid.title}", "", _line(grid.header), _line(["---"] * len(grid.header))]
        parts.append("\n".join([*lines, *map(_line, grid.rows)]))
    measured = {figure.title for figure in report.figures}
    notes = [f"- {row.title}: {row.note}." for row in ROWS if row.note and row.title in measured]
    if notes:
        parts.append("\n".join(["## Notes", "", *notes]))
    return "\n\n".join(parts) + "\n"


def _grid(title: str, figures: Sequence[Figure], *, cell: Cell) -> Grid:
    batches = sorted({figure.batch for figure in figures if figure.op != LATENCY})
    keys = [(op, batch) for op in (PUT, GET) for batch in batches]
    header = ("store", "size", *(f"{op} x{batch}" for op, batch in keys), "get p50 / p99 ms")
    found: dict[tuple[str, int], dict[tuple[str, int], str]] = {}
    for figure in figures:
        cells = found.setdefault((figure.title, figure.size_bytes), {})
        cells[figure.op, figure.batch] = cell(figure)
    rows = [
        (name, format_size(size), *(cells.get(key, NOTHING) for key in [*keys, (LATENCY, 1)]))
        for (name, size), cells in sorted(found.items(), key=_order)
    ]
    return Grid(title, header, tuple(rows))


def _order(item: tuple[tuple[str, int], Any]) -> tuple[int, str, int]:
    """Rows as the list of peers has them, each with its sizes together."""
    (title, size_bytes), _ = item
    titles = [row.title for row in ROWS]
    return (titles.index(title) if title in titles else len(titles), title, size_bytes)


def _ceilings(report: Report) -> Grid:
    """Ceilings with both figures in each cell."""
    after = {(f.title, f.size_bytes, f.op, f.batch): f for f in report.ceilings_after}

    def cell(figure: Figure) -> str:
        later = after.get((figure.title, figure.size_bytes, figure.op, figure.batch))
        return f"{_plain(figure)} → {NOTHING if later is None else _plain(later)}"

    return _grid("Ceilings before and after, in GB/s", report.ceilings_before, cell=cell)


def _skips(skips: Sequence[Skip]) -> Grid:
    rows = [(s.title, "all" if s.size_bytes is None else format_size(s.size_bytes), s.reason) for s in skips]
    return Grid("Not measured", ("store", "size", "why"), tuple(rows))


def _plain(figure: Figure) -> str:
    return _latency(figure.value, figure.p99) if figure.op == LATENCY else f"{figure.value:.2f}"


def _latency(p50: float, p99: float | None) -> str:
    return f"{p50:.3f}" if p99 is None else f"{p50:.3f} / {p99:.3f}"


def _facts(facts: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
