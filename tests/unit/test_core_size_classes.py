"""Parts of all sizes share one arena, and no mixture starves a size."""

from __future__ import annotations

import random

import pytest

from kvstore.core.arena import slot_bytes_exact, slot_bytes_stepped
from kvstore.core.namespaces import Namespace
from kvstore_wire.states import PartState
from tests.shards import KIB, MIB, PAGE_BYTES, Client, Shard, fill, key, keys, kv_spec, opaque_spec

pytestmark = pytest.mark.usefixtures("each_way")

CREATED, FULL = PartState.CREATED, PartState.FULL


def large_shard(*specs_bytes: int) -> tuple[Shard, Client, list[Namespace]]:
    """An arena of 1 GiB in pages of 64 MiB, and a namespace for each part size."""
    shard = Shard(capacity_bytes=1 << 30, page_bytes=64 * MIB)
    client = shard.client()
    return shard, client, [client.attach(kv_spec(f"{size}", part_bytes=size)) for size in specs_bytes]


def put_one_by_one(client: Client, space: Namespace, wanted: list[bytes]) -> list[PartState]:
    shard, states = client.shard, []
    for k in wanted:
        shard.now += 0.01
        states += client.put(space, [k])
    return states


@pytest.mark.parametrize(("first", "second"), [(64 * KIB, 4 * MIB), (4 * MIB, 64 * KIB), (4 * KIB, 64 * MIB)])
def test_a_full_arena_of_one_size_makes_room_for_another(first: int, second: int) -> None:
    shard, client, (old, new) = large_shard(first, second)
    for start in range(0, (1 << 30) // first, 4096):
        shard.now += 1
        client.put(old, keys(start, min(start + 4096, (1 << 30) // first)))
    assert shard.gauge("free_bytes") == 0
    shard.now += 1
    count = 2 * (1 << 30) // second if second > MIB else 4096
    states = put_one_by_one(client, new, keys(0, count))
    assert states == [CREATED] * count
    newest = keys(0, count)[-count // 4 :]
    assert shard.stored(new, newest) == newest
    shard.store.check()


def test_any_mixture_of_sizes_finds_room() -> None:
    shard = Shard(capacity_bytes=1 << 30, page_bytes=64 * MIB)
    client = shard.client()
    space = client.attach(opaque_spec("values", part_bytes=64 * MIB))
    draw = random.Random(7)
    for number in range(4_000):
        shard.now += 0.1
        length = int(2 ** draw.uniform(12, 26))
        assert client.put(space, [key(number)], lengths=[length]) == [CREATED], length
    shard.store.check()


def test_a_shift_of_the_load_from_size_to_size_leaves_no_size_behind() -> None:
    shard = Shard(capacity_bytes=64 * PAGE_BYTES)
    client = shard.client()
    sizes = [4 * KIB, 12 * KIB, 20 * KIB, 64 * KIB]
    spaces = [client.attach(kv_spec(f"{s}", part_bytes=s)) for s in sizes]
    number = 0
    for turn in range(12):
        space = spaces[turn % 4]
        slots = 64 * (PAGE_BYTES // space.kv_slot_bytes)
        for _ in range(2 * slots // 8):
            shard.now += 0.1
            assert client.put(space, keys(number, number + 8)) == [CREATED] * 8
            number += 8
        assert space.hot_bytes > shard.gauge("capacity_bytes") * 0.5
    shard.store.check()


def test_leases_on_some_pages_do_not_keep_a_size_from_the_others() -> None:
    shard = Shard(capacity_bytes=16 * PAGE_BYTES)
    client = shard.client()
    small, large = client.attach(kv_spec("small")), client.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    client.put(small, keys(0, 256))
    held = [client.acquire(small, [key(i)], lease_s=1e6)[0] for i in range(0, 128, 16)]
    shard.now += 100
    assert put_one_by_one(client, large, keys(0, 8)) == [CREATED] * 8
    assert large.hot_bytes >= 8 * PAGE_BYTES
    assert all(client.release(h) for h in held)
    shard.store.check()


def test_old_leases_at_the_cold_end_do_not_hide_the_blocks_behind_them() -> None:
    shard = Shard(capacity_bytes=64 * PAGE_BYTES)
    reader, writer = shard.client(), shard.client()
    small, large = reader.attach(kv_spec("small")), reader.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    writer.put(small, keys(0, 256))
    held, _ = reader.acquire(small, keys(0, 256), lease_s=1e6)
    for start in range(256, 1024, 64):
        shard.now += 1
        writer.put(small, keys(start, start + 64))
    shard.now += 100
    assert put_one_by_one(writer, large, keys(0, 40)) == [CREATED] * 40
    assert reader.release(held)


def test_a_page_kept_by_a_reader_comes_when_the_reader_ends() -> None:
    shard = Shard(capacity_bytes=2 * PAGE_BYTES)
    reader, writer = shard.client(), shard.client()
    small, large = reader.attach(kv_spec("small")), reader.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    writer.put(small, keys(0, 32))
    held = [reader.acquire(small, [key(i)], lease_s=5.0)[0] for i in (0, 16)]
    shard.now += 1
    assert writer.put(large, [key(0)]) == [FULL]
    stored = len(shard.stored(small, keys(0, 32)))
    for _ in range(5):
        assert writer.put(large, [key(0)]) == [FULL]
    assert len(shard.stored(small, keys(0, 32))) == stored, "a refused write goes on costing others their blocks"
    shard.pass_time(5.5)
    assert writer.put(large, [key(0)]) == [CREATED]
    assert not reader.release(held[0])
    shard.store.check()


def test_room_for_one_block_of_many_parts_costs_one_block() -> None:
    shard = Shard(capacity_bytes=4 * PAGE_BYTES)
    client = shard.client()
    space = client.attach(kv_spec("n", layer_groups=8))
    client.put(space, keys(0, 8))
    assert client.put(space, [key(100)]) == [CREATED] * 8
    assert len(shard.stored(space, keys(0, 8))) == 7
    assert shard.store.counters()["evicted_capacity_blocks"] == 1


def test_pages_are_chosen_by_where_a_block_s_stored_parts_are() -> None:
    """Blocks of which only the last part is stored."""
    shard = Shard(capacity_bytes=8 * PAGE_BYTES)
    client = shard.client()
    hot, large = client.attach(kv_spec("hot", part_bytes=8 * KIB)), client.attach(kv_spec("l", part_bytes=PAGE_BYTES))
    space = client.attach(kv_spec("n", layer_groups=4))
    client.put(hot, keys(0, 16))
    for number in range(96):
        lease = client.reserve(space, [key(number)], parts=(3,)).lease
        assert lease is not None
        fill(lease)
        client.commit(lease)
    shard.now += 100
    client.put(hot, keys(0, 16))
    assert put_one_by_one(client, large, keys(0, 5)) == [CREATED] * 5
    assert shard.stored(hot, keys(0, 16)) == keys(0, 16)
    shard.store.check()


def test_blocks_of_one_call_in_several_sizes_do_not_evict_each_other_for_nothing() -> None:
    shard = Shard(capacity_bytes=4 * PAGE_BYTES)
    client = shard.client()
    space = client.attach(opaque_spec("values"))
    lengths = [4 * KIB, 64 * KIB, 20 * KIB, 64 * KIB, 8 * KIB]
    states = client.put(space, keys(0, 5), lengths=lengths)
    created = [k for k, s in zip(keys(0, 5), states, strict=True) if s is CREATED]
    assert len(created) >= 3
    assert shard.stored(space, created) == created


def test_slots_of_values_lose_an_eighth_at_most_in_few_sizes() -> None:
    lengths = [*range(1, 3 * MIB, 1021), *(2**n + d for n in range(12, 31) for d in (-1, 0, 1))]
    for length in lengths:
        slot, exact = slot_bytes_stepped(length), slot_bytes_exact(length)
        assert exact <= slot
        assert slot % 4096 == 0
        assert slot - exact <= slot / 8
    assert len({slot_bytes_stepped(n * 4096) for n in range(1, 1 << 14)}) < 100
    assert all(slot_bytes_stepped(2**n) == 2**n for n in range(12, 33))


def test_a_value_of_no_length_and_of_the_greatest_length_have_a_slot() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(opaque_spec("values", part_bytes=PAGE_BYTES))
    assert client.put(space, keys(0, 3), lengths=[0, PAGE_BYTES, PAGE_BYTES + 1]) == [
        CREATED,
        CREATED,
        PartState.TOO_LARGE,
    ]
    assert space.hot_bytes == 4096 + PAGE_BYTES


def test_parts_larger_than_a_page_are_refused_for_good() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n", part_bytes=PAGE_BYTES + 1))
    assert client.put(space, [key(1)]) == [PartState.TOO_LARGE]
    assert shard.gauge("stored_blocks") == 0


def test_one_call_removes_no_more_blocks_than_its_bound() -> None:
    shard = Shard(capacity_bytes=4 * 64 * MIB, page_bytes=64 * MIB)
    client = shard.client()
    old, new = (client.attach(kv_spec(name, part_bytes=size)) for name, size in (("old", 4 * KIB), ("new", 64 * MIB)))
    for start in range(0, 65_536, 4096):
        client.put(old, keys(start, start + 4096))
    shard.now += 100
    assert client.put(new, keys(0, 3)) == [CREATED, FULL, PartState.BEYOND]
    assert shard.store.counters()["evicted_page_blocks"] == 16_384
    assert client.put(new, keys(0, 3)) == [PartState.PRESENT, CREATED, FULL], "the next call goes on"
    shard.store.check()
