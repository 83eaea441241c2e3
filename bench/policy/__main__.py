"""`python -m bench.policy TRACE ...`: hit rates of eviction policies by capacity, beside what an oracle reaches.

Plays each trace through the store's own policies, without a store around them. Exits 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.compare.machine import machine
from bench.compare.tables import Grid
from bench.policy import speed
from bench.policy.figures import CAPACITIES, ORACLE, OURS, Cell, grids, verdicts
from bench.policy.hints import NOTHING, SAYINGS, hint_verdicts, hinted
from bench.policy.oracle import furthest_next_use
from bench.policy.others import NAMES, library, play_other
from bench.policy.picture import write_picture
from bench.policy.play import Played, play
from bench.report import grid_of, say, show, to_markdown
from kvstore.core.eviction import POLICIES
from kvstore.workload.formats import read_trace
from kvstore.workload.generate import generate_trace
from kvstore.workload.hints import Sessions, sessions_of
from kvstore.workload.lines import TraceError
from kvstore.workload.profiles import PROFILES
from kvstore.workload.reuse import HitRates
from kvstore.workload.sessions import SessionMerge
from kvstore.workload.trace import Trace

GENERATED = "gen:"
DEFAULT_TRACES = ("gen:api", "gen:chat", "gen:agent")


def main(given: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.speed:
        return _speed(full=arguments.full)
    try:
        percents = [_percent(text) for text in arguments.capacities.split(",")]
        if arguments.hints:
            return _hints(arguments, percents)
        players = {name: _player(name) for name in _policies(arguments.policies)}
        traces = [(name, load(name)) for name in arguments.traces or DEFAULT_TRACES]
    except (ValueError, TraceError, OSError) as error:
        parser.error(str(error))
    cells: list[Cell] = []
    for name, trace in traces:
        played = Played.of(trace)
        say(f"{name}: {len(played.rows):,} requests, {played.blocks:,} blocks, {played.accesses:,} look-ups")
        for policy, player in players.items():
            began_s = time.perf_counter()
            cells += [Cell(_title(name), policy, p, player(played, played.capacity(p))) for p in percents]
            rate = played.accesses * len(percents) / (time.perf_counter() - began_s)
            say(f"  {policy}: {60 * rate / 1e6:,.1f} million look-ups a minute")
    tables = [*grids(cells), grid_of("All traces", rows := verdicts(cells))]
    for table in tables:
        show(table)
    _write(arguments, cells, tables)
    missed = [row.name for row in rows if row.holds is False]
    for row_name in missed:
        print(f"missed: {row_name}", file=sys.stderr)
    return 1 if missed else 0


def _speed(*, full: bool) -> int:
    rows = speed.run(full=full)
    show(grid_of("Touches of the store's own policies on one core", rows))
    return 1 if any(row.holds is False for row in rows) else 0


def _hints(arguments: argparse.Namespace, percents: Sequence[float]) -> int:
    """Plays the store's policy with what clients would say of each request."""
    cells: list[Cell] = []
    for name in arguments.traces or DEFAULT_TRACES:
        played, sessions = with_sessions(name)
        say(
            f"{name}: {len(played.rows):,} requests of {len(set(sessions.of)):,} sessions, {played.accesses:,} look-ups"
        )
        title = _title(name)
        cells += [Cell(title, ORACLE, p, furthest_next_use(played, played.capacity(p))) for p in percents]
        for sayings_name, sayings in SAYINGS.items():
            trace = hinted(played, sessions, sayings) if sayings != NOTHING else played
            cells += [Cell(title, sayings_name, p, play(trace, POLICIES[OURS], trace.capacity(p))) for p in percents]
            say(f"  {sayings_name}")
    tables = [*grids(cells), grid_of("What must hold", rows := hint_verdicts(cells))]
    for table in tables:
        show(table)
    _write(arguments, cells, tables)
    return 1 if any(row.holds is False for row in rows) else 0


def load(name: str) -> Trace:
    """Reads a trace file, of a sessions file its sample `@PHASE`, or generates `gen:PROFILE`, with seed `@SEED`.

    Raises: ValueError, TraceError, OSError.
    """
    return _load(name)


def with_sessions(name: str) -> tuple[Played, Sessions]:
    """As `load`, and what its sessions do next, also after its end where that is known."""
    trace, longer = _load(name), _load(name, longer=True)
    return Played.of(trace), sessions_of(longer.requests, len(trace.requests))


def _load(name: str, *, longer: bool = False) -> Trace:
    source, _, number = name.partition("@")
    if number and not number.isdigit():
        raise ValueError(f"{name}: what follows @ is no number")
    if source.startswith(GENERATED):
        profile = PROFILES.get(source.removeprefix(GENERATED))
        if profile is None:
            raise ValueError(
                f"{name}: no profile {source.removeprefix(GENERATED)!r}; there are {', '.join(sorted(PROFILES))}"
            )
        seconds = 2 * profile.span_s if longer else None
        return generate_trace(profile, seed=int(number or 1), seconds=seconds)
    merge = SessionMerge(phase=int(number or 0))
    return read_trace(source, merge=replace(merge, cut_s=math.inf) if longer else merge)


def _title(name: str) -> str:
    """The name by which a trace is known, whatever folder it is in."""
    return name if name.startswith(GENERATED) else Path(name).name.replace(".gz", "").replace(".jsonl", "")


def _policies(text: str) -> list[str]:
    if text != "all":
        return text.split(",")
    return [*POLICIES, ORACLE, *(NAMES if library() is not None else ())]


def _player(name: str) -> Callable[[Played, int], HitRates]:
    if name == ORACLE:
        return furthest_next_use
    if name in POLICIES:
        return lambda trace, capacity: play(trace, POLICIES[name], capacity)
    if name not in NAMES:
        raise ValueError(f"--policies: no policy {name!r}; there are {', '.join([*POLICIES, ORACLE, *NAMES])}")
    if library() is None:
        raise ValueError(f"--policies: {name} is of libcachesim, which is not installed")
    return lambda trace, capacity: play_other(trace, name, capacity)


def _percent(text: str) -> float:
    percent = float(text)
    if not 0 < percent <= 100:
        raise ValueError(f"--capacities: {text} is outside of 0..100 percent")
    return percent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = f"a trace file, or gen:PROFILE; @NUMBER chooses a sample of sessions or a seed (default: {DEFAULT_TRACES})"
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=what)
    known = ", ".join([*POLICIES, ORACLE, *NAMES])
    parser.add_argument(
        "--policies", metavar="NAME,...", default="all", help=f"of {known}; those behind min need libcachesim"
    )
    default = ",".join(f"{percent:g}" for percent in CAPACITIES)
    parser.add_argument(
        "--capacities", metavar="PERCENT,...", default=default, help="of the distinct blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--hints", action="store_true", help="play expected with what clients would say of the next use"
    )
    parser.add_argument("--speed", action="store_true", help="measure touches a second instead")
    parser.add_argument("--full", action="store_true", help="with --speed: of ten million blocks too (4 GiB)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every figure here")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the tables here, for a page")
    parser.add_argument("--png", metavar="FILE", type=Path, help="also draw hit rate against capacity")
    return parser


def _write(arguments: argparse.Namespace, cells: Sequence[Cell], tables: Sequence[Grid]) -> None:
    if arguments.json is not None:
        figures = [asdict(cell) for cell in cells]
        arguments.json.write_text(json.dumps({"machine": machine(), "policy": figures}, indent=2) + "\n")
    if arguments.markdown is not None:
        names = " ".join(map(_title, arguments.traces or DEFAULT_TRACES))
        flags = "--hints " if arguments.hints else ""
        arguments.markdown.write_text(to_markdown(f"python -m bench.policy {flags}{names}", machine(), tables))
    if arguments.png is not None:
        write_picture(cells, arguments.png)


if __name__ == "__main__":
    sys.exit(main())
