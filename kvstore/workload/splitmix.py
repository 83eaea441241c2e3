"""splitmix64: a random stream that any language can repeat bit for bit.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def mix(word: int) -> int:
    """Scatter a non-negative integer over 64 bits: one splitmix64 step."""
    word = (word + GOLDEN_GAMMA) & MASK64
    word = ((word ^ (word >> 30)) * MULTIPLIER_1) & MASK64
    word = ((word ^ (word >> 27)) * MULTIPLIER_2) & MASK64
    return word ^ (word >> 31)


class SplitMix64:
    """A stream of draws from one seed; the order of calls is part of the result."""

    def __init__(self, seed: int) -> None:
        self._state = mix(seed)

    def uniform(self) -> float:
        """Draw from the open interval (0, 1)."""
        self._state = (self._state + GOLDEN_GAMMA) & MASK64
        return ((mix(self._state) >> 11) + 0.5) * 2.0**-53

    def exponential(self, mean: float) -> float:
        """Draw an exponential waiting time."""
        return -mean * math.log(self.uniform())

    def lognormal(self, median: float, sigma: float) -> float:
        """Draw a lognormal value by Box-Muller; takes two uniform draws."""
        radius = math.sqrt(-2 * math.log(self.uniform()))
        return median * math.exp(sigma * radius * math.cos(2 * math.pi * self.uniform()))

    def pareto(self, minimum: float, shape: float) -> float:
        """Draw from a Pareto distribution."""
        return float(minimum * self.uniform() ** (-1 / shape))

    def weighted_index(self, cumulative: Sequence[float]) -> int:
        """Draw an index with the weights whose running sums are given."""
        return min(bisect_left(cumulative, self.uniform() * cumulative[-1]), len(cumulative) - 1)
