"""How a subcommand fails: one line on stderr and an exit code, never a traceback for what a user can bring about."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from kvstore.cli import exit_codes
from kvstore_wire.errors import InvalidArgument, KvStoreError, NamespaceMismatch, PeerError, Unreachable


class CommandError(Exception):
    """A subcommand cannot do what it was asked. `exit_code` is what it ends with."""

    def __init__(self, message: str, exit_code: int = exit_codes.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def reported(command: str, work: Callable[[], int]) -> int:
    """Runs a subcommand's work and turns what a user can bring about into a line and an exit code."""
    logging.getLogger("kvstore_client").addHandler(logging.NullHandler())  # Its errors are told here, once.
    try:
        return work()
    except BrokenPipeError:
        raise
    except CommandError as error:
        message, code = str(error), error.exit_code
    except KvStoreError as error:
        message, code = _told(error), exit_code_of(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        wrong_path = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError))
        message = f"{where}{error.strerror or error}"
        code = exit_codes.USAGE if wrong_path else exit_codes.FAILED
    print(f"kvstore {command}: {' '.join(message.split())}", file=sys.stderr)
    return code


def exit_code_of(error: KvStoreError) -> int:
    """Returns the exit code for an error of a call."""
    if isinstance(error, PeerError):
        return exit_codes.UNREACHABLE
    return exit_codes.USAGE if isinstance(error, (InvalidArgument, NamespaceMismatch)) else exit_codes.FAILED


def _told(error: KvStoreError) -> str:
    """Returns an error in one sentence; of what gRPC says of a lost server only the reason is kept."""
    if not isinstance(error, Unreachable):
        return str(error)
    address, _, reason = error.message.partition(" answered ")
    return f"no server answers at {address}: {reason.rsplit(': ', 1)[-1]}" if reason else error.message


def check(failure: KvStoreError | None) -> None:
    """Raises the failure that an answer carries."""
    if failure is not None:
        raise failure
