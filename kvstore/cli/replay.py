"""`kvstore replay`: drives a real server with a trace and measures what it saves."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, reported
from kvstore.cli.connection import ADMIN, duration_s
from kvstore.cli.gen import add_load_flags
from kvstore.config import parse_ratio, parse_size
from kvstore.replay.crew import CrewSize
from kvstore.replay.dispatch import Pace
from kvstore.replay.engine import ExistingServer, Settings, run_replay
from kvstore.replay.faults import ReplayError, ServerSilent
from kvstore.replay.plan import first_requests
from kvstore.replay.report import Report
from kvstore.replay.sizing import ShardSize, SizingError, size_by_bytes, size_by_share
from kvstore.workload.formats import read_trace
from kvstore.workload.generate import generate_trace
from kvstore.workload.lines import TraceError
from kvstore.workload.profiles import PROFILES
from kvstore.workload.trace import Trace
from kvstore_client import ClientOptions

GENERATED = "gen:"
IN_FLIGHT_AT_MAX, IN_FLIGHT_PACED = 4, 64
MAX_WORKERS, MAX_IN_FLIGHT = 64, 1024
WIDTH = 110  # Of the table where no terminal sets one.
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")


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
        "  kvstore replay gen:chat --speed 10x --limit 500 --json -\n"
        "  kvstore replay trace.jsonl --server 10.0.0.5:7070 --admin 10.0.0.5:7071\n\n"
        "exit codes: 0 no wrong bytes, 1 wrong bytes or the server or a worker died, 2 bad arguments, 3 no server",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or gen:PROFILE")
    _add_load_flags(parser)
    _add_server_flags(parser)
    _add_worker_flags(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the figures as one JSON object; - for standard output"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="picture to write (default: kvstore-replay.png)")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load")
    group.add_argument("--limit", metavar="NUMBER", type=int, help="only the first requests of the trace")
    group.add_argument("--block-tokens", metavar="NUMBER", type=int, help="block size of a trace that leaves it open")
    add_load_flags(group)
    group.add_argument("--part-size", metavar="SIZE", default="4KiB", help="bytes of each block (default: %(default)s)")


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--capacity",
        metavar="SHARE|SIZE",
        help="of the server that is started: a share of the trace's distinct blocks, "
        "as 10%%, or a size, as 4GiB (default: 10%%)",
    )
    group.add_argument("--server", metavar="ADDRESS", help="use a server that runs already")
    group.add_argument("--admin", metavar="ADDRESS", default=ADMIN, help="its admin port (default: %(default)s)")


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the workers")
    group.add_argument("--prefill", metavar="NUMBER", type=int, default=1, help="prefill processes (default: 1)")
    group.add_argument("--decode", metavar="NUMBER", type=int, default=1, help="decode processes (default: 1)")
    group.add_argument(
        "--speed",
        metavar="SPEED",
        default="max",
        help="max, or a multiple of the trace's own time as 10x (default: max)",
    )
    group.add_argument(
        "--in-flight",
        metavar="NUMBER",
        type=int,
        help=f"most requests under way at once (default: {IN_FLIGHT_AT_MAX} at --speed max, else {IN_FLIGHT_PACED})",
    )
    group.add_argument(
        "--decode-share", metavar="SHARE", default="1.0", help="share of the requests that are decoded (default: all)"
    )
    group.add_argument(
        "--wait", metavar="TIME", default="2s", help="longest wait for blocks in flight (default: %(default)s)"
    )


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
    pace, crew, part_bytes = _pace(arguments), _crew(arguments), _part_bytes(arguments)
    wait_ms = round(duration_s(arguments.wait, "--wait") * 1000)
    capacity = _wanted(arguments)  # All that can be wrong without the trace comes before reading it.
    trace = _trace(arguments)
    shard = capacity if isinstance(capacity, ExistingServer) else _sized(capacity, trace, part_bytes)
    settings = Settings(shard=shard, part_bytes=part_bytes, crew=crew, pace=pace, wait_ms=wait_ms)
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


def _trace(arguments: argparse.Namespace) -> Trace:
    trace = _whole_trace(arguments)
    if arguments.limit is not None and arguments.limit < 1:
        raise CommandError(f"--limit: is {arguments.limit}, below 1")
    trace = first_requests(trace, arguments.limit)
    if not trace.accesses():
        raise CommandError(f"{arguments.trace}: no request fills a block of {trace.block_tokens} tokens")
    return trace


def _whole_trace(arguments: argparse.Namespace) -> Trace:
    try:
        if arguments.trace.startswith(GENERATED):
            name = arguments.trace.removeprefix(GENERATED)
            if name not in PROFILES:
                raise CommandError(f"TRACE: {arguments.trace!r} is not one of gen:{', gen:'.join(sorted(PROFILES))}")
            return generate_trace(PROFILES[name], seed=arguments.seed, rate=arguments.rate, seconds=arguments.seconds)
        if arguments.rate is not None or arguments.seconds is not None:
            raise CommandError("--rate and --seconds: shape a generated load, gen:PROFILE; use --limit for a file")
        return read_trace(arguments.trace, block_tokens=arguments.block_tokens)
    except TraceError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(f"--{error}") from None


def _pace(arguments: argparse.Namespace) -> Pace:
    speed = _speed(arguments.speed)
    default = IN_FLIGHT_AT_MAX if speed is None else IN_FLIGHT_PACED
    in_flight = default if arguments.in_flight is None else arguments.in_flight
    return Pace(
        in_flight=_count(in_flight, "--in-flight", MAX_IN_FLIGHT),
        speed=speed,
        decode_share=_share(arguments.decode_share, "--decode-share"),
    )


def _crew(arguments: argparse.Namespace) -> CrewSize:
    return CrewSize(
        prefill=_count(arguments.prefill, "--prefill", MAX_WORKERS),
        decode=_count(arguments.decode, "--decode", MAX_WORKERS),
    )


def _part_bytes(arguments: argparse.Namespace) -> int:
    part_bytes = _size(arguments.part_size, "--part-size")
    if part_bytes < 1:
        raise CommandError("--part-size: is 0, below 1")
    return part_bytes


@dataclass(frozen=True)
class _Capacity:
    """A capacity as the user gave it: a share of the trace's distinct blocks, or bytes."""

    share: float | None = None
    size_bytes: int = 0


def _wanted(arguments: argparse.Namespace) -> _Capacity | ExistingServer:
    if arguments.server is not None:
        if arguments.capacity is not None:
            raise CommandError("--capacity: is a running server's own affair; leave it out with --server")
        for address in (arguments.server, arguments.admin):
            ClientOptions(target=address)  # Checks the spelling.
        return ExistingServer(arguments.server, arguments.admin)
    text = arguments.capacity or "10%"
    if text.endswith("%") or "." in text:
        return _Capacity(share=_share(text, "--capacity"))
    return _Capacity(size_bytes=_size(text, "--capacity"))


def _sized(capacity: _Capacity, trace: Trace, part_bytes: int) -> ShardSize:
    try:
        if capacity.share is None:
            return size_by_bytes(capacity.size_bytes, part_bytes=part_bytes)
        return size_by_share(capacity.share, distinct_blocks=trace.distinct_blocks(), part_bytes=part_bytes)
    except SizingError as error:
        raise CommandError(str(error)) from None


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    match = _SPEED.fullmatch(text)
    speed = float(match[1]) if match else 0.0
    if not math.isfinite(speed) or speed <= 0:
        raise CommandError(f"--speed: {text!r} is neither max nor a multiple as 1x, 10x or 0.5x")
    return speed


def _size(text: str, flag: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise CommandError(f"{flag}: {error}") from None


def _share(text: str, flag: str) -> float:
    try:
        share = parse_ratio(text)
    except ValueError as error:
        raise CommandError(f"{flag}: {error}") from None
    if share > 1:
        raise CommandError(f"{flag}: {text} is above 100%")
    return share


def _count(value: int, flag: str, most: int) -> int:
    if not 1 <= value <= most:
        raise CommandError(f"{flag}: is {value}, outside 1..{most}")
    return value
