"""A whole replay: a shard, workers, the run and its report. Nothing is left behind, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvstore.replay.crew import CrewSize, crew_at_work
from kvstore.replay.dispatch import Dispatch, Pace
from kvstore.replay.faults import ServerDied, ServerSilent
from kvstore.replay.own_server import OwnServer, own_server
from kvstore.replay.plan import Plan, plan_of
from kvstore.replay.report import Report, gauge, percentiles
from kvstore.replay.sampler import Sampler, sampling
from kvstore.replay.sizing import ShardSize, server_flags, slot_bytes
from kvstore.replay.tally import Tally
from kvstore.replay.warm import WarmOrder, warm_flags
from kvstore.workload.hints import Sayings, said_of, sessions_of
from kvstore.workload.reuse import HitRates, infinite_hit_rate, tail_first_lru
from kvstore.workload.trace import Trace
from kvstore_client import Client, ClientOptions, TlsOptions
from kvstore_wire.errors import PeerError

SALT_BYTES = 16
HELLO_MS = 3000
SILENT_S = 5.0  # Nothing but failed calls for so long: ask whether the server is still there.


@dataclass(frozen=True)
class ExistingServer:
    """A shard that runs already. `admin_target` may be wrong: then evictions stay unknown."""

    target: str
    admin_target: str
    tls: TlsOptions | None = None


@dataclass(frozen=True)
class Settings:
    """What a replay is told. `shard`: the size of the shard to start, or where one runs; `warm`, `policy`: of one to
    start."""

    shard: ShardSize | ExistingServer
    part_bytes: int
    crew: CrewSize
    pace: Pace
    wait_ms: int
    warm: WarmOrder | None = None
    policy: str | None = None
    sayings: Sayings | None = None  # What the callers say of their next requests.


Watch = Callable[[Tally, float], None]


def run_replay(trace: Trace, settings: Settings, *, watch: Watch) -> Report:
    """Replays a trace and returns what came of it; `watch` is told the tally and the seconds so far, often.

    Raises ReplayError, KvStoreError where an existing shard refuses what is asked, and OSError where no folder can be
    made for the warm tier.
    """
    said = None
    if settings.sayings is not None:
        said = said_of(sessions_of(trace.requests, len(trace.requests)), settings.sayings)
    salt, speed = os.urandom(SALT_BYTES), settings.pace.speed or 1.0
    plan = plan_of(trace, part_bytes=settings.part_bytes, salt=salt, said=said, speed=speed)
    with ExitStack() as stack:
        shard = stack.enter_context(_shard(settings, plan))
        crew = stack.enter_context(
            crew_at_work(settings.crew, plan, target=shard.target, wait_ms=settings.wait_ms, tls=shard.tls)
        )
        ceiling = infinite_hit_rate(trace)  # While the workers start.
        sampler = stack.enter_context(sampling(shard.admin_target, shard.tls))
        capacity, warm_blocks = _capacity(settings, sampler), _warm_blocks(settings, sampler)
        expected = _expected(trace, capacity, warm_blocks)
        crew.wait_ready()
        start_s = time.monotonic()

        def check(tally: Tally) -> None:
            shard.check(tally)
            watch(tally, time.monotonic() - start_s)

        dispatch = Dispatch(plan, crew, pace=settings.pace, check=check)
        elapsed_s = dispatch.run()
        sampler.sample()
    tally = dispatch.tally
    return Report(
        tally=tally,
        elapsed_s=elapsed_s,
        latest_s=dispatch.latest_s,
        distinct_blocks=trace.distinct_blocks(),
        capacity_bytes=None if capacity is None else capacity.capacity_bytes,
        capacity_blocks=None if capacity is None else capacity.capacity_blocks,
        warm_blocks=warm_blocks,
        warm_place=None if settings.warm is None else settings.warm.place,
        expected=expected,
        ceiling=ceiling,
        samples=sampler.samples,
        match=percentiles(tally.match_ms),
        get=percentiles(tally.get_ms),
        put=percentiles(tally.put_ms),
    )


class _Shard:
    """The shard of a replay, own or not, and how to tell that it is gone."""

    def __init__(self, place: ExistingServer, own: OwnServer | None, plan: Plan) -> None:
        self.target, self.admin_target, self.tls = place.target, place.admin_target, place.tls
        self._own, self._plan = own, plan
        self._failed_calls = self._done = 0
        self._good_s = time.monotonic()

    def check(self, tally: Tally) -> None:
        """Raises ServerDied where its process ended, or calls do nothing but fail and one of our own does too."""
        if self._own is not None:
            self._own.check()
        now_s = time.monotonic()
        done = tally.prefilled + tally.decoded
        if done - self._done > tally.failed_calls - self._failed_calls or tally.failed_calls == self._failed_calls:
            self._good_s = now_s
        self._done, self._failed_calls = done, tally.failed_calls
        if now_s - self._good_s > SILENT_S:
            self._ask_whether_it_lives()
            self._good_s = now_s

    def _ask_whether_it_lives(self) -> None:
        try:
            say_hello(self.target, self._plan, self.tls)
        except ServerSilent as error:
            raise ServerDied(f"the server died: {error}") from None


@contextmanager
def _shard(settings: Settings, plan: Plan) -> Iterator[_Shard]:
    chosen = settings.shard
    if isinstance(chosen, ExistingServer):
        say_hello(chosen.target, plan, chosen.tls)
        yield _Shard(chosen, None, plan)
        return
    policy = () if settings.policy is None else ("--hot.policy", settings.policy)
    with warm_flags(settings.warm) as warm, own_server([*server_flags(chosen, plan), *policy, *warm]) as own:
        yield _Shard(ExistingServer(own.target, own.admin_target), own, plan)


def say_hello(target: str, plan: Plan, tls: TlsOptions | None = None) -> None:
    """Asks a shard for one block. Raises ServerSilent if none answers, KvStoreError if it refuses."""
    with Client(ClientOptions(target=target, tls=tls)) as client:
        failure = client.namespace(plan.spec()).match([bytes(32)], deadline_ms=HELLO_MS).failure
    if isinstance(failure, PeerError):
        raise ServerSilent(f"no server answers at {target}: {failure.message.rsplit(': ', 1)[-1]}")
    if failure is not None:
        raise failure


def _capacity(settings: Settings, sampler: Sampler) -> ShardSize | None:
    if isinstance(settings.shard, ShardSize):
        return settings.shard
    capacity_bytes = gauge(sampler.samples, "capacity_bytes")
    if capacity_bytes is None:
        return None
    slot = slot_bytes(settings.part_bytes)
    return ShardSize(slot, capacity_bytes // slot)


def _warm_blocks(settings: Settings, sampler: Sampler) -> int:
    """Returns how many blocks the warm tier holds; 0 where there is none, or none is known of."""
    if settings.warm is not None:
        return settings.warm.size.capacity_blocks
    if not gauge(sampler.samples, "warm_state"):
        return 0
    return (gauge(sampler.samples, "warm_capacity_bytes") or 0) // slot_bytes(settings.part_bytes)


def _expected(trace: Trace, capacity: ShardSize | None, warm_blocks: int) -> HitRates | None:
    """Both tiers are taken as one, in which no block takes the room of two."""
    if capacity is None or not capacity.capacity_blocks:
        return None
    return tail_first_lru(trace, capacity.capacity_blocks + warm_blocks)
