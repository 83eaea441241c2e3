"""Flags that say where the server is, and the client made of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.cli.command_errors import CommandError
from kvstore.config import parse_duration
from kvstore_client import Client, ClientOptions

SERVER, ADMIN = "127.0.0.1:7070", "127.0.0.1:7071"


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --server and --timeout."""
    parser.add_argument(
        "--server", metavar="ADDRESS", default=SERVER, help="host:port or unix:/path (default: %(default)s)"
    )
    add_timeout_flag(parser)


def add_timeout_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --timeout."""
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        default="5s",
        help="how long a call may take, as 500ms or 5s (default: %(default)s)",
    )


def timeout_ms(arguments: argparse.Namespace) -> int:
    """Returns --timeout in milliseconds. Raises CommandError."""
    milliseconds = round(duration_s(arguments.timeout, "--timeout") * 1000)
    if milliseconds < 1:
        raise CommandError("--timeout: must be longer than 0")
    return milliseconds


def duration_s(text: str, flag: str) -> float:
    """Returns a duration in seconds. Raises CommandError naming the flag."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise CommandError(f"{flag}: {error}") from None


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Client]:
    """Opens a client of --server whose calls take at most --timeout."""
    options = ClientOptions(
        target=arguments.server, default_deadline_ms=timeout_ms(arguments), name="kvstore command line"
    )
    with Client(options) as client:
        yield client
