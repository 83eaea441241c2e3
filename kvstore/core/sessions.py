"""Sessions: one client process's life at this shard. When a session ends, so do its leases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.core.namespaces import Namespace
from kvstore_wire.errors import InvalidArgument, TableFull, UnknownNamespace, UnknownSession
from kvstore_wire.limits import MAX_NAMESPACES_PER_SESSION

MAX_LEASES = 8192  # A session: 20 us each when it ends.


@dataclass(eq=False)
class Session:
    """`open_until` is when it ends unless its stream was opened; None once it is open. `ended` tells a call that
    outlived its session that it must not lease any more."""

    id: bytes
    client: str
    features: frozenset[str]
    open_until: float | None
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    ended: bool = False

    def check_room(self) -> None:
        """Raises TableFull when the session holds all the leases it may: ending it must not take long."""
        if len(self.leases) >= MAX_LEASES:
            raise TableFull(f"{len(self.leases)} leases in this session", field="session", limit=f"{MAX_LEASES}")

    def namespace(self, handle: int) -> Namespace:
        """Raises UnknownNamespace if the session did not attach it."""
        found = self.namespaces.get(handle)
        if found is None:
            raise UnknownNamespace(f"handle {handle} is not of this session", field="namespace")
        return found

    def handle_of(self, namespace: Namespace) -> int:
        """Returns the handle of a namespace in this session, made on first use.

        Raises InvalidArgument when the session has too many.
        """
        for handle, known in self.namespaces.items():
            if known is namespace:
                return handle
        if len(self.namespaces) >= MAX_NAMESPACES_PER_SESSION:
            limit = f"{MAX_NAMESPACES_PER_SESSION}"
            raise InvalidArgument("too many namespaces in one session", field="session", limit=limit)
        handle = len(self.namespaces) + 1
        self.namespaces[handle] = namespace
        namespace.sessions += 1
        return handle


class SessionTable:
    """Sessions by their secret."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[bytes, Session] = {}
        self._internal: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def open(self, session: Session) -> None:
        """Raises TableFull when there are too many."""
        if len(self._sessions) >= self._limit:
            raise TableFull(f"{len(self._sessions)} sessions", field="session", limit=f"{self._limit}")
        self._sessions[session.id] = session

    def get(self, session_id: bytes) -> Session:
        """Raises UnknownSession."""
        found = self._sessions.get(session_id)
        if found is None:
            raise UnknownSession("the session ended or belongs to an earlier life of the shard", field="session")
        return found

    def keep_internal(self, session: Session) -> None:
        """Adds a session of the shard itself: nobody can name it, and it is not counted."""
        self._internal.append(session)

    def holders(self) -> list[Session]:
        """Every session that may hold leases, the shard's own included."""
        return [*self._sessions.values(), *self._internal]

    def forget_leases(self, session_id: bytes, ended: Sequence[int]) -> None:
        """Takes ended leases out of their session."""
        found = self._sessions.get(session_id) or next((s for s in self._internal if s.id == session_id), None)
        if found is not None:
            found.leases.difference_update(ended)

    def close(self, session: Session) -> None:
        """Takes a session out; its leases are the caller's to end."""
        session.ended = True
        if self._sessions.pop(session.id, None) is not None:
            for namespace in session.namespaces.values():
                namespace.sessions -= 1

    def unopened(self, now: float) -> list[Session]:
        """Sessions whose stream was not opened in time."""
        return [s for s in self._sessions.values() if s.open_until is not None and s.open_until <= now]
