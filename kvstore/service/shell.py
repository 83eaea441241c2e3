"""What every handler of a shard shares: the core, the arena's bytes, the clock, and who waits for what.

The core decides and leaves effects; `Shell.settle` performs them. Handlers run on one event loop and call the core
without awaiting in between, so that each call is atomic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field

from kvstore.core.reading import Acquisition
from kvstore.core.sessions import Session
from kvstore.core.store import LeasesEnded, NamespacePurged, SessionEnded, Store, Wake
from kvstore.service.checks import Checks
from kvstore.service.copier import RegionCopier
from kvstore.service.failpoints import Failpoints
from kvstore.service.latency import Latencies
from kvstore.service.regions import RegionTable
from kvstore.service.tiering import Tiering
from kvstore.tiers.memory import ArenaMemory
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import within

_LOG = logging.getLogger("kvstore.shell")
MAX_NOTICES = 1024  # A client that does not read loses the oldest; notices are advice, leases end without them.


@dataclass(frozen=True)
class Call:
    """One call at a door. `deadline` is on the clock of `Shell.now`, None if the caller set none."""

    deadline: float | None = None
    peer: str = ""


class NoticeBoard:
    """Notices for one session's stream."""

    def __init__(self) -> None:
        self._notices: deque[pb.SessionNotice | None] = deque(maxlen=MAX_NOTICES)
        self._ready = asyncio.Event()

    def post(self, notice: pb.SessionNotice | None) -> None:
        """Adds a notice; None closes the stream."""
        self._notices.append(notice)
        self._ready.set()

    async def next(self) -> pb.SessionNotice | None:
        while not self._notices:
            self._ready.clear()
            await self._ready.wait()
        return self._notices.popleft()


@dataclass(eq=False)
class Shell:
    """The parts of a running shard that handlers need."""

    store: Store
    memory: ArenaMemory
    checks: Checks
    generation: int
    name: str
    failpoints: Failpoints
    regions: RegionTable
    copier: RegionCopier
    latencies: Latencies = field(default_factory=Latencies)
    tiering: Tiering | None = None
    boards: dict[bytes, NoticeBoard] = field(default_factory=dict)
    transports: list[pb.Transport] = field(default_factory=lambda: [pb.Transport(name="grpc")])
    draining: bool = False
    audits: int = 0
    audit_faults: int = 0
    _waiters: dict[int, asyncio.Event] = field(default_factory=dict)

    @property
    def limits(self) -> types.Limits:
        return self.checks.limits

    @staticmethod
    def now() -> float:
        """Seconds on the monotonic clock: no step of the wall clock ends a lease."""
        return time.monotonic()

    @staticmethod
    def wall() -> float:
        """Seconds on the wall clock, for what outlives the process."""
        return time.time()

    def session(self, session_id: bytes) -> Session:
        """Raises UnknownSession."""
        return self.store.sessions.get(session_id)

    @property
    def threads_work(self) -> bool:
        """Whether threads of this process copy, or read from disk, so that the event loop had better sleep."""
        return self.copier.is_busy or (self.tiering is not None and self.tiering.promotion.bytes_on_the_way > 0)

    def settle(self) -> None:
        """Performs the effects that the core left."""
        for effect in self.store.take_effects():
            if isinstance(effect, Wake):
                waiter = self._waiters.get(id(effect.acquisition))
                if waiter is not None:
                    waiter.set()
            elif isinstance(effect, LeasesEnded):
                notice = pb.SessionNotice.LeasesEnded(ids=effect.lease_ids)
                self._post(effect.session, pb.SessionNotice(leases_ended=notice))
            elif isinstance(effect, NamespacePurged):
                purged = pb.SessionNotice.Purged(namespace=effect.handle)
                self._post(effect.session, pb.SessionNotice(purged=purged))
            elif isinstance(effect, SessionEnded):
                self.regions.end_session(effect.session)
                self._post(effect.session, None)
        if self.tiering is not None:
            self.tiering.demotion.poke()

    def tick(self) -> None:
        """Lets the core end what ran out, and looks at the warm tier."""
        self.store.tick(self.now())
        self.settle()
        if self.tiering is not None:
            self.tiering.tick()

    def audit(self) -> None:
        """Recounts the arena's bytes. A difference is a fault of the program: loud, counted, never repaired."""
        self.audits += 1
        fault = self.store.records.account_fault()
        if fault:
            self.audit_faults += 1
            _LOG.error("the arena's account is wrong: %s", fault)

    async def wait_for_change(self, acquisition: Acquisition, until: float) -> bool:
        """Waits until the Acquire's block changed; false if `until` came first."""
        if acquisition.waits_for is None:  # Woken already, while the step's answer was being sent.
            return True
        event = self._waiters[id(acquisition)] = asyncio.Event()
        try:
            await within(max(0.0, until - self.now()), event.wait())
        except asyncio.TimeoutError:
            return False
        finally:
            del self._waiters[id(acquisition)]
        return True

    def _post(self, session_id: bytes, notice: pb.SessionNotice | None) -> None:
        board = self.boards.get(session_id)
        if board is not None:
            board.post(notice)
