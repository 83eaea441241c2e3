"""`kvstore explain`: why keys are found or not - what a namespace and tokens hash to, and what the server has of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, check, reported
from kvstore.cli.connection import add_server_flags, connected
from kvstore.cli.key_args import read_tokens, token_keys
from kvstore.cli.namespace_args import EXAMPLE, add_namespace_flags, namespace_spec, read_namespace
from kvstore_client import ExplainResult, NamespaceSpec, root_key

MAX_BLOCKS = 32_768  # What a server explains in one call unless it is told otherwise.


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="show what a namespace and tokens hash to, and what the server has of it",
        description="Shows the canonical fields of a namespace, its digest, its root key, the key and state of each "
        "block of a prompt, and the first block that is missing. Two processes share blocks exactly when they agree "
        "on all of it; --against names the first field where two namespace files differ.",
        epilog="examples:\n"
        "  kvstore explain --namespace-file ns.toml --tokens @prompt.txt\n"
        "  kvstore explain --namespace-file ns.toml --tokens 1,2,3,4 --offline\n"
        "  kvstore explain --namespace-file ns.toml --against other.toml\n\n"
        "exit codes: 0 all blocks stored (or none asked for, or the two files agree), 1 a block is missing or the "
        "files differ,\n2 bad arguments, 3 no server\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", metavar="TOKENS", help="a prompt: 1,2,3 or @FILE with numbers in it")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--offline", action="store_true", help="ask no server: only fields, digests and keys")
    where.add_argument(
        "--against", metavar="TOML", type=Path, help="compare with another namespace file; asks no server"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_namespace_flags(parser)
    add_server_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("explain", lambda: _explain(arguments))


@dataclass(frozen=True)
class _Explanation:
    """What is known here, and what the server said, if it was asked."""

    spec: NamespaceSpec
    keys: list[bytes]
    answer: ExplainResult | None

    @property
    def first_missing(self) -> int | None:
        return None if self.answer is None else self.answer.first_missing

    def to_json(self) -> dict[str, object]:
        blocks: list[dict[str, object]] = [{"key": key.hex()} for key in self.keys]
        if self.answer is not None:
            for row, block in zip(blocks, self.answer.blocks, strict=True):
                row |= {
                    "state": block.state.name.lower(),
                    "parts_present": block.parts_present,
                    "parts_total": block.parts_total,
                    "leases": block.leases,
                    "age_ms": block.age_ms,
                    "idle_ms": block.idle_ms,
                    "note": block.note,
                }
        return {
            "name": self.spec.name,
            "fields": {name: value for name, value, _ in self.spec.canonical_fields()},
            "digest": self.spec.digest.hex(),
            "root": None if self.spec.geometry is None else root_key(self.spec).hex(),
            "blocks": blocks,
            "first_missing": self.first_missing,
        }


def _explain(arguments: argparse.Namespace) -> int:
    spec = namespace_spec(arguments)
    if arguments.against is not None:
        return _compare(spec, read_namespace(arguments.against), arguments.json)
    tokens = None if arguments.tokens is None else read_tokens(arguments.tokens, "--tokens")
    keys = [] if tokens is None else token_keys(spec, tokens)
    if len(keys) > MAX_BLOCKS:
        raise CommandError(f"--tokens: {len(keys)} blocks are too many to explain (limit: {MAX_BLOCKS})")
    explanation = _Explanation(spec, keys, None if arguments.offline else _ask(arguments, spec, keys))
    if arguments.json:
        print(json.dumps(explanation.to_json()))
    else:
        _print(explanation, None if tokens is None else len(tokens))
    return exit_codes.OK if explanation.first_missing is None else exit_codes.FAILED


def _ask(arguments: argparse.Namespace, spec: NamespaceSpec, keys: list[bytes]) -> ExplainResult:
    with connected(arguments) as client:
        answer = client.namespace(spec).explain(keys)
    check(answer.failure)
    if answer.digest != spec.digest:
        raise CommandError(f"the server's digest is {answer.digest.hex()}, this side's {spec.digest.hex()}", 1)
    return answer


def _print(explanation: _Explanation, token_count: int | None) -> None:
    spec = explanation.spec
    print(f"namespace {spec.name!r} (the name is not hashed)")
    for name, value, _ in spec.canonical_fields():
        print(f"  {name:<24} {value}")
    print(f"digest  {spec.digest.hex()}")
    if spec.geometry is not None:
        print(f"root    {root_key(spec).hex()}")
    if token_count is None or spec.geometry is None:
        return
    rest = token_count % spec.geometry.block_tokens
    print(f"blocks  {len(explanation.keys)} whole ones of {spec.geometry.block_tokens} tokens; {rest} tokens left over")
    for i, key in enumerate(explanation.keys):
        print(f"  {i:>5}  {key.hex()}  {_state(explanation, i)}".rstrip())
    if explanation.answer is not None:
        missing = explanation.first_missing
        print("all blocks are stored" if missing is None else f"first missing block: {missing}")


def _state(explanation: _Explanation, index: int) -> str:
    if explanation.answer is None:
        return ""
    block = explanation.answer.blocks[index]
    note = f"  {block.note}" if block.note else ""
    return f"{block.state.name.lower().replace('_', ' ')}  {block.parts_present}/{block.parts_total} parts{note}"


def _compare(spec: NamespaceSpec, other: NamespaceSpec, as_json: bool) -> int:
    difference = spec.difference(other)
    if as_json:
        names = ("field", "value", "against")
        found = None if difference is None else dict(zip(names, difference, strict=True))
        digests = {"digest": spec.digest.hex(), "against_digest": other.digest.hex()}
        print(json.dumps({**digests, "difference": found}))
    elif difference is None:
        print(f"the same namespace: both digests are {spec.digest.hex()}")
    else:
        field, own, theirs = difference
        print(f"digest   {spec.digest.hex()}\nagainst  {other.digest.hex()}")
        print(f"first difference: {field}: {own!r} here, {theirs!r} there")
    return exit_codes.OK if difference is None else exit_codes.FAILED
