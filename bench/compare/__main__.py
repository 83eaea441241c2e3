"""`python -m bench.compare`: the same work on this store and on others that run on this machine.

One client process with one calling thread a store; its server is another process of this host. A round writes or reads
a set of 192 to 320 MiB; a cell is the median of the rounds. The ceiling, and this store by bulk or shm beside rivals,
play the same rounds in between, so that a figure compares with what stands beside it. Gets land in the caller's warm
buffer. What a store lacks here is a reason to skip it, never an error.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from bench.compare.figures import Report
from bench.compare.machine import machine, versions
from bench.compare.peers import PEERS, chosen
from bench.compare.picture import write_picture
from bench.compare.plan import Plan
from bench.compare.readiness import install_all, split
from bench.compare.session import Session
from bench.compare.tables import WIDTH, show, to_json, to_markdown
from kvstore.config.units import format_size, parse_size

SIZES, QUICK_SIZES = "64KiB,640KiB,2MiB,5MiB", "64KiB,2MiB"
BATCHES, QUICK_BATCHES = "1,16,64", "1,16"
ROUNDS, QUICK_ROUNDS = 5, 3
LATENCY_CALLS = 500
MAX_BATCH, MAX_ROUNDS = 64, 1000
MAX_SIZE_BYTES = 7 << 20  # memcached is started for values of 8 MB.
SHARED_MEMORY = Path("/dev/shm")
VENVS = Path("~/.cache/kvcommons-compare")


def main() -> int:
    parser = parser_of()
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)  # So that what was started is stopped.
    try:
        plan = plan_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.install:
        install_all(plan.rows, plan.venvs, _tell)
    able, skips = split(plan.rows, plan.venvs)
    for skip in skips:
        _tell(f"skipped: {skip.title}: {skip.reason}")
    report = Report(machine(), _described(plan), skips=skips)
    before = _shared_memory()
    try:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            Session(replace(plan, rows=tuple(able)), folder=Path(folder), tell=_tell).run(report)
    finally:
        _write(report, arguments)
        for name in sorted(_shared_memory() - before):
            _tell(f"{SHARED_MEMORY / name} is new since the start; it is another program's, or a store left it behind")
    return 0


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--peers", metavar="NAMES", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--sizes", metavar="SIZES", help=f"value sizes (default {SIZES})")
    parser.add_argument("--batches", metavar="COUNTS", help=f"values a call (default {BATCHES})")
    parser.add_argument("--rounds", metavar="COUNT", type=int, help=f"rounds a cell (default {ROUNDS})")
    quick = f"{QUICK_SIZES}, {QUICK_BATCHES} a call, {QUICK_ROUNDS} rounds, unless said otherwise"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--venvs", metavar="DIR", type=Path, default=VENVS, help=f"rivals' libraries (default {VENVS})")
    parser.add_argument(
        "--install", action="store_true", help="install what is missing: libraries into --venvs, servers by apt-get"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="every figure with its ceiling")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="the tables for a page")
    parser.add_argument("--png", metavar="FILE", type=Path, help="a picture")
    return parser


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Checks the command line. Raises ValueError naming the option and its limit."""
    quick = arguments.quick
    sizes = arguments.sizes or (QUICK_SIZES if quick else SIZES)
    batches = arguments.batches or (QUICK_BATCHES if quick else BATCHES)
    rounds = arguments.rounds if arguments.rounds is not None else (QUICK_ROUNDS if quick else ROUNDS)
    return Plan(
        rows=tuple(chosen(arguments.peers)),
        sizes=tuple(_within("--sizes", parse_size(text), MAX_SIZE_BYTES) for text in sizes.split(",")),
        batches=tuple(_within("--batches", int(text), MAX_BATCH) for text in batches.split(",")),
        rounds=_within("--rounds", rounds, MAX_ROUNDS),
        latency_calls=LATENCY_CALLS,
        venvs=arguments.venvs.expanduser(),
    )


def _within(option: str, value: int, high: int) -> int:
    if not 1 <= value <= high:
        raise ValueError(f"{option}: {value} is not within 1-{high}")
    return value


def _described(plan: Plan) -> dict[str, str]:
    return {
        "stores": ", ".join(dict.fromkeys(row.peer for row in plan.rows)),
        "sizes": ", ".join(map(format_size, plan.sizes)),
        "values a call": ", ".join(map(str, plan.batches)),
        "rounds": str(plan.rounds),
        "single gets": str(plan.latency_calls),
        "versions": versions(plan.rows),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _write(report: Report, arguments: argparse.Namespace) -> None:
    show(report, Console(width=WIDTH))
    if arguments.json is not None:
        arguments.json.write_text(to_json(report))
    if arguments.markdown is not None:
        arguments.markdown.write_text(to_markdown(report))
    if arguments.png is not None and report.figures:
        write_picture(report, arguments.png)


def _tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
