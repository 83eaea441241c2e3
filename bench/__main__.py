"""`python -m bench [NAME ...]`: prints each figure beside the ceiling of the same run.

Exits 1 if a bound is missed. Without names, everything that has bounds runs. Figures of one run compare with each
other only: the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import channel, fairness, faults, index, warm
from bench.compare.machine import machine
from bench.compare.tables import Grid
from bench.matrix.figures import Report
from bench.matrix.picture import write_picture
from bench.matrix.plan import Plan, add_options, plan_of
from bench.matrix.session import Session
from bench.matrix.tables import grids, to_dict
from bench.report import Row, grid_of, say, show, to_dicts, to_markdown

MATRIX, INDEX = "matrix", "index"
MATRIX_WIDTH = 190
BENCHES = {
    "transfer": "Inline transfers",
    "rates": "Keys a second",
    "ping": "Small calls beside large ones",
    "channel": "The fast channel on two cores",
    "fairness": "Clients beside one another on two cores",
    "warm": "The warm tier on two cores",
    "faults": "Reads from memory while the warm tier's disk fails",
    INDEX: "The warm tier's index: a million blocks, --full ten million",
    MATRIX: "Workloads by transport, part size, batch and clients",
}
BOUNDED = tuple(name for name in BENCHES if name != MATRIX)


@dataclass
class Results:
    """What the benchmarks of one run brought."""

    rows: list[Row] = field(default_factory=list)
    tables: list[Grid] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    parser = parser_of()
    arguments = parser.parse_args()
    names = arguments.names or list(BOUNDED)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    if arguments.png is not None and MATRIX not in names:
        parser.error("--png: only matrix has a picture")
    try:
        plan = plan_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    results = Results()
    for name in names:
        if name == MATRIX:
            _matrix(plan, results, arguments.png)
        else:
            _bounded(name, results, quick=arguments.quick, full=arguments.full)
    _write(results, arguments, names)
    missed = [row.name for row in results.rows if row.holds is False]
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    described = "; ".join(f"{name}: {title}" for name, title in BENCHES.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{described} (default all but {MATRIX})")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every figure with its ceiling here")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the tables here, for a page")
    parser.add_argument("--png", metavar="FILE", type=Path, help=f"also draw the figures of {MATRIX}")
    quick = (
        "few rounds of channel, fairness, warm, faults and index: to see that they run, not to judge what they print"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    add_options(parser)
    return parser


def _bounded(name: str, results: Results, *, quick: bool, full: bool) -> None:
    shortened: dict[str, Callable[[], list[Row]]] = {
        "channel": lambda: channel.run(channel.QUICK),
        "fairness": lambda: fairness.run(fairness.QUICK),
        "warm": lambda: warm.run(warm.QUICK),
        "faults": lambda: faults.run(faults.QUICK),
        INDEX: lambda: index.run(index.QUICK),
    }
    run: Callable[[], list[Row]] = import_module(f"bench.{name}").run
    if name == INDEX and full:
        run = partial(index.run, index.FULL)
    is_short = quick and name in shortened
    title = f"{BENCHES[name]}, few rounds: it runs, and nothing is judged" if is_short else BENCHES[name]
    say(title)
    rows = [replace(row, at_least=None, at_most=None) for row in shortened[name]()] if is_short else run()
    grid = grid_of(title, rows)
    show(grid)
    results.rows += rows
    results.tables.append(grid)
    results.figures[name] = to_dicts(rows)


def _matrix(plan: Plan, results: Results, png: Path | None) -> None:
    report: Report = Session(plan, say).run()
    made = grids(report)
    for grid in made:
        show(grid, width=MATRIX_WIDTH)
    results.tables += made
    results.figures[MATRIX] = to_dict(report)
    if png is not None:
        write_picture(report, png)


def _write(results: Results, arguments: argparse.Namespace, names: list[str]) -> None:
    if arguments.json is not None:
        made = {"machine": machine(), **results.figures}
        arguments.json.write_text(json.dumps(made, indent=2) + "\n")
    if arguments.markdown is not None:
        command = f"python -m bench {' '.join(names)}"
        arguments.markdown.write_text(to_markdown(command, machine(), results.tables))


if __name__ == "__main__":
    sys.exit(main())
