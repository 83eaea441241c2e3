"""Hit rate against capacity, a panel a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.policy.figures import BASE, ORACLE, OURS, Cell

_COLORS = {OURS: "#1f6fb4", BASE: "#e67700", ORACLE: "#868e96"}
_WIDE, _OTHER = 2.4, "#ced4da"


def write_picture(cells: Sequence[Cell], path: Path) -> None:
    """Writes a PNG. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    traces = list(dict.fromkeys(cell.trace for cell in cells))
    sheet = Sheet(figsize=(6.5 * min(2, len(traces)), 4.5 * -(-len(traces) // 2)), layout="constrained")
    FigureCanvasAgg(sheet)
    sheet.suptitle("Prefix hit rate by capacity and eviction policy", fontsize=13, fontweight="bold")
    for number, trace in enumerate(traces, 1):
        axes = sheet.add_subplot(-(-len(traces) // 2), min(2, len(traces)), number)
        of = [cell for cell in cells if cell.trace == trace]
        for policy in dict.fromkeys(cell.policy for cell in of):
            line = sorted((cell.percent, cell.prefix) for cell in of if cell.policy == policy)
            is_ours = policy in _COLORS
            axes.plot(
                *zip(*line, strict=True),
                label=policy,
                color=_COLORS.get(policy, _OTHER),
                linewidth=_WIDE if is_ours else 1.0,
                linestyle="--" if policy == ORACLE else "-",
                marker="o" if is_ours else None,
                zorder=3 if is_ours else 1,
            )
        percents = sorted({cell.percent for cell in of})
        axes.set_xscale("log")
        axes.set_xticks(percents, [f"{percent:g}" for percent in percents])
        axes.minorticks_off()
        axes.set(title=trace, xlabel="capacity, % of the distinct blocks", ylabel="prefix hit, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    sheet.savefig(path, format="png", dpi=110)
