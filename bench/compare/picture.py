"""A report as one picture: what each store moves a second and how long a single get takes, beside the ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare.figures import GET, LATENCY, PUT, Figure, Report
from bench.compare.peers import HOST, OURS, ROWS, TCP, Link, Row
from kvstore.config.units import format_size

SHOWN_SIZE_BYTES, SHOWN_BATCH = 2 << 20, 16
LINK_TITLES = {TCP: "Across TCP", HOST: "On the same host"}
_OURS_GET, _OURS_PUT, _GET, _PUT, _CEILING = "#1f6fb4", "#8fbbe0", "#5f6670", "#c3c8cf", "#c92a2a"
_BAR = 0.38
_LABEL: dict[str, Any] = {"va": "center", "fontsize": 8}
FEWEST_LINES = 5  # Room for this many, so that a few bars do not fill a panel.


@dataclass(frozen=True)
class Bar:
    """One store: the better of its variants in each direction."""

    name: str
    ours: bool
    get: float
    put: float


@dataclass(frozen=True)
class Call:
    """One store's single gets, in milliseconds."""

    name: str
    kind: str
    p50: float
    p99: float


def write_picture(report: Report, path: Path) -> None:
    """Writes a PNG. Raises OSError."""
    # The object API: no global state and no display, whatever the user's matplotlib is set to.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(15, 10), layout="constrained")
    FigureCanvasAgg(sheet)
    axes = sheet.subplots(2, 2)
    size_bytes, batch = shown(report.figures)
    sheet.suptitle(_headline(report, size_bytes, batch), fontsize=13, fontweight="bold")
    for link, axis in ((TCP, axes[0][0]), (HOST, axes[0][1])):
        _rates(report.figures, axis, link=link, size_bytes=size_bytes, batch=batch)
    latency_sizes = sorted({figure.size_bytes for figure in report.figures if figure.op == LATENCY})
    for i, axis in enumerate(axes[1]):
        if i < len(latency_sizes):
            _latencies(report.figures, axis, size_bytes=latency_sizes[i])
        else:
            axis.set_axis_off()
    sheet.savefig(path, format="png", dpi=110)


def shown(figures: Sequence[Figure]) -> tuple[int, int]:
    """The size and batch whose rates are drawn: 2 MiB by 16 if measured, else the nearest below, else the least."""
    rates = [figure for figure in figures if figure.op != LATENCY]
    size_bytes = _nearest({figure.size_bytes for figure in rates}, SHOWN_SIZE_BYTES)
    return size_bytes, _nearest({figure.batch for figure in rates if figure.size_bytes == size_bytes}, SHOWN_BATCH)


def _nearest(values: set[int], wanted: int) -> int:
    below = [value for value in values if value <= wanted]
    return max(below) if below else min(values, default=wanted)


def bars(figures: Sequence[Figure], *, link: Link, size_bytes: int, batch: int) -> list[Bar]:
    """One bar a family of this link, the slowest get first, as a chart of horizontal bars is drawn upwards."""
    families: dict[str, list[Row]] = {}
    for row in ROWS:
        if row.link == link and row.copies:
            families.setdefault(row.family, []).append(row)
    made = []
    for name, rows in families.items():
        titles = {row.title for row in rows}
        cells = [f for f in figures if f.title in titles and f.size_bytes == size_bytes and f.batch == batch]
        best = {op: max((f.value for f in cells if f.op == op), default=0.0) for op in (GET, PUT)}
        if any(best.values()):
            made.append(Bar(name, rows[0].peer == OURS, best[GET], best[PUT]))
    return sorted(made, key=lambda bar: bar.get)


def calls(figures: Sequence[Figure], *, size_bytes: int) -> list[Call]:
    """The better variant of each family, and the ceilings, the slowest first."""
    made: dict[str, Call] = {}
    ceilings: dict[str, list[Figure]] = {}
    rows = {row.title: row for row in ROWS}
    for figure in figures:
        if figure.op != LATENCY or figure.size_bytes != size_bytes or figure.p99 is None:
            continue
        row = rows[figure.title]
        found = Call(row.family, OURS if row.peer == OURS else row.link, figure.value, figure.p99)
        made[row.family] = min(found, made.get(row.family, found), key=lambda call: call.p50)
        ceilings.setdefault(figure.ceiling_name, []).append(figure)
    for name, beside in ceilings.items():
        p50 = statistics.median(figure.ceiling or 0.0 for figure in beside)
        made[name] = Call(f"{name} (ceiling)", "", p50, statistics.median(f.ceiling_p99 or 0.0 for f in beside))
    return sorted(made.values(), key=lambda call: -call.p50)


def _headline(report: Report, size_bytes: int, batch: int) -> str:
    rounds = report.plan.get("rounds", "")
    where = ", ".join(report.machine.values())
    return f"{format_size(size_bytes)} values, {batch} a call, one client, median of {rounds} rounds\n{where}"


def _rates(figures: Sequence[Figure], axis: Any, *, link: Link, size_bytes: int, batch: int) -> None:
    drawn = bars(figures, link=link, size_bytes=size_bytes, batch=batch)
    for i, bar in enumerate(drawn):
        _bar(axis, i + _BAR / 2, bar.get, color=_OURS_GET if bar.ours else _GET)
        _bar(axis, i - _BAR / 2, bar.put, color=_OURS_PUT if bar.ours else _PUT)
    titles = {row.title for row in ROWS if row.link == link and row.copies}
    found = [f for f in figures if f.title in titles and f.size_bytes == size_bytes and f.batch == batch]
    for style, name in zip(("--", ":"), sorted({f.ceiling_name for f in found}), strict=False):
        height = statistics.median(f.ceiling or 0.0 for f in found if f.ceiling_name == name and f.op == GET)
        axis.axvline(height, color=_CEILING, linestyle=style, label=f"{name}, get: {height:.1f} GB/s")
    axis.set_yticks(range(len(drawn)), [bar.name for bar in drawn])
    axis.set(title=f"{LINK_TITLES[link]}: dark = get, light = put, blue = this store", xlabel="GB/s")
    widest = max([*(max(bar.get, bar.put) for bar in drawn), *(f.ceiling or 0.0 for f in found)], default=1.0)
    axis.set(xlim=(0, widest * 1.1), ylim=(-0.6, max(len(drawn), FEWEST_LINES) - 0.4))
    axis.grid(axis="x", alpha=0.3)
    if found:
        axis.legend(fontsize=8, loc="lower right")


def _bar(axis: Any, at: float, value: float, *, color: str) -> None:
    axis.barh(at, value, height=_BAR, color=color)
    label = f"{value:.1f}" if value else "not measured"
    axis.annotate(label, (value, at), (3, 0), textcoords="offset points", **_LABEL)


def _latencies(figures: Sequence[Figure], axis: Any, *, size_bytes: int) -> None:
    drawn = calls(figures, size_bytes=size_bytes)
    colors = {OURS: _OURS_GET, TCP: _GET, HOST: _GET, "": _CEILING}
    for i, call in enumerate(drawn):
        color = colors[call.kind]
        axis.plot([call.p50, call.p99], [i, i], color=color, linewidth=3, alpha=0.5)
        axis.plot([call.p50], [i], color=color, marker="o", markersize=9)
        axis.annotate(f"{call.p50:.3g} / {call.p99:.3g}", (call.p99, i), (6, 0), textcoords="offset points", **_LABEL)
    axis.set_yticks(range(len(drawn)), [call.name for call in drawn])
    lowest, highest = min(call.p50 for call in drawn), max(call.p99 for call in drawn)
    axis.set(title=f"One get of {format_size(size_bytes)}: p50, line to p99", xlabel="ms, logarithmic", xscale="log")
    axis.set(xlim=(lowest / 1.3, highest * 3), ylim=(-0.6, max(len(drawn), FEWEST_LINES) - 0.4))
    axis.xaxis.set_major_formatter(_ticks)
    axis.xaxis.set_minor_formatter(_minor_ticks)
    axis.grid(axis="x", which="both", alpha=0.3)


def _ticks(value: float, _: object) -> str:
    return f"{value:g}"


def _minor_ticks(value: float, _: object) -> str:
    """Twos and fives of a decade only."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
