"""A batch handled one by one and the same batch handled at once leave two shards alike, to the last table.

Two shards take the same calls: one handles all rows at once, the other some or all of them one by one. Every answer,
and everything that decides a later one, must be equal after each call: tables, account, counters, free lists, the
order of eviction, what must happen outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvstore.core.arena import ArenaMap
from kvstore.core.few import Rows
from kvstore.core.leases import Lease, ReadLease, WriteLease
from kvstore.core.namespaces import NamespaceRules
from kvstore.core.reading import Acquisition
from kvstore.core.store import LeasesEnded, NamespacePurged, SessionEnded, Wake
from kvstore_wire.errors import KvStoreError
from kvstore_wire.namespace import Chains, NamespaceSpec
from kvstore_wire.states import Coverage
from tests.shards import KIB, PAGE_BYTES, WAYS, Shard, at_most_few, key, kv_spec, opaque_spec
from tests.sim.world import World

TTL_S = 5.0
SPECS: list[tuple[NamespaceSpec, NamespaceRules]] = [
    (kv_spec("one"), NamespaceRules()),
    (kv_spec("quota"), NamespaceRules(quota_bytes=3 * PAGE_BYTES)),
    (kv_spec("parts", part_bytes=12 * KIB, layer_groups=3), NamespaceRules(max_bytes=2 * PAGE_BYTES)),
    (opaque_spec("values"), NamespaceRules(ttl_s=TTL_S)),
    (opaque_spec("chain", chains=Chains.ORDERED), NamespaceRules()),
]
RULES = {spec.name: rules for spec, rules in SPECS}
KEYS, CLIENTS = 20, 3
CALL_BYTES = 160 * KIB

spaces = st.integers(0, len(SPECS) - 1)
clients = st.integers(0, CLIENTS - 1)
heads = st.integers(1, KEYS).map(lambda end: list(range(end)))
picks = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=10)  # A key may come twice.
chains = st.one_of(heads, picks, picks)
times = st.sampled_from([0.1, 0.3, 2.0, 20.0])
places = st.integers(0, 30)
parts_of = st.sampled_from([(), (0,), (0, 2)])

Answer: TypeAlias = object


def numbers(rows: Rows) -> list[int]:
    return rows if isinstance(rows, list) else rows.tolist()


class Twin:
    """One of the shards, and the leases and waits that its clients know of."""

    def __init__(self, most_few: int, policy: str) -> None:
        self.most_few = most_few
        self.shard = Shard(
            capacity_bytes=6 * PAGE_BYTES + 16 * KIB,
            leased_share=0.7,
            rules_of=lambda spec: RULES[spec.name],
            policy=policy,
        )
        self.store = self.shard.store
        self.store.reader.limits.call_bytes = CALL_BYTES
        self.clients = [self.shard.client() for _ in range(CLIENTS)]
        self.spaces = [self.clients[0].attach(spec) for spec, _ in SPECS]
        for client in self.clients[1:]:
            for spec, _ in SPECS:
                client.attach(spec)
        self.acquisitions: list[Acquisition] = []
        self.leases: list[Lease] = []
        self.pinned: list[Lease] = []

    # -- calls: each answers all that its caller would see -----------------------------------------------------------

    def match(self, who: int, space: int, chain: list[bytes], coverage: Coverage, parts: tuple[int, ...]) -> Answer:
        return self.clients[who].match(self.spaces[space], chain, parts=self._parts(space, parts), coverage=coverage)

    def begin(
        self, who: int, space: int, chain: list[bytes], coverage: Coverage, parts: tuple[int, ...], lease_s: float
    ) -> Answer:
        chosen = self._parts(space, parts)
        acquisition = self.clients[who].begin(
            self.spaces[space], chain, parts=chosen, coverage=coverage, lease_s=lease_s
        )
        self.acquisitions.append(acquisition)
        return None

    def step(self, place: int, last: bool) -> Answer:
        """Steps an Acquire, or settles it."""
        at = place % len(self.acquisitions)
        acquisition, reader = self.acquisitions[at], self.store.reader
        had = acquisition.lease
        step = (reader.finish if last else reader.step)(acquisition, self.shard.now)
        if acquisition.lease is not None and had is None:
            self.leases.append(acquisition.lease)
        if step.settled:
            del self.acquisitions[at]
        views = self.store.part_views(step.parts)
        return step.first, step.states, numbers(step.parts), step.settled, views, acquisition.leased_bytes

    def reserve(
        self, who: int, space: int, chain: list[bytes], parts: tuple[int, ...], length: int, lease_s: float
    ) -> Answer:
        lengths = [max(0, length - 9 * KIB * (i % 3)) for i in range(len(chain))] if space > 2 else []
        chosen = self._parts(space, parts)
        reserved = self.clients[who].reserve(self.spaces[space], chain, parts=chosen, lengths=lengths, lease_s=lease_s)
        if reserved.lease is None:
            return reserved.states
        self.leases.append(reserved.lease)
        return reserved.states, reserved.lease.id, self.store.part_views(reserved.lease.parts)

    def commit(self, place: int, landed: int, indexes: list[int]) -> Answer:
        lease = self.leases[place % len(self.leases)]
        if not isinstance(lease, WriteLease):
            return None
        lease.landed[:landed] = b"\x01" * len(lease.landed[:landed])
        owner = next(c for c in self.clients if c.session.id == lease.session)
        return owner.commit(lease, indexes or None), lease.ended

    def end(self, place: int) -> Answer:
        """Release or Abort."""
        lease = self.leases.pop(place % len(self.leases))
        owner = next(c for c in self.clients if c.session.id == lease.session)
        act = self.store.release if isinstance(lease, ReadLease) else self.store.abort
        return act(owner.session, lease.id, self.shard.now)

    def renew(self, place: int, lease_s: float) -> Answer:
        lease = self.leases[place % len(self.leases)]
        owner = next(c for c in self.clients if c.session.id == lease.session)
        return self.store.renew(owner.session, lease.id, lease_s=lease_s, now=self.shard.now)

    def pin(self, place: int) -> Answer:
        lease = self.leases[place % len(self.leases)]
        self.store.pin(lease)
        self.pinned.append(lease)
        return None

    def unpin(self, place: int) -> Answer:
        self.store.unpin(self.pinned.pop(place % len(self.pinned)), self.shard.now)
        return None

    def delete(self, space: int, chain: list[bytes]) -> Answer:
        return self.store.delete(self.spaces[space], chain)

    def purge(self, space: int) -> Answer:
        return self.store.purge(lambda n: n is self.spaces[space], created_before=self.shard.now - 1.0)

    def limit(self, leased_share_bytes: int) -> Answer:
        """Sets what readers may lease: what is leased already may be more."""
        self.store.reader.limits.leased_share_bytes = leased_share_bytes
        return None

    def pass_time(self, seconds: float) -> Answer:
        self.shard.pass_time(seconds)
        return None

    def die(self, who: int) -> Answer:
        self.clients[who].end()
        self.clients[who] = self.shard.client()
        for spec, _ in SPECS:
            self.clients[who].attach(spec)
        ids = {client.session.id for client in self.clients}
        self.leases = [lease for lease in self.leases if lease.session in ids]
        self.acquisitions = [a for a in self.acquisitions if a.session.id in ids]
        return None

    # -- looking -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Answer]:
        """All that the shard has decided so far."""
        records, leases = self.store.records, self.store.leases
        blocks, parts, count = records.blocks, records.parts, len(records.blocks.key)
        last = max((int(blocks.first_part[b]) for b in range(count)), default=0) + 3
        return {
            "gauges": self.store.gauges(),
            "counters": [space.counters.values() for space in self.spaces],
            "effects": [self._told(effect) for effect in self.store.take_effects()],
            "index": [space.blocks for space in self.spaces],
            "bytes": [space.hot_bytes for space in self.spaces],
            "keys": list(blocks.key),
            "blocks": {
                name: getattr(blocks, name)[:count].tolist()
                for name in ("namespace", "first_part", "slot_units", "present", "reserved", "holds", "doomed")
            },
            "times": (blocks.created[:count].tolist(), blocks.touched[:count].tolist()),
            "queues": (blocks.queue_place.at[:count].tolist(), blocks.ttl_place.at[:count].tolist()),
            "parts": {
                name: getattr(parts, name)[:last].tolist()
                for name in ("state", "offset", "length", "checksum", "block")
            },
            "orders": [[(len(c), c.peek(10_000).tolist()) for c in n.cohorts.values()] for n in self.spaces],
            "arena": self._arena(records.arena),
            "leases": [self._lease(lease) for lease in [*leases.all(), *leases.lingering()]],
            "waits": {block: len(waiters) for block, waiters in self.store.reader.waiting.items()},
        }

    @staticmethod
    def _arena(arena: ArenaMap) -> Answer:
        pages = [(p.key, p.drain_to, p.fresh, p.live, p.freed.tolist(), p.owner.tolist()) for p in arena.pages]
        return pages, {k: (list(c.open_pages), c.draining_in) for k, c in arena.classes.items()}

    @staticmethod
    def _lease(lease: Lease) -> Answer:
        if isinstance(lease, WriteLease):
            rows = numbers(lease.blocks), numbers(lease.parts), list(lease.owed)
            return lease.id, lease.deadline, lease.pins, rows, bytes(lease.landed), bytes(lease.open)
        assert isinstance(lease, ReadLease)
        return lease.id, lease.deadline, lease.pins, numbers(lease.blocks), numbers(lease.parts)

    @staticmethod
    def _told(effect: Wake | LeasesEnded | NamespacePurged | SessionEnded) -> Answer:
        return (effect.acquisition.session.id, effect.acquisition.next) if isinstance(effect, Wake) else effect

    @staticmethod
    def _parts(space: int, parts: tuple[int, ...]) -> tuple[int, ...]:
        return parts if SPECS[space][0].parts_per_block > 1 else ()


class TwinMachine(RuleBasedStateMachine):
    """Any calls, made to both shards."""

    most_few = WAYS[2]
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.twins = [Twin(WAYS[0], self.policy), Twin(self.most_few, self.policy)]

    def both(self, call: Callable[[Twin], Answer]) -> None:
        """Makes one call to both; their answers and all that they hold must be equal."""
        answers, states = [], []
        for twin in self.twins:
            with at_most_few(twin.most_few):
                try:
                    answers.append(call(twin))
                except KvStoreError as error:
                    answers.append((type(error), str(error)))
                states.append(twin.state())
                twin.store.check()
        assert answers[0] == answers[1]
        for name in states[0]:
            assert states[0][name] == states[1][name], name

    @rule(who=clients, space=spaces, chain=chains, coverage=st.sampled_from(Coverage), parts=parts_of)
    def match(self, who: int, space: int, chain: list[int], coverage: Coverage, parts: tuple[int, ...]) -> None:
        self.both(lambda twin: twin.match(who, space, [key(i) for i in chain], coverage, parts))

    @rule(who=clients, space=spaces, chain=chains, coverage=st.sampled_from(Coverage), parts=parts_of, lease_s=times)
    def acquire(
        self, who: int, space: int, chain: list[int], coverage: Coverage, parts: tuple[int, ...], lease_s: float
    ) -> None:
        self.both(lambda twin: twin.begin(who, space, [key(i) for i in chain], coverage, parts, lease_s))
        self.both(lambda twin: twin.step(len(twin.acquisitions) - 1, last=False))

    @precondition(lambda self: self.twins[0].acquisitions)
    @rule(place=places, last=st.booleans())
    def step(self, place: int, last: bool) -> None:
        self.both(lambda twin: twin.step(place, last))

    @rule(
        who=clients,
        space=spaces,
        chain=chains,
        parts=parts_of,
        length=st.sampled_from([0, 3000, 20 * KIB, PAGE_BYTES, PAGE_BYTES + 1]),
        lease_s=times,
        commits=st.sampled_from([True, True, False]),
    )
    def reserve(
        self, who: int, space: int, chain: list[int], parts: tuple[int, ...], length: int, lease_s: float, commits: bool
    ) -> None:
        before = len(self.twins[0].leases)
        self.both(lambda twin: twin.reserve(who, space, [key(i) for i in chain], parts, length, lease_s))
        if commits and len(self.twins[0].leases) > before:
            self.both(lambda twin: twin.commit(before, 1_000, []))

    @precondition(lambda self: self.twins[0].leases)
    @rule(place=places, landed=places, indexes=st.lists(st.integers(0, 8), unique=True, max_size=4))
    def commit(self, place: int, landed: int, indexes: list[int]) -> None:
        self.both(lambda twin: twin.commit(place, landed, indexes))

    @precondition(lambda self: self.twins[0].leases)
    @rule(place=places)
    def end(self, place: int) -> None:
        self.both(lambda twin: twin.end(place))

    @precondition(lambda self: self.twins[0].leases)
    @rule(place=places, lease_s=times)
    def renew(self, place: int, lease_s: float) -> None:
        self.both(lambda twin: twin.renew(place, lease_s))

    @precondition(lambda self: self.twins[0].leases)
    @rule(place=places)
    def pin(self, place: int) -> None:
        self.both(lambda twin: twin.pin(place))

    @precondition(lambda self: self.twins[0].pinned)
    @rule(place=places)
    def unpin(self, place: int) -> None:
        self.both(lambda twin: twin.unpin(place))

    @rule(space=spaces, chain=chains)
    def delete(self, space: int, chain: list[int]) -> None:
        self.both(lambda twin: twin.delete(space, [key(i) for i in chain]))

    @rule(space=spaces)
    def purge(self, space: int) -> None:
        self.both(lambda twin: twin.purge(space))

    @rule(leased_share_bytes=st.sampled_from([0, 64 * KIB, 280 * KIB]))
    def limit(self, leased_share_bytes: int) -> None:
        self.both(lambda twin: twin.limit(leased_share_bytes))

    @rule(seconds=times)
    def pass_time(self, seconds: float) -> None:
        self.both(lambda twin: twin.pass_time(seconds))

    @rule(who=clients)
    def die(self, who: int) -> None:
        self.both(lambda twin: twin.die(who))


class MixedTwinMachine(TwinMachine):
    """Some rows one by one, the others at once."""

    most_few = WAYS[1]


class ExpectedReuseMachine(MixedTwinMachine):
    """With the other policy."""

    policy = "expected"


TestFew = TwinMachine.TestCase
TestMixed = MixedTwinMachine.TestCase
TestExpectedReuse = ExpectedReuseMachine.TestCase


@pytest.mark.parametrize("most_few", WAYS[1:])
def test_a_game_of_many_clients_goes_the_same_way(most_few: int) -> None:
    played = []
    for rows in (WAYS[0], most_few):
        with at_most_few(rows):
            world = World(11, clients=24, pages=20)
            world.run(4_000)
            world.end()
        played.append((world.tally, world.store.counters(), world.store.gauges()))
    assert played[0] == played[1]
    assert played[0][0]["blocks read"] > 200
