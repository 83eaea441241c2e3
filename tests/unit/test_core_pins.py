"""A copy under way keeps the slots of its lease, whatever becomes of the lease meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.leases import Lease, ReadLease, WriteLease
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore.core.store import LeasesEnded, Wake
from kvstore_wire.errors import LeaseExpired, NamespaceMismatch, TableFull
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import PAGE_BYTES, Client, Shard, fill, key, keys, kv_spec, part_states

pytestmark = pytest.mark.usefixtures("each_way")

SLOTS = PAGE_BYTES // 4096


def _writing(client: Client, space: Namespace, start: int, stop: int, *, lease_s: float = 60.0) -> WriteLease:
    lease = client.reserve(space, keys(start, stop), lease_s=lease_s).lease
    assert lease is not None
    return lease


def _reading(client: Client, space: Namespace, start: int, stop: int) -> ReadLease:
    lease = client.acquire(space, keys(start, stop))[0].lease
    assert lease is not None
    return lease


def _release(client: Client, lease: Lease) -> None:
    assert client.release_by_id(lease.id)


def _abort(client: Client, lease: Lease) -> None:
    assert client.store.abort(client.session, lease.id, client.shard.now)


def _run_out(client: Client, lease: Lease) -> None:
    client.shard.pass_time(100.0)


def _die(client: Client, lease: Lease) -> None:
    client.end()


def _offsets(shard: Shard, lease: WriteLease) -> set[int]:
    return set(shard.store.part_views(lease.parts)[0])


@pytest.mark.parametrize("end", [_abort, _run_out, _die])
def test_a_write_lease_that_ends_under_a_copy_keeps_its_slots_until_the_copy_is_over(
    end: Callable[[Client, Lease], None],
) -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    writer, other = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    other.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, SLOTS)
    shard.store.pin(lease)
    end(writer, lease)
    assert lease.ended
    assert writer.commit_by_id(lease.id) is None
    assert (shard.gauge("reserved_bytes"), shard.gauge("leases")) == (PAGE_BYTES, 1)
    assert part_states(other.reserve(space, keys(100, 101)).states) == [PartState.FULL]
    assert part_states(other.reserve(space, keys(0, 1)).states) == [PartState.IN_FLIGHT]
    shard.store.check()
    shard.store.unpin(lease, shard.now)
    assert (shard.gauge("reserved_bytes"), shard.gauge("leases")) == (0, 0)
    assert shard.gauge("free_bytes") == PAGE_BYTES
    assert other.put(space, keys(0, SLOTS)) == [PartState.CREATED] * SLOTS
    assert shard.store.counters()["abandoned_parts"] == SLOTS
    shard.store.check()


@pytest.mark.parametrize("end", [_release, _run_out, _die])
def test_a_read_lease_that_ends_under_a_copy_keeps_its_blocks_until_the_copy_is_over(
    end: Callable[[Client, Lease], None],
) -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    reader, other = shard.client(), shard.client()
    space = reader.attach(kv_spec("n"))
    other.attach(kv_spec("n"))
    reader.put(space, keys(0, SLOTS))
    lease = _reading(reader, space, 0, SLOTS)
    shard.store.pin(lease)
    end(reader, lease)
    assert lease.ended
    assert not reader.release_by_id(lease.id)
    assert (shard.gauge("leased_bytes"), shard.gauge("leases")) == (PAGE_BYTES, 1)
    assert part_states(other.reserve(space, keys(100, 101)).states) == [PartState.FULL]
    assert other.match(space, keys(0, SLOTS)).prefix_blocks == SLOTS
    shard.store.check()
    shard.store.unpin(lease, shard.now)
    assert (shard.gauge("leased_bytes"), shard.gauge("evictable_bytes")) == (0, PAGE_BYTES)
    assert other.put(space, keys(100, 101)) == [PartState.CREATED]
    shard.store.check()


def test_a_stopped_writer_s_copy_never_reaches_the_bytes_of_another_key() -> None:
    """The writer stops past its lease while its copy runs; the copy goes on, and ends, over slots that are still its
    own, and what it asks to commit is refused."""
    shard = Shard(capacity_bytes=2 * PAGE_BYTES)
    stopped, other = shard.client(), shard.client()
    space = stopped.attach(kv_spec("n"))
    lease = _writing(stopped, space, 0, SLOTS, lease_s=1.0)
    mine, memory = _offsets(shard, lease), dict[int, str]()
    shard.store.pin(lease)
    memory |= dict.fromkeys(sorted(mine)[: SLOTS // 2], "late")
    shard.pass_time(2.0)
    new = _writing(other, space, 100, 100 + SLOTS)
    assert not mine & _offsets(shard, new)
    memory |= dict.fromkeys(_offsets(shard, new), "new")
    fill(new)
    assert other.commit(new) == [PartState.COMMITTED] * SLOTS
    memory |= dict.fromkeys(mine, "late")
    fill(lease)
    with pytest.raises(LeaseExpired):
        stopped.commit(lease)
    shard.store.unpin(lease, shard.now)
    reading = _reading(other, space, 100, 100 + SLOTS)
    read = shard.store.part_views(reading.parts)[0]
    assert [memory[offset] for offset in read] == ["new"] * SLOTS
    assert stopped.match(space, keys(0, 1)).prefix_blocks == 0
    assert mine == _offsets(shard, _writing(other, space, 200, 200 + SLOTS))
    shard.store.check()


def test_the_slots_come_back_with_the_last_of_several_pins() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, 2)
    for _ in range(3):
        shard.store.pin(lease)
    _abort(writer, lease)
    for left in (2, 1, 0):
        shard.store.unpin(lease, shard.now)
        assert shard.gauge("reserved_bytes") == (2 * 4096 if left else 0)
    with pytest.raises(ValueError, match="no pin"):
        shard.store.unpin(lease, shard.now)
    shard.store.check()


def test_a_pin_on_a_lease_that_lives_on_changes_nothing() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, 2)
    shard.store.pin(lease)
    before = shard.store.gauges()
    shard.store.unpin(lease, shard.now)
    assert shard.store.gauges() == before
    fill(lease)
    assert writer.commit(lease) == [PartState.COMMITTED] * 2
    with pytest.raises(LeaseExpired) as caught:
        shard.store.pin(lease)
    assert caught.value.field == "lease"


def test_a_commit_of_all_parts_under_a_pin_shows_them_and_holds_them() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, SLOTS)
    shard.store.pin(lease)
    fill(lease)
    assert writer.commit(lease) == [PartState.COMMITTED] * SLOTS
    assert lease.ended
    assert writer.match(space, keys(0, SLOTS)).prefix_blocks == SLOTS
    assert writer.put(space, keys(100, 101)) == [PartState.FULL]
    shard.store.check()
    shard.store.unpin(lease, shard.now)
    assert shard.gauge("evictable_bytes") == PAGE_BYTES
    shard.store.check()


def test_a_part_lost_at_commit_keeps_its_slot_under_a_pin() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, SLOTS)
    shard.store.pin(lease)
    fill(lease)
    assert shard.store.delete(space, [key(0)]) == b"\x02"
    assert writer.commit(lease, [0, 1]) == [PartState.LOST, PartState.COMMITTED]
    assert not lease.ended
    assert writer.commit(lease, [0]) == [PartState.LOST]
    assert shard.gauge("reserved_bytes") == PAGE_BYTES - 4096
    assert writer.put(space, [key(0)]) == [PartState.FULL]
    shard.store.check()
    shard.store.unpin(lease, shard.now)
    assert writer.put(space, [key(0)]) == [PartState.CREATED]
    assert writer.commit(lease, range(2, SLOTS)) == [PartState.COMMITTED] * (SLOTS - 2)
    assert shard.store.counters()["lost_parts"] == 1
    shard.store.check()


def test_delete_purge_and_ttl_wait_for_the_copy() -> None:
    shard = Shard(rules_of=lambda spec: NamespaceRules(ttl_s=5.0))
    reader = shard.client()
    space = reader.attach(kv_spec("n"))
    reader.put(space, keys(0, 3))
    lease = _reading(reader, space, 0, 3)
    shard.store.pin(lease)
    _release(reader, lease)
    assert shard.store.delete(space, [key(0)]) == b"\x02"
    purged = shard.store.purge(lambda n: n is space and key(1) in n.blocks, created_before=shard.now + 1)
    assert (purged.blocks, purged.deferred_blocks) == (2, 2)
    reader.put(space, keys(10, 11))
    second = _reading(reader, space, 10, 11)
    shard.store.pin(second)
    _release(reader, second)
    shard.pass_time(6.0)
    assert reader.match(space, keys(10, 11)).prefix_blocks == 0
    assert (shard.gauge("leased_bytes"), shard.gauge("stored_blocks")) == (4 * 4096, 4)
    shard.store.check()
    shard.store.unpin(lease, shard.now)
    shard.store.unpin(second, shard.now)
    assert (shard.gauge("leased_bytes"), shard.gauge("stored_blocks")) == (0, 0)
    assert shard.gauge("free_bytes") == shard.gauge("capacity_bytes")
    shard.store.check()


def test_who_waits_for_a_block_in_flight_hears_of_its_end_when_the_copy_is_over() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, 1)
    shard.store.pin(lease)
    waiting = reader.begin(space, keys(0, 1))
    assert not shard.store.reader.step(waiting, shard.now).settled
    writer.end()
    shard.store.take_effects()
    assert not shard.store.take_effects()
    shard.store.unpin(lease, shard.now)
    assert Wake(waiting) in shard.store.take_effects()
    step = shard.store.reader.step(waiting, shard.now)
    assert (step.settled, step.states) == (True, bytes([BlockState.MISSING]))


def test_a_namespace_stays_while_a_copy_uses_its_slots() -> None:
    """Nobody attaches it, nothing is in its index, but its blocks' rows speak of it still."""
    shard = Shard(max_namespaces=1)
    writer, other = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 1))
    lease = _reading(writer, space, 0, 1)
    shard.store.pin(lease)
    assert shard.store.delete(space, [key(0)]) == b"\x02"
    writer.end()
    with pytest.raises(TableFull):
        other.attach(kv_spec("another"))
    with pytest.raises(NamespaceMismatch):
        other.attach(kv_spec("n", part_bytes=8192))
    shard.store.unpin(lease, shard.now)
    assert other.put(other.attach(kv_spec("another")), keys(0, 1)) == [PartState.CREATED]
    shard.store.check()


def test_leases_that_linger_count_as_open_ones() -> None:
    shard = Shard(max_leases=2)
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    pinned = [_writing(writer, space, i, i + 1) for i in range(2)]
    for lease in pinned:
        shard.store.pin(lease)
        _abort(writer, lease)
    assert (shard.gauge("leases"), len(shard.store.leases), shard.store.leases.all()) == (2, 2, [])
    with pytest.raises(TableFull):
        writer.reserve(space, keys(9, 10))
    assert not shard.store.records.account_fault()
    for lease in pinned:
        shard.store.unpin(lease, shard.now)
    assert len(shard.store.leases) == 0
    assert writer.put(space, keys(9, 10)) == [PartState.CREATED]


def test_a_session_hears_once_of_a_pinned_lease_that_ran_out() -> None:
    shard = Shard()
    writer = shard.client()
    space = writer.attach(kv_spec("n"))
    lease = _writing(writer, space, 0, 1, lease_s=1.0)
    shard.store.pin(lease)
    shard.pass_time(2.0)
    shard.pass_time(2.0)
    told = [e for e in shard.store.take_effects() if isinstance(e, LeasesEnded)]
    shard.store.unpin(lease, shard.now)
    told += [e for e in shard.store.take_effects() if isinstance(e, LeasesEnded)]
    assert told == [LeasesEnded(writer.session.id, (lease.id,))]
    assert shard.store.counters()["write_leases_expired"] == 1


def test_a_page_that_changes_its_class_waits_for_the_copy() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    reader, other = shard.client(), shard.client()
    small, large = reader.attach(kv_spec("small")), other.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    reader.put(small, keys(0, SLOTS))
    lease = _reading(reader, small, 0, 1)
    shard.store.pin(lease)
    _release(reader, lease)
    shard.pass_time(50.0)
    assert other.put(large, keys(0, 1)) == [PartState.FULL]
    assert shard.gauge("leased_bytes") == 4096
    shard.store.check()
    shard.store.unpin(lease, shard.now)
    assert other.put(large, keys(0, 1)) == [PartState.CREATED]
    assert shard.stored(small, keys(0, SLOTS)) == []
    assert other.acquire(large, keys(0, 1), coverage=Coverage.EACH)[1] == [BlockState.HOT]
    shard.store.check()
