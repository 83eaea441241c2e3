"""Latencies by verb in buckets whose bounds double: cheap to record, good enough for tails."""

from __future__ import annotations

from kvstore_wire.v1 import admin_pb2 as admin

BUCKETS = 32  # 2^31 us is over half an hour.


class Latencies:
    """One histogram a verb. Bucket i counts calls of at most 2^i us; the last one all longer calls."""

    def __init__(self) -> None:
        self._buckets: dict[str, list[int]] = {}
        self._sums_us: dict[str, int] = {}

    def add(self, verb: str, elapsed_ns: int) -> None:
        """Records one call."""
        microseconds = -(-elapsed_ns // 1000)
        row = self._buckets.get(verb)
        if row is None:
            row = self._buckets[verb] = [0] * BUCKETS
            self._sums_us[verb] = 0
        row[min(max(0, microseconds - 1).bit_length(), BUCKETS - 1)] += 1
        self._sums_us[verb] += microseconds

    def messages(self) -> list[admin.LatencyHistogram]:
        """Returns what was recorded, by verb."""
        return [
            admin.LatencyHistogram(verb=verb, buckets=row, sum_us=self._sums_us[verb])
            for verb, row in sorted(self._buckets.items())
        ]
