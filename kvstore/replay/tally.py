"""What came of all requests so far, added up."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.replay.outcomes import Decoded, Delivery, FromDisk, Prefilled
from kvstore.replay.plan import Plan

MAX_FAILURE_TEXTS = 100  # Different texts kept; each is counted.


@dataclass(eq=False)
class Tally:
    """Sums of a replay, and hits by request for the curve. Latencies in milliseconds."""

    plan: Plan
    prefilled: int = 0
    decoded: int = 0
    accesses: int = 0
    prefix_hits: int = 0
    block_hits: int = 0
    waited_blocks: int = 0
    from_disk: FromDisk = field(default_factory=FromDisk)
    stored_blocks: int = 0
    refused_blocks: int = 0
    decode_asked_blocks: int = 0
    decode_good_blocks: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    wrong_bytes: int = 0
    corrupt_blocks: int = 0
    failed_calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    match_ms: array[float] = field(default_factory=lambda: array("d"))
    get_ms: array[float] = field(default_factory=lambda: array("d"))
    put_ms: array[float] = field(default_factory=lambda: array("d"))
    hits_by_request: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.hits_by_request = np.zeros(self.plan.request_count, np.int64)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of look-ups so far, 0..1."""
        return self.prefix_hits / max(1, self.accesses)

    @property
    def memory_hit_rate(self) -> float:
        """What of the prefix hit rate was in memory, or on its way to it, when it was matched."""
        return (self.prefix_hits - self.from_disk.hits) / max(1, self.accesses)

    @property
    def disk_hit_rate(self) -> float:
        """What of the prefix hit rate was on disk only."""
        return self.from_disk.hits / max(1, self.accesses)

    @property
    def block_hit_rate(self) -> float:
        return self.block_hits / max(1, self.accesses)

    def add(self, outcome: Prefilled | Decoded) -> None:
        """Adds one request's outcome."""
        if isinstance(outcome, Prefilled):
            self._add_prefilled(outcome)
        else:
            self.decoded += 1
            self.decode_asked_blocks += outcome.asked_blocks
            self.decode_good_blocks += outcome.delivery.good_blocks
        self._add_delivery(outcome.delivery)
        self.failed_calls += len(outcome.failures)
        for failure in outcome.failures:
            if failure in self.failures or len(self.failures) < MAX_FAILURE_TEXTS:
                self.failures[failure] += 1

    def _add_prefilled(self, outcome: Prefilled) -> None:
        self.prefilled += 1
        starts = self.plan.starts
        self.accesses += int(starts[outcome.request + 1] - starts[outcome.request])
        self.prefix_hits += outcome.prefix_hits
        self.hits_by_request[outcome.request] = outcome.prefix_hits
        self.block_hits += outcome.block_hits
        self.waited_blocks += outcome.waited_blocks
        self.stored_blocks += outcome.stored_blocks
        self.refused_blocks += outcome.refused_blocks
        self.written_bytes += outcome.written_bytes
        self.from_disk = self.from_disk.plus(outcome.from_disk)
        _keep(self.match_ms, outcome.match_ms)
        _keep(self.put_ms, outcome.put_ms)

    def _add_delivery(self, delivery: Delivery) -> None:
        self.read_bytes += delivery.read_bytes
        self.wrong_bytes += delivery.wrong_bytes
        self.corrupt_blocks += delivery.corrupt_blocks
        _keep(self.get_ms, delivery.get_ms)


def _keep(latencies: array[float], milliseconds: float) -> None:
    if milliseconds >= 0:
        latencies.append(milliseconds)
