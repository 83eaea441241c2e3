"""Rows of a benchmark report: a figure, the ceiling of the same run, their ratio, and what is required of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


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


def show(title: str, rows: list[Row]) -> None:
    """Prints a table."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "ceiling of this run", "ratio", "required", ""):
        table.add_column(column, justify="left" if column in ("figure", "ceiling of this run", "") else "right")
    for row in rows:
        ceiling = "" if row.ceiling is None else f"{row.ceiling:,.4g} {row.unit} ({row.ceiling_name})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = {None: "", True: "ok", False: "MISSED"}[row.holds]
        table.add_row(row.name, f"{_number(row.value)} {row.unit}", ceiling, ratio, _bound(row), verdict)
    Console(width=150).print(table)


def write_json(path: Path, results: dict[str, list[Row]]) -> None:
    """Writes every figure with its ceiling of the same run."""
    made = {t: [asdict(r) | {"ratio": r.ratio, "holds": r.holds} for r in rows] for t, rows in results.items()}
    path.write_text(json.dumps(made, indent=2) + "\n")


def _bound(row: Row) -> str:
    if row.at_least is not None:
        return f">= {_number(row.at_least)}"
    return "" if row.at_most is None else f"<= {_number(row.at_most)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
