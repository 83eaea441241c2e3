"""`kvstore replay`: drives a real server with a trace and measures what it saves."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, reported
from kvstore.cli.replay_args import add_flags, trace_and_settings
from kvstore.replay.engine import run_replay
from kvstore.replay.faults import ReplayError, ServerSilent
from kvstore.replay.report import Report
from kvstore.workload.profiles import PROFILES

WIDTH = 110  # Of the table where no terminal sets one.


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="drive a server with a trace and measure hit rate, latency and correctness",
        description="Replays a trace with real worker processes: for each request a prefill worker looks up, reads and "
        "verifies what is stored and writes the rest; then a decode worker reads and verifies the whole chain. "
        "Without --server a server of its own is started and ended.",
        epilog="traces: a Mooncake JSONL file, a sessions file or what kvstore gen prints, gzip or not; or gen:PROFILE "
        f"({', '.join(sorted(PROFILES))})\n\n"
        "examples:\n"
        "  kvstore replay conversation_trace.jsonl.gz --capacity 10%\n"
        "  kvstore replay gen:api --rate 3 --seconds 120 --capacity 10% --part-size 64KiB\n"
        "  kvstore replay gen:chat --capacity 5% --warm 20% --part-size 64KiB\n"
        "  kvstore replay gen:chat --speed 10x --limit 500 --json -\n"
        "  kvstore replay trace.jsonl --server 10.0.0.5:7070 --admin 10.0.0.5:7071\n\n"
        "exit codes: 0 no wrong bytes, 1 wrong bytes or the server or a worker died, 2 bad arguments, 3 no server",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the figures as one JSON object; - for standard output"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="picture to write (default: kvstore-replay.png)")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")


def run(arguments: argparse.Namespace) -> int:
    previous = signal.signal(signal.SIGTERM, _interrupt)  # Ends like Ctrl-C: children first, nothing left over.
    try:
        return reported("replay", lambda: _replay(arguments))
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _replay(arguments: argparse.Namespace) -> int:
    from kvstore.replay.progress import progress

    plot = _plot_path(arguments)
    for path in (plot, None if arguments.json in (None, "-") else Path(arguments.json)):
        if path is not None:
            _check_writable(path)
    trace, settings = trace_and_settings(arguments)
    try:
        with progress(len(trace.requests)) as watch:
            report = run_replay(trace, settings, watch=watch)
    except ServerSilent as error:
        raise CommandError(str(error), exit_codes.UNREACHABLE) from None
    except ReplayError as error:
        raise CommandError(str(error), exit_codes.FAILED) from None
    _show(report, arguments.json, plot)
    return exit_codes.FAILED if report.tally.wrong_bytes else exit_codes.OK


def _show(report: Report, json_name: str | None, plot: Path | None) -> None:
    from rich.console import Console

    from kvstore.replay.table import print_report

    to_stderr = json_name == "-"  # Standard output is the JSON object's alone then.
    console = Console(stderr=to_stderr, width=None if _is_terminal(to_stderr) else WIDTH)
    print_report(report, console)
    if json_name == "-":
        print(json.dumps(report.to_json()))
    elif json_name is not None:
        Path(json_name).write_text(json.dumps(report.to_json()) + "\n")
    if plot is not None:
        from kvstore.replay.plot import write_plot

        write_plot(report, plot)
        console.print(f"plot: {plot}", markup=False, highlight=False, soft_wrap=True)


def _is_terminal(to_stderr: bool) -> bool:
    return (sys.stderr if to_stderr else sys.stdout).isatty()


def _plot_path(arguments: argparse.Namespace) -> Path | None:
    """Returns where the picture goes."""
    return None if arguments.no_plot else arguments.plot or Path("kvstore-replay.png")


def _check_writable(path: Path) -> None:
    """Raises CommandError now rather than after a long run."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise CommandError(f"{path}: cannot be written: it is a folder, or its folder is not there")
