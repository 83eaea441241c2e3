"""Quotas are shares that others cannot take; limits are shares that their owner cannot pass."""

from __future__ import annotations

import pytest

from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore_wire.states import PartState
from tests.shards import KIB, PAGE_BYTES, Client, Shard, key, keys, kv_spec

pytestmark = pytest.mark.usefixtures("each_way")

SLOTS = PAGE_BYTES // 4096
CREATED, QUOTA, FULL, BEYOND = PartState.CREATED, PartState.QUOTA, PartState.FULL, PartState.BEYOND


def shard_with(pages: int, *, leased_share: float = 1.0, **rules: NamespaceRules) -> tuple[Shard, Client]:
    """A shard of so many pages; each namespace by its name's rules."""
    shard = Shard(
        capacity_bytes=pages * PAGE_BYTES,
        leased_share=leased_share,
        rules_of=lambda spec: rules.get(spec.name, NamespaceRules()),
    )
    return shard, shard.client()


def flood(client: Client, space: Namespace, blocks: int, *, a_call: int = 8) -> None:
    for start in range(0, blocks, a_call):
        client.shard.now += 0.1
        client.put(space, keys(10_000 + start, 10_000 + start + a_call))


@pytest.mark.parametrize("a_call", [1, 8, 100])
@pytest.mark.parametrize("part_bytes", [4 * KIB, 20 * KIB])
def test_a_flood_takes_nothing_from_a_namespace_within_its_quota(part_bytes: int, a_call: int) -> None:
    """In the same size class and in another one."""
    shard, client = shard_with(16, calm=NamespaceRules(quota_bytes=4 * PAGE_BYTES))
    calm, wild = client.attach(kv_spec("calm")), client.attach(kv_spec("wild", part_bytes=part_bytes))
    client.put(calm, keys(0, 4 * SLOTS))
    shard.now += 1_000
    flood(client, wild, 40 * SLOTS, a_call=a_call)
    assert shard.stored(calm, keys(0, 4 * SLOTS)) == keys(0, 4 * SLOTS)
    counters = calm.counters.values()
    assert not any(counters[n] for n in counters if n.startswith("evicted"))
    shard.store.check()


@pytest.mark.parametrize("a_call", [1, 8, 100])
def test_a_namespace_just_over_its_quota_loses_no_more_than_what_is_over(a_call: int) -> None:
    quota = 4 * PAGE_BYTES
    shard, client = shard_with(8, calm=NamespaceRules(quota_bytes=quota))
    calm, wild = client.attach(kv_spec("calm")), client.attach(kv_spec("wild"))
    client.put(calm, keys(0, 4 * SLOTS + 5))
    shard.now += 1_000
    flood(client, wild, 30 * SLOTS, a_call=a_call)
    assert calm.hot_bytes == quota
    assert calm.counters["evicted_capacity_blocks"] + calm.counters["evicted_page_blocks"] == 5


@pytest.mark.parametrize("part_bytes", [4 * KIB, 8 * KIB, 64 * KIB])
@pytest.mark.parametrize("a_call", [1, 3, 16])
def test_a_namespace_can_always_grow_to_its_quota(part_bytes: int, a_call: int) -> None:
    """Also where its size class is new, while younger blocks of others fill the arena."""
    quota = 8 * PAGE_BYTES
    shard, client = shard_with(16, calm=NamespaceRules(quota_bytes=quota))
    calm, wild = client.attach(kv_spec("calm", part_bytes=part_bytes)), client.attach(kv_spec("wild"))
    number = 0
    for turn in range(4 * quota // (a_call * part_bytes)):
        flood(client, wild, 20 * SLOTS if turn == 0 else 16)
        shard.now += 0.1
        assert client.put(calm, keys(number, number + a_call)) == [CREATED] * a_call
        number += a_call
    assert calm.hot_bytes >= quota - part_bytes


def test_one_request_larger_than_the_rest_of_the_quota_still_grows_to_the_quota() -> None:
    quota = 4 * PAGE_BYTES
    shard, client = shard_with(8, calm=NamespaceRules(quota_bytes=quota))
    calm, wild = client.attach(kv_spec("calm")), client.attach(kv_spec("wild"))
    client.put(calm, keys(0, 2 * SLOTS))
    shard.now += 100
    flood(client, wild, 20 * SLOTS)
    client.put(calm, keys(100, 100 + 3 * SLOTS))
    assert calm.hot_bytes >= quota
    assert len(shard.stored(calm, keys(100, 100 + 3 * SLOTS))) == 3 * SLOTS


def test_two_quotas_that_fill_the_arena_leave_each_its_own_share() -> None:
    half = 4 * PAGE_BYTES
    _shard, client = shard_with(8, a=NamespaceRules(quota_bytes=half), b=NamespaceRules(quota_bytes=half))
    a, b = client.attach(kv_spec("a")), client.attach(kv_spec("b"))
    flood(client, a, 20 * SLOTS)
    flood(client, b, 20 * SLOTS)
    flood(client, a, 20 * SLOTS)
    assert (a.hot_bytes, b.hot_bytes) == (half, half)


def test_a_namespace_without_a_quota_is_refused_where_all_is_others_quota() -> None:
    _shard, client = shard_with(4, a=NamespaceRules(quota_bytes=4 * PAGE_BYTES))
    a, b = client.attach(kv_spec("a")), client.attach(kv_spec("b"))
    flood(client, a, 4 * SLOTS)
    assert client.put(b, keys(0, 2)) == [FULL, BEYOND]
    assert a.hot_bytes == 4 * PAGE_BYTES


def test_a_namespace_with_a_limit_recycles_its_own_and_costs_nobody_anything() -> None:
    limit = 2 * PAGE_BYTES
    shard, client = shard_with(8, small=NamespaceRules(max_bytes=limit))
    small, other = client.attach(kv_spec("small")), client.attach(kv_spec("other"))
    client.put(other, keys(0, 6 * SLOTS))
    for number in range(10 * SLOTS):
        shard.now += 1
        assert client.put(small, [key(number)]) == [CREATED]
        assert small.hot_bytes <= limit
    assert small.counters["evicted_quota_blocks"] == 8 * SLOTS
    assert len(shard.stored(other, keys(0, 6 * SLOTS))) == 6 * SLOTS
    assert shard.gauge("free_bytes") == 0


def test_a_chain_longer_than_the_limit_keeps_its_head() -> None:
    shard, client = shard_with(8, small=NamespaceRules(max_bytes=PAGE_BYTES))
    small = client.attach(kv_spec("small"))
    states = client.put(small, keys(0, SLOTS + 3))
    assert states == [CREATED] * SLOTS + [QUOTA, BEYOND, BEYOND]
    assert client.match(small, keys(0, SLOTS + 3)).prefix_blocks == SLOTS
    assert shard.store.counters()["reserve_quota_parts"] == 1


def test_a_limit_with_blocks_of_many_parts_costs_no_more_blocks_than_needed() -> None:
    shard, client = shard_with(8, small=NamespaceRules(max_bytes=2 * PAGE_BYTES))
    small = client.attach(kv_spec("small", layer_groups=4))
    client.put(small, keys(0, 8))
    assert client.put(small, [key(100)]) == [CREATED] * 4
    assert small.counters["evicted_quota_blocks"] == 1
    shard.store.check()


def test_a_write_that_is_refused_for_want_of_leases_evicts_nothing() -> None:
    shard, client = shard_with(4, leased_share=0.5, small=NamespaceRules(max_bytes=PAGE_BYTES))
    small, other = client.attach(kv_spec("small")), client.attach(kv_spec("other"))
    client.put(small, keys(0, SLOTS))
    client.put(other, keys(0, 2 * SLOTS))
    held, _ = client.acquire(other, keys(0, 2 * SLOTS))
    assert client.put(small, keys(100, 104)) == [FULL, BEYOND, BEYOND, BEYOND]
    assert shard.stored(small, keys(0, SLOTS)) == keys(0, SLOTS)
    client.release(held)


def test_what_one_namespace_reserves_counts_against_its_own_limit_at_once() -> None:
    shard, client = shard_with(8, small=NamespaceRules(max_bytes=PAGE_BYTES))
    small = client.attach(kv_spec("small"))
    assert client.reserve(small, keys(0, SLOTS)).lease is not None
    assert client.put(small, [key(100)]) == [QUOTA]
    shard.pass_time(61.0)
    assert client.put(small, [key(100)]) == [CREATED]


def test_a_flood_in_another_size_spares_protected_blocks_that_share_pages_with_others() -> None:
    shard, client = shard_with(32, calm=NamespaceRules(quota_bytes=8 * PAGE_BYTES))
    calm, mixed = client.attach(kv_spec("calm")), client.attach(kv_spec("mixed"))
    wild = client.attach(kv_spec("wild", part_bytes=20 * KIB))
    for number in range(8 * SLOTS):
        shard.now += 0.01
        client.put(calm, [key(number)])
        client.put(mixed, keys(3 * number, 3 * number + 3))
    shard.now += 100
    flood(client, wild, 2_000)
    assert len(shard.stored(calm, keys(0, 8 * SLOTS))) == 8 * SLOTS
