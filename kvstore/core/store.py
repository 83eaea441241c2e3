"""The decisions of one shard's hot tier, as one object.

Pure: no I/O, no clock (`now` is seconds on any monotonic clock), no threads, no bytes. What must happen outside is
left in `effects`, which the shell takes after each call. Only one caller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.core.arena import SLOT_UNIT_BYTES, SPARE_POOL, ArenaMap, ClassKey
from kvstore.core.columns import RESERVED, Floats, Ids
from kvstore.core.counters import Counters, Removal
from kvstore.core.eviction import POLICIES
from kvstore.core.few import Rows
from kvstore.core.leases import Lease, LeaseTable, ReadLease, WriteLease
from kvstore.core.namespaces import Namespace, NamespaceRules, NamespaceTable
from kvstore.core.reading import Acquisition, Reader, ReadLimits
from kvstore.core.records import Records
from kvstore.core.sessions import Session, SessionTable
from kvstore.core.space import Space
from kvstore.core.writing import Writer
from kvstore_wire.namespace import NamespaceSpec


@dataclass(frozen=True)
class StoreSettings:
    """Limits of one shard's core. Sizes in bytes, times in seconds."""

    capacity_bytes: int
    page_bytes: int
    policy: str = "lru"
    max_leased_share: float = 0.8
    max_call_bytes: int = 1 << 30
    max_sessions: int = 4096
    max_namespaces: int = 1024
    max_leases: int = 1 << 16
    session_open_s: float = 10.0
    homes: tuple[ClassKey, ...] = ()


# One step of long work, 4 ms: others' calls pass in between, and each of them takes a few turns of the event loop.
STEP_BLOCKS = 512
EXPIRED_BLOCKS_PER_TICK = 2048
PROBE_HOME = ClassKey(SLOT_UNIT_BYTES, SPARE_POOL)  # One slot for the health probe, beside the capacity.


@dataclass(frozen=True)
class Wake:
    """An Acquire's block changed: step it."""

    acquisition: Acquisition


@dataclass(frozen=True)
class LeasesEnded:
    """Leases of a session ended before their holder said so: tell it."""

    session: bytes
    lease_ids: tuple[int, ...]


@dataclass(frozen=True)
class NamespacePurged:
    """A namespace of a session was emptied: tell it."""

    session: bytes
    handle: int


@dataclass(frozen=True)
class SessionEnded:
    """A session ended here: close its stream."""

    session: bytes


Effect: TypeAlias = "Wake | LeasesEnded | NamespacePurged | SessionEnded"


@dataclass(frozen=True)
class Purged:
    """What a purge removed; `deferred_blocks` of them are still held by readers or writers."""

    blocks: int
    deferred_blocks: int
    bytes: int


class Store:
    """One shard's tables, and the verbs over them. Reading is `reader`, writing is `writer`."""

    def __init__(
        self,
        settings: StoreSettings,
        rules_of: Callable[[NamespaceSpec], NamespaceRules] = lambda spec: NamespaceRules(),
    ) -> None:
        self.settings = settings
        arena = ArenaMap(settings.capacity_bytes, settings.page_bytes, settings.homes)
        self.records = Records(arena, POLICIES[settings.policy])
        self.records.on_change = self._changed
        self.leases = LeaseTable(settings.max_leases)
        self.sessions = SessionTable(settings.max_sessions)
        self.namespaces = NamespaceTable(
            limit=settings.max_namespaces,
            rules_of=rules_of,
            ttl_place=self.records.blocks.ttl_place,
            on_drop=self._forget,
        )
        self._dropped = Counters()
        share = int(settings.max_leased_share * settings.capacity_bytes)
        self.reader = Reader(self.records, self.leases, ReadLimits(share, settings.max_call_bytes))
        self.writer = Writer(self.records, self.leases, Space(self.records), share, settings.max_call_bytes)
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """Returns what must happen outside since the last call."""
        if not self._effects:
            return []
        effects, self._effects = self._effects, []
        return effects

    # -- sessions ------------------------------------------------------------------------------------------------

    def open_session(self, session_id: bytes, *, client: str, features: frozenset[str], now: float) -> Session:
        """Opens a session that ends unless its stream is opened in time. Raises TableFull."""
        session = Session(session_id, client, features, now + self.settings.session_open_s)
        self.sessions.open(session)
        return session

    def attach(self, session: Session, spec: NamespaceSpec, digest: bytes) -> int:
        """Adds a namespace to a session and returns its handle.

        Raises NamespaceMismatch, TableFull, InvalidArgument; then nothing changed.
        """
        return session.handle_of(self.namespaces.attach(spec, digest))

    def end_session(self, session: Session, now: float) -> None:
        """Ends a session and all its leases at once; its Acquires under way are woken and find that out."""
        self.sessions.close(session)
        self._effects.extend(Wake(a) for a in self.reader.waiting_in(session))
        for lease_id in sorted(session.leases):
            lease = self.leases.get(lease_id, session.id, float("-inf"))
            if lease is not None:
                self._end(lease, now)
        session.leases.clear()
        self._effects.append(SessionEnded(session.id))

    # -- leases --------------------------------------------------------------------------------------------------

    def read_lease(self, session: Session, lease_id: int, now: float) -> ReadLease | None:
        """Returns a live read lease of the session."""
        lease = self.leases.get(lease_id, session.id, now)
        return lease if isinstance(lease, ReadLease) else None

    def write_lease(self, session: Session, lease_id: int, now: float) -> WriteLease | None:
        """Returns a live write lease of the session."""
        lease = self.leases.get(lease_id, session.id, now)
        return lease if isinstance(lease, WriteLease) else None

    def renew(self, session: Session, lease_id: int, *, lease_s: float, now: float) -> bool:
        """Lengthens a lease; false if it has ended."""
        lease = self.leases.get(lease_id, session.id, now)
        if lease is None:
            return False
        self.leases.renew(lease, now + lease_s)
        return True

    def release(self, session: Session, lease_id: int, now: float) -> bool:
        """Ends a read lease; false if it had ended, so that what was read must be dropped."""
        lease = self.read_lease(session, lease_id, now)
        if lease is None:
            return False
        self.end_lease(session, lease, now)
        return True

    def abort(self, session: Session, lease_id: int, now: float) -> bool:
        """Ends a write lease and drops what it reserved; false if it had ended."""
        lease = self.write_lease(session, lease_id, now)
        if lease is None:
            return False
        self.end_lease(session, lease, now)
        return True

    def end_lease(self, session: Session, lease: Lease, now: float) -> None:
        """Ends a lease of the session, if it has not ended."""
        session.leases.discard(lease.id)
        if not lease.ended:
            self._end(lease, now)

    def commit(
        self, session: Session, lease: WriteLease, indexes: Sequence[int], *, checksums: Sequence[int], now: float
    ) -> bytes:
        """Makes landed parts visible (see Writer.commit)."""
        states = self.writer.commit(lease, indexes, checksums, now)
        if lease.ended:
            session.leases.discard(lease.id)
        return states

    def pin(self, lease: Lease) -> None:
        """Keeps the slots of a lease while bytes are copied from or to them outside the core; counted.

        A lease may end under its pins: it is unknown at once and nothing of it can be committed, but its slots and
        holds stay as they are until the last pin goes. Every pin must be taken off once. Raises LeaseExpired.
        """
        self.leases.pin(lease)

    def unpin(self, lease: Lease, now: float) -> None:
        """Takes one pin off; the last one of an ended lease gives back what it held. Raises ValueError for none."""
        if not self.leases.unpin(lease):
            return
        if isinstance(lease, ReadLease):
            self.reader.unpinned(lease, now)
        elif isinstance(lease, WriteLease):
            self.writer.unpinned(lease, now)

    def _end(self, lease: Lease, now: float) -> None:
        if isinstance(lease, ReadLease):
            self.reader.end(lease, now)
        elif isinstance(lease, WriteLease):
            self.writer.end(lease, now)

    # -- removing ------------------------------------------------------------------------------------------------

    def delete(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Removes blocks; answers one byte a key: 0 not found, 1 gone, 2 gone for all but its holders."""
        out = bytearray(len(keys))
        for i, key in enumerate(keys):
            block = namespace.blocks.get(key)
            if block is not None:
                out[i] = 1 if self.records.unlink(block, Removal.DELETED) else 2
        return bytes(out)

    @property
    def takes_hints(self) -> bool:
        """Whether what callers say of the next use counts."""
        return POLICIES[self.settings.policy].takes_hints

    def over(self, namespace: Namespace, keys: Sequence[bytes], session_tag: int) -> int:
        """Takes in that a session is over, named by a chain or else by its tag; returns how many blocks that concerns.

        By tag it looks at every block of the shard once: a millisecond a million.
        """
        return self.records.over(namespace, keys, session_tag)

    def purge(self, chosen: Callable[[Namespace], bool], *, created_before: float) -> Purged:
        """Removes the blocks of the chosen namespaces that were made before a time."""
        *_, done = self.purge_in_steps(chosen, created_before=created_before)
        return done

    def purge_in_steps(self, chosen: Callable[[Namespace], bool], *, created_before: float) -> Iterator[Purged]:
        """As `purge`, step by step: yields what it has removed so far.

        Others may call in between: what they write meanwhile stays. The sessions hear of it at the end.
        """
        emptied = [namespace for namespace in self.namespaces if chosen(namespace)]
        for namespace in emptied:
            namespace.is_being_purged = True
        try:
            yield from self._purged(emptied, created_before)
        finally:
            for namespace in emptied:
                namespace.is_being_purged = False

    def _purged(self, emptied: Sequence[Namespace], created_before: float) -> Iterator[Purged]:
        total = deferred = freed = 0
        for namespace in emptied:
            rows = np.fromiter(namespace.blocks.values(), np.int32, len(namespace.blocks))
            rows = rows[self.records.blocks.created[rows] < created_before]
            created = self.records.blocks.created[rows]
            for at in range(0, len(rows), STEP_BLOCKS):
                end = at + STEP_BLOCKS
                for block in self._unchanged(namespace, rows[at:end], created[at:end]):
                    parts = int(self.records.blocks.present[block]) + int(self.records.blocks.reserved[block])
                    freed += parts * self.records.slot_bytes(block)
                    total += 1
                    deferred += not self.records.unlink(block, Removal.PURGED)
                yield Purged(total, deferred, freed)
        self._tell_purged(emptied)
        yield Purged(total, deferred, freed)

    def _unchanged(self, namespace: Namespace, rows: Ids, created: Floats) -> list[int]:
        """Those of a namespace's rows that still hold the block made at that time."""
        blocks = self.records.blocks
        same = (blocks.created[rows] == created) & (blocks.namespace[rows] == namespace.index) & ~blocks.doomed[rows]
        return [row for row in rows[same].tolist() if blocks.key[row] is not None]

    def _tell_purged(self, emptied: Sequence[Namespace]) -> None:
        purged = frozenset(emptied)
        for session in self.sessions:
            handles = [h for h, n in session.namespaces.items() if n in purged]
            self._effects.extend(NamespacePurged(session.id, h) for h in handles)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends what ran out: leases, sessions that were never opened, blocks past their life. Call it often."""
        ended: dict[bytes, list[int]] = {}
        for lease in self.leases.take_expired(now):
            kind = "read" if isinstance(lease, ReadLease) else "write"
            lease.namespace.counters.add(f"{kind}_leases_expired")
            ended.setdefault(lease.session, []).append(lease.id)
            self._end(lease, now)
        for session_id, ids in ended.items():
            self.sessions.forget_leases(session_id, ids)
            self._effects.append(LeasesEnded(session_id, tuple(ids)))
        for session in self.sessions.unopened(now):
            self.end_session(session, now)
        left = EXPIRED_BLOCKS_PER_TICK
        for namespace in self.namespaces:
            if left > 0:  # The rest goes with the next ticks; nobody is served a block past its life.
                left -= self._expire(namespace, left, now)

    def _expire(self, namespace: Namespace, most: int, now: float) -> int:
        """Removes blocks past their life, about `most`; returns how many went."""
        if namespace.expiry is None or namespace.rules.ttl_s is None:
            return 0
        limit = now - namespace.rules.ttl_s
        old = namespace.expiry.take_while_older(limit, self.records.blocks.created, most)
        for block in old.tolist():
            self.records.unlink(block, Removal.TTL)
        return len(old)

    # -- looking -------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Sums of the namespaces' counters, those of namespaces that are gone included, the probe's own left out."""
        sums = self._dropped.values()
        for namespace in self.namespaces:
            if namespace.rules.spare:
                continue
            for name, value in namespace.counters.values().items():
                sums[name] += value
        return sums

    def gauges(self) -> dict[str, int]:
        """Numbers that go up and down."""
        records = self.records
        return {
            "capacity_bytes": records.arena.total_bytes,
            "free_bytes": records.free_bytes,
            "reserved_bytes": records.reserved_bytes,
            "leased_bytes": records.leased_bytes,
            "evictable_bytes": records.evictable_bytes,
            "stored_blocks": len(records.blocks),
            "free_pages": records.arena.free_page_count,
            "sessions": len(self.sessions),
            "leases": len(self.leases),
            "namespaces": len(self.namespaces),
            "waiting_acquires": sum(len(w) for w in self.reader.waiting.values()),
        }

    def check(self) -> None:
        """Raises AssertionError unless all tables agree. Costs the number stored."""
        self.records.check()
        holds = np.zeros(len(self.records.blocks.holds), np.int64)
        lingering = self.leases.lingering()
        for lease in [*self.leases.all(), *lingering]:
            if isinstance(lease, ReadLease | WriteLease):
                np.add.at(holds, lease.blocks, 1)
            if isinstance(lease, WriteLease):
                assert lease.pins or not len(lease.owed), "slots are owed to no pin"
                assert (self.records.parts.state[lease.owed] == RESERVED).all(), "an owed slot was given back"
        assert all(lease.ended and lease.pins for lease in lingering), "a lease lingers without a reason"
        assert (holds == self.records.blocks.holds).all(), "holds and leases disagree"
        known = {i for s in self.sessions.holders() for i in s.leases}
        assert known >= {lease.id for lease in self.leases.all()}, "a lease without its session"

    def part_views(self, parts: Rows) -> tuple[list[int], list[int], list[int]]:
        """Returns (offsets, lengths, checksums) of parts."""
        columns = self.records.parts
        if isinstance(parts, list):
            cell = columns.cell
            return [cell.offset[p] for p in parts], [cell.length[p] for p in parts], [cell.checksum[p] for p in parts]
        return columns.offset[parts].tolist(), columns.length[parts].tolist(), columns.checksum[parts].tolist()

    def _forget(self, namespace: Namespace) -> None:
        for name, value in namespace.counters.values().items():
            self._dropped.add(name, value)
        self.records.forget_namespace(namespace)

    def _changed(self, block: int) -> None:
        if self.reader.waiting:
            self._effects.extend(Wake(a) for a in self.reader.woken_by(block))
