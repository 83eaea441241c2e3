"""Writers: one wins, the dead leave nothing behind, the late are refused, and nothing shows before Commit."""

from __future__ import annotations

import pytest

from kvstore.core.namespaces import NamespaceRules
from kvstore_wire.errors import InvalidArgument, TableFull
from kvstore_wire.namespace import Chains
from kvstore_wire.states import BlockState, PartState
from tests.shards import KIB, PAGE_BYTES, Shard, block_states, fill, key, keys, kv_spec, opaque_spec, part_states

pytestmark = pytest.mark.usefixtures("each_way")

SLOTS = PAGE_BYTES // 4096


def test_of_many_writers_of_one_key_one_stores_it_and_the_others_are_told() -> None:
    shard = Shard()
    writers = [shard.client() for _ in range(8)]
    space = writers[0].attach(kv_spec("n"))
    for number in range(1_000):
        for writer in writers:
            writer.match(space, [key(number)])
        reserved = [w.reserve(space, [key(number)]) for w in writers]
        assert [r.states[0] for r in reserved] == [PartState.CREATED] + [PartState.IN_FLIGHT] * 7
        lease = reserved[0].lease
        assert lease is not None
        fill(lease)
        assert writers[0].commit(lease) == [PartState.COMMITTED]
        assert [w.put(space, [key(number)]) for w in writers] == [[PartState.PRESENT]] * 8
    counters = shard.store.counters()
    assert counters["committed_parts"] == 1_000
    assert counters["reserve_present_parts"] == 8_000
    shard.store.check()


def test_a_key_given_twice_in_one_call_is_stored_once() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    created, flight, present = PartState.CREATED, PartState.IN_FLIGHT, PartState.PRESENT
    assert writer.put(space, [key(1), key(2), key(1)]) == [created, created, flight]
    assert writer.put(space, [key(1), key(3), key(1), key(3)]) == [present, created, present, flight]
    assert shard.gauge("stored_blocks") == 3
    shard.store.check()


def test_a_repeated_key_that_was_refused_is_not_called_in_flight() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    writer = shard.client()
    space = writer.attach(opaque_spec("n", part_bytes=4096))
    states = writer.put(space, [key(1), key(1)], lengths=[5000, 5000])
    assert states == [PartState.TOO_LARGE, PartState.TOO_LARGE]


def test_a_writer_that_dies_half_way_leaves_a_miss_and_free_bytes() -> None:
    shard = Shard()
    dying, other = shard.client(), shard.client()
    space = dying.attach(kv_spec("n"))
    lease = dying.reserve(space, keys(0, 4)).lease
    assert lease is not None
    lease.landed[:2] = b"\x01\x01"
    assert shard.gauge("reserved_bytes") == 4 * 4096
    dying.end()
    assert other.match(space, keys(0, 4)).prefix_blocks == 0
    assert shard.gauge("reserved_bytes") == 0
    assert shard.gauge("free_bytes") == shard.gauge("capacity_bytes")
    assert other.put(space, keys(0, 4)) == [PartState.CREATED] * 4
    assert other.match(space, keys(0, 4)).prefix_blocks == 4


def test_a_silent_writer_s_bytes_come_back_a_tick_after_its_lease() -> None:
    shard = Shard()
    silent, other = shard.client(), shard.client()
    space = silent.attach(kv_spec("n"))
    silent.reserve(space, keys(0, 4), lease_s=5.0)
    shard.pass_time(4.9)
    assert other.reserve(space, keys(0, 4)).states == bytes([PartState.IN_FLIGHT] * 4)
    shard.pass_time(0.4)
    assert other.put(space, keys(0, 4)) == [PartState.CREATED] * 4
    assert shard.store.counters()["write_leases_expired"] == 1
    assert shard.store.counters()["abandoned_parts"] == 4


def test_a_late_writer_is_refused_and_the_new_owner_s_bytes_stay() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    late, other = shard.client(), shard.client()
    space = late.attach(kv_spec("n"))
    lease = late.reserve(space, keys(0, SLOTS), lease_s=1.0).lease
    assert lease is not None
    old_offsets = set(shard.store.part_views(lease.parts)[0])
    shard.pass_time(2.0)
    new = other.reserve(space, keys(100, 100 + SLOTS)).lease
    assert new is not None
    assert set(shard.store.part_views(new.parts)[0]) == old_offsets
    assert new.id != lease.id
    fill(lease)
    assert lease.ended
    assert late.commit_by_id(lease.id) is None
    assert not shard.store.abort(late.session, lease.id, shard.now)
    fill(new)
    assert other.commit(new) == [PartState.COMMITTED] * SLOTS
    assert late.match(space, keys(0, 1)).prefix_blocks == 0
    assert late.match(space, keys(100, 100 + SLOTS)).prefix_blocks == SLOTS
    shard.store.check()


def test_an_expired_lease_is_refused_before_the_sweep_finds_it() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, [key(1)], lease_s=1.0).lease
    assert lease is not None
    fill(lease)
    shard.now += 1.0
    assert writer.commit_by_id(lease.id) is None
    assert not shard.store.renew(writer.session, lease.id, lease_s=9.0, now=shard.now)


def test_nobody_but_its_session_can_use_a_lease() -> None:
    shard = Shard()
    writer, thief = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, [key(1)]).lease
    assert lease is not None
    fill(lease)
    assert thief.commit_by_id(lease.id) is None
    assert not shard.store.abort(thief.session, lease.id, shard.now)
    assert not shard.store.renew(thief.session, lease.id, lease_s=9.0, now=shard.now)
    assert not writer.release_by_id(lease.id), "a write lease is no read lease"
    assert writer.commit_by_id(lease.id) == [PartState.COMMITTED]


def test_nothing_is_visible_before_commit_and_each_part_is_visible_alone() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n", layer_groups=2))
    lease = writer.reserve(space, keys(0, 2)).lease
    assert lease is not None

    def seen(parts: tuple[int, ...] = ()) -> list[BlockState]:
        return block_states(reader.match(space, keys(0, 2), parts=parts).states)

    assert seen() == [BlockState.IN_FLIGHT, BlockState.BEYOND]
    lease.landed[0] = lease.landed[1] = 1
    assert seen() == [BlockState.IN_FLIGHT, BlockState.BEYOND], "bytes alone make nothing visible"
    assert writer.commit(lease, [0, 3]) == [PartState.COMMITTED, PartState.UNFILLED]
    assert seen((0,)) == [BlockState.HOT, BlockState.IN_FLIGHT]
    assert seen((1,)) == [BlockState.IN_FLIGHT, BlockState.BEYOND]
    assert seen() == [BlockState.IN_FLIGHT, BlockState.BEYOND]
    fill(lease)
    assert writer.commit(lease) == [PartState.PRESENT] + [PartState.COMMITTED] * 3
    assert seen() == [BlockState.HOT, BlockState.HOT]
    assert lease.ended


def test_a_commit_of_a_block_that_was_removed_meanwhile_is_lost_each_time_it_is_asked() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, keys(0, 3)).lease
    assert lease is not None
    lease.landed[:2] = b"\x01\x01"
    assert shard.store.delete(space, [key(0)]) == bytes([2])
    assert writer.commit(lease, [0, 1]) == [PartState.LOST, PartState.COMMITTED]
    assert writer.commit(lease, [0, 1, 2]) == [PartState.LOST, PartState.PRESENT, PartState.UNFILLED]
    assert shard.store.counters()["lost_parts"] == 1
    assert writer.match(space, [key(0)]).prefix_blocks == 0
    shard.store.check()
    writer.end()
    assert shard.gauge("reserved_bytes") == 0
    shard.store.check()


@pytest.mark.parametrize(
    ("indexes", "checksums", "field"),
    [([0, 0], [1, 1], "parts"), ([2], [1], "parts"), ([-1], [1], "parts"), ([0], [1, 2], "checksums")],
)
def test_a_commit_with_bad_indexes_changes_nothing(indexes: list[int], checksums: list[int], field: str) -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, keys(0, 2)).lease
    assert lease is not None
    fill(lease)
    with pytest.raises(InvalidArgument) as caught:
        shard.store.commit(writer.session, lease, indexes, checksums=checksums, now=shard.now)
    assert caught.value.field == field
    assert writer.match(space, keys(0, 2)).prefix_blocks == 0
    assert writer.commit(lease) == [PartState.COMMITTED] * 2


def test_parts_of_one_block_can_be_written_by_different_writers() -> None:
    shard = Shard()
    ranks = [shard.client() for _ in range(4)]
    space = ranks[0].attach(kv_spec("n", layer_groups=4))
    leases = [rank.reserve(space, keys(0, 3), parts=(i,)).lease for i, rank in enumerate(ranks)]
    assert ranks[0].reserve(space, keys(0, 1)).states == bytes([PartState.IN_FLIGHT] * 4)
    for number, (rank, lease) in enumerate(zip(ranks, leases, strict=True)):
        assert ranks[0].match(space, keys(0, 3)).prefix_blocks == 0, f"{number} of 4 parts are not a block"
        assert lease is not None
        fill(lease)
        rank.commit(lease)
    assert ranks[0].match(space, keys(0, 3)).prefix_blocks == 3


def test_a_block_whose_other_part_was_dropped_keeps_what_was_committed() -> None:
    shard = Shard()
    good, dead = shard.client(), shard.client()
    space = good.attach(kv_spec("n", layer_groups=2))
    lease, other = good.reserve(space, [key(1)], parts=(0,)).lease, dead.reserve(space, [key(1)], parts=(1,)).lease
    assert lease is not None
    assert other is not None
    fill(lease)
    good.commit(lease)
    dead.end()
    assert good.match(space, [key(1)], parts=(0,)).prefix_blocks == 1
    assert good.match(space, [key(1)]).prefix_blocks == 0
    assert part_states(good.reserve(space, [key(1)]).states) == [PartState.PRESENT, PartState.CREATED]
    shard.store.check()


def test_in_a_chain_nothing_follows_the_first_refusal_and_independent_keys_go_on() -> None:
    shard = Shard()
    writer = shard.client()
    chain = writer.attach(opaque_spec("chain", part_bytes=8 * KIB, chains=Chains.ORDERED))
    values = writer.attach(opaque_spec("values", part_bytes=8 * KIB))
    lengths = [100, 9 * KIB, 200, 0]
    created, large, beyond = PartState.CREATED, PartState.TOO_LARGE, PartState.BEYOND
    assert writer.put(chain, keys(0, 4), lengths=lengths) == [created, large, beyond, beyond]
    assert writer.put(values, keys(0, 4), lengths=lengths) == [created, large, created, created]


def test_a_draining_shard_takes_no_writes_and_says_what_it_has() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 2))
    shard.store.writer.draining = True
    assert writer.put(space, keys(0, 4)) == [PartState.PRESENT] * 2 + [PartState.DRAINING, PartState.BEYOND]


def test_a_reserve_beyond_the_limits_of_a_call_or_of_the_lease_table_changes_nothing() -> None:
    shard = Shard(max_leases=2)
    shard.store.writer.call_bytes = 3 * 4096
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    with pytest.raises(InvalidArgument) as caught:
        writer.reserve(space, keys(0, 4))
    assert caught.value.limit == f"{3 * 4096} bytes"
    writer.reserve(space, [key(1)])
    writer.reserve(space, [key(2)])
    with pytest.raises(TableFull):
        writer.reserve(space, [key(3)])
    assert shard.gauge("reserved_bytes") == 2 * 4096
    assert shard.gauge("stored_blocks") == 2
    shard.store.check()


def test_extending_a_chain_that_fills_most_of_the_arena_is_not_refused_for_its_own_stored_head() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES, leased_share=0.8)
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    for end in range(2, SLOTS + 1, 2):
        states = writer.put(space, keys(0, end))
        assert states == [PartState.PRESENT] * (end - 2) + [PartState.CREATED] * 2
    assert writer.match(space, keys(0, SLOTS)).prefix_blocks == SLOTS


def test_bookkeeping_rows_run_out_before_they_overflow() -> None:
    """Removed blocks whose lease lives on keep their rows though they have no slot any more."""
    shard = Shard(capacity_bytes=32 * PAGE_BYTES)
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    slots, rows = 32 * SLOTS, len(shard.store.records.blocks.holds)
    made = leases = 0
    while made < rows:
        chain = keys(made, made + slots - leases)  # Each lease before keeps one slot.
        reserved = writer.reserve(space, chain)
        assert reserved.lease is not None
        created = len(reserved.lease.parts)
        assert created == min(len(chain), rows - made)
        made, leases = made + created, leases + 1
        shard.store.delete(space, chain)
        writer.commit(reserved.lease, range(created - 1))
    assert writer.reserve(space, [key(0)]).states == bytes([PartState.FULL])
    writer.end()
    shard.store.check()
    other = shard.client()
    assert other.put(other.attach(kv_spec("n")), keys(0, slots)) == [PartState.CREATED] * slots


def test_a_block_past_its_ttl_can_be_written_anew_at_once() -> None:
    shard = Shard(rules_of=lambda spec: NamespaceRules(ttl_s=10.0))
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 2))
    shard.now += 10.0
    assert writer.match(space, keys(0, 2)).prefix_blocks == 0
    assert writer.put(space, keys(0, 2)) == [PartState.CREATED] * 2
    assert writer.match(space, keys(0, 2)).prefix_blocks == 2
    assert shard.store.counters()["expired_blocks"] == 2
