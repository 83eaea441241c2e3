"""Readers: a promise is a lease, waiting ends, and a namespace sees its own blocks alone."""

from __future__ import annotations

import pytest

from kvstore.core.leases import ReadLease
from kvstore.core.namespaces import NamespaceRules
from kvstore.core.reading import AcquireRequest, Acquisition
from kvstore.core.store import LeasesEnded, Wake
from kvstore_wire.errors import TableFull, UnknownNamespace, UnknownSession
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import PAGE_BYTES, Client, Shard, block_states, fill, key, keys, kv_spec

pytestmark = pytest.mark.usefixtures("each_way")

HOT, MISSING, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND
IN_FLIGHT, BUSY = BlockState.IN_FLIGHT, BlockState.BUSY
SLOTS = PAGE_BYTES // 4096


def lease_of(acquisition: Acquisition) -> ReadLease:
    assert acquisition.lease is not None
    return acquisition.lease


def woken(shard: Shard) -> list[Acquisition]:
    return [e.acquisition for e in shard.store.take_effects() if isinstance(e, Wake)]


def test_what_was_promised_and_then_evicted_is_a_miss_from_there_on() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 8))
    assert client.match(space, keys(0, 8)).prefix_blocks == 8
    shard.store.delete(space, [key(5)])
    _, states = client.acquire(space, keys(0, 8))
    assert states == [HOT] * 5 + [MISSING, BEYOND, BEYOND]
    _, states = client.acquire(space, keys(0, 8), coverage=Coverage.EACH)
    assert states == [HOT] * 5 + [MISSING, HOT, HOT]


def test_a_lease_holds_all_its_blocks_whatever_happens_to_the_index() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    reader, writer = shard.client(), shard.client()
    space = reader.attach(kv_spec("n"))
    writer.put(space, keys(0, 8))
    acquisition, states = reader.acquire(space, keys(0, 8))
    assert states == [HOT] * 8
    before = shard.store.part_views(lease_of(acquisition).parts)
    writer.put(space, keys(100, 200))
    shard.store.delete(space, keys(0, 8))
    new = writer.reserve(space, keys(200, 300)).lease
    assert new is not None
    assert not set(shard.store.part_views(new.parts)[0]) & set(before[0])
    assert shard.store.part_views(lease_of(acquisition).parts) == before
    assert reader.release(acquisition)
    shard.store.check()


def test_a_second_release_is_harmless_and_frees_nobody_else_s_hold() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    first, second, writer = (shard.client() for _ in range(3))
    space = first.attach(kv_spec("n"))
    writer.put(space, [key(0)])
    mine, _ = first.acquire(space, [key(0)])
    theirs, _ = second.acquire(space, [key(0)])
    assert first.release(mine)
    assert not first.release(mine)
    assert not first.release_by_id(lease_of(theirs).id), "not that session's lease"
    writer.put(space, keys(100, 100 + 2 * SLOTS))
    assert shard.stored(space, [key(0)]) == [key(0)]
    assert second.release(theirs)
    writer.put(space, keys(200, 200 + 2 * SLOTS))
    assert shard.stored(space, [key(0)]) == []
    assert shard.gauge("leased_bytes") == 0
    shard.store.check()


def test_a_block_leased_twice_in_one_call_is_held_until_that_lease_ends() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, [key(1)])
    acquisition, states = client.acquire(space, [key(1), key(1)])
    assert states == [HOT, HOT]
    assert shard.gauge("leased_bytes") == 4096
    assert client.release(acquisition)
    assert shard.gauge("leased_bytes") == 0
    shard.store.check()


def test_a_waiting_reader_gets_blocks_in_order_as_they_are_committed() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 2))
    lease = writer.reserve(space, keys(0, 5)).lease
    assert lease is not None
    fill(lease)
    acquisition = reader.begin(space, keys(0, 6))
    step = shard.store.reader.step(acquisition, shard.now)
    assert (step.first, block_states(step.states), step.settled) == (0, [HOT, HOT], False)
    writer.commit(lease, [1])
    assert woken(shard) == [], "a later block does not wake it"
    writer.commit(lease, [0])
    assert woken(shard) == [acquisition]
    step = shard.store.reader.step(acquisition, shard.now)
    assert (step.first, block_states(step.states), step.settled) == (2, [HOT, HOT], False)
    step = shard.store.reader.finish(acquisition, shard.now)
    assert (step.first, block_states(step.states), step.settled) == (4, [IN_FLIGHT, BEYOND], True)
    assert shard.gauge("waiting_acquires") == 0
    assert len(lease_of(acquisition).parts) == 4
    assert reader.release(acquisition)
    shard.store.check()


def test_an_aborted_write_ends_the_wait_with_a_miss() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, keys(0, 2)).lease
    assert lease is not None
    acquisition = reader.begin(space, keys(0, 2))
    assert not shard.store.reader.step(acquisition, shard.now).settled
    writer.end()
    assert acquisition in woken(shard)
    step = shard.store.reader.step(acquisition, shard.now)
    assert (block_states(step.states), step.settled) == ([MISSING, BEYOND], True)
    assert acquisition.lease is None


def test_a_prefix_that_ends_at_a_busy_block_does_not_wait_for_what_is_behind_it() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES, leased_share=0.5)
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 7))
    writer.put(space, keys(7, 12))
    assert writer.reserve(space, keys(0, 13)).lease is not None
    acquisition = reader.begin(space, keys(0, 13))
    step = shard.store.reader.step(acquisition, shard.now)
    assert block_states(step.states) == [HOT] * 7 + [BUSY] + [BEYOND] * 5
    assert step.settled
    assert shard.gauge("waiting_acquires") == 0


def test_each_block_is_answered_for_itself_where_some_are_busy() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES, leased_share=0.5)
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 8))
    writer.put(space, keys(8, 12))
    acquisition, states = reader.acquire(space, [key(50), *keys(0, 12)], coverage=Coverage.EACH)
    assert states == [MISSING] + [HOT] * 8 + [BUSY] * 4
    assert shard.gauge("leased_bytes") == 8 * 4096
    again, states = shard.client().acquire(space, keys(0, 9))
    assert states == [HOT] * 8 + [BUSY], "what is held already may be held again"
    assert again.lease is not None
    assert reader.release(acquisition)


@pytest.mark.parametrize(("coverage", "rest"), [(Coverage.PREFIX, BEYOND), (Coverage.EACH, MISSING)])
def test_a_lease_that_ends_during_the_wait_takes_nothing_more(coverage: Coverage, rest: BlockState) -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, [key(0)])
    lease = writer.reserve(space, keys(1, 3), lease_s=60.0).lease
    assert lease is not None
    acquisition = reader.begin(space, keys(0, 3), coverage=coverage, lease_s=1.0)
    shard.store.reader.step(acquisition, shard.now)
    shard.pass_time(2.0)
    assert LeasesEnded(reader.session.id, (lease_of(acquisition).id,)) in shard.store.take_effects()
    fill(lease)
    writer.commit(lease)
    step = shard.store.reader.step(acquisition, shard.now)
    assert (block_states(step.states), len(step.parts), step.settled) == ([rest, rest], 0, True)
    assert shard.gauge("leased_bytes") == 0
    shard.store.check()


def test_a_session_that_ends_during_the_wait_leaves_no_lease_behind() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, keys(0, 2)).lease
    assert lease is not None
    acquisition = reader.begin(space, keys(0, 2))
    shard.store.reader.step(acquisition, shard.now)
    reader.end()
    assert woken(shard) == [acquisition]
    assert shard.gauge("waiting_acquires") == 0
    fill(lease)
    writer.commit(lease)
    with pytest.raises(UnknownSession):
        shard.store.reader.step(acquisition, shard.now)
    assert shard.gauge("leases") == 0
    shard.pass_time(120.0)
    shard.store.check()


def test_a_full_lease_table_refuses_the_call_and_holds_nothing() -> None:
    shard = Shard(max_leases=1)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, [key(0)])
    held, _ = client.acquire(space, [key(0)])
    with pytest.raises(TableFull):
        client.acquire(space, [key(0)])
    client.release(held)
    assert shard.gauge("leased_bytes") == 0
    shard.store.check()


def test_a_release_after_the_deadline_says_that_what_was_read_is_void() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, [key(0)])
    acquisition, _ = client.acquire(space, [key(0)], lease_s=1.0)
    shard.now += 1.0
    assert not client.release(acquisition)
    shard.pass_time(0.5)
    assert shard.gauge("leased_bytes") == 0
    assert client.match(space, [key(0)]).prefix_blocks == 1


def test_a_block_counts_only_with_all_the_parts_asked_for() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n", layer_groups=3))
    client.put(space, keys(0, 5))
    lease = client.reserve(space, keys(5, 8), parts=(0, 2)).lease
    assert lease is not None
    fill(lease)
    client.commit(lease)
    assert client.match(space, keys(0, 8)).prefix_blocks == 5
    assert client.match(space, keys(0, 8), parts=(0,)).prefix_blocks == 8
    acquisition = client.begin(space, keys(0, 8), parts=(2, 0))
    assert block_states(shard.store.reader.finish(acquisition, shard.now).states) == [HOT] * 8
    assert len(lease_of(acquisition).parts) == 16


def test_match_moves_no_recency() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    for number in range(SLOTS):
        shard.now += 1
        client.put(space, [key(number)])
    for _ in range(5):
        shard.now += 1
        client.match(space, keys(0, 4))
    client.put(space, keys(100, 104))
    assert shard.stored(space, keys(0, SLOTS)) == keys(4, SLOTS)


def test_a_block_past_its_ttl_is_unreadable_at_once_and_gone_at_the_next_tick() -> None:
    shard = Shard(rules_of=lambda spec: NamespaceRules(ttl_s=10.0 if spec.name == "short" else None))
    client = shard.client()
    short, long = client.attach(kv_spec("short")), client.attach(kv_spec("long"))
    for space in (short, long):
        client.put(space, keys(0, 3))
    shard.now += 5.0
    client.put(short, keys(0, 4))
    shard.now += 5.0
    assert client.match(short, keys(0, 4)).prefix_blocks == 0
    assert client.acquire(short, keys(0, 4), coverage=Coverage.EACH)[1] == [MISSING] * 3 + [HOT]
    assert shard.gauge("stored_blocks") == 7
    shard.pass_time(0.0)
    assert shard.gauge("stored_blocks") == 4
    assert client.match(long, keys(0, 3)).prefix_blocks == 3
    assert shard.store.counters()["expired_blocks"] == 3
    shard.store.check()


def test_rows_that_pass_between_namespaces_keep_the_life_of_their_own_namespace() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES, rules_of=lambda spec: NamespaceRules(ttl_s=float(spec.name)))
    client = shard.client()
    short, long = client.attach(kv_spec("10")), client.attach(kv_spec("1000"))
    client.put(short, keys(0, SLOTS))
    shard.store.delete(short, keys(0, SLOTS))
    client.put(long, keys(0, SLOTS))
    shard.pass_time(20.0)
    assert shard.stored(long, keys(0, SLOTS)) == keys(0, SLOTS)


class TestTwoNamespaces:
    """Every verb in one namespace, with the keys of the other."""

    @pytest.fixture
    def shard(self) -> Shard:
        return Shard()

    @pytest.fixture
    def client(self, shard: Shard) -> Client:
        client = shard.client()
        client.put(client.attach(kv_spec("n1")), keys(0, 4))
        return client

    def test_nothing_of_one_shows_in_the_other(self, shard: Shard, client: Client) -> None:
        one, two = client.attach(kv_spec("n1")), client.attach(kv_spec("n2"))
        assert client.match(two, keys(0, 4)).states == bytes([MISSING] + [BEYOND] * 3)
        assert client.acquire(two, keys(0, 4), coverage=Coverage.EACH)[1] == [MISSING] * 4
        assert shard.store.delete(two, keys(0, 4)) == bytes(4)
        assert shard.store.purge(lambda n: n is two, created_before=float("inf")).blocks == 0
        assert client.match(one, keys(0, 4)).prefix_blocks == 4

    def test_the_same_keys_are_stored_once_in_each(self, shard: Shard, client: Client) -> None:
        one, two = client.attach(kv_spec("n1")), client.attach(kv_spec("n2"))
        assert client.put(two, keys(0, 4)) == [PartState.CREATED] * 4
        assert shard.store.delete(two, keys(0, 4)) == bytes([1] * 4)
        assert client.match(one, keys(0, 4)).prefix_blocks == 4

    def test_a_tenant_s_namespace_of_the_same_name_is_another(self, shard: Shard, client: Client) -> None:
        other = client.attach(kv_spec("n1", tenant="other"))
        assert client.match(other, keys(0, 4)).prefix_blocks == 0

    def test_a_handle_that_the_session_did_not_attach_is_refused(self, shard: Shard, client: Client) -> None:
        stranger = shard.client()
        with pytest.raises(UnknownNamespace):
            stranger.session.namespace(1)
        with pytest.raises(UnknownNamespace):
            client.session.namespace(2)


@pytest.mark.parametrize("coverage", [Coverage.PREFIX, Coverage.EACH])
@pytest.mark.parametrize("asked", [keys(0, 4), keys(2, 12), [key(9), key(1), key(1), key(99)], [key(99)], []])
@pytest.mark.parametrize("slots", [1000, 3], ids=["room", "busy"])
def test_a_glance_is_an_acquire_and_a_release_in_one(coverage: Coverage, asked: list[bytes], slots: int) -> None:
    """The same answer, counters, account and order of eviction, and nothing is held afterwards; kept or not."""
    told = []
    for way in ("glance", "kept", "acquire"):
        shard = Shard(leased_share=min(1.0, slots * 4096 / (16 * PAGE_BYTES)))
        client = shard.client()
        space = client.attach(kv_spec("n"))
        for stored in keys(0, 6):
            client.put(space, [stored])
        shard.store.delete(space, [key(4)])
        client.reserve(space, [key(7)])
        reader = shard.store.reader
        request = AcquireRequest(keys=asked, lease_s=10.0, coverage=coverage)
        lease: ReadLease | None = None
        if way == "acquire":
            acquisition = reader.begin(client.session, space, request)
            step = reader.finish(acquisition, shard.now)
            states, parts, lease = step.states, step.parts, acquisition.lease
        else:
            states, grant = reader.glance(space, request, shard.now)
            parts = grant.parts
            if way == "kept" and len(grant.blocks):
                lease = reader.keep(client.session, space, grant, lease_s=10.0, now=shard.now)
                shard.store.check()
                assert shard.store.read_lease(client.session, lease.id, shard.now) is lease
        if lease is not None:
            shard.store.end_lease(client.session, lease, shard.now)
        shard.store.check()
        (policy,) = space.cohorts.values()
        order = [shard.store.records.blocks.key[block] for block in policy.peek(16).tolist()]
        told.append((states, shard.store.part_views(parts), space.counters.values(), shard.store.gauges(), order))
    assert told[0] == told[1] == told[2]
    assert slots > 3 or len(asked) != 4 or key(0) not in asked or BUSY in told[0][0], "the share was to be used up"
