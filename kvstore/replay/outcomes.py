"""What a worker tells of one request. Tuples of numbers, since a replay sends tens of thousands of them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvstore_client import BlockState

NOT_MEASURED = -1.0
_HOT = bytes((BlockState.HOT,))


class Delivery(NamedTuple):
    """What one read brought. `wrong_bytes` differ from what was written and yet came as a hit."""

    good_blocks: int = 0  # Leading blocks that came whole and are what was written.
    read_bytes: int = 0
    wrong_bytes: int = 0
    corrupt_blocks: int = 0  # Did not match their checksum: a miss.
    get_ms: float = NOT_MEASURED


class FromDisk(NamedTuple):
    """What became of the blocks that Match said to be WARM. All but `beyond_blocks` speak of the leading run."""

    hits: int = 0  # Read and verified.
    late_blocks: int = 0  # Not in memory when the wait was over.
    busy_blocks: int = 0  # Not leased: the leased share was used up.
    gone_blocks: int = 0  # Not there any more: given up meanwhile, or damaged.
    beyond_blocks: int = 0  # Behind a block that is in no tier, and so of no use to the request.

    @staticmethod
    def of(matched: bytes, leased: bytes, *, good_blocks: int) -> FromDisk:
        """`matched`: states of the whole chain; `leased`: of its leading run, as Acquire answered.

        Why the first block did not come is taken as why those behind it did not.
        """
        warm = [i for i, state in enumerate(matched) if state == BlockState.WARM]
        end = len(leased) - len(leased.lstrip(_HOT))
        why = leased[end] if end < len(leased) else BlockState.HOT
        missed = sum(end <= i < len(leased) for i in warm)
        late, busy = why in (BlockState.WARM, BlockState.IN_FLIGHT), why == BlockState.BUSY
        return FromDisk(
            hits=sum(i < good_blocks for i in warm),
            late_blocks=missed if late else 0,
            busy_blocks=missed if busy else 0,
            gone_blocks=0 if late or busy else missed,
            beyond_blocks=sum(i >= len(leased) for i in warm),
        )

    def plus(self, other: FromDisk) -> FromDisk:
        """Returns the sums."""
        return FromDisk(*(mine + its for mine, its in zip(self, other, strict=True)))


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
    from_disk: FromDisk = FromDisk()


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
