"""Folders and files of segments, on the file system of the tests."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.device import DirectFile, Folder, FolderInUse, aligned, read_bytes, write_bytes
from kvstore.tiers.segment import BLOCK_BYTES
from tests.disks import Crashed, MemoryDisk

SIZE = 64 * BLOCK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "warm")
    yield made
    made.close()


def filled(size_bytes: int, seed: int = 0) -> memoryview:
    memory = aligned(size_bytes)
    memory[:] = random.Random(seed).randbytes(len(memory))
    return memory


def test_what_is_written_in_pieces_is_read_in_others(folder: Folder) -> None:
    device = folder.create("a.seg", SIZE)
    data = filled(8 * BLOCK_BYTES)
    device.write(4 * BLOCK_BYTES, [data[:BLOCK_BYTES], data[BLOCK_BYTES : 6 * BLOCK_BYTES], data[6 * BLOCK_BYTES :]])
    device.sync()
    first, second = aligned(5 * BLOCK_BYTES), aligned(3 * BLOCK_BYTES)
    device.read(4 * BLOCK_BYTES, [first, second])
    assert bytes(first) + bytes(second) == bytes(data)
    assert read_bytes(device, 0, BLOCK_BYTES) == bytes(BLOCK_BYTES)
    device.close()
    again = folder.open("a.seg")
    assert again.size_bytes == SIZE
    assert read_bytes(again, 4 * BLOCK_BYTES, len(data)) == data
    again.close()


def test_more_pieces_than_one_system_call_takes_are_moved(folder: Folder) -> None:
    device = folder.create("a.seg", 2100 * BLOCK_BYTES)
    data, back = filled(2100 * BLOCK_BYTES), aligned(2100 * BLOCK_BYTES)
    device.write(0, [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)])
    device.read(0, [back[i : i + BLOCK_BYTES] for i in range(0, len(back), BLOCK_BYTES)])
    assert back == data
    device.close()


def test_a_device_has_its_size_from_the_start_and_never_grows(folder: Folder) -> None:
    device = folder.create("a.seg", SIZE)
    with pytest.raises(OSError, match="in a device of") as failure:
        device.write(SIZE - BLOCK_BYTES, [aligned(2 * BLOCK_BYTES)])
    assert failure.value.errno == errno.EFBIG
    assert os.stat(folder.path / "a.seg").st_blocks * 512 >= SIZE, "the room was not taken"
    assert device.size_bytes == os.stat(folder.path / "a.seg").st_size == SIZE
    device.close()


def test_a_read_that_the_file_ends_under_is_an_error(folder: Folder) -> None:
    device = folder.create("a.seg", SIZE)
    os.truncate(folder.path / "a.seg", SIZE // 2)
    with pytest.raises(OSError, match="nothing could be moved") as failure:
        device.read(SIZE // 2 - BLOCK_BYTES, [aligned(2 * BLOCK_BYTES)])
    assert failure.value.errno == errno.EIO
    device.close()


def test_a_name_is_given_once(folder: Folder) -> None:
    device = folder.create("a.seg", SIZE)
    write_bytes(device, 0, b"mine".ljust(BLOCK_BYTES))
    with pytest.raises(FileExistsError):
        folder.create("a.seg", SIZE)
    assert folder.names() == ["a.seg"], "what was begun is left"
    assert bytes(read_bytes(device, 0, 4)) == b"mine"
    device.close()


def test_removing_what_has_gone_is_no_error(folder: Folder) -> None:
    folder.create("a.seg", SIZE).close()
    folder.remove("a.seg")
    folder.remove("a.seg")
    assert folder.names() == []
    with pytest.raises(FileNotFoundError):
        folder.open("a.seg")


def test_no_room_leaves_nothing(folder: Folder) -> None:
    with pytest.raises(OSError, match=r".") as failure:
        folder.create("a.seg", 1 << 60)
    assert failure.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert folder.names() == []


def test_what_was_never_finished_is_removed_at_the_next_start(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    first.create("a.seg", SIZE).close()
    first.close()
    (tmp_path / ".new-b.seg").write_bytes(b"half")
    again = Folder(tmp_path)
    assert again.names() == ["a.seg"]
    again.close()


def test_one_process_has_a_folder(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from kvstore.tiers.device import Folder, FolderInUse\n"
        "try: Folder(pathlib.Path(sys.argv[1]))\n"
        "except FolderInUse as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    mine = Folder(tmp_path)
    with pytest.raises(FolderInUse, match="another process uses the folder"):
        Folder(tmp_path)
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "another process uses the folder" in said.stdout, said.stderr
    mine.close()
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == ""


def test_a_link_is_no_segment(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(SIZE))
    (folder.path / "a.seg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r".") as failure:
        folder.open("a.seg")
    assert failure.value.errno == errno.ELOOP


def test_a_file_system_without_direct_access_serves_too() -> None:
    path = Path("/dev/shm") / f"kvstore-test-{os.getpid()}"
    path.write_bytes(bytes(SIZE))
    try:
        device = DirectFile(path)
        data = filled(SIZE)
        device.write(0, [data])
        device.sync()
        assert read_bytes(device, 0, SIZE) == data
        device.close()
    finally:
        path.unlink()


def test_a_closed_device_moves_nothing(folder: Folder) -> None:
    device = folder.create("a.seg", SIZE)
    device.close()
    device.close()
    with pytest.raises(OSError, match=r"."):
        device.read(0, [aligned(BLOCK_BYTES)])


# -- the disk of the crash tests ---------------------------------------------------------------------------------------


def test_a_crash_keeps_what_was_synced_and_of_the_rest_old_or_new_blocks() -> None:
    disk = MemoryDisk()
    device = disk.create("a", 64 * BLOCK_BYTES)
    device.write(0, [memoryview(bytearray(b"1" * 64 * BLOCK_BYTES))])
    device.sync()
    device.write(0, [memoryview(bytearray(b"2" * 64 * BLOCK_BYTES))])
    left = disk.after_crash(random.Random(1)).open("a").content
    blocks = [bytes(left[i : i + BLOCK_BYTES]) for i in range(0, len(left), BLOCK_BYTES)]
    assert set(blocks) == {b"1" * BLOCK_BYTES, b"2" * BLOCK_BYTES}


def test_a_crash_comes_where_it_was_ordered() -> None:
    disk, seen = MemoryDisk(), []

    def third(what: str, name: str) -> None:
        seen.append(what)
        if len(seen) == 3:
            raise Crashed

    disk.before = third
    device = disk.create("a", 4 * BLOCK_BYTES)
    with pytest.raises(Crashed):
        device.write(0, [aligned(BLOCK_BYTES), aligned(BLOCK_BYTES)])
    assert seen == ["create", "write", "write"]
    assert device.unsynced == {0}
