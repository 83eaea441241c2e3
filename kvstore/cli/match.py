"""`kvstore match`: tells whether keys are stored."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import check, reported
from kvstore.cli.connection import add_server_flags, connected
from kvstore.cli.key_args import add_key_flags, keys_of
from kvstore.cli.namespace_args import EXAMPLE, add_namespace_flags, namespace_spec
from kvstore_client import BlockState, Coverage


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "match",
        help="tell whether keys are stored",
        description="Tells which blocks are stored. Reads no bytes and does not count as a use.",
        epilog="examples:\n"
        "  kvstore match --text greeting\n"
        "  kvstore match --namespace-file ns.toml --tokens @prompt.txt --json\n\n"
        "exit codes: 0 all stored, 1 some are not, 2 bad arguments, 3 no server\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_key_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_namespace_flags(parser)
    add_server_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("match", lambda: _match(arguments))


def _match(arguments: argparse.Namespace) -> int:
    spec = namespace_spec(arguments)
    keys = keys_of(arguments, spec)
    with connected(arguments) as client:
        found = client.namespace(spec).match(keys, coverage=Coverage.EACH)
    check(found.failure)
    states = [BlockState(state).name.lower() for state in found.states]
    if arguments.json:
        print(json.dumps({"blocks": len(keys), "prefix_blocks": found.prefix_blocks, "states": states}))
    else:
        for key, state in zip(keys, states, strict=True):
            print(f"{key.hex()}  {state}")
        print(f"{found.prefix_blocks} of {len(keys)} blocks from the start are stored")
    return exit_codes.OK if found.prefix_blocks == len(keys) else exit_codes.FAILED
