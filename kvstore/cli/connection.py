"""Flags that say where the server is, and the client made of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.cli.command_errors import CommandError
from kvstore.config import parse_duration
from kvstore_client import Client, ClientOptions, InvalidArgument, TlsOptions

SERVER, ADMIN = "127.0.0.1:7070", "127.0.0.1:7071"
SYSTEM = "system"


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --server, --timeout and the flags of TLS."""
    parser.add_argument(
        "--server", metavar="ADDRESS", default=SERVER, help="host:port or unix:/path (default: %(default)s)"
    )
    add_timeout_flag(parser)
    add_tls_flags(parser)


def add_timeout_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --timeout."""
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        default="5s",
        help="how long a call may take, as 500ms or 5s (default: %(default)s)",
    )


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --tls-ca, --tls-cert, --tls-key and --tls-server-name; any of them asks for TLS."""
    group = parser.add_argument_group("TLS", "Used if any of these is given; a Unix socket stays plain.")
    group.add_argument(
        "--tls-ca",
        metavar="FILE",
        help=f"certificates of the server's authority, PEM; {SYSTEM} is this machine's roots (default: {SYSTEM})",
    )
    group.add_argument("--tls-cert", metavar="FILE", help="certificate to show the server, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    group.add_argument(
        "--tls-server-name", metavar="NAME", help="name in the server's certificate (default: host of the address)"
    )


def tls_options(arguments: argparse.Namespace) -> TlsOptions | None:
    """Returns what the flags of TLS ask for; None if there are none. Raises CommandError naming the flag, OSError."""
    given = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key, arguments.tls_server_name)
    if all(value is None for value in given):
        return None
    ca = None if arguments.tls_ca == SYSTEM else _read(arguments.tls_ca)
    try:
        return TlsOptions(
            ca=ca,
            cert=_read(arguments.tls_cert),
            key=_read(arguments.tls_key),
            server_name=arguments.tls_server_name,
        )
    except InvalidArgument as error:
        flag = "--" + error.field.replace(".", "-").replace("_", "-")
        raise CommandError(f"{flag}: {error.message}") from None


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


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
        target=arguments.server,
        default_deadline_ms=timeout_ms(arguments),
        name="kvstore command line",
        tls=tls_options(arguments),
    )
    with Client(options) as client:
        yield client
