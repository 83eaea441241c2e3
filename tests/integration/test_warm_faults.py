"""What the warm tier's disk does wrong costs misses: memory serves on, the tier says so, and heals by itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvstore.service.tiering import TierState
from tests.integration.warm_scene import HOT_BLOCKS, SPEC, WarmShard, chain, value, warm_shard

SAID_S = 5.0  # The most that it may take until the tier says that something is wrong.
HEALED_S = 15.0


def until_state(warm: WarmShard, state: TierState, within_s: float) -> None:
    warm.shard.until(lambda local: warm.tiering.state is state, f"the tier is not {state.name}", within_s=within_s)


def put_anyway(warm: WarmShard, name: int) -> list[bytes]:
    """Stores more than memory holds, whatever becomes of it."""
    keys = chain(name, 2 * HOT_BLOCKS)
    for at in range(0, len(keys), 8):
        done = warm.client.namespace(SPEC).put(keys[at : at + 8], [value(k) for k in keys[at : at + 8]])
        assert done.failure is None
    return keys


@pytest.mark.parametrize("fault", ["disk.write=fail", "disk.write=full", "disk.sync=fail", "disk.create=full"])
def test_a_disk_that_takes_no_writes_costs_only_what_leaves_memory(tmp_path: Path, fault: str) -> None:
    with warm_shard(tmp_path) as warm:
        old = chain(1, 32)
        warm.put(old)
        warm.fill(2)
        point, _, action = fault.partition("=")
        warm.shard.arm(point, action)
        keys = put_anyway(warm, 3)
        until_state(warm, TierState.DEGRADED, SAID_S)
        assert warm.tiering.reason
        assert warm.get(keys[-4:], wait_ms=0).prefix_blocks == 4  # Memory serves on.
        warm.get(old)  # Whatever is found is as it was stored.
        warm.shard.disarm(point)
        until_state(warm, TierState.ON, HEALED_S)
        again = chain(4, 32)
        warm.put(again)
        warm.fill(5)
        assert warm.get(again).prefix_blocks == len(again)


def test_a_disk_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        hot = warm.fill(2)[-8:]
        warm.shard.arm("disk.read", "fail")
        assert warm.get(keys).prefix_blocks == 0
        until_state(warm, TierState.DEGRADED, SAID_S)
        assert warm.get(hot, wait_ms=0).prefix_blocks == len(hot)
        warm.shard.disarm("disk.read")
        until_state(warm, TierState.ON, HEALED_S)
        assert warm.get(keys).prefix_blocks == len(keys)


def test_nobody_waits_for_a_disk_that_hangs_once_that_is_known(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        hot = warm.fill(2)[-8:]
        warm.shard.arm("disk.read", "delay:60s")
        started = time.monotonic()
        assert warm.get(keys, wait_ms=300).prefix_blocks == 0
        assert time.monotonic() - started < 5
        until_state(warm, TierState.DEGRADED, SAID_S)
        assert warm.get(hot, wait_ms=0).prefix_blocks == len(hot)
        found = warm.get(keys, wait_ms=30_000)  # Not asked of the disk any more.
        assert found.prefix_blocks == 0
        assert time.monotonic() - started < 20
        warm.shard.disarm("disk.read")
        until_state(warm, TierState.ON, HEALED_S)
        assert warm.get(keys).prefix_blocks == len(keys)


def test_puts_go_on_beside_a_disk_whose_writes_hang(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        warm.fill(1)
        warm.shard.arm("disk.write", "delay:60s")
        for name in range(2, 6):
            keys = put_anyway(warm, name)
            assert warm.get(keys[-8:], wait_ms=0).prefix_blocks == 8
        until_state(warm, TierState.DEGRADED, SAID_S)
        warm.shard.disarm("disk.write")
        until_state(warm, TierState.ON, HEALED_S)
        again = chain(9, 32)
        warm.put(again)
        warm.fill(10)
        assert warm.get(again).prefix_blocks == len(again)


def test_the_tier_can_be_taken_out_while_its_disk_hangs_and_back_in(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        warm.fill(2)
        warm.shard.arm("disk.read", "delay:60s")
        readers = [threading.Thread(target=lambda: warm.get(keys, wait_ms=2000)) for _ in range(4)]
        for reader in readers:
            reader.start()
        started = time.monotonic()
        warm.shard.ask(lambda local: warm.tiering.enable(enabled=False))
        assert time.monotonic() - started < 5
        for reader in readers:
            reader.join(20)
        assert not any(reader.is_alive() for reader in readers)
        assert warm.stored(keys) == 0
        hot = put_anyway(warm, 3)[-8:]
        assert warm.get(hot, wait_ms=0).prefix_blocks == len(hot)
        warm.shard.disarm("disk.read")
        warm.shard.ask(lambda local: warm.tiering.enable(enabled=True))
        until_state(warm, TierState.ON, HEALED_S)
        assert warm.get(keys).prefix_blocks == len(keys)


def test_what_is_deleted_while_the_tier_is_out_is_not_back_when_it_is_in_again(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 16)
        warm.put(keys)
        warm.fill(2)
        warm.shard.ask(lambda local: warm.tiering.enable(enabled=False))
        assert warm.client.namespace(SPEC).delete(keys).failure is None
        warm.shard.ask(lambda local: warm.tiering.enable(enabled=True))
        assert warm.stored(keys) == 0
        assert warm.get(keys).prefix_blocks == 0


def test_flipped_bits_on_disk_are_misses_and_never_bytes(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 64)
        warm.put(keys)
        warm.fill(2, 4 * HOT_BLOCKS)
        segments = sorted((tmp_path / "warm" / "segments").glob("*.seg"))
        for path in segments:
            with path.open("r+b") as file:
                for at in range(4096 + 1000, path.stat().st_size - 64 * 4096, 512 << 10):  # Every other block.
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x10]))
        brought = sum(warm.get([k]).prefix_blocks for k in keys)  # Compares what comes with what was stored.
        assert 0 < brought < len(keys)
        assert warm.count("warm_corrupt_blocks") > 0
        again = [k for k in keys if not warm.stored([k])]
        warm.put(again)
        assert all(warm.get([k]).prefix_blocks == 1 for k in again)


def test_a_segment_that_is_removed_behind_the_server_s_back_is_a_miss(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 64)
        warm.put(keys)
        warm.fill(2, 8 * HOT_BLOCKS)
        first = min((tmp_path / "warm" / "segments").glob("*.seg"))
        first.unlink()
        for k in keys:
            warm.get([k])
        warm.fill(3, 16 * HOT_BLOCKS)  # All segments are given up once.
        last = chain(4, 32)
        warm.put(last)
        warm.fill(5)
        assert warm.get(last).prefix_blocks == len(last)
