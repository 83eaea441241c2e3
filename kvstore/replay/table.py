"""A report as the table that ends a replay."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from kvstore.replay.outcomes import FromDisk
from kvstore.replay.report import Percentiles, Report
from kvstore.replay.wear import Wear

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
    if report.wear is not None:
        yield "warm tier", _warm_tier(report, report.wear)
        if report.warm_place is not None:
            yield "warm folder", report.warm_place
    expected = report.expected
    yield "prefix hit rate", _rate(tally.prefix_hit_rate, None if expected is None else expected.prefix, report)
    if report.wear is not None:
        yield "of which", f"{tally.memory_hit_rate:.2%} from memory, {tally.disk_hit_rate:.2%} from disk"
    yield "block hit rate", _rate(tally.block_hit_rate, None if expected is None else expected.block, report)
    yield "ceiling", f"{report.ceiling:.2%} (a store that never evicts)"
    yield "tokens saved", f"{report.tokens_saved:,} of {tally.accesses * plan.block_tokens:,} in full blocks"
    yield "bytes", f"{_size(tally.written_bytes)} written, {_size(tally.read_bytes)} read, {report.gb_per_s:.3f} GB/s"
    for name, found in (("match", report.match), ("get", report.get), ("put", report.put)):
        yield f"{name} p50 / p99 / p99.9", _latencies(found)
    yield "decode", f"{tally.decode_good_blocks:,} of {tally.decode_asked_blocks:,} blocks read and verified"
    yield "evicted blocks", _evictions(report)
    if report.wear is not None:
        yield from _wear_rows(report.wear, tally.accesses)
    if missed := _not_brought(tally.from_disk):
        yield "not brought", missed
    if tally.refused_blocks:
        yield (
            "refused blocks",
            f"{tally.refused_blocks:,} of {tally.refused_blocks + tally.stored_blocks:,} to write",
        )
    if tally.waited_blocks:
        yield "waited for", f"{tally.waited_blocks:,} hits were in flight when asked for"
    if tally.corrupt_blocks:
        yield "corrupt blocks", f"{tally.corrupt_blocks:,} did not match their checksum (misses)"


def _rate(rate: float, expected: float | None, report: Report) -> str:
    size = "both sizes together" if report.warm_blocks else "this size"
    reference = "the capacity is unknown" if expected is None else f"tail-first LRU of {size}: {expected:.2%}"
    return f"{rate:.2%} ({reference})"


def _warm_tier(report: Report, wear: Wear) -> str:
    room = f"{report.warm_blocks:,} blocks in {_size(wear.capacity_bytes)}"
    return f"{wear.state}, {room}; at the end {wear.stored_blocks:,} blocks"


def _wear_rows(wear: Wear, accesses: int) -> Iterator[tuple[str, str]]:
    yield (
        "written to disk",
        f"{wear.writes_per_access(accesses):.3f} blocks a look-up: {wear.written_blocks:,} blocks, "
        f"{_size(wear.written_bytes)}; {wear.rewritten_blocks:,} again",
    )
    yield "brought from disk", f"{wear.promoted_blocks:,} blocks, decode's included"
    dropped = ", ".join(f"{count:,} {why}" for why, count in wear.dropped.items() if count)
    yield "dropped unwritten", dropped or "none"


def _not_brought(found: FromDisk) -> str:
    """Names what was on disk when it was matched, and then did not come."""
    reasons = (
        (found.late_blocks, "late: --wait was over"),
        (found.busy_blocks, "busy: the leased share was used up"),
        (found.gone_blocks, "gone"),
        (found.beyond_blocks, "behind a missing block"),
    )
    return ", ".join(f"{count:,} {why}" for count, why in reasons if count)


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
