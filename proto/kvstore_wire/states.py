"""States and choices of the contract as enums, for both sides. Values are those of the wire (see types.proto)."""

from __future__ import annotations

from enum import IntEnum


class Coverage(IntEnum):
    """How far a batch goes."""

    PREFIX = 0
    EACH = 1


class BlockState(IntEnum):
    """State of one block in an answer."""

    MISSING = 0
    HOT = 1
    WARM = 2
    IN_FLIGHT = 3
    BUSY = 4
    BEYOND = 5


class PartState(IntEnum):
    """State of one part in the answer to a write."""

    REFUSED = 0
    CREATED = 1
    PRESENT = 2
    IN_FLIGHT = 3
    COMMITTED = 4
    FULL = 5
    QUOTA = 6
    TOO_LARGE = 7
    DRAINING = 8
    BEYOND = 9
    UNFILLED = 10
    LOST = 11


class DeleteState(IntEnum):
    """What became of one key of a Delete."""

    NOT_FOUND = 0
    DELETED = 1
    DEFERRED = 2
