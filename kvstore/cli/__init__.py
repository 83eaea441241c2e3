"""The command `kvstore`: one module a subcommand, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from kvstore.cli import exit_codes

COMMANDS = ("serve", "put", "get", "match", "explain", "stats", "gen", "replay")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs one subcommand; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="kvstore", description="KV Commons: the KV-cache block store that a whole LLM inference fleet shares."
    )
    parser.add_argument("--version", action="version", version=f"kvcommons {version('kvcommons')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    # One command needs no other's imports; help and misspellings need them all.
    names = [name for name in COMMANDS if given[:1] == [name]] or COMMANDS
    modules = {name: import_module(f"kvstore.cli.{name}") for name in names}
    for module in modules.values():
        module.add_parser(commands)
    chosen = parser.parse_args(given)
    try:
        return int(modules[chosen.command].run(chosen))
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # The reader of our output has gone; that is its right.
        sys.stderr.close()
        return exit_codes.OK
