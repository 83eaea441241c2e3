"""Known ways for a cache on disk to go wrong, on a real server: damage, other formats, leftovers, odd names, races."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_hexdigest

from kvstore_client import Client, ClientOptions, Coverage
from kvstore_wire.errors import InvalidArgument, NamespaceMismatch
from kvstore_wire.namespace import NamespaceSpec
from tests.integration.server_process import ServerProcess
from tests.integration.test_warm_restart import ask_stats, bytes_on_disk, found, found_on_disk, put, serving, stop
from tests.integration.transport_scene import until
from tests.integration.warm_scene import HOT_BLOCKS, PART_BYTES, SPEC, WarmShard, chain, flags, value, warm_shard
from tests.shards import key, kv_spec, opaque_spec

SEGMENT_BYTES = 4 << 20


def segments_of(folder: Path) -> list[Path]:
    return sorted((folder / "warm" / "segments").glob("*.seg"))


def gauges_of(process: ServerProcess) -> dict[str, int]:
    return {c.name: c.value for c in ask_stats(process).gauges}


def part_of(block: bytes, part: int, size_bytes: int = PART_BYTES) -> bytes:
    """What is stored as one of several parts: no two are alike."""
    return random.Random(block + bytes([part])).randbytes(size_bytes)


def put_parts(client: Client, spec: NamespaceSpec, keys: list[bytes]) -> None:
    for k in keys:
        parts = [part_of(k, part, spec.part_bytes) for part in range(spec.parts_per_block)]
        assert client.namespace(spec).put([k], parts).ok


def parts_found(client: Client, spec: NamespaceSpec, keys: list[bytes]) -> int:
    """Reads a chain of blocks of several parts; compares every part of the blocks that came."""
    count = spec.parts_per_block
    rooms = [bytearray(spec.part_bytes) for _ in range(count * len(keys))]
    got = client.namespace(spec).get(keys, into=rooms, wait_ms=5000, deadline_ms=20_000)
    for i in range(got.prefix_blocks * count):
        block, part = divmod(i, count)
        assert bytes(rooms[i]) == part_of(keys[block], part, spec.part_bytes), f"wrong bytes in part {part} of {block}"
    return got.prefix_blocks


# -- what lies in the folder at start ----------------------------------------------------------------------------------


def written_folder(folder: Path, blocks: int = 3 * HOT_BLOCKS) -> list[bytes]:
    """Leaves a folder behind as a server does that was stopped."""
    keys = chain(1, blocks)
    with serving(folder) as (process, client):
        for at in range(0, blocks, 8):
            assert put(client, keys[at : at + 8]) == len(keys[at : at + 8])
            until(lambda: not gauges_of(process)["warm_writing_bytes"], "writing does not end")
        stop(process)
    return keys


def test_all_that_lies_on_disk_after_a_restart_is_accounted_for(tmp_path: Path) -> None:
    keys = written_folder(tmp_path)
    folder = tmp_path / "warm" / "segments"
    (folder / ".new-0000000099.seg").write_bytes(bytes(SEGMENT_BYTES))
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(tmp_path / "warm", moved / "warm")
    with serving(moved) as (process, client):
        gauges = gauges_of(process)
        assert {p.name for p in (moved / "warm" / "segments").iterdir()} == {
            "LOCK",
            *(p.name for p in segments_of(moved)),
        }
        assert bytes_on_disk(moved) == gauges["warm_segments"] * SEGMENT_BYTES
        assert gauges["warm_stored_blocks"] == found_on_disk(client, keys) == len(keys)
        assert gauges["warm_stored_bytes"] == len(keys) * PART_BYTES
        assert found(client, keys) == len(keys)


def test_damaged_files_cost_what_lay_in_them_and_no_start(tmp_path: Path) -> None:
    keys = written_folder(tmp_path)
    files = segments_of(tmp_path)
    os.truncate(files[0], 1 << 20)
    files[1].write_bytes(b"")
    with files[2].open("r+b") as file:  # The header.
        file.write(b"\xff" * 4096)
    with files[3].open("r+b") as file:  # The footer.
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    files[4].unlink()
    files[4].mkdir()
    (tmp_path / "warm" / "segments" / "notes.txt").write_text("not a segment")
    with serving(tmp_path) as (process, client):
        there = found_on_disk(client, keys)
        assert len(keys) - 5 * 16 <= there < len(keys)
        assert gauges_of(process)["warm_stored_blocks"] == there
        assert found(client, keys) == there
        again = chain(2, 2 * HOT_BLOCKS)
        put(client, again)
        assert found(client, again) > HOT_BLOCKS


def test_a_torn_end_of_the_index_s_log_after_a_kill_is_no_obstacle(tmp_path: Path) -> None:
    keys = chain(1, 4 * HOT_BLOCKS)
    with serving(tmp_path) as (process, client):
        put(client, keys)
        process.kill()
    log = max((tmp_path / "warm" / "index").glob("*.log"), key=lambda p: p.stat().st_mtime)
    os.truncate(log, max(0, log.stat().st_size - 37))
    with serving(tmp_path) as (process, client):
        assert found(client, keys) >= 2 * HOT_BLOCKS  # Segments whose records were torn off tell themselves.


def test_an_index_that_cannot_be_opened_is_made_anew_or_refused_as_told(tmp_path: Path) -> None:
    keys = written_folder(tmp_path)
    for manifest in (tmp_path / "warm" / "index").glob("MANIFEST-*"):
        manifest.write_bytes(b"\x00" * 512)
    refusing = ServerProcess(flags(tmp_path, warm__on_broken_index="refuse"))
    try:
        assert refusing.process.wait(30) == 1
        assert "index" in refusing.stderr_text()
        assert "Traceback" not in refusing.stderr_text()
    finally:
        refusing.close()
    with serving(tmp_path) as (process, client):
        assert found(client, keys) == len(keys)
        assert (tmp_path / "warm" / "index.broken").is_dir()
        assert "index" in process.stderr_text()


def test_a_server_starts_on_a_full_disk_and_serves_what_is_there(tmp_path: Path) -> None:
    keys = written_folder(tmp_path)
    with serving(tmp_path, failpoints="disk.create=full;disk.write=full") as (process, client):
        assert found(client, keys) == len(keys)
        fresh = chain(2, 8)
        put(client, fresh)
        assert found(client, fresh) == len(fresh)
        stop(process)


def test_a_folder_of_a_later_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    keys = written_folder(tmp_path)
    identity = tmp_path / "warm" / "identity"
    known = identity.read_bytes()
    body = known[: known.index(b"checksum ")].replace(b"format 1\n", b"format 2\n")
    identity.write_bytes(body + f"checksum {xxh3_64_hexdigest(body)}\n".encode())
    process = ServerProcess(flags(tmp_path))
    try:
        assert process.process.wait(30) == 1
        assert "format 2" in process.stderr_text()
        assert "Traceback" not in process.stderr_text()
    finally:
        process.close()
    identity.write_bytes(known)
    with serving(tmp_path) as (process, client):
        assert found(client, keys) == len(keys)


def test_blocks_of_another_layout_under_the_same_name_are_not_found_after_a_restart(tmp_path: Path) -> None:
    keys = written_folder(tmp_path, 16)
    assert SPEC.geometry is not None
    others = [
        replace(SPEC, geometry=replace(SPEC.geometry, dtype="float16")),
        replace(SPEC, part_bytes=PART_BYTES // 2),
        replace(SPEC, weights_revision="r2"),
        replace(SPEC, tenant="blue"),
    ]
    for other in others:
        with serving(tmp_path) as (_, client):
            assert client.namespace(other).match(keys).prefix_blocks == 0
            assert found(client, keys, other) == 0
    with serving(tmp_path) as (_, client):
        assert found(client, keys) == len(keys)


def test_a_stop_that_has_not_time_for_all_writes_heads_first(tmp_path: Path) -> None:
    keys = chain(1, 24)
    slow = "disk.write=delay:600ms"
    more = {"warm__flush_timeout": "1s", "warm__queue": "1MiB"}  # Four blocks, written in one piece.
    with serving(tmp_path, failpoints=slow, **more) as (process, client):
        done = client.namespace(SPEC).put(keys, [value(k) for k in keys])
        assert done.ok
        stop(process)
    with serving(tmp_path) as (process, client):
        head = client.namespace(SPEC).match(keys).prefix_blocks
        assert 0 < head < len(keys)
        assert found_on_disk(client, keys) == head


def test_a_clean_stop_keeps_blocks_that_do_not_fill_the_queue_evenly(tmp_path: Path) -> None:
    spec = kv_spec("three", part_bytes=64 << 10, layer_groups=3)
    keys = chain(1, 40)
    with serving(tmp_path) as (process, client):
        put_parts(client, spec, keys)
        stop(process)
    with serving(tmp_path) as (process, client):
        assert parts_found(client, spec, keys) == len(keys)


def test_a_clean_stop_keeps_the_heads_where_the_disk_is_smaller_than_memory(tmp_path: Path) -> None:
    keys = chain(1, 400)
    with serving(tmp_path, hot__capacity="128MiB", warm__capacity="64MiB") as (process, client):
        namespace = client.namespace(SPEC)
        for at in range(0, len(keys), 8):
            assert namespace.put(keys[at : at + 8], [value(k) for k in keys[at : at + 8]]).ok
        for at in reversed(range(0, len(keys), 8)):  # The heads were used last.
            namespace.get(keys[at : at + 8], into=[bytearray(PART_BYTES) for _ in range(8)], wait_ms=0)
        stop(process)
    with serving(tmp_path, hot__capacity="128MiB", warm__capacity="64MiB") as (process, client):
        assert client.namespace(SPEC).match(keys).prefix_blocks > 100


def test_a_stop_with_nothing_that_can_be_written_does_not_wait(tmp_path: Path) -> None:
    spec = opaque_spec("empty", part_bytes=PART_BYTES)
    with serving(tmp_path, warm__flush_timeout="15s") as (process, client):
        assert client.namespace(spec).put([key(1)], [b""]).ok
        client.close()
        started = time.monotonic()
        stop(process)
        assert time.monotonic() - started < 10


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_a_block_that_lost_a_part_on_disk_ends_the_chain(tmp_path: Path) -> None:
    spec = kv_spec("three", part_bytes=32 << 10, layer_groups=3)
    keys = chain(1, 8)
    with serving(tmp_path) as (process, client):
        put_parts(client, spec, keys)
        stop(process)
    lost = part_of(keys[5], 1, spec.part_bytes)[:512]
    for path in segments_of(tmp_path):
        at = path.read_bytes().find(lost)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"\x00")
            break
    else:
        pytest.fail("the part does not lie on disk")
    with serving(tmp_path) as (process, client):
        assert client.namespace(spec).match(keys).prefix_blocks == 8
        assert parts_found(client, spec, keys) == 5
        assert client.namespace(spec).match(keys).prefix_blocks == 5
        put_parts(client, spec, keys[5:6])
        assert parts_found(client, spec, keys) == 8


def test_names_of_any_kind_work_on_disk_and_none_leaves_the_folder(tmp_path: Path) -> None:
    names = ["a/b", "../../../tmp/x", "with space\nand line", "ünïcödé", "%2e%2e", "n" * 255, "-rf", "."]
    with warm_shard(tmp_path) as warm:
        specs = [kv_spec(name, part_bytes=PART_BYTES, tenant="t" * 128) for name in names]
        for i, spec in enumerate(specs):
            warm.put(chain(i, 4), spec)
        warm.fill(99)
        for i, spec in enumerate(specs):
            assert warm.stored(chain(i, 4), spec) == 4
            assert warm.get(chain(i, 4), spec).prefix_blocks == 4
    assert {p.name for p in tmp_path.iterdir()} == {"warm"}
    with pytest.raises(InvalidArgument, match="bytes"):
        kv_spec("n" * 4096)


@pytest.mark.parametrize("part_bytes", [5000, 1, 4096, 12_289])
def test_parts_that_are_no_whole_pages_come_back_as_they_were(tmp_path: Path, part_bytes: int) -> None:
    spec = kv_spec("odd", part_bytes=part_bytes, layer_groups=3)
    with warm_shard(tmp_path, more={"namespaces__default_max_bytes": "2MiB"}) as warm:
        keys = chain(1, 200)
        for at in range(0, len(keys), 4):
            put_parts(warm.client, spec, keys[at : at + 4])
            warm.until_written()
        for at in range(0, len(keys), 10):
            assert parts_found(warm.client, spec, keys[at : at + 10]) == 10
            warm.until_written()
        assert warm.count("warm_corrupt_blocks") == 0


@pytest.mark.parametrize("key_bytes", [16, 64])
def test_values_of_all_lengths_come_back_as_they_were(tmp_path: Path, key_bytes: int) -> None:
    spec, rng = opaque_spec("all", part_bytes=PART_BYTES), random.Random(key_bytes)
    sizes = [1, 511, 4095, 4096, 4097, 65_536, PART_BYTES - 1, PART_BYTES]
    sizes += [rng.randrange(1, PART_BYTES) for _ in range(56)]
    keys = [rng.randbytes(key_bytes) for _ in sizes]
    came = 0
    with warm_shard(tmp_path) as warm:
        namespace = warm.client.namespace(spec)
        for k, size in zip(keys, sizes, strict=True):
            assert namespace.put([k], [part_of(k, 0, size)]).ok
            warm.until_written()
        warm.fill(1, 3 * HOT_BLOCKS)
        for at in range(0, len(keys), 8):
            rooms = [bytearray(PART_BYTES) for _ in keys[at : at + 8]]
            got = namespace.get(keys[at : at + 8], into=rooms, wait_ms=5000, coverage=Coverage.EACH)
            lengths: list[int] = got.lengths[:, 0].tolist()
            for k, size, room, length in zip(keys[at:], sizes[at:], rooms, lengths, strict=False):
                # A page that changes hands may take a block of the same call with it: a miss, and no other bytes.
                assert length in (0, size)
                assert bytes(room[:length]) == part_of(k, 0, size)[:length]
            came += sum(map(bool, lengths))
        assert came > len(keys) // 2


def test_holes_of_a_chain_are_told_and_the_rest_comes(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 24)
        warm.put(keys)
        warm.fill(2)
        assert warm.client.namespace(SPEC).delete(keys[::3]).failure is None
        rooms = [bytearray(PART_BYTES) for _ in keys]
        got = warm.client.namespace(SPEC).get(keys, into=rooms, wait_ms=5000, coverage=Coverage.EACH)
        assert [bool(n) for n in got.lengths[:, 0]] == [i % 3 != 0 for i in range(24)]
        assert all(bytes(rooms[i]) == value(keys[i]) for i in range(24) if i % 3)


def test_one_key_in_two_namespaces_is_two_blocks_also_where_two_write_at_once(tmp_path: Path) -> None:
    specs = [kv_spec("one", part_bytes=PART_BYTES), kv_spec("two", part_bytes=PART_BYTES, tenant="blue")]
    keys = chain(1, HOT_BLOCKS)

    def write(warm: WarmShard, number: int) -> None:
        with Client(ClientOptions(warm.shard.target)) as client:
            for k in keys:
                client.namespace(specs[number % 2]).put([k], [part_of(k, number % 2)])
                time.sleep(0.002)

    with warm_shard(tmp_path) as warm:
        together(*[lambda number=number: write(warm, number) for number in range(4)])
        warm.fill(2)
        for number, spec in enumerate(specs):
            for k in keys:
                room = bytearray(PART_BYTES)
                if warm.client.namespace(spec).get([k], into=[room], wait_ms=5000).prefix_blocks:
                    assert bytes(room) == part_of(k, number)
            assert warm.client.namespace(spec).delete(keys).failure is None
            assert warm.stored(keys[:1], spec) == 0
        assert {p.suffix for p in (tmp_path / "warm" / "segments").iterdir()} == {".seg", ""}


def test_what_lay_in_files_that_somebody_removed_can_be_deleted_and_stored_anew(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 64)
        warm.put(keys)
        warm.fill(2, 4 * HOT_BLOCKS)
        for path in segments_of(tmp_path)[:3]:
            path.unlink()
        namespace = warm.client.namespace(SPEC)
        assert warm.get(keys[:8]).prefix_blocks <= 8
        for _ in range(2):
            assert namespace.delete(keys).failure is None
        assert warm.stored(keys) == 0
        warm.put(keys)
        warm.fill(3)
        assert warm.get(keys).prefix_blocks == len(keys)


def test_large_blocks_are_written_about_once(tmp_path: Path) -> None:
    keys = chain(1, 12 * HOT_BLOCKS)
    with serving(tmp_path, warm__capacity="64MiB") as (process, client):
        before = written_by(process)
        put(client, keys)
        gauges = gauges_of(process)
        stored = gauges["warm_written_bytes"]
        assert stored > 8 * HOT_BLOCKS * PART_BYTES
        assert gauges["warm_rewritten_bytes"] < stored // 2
        assert written_by(process) - before < 2 * len(keys) * PART_BYTES


def written_by(process: ServerProcess) -> int:
    lines = Path(f"/proc/{process.process.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


# -- races -------------------------------------------------------------------------------------------------------------


def together(*works: Callable[[], object]) -> None:
    """Runs all at once; raises what one raised."""
    failed: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    if failed:
        raise failed[0]


def being_read(warm: WarmShard, keys: list[bytes], spec: NamespaceSpec = SPEC) -> threading.Thread:
    """Begins to read blocks from a disk that takes a second for it."""
    warm.shard.arm("disk.read", "delay:900ms")
    reader = threading.Thread(target=lambda: warm.get(keys, spec))
    reader.start()
    warm.shard.until(lambda local: warm.tiering.promotion.bytes_on_the_way > 0, "nothing is read")
    return reader


@pytest.mark.parametrize("queue", ["4MiB", "1MiB"], ids=["being read", "waiting to be read"])
def test_a_block_deleted_while_it_comes_from_disk_is_gone(tmp_path: Path, queue: str) -> None:
    with warm_shard(tmp_path, more={"warm__promote_queue": queue}) as warm:
        keys = chain(1, 8)
        warm.put(keys)
        warm.fill(2)
        reader = being_read(warm, keys)
        assert warm.client.namespace(SPEC).delete(keys[4:]).failure is None
        assert warm.stored(keys[4:]) == 0
        warm.shard.disarm("disk.read")
        reader.join(20)
        assert warm.get(keys).prefix_blocks == 4
        warm.fill(3)
        assert warm.stored(keys) == 4
        assert warm.count("warm_promoted_blocks") == 4


def test_a_purge_takes_what_comes_from_disk_and_what_goes_to_it(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 8)
        warm.put(keys)
        warm.fill(2)
        reader = being_read(warm, keys)
        warm.shard.arm("disk.write", "delay:300ms")
        hot = chain(3, 16)
        assert warm.client.namespace(SPEC).put(hot, [value(k) for k in hot]).failure is None
        warm.shard.ask(lambda local: warm.tiering.demotion.pump())
        purge(warm)
        warm.shard.disarm("disk.write")
        warm.shard.disarm("disk.read")
        reader.join(20)
        warm.until_written()
        assert warm.stored(keys) == warm.stored(hot) == 0
        assert warm.shard.ask(lambda local: warm.tiering.warm.gauges()["stored_blocks"]) == 0


def purge(warm: WarmShard) -> None:
    """Purges all, as the admin call does."""
    import grpc

    from kvstore_wire.v1 import admin_pb2 as admin

    with grpc.insecure_channel(warm.shard.local.admin_target) as channel:
        call = channel.unary_unary(
            "/kvstore.v1.Admin/Purge",
            request_serializer=admin.PurgeRequest.SerializeToString,
            response_deserializer=admin.PurgeResponse.FromString,
        )
        call(admin.PurgeRequest(all=True), timeout=20)


def test_a_block_deleted_while_it_comes_from_disk_and_stored_anew_is_written_anew(tmp_path: Path) -> None:
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 8)
        warm.put(keys)
        warm.fill(2)
        reader = being_read(warm, keys)
        namespace = warm.client.namespace(SPEC)
        assert namespace.delete(keys).failure is None
        assert namespace.put(keys, [value(k) for k in keys]).ok
        warm.shard.disarm("disk.read")
        reader.join(20)
        warm.fill(3)
        assert warm.stored(keys) == len(keys)
        assert warm.get(keys).prefix_blocks == len(keys)


@pytest.mark.parametrize("again", [(0,), (1,), (0, 2)])
def test_a_block_of_which_some_parts_are_in_memory_does_not_shift_what_comes_from_disk(
    tmp_path: Path, again: tuple[int, ...]
) -> None:
    spec = kv_spec("three", part_bytes=PART_BYTES // 4, layer_groups=3)
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 6)
        put_parts(warm.client, spec, keys)
        warm.until_written()
        warm.fill(2)
        for k in (keys[0], keys[3]):  # One of several writers of a block stores its parts again.
            parts = [part_of(k, part, spec.part_bytes) for part in again]
            assert warm.client.namespace(spec).put([k], parts, parts=again).ok
        parts_found(warm.client, spec, keys)  # Compares what comes.
        parts_found(warm.client, spec, keys[1:])
        assert parts_found(warm.client, spec, keys[1:3]) == 2


def test_no_more_is_promised_of_a_block_in_both_tiers_than_is_read(tmp_path: Path) -> None:
    spec = kv_spec("two", part_bytes=PART_BYTES // 2, layer_groups=2)
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 4)
        put_parts(warm.client, spec, keys)
        warm.until_written()
        warm.fill(2)
        assert warm.client.namespace(spec).put(keys[:1], [part_of(keys[0], 0, spec.part_bytes)], parts=(0,)).ok
        promised = warm.client.namespace(spec).match(keys).prefix_blocks
        assert parts_found(warm.client, spec, keys) == promised


def test_what_a_client_waited_for_that_has_gone_is_not_brought_for_nobody(tmp_path: Path) -> None:
    with warm_shard(tmp_path, more={"warm__promote_queue": "1MiB"}) as warm:
        keys = chain(1, 32)
        warm.put(keys)
        warm.fill(2)
        warm.shard.arm("disk.read", "delay:300ms")
        gone = Client(ClientOptions(warm.shard.target, default_deadline_ms=20_000))
        rooms = [bytearray(PART_BYTES) for _ in keys]
        namespace = gone.namespace(SPEC)
        reader = threading.Thread(target=lambda: quietly(lambda: namespace.get(keys, into=rooms, wait_ms=15_000)))
        reader.start()
        warm.shard.until(lambda local: warm.tiering.promotion.bytes_on_the_way > 0, "nothing is read")
        gone.close()
        reader.join(20)
        warm.shard.until(
            lambda local: not (warm.tiering.promotion._fetches or warm.tiering.promotion.bytes_on_the_way),
            "it goes on",
        )
        assert warm.count("warm_promoted_blocks") <= 16


def quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # noqa: BLE001 - the client was closed under it
        return


@pytest.mark.parametrize(
    "point",
    [
        "disk.write",
        pytest.param("disk.read", marks=pytest.mark.soak),
        pytest.param("disk.sync", marks=pytest.mark.soak),
    ],
)
def test_a_stop_while_the_disk_hangs_and_blocks_are_on_their_way_ends_in_time(tmp_path: Path, point: str) -> None:
    keys = chain(1, 4 * HOT_BLOCKS)
    written_folder(tmp_path)
    timeouts = {"warm__flush_timeout": "1s", "server__drain_timeout": "1s"}
    with serving(tmp_path, failpoints=f"{point}=delay:10m", **timeouts) as (process, client):
        client.namespace(SPEC).put(chain(2, 32), [value(k) for k in chain(2, 32)])
        client.namespace(SPEC).get(keys[:16], into=[bytearray(PART_BYTES) for _ in range(16)], wait_ms=500)
        started = time.monotonic()
        stop(process)
        assert time.monotonic() - started < 15
        assert "Traceback" not in process.stderr_text(), process.stderr_text()
    with serving(tmp_path) as (process, client):
        assert found(client, keys[:64]) == 64


def test_a_promotion_whose_namespace_was_dropped_meanwhile_takes_no_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kv_spec("name", part_bytes=PART_BYTES)
    after = replace(before, model="another model")
    with warm_shard(tmp_path) as warm:
        keys = chain(1, 8)
        warm.put(keys, before)
        warm.fill(2, 3 * HOT_BLOCKS)  # All of it has left memory.
        located: list[Future[Any]] = []
        asked, real = threading.Event(), warm.tiering.warm.locate

        def held(digest: bytes, wanted: Sequence[bytes]) -> Future[Any]:
            answer.append(real(digest, wanted).result(10))
            located.append(Future())
            asked.set()
            return located[-1]

        answer: list[Any] = []
        monkeypatch.setattr(warm.tiering.warm, "locate", held)

        def read() -> None:
            with suppress(NamespaceMismatch):
                warm.get(keys, before)

        reader = threading.Thread(target=read)
        reader.start()
        assert asked.wait(10)
        warm.shard.end_sessions()
        with Client(ClientOptions(warm.shard.target)) as other:
            assert other.namespace(after).put(keys[:1], [value(keys[0])]).ok  # The name has gone to another.
            located[0].set_result(answer[0])
            reader.join(20)
            assert not reader.is_alive()
            monkeypatch.undo()
            assert other.namespace(after).match(keys).prefix_blocks == 1
            warm.shard.ask(lambda local: local.server.shell.store.check())
