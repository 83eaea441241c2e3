"""The block size of a trace that does not state it, from how many full blocks its prompts have."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.workload.lines import MAX_TOKENS


@dataclass(frozen=True, slots=True)
class BlockSizeBounds:
    """The block sizes, in tokens, that agree with every prompt seen so far. Ends included."""

    low_tokens: int = 1
    high_tokens: int = MAX_TOKENS

    def narrowed(self, *, input_tokens: int, full_blocks: int) -> BlockSizeBounds:
        """Return the sizes for which input_tokens // size == full_blocks as well."""
        low = input_tokens // (full_blocks + 1) + 1
        high = input_tokens // full_blocks if full_blocks else MAX_TOKENS
        return BlockSizeBounds(max(self.low_tokens, low), min(self.high_tokens, high))

    def is_empty(self) -> bool:
        """Return whether no size agrees with all prompts."""
        return self.low_tokens > self.high_tokens

    def only_size(self) -> int | None:
        """Return the one size left, or the one power of two left, or None where several are."""
        if self.low_tokens == self.high_tokens:
            return self.low_tokens
        powers = [1 << bit for bit in range(MAX_TOKENS.bit_length()) if self.low_tokens <= 1 << bit <= self.high_tokens]
        return powers[0] if len(powers) == 1 else None
