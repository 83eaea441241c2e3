"""Who waits for whom: eight clients that read the same hot parts, and small gets beside large ones.

Eight client processes on two cores mostly read ten parts of 2 MiB, one a call, for a fixed time; the slowest one's
share is compared with an eighth. Then one client gets 64 KiB parts one after the other, first alone, then beside
another one that reads 5 MiB parts in batches as fast as it can. Bare sockets, with a thread of the server for each, do
the same in the same run: what three processes that never rest do to each other on two cores, whatever they speak.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.channel import CORES
from bench.crew import Crew, Played, crew_of, played, until_question
from bench.jobs import BULK, RAW_TCP, SHM, Job
from bench.raw import raw_server
from bench.report import Row
from bench.rig import MIB, on_cores, percentile, serving
from bench.worker import GET

CAPACITY = "1GiB"
CLIENTS = 8
PART_BYTES, PART_COUNT = 2 * MIB, 100
SMALL_BYTES, SMALL_COUNT = 64 << 10, 512
LARGE_BYTES, LARGE_COUNT, LARGE_BATCH = 5 * MIB, 64, 16
SHARED_S, QUIET_S, BUSY_S = 8.0, 4.0, 12.0
QUICK_S = 1.0
WARM_UP_S = 0.5

SLOWEST_SHARE = 0.5
BUSY_OVER_QUIET = 10.0


@dataclass(frozen=True)
class Plan:
    """Seconds of each measurement."""

    shared_s: float = SHARED_S
    quiet_s: float = QUIET_S
    busy_s: float = BUSY_S


QUICK = Plan(QUICK_S, QUICK_S, QUICK_S)


def run(plan: Plan | None = None) -> list[Row]:
    """Measures all of it on two cores."""
    plan = Plan() if plan is None else plan
    with (
        on_cores(CORES),
        serving(CAPACITY, "--hot.max_leased_share", "1.0") as running,
        raw_server(LARGE_BYTES * LARGE_COUNT) as raw,
        crew_of(CLIENTS) as crew,
    ):
        rows = []
        for kind in (BULK, SHM):
            rows += _shared(crew, running.target, kind, plan)
        for kind in (BULK, SHM):
            small, large = _jobs(running.target, kind, BULK)
            rows += _beside(crew, small, large, plan)
        rows += _beside(crew, *_jobs(raw.tcp, RAW_TCP, RAW_TCP), plan)
    return rows


def _shared(crew: Crew, target: str, kind: str, plan: Plan) -> list[Row]:
    """All clients read the same parts, most of them the same ten."""
    jobs = [Job(kind, target, PART_BYTES, PART_COUNT) for _ in crew.workers]
    crew.open(jobs)
    crew.workers[0].fill()
    crew.until("hot", batch=1, seconds=WARM_UP_S)
    found = crew.until("hot", batch=1, seconds=plan.shared_s)
    crew.workers[0].clean()
    crew.each({"do": "shut"})
    counts = [each.parts for each in found]
    times = [ms for each in found for ms in each.calls_ms]
    name = f"{CLIENTS} clients on {kind}, 90 % of Gets on ten 2 MiB parts"
    return [
        Row(f"{name}, all together", sum(counts) * PART_BYTES / plan.shared_s / 1e9, "GB/s"),
        Row(f"{name}, slowest client's share", slowest_share(counts), "of its fair share", at_least=SLOWEST_SHARE),
        Row(f"{name}, p99 of a Get", percentile(times, 0.99), "ms"),
    ]


def slowest_share(counts: list[int]) -> float:
    """What the slowest got, over what each would get if all got the same."""
    return min(counts) * len(counts) / sum(counts) if sum(counts) else 0.0


def _jobs(target: str, small: str, large: str) -> tuple[Job, Job]:
    return Job(small, target, SMALL_BYTES, SMALL_COUNT), Job(large, target, LARGE_BYTES, LARGE_COUNT)


def _beside(crew: Crew, few: Job, many: Job, plan: Plan) -> list[Row]:
    """Small gets alone, and beside a client that reads large parts."""
    small, large = crew.workers[:2]
    pair = Crew([small, large])
    pair.open([few, many])
    pair.each({"do": "fill"})
    Crew([small]).until(GET, batch=1, seconds=WARM_UP_S)
    quiet = Crew([small]).until(GET, batch=1, seconds=plan.quiet_s)[0]
    busy, flood = _busy(pair, plan.busy_s)
    pair.each({"do": "clean"})
    pair.each({"do": "shut"})
    quiet_p99, busy_p999 = percentile(list(quiet.calls_ms), 0.99), percentile(list(busy.calls_ms), 0.999)
    name = f"64 KiB Get on {few.kind}"
    bound = None if few.kind == RAW_TCP else BUSY_OVER_QUIET
    return [
        Row(f"{name}, p50, idle", percentile(list(quiet.calls_ms), 0.5), "ms"),
        Row(f"{name}, p99, idle", quiet_p99, "ms"),
        Row(
            f"5 MiB parts, 16 a call, over {many.kind} beside it",
            flood.parts * LARGE_BYTES / flood.seconds / 1e9,
            "GB/s",
        ),
        Row(f"{name}, p50, beside them", percentile(list(busy.calls_ms), 0.5), "ms"),
        Row(
            f"{name}, p99.9 of {len(busy.calls_ms):,}, beside them",
            busy_p999,
            "ms",
            quiet_p99,
            "idle p99",
            at_most=bound,
        ),
    ]


def _busy(pair: Crew, seconds: float) -> tuple[Played, Played]:
    """The large reads begin before the small ones and end after them."""
    at = time.perf_counter() + WARM_UP_S
    end = at + seconds
    answers = pair.all(
        [
            until_question(GET, batch=1, at=at, end=end),
            until_question(GET, batch=LARGE_BATCH, at=0.0, end=end + WARM_UP_S),
        ]
    )
    return played(answers[0]), played(answers[1])
