"""Rows of a benchmark report: a figure, the ceiling of the same run, their ratio, and what is required of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare.tables import Grid

HEADER = ("figure", "value", "ceiling of this run", "ratio", "required", "")
LEFT = ("figure", "ceiling of this run", "", "transport", "ceiling", "op", "what", "why")
WIDTH = 150


@dataclass(frozen=True)
class Row:
    """One figure and what it must reach (`at_least`) or stay within (`at_most`); neither = for information.

    `paired` is the median of the ratios of neighbouring rounds, where figure and ceiling were measured in turn: what
    the machine did to one round it did to both.
    """

    name: str
    value: float
    unit: str
    ceiling: float | None = None
    ceiling_name: str = ""
    at_least: float | None = None
    at_most: float | None = None
    paired: float | None = None

    @property
    def ratio(self) -> float | None:
        if self.paired is not None:
            return self.paired
        return None if self.ceiling is None else self.value / self.ceiling

    @property
    def judged(self) -> float:
        """What the bound speaks of: the ratio where there is a ceiling, else the value."""
        ratio = self.ratio
        return self.value if ratio is None else ratio

    @property
    def holds(self) -> bool | None:
        if self.at_least is None and self.at_most is None:
            return None
        above = self.at_least is None or self.judged >= self.at_least
        return above and (self.at_most is None or self.judged <= self.at_most)


def say(line: str) -> None:
    """Tells what goes on."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def show(grid: Grid, *, width: int = WIDTH) -> None:
    """Prints a table."""
    table = Table(title=grid.title, title_justify="left")
    for column in grid.header:
        table.add_column(column, justify="left" if column in LEFT else "right")
    for row in grid.rows:
        table.add_row(*row)
    Console(width=width).print(table)


def grid_of(title: str, rows: Sequence[Row]) -> Grid:
    """Rows as a table of text."""
    return Grid(title, HEADER, tuple(_cells(row) for row in rows))


def to_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every figure with its ceiling of the same run, for JSON."""
    return [asdict(row) | {"ratio": row.ratio, "holds": row.holds} for row in rows]


def to_markdown(command: str, facts: Mapping[str, str], grids: Sequence[Grid]) -> str:
    """Tables for a page that includes them, with the command that wrote them and what they were measured on."""
    parts = [f"<!-- Written by `{command}`. -->", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    for grid in grids:
        header = tuple(name or "holds" for name in grid.header)
        lines = [f"**{grid.title}**", "", _line(header), _line(["---"] * len(header)), *map(_line, grid.rows)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    ceiling = "" if row.ceiling is None else f"{row.ceiling:,.4g} {row.unit} ({row.ceiling_name})"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    verdict = {None: "", True: "ok", False: "MISSED"}[row.holds]
    return (row.name, f"{_number(row.value)} {row.unit}", ceiling, ratio, _bound(row), verdict)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _bound(row: Row) -> str:
    if row.at_least is not None:
        return f">= {_number(row.at_least)}"
    return "" if row.at_most is None else f"<= {_number(row.at_most)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
