"""A server's stats as tables and as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvstore_wire.v1 import admin_pb2 as pb

EVICTIONS = {
    "evicted_capacity_blocks": "to make room",
    "evicted_page_blocks": "to move a page to another size",
    "evicted_quota_blocks": "by the namespace's limit",
    "expired_blocks": "by ttl",
    "deleted_blocks": "deleted",
    "purged_blocks": "purged",
    "corrupt_blocks": "damaged",
    "incomplete_blocks": "never finished by their writer",
}
# Why blocks left memory without a copy on disk.
DROPPED = {
    "warm_dropped_behind_blocks": "not written in time",
    "warm_dropped_budget_blocks": "over the write budget",
    "warm_dropped_over_blocks": "said to be over",
    "warm_dropped_incomplete_blocks": "not whole",
    "warm_dropped_too_large_blocks": "too large",
    "warm_dropped_copy_gone_blocks": "copy given up since",
    "warm_dropped_fault_blocks": "disk failed",
    "warm_dropped_stalled_blocks": "disk hung",
    "warm_dropped_disabled_blocks": "tier disabled",
}


@dataclass(frozen=True)
class StatsView:
    """One answer of the admin port; `options` as (key, value, source)."""

    stats: pb.Stats
    namespaces: Sequence[pb.NamespaceStatus]
    options: Sequence[tuple[str, str, str]] = ()

    def to_json(self) -> dict[str, object]:
        counters, gauges = counts(self.stats.counters), counts(self.stats.gauges)
        found: dict[str, object] = {
            "generation": self.stats.generation,
            "uptime_ms": self.stats.uptime_ms,
            "match_hit_rate": match_hit_rate(counters),
            "acquire_hit_rate": acquire_hit_rate(counters),
            "counters": counters,
            "gauges": gauges,
            "latencies": {
                histogram.verb: {
                    "calls": sum(histogram.buckets),
                    "p50_us_at_most": quantile_us(histogram.buckets, 0.50),
                    "p99_us_at_most": quantile_us(histogram.buckets, 0.99),
                    "sum_us": histogram.sum_us,
                }
                for histogram in self.stats.latencies
            },
            "namespaces": [_namespace(status) for status in self.namespaces],
        }
        if self.options:
            found["config"] = {key: {"value": value, "source": source} for key, value, source in self.options}
        return found


def counts(values: Sequence[pb.Count]) -> dict[str, int]:
    """Returns counts by name."""
    return {count.name: count.value for count in values}


def match_hit_rate(counters: Mapping[str, int]) -> float | None:
    """Share of keys given to Match that were stored; None before the first."""
    return _share(counters.get("match_hit_blocks", 0), counters.get("match_asked_blocks", 0))


def acquire_hit_rate(counters: Mapping[str, int]) -> float | None:
    """Share of keys given to Acquire and Get that were leased; None before the first."""
    return _share(counters.get("acquire_leased_blocks", 0), counters.get("acquire_asked_blocks", 0))


def quantile_us(buckets: Sequence[int], share: float) -> int | None:
    """Returns the upper bound, in microseconds, of the bucket where this share of the calls ends; None without calls.

    The last bucket has no bound of its own: its lower one is returned.
    """
    calls = sum(buckets)
    seen = 0
    for i, count in enumerate(buckets):
        seen += count
        if calls and seen >= share * calls:
            return 1 << min(i, len(buckets) - 2)
    return None


def warm_state(state: int) -> str:
    """Returns a state of the warm tier, that of the gauge `warm_state` and of WarmTierStatus, in a word."""
    names = {number: name for name, number in pb.WarmTierState.items()}
    return names.get(state, f"unknown ({state})").removeprefix("WARM_TIER_STATE_").lower()


def write_amplification(values: Mapping[str, int]) -> float | None:
    """Bytes written to disk for each that came from memory; None before the first."""
    written_bytes = values.get("warm_written_bytes", 0)
    return _share(written_bytes, written_bytes - values.get("warm_rewritten_bytes", 0))


def print_view(view: StatsView, *, clear: bool) -> None:
    """Prints the tables; `clear` puts them at the top of a terminal."""
    console = Console()
    if clear and console.is_terminal:
        console.clear()
    console.print(_summary(view))
    if view.stats.latencies:
        console.print(_latencies(view.stats.latencies))
    if view.namespaces:
        console.print(_namespaces(view.namespaces))
    if view.options:
        console.print(_options(view.options))


def _summary(view: StatsView) -> Table:
    counters, gauges = counts(view.stats.counters), counts(view.stats.gauges)
    table = Table(title=f"server, up {view.stats.uptime_ms / 1000:.0f} s", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    used = gauges.get("capacity_bytes", 0) - gauges.get("free_bytes", 0)
    rows = {
        "match hit rate": _hits(match_hit_rate(counters), counters.get("match_asked_blocks", 0)),
        "acquire hit rate": _hits(acquire_hit_rate(counters), counters.get("acquire_asked_blocks", 0)),
        "stored": f"{gauges.get('stored_blocks', 0):,} blocks, {size(used)} of {size(gauges.get('capacity_bytes', 0))}",
        "leased, reserved": f"{size(gauges.get('leased_bytes', 0))}, {size(gauges.get('reserved_bytes', 0))}",
        "written, read": f"{size(counters.get('written_bytes', 0))}, {size(counters.get('read_bytes', 0))}",
        "committed": f"{counters.get('committed_parts', 0):,} parts, {counters.get('abandoned_parts', 0):,} abandoned",
        "blocks removed": _counted(counters, EVICTIONS),
        "sessions, leases": f"{gauges.get('sessions', 0):,}, {gauges.get('leases', 0):,}",
    }
    if "warm_state" in gauges:
        rows |= warm_rows(counters | gauges)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def warm_rows(values: Mapping[str, int]) -> dict[str, str]:
    """Returns what is shown of the warm tier, by name; `values` are counters and gauges."""

    def size_of(name: str) -> str:
        return size(values.get(name, 0))

    stored, amplification = values.get("warm_stored_blocks", 0), write_amplification(values)
    written = "" if amplification is None else f", {amplification:.2f} x what came from memory"
    return {
        "warm tier": warm_state(values["warm_state"]),
        "on disk": f"{stored:,} blocks, {size_of('warm_stored_bytes')} of {size_of('warm_capacity_bytes')}",
        "hits from disk": f"{values.get('warm_promoted_blocks', 0):,} blocks",
        "written to disk": f"{size_of('warm_written_bytes')}{written}",
        "to disk, to memory": f"{size_of('warm_writing_bytes')}, {size_of('warm_promoting_bytes')} under way",
        "left memory unwritten": _counted(values, DROPPED),
    }


def _counted(values: Mapping[str, int], reasons: Mapping[str, str]) -> str:
    found = [f"{values[name]:,} {why}" for name, why in reasons.items() if values.get(name)]
    return ", ".join(found) or "none"


def _latencies(histograms: Sequence[pb.LatencyHistogram]) -> Table:
    table = Table(title="latency inside the server", title_justify="left")
    for column in ("verb", "calls", "mean", "p50 at most", "p99 at most"):
        table.add_column(column, justify="left" if column == "verb" else "right")
    for histogram in histograms:
        calls = sum(histogram.buckets)
        quantiles = [_duration(quantile_us(histogram.buckets, share)) for share in (0.5, 0.99)]
        table.add_row(histogram.verb, f"{calls:,}", _duration(histogram.sum_us / max(1, calls)), *quantiles)
    return table


def _namespaces(namespaces: Sequence[pb.NamespaceStatus]) -> Table:
    table = Table(title="namespaces", title_justify="left")
    for column in ("tenant", "name", "blocks", "bytes", "match hits", "acquire hits", "evicted", "digest"):
        table.add_column(column, justify="right" if column in ("blocks", "bytes", "evicted") else "left")
    for status in namespaces:
        counters = counts(status.counters)
        evicted = sum(counters.get(name, 0) for name in EVICTIONS if name.startswith("evicted"))
        table.add_row(
            status.spec.tenant or "-",
            status.spec.name,
            f"{status.blocks:,}",
            size(status.hot_bytes),
            _hits(match_hit_rate(counters), counters.get("match_asked_blocks", 0)),
            _hits(acquire_hit_rate(counters), counters.get("acquire_asked_blocks", 0)),
            f"{evicted:,}",
            status.digest.hex()[:16],
        )
    return table


def _options(options: Sequence[tuple[str, str, str]]) -> Table:
    table = Table("option", "value", "from", title="configuration", title_justify="left")
    for row in options:
        table.add_row(*row)
    return table


def size(size_bytes: int) -> str:
    """Returns a size for people."""
    for unit, unit_bytes in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"


def _hits(rate: float | None, asked: int) -> str:
    return "nothing asked" if rate is None else f"{rate:.1%} of {asked:,}"


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _duration(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


def _namespace(status: pb.NamespaceStatus) -> dict[str, object]:
    return {
        "tenant": status.spec.tenant,
        "name": status.spec.name,
        "digest": status.digest.hex(),
        "sessions": status.sessions,
        "blocks": status.blocks,
        "hot_bytes": status.hot_bytes,
        "quota_bytes": status.quota_bytes,
        "max_bytes": status.max_bytes,
        "ttl_ms": status.ttl_ms,
        "counters": counts(status.counters),
    }
