"""`kvstore put`: stores a file's bytes under a key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, check, reported
from kvstore.cli.connection import add_server_flags, connected
from kvstore.cli.key_args import add_key_flags, keys_of
from kvstore.cli.namespace_args import EXAMPLE, add_namespace_flags, namespace_spec
from kvstore_client import Kind, NamespaceSpec, PartState

MAX_VALUE_BYTES = 1 << 30


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "put",
        help="store a value",
        description="Stores a file's bytes. Blocks are write-once: a key that is stored already keeps its value.",
        epilog="examples:\n"
        "  kvstore put --text greeting hello.bin\n"
        "  echo hello | kvstore put --text greeting -\n"
        "  kvstore put --namespace-file ns.toml --tokens 1,2,3,4 kv.bin\n\n"
        "exit codes: 0 stored (or there already), 1 refused, 2 bad arguments, 3 no server\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_key_flags(parser)
    parser.add_argument("file", metavar="FILE", help="file with the value, - for standard input")
    add_namespace_flags(parser)
    add_server_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("put", lambda: _put(arguments))


def _put(arguments: argparse.Namespace) -> int:
    spec = namespace_spec(arguments)
    keys = keys_of(arguments, spec)
    values = _parts(_read(arguments.file), spec, len(keys))
    with connected(arguments) as client:
        done = client.namespace(spec).put(keys, values)
    check(done.failure)
    for state in done.states:
        if state not in (PartState.COMMITTED, PartState.PRESENT):
            raise CommandError(f"not stored: {PartState(state).name}", exit_codes.FAILED)
    print(f"stored {done.stored}, there already {done.present}")
    return exit_codes.OK


def _read(name: str) -> bytes:
    if name == "-":
        value = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1)
    else:
        with Path(name).open("rb") as file:
            value = file.read(MAX_VALUE_BYTES + 1)
    if len(value) > MAX_VALUE_BYTES:
        raise CommandError(f"{name}: is above {MAX_VALUE_BYTES} bytes")
    return value


def _parts(value: bytes, spec: NamespaceSpec, key_count: int) -> list[memoryview]:
    """Cuts a value into the parts of its keys. Raises CommandError where the sizes do not fit."""
    view = memoryview(value)
    if spec.kind is Kind.OPAQUE:
        if len(value) > spec.part_bytes:
            raise CommandError(f"FILE: has {len(value)} bytes (limit: part_bytes {spec.part_bytes})")
        return [view]
    count = key_count * spec.parts_per_block
    if len(value) != count * spec.part_bytes:
        raise CommandError(
            f"FILE: has {len(value)} bytes, not {count} parts of {spec.part_bytes} bytes = {count * spec.part_bytes}"
        )
    return [view[i * spec.part_bytes : (i + 1) * spec.part_bytes] for i in range(count)]
