"""The matrix as one picture: what moves a second by transport and size beside ceilings, and how long a call takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.jobs import BARE_GRPC, BULK, GRPC, MEMCPY, RAW_TCP, RAW_UNIX, SHM, VIEWS
from bench.matrix.figures import Figure, Report
from bench.worker import GET, PUT
from kvstore.config.units import format_size

COLORS = {
    SHM: "#1f6fb4",
    VIEWS: "#6f42c1",
    BULK: "#2b8a3e",
    GRPC: "#e67700",
    MEMCPY: "#1f6fb4",
    RAW_TCP: "#2b8a3e",
    RAW_UNIX: "#868e96",
    BARE_GRPC: "#e67700",
}
MOVING = (SHM, BULK, GRPC)
SHOWN_CALL_BYTES = 128 << 20
_LABEL: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8}
_IN_BAR: dict[str, Any] = {**_LABEL, "color": "white", "fontweight": "bold", "fontsize": 9}
_BELOW: dict[str, Any] = {**_LABEL, "va": "top", "xytext": (0, -6), "textcoords": "offset points"}
_ABOVE: dict[str, Any] = {**_LABEL, "xytext": (0, 5), "textcoords": "offset points"}


def write_picture(report: Report, path: Path) -> None:
    """Writes a PNG. Raises OSError."""
    # The object API: no global state and no display, whatever the user's matplotlib is set to.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(15, 10), layout="constrained")
    FigureCanvasAgg(sheet)
    axes = sheet.subplots(2, 2)
    sheet.suptitle(f"KV Commons by transport\n{', '.join(report.machine.values())}", fontsize=13, fontweight="bold")
    _rates(report, axes[0][0], workload=GET)
    _rates(report, axes[0][1], workload=PUT)
    _latencies(report, axes[1][0])
    _clients(report, axes[1][1])
    sheet.savefig(path, format="png", dpi=110)


def best_batches(figures: Sequence[Figure]) -> dict[int, int]:
    """Of each size the batch whose rates are drawn: the largest of at most 128 MiB a call, else the least."""
    made = {}
    for size in sorted({figure.part_bytes for figure in figures}):
        batches = {figure.batch for figure in figures if figure.part_bytes == size}
        fit = [batch for batch in batches if batch * size <= SHOWN_CALL_BYTES]
        made[size] = max(fit) if fit else min(batches)
    return made


def drawn(figures: Sequence[Figure], *, workload: str, clients: int) -> list[Figure]:
    """The cells of one workload that are drawn, one for each size and name."""
    found = [f for f in figures if f.workload == workload and f.clients == clients]
    batches = best_batches(found)
    return [figure for figure in found if figure.batch == batches[figure.part_bytes]]


def _rates(report: Report, axis: Any, *, workload: str) -> None:
    clients = min((f.clients for f in report.cells), default=1)
    cells = [f for f in drawn(report.cells, workload=workload, clients=clients) if f.name in MOVING]
    sizes = sorted({figure.part_bytes for figure in cells})
    width = 0.8 / len(MOVING)
    for i, name in enumerate(MOVING):
        for figure in (f for f in cells if f.name == name):
            at = sizes.index(figure.part_bytes) + (i - 1) * width
            label = name if figure.part_bytes == sizes[0] else None
            axis.bar(at, figure.rate, width * 0.92, color=COLORS[name], label=label)
            axis.annotate(f"{figure.rate:.2g}", (at, 0), (0, 3), textcoords="offset points", **_IN_BAR)
            if figure.ceiling is not None:
                axis.hlines(figure.ceiling, at - width / 2, at + width / 2, color="#c92a2a", linewidth=2)
    axis.hlines([], 0, 0, color="#c92a2a", linewidth=2, label="ceiling: memcpy, raw TCP, bare gRPC")
    batches = best_batches([f for f in cells if f.workload == workload])
    axis.set_xticks(range(len(sizes)), [f"{batches[size]} x {format_size(size)}" for size in sizes])
    axis.set(title=f"{workload.capitalize()}, {_clients_text(clients)}, largest batch", ylabel="GB/s")
    axis.grid(axis="y", alpha=0.3)
    highest = max((value for f in cells for value in (f.rate, f.ceiling or 0.0)), default=1.0)
    axis.set_ylim(0, highest * 1.35)  # Room for the legend.
    axis.legend(fontsize=8, ncols=2, loc="upper right")


def _latencies(report: Report, axis: Any) -> None:
    """One part a call: p50, with a line to p99."""
    clients = min((f.clients for f in report.cells), default=1)
    names = (RAW_TCP, RAW_UNIX, SHM, VIEWS, BULK, GRPC)
    singles = [f for f in (*report.ceilings_before, *report.cells) if f.workload == GET and f.batch == 1]
    singles = [f for f in singles if f.clients == clients and f.name in names]
    sizes = sorted({figure.part_bytes for figure in singles})
    for figure in singles:
        at = sizes.index(figure.part_bytes) + (names.index(figure.name) - 2.5) * 0.13
        style: dict[str, Any] = {"color": COLORS[figure.name]}
        label = figure.name if figure.part_bytes == sizes[0] else None
        axis.plot([at, at], [figure.p50_ms, figure.p99_ms], linewidth=3, alpha=0.5, **style)
        ceiling = figure.name in (RAW_TCP, RAW_UNIX)
        axis.plot([at], [figure.p50_ms], marker="_" if ceiling else "o", markersize=9, ls="", label=label, **style)
        axis.annotate(f"{figure.p50_ms:.2g}", (at, figure.p50_ms), **_BELOW)
    axis.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
    axis.set(title=f"One part a Get, {_clients_text(clients)}: p50, line to p99", ylabel="ms, logarithmic")
    if singles:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.legend(fontsize=8, ncols=2)
    axis.margins(y=0.2)
    axis.grid(axis="y", which="both", alpha=0.3)


def _clients(report: Report, axis: Any) -> None:
    """What all clients together get of the size nearest 2 MiB, by their number."""
    sizes = sorted({f.part_bytes for f in report.cells}, key=lambda size: abs(size - (2 << 20)))
    counts = sorted({f.clients for f in report.cells})
    for name in MOVING:
        points = [
            (counts.index(count), f.rate)
            for count in counts
            for f in drawn(report.cells, workload=GET, clients=count)
            if f.name == name and f.part_bytes == sizes[0]
        ]
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", color=COLORS[name], label=name)
        for point in points:
            axis.annotate(f"{point[1]:.2g}", point, **_ABOVE)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    size = format_size(sizes[0]) if sizes else ""
    axis.set(title=f"Get of {size} parts, all clients together", xlabel="client processes", ylabel="GB/s")
    axis.margins(y=0.2)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _clients_text(clients: int) -> str:
    return "one client" if clients == 1 else f"{clients} clients"
