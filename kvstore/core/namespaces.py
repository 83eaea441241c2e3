"""Namespaces of one shard: their rules, their index of keys, and the names bound to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.core.arena import COMMON_POOL, SPARE_POOL, slot_bytes_exact, slot_bytes_stepped
from kvstore.core.columns import Places
from kvstore.core.counters import Counters
from kvstore.core.eviction.base import BlockQueue, EvictionPolicy
from kvstore_wire.errors import NamespaceMismatch, TableFull
from kvstore_wire.namespace import Chains, Kind, NamespaceSpec

NAMES_PER_NAMESPACE = 16  # On average, over all of a shard.


@dataclass(frozen=True)
class NamespaceRules:
    """What an operator set for a namespace. `quota_bytes` is a share it can always use (0 = none), `max_bytes` a limit
    it never passes (None = none), `ttl_s` the longest life of a block (None = none). `spare` namespaces live in the
    shard's own page and take nothing from the arena."""

    quota_bytes: int = 0
    max_bytes: int | None = None
    ttl_s: float | None = None
    spare: bool = False

    def pool(self, index: int) -> int:
        """The pool of pages of the namespace with this index: its own where it has a quota."""
        if self.spare:
            return SPARE_POOL
        return index + 1 if self.quota_bytes else COMMON_POOL


class Namespace:
    """One namespace's state at one shard. `blocks` maps a key to its row."""

    __slots__ = (
        "all_parts",
        "blocks",
        "cohorts",
        "counters",
        "expiry",
        "has_one_slot_size",
        "hot_bytes",
        "index",
        "is_being_purged",
        "kv_slot_bytes",
        "parts_per_block",
        "pool",
        "rules",
        "sessions",
        "spec",
    )

    def __init__(self, index: int, spec: NamespaceSpec, rules: NamespaceRules, ttl_place: Places) -> None:
        self.index, self.spec, self.rules = index, spec, rules
        self.parts_per_block = spec.parts_per_block
        self.all_parts = tuple(range(spec.parts_per_block))
        self.has_one_slot_size = spec.kind is Kind.KV  # `kv_slot_bytes`.
        self.pool = rules.pool(index)
        self.kv_slot_bytes = slot_bytes_exact(spec.part_bytes)
        self.blocks: dict[bytes, int] = {}
        self.cohorts: dict[int, EvictionPolicy] = {}
        self.expiry = BlockQueue(ttl_place) if rules.ttl_s is not None else None
        self.hot_bytes = 0
        self.is_being_purged = False  # What is still here of it must not get to disk meanwhile.
        self.sessions = 0
        self.counters = Counters()

    @property
    def is_chained(self) -> bool:
        """Whether a block is useless without the ones before it."""
        return self.spec.chains is not Chains.NONE

    def slot_bytes(self, length: int) -> int:
        """Slot size for a part of this length."""
        return self.kv_slot_bytes if self.spec.kind is Kind.KV else slot_bytes_stepped(length)


class NamespaceTable:
    """Finds namespaces by digest; binds each (tenant, name) to one digest, and forgets the name longest not attached
    where there are too many of them."""

    def __init__(
        self,
        *,
        limit: int,
        rules_of: Callable[[NamespaceSpec], NamespaceRules],
        ttl_place: Places,
        on_drop: Callable[[Namespace], None],
    ) -> None:
        self._limit, self._rules_of, self._ttl_place, self._on_drop = limit, rules_of, ttl_place, on_drop
        self._rows: list[Namespace | None] = []
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_name: dict[tuple[str, str], Namespace] = {}

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._by_digest.values()))

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def name_count(self) -> int:
        return len(self._by_name)

    def at(self, index: int) -> Namespace:
        """Returns the namespace of a block's `namespace` column."""
        found = self._rows[index]
        if found is None:
            raise LookupError(f"no namespace {index}")
        return found

    def by_digest(self, digest: bytes) -> Namespace | None:
        return self._by_digest.get(digest)

    def attach(self, spec: NamespaceSpec, digest: bytes) -> Namespace:
        """Finds or makes the namespace of a spec. `digest` is the caller's own, empty if it sent none.

        Raises NamespaceMismatch (field = first difference) and TableFull; then nothing changed.
        """
        if digest and digest != spec.digest:
            message = f"the caller computed {digest.hex()}, these fields give {spec.digest.hex()}"
            raise NamespaceMismatch(message, field="digest")
        bound = self._by_name.get((spec.tenant, spec.name))
        if bound is not None:
            return self._same(bound, spec)
        found = self._by_digest.get(spec.digest) or self._add(spec)
        if len(self._by_name) >= NAMES_PER_NAMESPACE * self._limit:
            del self._by_name[next(iter(self._by_name))]
        self._by_name[spec.tenant, spec.name] = found
        return found

    def _same(self, bound: Namespace, spec: NamespaceSpec) -> Namespace:
        difference = bound.spec.difference(spec)
        if difference is None:
            self._by_name[spec.tenant, spec.name] = self._by_name.pop((spec.tenant, spec.name))
            return bound
        if not bound.sessions and not bound.hot_bytes:  # An empty, unused namespace does not hold its name for ever.
            self._drop(bound)
            return self.attach(spec, b"")
        name, theirs, yours = difference
        message = f"namespace {spec.name!r} was attached with {theirs!r}, this call says {yours!r}"
        raise NamespaceMismatch(message, field=f"namespace.{name}")

    def _add(self, spec: NamespaceSpec) -> Namespace:
        if len(self._by_digest) >= self._limit:
            self._drop_unused()
        if len(self._by_digest) >= self._limit:
            raise TableFull(f"{len(self._by_digest)} namespaces", field="namespace", limit=f"{self._limit}")
        free = next((i for i, row in enumerate(self._rows) if row is None), len(self._rows))
        made = Namespace(free, spec, self._rules_of(spec), self._ttl_place)
        self._rows[free : free + 1] = [made]
        self._by_digest[spec.digest] = made
        return made

    def _drop_unused(self) -> None:
        for namespace in self:
            if not namespace.sessions and not namespace.hot_bytes:
                self._drop(namespace)
                return

    def _drop(self, namespace: Namespace) -> None:
        self._on_drop(namespace)
        self._rows[namespace.index] = None
        del self._by_digest[namespace.spec.digest]
        for name in [n for n, bound in self._by_name.items() if bound is namespace]:
            del self._by_name[name]
