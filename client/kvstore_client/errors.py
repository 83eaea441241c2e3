"""Errors that only the client makes. They never cross the wire, so they have no reason number of their own.

Each derives from a concrete error of the contract, not from a family: the contract's table is made from the families'
direct children.
"""

from __future__ import annotations

from kvstore_wire.errors import (
    CallerError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvStoreError,
    LeaseExpired,
    TableFull,
    UnknownNamespace,
    UnknownSession,
    Unreachable,
)


class QueueFull(TableFull):
    """The client's own queue has no room for the bytes of this call: it was dropped."""


class ClientClosed(InvalidArgument):
    """The client was closed."""


class ForkedClient(InvalidArgument):
    """The client belongs to the parent process: make a new one, in a process that gRPC can run in."""


class Cancelled(DeadlineExceeded):
    """The caller cancelled the ticket before it was done."""


class PathDown(Unreachable):
    """One way to the shard does not work; another may. `sent`: whether the shard may have seen the call."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class MalformedAnswer(Internal):
    """The shard's answer does not fit the question: wrong number of items, bytes or checksums."""


# Caller errors that a restart of the shard or the passing of time brings about, without a fault of the caller.
_ENDED = (UnknownSession, UnknownNamespace, LeaseExpired)


def is_raised(error: KvStoreError) -> bool:
    """Tells whether a verb raises `error` (the caller must change the call) instead of answering with it."""
    return isinstance(error, CallerError) and not isinstance(error, _ENDED)
