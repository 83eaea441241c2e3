"""`kvstore gen`: prints a synthetic load as JSON lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, reported
from kvstore.workload.generate import generate, write_jsonl
from kvstore.workload.profiles import PROFILES


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "gen",
        help="print a synthetic load",
        description="Prints the requests of a synthetic load, one JSON object a line, for kvstore replay. The same "
        "arguments give the same lines everywhere.",
        epilog="examples:\n"
        "  kvstore gen api --seconds 60 -o api.jsonl\n"
        "  kvstore gen chat --rate 0.5 --seed 7 | gzip > chat.jsonl.gz",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", metavar="PROFILE", choices=sorted(PROFILES), help=", ".join(sorted(PROFILES)))
    add_load_flags(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to write (default: standard output)")


def add_load_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags that shape a generated load."""
    parser.add_argument("--seed", metavar="NUMBER", type=int, default=1, help="start of the random stream (default: 1)")
    parser.add_argument("--rate", metavar="NUMBER", type=float, help="new sessions a second (default: the profile's)")
    parser.add_argument("--seconds", metavar="NUMBER", type=float, help="length of the load (default: the profile's)")


def run(arguments: argparse.Namespace) -> int:
    return reported("gen", lambda: _gen(arguments))


def _gen(arguments: argparse.Namespace) -> int:
    profile = PROFILES[arguments.profile]
    try:
        requests = generate(profile, seed=arguments.seed, rate=arguments.rate, seconds=arguments.seconds)
        first = next(requests, None)
    except ValueError as error:
        raise CommandError(f"--{error}") from None
    if first is None:
        raise CommandError("--seconds: no session arrives in so short a time at this rate")
    stream = sys.stdout if arguments.output is None else arguments.output.open("w")
    try:
        write_jsonl([first], stream)
        write_jsonl(requests, stream)
        stream.flush()
    finally:
        if stream is not sys.stdout:
            stream.close()
    return exit_codes.OK
