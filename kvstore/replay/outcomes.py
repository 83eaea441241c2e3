"""What a worker tells of one request. Tuples of numbers, since a replay sends tens of thousands of them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

NOT_MEASURED = -1.0


class Delivery(NamedTuple):
    """What one read brought. `wrong_bytes` differ from what was written and yet came as a hit."""

    good_blocks: int = 0  # Leading blocks that came whole and are what was written.
    read_bytes: int = 0
    wrong_bytes: int = 0
    corrupt_blocks: int = 0  # Did not match their checksum: a miss.
    get_ms: float = NOT_MEASURED


class Prefilled(NamedTuple):
    """A request's prefill is done."""

    request: int
    prefix_hits: int
    block_hits: int
    waited_blocks: int  # Of the prefix hits, in flight when they were matched.
    delivery: Delivery
    stored_blocks: int
    refused_blocks: int
    written_bytes: int
    match_ms: float
    put_ms: float
    failures: tuple[str, ...]


class Decoded(NamedTuple):
    """A request's decode is done."""

    request: int
    asked_blocks: int
    delivery: Delivery
    failures: tuple[str, ...]


class Broken(NamedTuple):
    """A worker cannot go on."""

    reason: str


Outcome: TypeAlias = "Prefilled | Decoded | Broken"
