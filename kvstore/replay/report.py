"""The result of a replay as named figures: what is printed, plotted and written as JSON comes from here."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.replay.sampler import Sample
from kvstore.replay.tally import Tally
from kvstore.replay.wear import Wear, wear_of
from kvstore.workload.reuse import HitRates

# Counters of blocks that left the index, by why.
REMOVALS = {
    "evicted_capacity_blocks": "capacity",
    "evicted_page_blocks": "page",
    "evicted_quota_blocks": "quota",
    "expired_blocks": "ttl",
    "corrupt_blocks": "corrupt",
}


@dataclass(frozen=True)
class Percentiles:
    """Of latencies in milliseconds; None where nothing was measured."""

    p50_ms: float | None
    p99_ms: float | None
    p999_ms: float | None


@dataclass(frozen=True)
class Report:
    """One replay. `expected` are the rates of tail-first LRU at the same capacity, that of both tiers together, None
    where that is unknown; `evictions` by reason, None where the shard's admin port did not answer. `warm_blocks`: that
    the warm tier holds, 0 without one; `warm_place`: where it lies, if it is the replay's own. Rates are shares of all
    look-ups."""

    tally: Tally
    elapsed_s: float
    latest_s: float
    distinct_blocks: int
    capacity_bytes: int | None
    capacity_blocks: int | None
    expected: HitRates | None
    ceiling: float
    samples: Sequence[Sample]
    match: Percentiles
    get: Percentiles
    put: Percentiles
    warm_blocks: int = 0
    warm_place: str | None = None

    @property
    def wear(self) -> Wear | None:
        """What was done on disk; None where the shard has no warm tier, or its admin port did not answer."""
        return wear_of(self.samples)

    @property
    def evictions(self) -> dict[str, int] | None:
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0].values, self.samples[-1].values
        return {why: last.get(name, 0) - first.get(name, 0) for name, why in REMOVALS.items()}

    @property
    def tokens_saved(self) -> int:
        return self.tally.prefix_hits * self.tally.plan.block_tokens

    @property
    def gb_per_s(self) -> float:
        """Payload read and written, in 10^9 bytes a second."""
        return (self.tally.read_bytes + self.tally.written_bytes) / 1e9 / max(1e-9, self.elapsed_s)

    @property
    def requests_per_s(self) -> float:
        return self.tally.prefilled / max(1e-9, self.elapsed_s)

    def to_json(self) -> dict[str, object]:
        """Returns all figures by name, the unit last. Rates 0..1."""
        tally, plan, wear = self.tally, self.tally.plan, self.wear
        figures: dict[str, object] = {
            "trace": plan.trace_name,
            "requests": tally.prefilled,
            "accesses": tally.accesses,
            "distinct_blocks": self.distinct_blocks,
            "block_tokens": plan.block_tokens,
            "part_bytes": plan.part_bytes,
            "capacity_bytes": self.capacity_bytes,
            "capacity_blocks": self.capacity_blocks,
            "prefix_hit_rate": tally.prefix_hit_rate,
            "memory_hit_rate": tally.memory_hit_rate,
            "disk_hit_rate": tally.disk_hit_rate,
            "block_hit_rate": tally.block_hit_rate,
            "expected_prefix_hit_rate": None if self.expected is None else self.expected.prefix,
            "expected_block_hit_rate": None if self.expected is None else self.expected.block,
            "ceiling_hit_rate": self.ceiling,
            "tokens_saved": self.tokens_saved,
            "wrong_bytes": tally.wrong_bytes,
            "corrupt_blocks": tally.corrupt_blocks,
            "waited_blocks": tally.waited_blocks,
            "stored_blocks": tally.stored_blocks,
            "refused_blocks": tally.refused_blocks,
            "decode_asked_blocks": tally.decode_asked_blocks,
            "decode_good_blocks": tally.decode_good_blocks,
            "failed_calls": tally.failed_calls,
            "elapsed_s": self.elapsed_s,
            "latest_s": self.latest_s,
            "requests_per_s": self.requests_per_s,
            "read_bytes": tally.read_bytes,
            "written_bytes": tally.written_bytes,
            "gb_per_s": self.gb_per_s,
            "evictions": self.evictions,
            "from_disk": tally.from_disk._asdict(),
            "warm": None if wear is None else {"capacity_blocks": self.warm_blocks} | wear.to_json(tally.accesses),
        }
        for verb, found in (("match", self.match), ("get", self.get), ("put", self.put)):
            figures |= {
                f"{verb}_p50_ms": found.p50_ms,
                f"{verb}_p99_ms": found.p99_ms,
                f"{verb}_p999_ms": found.p999_ms,
            }
        return figures


def percentiles(latencies_ms: array[float]) -> Percentiles:
    """Returns the percentiles of a run's latencies."""
    if not latencies_ms:
        return Percentiles(None, None, None)
    p50, p99, p999 = np.percentile(np.frombuffer(latencies_ms), (50, 99, 99.9)).tolist()
    return Percentiles(p50, p99, p999)


def gauge(samples: Sequence[Sample], name: str) -> int | None:
    """Returns a gauge's last value, None if it is not known."""
    values: Mapping[str, int] = samples[-1].values if samples else {}
    return values.get(name)
