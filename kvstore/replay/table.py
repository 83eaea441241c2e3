"""A report as the table that ends a replay."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from kvstore.replay.report import Percentiles, Report

MAX_FAILURES_SHOWN = 3


def print_report(report: Report, console: Console) -> None:
    """Prints the table, then what went wrong, if anything did."""
    table = Table(title=f"Replay of {report.tally.plan.trace_name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    console.print(_line("wrong bytes", report.tally.wrong_bytes))
    tally = report.tally
    if tally.failed_calls:
        console.print(f"[yellow]{tally.failed_calls} calls failed; the most frequent reasons:")
        for text, count in tally.failures.most_common(MAX_FAILURES_SHOWN):
            console.print(f"  {count} x {text}", markup=False)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    tally, plan = report.tally, report.tally.plan
    yield "requests", f"{tally.prefilled:,} in {report.elapsed_s:.1f} s ({report.requests_per_s:.1f} requests/s)"
    yield (
        "blocks",
        f"{tally.accesses:,} looked up, {report.distinct_blocks:,} distinct, {plan.block_tokens} tokens each",
    )
    if report.capacity_bytes is not None:
        yield (
            "capacity",
            f"{report.capacity_blocks:,} blocks of {plan.part_bytes:,} bytes = {_size(report.capacity_bytes)}",
        )
    yield "prefix hit rate", _rate(tally.prefix_hit_rate, None if report.expected is None else report.expected.prefix)
    yield "block hit rate", _rate(tally.block_hit_rate, None if report.expected is None else report.expected.block)
    yield "ceiling", f"{report.ceiling:.2%} (a store that never evicts)"
    yield "tokens saved", f"{report.tokens_saved:,} of {tally.accesses * plan.block_tokens:,} in full blocks"
    yield "bytes", f"{_size(tally.written_bytes)} written, {_size(tally.read_bytes)} read, {report.gb_per_s:.3f} GB/s"
    for name, found in (("match", report.match), ("get", report.get), ("put", report.put)):
        yield f"{name} p50 / p99 / p99.9", _latencies(found)
    yield "decode", f"{tally.decode_good_blocks:,} of {tally.decode_asked_blocks:,} blocks read and verified"
    yield "evicted blocks", _evictions(report)
    if tally.refused_blocks:
        yield (
            "refused blocks",
            f"{tally.refused_blocks:,} of {tally.refused_blocks + tally.stored_blocks:,} to write",
        )
    if tally.waited_blocks:
        yield "waited for", f"{tally.waited_blocks:,} hits were in flight when asked for"
    if tally.corrupt_blocks:
        yield "corrupt blocks", f"{tally.corrupt_blocks:,} did not match their checksum (misses)"


def _rate(rate: float, expected: float | None) -> str:
    reference = "the capacity is unknown" if expected is None else f"tail-first LRU of this size: {expected:.2%}"
    return f"{rate:.2%} ({reference})"


def _latencies(found: Percentiles) -> str:
    if found.p50_ms is None or found.p99_ms is None or found.p999_ms is None:
        return "none measured"
    return f"{found.p50_ms:.2f} / {found.p99_ms:.2f} / {found.p999_ms:.2f} ms"


def _evictions(report: Report) -> str:
    if report.evictions is None:
        return "unknown: the admin port did not answer"
    found = [f"{count:,} {why}" for why, count in report.evictions.items() if count]
    return ", ".join(found) or "none"


def _size(size_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return format_size(size_bytes)


def _line(name: str, value: int) -> Text:
    return Text(f"{name}: {value}", style="bold red" if value else "bold green")
