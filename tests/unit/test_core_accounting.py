"""Counters have one meaning and only grow, bytes add up, and what is removed is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.counters import NAMESPACE_COUNTERS, Counters
from kvstore.core.namespaces import NAMES_PER_NAMESPACE, NamespaceRules
from kvstore.core.sessions import MAX_LEASES
from kvstore.core.store import EXPIRED_BLOCKS_PER_TICK, STEP_BLOCKS, NamespacePurged, SessionEnded
from kvstore_wire.errors import InvalidArgument, NamespaceMismatch, TableFull
from kvstore_wire.limits import MAX_NAMESPACES_PER_SESSION
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import PAGE_BYTES, Shard, fill, key, keys, kv_spec

pytestmark = pytest.mark.usefixtures("each_way")

SLOTS = PAGE_BYTES // 4096
BYTES = ("free_bytes", "reserved_bytes", "leased_bytes", "evictable_bytes")


def test_each_use_is_counted_once() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 10))
    client.match(space, keys(0, 10))
    client.release(client.acquire(space, keys(0, 10))[0])
    client.match(space, keys(0, 10))
    counters = shard.store.counters()
    expected = {
        "match_calls": 2,
        "match_asked_blocks": 20,
        "match_hit_blocks": 20,
        "acquire_calls": 1,
        "acquire_asked_blocks": 10,
        "acquire_leased_blocks": 10,
        "reserve_calls": 1,
        "reserve_created_parts": 10,
        "committed_parts": 10,
    }
    assert {name: value for name, value in counters.items() if value} == expected


def test_an_acquire_that_answers_in_several_steps_counts_each_key_once() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 2))
    lease = client.reserve(space, keys(2, 6)).lease
    assert lease is not None
    fill(lease)
    acquisition = client.begin(space, keys(0, 8), coverage=Coverage.EACH)
    for index in range(3):
        shard.store.reader.step(acquisition, shard.now)
        client.commit(lease, [index])
    shard.store.reader.finish(acquisition, shard.now)
    counters = shard.store.counters()
    names = ("calls", "asked_blocks", "leased_blocks", "missing_blocks", "busy_blocks", "late_blocks")
    assert [counters[f"acquire_{n}"] for n in names] == [1, 8, 5, 2, 0, 1]


def test_empty_calls_count_as_calls_and_nothing_else() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    assert client.match(space, []).prefix_blocks == 0
    assert client.acquire(space, [])[1] == []
    assert client.reserve(space, []).lease is None
    assert shard.store.delete(space, []) == b""
    assert {n for n, v in shard.store.counters().items() if v} == {"match_calls", "acquire_calls", "reserve_calls"}


def test_removals_are_counted_by_their_cause() -> None:
    rules = {
        "limited": NamespaceRules(max_bytes=4 * 4096),
        "short": NamespaceRules(ttl_s=10.0),
    }
    shard = Shard(capacity_bytes=4 * PAGE_BYTES, rules_of=lambda spec: rules.get(spec.name, NamespaceRules()))
    client = shard.client()
    names = ("limited", "short", "plain", "other")
    limited, short, plain, other = (client.attach(kv_spec(n)) for n in names)
    client.put(limited, keys(0, 4))
    client.put(limited, keys(4, 7))
    client.put(short, keys(0, 5))
    shard.pass_time(10.0)
    client.put(plain, keys(0, 20))
    shard.store.delete(plain, [*keys(0, 6), key(999)])
    lease = client.reserve(plain, keys(50, 57)).lease
    assert lease is not None
    shard.store.abort(client.session, lease.id, shard.now)
    shard.store.reader.drop_corrupt(plain.blocks[key(6)])
    shard.store.purge(lambda n: n is plain, created_before=shard.now + 1)
    shard.store.delete(limited, keys(0, 100))
    client.put(other, keys(0, 4 * SLOTS))
    client.put(other, keys(100, 109))
    shard.now += 100
    client.put(client.attach(kv_spec("large", part_bytes=PAGE_BYTES)), [key(0)])
    counters = shard.store.counters()
    expected = {
        "evicted_quota_blocks": 3,
        "expired_blocks": 5,
        "deleted_blocks": 6 + 4,
        "incomplete_blocks": 7,
        "corrupt_blocks": 1,
        "purged_blocks": 13,
        "evicted_capacity_blocks": 9,
        "evicted_page_blocks": SLOTS,
    }
    assert {name: counters[name] for name in expected} == expected
    shard.store.check()


def test_a_corrupt_block_is_dropped_and_counted_once_however_many_report_it() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, [key(1)])
    block = space.blocks[key(1)]
    first, second = client.acquire(space, [key(1)])[0], client.acquire(space, [key(1)])[0]
    shard.store.reader.drop_corrupt(block)
    shard.store.reader.drop_corrupt(block)
    assert client.match(space, [key(1)]).prefix_blocks == 0
    assert client.put(space, [key(1)]) == [PartState.CREATED]
    assert client.release(first)
    assert client.release(second)
    assert shard.store.counters()["corrupt_blocks"] == 1
    assert shard.gauge("stored_blocks") == 1
    shard.store.check()


def test_counters_of_a_namespace_that_is_gone_stay_in_the_sums() -> None:
    shard = Shard(max_namespaces=1)
    client = shard.client()
    space = client.attach(kv_spec("first"))
    client.put(space, keys(0, 3))
    shard.store.delete(space, keys(0, 3))
    client.end()
    before = shard.store.counters()
    other = shard.client()
    other.put(other.attach(kv_spec("second")), keys(0, 2))
    after = shard.store.counters()
    assert shard.gauge("namespaces") == 1
    assert all(after[name] >= before[name] for name in NAMESPACE_COUNTERS)
    assert after["committed_parts"] == 5


def test_a_counter_refuses_to_shrink() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="cannot shrink"):
        counters.add("match_calls", -1)
    with pytest.raises(KeyError):
        counters.add("no_such_counter")


def test_bytes_add_up_through_a_block_s_life() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    client = shard.client()
    space = client.attach(kv_spec("n", part_bytes=5_000))
    used = 2 * 8192

    def account() -> list[int]:
        shard.store.check()
        return [shard.gauge(name) for name in BYTES]

    lease = client.reserve(space, keys(0, 2)).lease
    assert lease is not None
    assert account() == [PAGE_BYTES - used, used, 0, 0]
    fill(lease)
    client.commit(lease, [0])
    assert account() == [PAGE_BYTES - used, 8192, 8192, 0]
    client.commit(lease, [1])
    assert account() == [PAGE_BYTES - used, 0, 0, used]
    acquisition, _ = client.acquire(space, keys(0, 1))
    assert account() == [PAGE_BYTES - used, 0, 8192, 8192]
    assert shard.store.delete(space, keys(0, 2)) == bytes([2, 1])
    assert account() == [PAGE_BYTES - 8192, 0, 8192, 0]
    client.release(acquisition)
    assert account() == [PAGE_BYTES, 0, 0, 0]


def test_delete_frees_as_soon_as_no_reader_is_active_however_long_its_lease_was() -> None:
    shard = Shard(capacity_bytes=2 * PAGE_BYTES)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(100_000, 100_000 + SLOTS))
    for number in range(4 * SLOTS):
        client.put(space, [key(number)])
        acquisition, _ = client.acquire(space, [key(number)], lease_s=300.0)
        assert client.release(acquisition)
        assert shard.store.delete(space, [key(number)]) == bytes([1])
    assert len(shard.stored(space, keys(100_000, 100_000 + SLOTS))) == SLOTS, "dead data pushed out live data"
    assert shard.store.counters()["evicted_capacity_blocks"] == 0


def test_a_key_named_twice_in_a_delete_is_gone_the_second_time() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, [key(1)])
    assert shard.store.delete(space, [key(1), key(1), key(2)]) == bytes([1, 0, 0])


def test_purging_one_of_three_models_under_load_leaves_the_others() -> None:
    shard = Shard()
    client = shard.client()
    spaces = [client.attach(kv_spec(n)) for n in ("a", "b", "c")]
    for space in spaces:
        client.put(space, keys(0, 10))
    reading, _ = client.acquire(spaces[1], keys(0, 3))
    writing = client.reserve(spaces[1], keys(10, 12)).lease
    assert writing is not None
    fill(writing)
    shard.store.take_effects()
    purged = shard.store.purge(lambda n: n is spaces[1], created_before=shard.now + 1)
    assert (purged.blocks, purged.deferred_blocks, purged.bytes) == (12, 5, 12 * 4096)
    assert shard.store.take_effects() == [NamespacePurged(client.session.id, 2)]
    assert client.commit(writing) == [PartState.LOST] * 2
    assert client.release(reading)
    assert [len(shard.stored(s, keys(0, 12))) for s in spaces] == [10, 0, 10]
    assert spaces[1].hot_bytes == 0
    assert client.put(spaces[1], keys(0, 2)) == [PartState.CREATED] * 2
    shard.store.check()


def test_a_purge_by_age_takes_only_what_is_older() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 3))
    shard.now += 10
    client.put(space, keys(0, 5))
    assert shard.store.purge(lambda n: True, created_before=shard.now - 5).blocks == 3
    assert shard.stored(space, keys(0, 5)) == keys(3, 5)


def test_a_purge_in_steps_takes_what_was_there_and_leaves_what_comes_meanwhile() -> None:
    shard = Shard(capacity_bytes=256 * PAGE_BYTES)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 2 * STEP_BLOCKS))
    shard.now += 1.0
    shard.store.take_effects()
    steps = shard.store.purge_in_steps(lambda n: True, created_before=float("inf"))
    assert next(steps).blocks == STEP_BLOCKS
    assert shard.stored(space, keys(0, 2 * STEP_BLOCKS)) == keys(STEP_BLOCKS, 2 * STEP_BLOCKS)
    # What the second step was about to take goes otherwise and comes back, in the very same rows.
    assert shard.store.delete(space, keys(STEP_BLOCKS, STEP_BLOCKS + 9)) == b"\1" * 9
    client.put(space, [*keys(0, 5), key(STEP_BLOCKS)])
    held, _ = client.acquire(space, keys(STEP_BLOCKS + 9, STEP_BLOCKS + 12))
    assert shard.store.take_effects() == []
    *_, done = steps
    assert (done.blocks, done.deferred_blocks) == (2 * STEP_BLOCKS - 9, 3)
    assert shard.stored(space, keys(0, 2 * STEP_BLOCKS)) == [*keys(0, 5), key(STEP_BLOCKS)]
    assert shard.store.take_effects() == [NamespacePurged(client.session.id, 1)]
    assert client.release(held)
    shard.store.check()


def test_many_blocks_past_their_life_go_in_several_ticks_and_are_served_in_none() -> None:
    shard = Shard(capacity_bytes=256 * PAGE_BYTES, rules_of=lambda spec: NamespaceRules(ttl_s=10.0))
    client = shard.client()
    spaces = [client.attach(kv_spec(n)) for n in ("a", "b")]
    for space in spaces:
        client.put(space, keys(0, EXPIRED_BLOCKS_PER_TICK))
    shard.pass_time(10.0)
    left = [len(space.blocks) for space in spaces]
    assert 0 < sum(left) <= EXPIRED_BLOCKS_PER_TICK
    assert [shard.stored(space, keys(0, EXPIRED_BLOCKS_PER_TICK)) for space in spaces] == [[], []]
    shard.pass_time(0.1)
    assert [len(space.blocks) for space in spaces] == [0, 0]
    assert client.store.counters()["expired_blocks"] == 2 * EXPIRED_BLOCKS_PER_TICK
    shard.store.check()


def test_namespaces_that_come_and_go_leave_nothing_behind() -> None:
    shard = Shard(max_namespaces=2)
    for number in range(1, 200):
        client = shard.client()
        space = client.attach(kv_spec(f"{number}", part_bytes=4096 * (1 + number % SLOTS)))
        client.put(space, keys(0, 2))
        shard.store.delete(space, keys(0, 2))
        client.end()
    records = shard.store.records
    assert shard.gauge("namespaces") == 2
    assert len(records.namespaces) == len(records.cohorts) == 2
    assert len(records.arena.classes) <= 2
    shard.store.check()


def test_a_session_that_was_never_opened_ends_with_its_leases() -> None:
    shard = Shard(session_open_s=10.0)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 2))
    client.acquire(space, keys(0, 2), lease_s=1e6)
    shard.pass_time(9.0)
    assert shard.gauge("sessions") == 1
    shard.pass_time(1.0)
    assert SessionEnded(client.session.id) in shard.store.take_effects()
    assert (shard.gauge("sessions"), shard.gauge("leases"), shard.gauge("leased_bytes")) == (0, 0, 0)
    assert client.store.counters()["read_leases_expired"] == 0


class TestNames:
    """A name is bound to one spec for as long as that is in use."""

    def test_another_spec_under_a_used_name_is_refused_by_its_first_difference(self) -> None:
        shard = Shard()
        client = shard.client()
        space = client.attach(kv_spec("n"))
        client.put(space, [key(1)])
        with pytest.raises(NamespaceMismatch) as caught:
            shard.client().attach(kv_spec("n", part_bytes=8192))
        assert caught.value.field == "namespace.part_bytes"
        assert client.match(space, [key(1)]).states == bytes([BlockState.HOT])

    def test_a_name_whose_namespace_is_empty_and_unused_can_be_bound_anew(self) -> None:
        shard = Shard()
        first = shard.client()
        first.attach(kv_spec("n"))
        first.end()
        client = shard.client()
        assert client.attach(kv_spec("n", part_bytes=8192)).spec.part_bytes == 8192
        assert shard.gauge("namespaces") == 1

    def test_a_digest_that_does_not_fit_the_fields_is_refused(self) -> None:
        shard = Shard()
        client = shard.client()
        with pytest.raises(NamespaceMismatch) as caught:
            shard.store.attach(client.session, kv_spec("n"), b"\0" * 32)
        assert caught.value.field == "digest"
        assert shard.gauge("namespaces") == 0

    def test_too_many_namespaces_are_refused_while_all_are_in_use(self) -> None:
        shard = Shard(max_namespaces=2)
        client = shard.client()
        client.attach(kv_spec("a"))
        client.attach(kv_spec("b"))
        with pytest.raises(TableFull):
            client.attach(kv_spec("c"))

    def test_of_too_many_names_the_one_longest_not_attached_is_forgotten(self) -> None:
        shard = Shard(max_namespaces=2)
        client = shard.client()
        spec = kv_spec("0")
        space = client.attach(spec)
        for number in range(1, 2 * NAMES_PER_NAMESPACE):
            client.attach(replace(spec, name=f"{number}"))
        client.attach(spec)
        assert client.attach(replace(spec, name="one more")) is space
        assert shard.store.namespaces.name_count == 2 * NAMES_PER_NAMESPACE
        other = replace(spec, part_bytes=8192)
        assert client.attach(replace(other, name="1")) is not space
        with pytest.raises(NamespaceMismatch):
            client.attach(replace(other, name="0"))

    def test_a_session_has_a_limit_of_namespaces(self) -> None:
        client = Shard().client()
        for number in range(MAX_NAMESPACES_PER_SESSION):
            client.attach(kv_spec(f"{number}"))
        with pytest.raises(InvalidArgument) as caught:
            client.attach(kv_spec("one more"))
        assert caught.value.field == "session"


def test_a_session_holds_a_bounded_number_of_leases() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 1))
    for _ in range(MAX_LEASES):
        client.acquire(space, keys(0, 1))
    with pytest.raises(TableFull, match="8192 leases in this session"):
        client.acquire(space, keys(0, 1))
    with pytest.raises(TableFull, match="8192 leases in this session"):
        client.reserve(space, keys(1, 2))
    other = shard.client()
    assert other.acquire(other.attach(kv_spec("n")), keys(0, 1))[0].lease is not None
    client.end()
    assert shard.gauge("leases") == 1
    shard.store.check()


def test_hit_rates_of_a_workload_with_half_of_its_blocks_stored() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 50))
    mixed = [key(i if i % 2 else 100 + i) for i in range(50)] + [key(i if i % 2 == 0 else 100 + i) for i in range(50)]
    assert client.match(space, mixed, coverage=Coverage.EACH).states.count(BlockState.HOT) == 50
    client.acquire(space, mixed, coverage=Coverage.EACH)
    counters = shard.store.counters()
    assert counters["match_hit_blocks"] / counters["match_asked_blocks"] == 0.5
    assert counters["acquire_leased_blocks"] / counters["acquire_asked_blocks"] == 0.5
    assert counters["acquire_missing_blocks"] == 50
