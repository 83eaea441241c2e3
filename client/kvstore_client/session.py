"""The client's one session at its shard: attached when first needed, held open by its stream, replaced when lost.

Rules:
- One session serves all namespaces of a client. A namespace is added to it by Attach when it is first used.
- Attaches run one at a time and are shared: however many calls need the same one, it is sent once.
- When the stream breaks or the shard knows the session no more, the session is lost: its leases have ended, and the
  next call attaches anew. Nothing is attached in the background, so an idle client of a dead shard is silent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from kvstore_client.channel import Connection
from kvstore_client.deadline import Deadline
from kvstore_client.errors import ClientClosed, MalformedAnswer
from kvstore_client.options import ClientOptions
from kvstore_client.quiet import QuietLog
from kvstore_client.stats import Counters
from kvstore_wire import limits as contract
from kvstore_wire.errors import DeadlineExceeded, KvStoreError, UnknownSession, Unreachable
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import within

HINTS, RANGES, WARM = "hints", "ranges", "warm"
LONGEST_RENEW_PAUSE_S = 1.0


@dataclass(frozen=True)
class Binding:
    """A namespace in a session: what every call but Attach needs."""

    session: bytes
    generation: int
    namespace: int
    limits: types.Limits
    features: frozenset[str]
    offers: Mapping[str, str]  # Address by transport.

    def default_wait_ms(self, options: ClientOptions) -> int:
        """How long a read waits whose caller did not say: only a shard with a disk is worth waiting for."""
        return min(options.disk_wait_ms, self.limits.max_wait_ms) if WARM in self.features else 0


class HasLife(Protocol):
    """A lease in a caller's hands."""

    @property
    def known_life(self) -> LeaseLife | None: ...


class LeaseLife:
    """Whether a lease may still be alive, as far as this side has heard."""

    def __init__(self, session: bytes, lease: types.Lease) -> None:
        self.session = session
        self.lease = lease
        self.ended = False


@dataclass(eq=False)
class _Open:
    """The session in use. `bindings` are those of its namespaces by (name, digest)."""

    session: bytes
    generation: int
    limits: types.Limits
    features: frozenset[str]
    offers: Mapping[str, str]
    bindings: dict[tuple[str, bytes], Binding] = field(default_factory=dict)
    pulse: asyncio.Task[None] | None = None

    def bind(self, name: tuple[str, bytes], handle: int) -> Binding:
        binding = Binding(self.session, self.generation, handle, self.limits, self.features, self.offers)
        self.bindings[name] = binding
        return binding


class SessionKeeper:
    """Owns the session and its stream. Lives in the client's event loop."""

    def __init__(self, *, connection: Connection, options: ClientOptions, stats: Counters, log: QuietLog) -> None:
        self._connection, self._options = connection, options
        self._stats, self._log = stats, log
        self._current: _Open | None = None
        self._generation: int | None = None
        self._attaching: dict[tuple[str, bytes], asyncio.Task[Binding]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._leases: WeakValueDictionary[int, LeaseLife] = WeakValueDictionary()
        self._leases_lock = threading.Lock()  # Threads that block add leases too.
        # Leases to keep alive, by number; one that nobody can look at any more runs out.
        self._kept: WeakValueDictionary[int, LeaseLife] = WeakValueDictionary()
        self._short_lease = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.draining = False

    @property
    def generation(self) -> int | None:
        """The shard's life that was last attached to; None before the first."""
        return self._generation

    async def bind(self, spec: NamespaceSpec, deadline: Deadline) -> Binding:
        """Returns the namespace's binding, attaching if needed. Raises KvStoreError."""
        ready = self.ready(spec)
        if ready is not None:
            return ready
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        task = self._attaching.get(_name(spec))
        if task is None:
            task = asyncio.create_task(self._attach(spec, self._attach_deadline(deadline)))
            self._attaching[_name(spec)] = task
            task.add_done_callback(lambda done: self._attached(spec, done))
        finished, _ = await asyncio.wait({task}, timeout=deadline.remaining_s())
        if not finished:
            raise DeadlineExceeded("the deadline passed while attaching")
        if task.cancelled():
            raise ClientClosed("the client was closed while attaching", field="client")
        return task.result()

    def lost(self, session: bytes, why: str) -> None:
        """Forgets `session` if it is the one in use, and ends its leases."""
        current = self._current
        if current is None or current.session != session:
            return
        self._current = None
        if current.pulse is not None and current.pulse is not asyncio.current_task():
            current.pulse.cancel()
        for life in self._lives():
            life.ended = life.ended or life.session == session
        self._stats.sessions_lost += 1
        self._log.warning("lost", f"session lost ({why}); the next call attaches anew")

    def forget(self, spec: NamespaceSpec, binding: Binding) -> None:
        """Forgets the namespace's handle, so that the next call attaches it anew."""
        if self._current is not None and self._current.session == binding.session:
            self._current.bindings.pop(_name(spec), None)

    def watch(self, life: LeaseLife) -> None:
        """Marks `life` ended when word of its end comes. May be called from any thread."""
        with self._leases_lock:
            self._leases[life.lease.id] = life
        current = self._current
        life.ended = life.ended or current is None or current.session != life.session

    def keep(self, life: LeaseLife) -> None:
        """Lengthens a lease again and again until `drop`, or its end. May be called from any thread."""
        with self._leases_lock:
            self._kept[life.lease.id] = life
        if life.lease.ttl_ms < 3 * LONGEST_RENEW_PAUSE_S * 1000:
            with suppress(RuntimeError):  # The loop has ended, and the lease with it.
                self._loop.call_soon_threadsafe(self._short_lease.set)

    def drop(self, lease: HasLife) -> None:
        """Lets a lease run out. May be called from any thread."""
        life = lease.known_life
        if life is not None:
            with self._leases_lock:
                self._kept.pop(life.lease.id, None)

    async def close(self) -> None:
        """Ends the session by ending its stream. Idempotent."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [t for t in self._attaching.values() if not t.done()]
        current, self._current = self._current, None
        if current is not None and current.pulse is not None:
            tasks.append(current.pulse)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for life in self._lives():
            life.ended = True

    def ready(self, spec: NamespaceSpec) -> Binding | None:
        """Returns the namespace's binding if it is attached. May be called from any thread."""
        current = self._current
        return None if current is None else current.bindings.get(_name(spec))

    def _attach_deadline(self, deadline: Deadline) -> Deadline:
        # Calls that join later must not fail by the first one's short deadline.
        return max(deadline, Deadline.after(self._options.default_deadline_ms), key=lambda d: d.at_s)

    def _attached(self, spec: NamespaceSpec, task: asyncio.Task[Binding]) -> None:
        self._attaching.pop(_name(spec), None)
        if not task.cancelled() and isinstance(task.exception(), Unreachable):
            self._log.warning("unreachable", f"cannot attach: {task.exception()}")

    async def _attach(self, spec: NamespaceSpec, deadline: Deadline) -> Binding:
        async with self._one_at_a_time:
            current = self._current
            try:
                answer = await self._ask(spec, current, deadline)
            except UnknownSession:
                if current is None:
                    raise
                self.lost(current.session, "unknown to the shard")
                current = None
                answer = await self._ask(spec, None, deadline)
            _check_answer(spec, answer)
            return self._adopt(spec, answer, current)

    async def _ask(self, spec: NamespaceSpec, current: _Open | None, deadline: Deadline) -> store.AttachResponse:
        request = store.AttachRequest(
            min_version=contract.PROTOCOL_VERSION,
            max_version=contract.PROTOCOL_VERSION,
            client=self._options.name,
            session=b"" if current is None else current.session,
            namespace=spec.to_message(),
            digest=spec.digest,
            features=[HINTS] if self._options.gives_hints else [],
        )
        answer: store.AttachResponse = await self._connection.unary("Attach", request, deadline)
        return answer

    def _adopt(self, spec: NamespaceSpec, answer: store.AttachResponse, joined: _Open | None) -> Binding:
        if joined is not None and self._current is not joined:
            raise UnknownSession("the session ended while a namespace was added to it")
        current = joined if joined is not None else self._opened(answer)
        return current.bind(_name(spec), answer.namespace)

    def _opened(self, answer: store.AttachResponse) -> _Open:
        offers = {t.name: t.address for t in answer.transports}
        current = _Open(answer.session, answer.generation, answer.limits, frozenset(answer.features), offers)
        self._stats.attaches += 1
        self._stats.reattaches += self._generation is not None
        restarted = self._generation is not None and self._generation != answer.generation
        self._log.info("attached", f"attached to {answer.shard}{', which has restarted' if restarted else ''}")
        self._current, self._generation, self.draining = current, answer.generation, False
        current.pulse = asyncio.create_task(self._hold(current))
        return current

    async def _keep_alive(self, current: _Open) -> None:
        """Renews the leases that are to be kept, each when a third of its time has gone."""
        renewed: dict[int, float] = {}
        while True:
            self._short_lease.clear()
            with self._leases_lock:
                kept = {i: k for i, k in self._kept.items() if k.session == current.session and not k.ended}
            now = self._loop.time()
            renewed = {i: renewed.get(i, now) for i in kept}
            due = [life for i, life in kept.items() if now - renewed[i] >= life.lease.ttl_ms / 3000]
            for at in range(0, len(due), contract.MAX_LEASES_PER_CALL):
                await self._renew(current, due[at : at + contract.MAX_LEASES_PER_CALL])
            renewed.update({life.lease.id: now for life in due})
            shortest_s = min((life.lease.ttl_ms / 3000 for life in kept.values()), default=LONGEST_RENEW_PAUSE_S)
            del kept, due  # They would keep alive what nobody looks at any more.
            with suppress(asyncio.TimeoutError):
                await within(max(0.02, min(shortest_s / 2, LONGEST_RENEW_PAUSE_S)), self._short_lease.wait())

    async def _renew(self, current: _Open, lives: list[LeaseLife]) -> None:
        """Lengthens leases by what each had at first; those that have ended are marked."""
        for lease_ms in {life.lease.ttl_ms for life in lives}:
            same = [life for life in lives if life.lease.ttl_ms == lease_ms]
            request = store.RenewRequest(
                session=current.session, leases=[life.lease for life in same], lease_ms=lease_ms
            )
            try:
                answer: store.RenewResponse = await self._connection.unary("Renew", request, Deadline.after(lease_ms))
            except KvStoreError:  # Tried again at the next turn; if that is too late, the lease ends.
                continue
            for life, valid in zip(same, answer.valid, strict=False):
                life.ended = life.ended or not valid

    async def _hold(self, current: _Open) -> None:
        why = "closed by the shard"
        keeping = asyncio.ensure_future(self._keep_alive(current))
        try:
            async with aclosing(self._connection.pulse(current.session)) as notices:
                async for notice in notices:
                    self._take(notice)
        except KvStoreError as error:
            why = str(error)
        finally:
            keeping.cancel()
            self.lost(current.session, why)

    def _take(self, notice: store.SessionNotice) -> None:
        kind = notice.WhichOneof("notice")
        if kind == "leases_ended":
            self._end_leases(notice.leases_ended.ids)
        elif kind == "draining":
            self.draining = True
            self._log.warning("draining", f"shard goes away within {notice.draining.within_ms} ms")
        elif kind == "purged":
            self._stats.purges += 1
            self._log.info("purged", "a namespace was emptied by an administrator")

    def _end_leases(self, ids: Iterable[int]) -> None:
        for lease_id in ids:
            self._stats.leases_ended += 1
            with self._leases_lock:
                life = self._leases.get(lease_id)
            if life is not None:
                life.ended = True

    def _lives(self) -> list[LeaseLife]:
        with self._leases_lock:
            return list(self._leases.values())


def _name(spec: NamespaceSpec) -> tuple[str, bytes]:
    return spec.name, spec.digest


def _check_answer(spec: NamespaceSpec, answer: store.AttachResponse) -> None:
    limits = answer.limits
    if len(answer.session) != contract.SESSION_BYTES or answer.namespace == 0:
        raise MalformedAnswer("Attach answered without a session or a namespace")
    if answer.digest != spec.digest:
        raise MalformedAnswer("Attach answered for another namespace")
    if answer.version != contract.PROTOCOL_VERSION:
        raise MalformedAnswer(f"Attach chose version {answer.version}")
    needed = (limits.max_match_blocks, limits.max_blocks, limits.max_call_bytes, limits.chunk_bytes)
    if not all(needed):
        raise MalformedAnswer("Attach answered without limits")
