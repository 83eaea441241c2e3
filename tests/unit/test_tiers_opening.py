"""A folder of the warm tier on a real disk: whose it is, what a start finds in it, and what is refused."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvstore.tiers import opening
from kvstore.tiers.device import Folder, FolderInUse, aligned
from kvstore.tiers.identity import FolderRefused, Identity, read_identity
from kvstore.tiers.index import Located
from kvstore.tiers.opening import Opened, OpenSettings, keys_at, open_warm
from kvstore.tiers.sealing import BadKeys, WrongKey, read_keys
from kvstore.tiers.segment import BLOCK_BYTES, Described, blocks_of
from kvstore.tiers.warm import Clocks, Wanted
from kvstore.tiers.writer import BlockOut

MIB = 1 << 20
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")
PART = 60_000  # 16 to a segment.
CLOCKS = Clocks(now=time.monotonic, wall=time.time)
WAIT_S = 30.0
Opener = Callable[..., Opened]


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def value(number: int) -> bytes:
    return random.Random(number).randbytes(PART)


def memory(length: int) -> memoryview:
    return aligned(length)[: blocks_of(length) * BLOCK_BYTES]


def block(number: int, described: Described = ONE) -> BlockOut:
    raw, piece = value(number), memory(PART)
    piece[:PART] = raw
    return BlockOut(described, key(number), [0], [PART], [xxh3_64_intdigest(raw)], [piece], created=time.time())


def fill(opened: Opened, numbers: range, described: Described = ONE) -> None:
    futures = [opened.tier.write(block(number, described)) for number in numbers]
    assert all(future.result(WAIT_S) is not None for future in futures)
    opened.tier.flush().result(WAIT_S)


def held(opened: Opened, numbers: range, described: Described = ONE) -> set[int]:
    """Which of these blocks are served, byte for byte."""
    places = opened.tier.locate(described.digest, [key(number) for number in numbers]).result(WAIT_S)
    found: list[tuple[int, Located]] = [(n, at) for n, at in zip(numbers, places, strict=True) if at is not None]
    pieces = [memory(PART) for _ in found]
    wanted = [Wanted(described.digest, key(n), at, [p]) for (n, at), p in zip(found, pieces, strict=True)]
    good = opened.tier.read(wanted).result(WAIT_S)
    for (number, _), piece, is_good in zip(found, pieces, good, strict=True):
        assert not is_good or bytes(piece[:PART]) == value(number), "a wrong byte"
    return {number for (number, _), is_good in zip(found, good, strict=True) if is_good}


def gauges(opened: Opened) -> dict[str, int]:
    """The sizes and counts that a restart must not change."""
    now = opened.tier.gauges()
    return {name: now[name] for name in ("stored_blocks", "stored_bytes", "segments", "capacity_bytes")}


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").glob("*.seg"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "warm"


@pytest.fixture
def opened(folder: Path) -> Iterator[Opener]:
    """Opens the folder as a server does at each of its starts; the one before is closed."""
    lives: list[Opened] = []

    def start(**changes: object) -> Opened:
        close_all()
        settings = OpenSettings(path=folder, capacity_bytes=64 * MIB, segment_bytes=MIB, cache_bytes=8 * MIB)
        lives.append(open_warm(replace(settings, **changes), clocks=CLOCKS))  # type: ignore[arg-type]
        return lives[-1]

    def close_all() -> None:
        while lives:
            lives.pop().close(timeout_s=WAIT_S)

    start.stop = close_all  # type: ignore[attr-defined]
    yield start
    close_all()


def stop(opened: Opener) -> None:
    opened.stop()  # type: ignore[attr-defined]


# --- What a restart finds


def test_a_restart_serves_what_was_written_with_the_same_sizes_and_counts(folder: Path, opened: Opener) -> None:
    first = opened()
    fill(first, range(40))
    fill(first, range(40, 60), TWO)
    before = gauges(first)
    assert before["stored_blocks"] == 60
    again = opened()
    assert gauges(again) == before, "not right before anything else was done"
    assert again.found.block_count == 60
    assert not again.found.rebuilt
    assert again.identity == first.identity
    assert held(again, range(60)) == set(range(40))
    assert held(again, range(60), TWO) == set(range(40, 60))
    assert before["segments"] == len(segments(folder))


def test_the_limit_holds_over_a_restart_of_a_folder_that_is_nearly_full(folder: Path, opened: Opener) -> None:
    first = opened(capacity_bytes=10 * MIB)
    fill(first, range(9 * 16))
    again = opened(capacity_bytes=10 * MIB)
    assert gauges(again)["stored_blocks"] == 9 * 16
    fill(again, range(1000, 1000 + 5 * 16))
    assert len(segments(folder)) <= 10
    assert sum(path.stat().st_blocks * 512 for path in segments(folder)) <= 10 * MIB
    assert held(again, range(1000, 1000 + 5 * 16)) == set(range(1000, 1000 + 5 * 16))


def test_a_smaller_capacity_holds_for_segments_that_hold_nothing_too(folder: Path, opened: Opener) -> None:
    fill(opened(), range(6 * 16))
    stop(opened)
    for path in segments(folder)[:5]:
        os.truncate(path, 0)
        os.truncate(path, MIB)
    again = opened(capacity_bytes=3 * MIB)
    assert len(segments(folder)) <= 3
    assert held(again, range(6 * 16)) == set(range(5 * 16, 6 * 16)), "what held something went first"


def test_a_folder_that_was_moved_and_is_served_under_another_name_has_all_it_had(
    folder: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened()
    fill(first, range(20))
    stop(opened)
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    script = (
        "import sys, time; from pathlib import Path; from kvstore.tiers.opening import *; "
        "from kvstore.tiers.warm import Clocks; s = OpenSettings(path=Path(sys.argv[1]), capacity_bytes=64 << 20, "
        "segment_bytes=1 << 20, cache_bytes=8 << 20); o = open_warm(s, clocks=Clocks(time.monotonic, time.time)); "
        "print(o.found.block_count, o.identity.store_id.hex()); o.close(timeout_s=30)"
    )
    answer = subprocess.run(  # Another process, with another working directory.
        [sys.executable, "-c", script, str(elsewhere)],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOSTNAME": "another"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout.split() == ["20", first.identity.store_id.hex()], answer.stderr
    again = opened(path=elsewhere)
    assert held(again, range(20)) == set(range(20))


def test_what_is_damaged_costs_itself_and_no_start(folder: Path, opened: Opener) -> None:
    numbers = range(6 * 16)
    fill(opened(), numbers)
    stop(opened)
    truncated, empty, flipped, gone, *_ = segments(folder)
    os.truncate(truncated, MIB // 2)
    os.truncate(empty, 0)
    with flipped.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xfe")
    gone.unlink()
    gone.symlink_to("nowhere")  # Cannot be opened, by whoever it is.
    (folder / "segments" / "notes.txt").write_text("stray")
    again = opened()
    counts = again.found.counts
    assert (counts["wrong_size_segments"], counts["bad_segments"]) == (2, 1)
    assert (counts["unreadable_segments"], counts["stray_files"]) == (1, 1)
    served = held(again, numbers)
    assert len(served) == gauges(again)["stored_blocks"] == 2 * 16
    assert (folder / "segments" / "notes.txt").read_text() == "stray"
    assert not truncated.exists()
    assert not empty.exists()
    fill(again, range(1000, 1032))
    assert held(again, range(1000, 1032)) == set(range(1000, 1032))


def break_index(folder: Path) -> None:
    (folder / "index" / "CURRENT").write_bytes(b"\xff")


def damage_tables(folder: Path) -> None:
    """Damages what is only read once the index is open."""
    for table in (folder / "index").glob("*.sst"):
        damage_table(table)


def damage_largest_table(folder: Path) -> None:
    """Damages where blocks lie, and leaves what is said of segments."""
    damage_table(max((folder / "index").glob("*.sst"), key=lambda table: table.stat().st_size))


def damage_table(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(32))


def test_an_index_that_cannot_be_opened_is_made_anew(folder: Path, opened: Opener) -> None:
    fill(opened(), range(40))
    before = gauges(opened())
    stop(opened)
    break_index(folder)
    again = opened()
    assert (again.found.rebuilt, gauges(again)) == (True, before)
    assert held(again, range(40)) == set(range(40))
    assert (folder / "index.broken").is_dir()


@pytest.mark.parametrize("damage", [damage_tables, damage_largest_table])
def test_an_index_that_breaks_while_it_is_read_is_made_anew(
    folder: Path, opened: Opener, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    fill(opened(), range(40))
    before = gauges(opened())
    opened()  # What the log of the index held is in a table by now.
    stop(opened)
    damage(folder)
    again = opened()
    assert gauges(again) == before
    assert held(again, range(40)) == set(range(40))
    assert again.found.rebuilt
    assert "made anew" in caplog.text


@pytest.mark.parametrize("damage", [break_index, damage_tables, damage_largest_table])
def test_a_broken_index_is_kept_where_that_was_asked_for(
    folder: Path, opened: Opener, damage: Callable[[Path], None]
) -> None:
    fill(opened(), range(40))
    opened()
    stop(opened)
    damage(folder)
    content = {path.name: path.read_bytes() for path in (folder / "index").iterdir() if path.suffix == ".sst"}
    with pytest.raises(FolderRefused, match="is broken, and is to be kept") as refusal:
        opened(on_broken_index="refuse")
    assert str(folder / "index") in str(refusal.value)
    assert not (folder / "index.broken").exists()
    assert {name: (folder / "index" / name).read_bytes() for name in content} == content
    assert len(segments(folder)) == 3
    assert held(opened(), range(40)) == set(range(40)), "the folder was not let go of"


def test_another_size_of_segments_gives_up_what_there_is_and_says_so(
    folder: Path, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened()
    fill(first, range(20))
    again = opened(segment_bytes=2 * MIB)
    assert "has segments of 1048576 bytes, now 2097152" in caplog.text
    assert again.found.counts["wrong_size_segments"] == 2
    assert gauges(again)["stored_blocks"] == 0
    assert held(again, range(20)) == set()
    assert again.identity == Identity(first.identity.store_id, 2 * MIB) == read_identity(folder)
    fill(again, range(20))
    caplog.clear()
    assert held(opened(segment_bytes=2 * MIB), range(20)) == set(range(20))
    assert "now" not in caplog.text


# --- A disk that is full


class FullFolder(Folder):
    """A folder on a disk that has no room but what its own files give back."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.used_bytes = sum(entry.stat().st_size for entry in os.scandir(path))

    def free_bytes(self) -> int:
        return self.used_bytes - sum(entry.stat().st_size for entry in os.scandir(self.path))


def test_a_full_disk_costs_the_segments_written_first_and_no_start(
    folder: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = range(40 * 16)
    fill(opened(), numbers)
    stop(opened)
    (log,) = (folder / "index").glob("*.log")
    needed = opening.ROOM_BYTES + 2 * log.stat().st_size
    monkeypatch.setattr(opening, "Folder", FullFolder)
    again = opened()
    given_up = again.found.counts["full_disk_segments"]
    assert given_up == -(-needed // MIB)
    assert held(again, numbers) == set(range(16 * given_up, 40 * 16))
    assert "the disk is full: segment 0000000000.seg is given up" in caplog.text
    assert gauges(again)["stored_blocks"] == (40 - given_up) * 16


def test_a_segment_that_holds_nothing_is_the_first_to_go(
    folder: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(opened(), range(5 * 16))
    stop(opened)
    os.truncate(segments(folder)[3], 0)
    os.truncate(segments(folder)[3], MIB)
    monkeypatch.setattr(opening, "ROOM_BYTES", MIB - 2 * max(log.stat().st_size for log in folder.glob("index/*.log")))
    monkeypatch.setattr(opening, "Folder", FullFolder)
    again = opened()
    assert again.found.counts["full_disk_segments"] == 1
    assert held(again, range(5 * 16)) == {*range(3 * 16), *range(4 * 16, 5 * 16)}


def test_a_capacity_beyond_the_room_there_is_is_warned_of(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    opened()
    assert "more than" not in caplog.text
    free = opened().folder.free_bytes()
    opened(capacity_bytes=free + (1 << 40))
    assert f"may take {free + (1 << 40)} bytes, more than the 0 that it has and the" in caplog.text


def test_room_that_the_folder_has_itself_counts(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(opened(capacity_bytes=3 * MIB), range(3 * 16))
    monkeypatch.setattr(Folder, "free_bytes", lambda self: opening.ROOM_BYTES * 8)
    opened(capacity_bytes=opening.ROOM_BYTES * 8 + 3 * MIB)
    assert "more than" not in caplog.text
    opened(capacity_bytes=opening.ROOM_BYTES * 8 + 3 * MIB + 1)
    assert f"more than the {3 * MIB} that it has and the {opening.ROOM_BYTES * 8} that are free" in caplog.text


# --- Whose the folder is


def test_a_second_process_is_refused_with_a_plain_message_and_the_first_goes_on(folder: Path, opened: Opener) -> None:
    first = opened()
    fill(first, range(10))
    with pytest.raises(FolderInUse) as refusal:
        open_warm(
            OpenSettings(path=folder, capacity_bytes=64 * MIB, segment_bytes=MIB, cache_bytes=8 * MIB), clocks=CLOCKS
        )
    assert str(refusal.value) == f"another process uses {folder}: each server needs a folder of its own"
    fill(first, range(10, 20))
    assert held(first, range(20)) == set(range(20))
    stop(opened)
    script = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder / "segments" / "LOCK")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(FolderInUse):
            opened()
        other.stdin.close()
        other.wait(WAIT_S)
    assert held(opened(), range(20)) == set(range(20))


@pytest.mark.parametrize("name", ["photo.jpg", "segments/0000000000.seg", "index", "deleted.log"])
def test_a_folder_with_other_files_is_not_taken_over(folder: Path, opened: Opener, name: str) -> None:
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine")
    before = sorted(folder.rglob("*"))
    with pytest.raises(FolderRefused, match="take an empty folder") as refusal:
        opened()
    assert str(folder) in str(refusal.value)
    assert sorted(folder.rglob("*")) == before, "something was left in it"
    assert (folder / name).read_text() == "mine"


def test_what_a_first_start_left_that_was_cut_off_is_no_obstacle(folder: Path, opened: Opener) -> None:
    (folder / "segments").mkdir(parents=True)
    (folder / "segments" / "LOCK").touch()
    (folder / ".new-identity").write_text("kvcommons warm")
    (folder / "lost+found").mkdir()
    fill(opened(), range(3))
    (folder / ".new-deleted.log").write_text("half of it")
    assert held(opened(), range(3)) == set(range(3))
    assert not list(folder.glob(".new-*"))


def test_a_folder_is_made_where_there_is_none_and_is_its_owners_alone(folder: Path, opened: Opener) -> None:
    deep = folder / "a" / "b"
    opened(path=deep)
    assert deep.stat().st_mode & 0o777 == 0o700
    for name in ("identity", "segments", "deleted.log"):
        assert (deep / name).stat().st_mode & 0o077 == 0


def test_the_identity_is_written_before_anything_else_is(
    folder: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*arguments: object, **more: object) -> None:
        raise OSError("cut off here")

    monkeypatch.setattr(opening, "Tombstones", cut_off)
    with pytest.raises(OSError, match="cut off here"):
        opened()
    monkeypatch.undo()
    identity = read_identity(folder)
    assert identity is not None
    assert {path.name for path in folder.iterdir()} == {"identity", "segments"}
    assert opened().identity == identity


def test_an_identity_is_as_documented_and_read_as_written(tmp_path: Path) -> None:
    written = Identity(bytes(range(16)), 268435456)
    written.write(tmp_path)
    text = (tmp_path / "identity").read_text()
    body = "kvcommons warm tier\nformat 1\nstore 000102030405060708090a0b0c0d0e0f\nsegment_bytes 268435456\n"
    assert text == f"{body}checksum {xxh3_64_hexdigest(body.encode())}\n"
    assert read_identity(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


def of_format(number: int, rest: str) -> bytes:
    body = f"kvcommons warm tier\nformat {number}\n{rest}".encode()
    return body + f"checksum {xxh3_64_hexdigest(body)}\n".encode()


@pytest.mark.parametrize("rest", [f"store {'00' * 16}\nsegment_bytes 1048576\n", "", "anything else\nat all\n"])
def test_a_folder_of_another_format_is_refused_and_left_as_it_is(folder: Path, opened: Opener, rest: str) -> None:
    fill(opened(), range(3))
    stop(opened)
    (folder / "identity").write_bytes(of_format(2, rest))
    before = [path.read_bytes() for path in segments(folder)]
    with pytest.raises(FolderRefused, match="written in format 2, this program knows format 1") as refusal:
        opened()
    assert str(folder) in str(refusal.value)
    assert [path.read_bytes() for path in segments(folder)] == before


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer", "noise"])
def test_a_damaged_identity_is_refused_with_its_path(folder: Path, opened: Opener, damage: str) -> None:
    fill(opened(), range(3))
    stop(opened)
    path = folder / "identity"
    raw = bytearray(whole := path.read_bytes())
    if damage == "flipped":
        raw[raw.index(b"store") + 7] ^= 1
    elif damage == "cut":
        del raw[-5:]
    elif damage == "empty":
        raw.clear()
    elif damage == "longer":
        raw += b"x"
    else:
        raw[:] = random.Random(1).randbytes(5000)
    path.write_bytes(raw)
    with pytest.raises(FolderRefused, match="damaged") as refusal:
        opened()
    assert str(path) in str(refusal.value)
    path.write_bytes(whole)
    assert held(opened(), range(3)) == set(range(3))


def test_a_start_that_is_refused_lets_go_of_the_folder(folder: Path, opened: Opener) -> None:
    fill(opened(), range(3))
    stop(opened)
    shutil.copytree(folder / "index", folder / "kept")
    break_index(folder)
    for _ in range(2):
        with pytest.raises(FolderRefused):
            opened(on_broken_index="refuse")
    shutil.rmtree(folder / "index")
    (folder / "kept").rename(folder / "index")
    assert held(opened(on_broken_index="refuse"), range(3)) == set(range(3))


# --- Keys


def test_what_is_sealed_is_served_with_its_key_and_refused_or_empty_without(folder: Path, opened: Opener) -> None:
    old, new = read_keys("11" * 32), read_keys("22" * 32)
    fill(opened(), range(3))
    fill(opened(keyring=old), range(3, 6))
    stop(opened)
    before = [path.read_bytes() for path in segments(folder)]
    assert [value(number)[:64] in raw for raw, number in zip(before, (0, 3), strict=True)] == [True, False]
    for keyring in (None, new):
        with pytest.raises(WrongKey, match="1 segment is sealed with a key that was not given"):
            opened(keyring=keyring)
    assert [path.read_bytes() for path in segments(folder)] == before
    assert held(opened(keyring=read_keys(f"{'22' * 32}\n{'11' * 32}")), range(6)) == set(range(6))
    again = opened(keyring=new, on_wrong_key="empty")
    assert again.found.counts["wrong_key_segments"] == 1
    assert held(again, range(6)) == set(range(3))


def test_keys_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    path, text = tmp_path / "keys", f"{'1a' * 32}  # new\n{'2b' * 32}\n"
    path.write_text(text)
    path.chmod(0o600)
    by_file, by_variable = keys_at(str(path), {}), keys_at("env:CACHE_KEYS", {"CACHE_KEYS": text})
    assert by_file is not None
    assert by_variable is not None
    assert by_file.writing_id == by_variable.writing_id
    assert keys_at("", {}) is None


def test_keys_that_are_not_there_are_named_by_their_place_alone(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match="the environment variable CACHE_KEYS is not set"):
        keys_at("env:CACHE_KEYS", {})
    secret = "3c" * 31
    with pytest.raises(BadKeys, match="the environment variable CACHE_KEYS: line 1") as refusal:
        keys_at("env:CACHE_KEYS", {"CACHE_KEYS": secret})
    assert secret not in str(refusal.value)
    with pytest.raises(FileNotFoundError):
        keys_at(str(tmp_path / "absent"), {})


def test_what_was_found_is_said_in_a_line(folder: Path, opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fill(opened(), range(20))
    (folder / "segments" / "notes.txt").touch()
    again = opened()
    assert str(again) == "20 blocks (stray_files 1)"
    assert f"{folder} holds 20 blocks (stray_files 1)" in caplog.text
