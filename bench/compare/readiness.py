"""Which rows can run on this machine, and making those run that cannot yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.compare.environments import ENVIRONMENTS, install, install_system, missing
from bench.compare.figures import Skip
from bench.compare.peers import Row, absent

Tell = Callable[[str], None]


def lacking(row: Row, venvs: Path) -> str:
    """Why the row cannot run; empty if it can."""
    reason = absent(row)
    if not reason and row.environment:
        reason = missing(venvs, ENVIRONMENTS[row.environment])
    return reason


def split(rows: Sequence[Row], venvs: Path) -> tuple[list[Row], list[Skip]]:
    """The rows that can run, and those that cannot with their reasons."""
    reasons = {row.title: lacking(row, venvs) for row in rows}
    able = [row for row in rows if not reasons[row.title]]
    return able, [Skip(row.title, reasons[row.title]) for row in rows if reasons[row.title]]


def install_all(rows: Sequence[Row], venvs: Path, tell: Tell) -> None:
    """Installs what the rows lack; what fails is told and stays absent."""
    for row in rows:
        if absent(row):
            tell(f"installing {' '.join(row.packages)} for {row.title}")
            _report(install_system(row.packages), tell)
    for name in dict.fromkeys(row.environment for row in rows if row.environment):
        if missing(venvs, ENVIRONMENTS[name]):
            tell(f"installing {', '.join([*ENVIRONMENTS[name].alone, *ENVIRONMENTS[name].pins])} into {venvs / name}")
            _report(install(venvs, ENVIRONMENTS[name]), tell)


def _report(fault: str, tell: Tell) -> None:
    if fault:
        tell(f"not installed: {fault}")
