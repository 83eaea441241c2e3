"""Many clients of one shard at once, under memory pressure; a failing seed is printed and replays exactly."""

from __future__ import annotations

import pytest

from tests.sim.world import World


def played(seed: int, *, clients: int, pages: int, steps: int) -> World:
    """A world that was run to its end."""
    world = World(seed, clients=clients, pages=pages)
    try:
        world.run(steps)
        world.end()
    except Exception as error:
        raise AssertionError(f"seed {seed} failed at step {world.steps}: {error!r}") from error
    return world


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_no_reader_ever_sees_another_s_bytes(seed: int) -> None:
    world = played(seed, clients=64, pages=40, steps=30_000)
    counters = world.store.counters()
    # The run was worth something: memory was short, clients died, stalled and waited.
    assert world.tally["blocks read"] > 1_000
    assert world.tally["deaths"] > 5
    assert world.tally["woken"] > 10
    assert world.tally["commits refused"] > 10
    assert counters["evicted_capacity_blocks"] > 100
    assert counters["evicted_page_blocks"] > 10
    # And the disk: blocks went while they were written, and came back in time and late, whole and damaged.
    assert world.tally["segments given up"] > 10
    assert world.tally["purges"] > 5
    for how in ("with a copy", "while it was written", "unwritten"):
        assert world.tally[f"evicted {how}"] > 100, how
    for what in ("there", "held", "gone", "made anew"):
        assert world.tally[f"writes ended, block {what}"] > 10, what
    for state in ("COMMITTED", "LOST", "damaged", "under an ended lease"):
        assert world.tally[f"promoted {state}"] > 5, state
    assert world.tally["promoted COMMITTED"] > 100
    assert world.tally["blocks vanished before they had slots"] > 10
    assert world.tally["blocks warm"] > 200
    assert world.tally["match WARM"] > 200


def test_a_shard_with_room_for_all_loses_nothing_by_itself() -> None:
    world = played(5, clients=16, pages=1_000, steps=12_000)
    counters = world.store.counters()
    assert counters["evicted_capacity_blocks"] == counters["evicted_page_blocks"] == 0
    assert world.tally["reserve FULL"] == 0
    assert world.tally["writes begun"] == 0
    assert world.tally["blocks read"] > 1_000


def test_the_same_seed_plays_the_same_game() -> None:
    first, second = (played(6, clients=8, pages=16, steps=800) for _ in range(2))
    assert first.tally == second.tally
    assert first.store.counters() == second.store.counters()
