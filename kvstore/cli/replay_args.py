"""What `kvstore replay` is told: its flags, and the trace and settings that they describe."""

from __future__ import annotations

import argparse
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvstore.cli.command_errors import CommandError
from kvstore.cli.connection import ADMIN, add_tls_flags, duration_s, tls_options
from kvstore.cli.gen import add_load_flags
from kvstore.config import format_size, parse_ratio, parse_size
from kvstore.config.schema import HOT_POLICIES
from kvstore.replay.crew import CrewSize
from kvstore.replay.dispatch import Pace
from kvstore.replay.engine import ExistingServer, Settings
from kvstore.replay.plan import first_requests
from kvstore.replay.sizing import ShardSize, SizingError, size_by_bytes, size_by_share
from kvstore.replay.warm import (
    MAX_BUDGET_BYTES,
    MIN_BUDGET_BYTES,
    WarmOrder,
    WarmSize,
    temporary_parent,
    warm_by_bytes,
    warm_by_share,
)
from kvstore.workload.formats import read_trace
from kvstore.workload.generate import generate_trace
from kvstore.workload.hints import Sayings
from kvstore.workload.lines import TraceError
from kvstore.workload.profiles import PROFILES
from kvstore.workload.trace import Trace
from kvstore_client import ClientOptions

GENERATED = "gen:"
IN_FLIGHT_AT_MAX, IN_FLIGHT_PACED = 4, 64  # At full speed more only wait for each other: measured on two cores.
MAX_WORKERS, MAX_IN_FLIGHT = 64, 1024
_HINT_LIMITS = {
    "over": (0.0, 1.0),
    "wrong": (0.0, 0.9),
    "sigma": (0.0, 10.0),
    "bias": (0.001, 1000.0),
    "tool": (0.0, 1.0),
    "flip": (0.0, 1.0),
    "lie": (0.0, 1.0),
}
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds TRACE and all flags but those of the output."""
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or gen:PROFILE")
    _add_load_flags(parser)
    _add_server_flags(parser)
    _add_worker_flags(parser)
    add_tls_flags(parser)


def trace_and_settings(arguments: argparse.Namespace) -> tuple[Trace, Settings]:
    """Returns what to replay and how. Raises CommandError, OSError; whatever needs no trace is checked before it."""
    pace, crew, part_bytes = _pace(arguments), _crew(arguments), _part_bytes(arguments)
    wait_ms = round(duration_s(arguments.wait, "--wait") * 1000)
    wanted, warm = _wanted(arguments), _wanted_warm(arguments)
    sayings = None if arguments.hints is None else _sayings(arguments.hints, pace)
    if arguments.policy is not None and arguments.server is not None:
        raise CommandError("--policy: is a running server's own affair; leave it out with --server")
    trace = _trace(arguments)
    shard = wanted if isinstance(wanted, ExistingServer) else _sized(wanted, trace, part_bytes)
    order = None if warm is None else _ordered(warm, trace, part_bytes)
    return trace, Settings(
        shard=shard,
        part_bytes=part_bytes,
        crew=crew,
        pace=pace,
        wait_ms=wait_ms,
        warm=order,
        policy=arguments.policy,
        sayings=sayings,
    )


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
    group.add_argument(
        "--warm",
        metavar="SHARE|SIZE",
        help="give it a warm tier on disk: a share of the trace's distinct blocks, or a size (default: none)",
    )
    group.add_argument(
        "--warm-path",
        metavar="DIR",
        help="where the warm tier lies, and stays (default: a temporary folder in $TMPDIR, or else in the working "
        "directory, removed at the end)",
    )
    group.add_argument(
        "--write-budget", metavar="SIZE", help="bytes a second that may be written to disk on average (default: all)"
    )
    names = ", ".join(HOT_POLICIES)
    group.add_argument("--policy", choices=HOT_POLICIES, help=f"which blocks it evicts first: {names}")
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
        "--hints",
        metavar="NAME=NUMBER,...",
        help="callers say what their sessions do next: over=SHARE of the ends, with wrong=SHARE of these false; "
        "sigma=ERROR of promised times (0: exact), bias=FACTOR on them; or tool=1 for tool calls alone, flip=SHARE of "
        "them wrong; lie=SHARE of the ends that promise a return",
    )
    group.add_argument(
        "--wait", metavar="TIME", default="2s", help="longest wait for blocks in flight (default: %(default)s)"
    )


def _sayings(text: str, pace: Pace) -> Sayings:
    """Returns what callers are to say. Raises CommandError."""
    given: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in _HINT_LIMITS:
            raise CommandError(f"--hints: {name!r} is not one of {', '.join(_HINT_LIMITS)}")
        try:
            number = float(value)
        except ValueError:
            raise CommandError(f"--hints: {item!r} is not {name}=NUMBER") from None
        low, high = _HINT_LIMITS[name]
        if not low <= number <= high:
            raise CommandError(f"--hints: {name} is {value}, outside {low:g}..{high:g}")
        given[name] = number
    is_tool = bool(given.pop("tool", 0))
    if is_tool:
        given["sigma"] = 0.0
    if "sigma" in given and pace.speed is None:
        raise CommandError("--hints: promises are of the trace's own time; give a --speed, as 10x")
    return Sayings(tool=is_tool, **given)


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
    tls = tls_options(arguments)
    if arguments.server is not None:
        if arguments.capacity is not None:
            raise CommandError("--capacity: is a running server's own affair; leave it out with --server")
        for address in (arguments.server, arguments.admin):
            ClientOptions(target=address)  # Checks the spelling.
        return ExistingServer(arguments.server, arguments.admin, tls)
    if tls is not None:
        raise CommandError("--tls-...: are for a running server; name it with --server")
    return _capacity(arguments.capacity or "10%", "--capacity")


def _capacity(text: str, flag: str) -> _Capacity:
    if text.endswith("%") or "." in text:
        return _Capacity(share=_share(text, flag))
    return _Capacity(size_bytes=_size(text, flag))


@dataclass(frozen=True)
class _Warm:
    """The warm tier as the user asked for it."""

    capacity: _Capacity
    path: Path | None
    budget_bytes_s: int | None


def _wanted_warm(arguments: argparse.Namespace) -> _Warm | None:
    given = {
        "--warm": arguments.warm,
        "--warm-path": arguments.warm_path,
        "--write-budget": arguments.write_budget,
    }
    flag = next((flag for flag, value in given.items() if value is not None), None)
    if flag is None:
        return None
    if arguments.server is not None:
        raise CommandError(f"{flag}: is a running server's own affair; leave it out with --server")
    if arguments.warm is None:
        raise CommandError(f"{flag}: is of a warm tier; ask for one with --warm")
    path = None if arguments.warm_path is None else Path(arguments.warm_path).absolute()
    budget = None if arguments.write_budget is None else _budget(arguments.write_budget)
    return _Warm(_capacity(arguments.warm, "--warm"), path, budget)


def _budget(text: str) -> int:
    budget_bytes_s = _size(text, "--write-budget")
    if not MIN_BUDGET_BYTES <= budget_bytes_s <= MAX_BUDGET_BYTES:
        most, least = format_size(MAX_BUDGET_BYTES), format_size(MIN_BUDGET_BYTES)
        raise CommandError(f"--write-budget: {text} is outside {least}..{most} a second")
    return budget_bytes_s


def _ordered(warm: _Warm, trace: Trace, part_bytes: int) -> WarmOrder:
    order = WarmOrder(_warm_size(warm.capacity, trace, part_bytes), warm.path, warm.budget_bytes_s)
    if warm.path is None:
        parent = temporary_parent()
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < order.size.capacity_bytes:
            raise CommandError(
                f"--warm: takes {order.size.capacity_bytes} bytes, {parent} has {free_bytes} free; "
                "name another place with --warm-path or $TMPDIR"
            )
    return order


def _warm_size(capacity: _Capacity, trace: Trace, part_bytes: int) -> WarmSize:
    try:
        if capacity.share is None:
            return warm_by_bytes(capacity.size_bytes, part_bytes=part_bytes)
        return warm_by_share(capacity.share, distinct_blocks=trace.distinct_blocks(), part_bytes=part_bytes)
    except SizingError as error:
        raise CommandError(str(error)) from None


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
