"""Blocks that leave memory go to disk and come back; nobody waits for the disk who does not want to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvstore.service import promotion
from kvstore.service.handlers import StoreHandlers
from kvstore.tiers.warm import Wanted, WarmTier
from kvstore_client import BlockState, GetResult
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.integration.transport_scene import until
from tests.integration.warm_scene import HOT_BLOCKS, PART_BYTES, SPEC, WarmShard, chain, value, warm_shard
from tests.shards import kv_spec


@pytest.mark.parametrize("way", ["shm", "bulk", "grpc"])
def test_chains_that_left_memory_are_told_of_and_read_back(tmp_path: Path, way: str) -> None:
    with warm_shard(tmp_path, way) as warm:
        chains = [chain(i, HOT_BLOCKS // 2) for i in range(6)]
        for keys in chains:
            warm.put(keys)
        for keys in chains:
            assert warm.stored(keys) == len(keys)
            assert warm.get(keys).prefix_blocks == len(keys)
            warm.until_written()
        assert warm.count("warm_promoted_blocks") >= 4 * HOT_BLOCKS // 2
        assert warm.count("warm_promote_missed_blocks") == 0


def test_a_read_waits_for_the_disk_unless_told_not_to(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 8)
        warm.put(keys)
        warm.fill(2)
        found = warm.get(keys, wait_ms=0)
        assert found.prefix_blocks == 0
        assert found.states[0] == BlockState.WARM
        assert warm.count("warm_promoted_blocks") == 0
        assert warm.get(keys, wait_ms=None).prefix_blocks == len(keys)  # What is usual for a shard with a disk.
        assert warm.count("warm_promoted_blocks") == len(keys)


def test_many_readers_of_one_chain_bring_it_once(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        warm.fill(2)
        found: list[int] = []
        warm.shard.arm("disk.read", "delay:200ms")
        readers = [threading.Thread(target=lambda: found.append(warm.get(keys).prefix_blocks)) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(30)
        assert found == [len(keys)] * 8
        assert warm.count("warm_promoted_blocks") == len(keys)


def test_a_block_from_disk_is_not_written_again_when_it_leaves_memory(tmp_path: Path) -> None:
    with warm_shard(tmp_path, more={"hot__policy": "lru"}) as warm:
        chains = [warm.fill(i, HOT_BLOCKS // 2) for i in range(4)]
        for keys in 3 * chains:
            assert warm.get(keys).prefix_blocks == len(keys)
            warm.until_written()
        assert warm.count("warm_promoted_blocks") >= 5 * HOT_BLOCKS
        assert warm.count("warm_written_blocks") == 2 * HOT_BLOCKS


def test_a_chain_of_both_tiers_is_one_prefix(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 24)
        warm.put(keys)
        warm.fill(2)
        assert warm.get(keys[:8]).prefix_blocks == 8  # The head is in memory again, the tail is not.
        matched = warm.client.namespace(SPEC).match(keys)
        assert matched.prefix_blocks == len(keys)
        assert set(matched.states[:8]) == {BlockState.HOT}
        assert set(matched.states[8:]) == {BlockState.WARM}
        assert warm.get(keys).prefix_blocks == len(keys)


def test_a_chain_longer_than_may_be_on_its_way_is_brought_piece_by_piece(tmp_path: Path) -> None:
    with warm_shard(tmp_path, more={"warm__promote_queue": "1MiB"}) as warm:
        keys = chain(1, 32)
        warm.put(keys)
        warm.fill(2)
        assert warm.get(keys).prefix_blocks == len(keys)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Sequence[Wanted], Future[list[bool]]]]]:
    """Each block is one read, and none of them is made: what is read, and what it waits for."""
    reads: list[tuple[Sequence[Wanted], Future[list[bool]]]] = []

    def hold(self: WarmTier, wanted: Sequence[Wanted]) -> Future[list[bool]]:
        reads.append((list(wanted), Future()))
        return reads[-1][1]

    monkeypatch.setattr(promotion, "READ_BYTES", 1)
    monkeypatch.setattr(WarmTier, "read", hold)
    yield reads
    for _, future in reads:
        future.cancel()


def test_reads_of_a_chain_are_few_ahead_of_the_first_that_has_not_come(
    tmp_path: Path, held: list[tuple[Sequence[Wanted], Future[list[bool]]]]
) -> None:
    with warm_shard(tmp_path, more={"warm.promote_queue": "16MiB"}) as warm:
        ahead = warm.tiering.promotion.reads_ahead
        keys = warm.fill(1, HOT_BLOCKS // 2)
        warm.fill(2)
        asked: list[GetResult] = []
        reader = threading.Thread(target=lambda: asked.append(warm.get(keys)))
        reader.start()
        until(lambda: len(held) == ahead, "too few reads")
        held[1][1].set_result([False])
        time.sleep(0.05)
        assert len(held) == ahead, "the first one has not come"
        held[0][1].set_result([False])
        until(lambda: len(held) == ahead + 2, "no more reads")
        assert [wanted[0].key for wanted, _ in held] == keys[: ahead + 2]
        for at in range(2, len(keys)):
            until(lambda at=at: len(held) > at, "no more reads")  # type: ignore[misc]
            held[at][1].set_result([False])
        reader.join(20)
        assert [found.prefix_blocks for found in asked] == [0]
        assert warm.count("warm_promoting_bytes") == 0


def test_what_nobody_waits_for_any_more_is_given_up_before_its_turn(
    tmp_path: Path, held: list[tuple[Sequence[Wanted], Future[list[bool]]]]
) -> None:
    with warm_shard(tmp_path, more={"warm.promote_queue": "8MiB"}) as warm:
        ahead = warm.tiering.promotion.reads_ahead
        keys = warm.fill(1, HOT_BLOCKS // 2)
        warm.fill(2)
        assert warm.get(keys, wait_ms=100).prefix_blocks == 0
        warm.shard.until(lambda local: not warm.tiering.promotion.bytes_on_the_way, "reads are left")
        assert len(held) == ahead, "it begins with more, though nobody waits"
        assert all(future.cancelled() for _, future in held)
        assert warm.count("warm_promote_cancelled_blocks") == len(keys)
        warm.shard.ask(lambda local: local.server.shell.store.check())
        assert warm.stored(keys) == len(keys)


def test_a_deleted_block_is_not_found_on_disk(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        warm.fill(2)
        deleted = warm.client.namespace(SPEC).delete(keys[8:])
        assert deleted.failure is None
        assert warm.stored(keys) == 8
        assert warm.get(keys).prefix_blocks == 8
        warm.put(keys[8:])
        warm.fill(3)
        assert warm.get(keys).prefix_blocks == len(keys)


def test_a_block_past_its_life_is_not_found_on_disk(tmp_path: Path) -> None:
    with warm_shard(tmp_path, more={"namespaces__default_ttl": "3s"}) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        warm.fill(2)
        assert warm.stored(keys) == len(keys)
        warm.shard.until(lambda local: not warm.tiering.warm.has(SPEC.digest, keys[:1])[0], "it does not expire")
        assert warm.stored(keys) == 0
        assert warm.get(keys).prefix_blocks == 0


def test_a_block_that_lacks_a_part_is_not_kept(tmp_path: Path) -> None:
    spec = kv_spec("parts", part_bytes=PART_BYTES, layer_groups=2)
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 4 * HOT_BLOCKS)
        for block in keys:
            assert warm.client.namespace(spec).put([block], [value(block)], parts=[0]).failure is None
        warm.until_written()
        assert warm.stored(keys, spec) == 0
        assert warm.count("warm_written_blocks") == 0
        assert warm.count("warm_dropped_incomplete_blocks") >= 3 * HOT_BLOCKS


def test_what_is_over_leaves_memory_unwritten_and_is_counted_so(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        namespace, keys = warm.client.namespace(SPEC), chain(1, 16)
        assert namespace.put(keys, [value(block) for block in keys]).ok
        assert namespace.over(keys).blocks == len(keys)
        warm.fill(2)
        assert warm.stored(keys) == 0
        assert warm.count("warm_dropped_over_blocks") == len(keys)
        assert warm.count("warm_dropped_behind_blocks") == 0


def test_a_chain_longer_than_memory_is_read_whole_in_as_many_calls_as_it_takes(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 2 * HOT_BLOCKS)
        warm.put(keys)
        warm.fill(2)
        found = warm.client.namespace(SPEC).get(keys, wait_ms=10_000, deadline_ms=20_000)
        assert found.prefix_blocks == len(keys)
        assert found.values is not None
        assert all(bytes(got or b"") == value(k) for k, got in zip(keys, found.values, strict=True))


def test_blocks_are_written_ahead_of_what_single_calls_take(tmp_path: Path) -> None:
    with warm_shard(tmp_path, more={"warm__capacity": "64MiB"}) as warm:  # 3 % of it are seven blocks.
        namespace = warm.client.namespace(SPEC)
        keys = chain(1, 6 * HOT_BLOCKS)
        for at in range(0, len(keys), 20):
            assert namespace.put(keys[at : at + 20], [value(k) for k in keys[at : at + 20]]).ok
            warm.until_written()
        assert warm.count("warm_dropped_behind_blocks") <= 20  # Of the first calls, before it was known.


def _fill_unwritten(warm: WarmShard, name: int, delay: str) -> list[bytes]:
    """Takes all of memory with blocks that the disk is slow to take."""
    warm.shard.arm("disk.write", f"delay:{delay}")
    keys = chain(name, HOT_BLOCKS)
    for some in (keys[: HOT_BLOCKS // 2], keys[HOT_BLOCKS // 2 :]):  # One call may not lease all of memory.
        assert warm.client.namespace(SPEC).put(some, [value(block) for block in some]).stored == len(some)
    return keys


@pytest.mark.parametrize("way", ["shm", "bulk", "grpc"])
def test_a_reserve_that_may_wait_loses_nothing_that_the_disk_has_not_taken_yet(tmp_path: Path, way: str) -> None:
    with warm_shard(tmp_path, way) as warm:
        before = _fill_unwritten(warm, 1, "100ms")
        namespace, keys = warm.client.namespace(SPEC), chain(2, HOT_BLOCKS // 2)
        with namespace.reserve(keys, wait_ms=5000) as held:
            assert len(held.created) == len(keys)
            assert namespace.write(held, [value(block) for block in keys]).stored == len(keys)
        assert warm.count("warm_dropped_behind_blocks") == 0
        warm.shard.disarm("disk.write")
        warm.until_written()
        assert warm.stored(before) == len(before)
        assert warm.stored(keys) == len(keys)
        assert warm.get(before).prefix_blocks == len(before)  # It may take the room of `keys`, written or not.


@pytest.mark.parametrize(("wait_ms", "at_least_s"), [(0, 0.0), (200, 0.2)])
def test_a_reserve_waits_no_longer_than_it_may(tmp_path: Path, wait_ms: int, at_least_s: float) -> None:
    with warm_shard(tmp_path) as warm:
        _fill_unwritten(warm, 1, "3s")
        keys = chain(2, HOT_BLOCKS // 2)
        began_s = time.monotonic()
        with warm.client.namespace(SPEC).reserve(keys, wait_ms=wait_ms, deadline_ms=20_000) as held:
            assert at_least_s <= time.monotonic() - began_s < 2.5
            assert len(held.created) > 0, "what was not written made room"
        assert warm.count("warm_dropped_behind_blocks") > 0
        warm.shard.disarm("disk.write")


def test_a_reserve_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        _fill_unwritten(warm, 1, "6s")
        began_s = time.monotonic()
        with warm.client.namespace(SPEC).reserve(chain(2, HOT_BLOCKS // 2), wait_ms=15_000, deadline_ms=20_000) as held:
            assert time.monotonic() - began_s < 5, "the tier had said by then that the disk hangs"
            assert len(held.created) > 0
        warm.shard.disarm("disk.write")


def test_a_draining_shard_says_so_at_once_to_a_reserve_that_may_wait(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        _fill_unwritten(warm, 1, "1s")
        keys = chain(2, HOT_BLOCKS // 2)
        request = pb.ReserveRequest(chain=types.Chain(keys=keys), wait_ms=10_000)
        shell = warm.shard.local.server.shell
        warm.shard.ask(lambda local: setattr(shell, "draining", True))
        assert not warm.shard.ask(lambda local: StoreHandlers(shell).reserve_waits(request))
        warm.shard.ask(lambda local: setattr(shell, "draining", False))
        warm.shard.disarm("disk.write")


def test_a_wait_longer_than_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        limit = warm.shard.local.server.shell.limits.max_wait_ms
        with pytest.raises(InvalidArgument, match=f"wait_ms.*{limit}"):
            warm.client.namespace(SPEC).reserve(chain(1, 1), wait_ms=limit + 1)
