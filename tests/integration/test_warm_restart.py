"""What a server finds of its blocks when it starts again, after a clean stop, a crash, or with other options."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from kvstore.replay.admin import admin_peer
from kvstore_client import Client, ClientOptions, NamespaceSpec
from kvstore_wire.methods import ADMIN_METHODS
from kvstore_wire.v1 import admin_pb2 as admin
from tests.integration.server_process import ROOT, ServerProcess
from tests.integration.warm_scene import HOT_BLOCKS, PART_BYTES, SPEC, chain, flags, value
from tests.shards import kv_spec

DEADLINE_MS = 10_000


@contextlib.contextmanager
def serving(folder: Path, failpoints: str = "", **more: str) -> Iterator[tuple[ServerProcess, Client]]:
    """A server process on the folder, and a client of it; killed on leaving if it still runs."""
    process = ServerProcess(flags(folder, **more), failpoints=failpoints)
    try:
        process.wait_for_start()
        with Client(ClientOptions(process.target, default_deadline_ms=DEADLINE_MS)) as client:
            yield process, client
    finally:
        process.close()


def put(client: Client, keys: Sequence[bytes], spec: NamespaceSpec = SPEC) -> int:
    """Stores blocks a few at a time, leaving the disk time to catch up; tells how many were stored."""
    stored = 0
    for at in range(0, len(keys), 4):
        some = keys[at : at + 4]
        done = client.namespace(spec).put(some, [value(k, spec.part_bytes) for k in some])
        stored += done.stored
        time.sleep(0.005)
    return stored


def found(client: Client, keys: Sequence[bytes], spec: NamespaceSpec = SPEC) -> int:
    """Reads blocks one by one; tells how many came. None may have other bytes than were stored."""
    count = 0
    for k in keys:
        room = bytearray(spec.part_bytes)
        if client.namespace(spec).get([k], into=[room], wait_ms=5000, deadline_ms=DEADLINE_MS).prefix_blocks:
            assert bytes(room) == value(k, spec.part_bytes), "wrong bytes"
            count += 1
    return count


def stop(process: ServerProcess) -> None:
    process.terminate()
    assert process.process.wait(30) == 0, process.stderr_text()


def bytes_on_disk(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in (folder / "warm" / "segments").glob("*.seg"))


def test_a_clean_stop_keeps_what_was_in_memory_heads_first(tmp_path: Path) -> None:
    keys = chain(1, HOT_BLOCKS // 2)
    with serving(tmp_path) as (process, client):
        assert put(client, keys) == len(keys)
        stop(process)
    with serving(tmp_path, server__listen="127.0.0.1:0") as (process, client):
        assert client.namespace(SPEC).match(keys).prefix_blocks == len(keys)
        assert found(client, keys) == len(keys)


def test_a_stop_that_may_not_write_says_so_and_loses_only_memory(tmp_path: Path) -> None:
    keys = chain(1, 3 * HOT_BLOCKS)
    with serving(tmp_path, warm__flush_timeout="0s") as (process, client):
        put(client, keys)
        stop(process)
    with serving(tmp_path) as (process, client):
        assert 0 < found(client, keys) < len(keys)


def test_a_killed_server_finds_its_sealed_segments_and_never_other_bytes(tmp_path: Path) -> None:
    keys = chain(1, 4 * HOT_BLOCKS)
    with serving(tmp_path) as (process, client):
        put(client, keys)
        process.kill()
    with serving(tmp_path) as (process, client):
        # 192 blocks left memory, or nearly; at most one segment of 16 was open, and a quarter of memory written ahead.
        assert found(client, keys) >= 128


def test_what_was_deleted_or_purged_is_not_back_after_a_kill(tmp_path: Path) -> None:
    keys, other = chain(1, 2 * HOT_BLOCKS), kv_spec("other", part_bytes=PART_BYTES, tenant="blue")
    with serving(tmp_path) as (process, client):
        put(client, keys)
        put(client, keys[:32], other)
        put(client, chain(2, 2 * HOT_BLOCKS))
        assert client.namespace(SPEC).delete(keys).failure is None
        purge(process, admin.PurgeRequest(tenant="blue"))
        process.kill()
    with serving(tmp_path) as (process, client):
        assert found(client, keys) == 0
        assert found(client, keys[:32], other) == 0
        assert found(client, chain(2, 2 * HOT_BLOCKS)) > 0


def test_a_smaller_capacity_is_honoured_before_the_server_is_ready(tmp_path: Path) -> None:
    keys = chain(1, 10 * HOT_BLOCKS)
    with serving(tmp_path) as (process, client):
        put(client, keys)
        stop(process)
    before = bytes_on_disk(tmp_path)
    with serving(tmp_path, warm__capacity="64MiB") as (process, client):
        assert bytes_on_disk(tmp_path) <= 64 << 20 < before
        stats = {c.name: c.value for c in ask_stats(process).gauges}
        assert stats["warm_stored_blocks"] <= 256
        assert stats["warm_stored_blocks"] == found_on_disk(client, keys)


def test_usage_is_counted_before_anything_new_is_written(tmp_path: Path) -> None:
    with serving(tmp_path, warm__capacity="64MiB") as (process, client):
        put(client, chain(1, 8 * HOT_BLOCKS))
        stop(process)
    with serving(tmp_path, warm__capacity="64MiB") as (process, client):
        stats = {c.name: c.value for c in ask_stats(process).gauges}
        assert stats["warm_stored_bytes"] > 48 << 20
        put(client, chain(2, 8 * HOT_BLOCKS))
        assert bytes_on_disk(tmp_path) <= 64 << 20


def test_a_second_server_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, client):
        keys = chain(1, 8)
        put(client, keys)
        command = [sys.executable, "-m", "kvstore", "serve"]
        chosen = {**flags(tmp_path), "server.listen": "127.0.0.1:0", "server.admin_listen": "127.0.0.1:0"}
        for name, text in chosen.items():
            command += [f"--{name}", text]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 1
        assert str(tmp_path / "warm") in second.stderr
        assert "Traceback" not in second.stderr
        assert found(client, keys) == len(keys)


@pytest.mark.parametrize("point", ["disk.write", "disk.sync", "disk.create"])
def test_a_kill_at_any_call_of_the_disk_leaves_a_folder_that_opens(tmp_path: Path, point: str) -> None:
    rng = random.Random(point)
    stored: list[bytes] = []
    for life in range(2):
        with serving(tmp_path) as (process, client):
            assert found(client, rng.sample(stored, min(24, len(stored)))) >= 0  # `found` compares the bytes.
            keys = chain(life + 1, 3 * HOT_BLOCKS)
            put(client, keys[:HOT_BLOCKS])
            stored += keys
            process.close()
        with contextlib.suppress(AssertionError), serving(tmp_path, failpoints=f"{point}=kill") as (process, client):
            with contextlib.suppress(Exception):
                put(client, keys)
            process.process.wait(20)
    with serving(tmp_path) as (process, client):
        found(client, stored)
        names = {p.name for p in (tmp_path / "warm" / "segments").iterdir()}
        assert not [n for n in names if n.startswith(".new-")]
        gauges = {c.name: c.value for c in ask_stats(process).gauges}
        assert bytes_on_disk(tmp_path) <= gauges["warm_capacity_bytes"]


def test_payload_that_was_sealed_comes_back_with_its_key_only(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("ab" * 32 + "\n")
    key_file.chmod(0o600)
    keys = chain(1, 2 * HOT_BLOCKS)
    with serving(tmp_path, warm__encryption_key=str(key_file)) as (process, client):
        put(client, keys)
        stop(process)
    raw = b"".join(p.read_bytes() for p in (tmp_path / "warm" / "segments").glob("*.seg"))
    assert value(keys[0])[:64] not in raw
    other = tmp_path / "other"
    other.write_text("cd" * 32 + "\n")
    other.chmod(0o600)
    with pytest.raises(AssertionError, match="key"), serving(tmp_path, warm__encryption_key=str(other)):
        pass
    rotated = tmp_path / "rotated"
    rotated.write_text("cd" * 32 + "\n" + "ab" * 32 + "\n")
    rotated.chmod(0o600)
    with serving(tmp_path, warm__encryption_key=str(rotated)) as (process, client):
        assert found(client, keys) == len(keys)
    with serving(tmp_path, warm__encryption_key=str(other), warm__on_wrong_key="empty") as (process, client):
        assert found(client, keys) == 0


# -- asking ------------------------------------------------------------------------------------------------------------


def found_on_disk(client: Client, keys: Sequence[bytes]) -> int:
    """How many of the blocks a match tells of."""
    namespace = client.namespace(SPEC)
    return sum(namespace.match([k]).prefix_blocks for k in keys)


def ask_stats(process: ServerProcess) -> admin.Stats:
    with admin_peer(process.admin_target, deadline_s=20) as peer:
        return peer.stats()


def purge(process: ServerProcess, request: admin.PurgeRequest) -> None:
    with grpc.insecure_channel(process.admin_target) as channel:
        path, answer = ADMIN_METHODS["Purge"].path, admin.PurgeResponse
        encode: Callable[[admin.PurgeRequest], bytes] = admin.PurgeRequest.SerializeToString
        call = channel.unary_unary(path, request_serializer=encode, response_deserializer=answer.FromString)
        call(request, timeout=20)
