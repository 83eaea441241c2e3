"""How far a replay is: a bar on a terminal, a line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.replay.engine import Watch
from kvstore.replay.tally import Tally

LINE_EVERY_S = 5.0


@contextmanager
def progress(request_count: int) -> Iterator[Watch]:
    """Shows progress until left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(request_count).show
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("prefix hits {task.fields[hits]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("replay", total=request_count, rate="starting", hits="-")

        def show(tally: Tally, elapsed_s: float) -> None:
            bar.update(task, completed=tally.prefilled, rate=_rate(tally, elapsed_s), hits=_hits(tally))

        yield show


class _Lines:
    def __init__(self, request_count: int) -> None:
        self._request_count = request_count
        self._next_s = time.monotonic() + LINE_EVERY_S

    def show(self, tally: Tally, elapsed_s: float) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LINE_EVERY_S
        left = self._request_count - tally.prefilled
        eta_s = left * elapsed_s / max(1, tally.prefilled)
        print(
            f"{tally.prefilled}/{self._request_count} requests, {_rate(tally, elapsed_s)}, "
            f"prefix hits {_hits(tally)}, about {eta_s:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _rate(tally: Tally, elapsed_s: float) -> str:
    return f"{tally.prefilled / max(0.001, elapsed_s):.0f} requests/s"


def _hits(tally: Tally) -> str:
    return f"{tally.prefix_hit_rate:.1%}"
