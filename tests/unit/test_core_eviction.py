"""What goes when room is needed: the deepest of the longest idle first, never what is held, at a cost that follows
what goes and not what is stored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from kvstore.core.columns import Flags, Ids, Places
from kvstore.core.eviction.base import BlockQueue
from kvstore.core.leases import SWEEP_LEASES
from kvstore.core.namespaces import Namespace
from kvstore.workload.generate import generate_trace
from kvstore.workload.profiles import API, CHAT, Profile
from kvstore.workload.reuse import tail_first_lru
from kvstore.workload.trace import Trace
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import PAGE_BYTES, Client, Shard, fill, key, keys, kv_spec

pytestmark = pytest.mark.usefixtures("each_way")

SLOTS = PAGE_BYTES // 4096
CREATED, FULL = PartState.CREATED, PartState.FULL


def shard_of(pages: int) -> tuple[Shard, Client, Namespace]:
    """A shard of so many pages, one client, one namespace of 4 KiB blocks."""
    shard = Shard(capacity_bytes=pages * PAGE_BYTES)
    client = shard.client()
    return shard, client, client.attach(kv_spec("n"))


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [1, 3, 7, SLOTS - 1])
def test_exactly_the_deepest_blocks_of_a_chain_go(gone: int) -> None:
    _, client, space = shard_of(1)
    client.put(space, keys(0, SLOTS))
    client.put(space, keys(100, 100 + gone))
    assert client.match(space, keys(0, SLOTS)).prefix_blocks == SLOTS - gone


def test_reserving_the_whole_chain_keeps_its_head_younger_than_its_new_tail() -> None:
    shard, client, space = shard_of(1)
    client.put(space, keys(0, 4))
    shard.now += 1
    client.put(space, keys(0, 12))
    shard.now += 1
    client.put(space, keys(100, 104))
    client.put(space, keys(200, 206))
    assert client.match(space, keys(0, 12)).prefix_blocks == 6


def test_a_chain_read_to_its_middle_loses_its_tail_before_an_older_chain_loses_anything_younger() -> None:
    shard, client, space = shard_of(1)
    client.put(space, keys(0, 8))
    shard.now += 1
    client.put(space, keys(50, 58))
    shard.now += 1
    client.release(client.acquire(space, keys(0, 3))[0])
    client.put(space, keys(100, 105))
    assert shard.stored(space, keys(0, 8)) == keys(0, 3)
    assert shard.stored(space, keys(50, 58)) == keys(50, 58)


def test_a_chain_that_was_passed_over_while_it_was_held_still_loses_its_tail_first() -> None:
    shard, client, space = shard_of(1)
    client.put(space, keys(0, 8))
    held, _ = client.acquire(space, keys(0, 8))
    for start in range(100, 200, 8):
        client.put(space, keys(start, start + 8))
    assert client.release(held)
    shard.now += 1
    client.put(space, keys(300, 308))
    assert client.match(space, keys(0, 8)).prefix_blocks == 8
    client.put(space, keys(400, 403))
    assert client.match(space, keys(0, 8)).prefix_blocks == 5
    shard.store.check()


def test_a_refused_extension_does_not_turn_a_chain_upside_down() -> None:
    _, client, space = shard_of(1)
    client.put(space, keys(0, SLOTS))
    assert client.put(space, keys(0, SLOTS + 2))[SLOTS:] == [FULL, PartState.BEYOND]
    client.put(space, keys(100, 104))
    assert client.match(space, keys(0, SLOTS)).prefix_blocks == SLOTS - 4


def test_a_writer_s_own_chain_that_was_passed_over_keeps_its_order() -> None:
    shard, client, space = shard_of(1)
    lease = client.reserve(space, keys(0, 8)).lease
    assert lease is not None
    for start in range(100, 200, 8):
        client.put(space, keys(start, start + 8))
    fill(lease)
    client.commit(lease)
    shard.now += 1
    client.put(space, keys(300, 312))
    assert client.match(space, keys(0, 8)).prefix_blocks == 4


@pytest.mark.parametrize(("profile", "seconds", "share"), [(CHAT, 1_500, 0.1), (CHAT, 1_500, 0.4), (API, 40, 0.05)])
def test_a_replayed_trace_hits_what_plain_tail_first_lru_hits(profile: Profile, seconds: int, share: float) -> None:
    trace = generate_trace(profile, seed=3, seconds=seconds)
    trace = Trace(trace.name, trace.block_tokens, trace.requests[:3_000])
    blocks = max(SLOTS, int(share * trace.distinct_blocks()))
    shard = Shard(capacity_bytes=blocks * 4096)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    hits = 0
    for request in trace.requests:
        shard.now += 0.001
        chain = [key(i) for i in request.block_ids.tolist()]
        found = client.match(space, chain).prefix_blocks
        held, states = client.acquire(space, chain[:found])
        assert states == [BlockState.HOT] * found
        client.release(held)
        client.put(space, chain)
        hits += found
    expected = tail_first_lru(trace, blocks).prefix
    assert hits / trace.accesses() == pytest.approx(expected, abs=0.001)
    assert 0.02 < expected < 0.98
    shard.store.check()


# -- capacity --------------------------------------------------------------------------------------------------------


def test_three_times_the_capacity_leaves_the_youngest_third() -> None:
    shard, client, space = shard_of(8)
    total = 8 * SLOTS
    for number in range(3 * total):
        assert client.put(space, [key(number)]) == [CREATED]
    assert shard.stored(space, keys(0, 3 * total)) == keys(2 * total, 3 * total)
    assert shard.store.counters()["evicted_capacity_blocks"] == 2 * total
    assert shard.gauge("evictable_bytes") == shard.gauge("capacity_bytes")
    assert shard.gauge("free_bytes") == 0


def test_ten_thousand_puts_into_a_tiny_arena_are_found_or_counted_as_evicted() -> None:
    shard, client, space = shard_of(2)
    everything = keys(0, 10_000)
    for start in range(0, 10_000, 20):
        assert client.put(space, everything[start : start + 20]) == [CREATED] * 20
    found = len(shard.stored(space, everything))
    assert found == 2 * SLOTS
    assert found + shard.store.counters()["evicted_capacity_blocks"] == 10_000


def test_where_all_is_held_a_write_is_refused_at_once_and_succeeds_when_readers_end() -> None:
    _shard, client, space = shard_of(1)
    client.put(space, keys(0, SLOTS))
    held, _ = client.acquire(space, keys(0, SLOTS))
    assert client.put(space, keys(100, 102)) == [FULL, PartState.BEYOND]
    assert client.match(space, keys(0, SLOTS)).prefix_blocks == SLOTS
    client.release(held)
    assert client.put(space, keys(100, 102)) == [CREATED, CREATED]


def test_a_victim_that_is_pinned_meanwhile_survives() -> None:
    _, client, space = shard_of(1)
    for number in range(SLOTS):
        client.put(space, [key(number)])
    assert client.store.records.cohort(space, 4096).peek(3).tolist() == [space.blocks[k] for k in keys(0, 3)]
    held, _ = client.acquire(space, [key(1)])
    client.put(space, keys(100, 100 + SLOTS - 1))
    _, states = client.acquire(space, keys(0, 3), coverage=Coverage.EACH)
    assert states == [BlockState.MISSING, BlockState.HOT, BlockState.MISSING]
    assert client.release(held)


def test_ten_thousand_readers_that_vanish_leave_no_pin() -> None:
    shard, writer, space = shard_of(4)
    writer.put(space, keys(0, 4 * SLOTS))
    for number in range(10_000):
        reader = shard.client()
        _, states = reader.acquire(space, keys(number % 32, number % 32 + 8), lease_s=5.0)
        assert states == [BlockState.HOT] * 8
        if number % 3:
            reader.end()
    assert shard.gauge("leased_bytes") == 39 * 4096
    shard.pass_time(5.5)
    while shard.gauge("leases"):  # A sweep ends so many of them and no more.
        left = shard.gauge("leases")
        shard.pass_time(0.1)
        assert shard.gauge("leases") == max(0, left - SWEEP_LEASES)
    assert shard.gauge("leased_bytes") == 0
    assert writer.put(space, keys(1_000, 1_000 + 4 * SLOTS)) == [CREATED] * (4 * SLOTS)
    assert shard.stored(space, keys(0, 4 * SLOTS)) == []
    shard.store.check()


def test_failing_writers_leave_every_stored_byte_evictable() -> None:
    shard, client, space = shard_of(2)
    client.put(space, keys(0, SLOTS))
    for number in range(300):
        lease = client.reserve(space, keys(number, number + 6), lease_s=3.0).lease
        shard.pass_time(1.0)
        if lease is not None and number % 3 == 0:
            shard.store.abort(client.session, lease.id, shard.now)
    shard.pass_time(4.0)
    stored = shard.gauge("stored_blocks") * 4096
    assert shard.gauge("evictable_bytes") == stored > 0
    assert client.put(space, keys(5_000, 5_000 + 2 * SLOTS)) == [CREATED] * (2 * SLOTS)


def test_sixty_four_writers_at_the_watermark_all_make_progress() -> None:
    shard = Shard(capacity_bytes=8 * PAGE_BYTES, leased_share=0.8)
    readers, writers = shard.client(), [shard.client() for _ in range(64)]
    space = readers.attach(kv_spec("n"))
    readers.put(space, keys(0, 100))
    held = [readers.acquire(space, keys(start, start + 10), lease_s=20.0)[0] for start in range(0, 100, 10)]
    done, refused = [0] * 64, 0
    for turn in range(60):
        shard.pass_time(1.0)
        if turn % 2:
            readers.release(held[turn // 2 % 10])
        leases = []
        for number, writer in enumerate(writers):
            first = 1_000 + (turn * 64 + number) * 4
            leases.append(writer.reserve(space, keys(first, first + 4), lease_s=5.0).lease)
        for number, (writer, lease) in enumerate(zip(writers, leases, strict=True)):
            refused += lease is None
            if lease is not None:
                fill(lease)
                done[number] += writer.commit(lease).count(PartState.COMMITTED)
        writers, done = writers[1:] + writers[:1], done[1:] + done[:1]
    assert min(done) > 0
    assert refused > 0, "the watermark was never met"
    assert shard.gauge("leased_bytes") == shard.gauge("reserved_bytes") == 0
    shard.store.check()


# -- cost ------------------------------------------------------------------------------------------------------------


class CountingQueue(BlockQueue):
    """Counts the log entries it looks at."""

    __slots__ = ("seen",)

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        self.seen = 0

    def _chunk(self, start: int, count: int) -> tuple[Ids, Flags]:
        chunk, live = super()._chunk(start, count)
        self.seen += len(chunk)
        return chunk, live


def entries_seen(stored: int, *, taken: int, held: int = 0) -> int:
    """Log entries looked at to take so many of so many blocks, the oldest of which are held, 32 at a time."""
    queue, holds = CountingQueue(Places(stored)), np.zeros(stored, np.int32)
    queue.append(np.arange(stored, dtype=np.int32))
    holds[:held] = 1
    for _ in range(0, taken, 32):
        assert len(queue.take(32, holds)) == 32
    return queue.seen


def test_evicting_looks_at_what_goes_and_not_at_what_is_stored() -> None:
    small, large = entries_seen(12_000, taken=9_984), entries_seen(1_000_000, taken=9_984)
    assert large <= 1.05 * small
    assert large <= 3 * 9_984


def test_held_blocks_in_the_way_are_looked_at_once() -> None:
    free, held = entries_seen(50_000, taken=9_984), entries_seen(50_000, taken=9_984, held=20_000)
    assert held <= free + 2 * 20_000


def test_stale_entries_are_cleaned_away_and_do_not_pile_up() -> None:
    places, holds = Places(64), np.zeros(64, np.int32)
    queue = CountingQueue(places)
    for turn in range(5_000):
        queue.append(np.roll(np.arange(64, dtype=np.int32), turn))
    assert len(queue) == 64
    assert len(queue.take(64, holds)) == 64
    assert queue.seen <= 64 * 8


def calls_in(act: Callable[[], object]) -> int:
    """How many Python and C functions a call makes: its work, whatever the machine does meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def filled(pages: int) -> tuple[Shard, Client, Namespace]:
    shard, client, space = shard_of(pages)
    for start in range(0, pages * SLOTS, 4096):
        client.put(space, keys(start, min(start + 4096, pages * SLOTS)))
    return shard, client, space


def test_a_put_into_a_full_arena_costs_the_same_however_much_is_stored() -> None:
    costs = []
    for pages in (64, 2_048):
        shard, client, space = filled(pages)
        new = keys(1_000_000, 1_000_512)
        costs.append(calls_in(lambda client=client, space=space, new=new: client.put(space, new)))  # type: ignore[misc]
        assert shard.store.counters()["evicted_capacity_blocks"] == 512
    assert costs[1] <= 1.1 * costs[0]


def test_a_large_match_costs_the_same_while_a_tenth_of_the_store_goes() -> None:
    shard, client, space = filled(2_048)
    asked = keys(0, 30_000)

    def match() -> None:
        client.match(space, asked, coverage=Coverage.EACH)

    quiet = calls_in(match)
    client.put(space, keys(1_000_000, 1_003_277))
    assert shard.store.counters()["evicted_capacity_blocks"] == 3_277
    assert calls_in(match) <= 1.1 * quiet
    assert quiet < 200, "no Python call a key"
