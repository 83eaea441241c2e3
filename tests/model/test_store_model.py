"""The whole Store against a naive one: KV blocks of one and of several parts, chained and independent values.

Bytes are simulated: a word is written where a part's slot is when it is filled, and read where a read lease points,
after every step. So a slot that was reused under a lease, or a block served for another, shows at once.

A pinned lease has a copy under way: whatever becomes of the lease, its slots are its own until the last pin goes. A
block that is being written to disk keeps its slots until it was written, whatever becomes of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.counters import Removal
from kvstore.core.leases import TICK_S
from kvstore.core.namespaces import NamespaceRules
from kvstore.core.reading import Acquisition
from kvstore.core.store import SessionEnded
from kvstore.core.writing import Reserved
from kvstore_wire.errors import LeaseExpired
from kvstore_wire.namespace import Chains, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.model.naive import ABSENT, PRESENT, RESERVED, NaiveBlock, NaiveNamespace, NaivePin, NaiveRead, NaiveWrite
from tests.shards import (
    KIB,
    PAGE_BYTES,
    WAYS,
    Client,
    Shard,
    at_most_few,
    block_states,
    key,
    kv_spec,
    opaque_spec,
    part_states,
)

TTL_S, QUOTA, LIMIT = 5.0, 3 * PAGE_BYTES, 2 * PAGE_BYTES

SPECS: list[tuple[NamespaceSpec, NamespaceRules]] = [
    (kv_spec("one"), NamespaceRules()),
    (kv_spec("quota"), NamespaceRules(quota_bytes=QUOTA)),
    (kv_spec("parts", part_bytes=12 * KIB, layer_groups=3), NamespaceRules(max_bytes=LIMIT)),
    (opaque_spec("values"), NamespaceRules(ttl_s=TTL_S)),
    (opaque_spec("chain", chains=Chains.ORDERED), NamespaceRules()),
]
RULES = {spec.name: rules for spec, rules in SPECS}
KEYS, CLIENTS = 16, 3
EVICTIONS = (Removal.CAPACITY.value, Removal.PAGE.value, Removal.QUOTA.value)

spaces = st.sampled_from([spec.name for spec, _ in SPECS])
numbers = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=10)
runs = st.integers(0, KEYS - 1).flatmap(lambda a: st.integers(a + 1, KEYS).map(lambda b: list(range(a, b))))
heads = st.integers(1, KEYS).map(lambda end: list(range(end)))
chains = st.one_of(heads, runs, numbers)
clients = st.integers(0, CLIENTS - 1)
times = st.sampled_from([0.1, 0.3, 2.0, 20.0])
lengths_of_values = st.sampled_from([0, 3000, 4097, 20 * KIB, 60 * KIB, PAGE_BYTES, PAGE_BYTES + 1])


@dataclass(frozen=True)
class NaiveDemotion:
    """A block that is being written to disk, and the words that must stand in its slots until it was."""

    space: NaiveNamespace
    block: NaiveBlock
    words: dict[int, tuple[int, int]]  # offset -> (generation, part)


class StoreMachine(RuleBasedStateMachine):
    """Clients read, write, forget, die and come back late."""

    most_few = WAYS[2]  # Rows that are handled one by one.
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.way = ExitStack()
        self.way.enter_context(at_most_few(self.most_few))
        self.shard = Shard(
            capacity_bytes=6 * PAGE_BYTES + 16 * KIB,
            leased_share=0.8,
            rules_of=lambda spec: RULES[spec.name],
            policy=self.policy,
        )
        self.store = self.shard.store
        keeper = self.shard.client()  # Keeps the namespaces in use when all others are gone.
        self.spaces = {spec.name: NaiveNamespace(keeper.attach(spec), ttl_s=rules.ttl_s) for spec, rules in SPECS}
        self.clients = [self._newcomer() for _ in range(CLIENTS)]
        self.reads: dict[int, NaiveRead] = {}
        self.writes: dict[int, NaiveWrite] = {}
        self.gone: dict[int, Client] = {}  # Leases that have ended, and whose they were.
        self.pins: dict[int, NaivePin] = {}
        self.demotions: dict[int, NaiveDemotion] = {}  # By row.
        self.memory: dict[int, tuple[int, int]] = {}
        self.generations = 0
        self.counted = self.store.counters()

    def teardown(self) -> None:
        self.way.close()

    # -- verbs ---------------------------------------------------------------------------------------------------

    @rule(name=spaces, chain=chains, coverage=st.sampled_from(Coverage), who=clients)
    def match(self, name: str, chain: list[int], coverage: Coverage, who: int) -> None:
        space, asked = self.spaces[name], [key(i) for i in chain]
        before = (self.store.gauges(), self._orders())
        found = self.clients[who].match(space.real, asked, coverage=coverage)
        assert (self.store.gauges(), self._orders()) == before
        expected = [self._state(space, k, ()) for k in asked]
        hits = [s is BlockState.HOT for s in expected]
        assert found.prefix_blocks == (hits.index(False) if False in hits else len(hits))
        if coverage is Coverage.PREFIX:
            expected[found.prefix_blocks + 1 :] = [BlockState.BEYOND] * len(expected[found.prefix_blocks + 1 :])
        assert block_states(found.states) == expected

    @rule(
        name=spaces,
        chain=chains,
        who=clients,
        lease_s=times,
        part=st.sampled_from([None, 0, 2]),
        length=lengths_of_values,
        then=st.sampled_from(["nothing", "pin", "commit", "commit", "write"]),
    )
    def reserve(
        self, name: str, chain: list[int], who: int, lease_s: float, part: int | None, length: int, then: str
    ) -> None:
        space, asked = self.spaces[name], [key(i) for i in chain]
        parts = () if part is None or space.real.parts_per_block == 1 else (part,)
        lengths = [max(0, length - 9 * KIB * (i % 3)) for i in range(len(chain))] if name in ("values", "chain") else ()
        self._expire(space, {k for k in asked if k in space.blocks and not self._young(space, k)})
        before = [self._part_states(space, k, parts) for k in asked]
        old = dict(space.blocks)
        reserved = self.clients[who].reserve(space.real, asked, parts=parts, lengths=lengths, lease_s=lease_s)
        columns = len(parts) or space.real.parts_per_block
        rows = [part_states(reserved.states[i * columns : (i + 1) * columns]) for i in range(len(asked))]
        self._check_reserve(space, asked, before, rows)
        if reserved.lease is not None:
            self._adopt(space, reserved, asked, rows, parts=parts, lengths=lengths, who=who, old=old)
        self._evicted()
        if then in ("commit", "write") and reserved.lease is not None:
            self._land(self.writes[reserved.lease.id], 1.0)
            self._commit(reserved.lease.id, 1.0)
            if then == "write":
                self._begin_writing(space, asked)
        elif then == "pin" and reserved.lease is not None:
            self._pin(reserved.lease.id)

    @rule(data=st.data(), share=st.sampled_from([0.3, 1.0]))
    @precondition(lambda self: self.writes)
    def fill(self, data: st.DataObject, share: float) -> None:
        """Bytes land in slots of a live lease."""
        self._land(self.writes[data.draw(st.sampled_from(sorted(self.writes)))], share)

    @rule(data=st.data(), share=st.sampled_from([0.5, 1.0]))
    @precondition(lambda self: self.writes)
    def commit(self, data: st.DataObject, share: float) -> None:
        self._commit(data.draw(st.sampled_from(sorted(self.writes))), share)

    def _land(self, write: NaiveWrite, share: float) -> None:
        for index in range(int(share * len(write.parts) + 0.99)):
            block, part, offset = write.parts[index]
            if index in write.open:
                self.memory[offset] = (block.generation, part)
                write.lease.landed[index] = 1

    def _commit(self, lease_id: int, share: float) -> None:
        write = self.writes[lease_id]
        client = self.clients[write.owner]
        found = self.store.write_lease(client.session, lease_id, self.shard.now)
        assert (found is not None) == (write.deadline > self.shard.now)
        if found is None:
            return
        indexes = list(range(int(share * len(write.parts))))
        expected = [self._verdict(write, i) for i in indexes]
        assert client.commit(found, indexes) == expected
        for index, state in zip(indexes, expected, strict=True):
            if state in (PartState.COMMITTED, PartState.LOST) and index in write.open:
                write.open.discard(index)
                block, part, _ = write.parts[index]
                if state is PartState.LOST and lease_id in self.pins:
                    self.pins[lease_id].owed.add(index)
                block.states[part] = PRESENT if state is PartState.COMMITTED else ABSENT
        assert found.ended == (not write.open)
        if not write.open:
            self._end(lease_id)

    @rule(data=st.data())
    @precondition(lambda self: self.writes)
    def abort(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.writes)))
        write = self.writes[lease_id]
        alive = write.deadline > self.shard.now
        assert self.store.abort(self.clients[write.owner].session, lease_id, self.shard.now) == alive
        if alive:
            self._end(lease_id)

    @rule(
        name=spaces,
        chain=chains,
        who=clients,
        coverage=st.sampled_from(Coverage),
        lease_s=times,
        then=st.sampled_from(["nothing", "pin", "write"]),
    )
    def acquire(self, name: str, chain: list[int], who: int, coverage: Coverage, lease_s: float, then: str) -> None:
        space, asked = self.spaces[name], [key(i) for i in chain]
        acquisition, states = self.clients[who].acquire(space.real, asked, coverage=coverage, lease_s=lease_s)
        expected = [self._state(space, k, ()) for k in asked]
        ended = False
        for state, want in zip(states, expected, strict=True):
            if coverage is Coverage.PREFIX and ended:
                assert state is BlockState.BEYOND
            else:
                assert state is want or (state is BlockState.BUSY and want is BlockState.HOT)
            ended |= state is not BlockState.HOT
        leased = [space.blocks[k] for k, s in zip(asked, states, strict=True) if s is BlockState.HOT]
        assert (acquisition.lease is not None) == bool(leased)
        self._granted(acquisition, leased, who=who)
        if then == "pin" and acquisition.lease is not None:
            self._pin(acquisition.lease.id)
        elif then == "write":
            self._begin_writing(space, asked)

    @rule(data=st.data(), stranger=clients)
    @precondition(lambda self: self.reads)
    def release(self, data: st.DataObject, stranger: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.reads)))
        read = self.reads[lease_id]
        if stranger != read.owner:
            assert not self.clients[stranger].release_by_id(lease_id)
            return
        alive = read.deadline > self.shard.now
        assert self.clients[read.owner].release_by_id(lease_id) == alive
        if alive:
            self._end(lease_id)

    @rule(data=st.data(), lease_s=times)
    @precondition(lambda self: self.reads or self.writes)
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        lease_id = data.draw(st.sampled_from(sorted([*self.reads, *self.writes])))
        held = self.reads.get(lease_id) or self.writes[lease_id]
        alive = held.deadline > self.shard.now
        session = self.clients[held.owner].session
        assert self.store.renew(session, lease_id, lease_s=lease_s, now=self.shard.now) == alive
        if alive:
            held.deadline = self.shard.now + lease_s

    @rule(data=st.data())
    @precondition(lambda self: self.gone)
    def come_back_late(self, data: st.DataObject) -> None:
        """An ended lease is good for nothing, for its owner either."""
        lease_id = data.draw(st.sampled_from(sorted(self.gone)))
        client = self.gone[lease_id]
        assert client.commit_by_id(lease_id) is None
        assert not client.release_by_id(lease_id)
        assert not self.store.abort(client.session, lease_id, self.shard.now)
        assert not self.store.renew(client.session, lease_id, lease_s=9.0, now=self.shard.now)

    @rule(data=st.data())
    @precondition(lambda self: self.reads or self.writes)
    def pin(self, data: st.DataObject) -> None:
        """A copy from or to the slots of a lease begins."""
        self._pin(data.draw(st.sampled_from(sorted([*self.reads, *self.writes]))))

    def _pin(self, lease_id: int) -> None:
        held = self.reads.get(lease_id) or self.writes[lease_id]
        self.store.pin(held.lease)
        self.pins.setdefault(lease_id, NaivePin(held)).count += 1

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def unpin(self, data: st.DataObject) -> None:
        """A copy ends; the last one of a lease that has ended lets go of what it held."""
        lease_id = data.draw(st.sampled_from(sorted(self.pins)))
        pin = self.pins[lease_id]
        self.store.unpin(pin.held.lease, self.shard.now)
        pin.count -= 1
        if not pin.count:
            del self.pins[lease_id]
            if pin.held.lease.ended:
                self._let_go(lease_id, pin.held)

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def copy(self, data: st.DataObject) -> None:
        """Bytes land under a pin: in a lease that has ended they are nobody's, and must hurt nobody."""
        lease_id = data.draw(st.sampled_from(sorted(self.pins)))
        held, owed = self.pins[lease_id].held, self.pins[lease_id].owed
        if not isinstance(held, NaiveWrite):
            return
        self._land(held, 1.0)
        for block, part, offset in (held.parts[index] for index in owed):
            self.memory[offset] = (block.generation, part)
        if held.lease.ended:
            with pytest.raises(LeaseExpired):
                self.clients[held.owner].commit(held.lease)

    @rule()
    @precondition(lambda self: any(space.blocks for space in self.spaces.values()))
    def begin_writing(self) -> None:
        """Whole blocks go to disk; who looks at the shard sees nothing of it."""
        before = (self.store.gauges(), self._orders())
        for space in self.spaces.values():
            self._begin_writing(space, list(space.blocks))
        assert (self.store.gauges(), self._orders()) == before

    def _begin_writing(self, space: NaiveNamespace, chain: list[bytes]) -> None:
        for k in chain:
            block, row = space.blocks.get(k), space.real.blocks.get(k)
            if block is None or row is None or row in self.demotions or set(block.states) != {PRESENT}:
                continue
            first = int(self.store.records.blocks.first_part[row])
            offsets, _, _ = self.store.part_views(list(range(first, first + len(block.states))))
            self.store.records.begin_writing(row)
            words = {offset: (block.generation, part) for part, offset in enumerate(offsets)}
            self.demotions[row] = NaiveDemotion(space, block, words)

    @rule(data=st.data(), most=st.integers(1, 12))
    @precondition(lambda self: self.demotions)
    def end_writing(self, data: st.DataObject, most: int) -> None:
        rows = data.draw(st.permutations(sorted(self.demotions)))
        for row in rows[:most]:
            written = self.demotions.pop(row)
            is_stored = written.space.blocks.get(written.block.key) is written.block
            assert self.store.records.end_writing(row) == is_stored

    @rule(name=spaces, chain=chains)
    def delete(self, name: str, chain: list[int]) -> None:
        space = self.spaces[name]
        for number in chain:
            block = space.blocks.pop(key(number), None)
            expected = 0 if block is None else 2 if block.holders or self._is_written(block) else 1
            assert self.store.delete(space.real, [key(number)]) == bytes([expected])
        self._counted(Removal.DELETED)

    @rule(name=spaces, age=st.sampled_from([0.0, 3.0]))
    def purge(self, name: str, age: float) -> None:
        space, limit = self.spaces[name], self.shard.now - age
        old = {k: b for k, b in space.blocks.items() if b.created < limit}
        purged = self.store.purge(lambda n: n is space.real, created_before=limit)
        assert purged.blocks == len(old)
        assert purged.deferred_blocks == sum(bool(b.holders) or self._is_written(b) for b in old.values())
        for k in old:
            del space.blocks[k]
        self._counted(Removal.PURGED)

    @rule(seconds=times)
    def pass_time(self, seconds: float) -> None:
        self.shard.pass_time(seconds)
        for lease_id in [*self.reads, *self.writes]:
            lease = (self.reads.get(lease_id) or self.writes[lease_id]).lease
            held = self.reads.get(lease_id) or self.writes[lease_id]
            if held.deadline <= self.shard.now - TICK_S:
                assert lease.ended
            if lease.ended:
                assert held.deadline <= self.shard.now
                self._end(lease_id)
        for space in self.spaces.values():
            self._expire(space, {k for k in space.blocks if not self._young(space, k)})

    @rule(who=clients)
    def die(self, who: int) -> None:
        """A client vanishes with all its leases; another takes its place."""
        client = self.clients[who]
        client.end()
        assert SessionEnded(client.session.id) in self.store.take_effects()
        for lease_id in [*self.reads, *self.writes]:
            if (self.reads.get(lease_id) or self.writes[lease_id]).owner == who:
                self._end(lease_id)
        self.clients[who] = self._newcomer()

    # -- invariants ----------------------------------------------------------------------------------------------

    @invariant()
    def tables_agree(self) -> None:
        self.store.check()
        gauges = self.store.gauges()
        parts = ("free_bytes", "reserved_bytes", "leased_bytes", "evictable_bytes")
        assert sum(gauges[p] for p in parts) == gauges["capacity_bytes"]
        assert all(value >= 0 for value in gauges.values())
        lingering = sum(pin.held.lease.ended for pin in self.pins.values())
        assert gauges["leases"] == len(self.reads) + len(self.writes) + lingering

    @invariant()
    def the_index_is_the_model_s(self) -> None:
        parts, blocks = self.store.records.parts, self.store.records.blocks
        names = {0: ABSENT, 1: RESERVED, 2: PRESENT}
        for space in self.spaces.values():
            assert set(space.blocks) == set(space.real.blocks)
            for k, row in space.real.blocks.items():
                first = int(blocks.first_part[row])
                states = [names[int(s)] for s in parts.state[first : first + space.real.parts_per_block]]
                assert states == space.blocks[k].states
                assert bool(blocks.holds[row]) == bool(space.blocks[k].holders)

    @invariant()
    def nobody_reads_another_s_bytes(self) -> None:
        pinned = [pin.held for pin in self.pins.values() if isinstance(pin.held, NaiveRead)]
        for read in [*self.reads.values(), *pinned]:
            assert {offset: self.memory.get(offset) for offset in read.words} == read.words
        for written in self.demotions.values():
            assert {offset: self.memory.get(offset) for offset in written.words} == written.words

    @invariant()
    def counters_only_grow_and_add_up(self) -> None:
        now = self.store.counters()
        assert all(now[name] >= value for name, value in self.counted.items())
        reserved = now["reserve_created_parts"] - now["committed_parts"] - now["abandoned_parts"] - now["lost_parts"]
        assert reserved == sum(len(w.open) for w in self.writes.values())
        dropped = [pin.held for pin in self.pins.values() if pin.held.lease.ended]
        waiting = sum(len(held.open) for held in dropped if isinstance(held, NaiveWrite))
        waiting += sum(len(pin.owed) for pin in self.pins.values())
        assert int(self.store.records.blocks.reserved.sum()) == reserved + waiting
        answered = ("leased", "missing", "warm", "busy", "late")
        assert now["acquire_asked_blocks"] == sum(now[f"acquire_{name}_blocks"] for name in answered)

    @invariant()
    def limits_hold(self) -> None:
        assert self.spaces["parts"].real.hot_bytes <= LIMIT
        gauges = self.store.gauges()
        size = self.store.records.slot_bytes
        kept = sum(
            len(d.words) * size(row) for row, d in self.demotions.items() if self.store.records.blocks.doomed[row]
        )
        # One call may lease what others hold already, so only what is reserved is bounded without exception.
        assert (
            gauges["reserved_bytes"] + gauges["leased_bytes"] - kept
            <= 0.8 * gauges["capacity_bytes"] + 3 * 16 * KIB * 10
        )

    # -- helpers -------------------------------------------------------------------------------------------------

    def _newcomer(self) -> Client:
        client = self.shard.client()
        for spec, _ in SPECS:
            client.attach(spec)
        return client

    def _young(self, space: NaiveNamespace, k: bytes) -> bool:
        return space.young(space.blocks[k], self.shard.now)

    def _orders(self) -> list[list[int]]:
        cohorts = [c for space in self.spaces.values() for c in space.real.cohorts.values()]
        return [c.peek(10_000).tolist() for c in cohorts]

    def _state(self, space: NaiveNamespace, k: bytes, parts: tuple[int, ...]) -> BlockState:
        if space.visible(k, parts, self.shard.now):
            return BlockState.HOT
        return BlockState.IN_FLIGHT if space.in_flight(k, parts, self.shard.now) else BlockState.MISSING

    def _part_states(self, space: NaiveNamespace, k: bytes, parts: tuple[int, ...]) -> list[str]:
        block = space.blocks.get(k)
        count = space.real.parts_per_block
        return [ABSENT if block is None else block.states[p] for p in parts or range(count)]

    def _check_reserve(
        self, space: NaiveNamespace, asked: list[bytes], before: list[list[str]], rows: list[list[PartState]]
    ) -> None:
        seen: dict[bytes, list[PartState]] = {}
        refused = False
        for k, was, got in zip(asked, before, rows, strict=True):
            if k in seen:
                again = {PartState.CREATED: PartState.IN_FLIGHT}
                assert got == [again.get(s, s) for s in seen[k]]
                continue
            seen[k] = got
            for old, state in zip(was, got, strict=True):
                if old == PRESENT:
                    assert state is PartState.PRESENT
                elif old == RESERVED:
                    assert state is PartState.IN_FLIGHT
                elif refused and space.real.is_chained:
                    assert state is PartState.BEYOND
                else:
                    assert state in (PartState.CREATED, PartState.FULL, PartState.QUOTA, PartState.TOO_LARGE)
            missing = {s for old, s in zip(was, got, strict=True) if old == ABSENT}
            assert len(missing) <= 1, "the missing parts of one block are created together or not at all"
            refused |= bool(missing) and missing != {PartState.CREATED}

    def _adopt(
        self,
        space: NaiveNamespace,
        reserved: Reserved,
        asked: list[bytes],
        rows: list[list[PartState]],
        *,
        parts: tuple[int, ...],
        lengths: Iterable[int],
        who: int,
        old: dict[bytes, NaiveBlock],
    ) -> None:
        """Takes over what a Reserve created, in key then part order, into slots that nobody may be using."""
        lease = reserved.lease
        assert lease is not None
        sizes = list(lengths) or [space.real.spec.part_bytes] * len(asked)
        chosen = list(parts or range(space.real.parts_per_block))
        made: list[tuple[NaiveBlock, int]] = []
        for k, row, size in zip(asked, rows, sizes, strict=True):
            created = [p for p, s in zip(chosen, row, strict=True) if s is PartState.CREATED]
            if created:
                block = old.get(k) or self._new_block(space, k, size)
                space.blocks[k] = block
                block.holders.add(lease.id)
                for part in created:
                    block.states[part] = RESERVED
                    made.append((block, part))
        offsets, lens, _ = self.store.part_views(lease.parts)
        assert len(made) == len(offsets)
        assert lens == [block.length for block, _ in made]
        busy = {o for r in self.reads.values() for o in r.words}
        busy |= {o for w in self.writes.values() for i, (_, _, o) in enumerate(w.parts) if i in w.open}
        for pin in self.pins.values():
            held = pin.held
            busy |= (
                held.words.keys() if isinstance(held, NaiveRead) else {held.parts[i][2] for i in held.open | pin.owed}
            )
        busy |= {offset for written in self.demotions.values() for offset in written.words}
        assert not busy & set(offsets), "a slot in use was given away"
        created_parts = [(b, p, o) for (b, p), o in zip(made, offsets, strict=True)]
        self.writes[lease.id] = NaiveWrite(lease, who, lease.deadline, created_parts, set(range(len(made))))

    def _is_written(self, block: NaiveBlock) -> bool:
        return any(written.block is block for written in self.demotions.values())

    def _new_block(self, space: NaiveNamespace, k: bytes, length: int) -> NaiveBlock:
        self.generations += 1
        return NaiveBlock(k, self.generations, [ABSENT] * space.real.parts_per_block, length, self.shard.now)

    def _verdict(self, write: NaiveWrite, index: int) -> PartState:
        block, _, _ = write.parts[index]
        if not any(block in space.blocks.values() for space in self.spaces.values()):
            return PartState.LOST
        if index not in write.open:
            return PartState.PRESENT
        return PartState.COMMITTED if write.lease.landed[index] else PartState.UNFILLED

    def _granted(self, acquisition: Acquisition, blocks: list[NaiveBlock], *, who: int) -> None:
        lease = acquisition.lease
        if lease is None:
            return
        offsets, lengths, _ = self.store.part_views(lease.parts)
        granted = [(block, part) for block in blocks for part in range(len(block.states))]
        assert lengths == [block.length for block, _ in granted]
        words = {o: (b.generation, p) for o, (b, p) in zip(offsets, granted, strict=True)}
        for block in blocks:
            block.holders.add(lease.id)
        self.reads[lease.id] = NaiveRead(lease, who, lease.deadline, blocks, words)

    def _end(self, lease_id: int) -> None:
        """A lease ended: what it held comes back now, or when its last pin goes."""
        held = self.reads.pop(lease_id, None) or self.writes.pop(lease_id)
        assert held.lease.ended
        self.gone[lease_id] = self.clients[held.owner]
        if lease_id not in self.pins:
            self._let_go(lease_id, held)

    def _let_go(self, lease_id: int, held: NaiveRead | NaiveWrite) -> None:
        """Open parts are dropped, holds given up, blocks that hold nothing vanish."""
        if isinstance(held, NaiveWrite):
            for index in held.open:
                block, part, _ = held.parts[index]
                block.states[part] = ABSENT
        for block in held.blocks if isinstance(held, NaiveRead) else [b for b, _, _ in held.parts]:
            block.holders.discard(lease_id)
            for space in self.spaces.values():
                if space.blocks.get(block.key) is block and block.empty and not block.holders:
                    del space.blocks[block.key]
        self._counted(Removal.INCOMPLETE)

    def _evicted(self) -> None:
        """Takes out what the last call evicted; a held block may go only with its whole page."""
        gone = [(s, k) for s in self.spaces.values() for k in s.blocks if k not in s.real.blocks]
        # A key that was evicted and made anew in one call cannot be told apart by its key alone: generations differ.
        held = sum(bool(space.blocks.pop(k).holders) for space, k in gone)
        now = self.store.counters()
        counts = {name: now[name] - self.counted[name] for name in EVICTIONS}
        assert sum(counts.values()) == len(gone)
        assert held <= counts[Removal.PAGE.value]
        self.counted = now

    def _expire(self, space: NaiveNamespace, gone: set[bytes]) -> None:
        for k in gone:
            del space.blocks[k]

    def _counted(self, cause: Removal) -> None:
        """No other removal than this one was counted since."""
        now = self.store.counters()
        others = [r.value for r in Removal if r not in (cause, Removal.TTL, Removal.INCOMPLETE)]
        assert {n: now[n] for n in others} == {n: self.counted[n] for n in others}
        self.counted = now


class AtOnceMachine(StoreMachine):
    """All rows are handled at once, however few."""

    most_few = WAYS[0]


class MixedMachine(StoreMachine):
    """Most chains are handled at once, what is left of them one by one."""

    most_few = WAYS[1]


class ExpectedReuseMachine(MixedMachine):
    """With the other policy."""

    policy = "expected"


TestStore = StoreMachine.TestCase
TestStoreAtOnce = AtOnceMachine.TestCase
TestStoreMixed = MixedMachine.TestCase
TestStoreExpectedReuse = ExpectedReuseMachine.TestCase
