"""Keys on the command line: hex, text that is hashed, or tokens."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from kvstore.cli.command_errors import CommandError
from kvstore_client import Kind, NamespaceSpec, chain_keys
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.limits import MAX_KEY_BYTES, MIN_KEY_BYTES

KEY_HELP = (
    f"the key: hex of {MIN_KEY_BYTES}-{MAX_KEY_BYTES} bytes; with --text any text, whose key is its SHA-256; with "
    "--tokens numbers with commas between, or @FILE that holds them: the chain of their whole blocks"
)
MAX_TOKEN_FILE_BYTES = 64 << 20


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Adds KEY and the flags that say how it is meant."""
    parser.add_argument("key", metavar="KEY", help=KEY_HELP)
    meaning = parser.add_mutually_exclusive_group()
    meaning.add_argument("--text", action="store_true", help="KEY is text; its UTF-8 bytes are hashed with SHA-256")
    meaning.add_argument(
        "--tokens", action="store_true", help="KEY is tokens of a prompt (namespaces of kind kv, see --namespace-file)"
    )


def keys_of(arguments: argparse.Namespace, spec: NamespaceSpec) -> list[bytes]:
    """Returns the keys meant, one for --text and hex. Raises CommandError."""
    if arguments.tokens:
        return token_keys(spec, read_tokens(arguments.key, "KEY"))
    if arguments.text:
        return [hashlib.sha256(arguments.key.encode("utf-8", "surrogateescape")).digest()]
    return [_hex_key(arguments.key)]


def token_keys(spec: NamespaceSpec, tokens: list[int]) -> list[bytes]:
    """Returns the chain of a prompt's whole blocks. Raises CommandError."""
    if spec.kind is not Kind.KV or spec.geometry is None:
        raise CommandError("--tokens: the namespace is opaque, only namespaces of kind kv have token keys")
    try:
        keys = chain_keys(spec, tokens)
    except InvalidArgument as error:
        raise CommandError(str(error)) from None
    if not keys:
        raise CommandError(f"--tokens: {len(tokens)} tokens fill no block of {spec.geometry.block_tokens}")
    return keys


def read_tokens(text: str, name: str) -> list[int]:
    """Returns the tokens that text, or the file after an @, lists. Raises CommandError, OSError."""
    if text.startswith("@"):
        with Path(text[1:]).open("rb") as file:
            raw = file.read(MAX_TOKEN_FILE_BYTES + 1)
        if len(raw) > MAX_TOKEN_FILE_BYTES:
            raise CommandError(f"{name}: {text[1:]} is above {MAX_TOKEN_FILE_BYTES} bytes")
        text = raw.decode("ascii", "replace").strip().strip("[]")
    return [_token(piece, name) for piece in text.replace(",", " ").split()]


def _token(piece: str, name: str) -> int:
    try:
        return int(piece)
    except ValueError:
        raise CommandError(f"{name}: {piece[:40]!r} is not a token number; write 1,2,3 or @FILE") from None


def _hex_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise CommandError(f"KEY: {text[:80]!r} is not hex; use --text for a key of any text") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise CommandError(f"KEY: has {len(key)} bytes (limit: {MIN_KEY_BYTES}-{MAX_KEY_BYTES})")
    return key
