"""Figures of one row at one size, from turns in which its ceiling and this store play the same rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.compare.company import Company, Work
from bench.compare.conversation import ClientFailed, Conversation
from bench.compare.figures import GET, PUT, Beside, Figure, latency_figure, quantile, rate_figure
from bench.compare.lmcache_bench import Requests
from bench.compare.peers import OURS, Row
from bench.compare.plan import LATENCY_SIZES, UNCOUNTED_CALLS, Plan
from bench.compare.turn import Seat, latencies, rates

Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Table:
    """Who sits at it. `seats` are its players; `ceiling` and `ours` name two of them, empty where there is none."""

    work: Work
    title: str
    seats: tuple[Seat, ...]
    ceiling: str = ""
    ours: str = ""

    def rate(self, op: str, *, batch: int, times_s: Times) -> Figure:
        return rate_figure(
            self.title,
            size_bytes=self.work.size_bytes,
            set_bytes=self.work.set_bytes,
            op=op,
            batch=batch,
            times_s=times_s[self.title],
            ceiling=_beside(self.ceiling, times_s),
            ours=_beside(self.ours, times_s),
        )

    def latency(self, p50: float, p99: float, times_ms: Times) -> Figure:
        return latency_figure(
            self.title,
            size_bytes=self.work.size_bytes,
            p50=p50,
            p99=p99,
            ceiling=_beside(self.ceiling, times_ms),
            ours=_beside(self.ours, times_ms),
        )


def table_of(row: Row, company: Company, seats: Sequence[Seat]) -> Table:
    """Seats the row's ceiling, and beside rivals this store by its fastest way of the same link."""
    made = [Seat(row.ceiling, company.ceilings[row.ceiling])]
    ours = company.fastest.get(row.link) if row.peer != OURS else None
    if ours is not None:
        made.append(Seat(*ours))
    return Table(company.work, row.title, (*made, *seats), row.ceiling, "" if ours is None else ours[0])


def played(table: Table, plan: Plan, *, ops: Sequence[str]) -> Iterator[Figure]:
    """All cells of a row whose client plays rounds."""
    for batch in plan.batches:
        for op in ops:
            yield table.rate(op, batch=batch, times_s=rates(table.seats, op, batch=batch, rounds=plan.rounds))
    if table.work.size_bytes in LATENCY_SIZES:
        times = latencies(table.seats, uncounted=UNCOUNTED_CALLS, calls=plan.latency_calls)
        own = times[table.title]
        yield table.latency(quantile(own, 0.5), quantile(own, 0.99), times)


def own_bench(table: Table, plan: Plan, *, batch: int, found: Requests) -> Iterator[Figure]:
    """The cells of one run of a rival's own benchmark; its neighbours play right after it."""
    for op, request_ms in ((PUT, found.store_ms), (GET, found.retrieve_ms)):
        times = rates(table.seats, op, batch=batch, rounds=plan.rounds)
        # As if each round had been made of median requests.
        round_s = request_ms / 1e3 * table.work.value_count / batch
        yield table.rate(op, batch=batch, times_s={**times, table.title: [round_s] * len(times[table.ceiling])})
    if batch == 1 and table.work.size_bytes in LATENCY_SIZES:
        times = latencies(table.seats, uncounted=UNCOUNTED_CALLS, calls=plan.latency_calls)
        yield table.latency(found.retrieve_ms, found.retrieve_p99_ms, times)


def check_bytes(client: Conversation) -> None:
    """Raises ClientFailed if one byte of the set reads otherwise than it was put."""
    if not client.verify():
        raise ClientFailed("what it read differs from what was put")


def _beside(name: str, times: Times) -> Beside | None:
    return Beside(name, times[name]) if name else None
