"""A prompt as segments of text that nobody holds: only the ids of its full blocks are worked out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.workload.splitmix import mix
from kvstore.workload.trace import BlockIds, as_block_ids

_ROOT = 0x4B56
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens, told apart from every other by its seed."""

    seed: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Segments folded into chained block ids; extending one folds in the new segment only.

    Shapes: block_ids int64[full blocks], 63-bit ids, head first.
    """

    block_tokens: int
    tokens: int
    block_ids: BlockIds
    head: Segment | None
    parent_hash: int
    open_hash: int
    open_tokens: int

    @staticmethod
    def empty(block_tokens: int) -> Prompt:
        """Return the prompt that all chains of this block size start from."""
        return Prompt(
            block_tokens=block_tokens,
            tokens=0,
            block_ids=as_block_ids([]),
            head=None,
            parent_hash=_ROOT,
            open_hash=0,
            open_tokens=0,
        )

    def extended(self, segment: Segment) -> Prompt:
        """Return this prompt followed by the segment."""
        parent, open_hash, open_tokens = self.parent_hash, self.open_hash, self.open_tokens
        new_ids: list[int] = []
        position = 0
        while position < segment.tokens:
            step = min(self.block_tokens - open_tokens, segment.tokens - position)
            open_hash = mix(open_hash ^ mix(segment.seed * _SEED_STRIDE + position))
            position += step
            open_tokens += step
            if open_tokens == self.block_tokens:
                parent = mix(parent ^ open_hash)
                new_ids.append(parent >> 1)
                open_hash = open_tokens = 0
        return Prompt(
            block_tokens=self.block_tokens,
            tokens=self.tokens + segment.tokens,
            block_ids=_joined(self.block_ids, new_ids),
            head=self.head or segment,
            parent_hash=parent,
            open_hash=open_hash,
            open_tokens=open_tokens,
        )

    def head_only(self) -> Prompt:
        """Return the prompt of the first segment alone."""
        root = Prompt.empty(self.block_tokens)
        return root if self.head is None else root.extended(self.head)


def _joined(ids: BlockIds, new_ids: list[int]) -> BlockIds:
    if not new_ids:
        return ids
    joined = np.concatenate([ids, as_block_ids(new_ids)])
    joined.flags.writeable = False
    return joined
