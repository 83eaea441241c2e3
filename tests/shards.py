"""A shard's core on a manual clock, with its verbs as short calls: what tests of the core are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.core import few
from kvstore.core.leases import WriteLease
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore.core.reading import AcquireRequest, Acquisition, Matched
from kvstore.core.store import Store, StoreSettings
from kvstore.core.writing import Reserved, ReserveRequest
from kvstore_wire.namespace import Chains, Geometry, Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage, PartState

KIB, MIB = 1 << 10, 1 << 20
PAGE_BYTES = 64 * KIB
# Up to how many rows are handled one by one: none, so few that calls of a test are of both kinds, as it is, all.
WAYS = (0, 3, few.MOST_ROWS, 1 << 20)


@contextmanager
def at_most_few(rows: int) -> Iterator[None]:
    """Up to so many rows are handled one by one, the others at once."""
    before, few.MOST_ROWS = few.MOST_ROWS, rows
    try:
        yield
    finally:
        few.MOST_ROWS = before


def key(number: int) -> bytes:
    """A key of 32 bytes."""
    return number.to_bytes(32, "big")


def keys(start: int, stop: int) -> list[bytes]:
    return [key(i) for i in range(start, stop)]


def kv_spec(name: str, *, part_bytes: int = 4096, layer_groups: int = 1, tenant: str = "") -> NamespaceSpec:
    geometry = Geometry(16, "bfloat16", layer_groups, 1, 1, layer_groups=layer_groups)
    return NamespaceSpec(name, f"model-{name}", part_bytes, tenant=tenant, geometry=geometry)


def opaque_spec(name: str, *, part_bytes: int = PAGE_BYTES, chains: Chains = Chains.NONE) -> NamespaceSpec:
    return NamespaceSpec(name, f"model-{name}", part_bytes, kind=Kind.OPAQUE, chains=chains)


def part_states(states: bytes) -> list[PartState]:
    return [PartState(s) for s in states]


def block_states(states: bytes) -> list[BlockState]:
    return [BlockState(s) for s in states]


class Shard:
    """A store and its clock."""

    def __init__(
        self,
        *,
        capacity_bytes: int = 16 * PAGE_BYTES,
        page_bytes: int = PAGE_BYTES,
        leased_share: float = 1.0,
        rules_of: Callable[[NamespaceSpec], NamespaceRules] = lambda spec: NamespaceRules(),
        max_leases: int = 1 << 18,
        max_namespaces: int = 1024,
        session_open_s: float = 1e9,
        policy: str = "lru",
    ) -> None:
        self.now = 1000.0
        self.store = Store(
            StoreSettings(
                capacity_bytes=capacity_bytes,
                page_bytes=page_bytes,
                max_leased_share=leased_share,
                max_leases=max_leases,
                max_namespaces=max_namespaces,
                session_open_s=session_open_s,
                policy=policy,
            ),
            rules_of,
        )
        self._clients = 0

    def client(self) -> Client:
        """A client with a session of its own."""
        self._clients += 1
        return Client(self, self._clients.to_bytes(16, "big"))

    def pass_time(self, seconds: float) -> None:
        """Moves the clock and lets run out what runs out."""
        self.now += seconds
        self.store.tick(self.now)

    def gauge(self, name: str) -> int:
        return self.store.gauges()[name]

    def stored(self, namespace: Namespace, chain: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are stored, asked one by one so that no hole hides another."""
        answer = self.store.reader.match(namespace, chain, parts=(), coverage=Coverage.EACH, now=self.now)
        return [k for k, state in zip(chain, answer.states, strict=True) if state == BlockState.HOT]


class Client:
    """One client of a shard."""

    def __init__(self, shard: Shard, session_id: bytes) -> None:
        self.shard, self.store = shard, shard.store
        self.session = self.store.open_session(session_id, client="test", features=frozenset(), now=shard.now)

    def attach(self, spec: NamespaceSpec) -> Namespace:
        return self.session.namespace(self.store.attach(self.session, spec, spec.digest))

    def match(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        parts: tuple[int, ...] = (),
        coverage: Coverage = Coverage.PREFIX,
    ) -> Matched:
        return self.store.reader.match(namespace, chain, parts=parts, coverage=coverage, now=self.shard.now)

    def reserve(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        parts: tuple[int, ...] = (),
        lengths: Sequence[int] = (),
        lease_s: float = 60.0,
    ) -> Reserved:
        request = ReserveRequest(chain, lease_s, parts=parts, lengths=lengths)
        return self.store.writer.reserve(self.session, namespace, request, self.shard.now)

    def commit(self, lease: WriteLease, indexes: Sequence[int] | None = None) -> list[PartState]:
        """Commits landed parts (all of the lease unless told)."""
        chosen = range(len(lease.parts)) if indexes is None else indexes
        states = self.store.commit(self.session, lease, chosen, checksums=[7] * len(chosen), now=self.shard.now)
        return part_states(states)

    def commit_by_id(self, lease_id: int) -> list[PartState] | None:
        """What a late writer does: it names its lease; None if the lease has ended."""
        lease = self.store.write_lease(self.session, lease_id, self.shard.now)
        return None if lease is None else self.commit(lease)

    def put(self, namespace: Namespace, chain: Sequence[bytes], *, lengths: Sequence[int] = ()) -> list[PartState]:
        """Reserves, fills and commits; answers the states of Reserve."""
        reserved = self.reserve(namespace, chain, lengths=lengths)
        if reserved.lease is not None:
            fill(reserved.lease)
            self.commit(reserved.lease)
        return part_states(reserved.states)

    def begin(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        parts: tuple[int, ...] = (),
        coverage: Coverage = Coverage.PREFIX,
        lease_s: float = 60.0,
    ) -> Acquisition:
        request = AcquireRequest(chain, lease_s, parts=parts, coverage=coverage)
        return self.store.reader.begin(self.session, namespace, request)

    def acquire(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        coverage: Coverage = Coverage.PREFIX,
        lease_s: float = 60.0,
    ) -> tuple[Acquisition, list[BlockState]]:
        """Acquires without waiting."""
        acquisition = self.begin(namespace, chain, coverage=coverage, lease_s=lease_s)
        step = self.store.reader.finish(acquisition, self.shard.now)
        return acquisition, block_states(step.states)

    def release(self, acquisition: Acquisition) -> bool:
        return acquisition.lease is not None and self.release_by_id(acquisition.lease.id)

    def release_by_id(self, lease_id: int) -> bool:
        return self.store.release(self.session, lease_id, self.shard.now)

    def end(self) -> None:
        """The process dies."""
        self.store.end_session(self.session, self.shard.now)


def fill(lease: WriteLease) -> None:
    """All bytes of a lease have landed."""
    lease.landed[:] = b"\x01" * len(lease.landed)
