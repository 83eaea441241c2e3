"""Readers: a promise is a lease, waiting ends, and a namespace sees its own blocks alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core.leases import ReadLease
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore.core.reading import AcquireRequest, Acquisition
from kvstore.core.sight import Ask
from kvstore.core.store import LeasesEnded, Wake
from kvstore_wire.errors import TableFull, UnknownNamespace, UnknownSession
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import PAGE_BYTES, Client, Shard, block_states, fill, key, keys, kv_spec

pytestmark = pytest.mark.usefixtures("each_way")

HOT, MISSING, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND
IN_FLIGHT, BUSY, WARM = BlockState.IN_FLIGHT, BlockState.BUSY, BlockState.WARM
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


# -- two tiers -------------------------------------------------------------------------------------------------------


def put_on_disk(shard: Shard, space: Namespace, there: Sequence[bytes]) -> list[list[bytes]]:
    """The disk has these blocks of one namespace; returns what it is asked for, call by call."""
    calls: list[list[bytes]] = []

    def elsewhere(namespace: Namespace, asked: Sequence[bytes]) -> list[bool]:
        calls.append(list(asked))
        return [namespace is space and k in there for k in asked]

    shard.store.reader.elsewhere = elsewhere
    return calls


def mixed(mix: str) -> tuple[Shard, Client, Namespace, list[bytes]]:
    """A chain whose blocks are each hot (H), in flight (F), on disk (W), both of these (B) or missing (-)."""
    shard = Shard()
    client = shard.client()
    space, chain = client.attach(kv_spec("n")), keys(0, len(mix))
    for kind, one in zip(mix, chain, strict=True):
        if kind == "H":
            client.put(space, [one])
        elif kind in "FB":
            client.reserve(space, [one])
    put_on_disk(shard, space, [one for kind, one in zip(mix, chain, strict=True) if kind in "WB"])
    return shard, client, space, chain


STATES = {"H": HOT, "F": IN_FLIGHT, "W": WARM, "-": MISSING, ".": BEYOND}


def states_of(word: str) -> list[BlockState]:
    return [STATES[letter] for letter in word]


@pytest.mark.parametrize(
    ("mix", "of_prefix", "of_each"),
    [
        ("HHWHW-W", "HHWHW-.", "HHWHW-W"),
        ("WWW", "WWW", "WWW"),
        ("-WH", "-..", "-WH"),
        ("HFW", "HF.", "HFW"),
        ("HBW-", "HWW-", "HWW-"),
        ("WFH", "WF.", "WFH"),
        ("HH", "HH", "HH"),
        ("H--", "H-.", "H--"),
        ("", "", ""),
        (40 * "H" + 40 * "W" + "-W", 40 * "H" + 40 * "W" + "-.", 40 * "H" + 40 * "W" + "-W"),
    ],
)
def test_a_match_tells_what_either_tier_has_and_a_hole_in_both_ends_the_prefix(
    mix: str, of_prefix: str, of_each: str
) -> None:
    _, client, space, chain = mixed(mix)
    found = client.match(space, chain)
    prefix = len(of_prefix) - len(of_prefix.lstrip("HW"))
    assert (found.prefix_blocks, block_states(found.states)) == (prefix, states_of(of_prefix))
    counters = space.counters.values()
    assert (counters["match_hit_blocks"], counters["match_warm_blocks"]) == (prefix, of_prefix.count("W"))
    found = client.match(space, chain, coverage=Coverage.EACH)
    assert (found.prefix_blocks, block_states(found.states)) == (prefix, states_of(of_each))
    counters = space.counters.values()
    each_hits = of_each.count("H") + of_each.count("W")
    assert counters["match_hit_blocks"] == prefix + each_hits
    assert counters["match_warm_blocks"] == of_prefix.count("W") + of_each.count("W")


def test_a_block_without_a_part_that_is_asked_for_is_warm_where_the_disk_has_it_whole() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n", layer_groups=2))
    lease = client.reserve(space, keys(0, 2), parts=(0,)).lease
    assert lease is not None
    fill(lease)
    client.commit(lease)
    put_on_disk(shard, space, keys(0, 1))
    assert block_states(client.match(space, keys(0, 2)).states) == [WARM, MISSING]
    assert block_states(client.match(space, keys(0, 2), parts=(0,)).states) == [HOT, HOT]


def test_the_disk_is_asked_for_no_more_than_a_prefix_needs() -> None:
    shard = Shard()
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 4))
    calls = put_on_disk(shard, space, keys(4, 600))
    assert client.match(space, keys(0, 4)).prefix_blocks == 4
    assert calls == []
    assert client.match(space, keys(0, 900)).prefix_blocks == 600
    assert calls == [keys(4, 260), keys(260, 516), keys(516, 772)]
    calls.clear()
    assert client.match(space, [*keys(0, 4), key(999), *keys(4, 600)]).prefix_blocks == 4
    assert len(calls) == 1
    assert shard.store.reader.wanted_from_disk(Ask(space, keys(0, 900), (0,), Coverage.PREFIX, 0)) == [*range(4, 600)]


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize(
    ("mix", "of_prefix", "of_each"),
    [
        ("HHWH", "HHW.", "HHWH"),
        ("HH-W", "HH-.", "HH-W"),
        ("WH", "W.", "WH"),
        ("HFW", "HF.", "HFW"),
        ("HBW", "HF.", "HFW"),
        ("HH", "HH", "HH"),
    ],
)
def test_an_acquire_leases_what_is_hot_and_tells_what_would_come_from_disk(
    mix: str, of_prefix: str, of_each: str, many: bool
) -> None:
    more = 40 * "H" if many else ""
    for coverage, expected in ((Coverage.PREFIX, more + of_prefix), (Coverage.EACH, more + of_each)):
        shard, client, space, chain = mixed(more + mix)
        acquisition, states = client.acquire(space, chain, coverage=coverage)
        assert states == states_of(expected)
        counters = space.counters.values()
        assert counters["acquire_leased_blocks"] == expected.count("H")
        assert counters["acquire_warm_blocks"] == expected.count("W")
        assert counters["acquire_late_blocks"] == expected.count("F")
        assert counters["acquire_missing_blocks"] == expected.count("-") + expected.count(".")
        client.release(acquisition)
        shard.store.check()


def test_a_busy_block_that_is_on_disk_too_is_busy() -> None:
    shard = Shard(leased_share=2 / 256)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    for one in keys(0, 4):
        client.put(space, [one])
    put_on_disk(shard, space, keys(0, 9))
    acquisition, states = client.acquire(space, keys(0, 5))
    assert states == [HOT, HOT, BUSY, BEYOND, BEYOND]
    assert client.release(acquisition)
    assert client.acquire(space, keys(0, 5), coverage=Coverage.EACH)[1] == [HOT, HOT, BUSY, BUSY, WARM]


def test_an_acquire_that_waited_finds_its_tail_warm() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    writer.put(space, keys(0, 2))
    lease = writer.reserve(space, keys(0, 3)).lease
    assert lease is not None
    put_on_disk(shard, space, keys(3, 5))
    acquisition = reader.begin(space, keys(0, 5))
    step = shard.store.reader.step(acquisition, shard.now)
    assert (block_states(step.states), step.settled) == ([HOT, HOT], False)
    fill(lease)
    writer.commit(lease)
    assert woken(shard) == [acquisition]
    step = shard.store.reader.step(acquisition, shard.now)
    assert (step.first, block_states(step.states), step.settled) == (2, [HOT, WARM, BEYOND], True)
    assert len(lease_of(acquisition).parts) == 3
    assert space.counters.values()["acquire_warm_blocks"] == 1
    assert reader.release(acquisition)


def test_each_block_before_the_one_that_is_waited_for_is_told_at_once_warm_or_not() -> None:
    shard = Shard()
    writer, reader = shard.client(), shard.client()
    space = writer.attach(kv_spec("n"))
    lease = writer.reserve(space, [key(3)]).lease
    assert lease is not None
    writer.put(space, [key(1)])
    put_on_disk(shard, space, [key(0), key(4)])
    acquisition = reader.begin(space, keys(0, 5), coverage=Coverage.EACH)
    step = shard.store.reader.step(acquisition, shard.now)
    assert (block_states(step.states), step.settled) == ([WARM, HOT, MISSING], False)
    writer.end()
    assert woken(shard) == [acquisition]
    step = shard.store.reader.step(acquisition, shard.now)
    assert (step.first, block_states(step.states), step.settled) == (3, [MISSING, WARM], True)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize(
    ("mix", "prefix_waits", "prefix_wants", "each_waits", "each_wants"),
    [
        ("HH", False, [], False, []),
        ("H-", False, [], False, []),
        ("HF", True, [], True, []),
        ("HW", True, [1], True, [1]),
        ("HB", True, [], True, []),
        ("-W", False, [], True, [1]),
        ("-F", False, [], True, []),
        ("FW", True, [1], True, [1]),
        ("BW", True, [1], True, [1]),
        ("WHFW-W", True, [0, 3], True, [0, 3, 5]),
        ("F-W", True, [], True, [2]),
        ("WW-FW", True, [0, 1], True, [0, 1, 4]),
    ],
)
def test_who_waits_and_what_would_be_fetched(
    mix: str, prefix_waits: bool, prefix_wants: list[int], each_waits: bool, each_wants: list[int], many: bool
) -> None:
    before = 40 if many else 0
    shard, _, space, chain = mixed(before * "H" + mix)
    reader, gauges = shard.store.reader, shard.store.gauges()
    for coverage, waits, wants in (
        (Coverage.PREFIX, prefix_waits, prefix_wants),
        (Coverage.EACH, each_waits, each_wants),
    ):
        ask = Ask(space, chain, (0,), coverage, shard.now)
        assert reader.waits(ask) is waits
        assert reader.wanted_from_disk(ask) == [before + i for i in wants]
    assert shard.store.gauges() == gauges


def test_without_a_disk_only_a_block_in_flight_is_waited_for() -> None:
    shard, _, space, chain = mixed("H-F")
    shard.store.reader.elsewhere = None
    for asked, coverage, waits in (
        (chain[:2], Coverage.PREFIX, False),
        (chain[:2], Coverage.EACH, False),
        (chain, Coverage.PREFIX, False),
        (chain, Coverage.EACH, True),
        ([chain[0], chain[2]], Coverage.PREFIX, True),
        ([], Coverage.PREFIX, False),
        ([], Coverage.EACH, False),
    ):
        ask = Ask(space, asked, (0,), coverage, shard.now)
        assert shard.store.reader.waits(ask) is waits, (asked, coverage)
        assert shard.store.reader.wanted_from_disk(ask) == []


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
@pytest.mark.parametrize("on_disk", [None, [key(4), key(7), key(99)]], ids=["memory", "and disk"])
def test_a_glance_is_an_acquire_and_a_release_in_one(
    coverage: Coverage, asked: list[bytes], slots: int, on_disk: list[bytes] | None
) -> None:
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
        if on_disk is not None:
            put_on_disk(shard, space, on_disk)
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
