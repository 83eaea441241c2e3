"""Many clients of one shard on a manual clock, from one seed: they read, write, wait, stall, vanish and come back late.

Bytes are words in a dict: what a client fills is written where the shard gave it a slot, and what a client reads is
looked up where the shard told it to read. A reader that meets another key's, part's or writer's word is a failure, and
so is a word that was deleted or whose time is over. Cold blocks go to a disk and come back from it (see disk.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvstore.core.columns import ABSENT, PRESENT, RESERVED
from kvstore.core.leases import ReadLease, WriteLease
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore.core.reading import Acquisition, Step
from kvstore.core.sight import Ask
from kvstore.core.store import Wake
from kvstore_wire.errors import UnknownSession
from kvstore_wire.namespace import Chains, Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import KIB, PAGE_BYTES, Client, Shard, block_states, kv_spec, opaque_spec
from tests.sim.disk import Disk, Word

SPECS: list[NamespaceSpec] = [
    kv_spec("small"),
    kv_spec("large", part_bytes=20 * KIB, layer_groups=2),
    opaque_spec("values", chains=Chains.NONE),
]
RULES = {
    "small": NamespaceRules(quota_bytes=4 * PAGE_BYTES),
    "large": NamespaceRules(),
    "values": NamespaceRules(ttl_s=9),
}
CHAIN_BLOCKS, HEADS = 12, 30
TICK_S = 0.25


@dataclass(eq=False)
class Reading:
    """A read in progress: what each granted slot held when it was granted."""

    acquisition: Acquisition
    keys: Sequence[bytes]
    give_up_at: float
    settled: bool = False
    words: list[tuple[int, Word]] = field(default_factory=list)


@dataclass(eq=False)
class Writing:
    """A write in progress: (offset, word) of each part, and how many have landed."""

    lease: WriteLease
    parts: list[tuple[int, Word]]
    landed: int = 0


@dataclass(eq=False)
class Actor:
    """A client and what it is in the middle of. A stalled one does nothing before `wakes_at`."""

    client: Client
    spaces: dict[str, Namespace]
    readings: list[Reading] = field(default_factory=list)
    writings: list[Writing] = field(default_factory=list)
    wakes_at: float = 0.0
    alive: bool = True


class World:
    """The shard, its memory and disk, its clients, and a tally of what happened."""

    def __init__(self, seed: int, *, clients: int, pages: int) -> None:
        self.random = random.Random(seed)
        self.shard = Shard(capacity_bytes=pages * PAGE_BYTES, leased_share=0.8, rules_of=lambda spec: RULES[spec.name])
        self.store = self.shard.store
        self.memory: dict[int, Word] = {}
        self.tally: Counter[str] = Counter()
        self.disk = Disk(self.shard, self.memory, self.random, self.tally)
        self.ghosts: list[Actor] = []
        self.steps = 0
        self._writes = 0
        self._began: dict[int, float] = {}  # When each write reserved.
        self._deleted: dict[tuple[str, bytes], int] = {}  # The last write that a deletion took.
        self._next_tick = self.shard.now
        self.actors = [self._newcomer() for _ in range(clients)]

    def run(self, steps: int) -> None:
        """Lets random clients act, one at a time."""
        for _ in range(steps):
            self.steps += 1
            self._pass_time(self.random.expovariate(300.0))
            self._perform_effects()
            self._act(self.random.choice(self.actors))
            self._perform_effects()
            self.disk.step()
            self._perform_effects()
            if self.steps % 150 == 0:
                self.check()

    def end(self) -> None:
        """Everybody leaves and the disk ends what it does; afterwards nothing may be held, reserved or lost."""
        leaving, self.actors = self.actors, []
        for actor in leaving:
            actor.client.end()
        self._perform_effects()
        self.check()
        self.disk.finish()
        self.store.tick(self.shard.now)
        self._perform_effects()
        self.check()
        for gauge in ("leases", "sessions", "leased_bytes", "reserved_bytes", "waiting_acquires"):
            assert self.shard.gauge(gauge) == 0, gauge
        self.store.purge(lambda namespace: True, created_before=float("inf"))
        self.check()
        assert self.shard.gauge("stored_blocks") == 0
        assert self.shard.gauge("free_bytes") == self.shard.gauge("capacity_bytes")

    def check(self) -> None:
        """The shard's own tables, and every word that somebody may be reading now."""
        self.store.check()
        assert not self.store.records.account_fault()
        self.disk.check()
        for actor in self.actors:
            for reading in actor.readings:
                self._verify(reading)

    # -- what clients do -----------------------------------------------------------------------------------------

    def _act(self, actor: Actor) -> None:
        if actor.wakes_at > self.shard.now:
            return
        for reading in [r for r in actor.readings if not r.settled and r.give_up_at <= self.shard.now]:
            self._take_step(reading, self.store.reader.finish(reading.acquisition, self.shard.now))
        actions = [self._read, self._match, self._write, self._fill, self._commit, self._release]
        weights = [20.0, 5.0, 12.0, 30.0, 25.0, 25.0, 1.5, 0.5]
        self.random.choices([*actions, self._stall, self._vanish], weights)[0](actor)
        if self.random.random() < 0.05:
            self.random.choice([self._haunt, self._haunt, self._delete])(actor)
        if self.random.random() < 0.001:
            self._purge(actor)

    def _read(self, actor: Actor) -> None:
        space, keys = self._chain(actor)
        coverage = self.random.choice(list(Coverage))
        acquisition = actor.client.begin(space, keys, coverage=coverage, lease_s=self._lease_s())
        reading = Reading(acquisition, keys, self.shard.now + self.random.choice([0.0, 0.1, 3.0]))
        actor.readings.append(reading)
        ask = acquisition.ask(self.shard.now)
        if reading.give_up_at > self.shard.now and self.store.reader.waits(ask):
            self.disk.fetch(ask)
        self._take_step(reading, self.store.reader.step(acquisition, self.shard.now))
        self.tally["reads"] += 1

    def _match(self, actor: Actor) -> None:
        """What both tiers have of a chain, asked key by key, is what the shard tells, and what it would fetch."""
        space, keys = self._chain(actor)
        coverage = self.random.choice(list(Coverage))
        reader, now = self.store.reader, self.shard.now
        here = [self._here(space, k) for k in keys]
        there = self.disk.has(space, keys)
        states = [
            BlockState.WARM if on_disk and state is not BlockState.HOT else state
            for state, on_disk in zip(here, there, strict=True)
        ]
        stored = [state in (BlockState.HOT, BlockState.WARM) for state in states]
        prefix = [*stored, False].index(False)
        known = [on_disk or state is not BlockState.MISSING for state, on_disk in zip(here, there, strict=True)]
        reach = [*known, False].index(False) if coverage is Coverage.PREFIX else len(keys)
        lacking = [i for i, state in enumerate(here) if state is not BlockState.HOT]
        if coverage is Coverage.PREFIX:
            states[prefix + 1 :] = [BlockState.BEYOND] * len(states[prefix + 1 :])
            lacking = lacking[:1]
        found = reader.match(space, keys, parts=(), coverage=coverage, now=now)
        assert (found.prefix_blocks, block_states(found.states)) == (prefix, states)
        ask = Ask(space, keys, space.all_parts, coverage, now)
        wanted = [i for i in range(reach) if here[i] is BlockState.MISSING and there[i]]
        assert reader.wanted_from_disk(ask) == wanted
        assert reader.waits(ask) == any(there[i] or here[i] is BlockState.IN_FLIGHT for i in lacking)
        self.tally.update(f"match {state.name}" for state in states)

    def _here(self, space: Namespace, k: bytes) -> BlockState:
        """How memory alone has a block."""
        row = space.blocks.get(k)
        cell, parts = self.store.records.blocks.cell, self.store.records.parts.cell
        if row is None or (space.rules.ttl_s is not None and cell.created[row] + space.rules.ttl_s <= self.shard.now):
            return BlockState.MISSING
        first = cell.first_part[row]
        least = min(parts.state[part] for part in range(first, first + space.parts_per_block))
        return {ABSENT: BlockState.MISSING, RESERVED: BlockState.IN_FLIGHT, PRESENT: BlockState.HOT}[least]

    def _write(self, actor: Actor) -> None:
        space, keys = self._chain(actor)
        opaque = space.spec.kind is Kind.OPAQUE
        lengths = [self._length(k) for k in keys] if opaque else ()
        parts = (self.random.randrange(2),) if space.spec.name == "large" and self.random.random() < 0.3 else ()
        reserved = actor.client.reserve(space, keys, parts=parts, lengths=lengths, lease_s=self._lease_s())
        self.tally.update(f"reserve {PartState(s).name}" for s in reserved.states)
        if reserved.lease is None:
            return
        self._writes += 1
        self._began[self._writes] = self.shard.now
        chosen = parts or tuple(range(space.parts_per_block))
        named = [(k, p) for k in keys for p in chosen]
        made = [
            Word(space.spec.name, k, p, self._writes)
            for (k, p), s in zip(named, reserved.states, strict=True)
            if s == 1
        ]
        offsets, _, _ = self.store.part_views(reserved.lease.parts)
        actor.writings.append(Writing(reserved.lease, list(zip(offsets, made, strict=True))))

    def _fill(self, actor: Actor) -> None:
        """Bytes land, but only under a live lease: the shard copies them, no client can write to the arena."""
        for writing in actor.writings:
            end = min(len(writing.parts), writing.landed + self.random.randrange(1, 60))
            alive = self.store.write_lease(actor.client.session, writing.lease.id, self.shard.now)
            if alive is None:
                continue
            for index in [i for i in range(writing.landed, end) if writing.lease.open[i]]:
                offset, word = writing.parts[index]
                self.memory[offset] = word
                writing.lease.landed[index] = 1
            writing.landed = end

    def _commit(self, actor: Actor) -> None:
        for writing in list(actor.writings):
            actor.writings.remove(writing)
            late = writing.lease.deadline <= self.shard.now
            states = actor.client.commit_by_id(writing.lease.id)
            assert (states is None) == late
            self.tally.update(f"commit {s.name}" for s in states or ())
            self.tally["commits refused"] += late
            if not writing.lease.ended and states is not None:
                actor.writings.append(writing)  # Not all bytes had landed.

    def _release(self, actor: Actor) -> None:
        for reading in [r for r in actor.readings if r.settled]:
            actor.readings.remove(reading)
            lease = reading.acquisition.lease
            if lease is None:
                continue
            self._verify(reading)
            assert actor.client.release_by_id(lease.id) == (lease.deadline > self.shard.now)
            assert not actor.client.release_by_id(lease.id)

    def _stall(self, actor: Actor) -> None:
        actor.wakes_at = self.shard.now + self.random.uniform(1.0, 6.0)
        self.tally["stalls"] += 1

    def _vanish(self, actor: Actor) -> None:
        actor.client.end()
        actor.alive = False
        self.ghosts.append(actor)
        self.actors[self.actors.index(actor)] = self._newcomer()
        self.tally["deaths"] += 1

    def _haunt(self, actor: Actor) -> None:
        """A client declared dead comes back with what it had."""
        for ghost in self.ghosts[-5:]:
            for writing in ghost.writings:
                assert ghost.client.commit_by_id(writing.lease.id) is None
                assert writing.lease.ended
                self.tally["commits refused"] += 1
            for lease in [r.acquisition.lease for r in ghost.readings if r.acquisition.lease is not None]:
                assert not ghost.client.release_by_id(lease.id)
            with pytest.raises(UnknownSession):
                self.store.sessions.get(ghost.client.session.id)

    def _delete(self, actor: Actor) -> None:
        space, keys = self.random.choice([self._chain(actor), *self.disk.under_way()])
        self.disk.forget(space, keys[:2])
        self.store.delete(space, keys[:2])
        self._deleted |= {(space.spec.name, k): self._writes for k in keys[:2]}
        self.tally["deletions"] += 1

    def _purge(self, actor: Actor) -> None:
        space, before = self.random.choice(list(actor.spaces.values())), self.shard.now - self.random.choice([0.0, 3.0])
        name = space.spec.name
        every = [bytes((head, i)) * 16 for head in range(HEADS) for i in range(CHAIN_BLOCKS)]
        self.disk.forget(space, every, created_before=before)
        self.store.purge(lambda namespace: namespace is space, created_before=before)
        last = max((write for write, began in self._began.items() if began < before), default=0)
        self._deleted |= {(name, k): max(last, self._deleted.get((name, k), 0)) for k in every}
        self.tally["purges"] += 1

    # -- the shard's side ----------------------------------------------------------------------------------------

    def _pass_time(self, seconds: float) -> None:
        self.shard.now += seconds
        while self._next_tick <= self.shard.now:
            self.store.tick(self.shard.now)
            self._next_tick += TICK_S

    def _perform_effects(self) -> None:
        """Steps Acquires whose block changed, until nothing changes any more."""
        while effects := self.store.take_effects():
            for acquisition in [e.acquisition for e in effects if isinstance(e, Wake)]:
                reading = self._reading_of(acquisition)
                if reading is None:  # Its client died, and nothing may be leased for it.
                    self.tally["orphans woken"] += 1
                    with pytest.raises(UnknownSession):
                        self.store.reader.step(acquisition, self.shard.now)
                    continue
                self.tally["woken"] += 1
                self._take_step(reading, self.store.reader.step(acquisition, self.shard.now))

    def _reading_of(self, acquisition: Acquisition) -> Reading | None:
        alive = (r for a in self.actors for r in a.readings if r.acquisition is acquisition)
        return next(alive, None)

    def _take_step(self, reading: Reading, step: Step) -> None:
        """Takes in one answer: states in order, and what stands in each slot granted."""
        acquisition = reading.acquisition
        space, lease = acquisition.namespace, acquisition.lease
        reading.settled = step.settled
        if lease is None or lease.deadline > self.shard.now:
            asked = reading.keys[step.first : step.first + len(step.states)]
            for state, on_disk in zip(step.states, self.disk.has(space, asked), strict=True):
                assert state not in (BlockState.MISSING, BlockState.WARM) or on_disk == (state == BlockState.WARM)
        self.tally["blocks warm"] += step.states.count(BlockState.WARM)
        hot = [k for k, s in zip(reading.keys[step.first :], step.states, strict=False) if s == BlockState.HOT]
        offsets, _, _ = self.store.part_views(step.parts)
        named = [(k, p) for k in hot for p in range(space.parts_per_block)]
        assert len(named) == len(offsets)
        self.tally["blocks read"] += len(hot)
        for (k, part), offset in zip(named, offsets, strict=True):
            word = self.memory[offset]
            assert (word.space, word.key, word.part) == (space.spec.name, k, part), "another's bytes"
            assert word.write > self._deleted.get((word.space, k), 0), "deleted bytes are back"
            life_s = space.rules.ttl_s
            assert life_s is None or self._began[word.write] + life_s > self.shard.now, "bytes past their life"
            reading.words.append((offset, word))

    def _verify(self, reading: Reading) -> None:
        lease = reading.acquisition.lease
        if isinstance(lease, ReadLease) and not lease.ended:
            assert all(self.memory[offset] == word for offset, word in reading.words), "bytes changed under a lease"

    # -- making things up ----------------------------------------------------------------------------------------

    def _newcomer(self) -> Actor:
        client = self.shard.client()
        return Actor(client, {spec.name: client.attach(spec) for spec in SPECS})

    def _chain(self, actor: Actor) -> tuple[Namespace, list[bytes]]:
        """A chain's first blocks; a few heads are asked for much more often than the others."""
        space = self.random.choice(list(actor.spaces.values()))
        head = int(HEADS * self.random.random() ** 3)
        blocks = self.random.randrange(1, CHAIN_BLOCKS + 1)
        return space, [bytes((head, i)) * 16 for i in range(blocks)]

    def _length(self, key: bytes) -> int:
        """The length of a value follows from its key, as content does."""
        return (key[0] * 7919 + key[1] * 104729) % (24 * KIB if key[0] % 4 else PAGE_BYTES)

    def _lease_s(self) -> float:
        return self.random.choice([0.3, 2.0, 6.0])
