"""`kvstore get`: writes a stored value to a file or standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, check, reported
from kvstore.cli.connection import add_server_flags, connected, duration_s, timeout_ms
from kvstore.cli.key_args import add_key_flags, keys_of
from kvstore.cli.namespace_args import EXAMPLE, add_namespace_flags, namespace_spec
from kvstore_client import BlockState, GetResult


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "get",
        help="read a value",
        description="Reads a value, checks it against its checksum and writes its bytes. With --tokens the bytes of "
        "all blocks follow one another. An empty value is a success that writes nothing; a missing one is exit code 1.",
        epilog="examples:\n"
        "  kvstore get --text greeting\n"
        "  kvstore get --text greeting -o hello.bin || echo 'not there'\n"
        "  kvstore get --namespace-file ns.toml --tokens 1,2,3,4 -o kv.bin\n\n"
        "exit codes: 0 read, 1 missing, 2 bad arguments, 3 no server\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_key_flags(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write (default: standard output)")
    parser.add_argument(
        "--wait", metavar="TIME", default="0s", help="how long to wait for a value that is being written"
    )
    add_namespace_flags(parser)
    add_server_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("get", lambda: _get(arguments))


def _get(arguments: argparse.Namespace) -> int:
    spec = namespace_spec(arguments)
    keys = keys_of(arguments, spec)
    wait_ms = round(duration_s(arguments.wait, "--wait") * 1000)
    deadline_ms = timeout_ms(arguments) + 2 * wait_ms  # A client waits for at most a part of its deadline.
    with connected(arguments) as client:
        got = client.namespace(spec).get(keys, wait_ms=wait_ms, deadline_ms=deadline_ms)
    check(got.failure)
    _check_found(got)
    _write(got, arguments.output)
    if not got.size_bytes:
        print("kvstore get: found, the value is empty", file=sys.stderr)
    return exit_codes.OK


def _check_found(got: GetResult) -> None:
    if got.corrupt_blocks:
        raise CommandError("damaged: the bytes did not match their checksum", exit_codes.FAILED)
    if got.prefix_blocks < len(got.states):
        state = BlockState(got.states[got.prefix_blocks])
        which = f"block {got.prefix_blocks} of {len(got.states)}: " if len(got.states) > 1 else ""
        raise CommandError(f"{which}{state.name.lower().replace('_', ' ')}; nothing was written", exit_codes.FAILED)


def _write(got: GetResult, output: str | None) -> None:
    values = [value for value in got.values or () if value is not None]
    if output is None:
        sys.stdout.buffer.writelines(values)
        sys.stdout.buffer.flush()
        return
    with Path(output).open("wb") as file:
        file.writelines(values)
