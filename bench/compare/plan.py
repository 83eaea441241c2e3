"""What one run measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.compare.peers import Row

# Sizes whose single gets are timed one by one.
LATENCY_SIZES = (64 << 10, 2 << 20)
UNCOUNTED_CALLS = 20


@dataclass(frozen=True)
class Plan:
    """Rows, sizes and batches; `rounds` passes over the set for each cell; `latency_calls` single gets that count."""

    rows: tuple[Row, ...]
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    latency_calls: int
    venvs: Path

    def put_rounds(self, row: Row) -> int:
        """How often a row's client writes the whole set."""
        return len(self.batches) * (self.rounds + row.warm_up_rounds)
