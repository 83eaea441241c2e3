"""What the fast channel must reach on two cores: 2 MiB parts in batches, single gets, views, look-ups.

Figure and ceiling are played in turn, round by round, the first seat rotating; a ratio is the median over neighbouring
rounds. One client process a seat; only one of them works at a time. Everything is warm: each set is written and read
before it counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.compare.figures import gb_per_s, paired
from bench.compare.turn import Seat, latencies, rates
from bench.crew import Worker, crew_of
from bench.jobs import BULK, MEMCPY, RAW_TCP, RAW_UNIX, RAW_UNPACED, SHM, VIEWS, Job
from bench.raw import RawServer, raw_server
from bench.report import Row, say
from bench.rig import MIB, Running, on_cores, percentile, serving
from bench.worker import GET, MATCH, PUT
from kvstore_client.options import VERIFY_OFF, VERIFY_ON, Verify

CORES = 2
CAPACITY = "2GiB"
PART_BYTES, PART_COUNT = 2 * MIB, 128
BATCHES = (64, 16)
ROUNDS, QUICK_ROUNDS = 25, 3
SMALL_BYTES, SMALL_COUNT = 64 << 10, 1024
SINGLE_CALLS, QUICK_CALLS, UNCOUNTED_CALLS = 2000, 200, 50
MATCH_KEYS, VIEWED_PARTS = 256, 64

SHM_GET, SHM_GET_OFF, SHM_PUT = 0.7, 0.85, 0.7
BULK_GET, BULK_PUT = 0.9, 0.85
VIEW_MS = 1.0
SINGLE_MS: Mapping[int, float] = {SMALL_BYTES: 0.12, PART_BYTES: 0.6}
P99_OVER_P50 = 3.0
MATCH_KEYS_PER_S = 600_000


@dataclass(frozen=True)
class Bound:
    """One rate of a seat, as a share of its ceiling."""

    seat: str
    op: str
    name: str
    ceiling: str
    at_least: float | None


BOUNDS = (
    Bound("shm off", GET, "shm Get, not verified", MEMCPY, SHM_GET_OFF),
    Bound("shm on", GET, "shm Get, verified", MEMCPY, SHM_GET),
    Bound("shm on", PUT, "shm Put from a registered region", MEMCPY, SHM_PUT),
    Bound("bulk on", GET, "bulk Get, verified", RAW_TCP, BULK_GET),
    Bound("bulk off", GET, "bulk Get, not verified", RAW_TCP, None),
    Bound("bulk on", PUT, "bulk Put", RAW_TCP, BULK_PUT),
    Bound("bulk on", GET, "bulk Get, verified", RAW_UNPACED, None),
    Bound("bulk off", GET, "bulk Get, not verified", RAW_UNPACED, None),
    Bound("bulk on", PUT, "bulk Put", RAW_UNPACED, None),
)


@dataclass(frozen=True)
class Plan:
    """How much is played: rounds of a rate, calls of a latency."""

    rounds: int = ROUNDS
    calls: int = SINGLE_CALLS


QUICK = Plan(QUICK_ROUNDS, QUICK_CALLS)


def run(plan: Plan | None = None) -> list[Row]:
    """Measures all of it on two cores."""
    plan = Plan() if plan is None else plan
    with (
        on_cores(CORES),
        serving(CAPACITY, "--hot.max_leased_share", "1.0") as running,
        raw_server(PART_BYTES * PART_COUNT) as raw,
    ):
        ground = Ground(running, raw)
        rows = []
        for ceiling in (MEMCPY, RAW_TCP, RAW_UNPACED):
            say(f"rates beside {ceiling}")
            rows += _rates(ground, plan, ceiling=ceiling)
        say("views")
        rows += _views(ground, plan)
        for part_bytes in SINGLE_MS:
            say(f"single gets of {_size(part_bytes)}")
            rows += _singles(ground, plan, part_bytes)
        say("look-ups")
        rows += _matches(ground, plan)
    return rows


@dataclass(frozen=True)
class Ground:
    """The servers that all seats talk to."""

    running: Running
    raw: RawServer

    def job(self, kind: str, part_bytes: int, *, owner: int = 0, verify: Verify = VERIFY_ON) -> Job:
        addresses = {RAW_TCP: self.raw.tcp, RAW_UNPACED: self.raw.unpaced, RAW_UNIX: self.raw.unix}
        count = PART_COUNT if part_bytes == PART_BYTES else SMALL_COUNT
        address = addresses.get(kind, self.running.target)
        return Job(kind, address, part_bytes, count, owner=owner, verify=verify.value)

    @contextmanager
    def worker(self, job: Job) -> Iterator[Worker]:
        with crew_of(1) as crew:
            crew.open([job])
            yield crew.workers[0]


def _rates(ground: Ground, plan: Plan, *, ceiling: str) -> list[Row]:
    """All rates that have this ceiling, in one turn for each op and batch."""
    bounds = [bound for bound in BOUNDS if bound.ceiling == ceiling]
    rows = []
    with ExitStack() as stack:
        workers = {ceiling: stack.enter_context(ground.worker(_job(ground, ceiling, ceiling)))}
        for bound in bounds:
            if bound.seat not in workers:
                workers[bound.seat] = stack.enter_context(ground.worker(_job(ground, bound.seat, ceiling)))
                workers[bound.seat].fill()
        for op in (GET, PUT):
            named = {ceiling, *(bound.seat for bound in bounds if bound.op == op)}
            seats = [Seat(name, worker) for name, worker in workers.items() if name in named]
            for batch in BATCHES:
                times = rates(seats, op, batch=batch, rounds=plan.rounds)
                rows += [_share(bound, times, batch) for bound in bounds if bound.op == op]
        for worker in workers.values():
            worker.check()
            worker.clean()
    return [*rows, *_scale(rows, ceiling)]


def _job(ground: Ground, seat: str, ceiling: str) -> Job:
    """The job of a seat; clients that stay at one table have parts of their own."""
    if seat == ceiling:
        return ground.job(ceiling, PART_BYTES)
    kind, verify = seat.split()
    owner = 1 if verify == "on" else 2
    return ground.job(kind, PART_BYTES, owner=owner, verify=VERIFY_ON if verify == "on" else VERIFY_OFF)


def _share(bound: Bound, times: Mapping[str, Sequence[float]], batch: int) -> Row:
    own, ceiling = times[bound.seat], times[bound.ceiling]
    size_bytes = PART_BYTES * PART_COUNT
    return Row(
        f"{bound.name}, {batch} x 2 MiB a call",
        gb_per_s(size_bytes, own),
        "GB/s",
        gb_per_s(size_bytes, ceiling),
        bound.ceiling,
        at_least=bound.at_least,
        paired=paired(own, ceiling),
    )


def _scale(rows: Sequence[Row], ceiling: str) -> list[Row]:
    """The ceiling's own spread over the turns: how still the machine stood."""
    found = [row.ceiling for row in rows if row.ceiling is not None]
    return [
        Row(f"{ceiling}, slowest turn", min(found), "GB/s"),
        Row(f"{ceiling}, fastest turn", max(found), "GB/s"),
    ]


def _views(ground: Ground, plan: Plan) -> list[Row]:
    """Opening the views of a batch, touching each, and closing them."""
    with ground.worker(ground.job(VIEWS, PART_BYTES, owner=1)) as worker:
        worker.fill()
        worker.calls(GET, batch=VIEWED_PARTS, first=0, count=UNCOUNTED_CALLS)
        times_ms = worker.calls(GET, batch=VIEWED_PARTS, first=0, count=plan.calls).calls_ms
        worker.check()
        worker.clean()
    name = f"view of {VIEWED_PARTS} parts: open, touch, close"
    return [
        Row(f"{name}, p50", statistics.median(times_ms), "ms", at_most=VIEW_MS),
        Row(f"{name}, p99", percentile(list(times_ms), 0.99), "ms"),
    ]


def _singles(ground: Ground, plan: Plan, part_bytes: int) -> list[Row]:
    """Single gets one after the other beside raw fetches of the same size."""
    own, size = (BULK, SHM), _size(part_bytes)
    with ExitStack() as stack:
        kinds = (RAW_TCP, RAW_UNIX, *own)
        workers = {k: stack.enter_context(ground.worker(ground.job(k, part_bytes))) for k in kinds}
        workers[BULK].fill()
        seats = [Seat(kind, worker) for kind, worker in workers.items()]
        times = latencies(seats, uncounted=UNCOUNTED_CALLS, calls=plan.calls)
        workers[BULK].clean()
    rows = []
    for kind in kinds:
        p50, p99 = (percentile(times[kind], share) for share in (0.5, 0.99))
        bound = SINGLE_MS[part_bytes] if kind in own else None
        what = f"{kind}, single Get of {size}, verified" if kind in own else f"{kind}, fetch of {size}"
        rows.append(Row(f"{what}, p50", p50, "ms", at_most=bound))
        highest = P99_OVER_P50 if kind in own else None
        rows.append(Row(f"{what}, p99", p99, "ms", p50, "its p50", at_most=highest))
    return rows


def _matches(ground: Ground, plan: Plan) -> list[Row]:
    """Look-ups one after the other, beside raw exchanges of as many bytes."""
    rows = []
    with ExitStack() as stack:
        workers = {
            k: stack.enter_context(ground.worker(ground.job(k, SMALL_BYTES))) for k in (SHM, BULK, RAW_UNIX, RAW_TCP)
        }
        workers[SHM].fill()
        for kind, worker in workers.items():
            worker.calls(MATCH, batch=MATCH_KEYS, first=0, count=UNCOUNTED_CALLS)
            before = ground.running.cpu_s()
            found = worker.calls(MATCH, batch=MATCH_KEYS, first=0, count=plan.calls)
            server_s = ground.running.cpu_s() - before
            rate = found.parts / found.seconds
            if kind in (RAW_UNIX, RAW_TCP):
                rows.append(Row(f"{kind}, exchange of a Match's bytes", rate, "keys/s"))
                continue
            name = f"Match of {MATCH_KEYS} keys, {kind}, one blocking client"
            rows.append(Row(name, rate, "keys/s", at_least=MATCH_KEYS_PER_S))
            rows.append(Row(f"{name}, server CPU", server_s / found.parts * 1e6, "s/million keys"))
            rows.append(Row(f"{name}, client CPU", found.cpu_s / found.parts * 1e6, "s/million keys"))
        workers[SHM].clean()
    return rows


def _size(part_bytes: int) -> str:
    return f"{part_bytes >> 20} MiB" if part_bytes >= MIB else f"{part_bytes >> 10} KiB"
