"""The command `kvstore`: one module a subcommand, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvstore.cli import exit_codes

COMMANDS = ("serve", "put", "get", "match", "explain", "stats", "tier", "gen", "replay")

# What the extra "server" brings and the client's dependencies do not.
SERVER_PACKAGES = frozenset(("uvloop", "rich", "matplotlib", "tomli", "grpc_health", "grpc_reflection"))


class _ExactParser(argparse.ArgumentParser):
    """Takes no flag that is cut short: that is a flag misspelt."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"allow_abbrev": False})


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs one subcommand; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="kvstore", description="KV Commons: the KV-cache block store that a whole LLM inference fleet shares."
    )
    parser.add_argument("--version", action="version", version=f"kvcommons {version('kvcommons')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_ExactParser)
    given = sys.argv[1:] if arguments is None else list(arguments)
    # One command needs no other's imports; help and misspellings need them all.
    names = [name for name in COMMANDS if given[:1] == [name]] or COMMANDS
    try:
        modules = {name: import_module(f"kvstore.cli.{name}") for name in names}
        for module in modules.values():
            module.add_parser(commands)
        chosen, unknown = parser.parse_known_args(given)
        chosen.unknown = unknown
        if unknown and chosen.command != "serve":  # There they are faults of the configuration.
            commands.choices[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(modules[chosen.command].run(chosen))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_PACKAGES:
            raise
        print(f"kvstore: {error.name} is not installed: pip install 'kvcommons[server]'", file=sys.stderr)
        return exit_codes.USAGE
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # The reader of our output has gone; that is its right.
        sys.stderr.close()
        return exit_codes.OK
