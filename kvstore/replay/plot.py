"""A report as one picture: hit rate over the trace, latencies, bytes and evictions over the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.replay.report import Report

WINDOWS = 60
_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#1f6fb4", "#e07b00", "#2b8a3e", "#777777", "#c92a2a"


def write_plot(report: Report, path: Path) -> None:
    """Writes a PNG. Raises OSError."""
    # The object API: no global state and no display, whatever the user's matplotlib is set to.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(_headline(report), fontsize=13, fontweight="bold")
    _hit_rate(report, axes[0][0])
    _latency(report, axes[0][1])
    _throughput(report, axes[1][0])
    _evictions(report, axes[1][1])
    figure.savefig(path, format="png", dpi=110)


def _headline(report: Report) -> str:
    tally = report.tally
    capacity = "" if report.capacity_blocks is None else f", store of {report.capacity_blocks:,} blocks"
    if report.warm_blocks:
        capacity += f" and {report.warm_blocks:,} on disk"
    return (
        f"Replay of {tally.plan.trace_name}: {tally.prefilled:,} requests{capacity}\n"
        f"prefix hit rate {tally.prefix_hit_rate:.2%}, {report.tokens_saved:,} tokens saved, "
        f"wrong bytes: {tally.wrong_bytes}"
    )


def _hit_rate(report: Report, axis: Any) -> None:
    minutes, windowed, cumulative = _curve(report)
    axis.plot(minutes, 100 * windowed, color=_BLUE, alpha=0.45, linewidth=1, label="in each sixtieth of the requests")
    axis.plot(minutes, 100 * cumulative, color=_BLUE, linewidth=2, label="from the start")
    if report.expected is not None:
        expected = 100 * report.expected.prefix
        axis.axhline(expected, color=_ORANGE, linestyle="--", label=f"tail-first LRU, whole trace: {expected:.2f} %")
    axis.axhline(
        100 * report.ceiling, color=_GREY, linestyle=":", label=f"never evicting: {100 * report.ceiling:.2f} %"
    )
    axis.set(title="Prefix hit rate", xlabel="time in the trace (minutes)", ylabel="blocks found (%)", ylim=(0, None))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _curve(report: Report) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns minutes, hit rate in windows of requests, and hit rate so far."""
    tally, plan = report.tally, report.tally.plan
    edges = np.unique(np.linspace(0, plan.request_count, WINDOWS + 1).astype(np.int64))
    hits = np.concatenate(([0], np.cumsum(tally.hits_by_request)))[edges].astype(float)
    asked = plan.starts[edges].astype(float)
    windowed = np.diff(hits) / np.maximum(1, np.diff(asked))
    cumulative = hits[1:] / np.maximum(1, asked[1:])
    return plan.times_s[edges[1:] - 1] / 60, windowed, cumulative


def _latency(report: Report, axis: Any) -> None:
    tally = report.tally
    for name, found, color in (
        ("match", tally.match_ms, _GREEN),
        ("get", tally.get_ms, _BLUE),
        ("put", tally.put_ms, _ORANGE),
    ):
        if found:
            values = np.sort(np.frombuffer(found))
            share = 100 * np.arange(1, len(values) + 1) / len(values)
            p99_ms = np.percentile(values, 99)
            axis.plot(values, share, color=color, linewidth=2, label=f"{name}, p99 {p99_ms:.1f} ms")
    axis.axhline(99, color=_GREY, linestyle=":", linewidth=1)
    axis.set(
        title="Latency of whole requests at the workers",
        xlabel="milliseconds (logarithmic)",
        ylabel="calls that took at most so long (%)",
        xscale="log",
        ylim=(0, 101),
    )
    axis.legend(fontsize=8, loc="lower right")
    axis.grid(alpha=0.3, which="both")


def _throughput(report: Report, axis: Any) -> None:
    axis.set(title="Payload moved", xlabel="time in the replay (s)", ylabel="MB/s (10^6 bytes)")
    moved = [("read_bytes", "read", _BLUE), ("written_bytes", "written", _ORANGE)]
    if report.wear is not None:
        moved.append(("warm_written_bytes", "written to disk", _GREEN))
    for name, label, color in moved:
        seconds, rate = _rate(report, name)
        axis.plot(seconds, rate / 1e6, color=color, linewidth=1.5, label=label)
    _finish(report, axis)


def _evictions(report: Report, axis: Any) -> None:
    axis.set(title="Blocks evicted", xlabel="time in the replay (s)", ylabel="blocks/s")
    for name, label, color in (
        ("evicted_capacity_blocks", "to make room", _RED),
        ("evicted_page_blocks", "to move a page to another size", _ORANGE),
    ):
        seconds, rate = _rate(report, name)
        if name == "evicted_capacity_blocks" or rate.any():
            axis.plot(seconds, rate, color=color, linewidth=1.5, label=label)
    _finish(report, axis)


def _rate(report: Report, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns seconds and growth a second of one counter."""
    at_s = np.array([sample.at_s for sample in report.samples])
    values = np.array([sample.values.get(name, 0) for sample in report.samples], float)
    return at_s[1:], np.diff(values) / np.maximum(1e-9, np.diff(at_s))


def _finish(report: Report, axis: Any) -> None:
    if len(report.samples) < 2:
        axis.text(0.5, 0.5, "the admin port did not answer", ha="center", transform=axis.transAxes)
    else:
        axis.legend(fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
