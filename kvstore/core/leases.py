"""Leases: rights to read or write named slots, each with an end.

Rules
- A lease ends once: by Release, Commit of its last part, Abort, its deadline, or the end of its session.
- An ended lease is unknown. Identifiers are never reused in one generation, so that a late caller can only be refused.
- A lease past its deadline counts as ended even before the sweep finds it.
- A lease is pinned while bytes are copied from or to its slots outside the core. If it ends meanwhile it is unknown at
  once as any other, but what it holds comes back with its last pin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from kvstore.core.few import Rows
from kvstore.core.namespaces import Namespace
from kvstore_wire.errors import LeaseExpired, TableFull

TICK_S = 0.25  # Width of a sweep bucket: an ended lease's slots come back at most this late.
SWEEP_LEASES = 1024  # Ended by one sweep, so that the calls of others pass in between: about 25 ms.


@dataclass(eq=False)
class Lease:
    """What both kinds share. `ended` tells a transfer under way that it must not touch the slots any more, unless it
    has one of the `pins`; what it moves is of no use then."""

    id: int
    session: bytes
    namespace: Namespace
    deadline: float
    ended: bool = field(default=False, init=False)
    pins: int = field(default=0, init=False)

    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(eq=False)
class ReadLease(Lease):
    """Blocks held for reading (a block may occur twice) and the parts granted, in order."""

    blocks: Rows = field(default_factory=list)
    parts: Rows = field(default_factory=list)


@dataclass(eq=False)
class WriteLease(Lease):
    """Parts reserved for writing. `landed[i]` is 1 once all bytes of parts[i] are there, `open[i]` 1 until it is
    committed or dropped. Its blocks are held once each. `busy` is set while a transfer fills its slots. `owed` are
    parts dropped under a pin, whose slots come back with the last one."""

    blocks: Rows = field(default_factory=list)
    parts: Rows = field(default_factory=list)
    landed: bytearray = field(default_factory=bytearray)
    open: bytearray = field(default_factory=bytearray)
    busy: bool = False
    owed: list[int] = field(default_factory=list)


class LeaseTable:
    """Leases by identifier, and in buckets by deadline for the sweep."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 1
        self._leases: dict[int, Lease] = {}
        self._lingering: dict[int, Lease] = {}
        self._buckets: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """Leases that hold slots: those that have not ended, and the ended that are pinned."""
        return len(self._leases) + len(self._lingering)

    def all(self) -> list[Lease]:
        """Every lease that has not ended."""
        return list(self._leases.values())

    def lingering(self) -> list[Lease]:
        """Every lease that has ended and is pinned still."""
        return list(self._lingering.values())

    def new_id(self) -> int:
        """Returns an identifier for a new lease. Raises TableFull when too many leases are open."""
        if len(self._leases) + len(self._lingering) >= self._limit:
            raise TableFull(f"{len(self)} leases are open", field="lease", limit=f"{self._limit}")
        self._next += 1
        return self._next - 1

    def add(self, lease: Lease) -> None:
        self._leases[lease.id] = lease
        self._bucket(lease.deadline).add(lease.id)

    def get(self, lease_id: int, session: bytes, now: float) -> Lease | None:
        """Returns a lease of this session that has not ended."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session or lease.deadline <= now:
            return None
        return lease

    def renew(self, lease: Lease, deadline: float) -> None:
        self._bucket(lease.deadline).discard(lease.id)
        lease.deadline = deadline
        self._bucket(deadline).add(lease.id)

    def end(self, lease: Lease) -> None:
        """Takes a lease out and marks it ended; what it held is the caller's to give back."""
        lease.ended = True
        if self._leases.pop(lease.id, None) is not None:
            self._bucket(lease.deadline).discard(lease.id)
            if lease.pins:
                self._lingering[lease.id] = lease

    def pin(self, lease: Lease) -> None:
        """Adds a pin. Raises LeaseExpired if the lease has ended."""
        if lease.ended:
            raise LeaseExpired(f"lease {lease.id} has ended", field="lease")
        lease.pins += 1

    def unpin(self, lease: Lease) -> bool:
        """Takes a pin off; true if it was the last. Raises ValueError if there is none."""
        if not lease.pins:
            raise ValueError(f"lease {lease.id} has no pin")
        lease.pins -= 1
        if not lease.pins:
            self._lingering.pop(lease.id, None)
        return not lease.pins

    def take_expired(self, now: float) -> list[Lease]:
        """Ends and returns leases whose deadline has passed, oldest bucket first, at most SWEEP_LEASES of them."""
        last = int(now / TICK_S)
        due = sorted(b for b in self._buckets if b < last)
        expired: list[Lease] = []
        for number in due:
            bucket = self._buckets[number]
            expired += [self._leases[i] for i in sorted(islice(bucket, SWEEP_LEASES - len(expired)))]
        for lease in expired:
            self.end(lease)
        for number in due:
            if not self._buckets[number]:
                del self._buckets[number]
        return expired

    def _bucket(self, deadline: float) -> set[int]:
        number = int(deadline / TICK_S)
        found = self._buckets.get(number)
        if found is None:
            found = self._buckets[number] = set()
        return found
