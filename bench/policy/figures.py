"""What every policy reached on every trace, and what is required of the store's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.compare.tables import Grid
from bench.report import Row
from kvstore.workload.reuse import HitRates

CAPACITIES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
ORACLE, OURS, BASE = "min", "expected", "lru"
MOST_UNDER_BASE = 2.5  # Points.
NEAR_GOOD, FEWEST_NEAR_GOOD = 0.5, 16 / 24
_ORPHANS = 0.1  # Points by which block and prefix hits must differ to be told apart.
# The best online policy of a study of these traces (seventeen policies), prefix hit in percent at CAPACITIES.
GOOD: Mapping[str, Sequence[float]] = {
    "mooncake_conversation": (8.3, 12.7, 22.4, 29.7, 36.0, 37.9),
    "mooncake_synthetic": (4.3, 8.2, 16.5, 26.1, 41.2, 61.6),
    "claude_code_sessions": (12.2, 21.9, 50.8, 77.6, 91.3, 95.4),
    "gen:api": (47.0, 50.9, 52.3, 52.6, 52.9, 53.0),
}


@dataclass(frozen=True)
class Cell:
    """One policy on one trace with room for `percent` of its distinct blocks."""

    trace: str
    policy: str
    percent: float
    rates: HitRates

    @property
    def prefix(self) -> float:
        """Percent of all block look-ups that a prefix hit answered."""
        return 100 * self.rates.prefix


def grids(cells: Sequence[Cell]) -> list[Grid]:
    """A table a trace: prefix hits in percent, block hits in brackets where they are more."""
    made = []
    for trace in dict.fromkeys(cell.trace for cell in cells):
        of = [cell for cell in cells if cell.trace == trace]
        percents = sorted({cell.percent for cell in of})
        rows = []
        for policy in dict.fromkeys(cell.policy for cell in of):
            by = {cell.percent: cell for cell in of if cell.policy == policy}
            rows.append((policy, *(_text(by[percent]) for percent in percents)))
        header = ("policy", *(f"{percent:g} %" for percent in percents))
        made.append(Grid(f"{trace}: prefix hit in percent, by capacity", header, tuple(rows)))
    return made


def _text(cell: Cell) -> str:
    block = 100 * cell.rates.block
    return f"{cell.prefix:.1f}" + (f" ({block:.1f})" if block - cell.prefix > _ORPHANS else "")


def verdicts(cells: Sequence[Cell]) -> list[Row]:
    """Means over all cells, and what must hold."""
    by = {(cell.trace, cell.policy, cell.percent): cell.prefix for cell in cells}
    places = sorted({(trace, percent) for trace, _, percent in by})
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    means = {name: fmean(by[trace, name, percent] for trace, percent in places) for name in policies}
    rows = []
    for name, mean in sorted(means.items(), key=lambda item: -item[1]):
        others = [m for other, m in means.items() if other not in (ORACLE, name)]
        best = max(others) if name == OURS and others else None
        rows.append(Row(f"{name}, mean of {len(places)} cells", mean, "%", at_least=best))
    if OURS not in means:
        return rows
    if BASE in means:
        under = max(by[trace, BASE, percent] - by[trace, OURS, percent] for trace, percent in places)
        rows.append(Row(f"{OURS}, most points under {BASE}", under, "points", at_most=MOST_UNDER_BASE))
    known = [
        by[trace, OURS, percent] >= GOOD[trace][CAPACITIES.index(percent)] - NEAR_GOOD
        for trace, percent in places
        if trace in GOOD and percent in CAPACITIES
    ]
    if known:
        near = f"{OURS}, cells of {len(known)} within {NEAR_GOOD} points of the best known"
        rows.append(Row(near, sum(known), "cells", at_least=FEWEST_NEAR_GOOD * len(known)))
    return rows
