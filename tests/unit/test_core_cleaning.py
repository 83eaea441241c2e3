"""What is written to disk ahead of eviction, how much, and what a block that is being written may suffer meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.cleaning import FEWEST_ROWS, SAVED_S, STRAINED_S, Ahead, Cleaner, CleaningRules, Ghosts, WriteBudget
from kvstore.core.columns import Longs
from kvstore.core.eviction.base import OVER
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore.core.sessions import Session
from kvstore.core.store import LeasesEnded
from kvstore.core.writing import ReserveRequest
from kvstore_wire.errors import UnknownSession
from kvstore_wire.states import BlockState, Coverage, PartState
from tests.shards import PAGE_BYTES, Client, Shard, fill, key, keys, kv_spec, part_states

pytestmark = pytest.mark.usefixtures("each_way")

SLOT = 4096
SLOTS = PAGE_BYTES // SLOT
PAGES = 16
STORED = PAGES * SLOTS
ALL_BYTES = PAGES * PAGE_BYTES
SHARE = 0.25


def _to_flush(cleaner: Cleaner) -> list[int]:
    """The blocks that a clean stop writes, in their order."""
    return [row for row in cleaner.order_for_flush() if cleaner.is_dirty(row)]


def _cleaner(shard: Shard, *, share: float = SHARE, budget_bytes: int | None = None) -> Cleaner:
    return Cleaner(shard.store.records, CleaningRules(share, budget_bytes), shard.now)


def _lives(**sequences: int) -> Longs:
    """What eight segments hold: `s1=7` is sequence 7 in segment 1."""
    lives: Longs = np.zeros(8, np.int64)
    for name, sequence in sequences.items():
        lives[int(name[1:])] = sequence
    return lives


def _put_one_by_one(shard: Shard, client: Client, space: Namespace, chain: list[bytes]) -> None:
    for one in chain:
        shard.now += 1.0
        assert client.put(space, [one]) == [PartState.CREATED] * space.parts_per_block


def _touch(client: Client, space: Namespace, chain: list[bytes]) -> None:
    acquisition, states = client.acquire(space, chain)
    assert states == [BlockState.HOT] * len(chain)
    assert client.release(acquisition)


def _keys(shard: Shard, rows: list[int]) -> list[bytes]:
    found = [shard.store.records.blocks.key[row] for row in rows]
    assert None not in found
    return [k for k in found if k is not None]


def _note_copy(shard: Shard, space: Namespace, chain: list[bytes], segment: int, sequence: int) -> None:
    cell = shard.store.records.blocks.cell
    for start, one in enumerate(chain):
        row = space.blocks[one]
        cell.disk_segment[row], cell.disk_sequence[row], cell.disk_start[row] = segment, sequence, start


def _begin(shard: Shard, space: Namespace, chain: list[bytes]) -> list[int]:
    rows = [space.blocks[one] for one in chain]
    for row in rows:
        shard.store.records.begin_writing(row)
    return rows


def _end(shard: Shard, rows: list[int]) -> list[bool]:
    return [shard.store.records.end_writing(row) for row in rows]


def _offsets(shard: Shard, rows: list[int]) -> set[int]:
    """Where blocks of one part stand."""
    first = shard.store.records.blocks.cell.first_part
    return set(shard.store.part_views([first[row] for row in rows])[0])


def _check(shard: Shard) -> None:
    shard.store.check()
    assert shard.store.records.account_fault() == ""


@pytest.fixture
def shard() -> Shard:
    return Shard(capacity_bytes=ALL_BYTES)


@pytest.fixture
def client(shard: Shard) -> Client:
    return shard.client()


@pytest.fixture
def full(shard: Shard, client: Client) -> Namespace:
    """A namespace whose blocks, key(0) the coldest, fill all memory."""
    space = client.attach(kv_spec("n"))
    _put_one_by_one(shard, client, space, keys(0, STORED))
    return space


# -- which -----------------------------------------------------------------------------------------------------------


def test_nothing_is_written_while_memory_has_room_to_spare(shard: Shard, client: Client) -> None:
    cleaner, space = _cleaner(shard), client.attach(kv_spec("n"))
    _put_one_by_one(shard, client, space, keys(0, STORED - STORED // 4))
    assert cleaner.choose(ALL_BYTES, _lives()) == []
    _put_one_by_one(shard, client, space, [key(1000)])
    assert cleaner.choose(ALL_BYTES, _lives())


def test_the_coldest_share_is_written_the_coldest_first(shard: Shard, client: Client, full: Namespace) -> None:
    cleaner = _cleaner(shard)
    assert _keys(shard, cleaner.choose(ALL_BYTES, _lives())) == keys(0, STORED // 4)
    _touch(client, full, keys(0, 8))
    assert _keys(shard, cleaner.choose(ALL_BYTES, _lives())) == keys(8, 8 + STORED // 4)


def test_of_few_blocks_more_than_the_share_is_written(shard: Shard, client: Client, full: Namespace) -> None:
    few = client.attach(kv_spec("few"))
    shard.store.delete(full, keys(0, SLOTS))
    _put_one_by_one(shard, client, few, keys(0, SLOTS))
    chosen = _cleaner(shard, share=0.5).choose(ALL_BYTES, _lives())
    assert sum(row in few.blocks.values() for row in chosen) == FEWEST_ROWS == SLOTS


def test_what_a_reader_holds_is_not_written_and_what_is_behind_it_is(
    shard: Shard, client: Client, full: Namespace
) -> None:
    acquisition, _ = client.acquire(full, keys(0, 4))
    chosen = _keys(shard, _cleaner(shard).choose(3 * SLOT, _lives()))
    assert chosen == keys(4, 7)
    assert client.release(acquisition)


def test_only_whole_blocks_are_written(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("parts", layer_groups=3))
    lease = client.reserve(space, keys(0, 4), parts=(0, 2)).lease
    assert lease is not None
    fill(lease)
    client.commit(lease)
    assert client.reserve(space, keys(2, 4), parts=(1,)).lease is not None
    _put_one_by_one(shard, client, space, keys(4, 80))
    cleaner = _cleaner(shard)
    assert _keys(shard, cleaner.choose(3 * 3 * SLOT, _lives())) == keys(4, 7)
    assert not set(_keys(shard, _to_flush(cleaner))) & set(keys(0, 4))
    client.put(space, keys(0, 1))
    assert key(0) in _keys(shard, _to_flush(cleaner))


def test_no_block_is_written_twice_at_once(shard: Shard, full: Namespace) -> None:
    cleaner = _cleaner(shard)
    first = cleaner.choose(8 * SLOT, _lives())
    assert _keys(shard, first) == keys(0, 8)
    _begin(shard, full, keys(0, 8))
    assert _keys(shard, cleaner.choose(8 * SLOT, _lives())) == keys(8, 16)
    assert not set(_to_flush(cleaner)) & set(first)
    assert _end(shard, first) == [True] * 8
    assert cleaner.choose(8 * SLOT, _lives()) == first, "the disk refused them"


def test_what_has_a_copy_is_not_written_until_its_segment_is_given_up(shard: Shard, full: Namespace) -> None:
    cleaner = _cleaner(shard)
    _note_copy(shard, full, keys(0, 4), segment=1, sequence=7)
    _note_copy(shard, full, keys(4, 8), segment=2, sequence=8)
    assert _keys(shard, cleaner.choose(2 * SLOT, _lives(s1=7, s2=8))) == keys(8, 10)
    assert len(_to_flush(cleaner)) == STORED - 8
    assert _keys(shard, cleaner.choose(2 * SLOT, _lives(s1=7, s2=9))) == keys(4, 6), "another life"
    assert _keys(shard, cleaner.choose(2 * SLOT, _lives(s1=0, s2=9))) == keys(0, 2), "holds nothing"
    sequences = [shard.store.records.blocks.cell.disk_sequence[full.blocks[k]] for k in keys(0, 8)]
    assert sequences == [0] * 8, "copies that have gone are forgotten"


def test_a_copy_in_a_segment_that_nobody_knows_is_none(shard: Shard, full: Namespace) -> None:
    _note_copy(shard, full, keys(0, 1), segment=99, sequence=7)
    assert _keys(shard, _cleaner(shard).choose(SLOT, _lives(s7=8))) == [key(0)]


def test_a_part_that_lands_later_voids_the_copy_of_its_block(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("parts", layer_groups=2))
    lease = client.reserve(space, keys(0, 2)).lease
    assert lease is not None
    fill(lease)
    client.commit(lease, [0, 2])
    _note_copy(shard, space, keys(0, 2), segment=1, sequence=7)
    client.commit(lease, [1])
    cell = shard.store.records.blocks.cell
    assert [cell.disk_sequence[space.blocks[k]] for k in keys(0, 2)] == [0, 7]


def test_a_row_that_is_used_again_knows_nothing_of_its_last_block(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("n"))
    client.put(space, [key(0)])
    row = space.blocks[key(0)]
    shard.now += 1.0
    _touch(client, space, [key(0)])
    _note_copy(shard, space, [key(0)], segment=1, sequence=7)
    shard.store.records.begin_writing(row)
    shard.store.delete(space, [key(0)])
    shard.store.records.end_writing(row)
    client.put(space, [key(1)])
    cell = shard.store.records.blocks.cell
    assert space.blocks[key(1)] == row
    assert (cell.disk_sequence[row], cell.reuses[row], cell.writing[row]) == (0, 0, False)


# -- how much --------------------------------------------------------------------------------------------------------


def test_no_more_is_written_than_there_is_room_for(shard: Shard, client: Client, full: Namespace) -> None:
    cleaner = _cleaner(shard)
    assert cleaner.choose(0, _lives()) == cleaner.choose(SLOT - 1, _lives()) == []
    assert len(cleaner.choose(3 * SLOT + 1, _lives())) == 3
    shard.store.delete(full, keys(STORED - 9 * SLOTS, STORED))
    large = client.attach(kv_spec("large", part_bytes=2 * SLOT, layer_groups=3))
    _put_one_by_one(shard, client, large, keys(0, 9 * SLOTS // 6 - 3))
    chosen = cleaner.choose(10 * SLOT, _lives())
    sizes = [6 * SLOT if row in large.blocks.values() else SLOT for row in chosen]
    assert sum(sizes) == 10 * SLOT, "one room for all cohorts"
    only_large = cleaner.choose(ALL_BYTES, _lives())
    room = sum(row in full.blocks.values() for row in only_large) * SLOT
    more = cleaner.choose(room + 6 * SLOT - 1, _lives())
    assert not any(row in large.blocks.values() for row in more), "a block does not fit without all of its parts"
    assert sum(row in large.blocks.values() for row in cleaner.choose(room + 6 * SLOT, _lives())) == 1


def test_one_block_larger_than_the_room_is_written_alone_where_that_is_asked_for(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("parts", layer_groups=3))
    _put_one_by_one(shard, client, space, keys(0, STORED // 3))
    cleaner = _cleaner(shard)
    assert cleaner.choose(SLOT, _lives()) == []
    assert cleaner.choose(0, _lives(), at_least_one=True) == []
    assert _keys(shard, cleaner.choose(SLOT, _lives(), at_least_one=True)) == keys(0, 1)
    assert _keys(shard, cleaner.choose(7 * SLOT, _lives(), at_least_one=True)) == keys(0, 2)


def test_a_block_that_no_segment_holds_is_not_written_and_others_are(
    shard: Shard, client: Client, full: Namespace
) -> None:
    shard.store.delete(full, keys(SLOTS, 3 * SLOTS))
    large = client.attach(kv_spec("large", layer_groups=3))
    _put_one_by_one(shard, client, large, keys(0, 8))
    cleaner = _cleaner(shard)
    assert set(cleaner.choose(ALL_BYTES, _lives())) & set(large.blocks.values())
    cleaner.largest_bytes = 3 * SLOT - 1
    chosen = set(cleaner.choose(ALL_BYTES, _lives(), at_least_one=True))
    assert chosen & set(full.blocks.values())
    assert not chosen & set(large.blocks.values())


def test_what_is_being_purged_is_not_written(shard: Shard, full: Namespace) -> None:
    cleaner = _cleaner(shard)
    steps = shard.store.purge_in_steps(lambda n: n is full, created_before=0.0)
    assert cleaner.choose(ALL_BYTES, _lives())
    next(steps)
    assert cleaner.choose(ALL_BYTES, _lives()) == []
    assert [purged.blocks for purged in steps] == []
    assert cleaner.choose(ALL_BYTES, _lives())


def test_room_is_ahead_while_what_would_go_has_copies(shard: Shard, client: Client) -> None:
    space, cleaner = client.attach(kv_spec("n")), _cleaner(shard)
    _put_one_by_one(shard, client, space, keys(0, STORED - SLOTS))
    assert cleaner.is_ahead(Ahead(space, SLOT, SLOTS)), "there is a free page"
    assert not cleaner.is_ahead(Ahead(space, SLOT, SLOTS + 1))
    _note_copy(shard, space, keys(0, SLOTS + 1), segment=1, sequence=7)
    assert cleaner.is_ahead(Ahead(space, SLOT, SLOTS + 1))
    assert not cleaner.is_ahead(Ahead(space, SLOT, SLOTS + 2))


def test_what_is_waited_for_is_written_first_and_once_however_many_wait(shard: Shard, client: Client) -> None:
    cleaner = _cleaner(shard)
    spaces = [client.attach(kv_spec(name)) for name in ("first", "second")]
    for at, space in enumerate(spaces):
        _put_one_by_one(shard, client, space, keys(1000 * at, 1000 * at + STORED // 2))
    waited_for = [Ahead(spaces[1], SLOT, STORED // 4), Ahead(spaces[1], SLOT, 4, spared=2)]
    chosen = cleaner.choose(ALL_BYTES, _lives(), waited_for=waited_for)
    assert len(chosen) == len(set(chosen))
    assert _keys(shard, chosen)[: STORED // 4 + 6] == keys(1000, 1000 + STORED // 4 + 6)
    assert cleaner.choose(4 * SLOT, _lives(), waited_for=waited_for) == chosen[:4]


def test_room_that_only_blocks_without_all_parts_stand_in_is_not_waited_for(shard: Shard, client: Client) -> None:
    space, cleaner = client.attach(kv_spec("n", layer_groups=2)), _cleaner(shard)
    for one in keys(0, STORED):
        lease = client.reserve(space, [one], parts=(0,)).lease
        assert lease is not None
        fill(lease)
        client.commit(lease)
    assert cleaner.is_ahead(Ahead(space, SLOT, 8)), "they never get a copy"
    assert not cleaner.is_being_written(Ahead(space, SLOT, 8))


def test_a_cohort_that_was_never_used_is_not_made_by_asking(shard: Shard, client: Client, full: Namespace) -> None:
    space, cleaner = client.attach(kv_spec("unused")), _cleaner(shard)
    assert cleaner.is_ahead(Ahead(space, SLOT, 8))
    assert not space.cohorts


def test_a_namespace_near_its_own_limit_is_written_although_memory_has_room() -> None:
    limit = 32 * SLOT
    shard = Shard(rules_of=lambda spec: NamespaceRules(max_bytes=limit if spec.name == "limited" else None))
    client = shard.client()
    free, limited = client.attach(kv_spec("free")), client.attach(kv_spec("limited"))
    cleaner = _cleaner(shard)
    _put_one_by_one(shard, client, free, keys(0, 16))
    _put_one_by_one(shard, client, limited, keys(0, 24))
    assert cleaner.choose(ALL_BYTES, _lives()) == []
    _put_one_by_one(shard, client, limited, [key(24)])
    assert cleaner.choose(ALL_BYTES, _lives()) == [limited.blocks[k] for k in keys(0, FEWEST_ROWS)]


def test_the_probe_s_blocks_are_never_written() -> None:
    shard = Shard(capacity_bytes=ALL_BYTES, rules_of=lambda spec: NamespaceRules(spare=spec.name == "probe"))
    client = shard.client()
    probe, other = client.attach(kv_spec("probe")), client.attach(kv_spec("other"))
    _put_one_by_one(shard, client, probe, keys(0, STORED - 8))
    _put_one_by_one(shard, client, other, keys(0, 8))
    cleaner = _cleaner(shard)
    assert sorted(cleaner.choose(ALL_BYTES, _lives())) == sorted(other.blocks.values())
    assert sorted(_to_flush(cleaner)) == sorted(other.blocks.values())


def test_nothing_is_written_of_what_is_over(shard: Shard, client: Client, full: Namespace) -> None:
    cleaner = _cleaner(shard, share=1.0)
    columns = shard.store.records.blocks
    gone = [full.blocks[k] for k in keys(100, 104)]
    columns.kind[gone] = OVER
    assert set(_keys(shard, cleaner.choose(ALL_BYTES, _lives()))).isdisjoint(keys(100, 104))
    assert set(_to_flush(cleaner)).isdisjoint(gone)
    columns.disk_sequence[[row for row in full.blocks.values() if row not in gone]] = 1
    assert cleaner.is_ahead(Ahead(full, SLOT, STORED))
    columns.kind[gone] = 0
    assert not cleaner.is_ahead(Ahead(full, SLOT, STORED))


def test_without_a_budget_nothing_is_ever_low() -> None:
    budget = WriteBudget(None, 0.0)
    budget.spend(1 << 60, 1.0)
    assert (budget.left_bytes, budget.left_for_once_bytes) == (float("inf"), float("inf"))


def test_a_budget_is_spent_by_whoever_writes_and_fills_with_time() -> None:
    budget, kept, most = WriteBudget(1000, 100.0), int(1000 * STRAINED_S), int(1000 * SAVED_S)
    assert (budget.left_bytes, budget.left_for_once_bytes) == (2 * kept, kept), "little to begin with"
    budget.spend(kept, 100.0)
    budget.spend(kept, 100.0)
    assert (budget.left_bytes, budget.left_for_once_bytes) == (kept, 0), "a count of all, not of what was added"
    assert budget.is_strained
    budget.spend(kept + 1, 100.0)
    assert budget.left_for_once_bytes == 0
    budget.spend(kept + 1, 101.0)
    assert (budget.left_bytes, budget.left_for_once_bytes) == (kept + 999, 999)
    assert not budget.is_strained
    budget.spend(kept + 1, 1e6)
    assert (budget.left_bytes, budget.left_for_once_bytes) == (most, most - kept), "no more can be saved up"
    budget.spend(kept + 1 + most + 3000, 1e6)
    assert (budget.left_bytes, budget.left_for_once_bytes) == (0, 0), "what others wrote beyond it"
    budget.spend(kept + 1 + most + 3000, 1e6 + 2.5)
    assert budget.left_bytes == 0, "is made up for first"
    budget.spend(kept + 1 + most + 3000, 1e6 + 4.0)
    assert budget.left_bytes == 1000


def test_a_budget_lets_everything_pass_then_what_was_asked_for_again_then_nothing(
    shard: Shard, client: Client, full: Namespace
) -> None:
    shard.now += 1.0
    _touch(client, full, keys(100, 104))
    most = 64 * SLOT  # To begin with.
    cleaner = _cleaner(shard, share=1.0, budget_bytes=int(most / (2 * STRAINED_S)) + 1)
    cleaner.budget.spend(most // 4, shard.now)
    chosen = _keys(shard, cleaner.choose(ALL_BYTES, _lives()))
    assert len(chosen) == 21, "a few seconds' worth is kept for those that were asked for again"
    assert set(keys(100, 104)) <= set(chosen)
    cleaner.budget.spend(most // 2 + SLOT, shard.now)
    assert set(_keys(shard, cleaner.choose(ALL_BYTES, _lives()))) == set(keys(100, 104))
    cleaner.budget.spend(most - SLOT, shard.now)
    assert len(cleaner.choose(ALL_BYTES, _lives())) == 1
    cleaner.budget.spend(2 * most, shard.now)
    assert cleaner.choose(ALL_BYTES, _lives()) == []
    cleaner.budget.spend(2 * most, shard.now + 2 * STRAINED_S + 2 * STRAINED_S)
    assert len(cleaner.choose(ALL_BYTES, _lives())) == 37, "half of it, and those that were asked for again"
    cleaner.budget.spend(2 * most, shard.now + SAVED_S)
    assert len(cleaner.choose(ALL_BYTES, _lives())) == STORED, "what a quiet time left"


@pytest.mark.parametrize(("gap_s", "count"), [(0.05, 0), (0.2, 1)])
def test_a_request_soon_after_the_one_before_is_none_of_its_own(
    shard: Shard, client: Client, gap_s: float, count: int
) -> None:
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 3))
    shard.now += gap_s
    _touch(client, space, keys(0, 2))
    reuses = shard.store.records.blocks.cell.reuses
    assert [reuses[space.blocks[k]] for k in keys(0, 3)] == [count, count, 0]
    shard.now += 1.0
    client.put(space, keys(0, 5))
    assert [reuses[space.blocks[k]] for k in keys(0, 5)] == [count + 1, count + 1, 1, 0, 0]


def test_ghosts_are_bounded_and_found_once() -> None:
    ghosts = Ghosts(1)
    for number in range(5000):
        ghosts.add(1, key(number))
    assert len(ghosts) == 4096
    assert not ghosts.take(1, key(5000 - 4096 - 1)), "the oldest went"
    assert not ghosts.take(2, key(4999)), "another namespace's"
    assert ghosts.take(1, key(5000 - 4096))
    assert ghosts.take(1, key(4999))
    assert not ghosts.take(1, key(4999))
    assert len(ghosts) == 4094


# -- at the end ------------------------------------------------------------------------------------------------------


def test_a_flush_writes_what_was_used_last_first_and_heads_before_tails(shard: Shard, client: Client) -> None:
    one, two = client.attach(kv_spec("one")), client.attach(kv_spec("two", part_bytes=2 * SLOT))
    for space, start in ((one, 0), (two, 100), (one, 200)):
        shard.now += 1.0
        client.put(space, keys(start, start + 4))
    cleaner = _cleaner(shard)
    order = [*keys(200, 204), *keys(100, 104), *keys(0, 4)]
    assert _keys(shard, _to_flush(cleaner)) == order
    shard.now += 1.0
    _touch(client, one, keys(0, 2))
    _note_copy(shard, two, [key(101)], segment=1, sequence=7)
    order = [*keys(0, 2), *keys(200, 204), key(100), *keys(102, 104), *keys(2, 4)]
    assert _keys(shard, _to_flush(cleaner)) == order


def test_a_flush_finds_what_is_left_of_many_blocks_that_were_deleted(
    shard: Shard, client: Client, full: Namespace
) -> None:
    shard.store.delete(full, keys(0, STORED - 6))
    assert sorted(_keys(shard, _to_flush(_cleaner(shard)))) == keys(STORED - 6, STORED)


def test_the_coldest_is_found_behind_many_blocks_that_were_deleted(
    shard: Shard, client: Client, full: Namespace
) -> None:
    shard.store.delete(full, keys(0, STORED - 40))
    other = client.attach(kv_spec("other"))
    _put_one_by_one(shard, client, other, keys(0, STORED - 6 * SLOTS))
    chosen = set(_cleaner(shard).choose(ALL_BYTES, _lives()))
    assert chosen >= {full.blocks[k] for k in keys(STORED - 40, STORED - 40 + FEWEST_ROWS)}


# -- while it is written ---------------------------------------------------------------------------------------------


def test_evicting_a_block_that_is_being_written_frees_its_slots_only_when_it_was_written() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, SLOTS))
    rows = _begin(shard, space, keys(SLOTS - 4, SLOTS))
    written = _offsets(shard, rows)
    lease = client.reserve(space, keys(100, 100 + SLOTS)).lease
    assert lease is not None
    assert len(lease.parts) == SLOTS - 4, "all were evicted, four of them without a slot to be had"
    assert not set(shard.store.part_views(lease.parts)[0]) & written
    assert shard.stored(space, keys(0, SLOTS)) == []
    assert shard.gauge("leased_bytes") == 4 * SLOT
    _check(shard)
    assert _end(shard, rows[:1]) == [False]
    assert (shard.gauge("leased_bytes"), shard.gauge("free_bytes")) == (3 * SLOT, SLOT)
    _check(shard)
    assert client.put(space, [key(200)]) == [PartState.CREATED]
    assert _end(shard, rows[1:]) == [False] * 3
    assert shard.gauge("leased_bytes") == 0
    fill(lease)
    client.commit(lease)
    assert shard.gauge("free_bytes") == 3 * SLOT
    _check(shard)


def test_a_block_that_is_there_when_it_was_written_stays_as_it_is(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 3))
    before = shard.store.gauges()
    rows = _begin(shard, space, keys(0, 3))
    _check(shard)
    assert shard.store.gauges() == before
    _touch(client, space, keys(0, 3))
    assert _end(shard, rows) == [True] * 3
    assert shard.store.gauges() == before
    _check(shard)


@pytest.mark.parametrize("last", ["reader", "disk"])
@pytest.mark.parametrize("cause", ["deleted", "purged", "expired"])
def test_slots_come_back_with_the_last_of_reader_and_disk(last: str, cause: str) -> None:
    shard = Shard(rules_of=lambda spec: NamespaceRules(ttl_s=10.0))
    client = shard.client()
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 2))
    acquisition, _ = client.acquire(space, keys(0, 2))
    rows = _begin(shard, space, keys(0, 2))
    if cause == "deleted":
        assert shard.store.delete(space, keys(0, 2)) == bytes([2, 2])
    elif cause == "purged":
        assert shard.store.purge(lambda n: True, created_before=float("inf")).deferred_blocks == 2
    else:
        shard.pass_time(11.0)
    assert shard.gauge("leased_bytes") == 2 * SLOT
    _check(shard)
    if last == "reader":
        assert _end(shard, rows) == [False, False]
        assert shard.gauge("leased_bytes") == 2 * SLOT
        _check(shard)
        assert client.release(acquisition)
    else:
        assert client.release(acquisition)
        assert shard.gauge("leased_bytes") == 2 * SLOT
        _check(shard)
        assert _end(shard, rows) == [False, False]
    assert shard.gauge("free_bytes") == shard.gauge("capacity_bytes")
    _check(shard)


def test_a_block_deleted_while_it_is_written_can_be_made_anew_at_once(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 2))
    rows = _begin(shard, space, keys(0, 2))
    written = _offsets(shard, rows)
    assert shard.store.delete(space, keys(0, 2)) == bytes([2, 2]), "gone for all but the disk"
    assert client.put(space, keys(0, 2)) == [PartState.CREATED] * 2
    made = [space.blocks[k] for k in keys(0, 2)]
    assert not set(made) & set(rows)
    assert not _offsets(shard, made) & written
    assert _end(shard, rows) == [False, False]
    assert shard.stored(space, keys(0, 2)) == keys(0, 2)
    assert shard.gauge("evictable_bytes") == 2 * SLOT
    _check(shard)


def test_a_block_that_goes_while_it_is_written_and_waited_with_is_never_a_victim_again() -> None:
    """An Acquire that goes on touches all that it has leased, what was deleted meanwhile too."""
    shard = Shard(capacity_bytes=PAGE_BYTES)
    reader, writer = shard.client(), shard.client()
    space = reader.attach(kv_spec("n"))
    writer.put(space, [key(0)])
    lease = writer.reserve(space, [key(1)]).lease
    assert lease is not None
    acquisition = reader.begin(space, keys(0, 2))
    assert not shard.store.reader.step(acquisition, shard.now).settled
    rows = _begin(shard, space, [key(0)])
    shard.store.delete(space, [key(0)])
    fill(lease)
    writer.commit(lease)
    assert shard.store.reader.step(acquisition, shard.now).settled
    assert reader.release(acquisition)
    _put_one_by_one(shard, writer, space, keys(100, 100 + 2 * SLOTS))
    _check(shard)
    assert _end(shard, rows) == [False]
    _check(shard)
    (policy,) = space.cohorts.values()
    assert len(policy) == len(space.blocks)


def test_a_page_that_changes_its_class_waits_for_a_block_that_is_written() -> None:
    shard = Shard(capacity_bytes=PAGE_BYTES)
    client = shard.client()
    small, large = client.attach(kv_spec("small")), client.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    client.put(small, keys(0, SLOTS))
    rows = _begin(shard, small, keys(3, 4))
    assert part_states(client.reserve(large, [key(0)]).states) == [PartState.FULL]
    assert shard.stored(small, keys(0, SLOTS)) == []
    assert shard.gauge("leased_bytes") == SLOT
    _check(shard)
    assert part_states(client.reserve(large, [key(0)]).states) == [PartState.FULL]
    assert _end(shard, rows) == [False]
    _check(shard)
    assert client.put(large, [key(0)]) == [PartState.CREATED]


def test_a_page_without_a_block_that_is_written_goes_before_one_with() -> None:
    shard = Shard(capacity_bytes=2 * PAGE_BYTES)
    client = shard.client()
    small, large = client.attach(kv_spec("small")), client.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    client.put(small, keys(0, 2 * SLOTS))
    first = [k for k in keys(0, 2 * SLOTS) if _offsets(shard, [small.blocks[k]]) < set(range(0, PAGE_BYTES, SLOT))]
    assert len(first) == SLOTS
    rows = _begin(shard, small, first[:1])  # Of equally cold pages the first would go.
    assert client.put(large, [key(0)]) == [PartState.CREATED]
    assert shard.stored(small, keys(0, 2 * SLOTS)) == first
    assert _end(shard, rows) == [True]
    _check(shard)


def test_making_room_is_told_before_a_block_goes_and_other_removals_are_not(shard: Shard) -> None:
    rules = {"limited": NamespaceRules(max_bytes=4 * SLOT), "short": NamespaceRules(ttl_s=10.0)}
    shard = Shard(capacity_bytes=PAGE_BYTES, rules_of=lambda spec: rules.get(spec.name, NamespaceRules()))
    client = shard.client()
    told: list[bytes] = []

    def evicted(row: int) -> None:
        (one,) = _keys(shard, [row])
        namespace = shard.store.records.namespaces[shard.store.records.blocks.cell.namespace[row]]
        assert namespace.blocks[one] == row
        told.append(one)

    shard.store.records.on_evict = evicted
    limited, short = client.attach(kv_spec("limited")), client.attach(kv_spec("short"))
    other, large = client.attach(kv_spec("other")), client.attach(kv_spec("large", part_bytes=PAGE_BYTES))
    client.put(short, keys(0, 2))
    client.put(other, keys(2, 4))
    shard.store.delete(other, [key(2)])
    shard.pass_time(11.0)
    shard.store.purge(lambda n: n is other, created_before=float("inf"))
    assert told == []
    _put_one_by_one(shard, client, limited, keys(10, 15))
    assert told == [key(10)], "quota"
    shard.now += 1000.0
    client.put(large, [key(20)])
    assert sorted(told[1:]) == keys(11, 15), "page"
    shard.now += 1000.0
    client.put(large, [key(21)])
    assert told[5:] == [key(20)], "capacity"


def test_each_block_that_is_made_is_told_once(shard: Shard, client: Client) -> None:
    told: list[int] = []
    shard.store.records.on_link = told.append
    space = client.attach(kv_spec("parts", layer_groups=2))
    client.reserve(space, keys(0, 2), parts=(0,))
    client.put(space, keys(0, 3))
    assert _keys(shard, told) == keys(0, 3)


def test_all_slots_ever_given_are_counted(shard: Shard, client: Client) -> None:
    space = client.attach(kv_spec("n"))
    client.put(space, keys(0, 3))
    shard.store.delete(space, keys(0, 3))
    client.put(space, keys(0, 2))
    assert shard.store.records.granted_bytes == 5 * SLOT


# -- the shard's own session -----------------------------------------------------------------------------------------


@pytest.fixture
def own(shard: Shard) -> Session:
    session = Session(b"shard's own", "own", frozenset(), None)
    shard.store.sessions.keep_internal(session)
    return session


def test_the_shard_s_own_session_is_not_counted_named_or_told_of(shard: Shard, own: Session) -> None:
    assert shard.gauge("sessions") == 0
    assert list(shard.store.sessions) == []
    assert shard.store.sessions.holders() == [own]
    with pytest.raises(UnknownSession):
        shard.store.sessions.get(own.id)


def test_a_lease_of_the_shard_s_own_session_runs_out_as_any_other(shard: Shard, client: Client, own: Session) -> None:
    space = client.attach(kv_spec("n"))
    lease = shard.store.writer.reserve(own, space, ReserveRequest(keys(0, 2), 5.0), shard.now).lease
    assert lease is not None
    _check(shard)
    shard.pass_time(6.0)
    assert lease.ended
    assert own.leases == set()
    assert LeasesEnded(own.id, (lease.id,)) in shard.store.take_effects()
    assert shard.gauge("free_bytes") == shard.gauge("capacity_bytes")
    _check(shard)


@pytest.mark.parametrize("pinned", [False, True], ids=["free", "pinned"])
def test_parts_that_never_land_are_dropped_one_by_one_and_the_last_ends_the_lease(
    shard: Shard, client: Client, own: Session, pinned: bool
) -> None:
    space = client.attach(kv_spec("n"))
    store = shard.store
    lease = store.writer.reserve(own, space, ReserveRequest(keys(0, 3), 60.0), shard.now).lease
    assert lease is not None
    if pinned:
        store.pin(lease)
    store.writer.drop(lease, [1], shard.now)
    assert not lease.ended
    assert shard.gauge("reserved_bytes") == (3 if pinned else 2) * SLOT
    _check(shard)
    fill(lease)
    assert store.commit(own, lease, [0], checksums=[7], now=shard.now) == bytes([PartState.COMMITTED])
    store.writer.drop(lease, [2], shard.now)
    assert lease.ended
    if pinned:
        assert shard.gauge("reserved_bytes") == 2 * SLOT
        _check_lingering(shard)
        store.unpin(lease, shard.now)
    own.leases.discard(lease.id)
    assert (shard.gauge("reserved_bytes"), shard.gauge("leases")) == (0, 0)
    states = client.match(space, keys(0, 3), coverage=Coverage.EACH).states
    assert states == bytes([BlockState.HOT, BlockState.MISSING, BlockState.MISSING])
    counters = store.counters()
    assert (counters["committed_parts"], counters["abandoned_parts"]) == (1, 2)
    _check(shard)


def _check_lingering(shard: Shard) -> None:
    """A pinned lease that has ended keeps what it held."""
    assert shard.gauge("leases") == 1
    _check(shard)
