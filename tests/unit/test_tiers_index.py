"""The index of the warm tier, in a real database."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.index import Index, IndexBroken, Located, NamespaceAt, PartAt, SegmentAt, key_of

CACHE = 8 << 20


def key(number: int, size: int = 32) -> bytes:
    return random.Random(number).randbytes(size)


def located(number: int, parts: int = 1) -> Located:
    places = [PartAt(p, 8192 * (p + 1), 5000 + p, 2**64 - 1 - number) for p in range(parts)]
    return Located(1.5 + number, float(number % 2), number, 2**63 + number, tuple(places))


def filled(index: Index, count: int, namespace_id: int = 1) -> None:
    change = index.change()
    for i in range(count):
        change.put_block(namespace_id, key(i), located(i))
    index.apply(change)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(path: Path) -> Iterator[Index]:
    made = Index(path, cache_bytes=CACHE)
    yield made
    made.close()
    made.close()


@pytest.mark.parametrize("parts", [1, 64])
def test_a_place_is_what_its_bytes_say(parts: int) -> None:
    place = located(3, parts)
    assert Located.of_bytes(place.to_bytes()) == place
    assert (place.life, place.start, place.size_bytes) == ((3, 2**63 + 3), 8192, 8192 * parts)


def test_what_was_put_is_found_in_the_order_of_the_question(index: Index) -> None:
    filled(index, 100)
    asked = [key(5), key(1000), key(99), key(0, 16), key(5)]
    assert index.find(1, asked) == [located(5), None, located(99), None, located(5)]
    assert index.find(2, [key(5)]) == [None], "a block of another namespace"
    assert index.find(1, []) == []


def test_a_change_is_there_after_the_next_start(path: Path, index: Index) -> None:
    change = index.change()
    change.put_block(7, key(1, 64), located(1, 3))
    change.put_segment(2, SegmentAt(41, 1000, 2**40))
    change.put_namespace(b"d" * 32, NamespaceAt(7, b"the message"))
    index.apply(change)
    index.close()
    again = Index(path, cache_bytes=CACHE)
    assert again.find(7, [key(1, 64)]) == [located(1, 3)]
    assert again.segments() == {2: SegmentAt(41, 1000, 2**40)}
    assert again.namespaces() == {b"d" * 32: NamespaceAt(7, b"the message")}
    assert list(again.blocks()) == [(7, key(1, 64), located(1, 3))]
    again.close()


def test_what_was_dropped_is_not_found(index: Index) -> None:
    filled(index, 10)
    filled(index, 10, namespace_id=2)
    filled(index, 10, namespace_id=3)
    change = index.change()
    change.drop_block(1, key(3))
    change.drop_block(1, key(77))  # Never there.
    change.drop_blocks_of(2)
    change.drop_segment(5)
    change.drop_namespace(b"d" * 32)
    index.apply(change)
    assert index.find(1, [key(3), key(4)]) == [None, located(4)]
    assert index.find(2, [key(i) for i in range(10)]) == [None] * 10
    assert index.find(3, [key(9)]) == [located(9)]
    assert sum(1 for _ in index.blocks()) == 19


def test_one_namespace_is_looked_through_as_it_was_when_that_began(index: Index) -> None:
    for namespace in (1, 2, 3):
        filled(index, 50, namespace_id=namespace)
    looking = index.blocks(2)
    first = next(looking)
    change = index.change()
    change.drop_blocks_of(2)
    index.apply(change)
    found = [first, *looking]
    assert sorted(k for _, k, _ in found) == sorted(key(i) for i in range(50))
    assert {namespace for namespace, _, _ in found} == {2}
    assert list(index.blocks(2)) == list(index.blocks(77)) == []


def test_blocks_by_the_many_say_what_they_say_one_by_one(index: Index) -> None:
    change = index.change()
    tag = bytes(range(16))
    for i in range(200):
        parts = [PartAt(p, 4096 * (3 * p + i), 4097 * (p + 1), i, tag if i % 3 == 0 else b"") for p in range(1 + i % 4)]
        change.put_block(1 + i % 2, key(i), Located(0.5 + i, float(i % 5), i, 2**40 + i, tuple(parts)))
    index.apply(change)
    found = {}
    for rows in index.rows():
        columns = (rows.created, rows.expires, rows.segment, rows.sequence, rows.start, rows.size_bytes)
        found.update({key_of(k): row for k, *row in zip(rows.key, *(c.tolist() for c in columns), strict=True)})
    assert found == {
        (n, k): [at.created, at.expires, at.segment, at.sequence, at.start, at.size_bytes]
        for n, k, at in index.blocks()
    }
    assert len(found) == 200


def test_a_change_waits_for_a_database_that_is_behind_and_holds_nobody_up(index: Index) -> None:
    blocks = index._families["blocks"]
    behind = {"level0_slowdown_writes_trigger": "1", "level0_stop_writes_trigger": "1"}
    blocks.set_options({**behind, "level0_file_num_compaction_trigger": "100"})
    filled(index, 100)
    blocks.flush()  # One file is one too many from now on.
    waiting = threading.Thread(target=filled, args=(index, 5, 2))
    waiting.start()
    time.sleep(0.1)  # This thread runs: the lock of the interpreter is free.
    assert waiting.is_alive()
    assert index.find(2, [key(0)]) == [None]
    blocks.set_options({"level0_slowdown_writes_trigger": "20", "level0_stop_writes_trigger": "36"})
    waiting.join(60)
    assert index.find(2, [key(0), key(4)]) == [located(0), located(4)]


def test_after_a_disk_that_was_full_a_database_works_once_it_was_opened_anew(path: Path) -> None:
    code = (
        "import pathlib, resource, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.test_tiers_index import *\n"
        "index = Index(pathlib.Path(sys.argv[1]), cache_bytes=CACHE)\n"
        "filled(index, 1000)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))\n"
        "with pytest.raises(IndexBroken, match='too large'):\n"
        "    for namespace in range(2, 50):\n"
        "        filled(index, 1000, namespace)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "with pytest.raises(IndexBroken):\n"
        "    filled(index, 10, 60)\n"
        "index.reopen()\n"
        "filled(index, 10, 60)\n"
        "assert index.find(1, [key(i) for i in range(1000)]) == [located(i) for i in range(1000)]\n"
        "assert index.find(60, [key(9)]) == [located(9)]\n"
        "index.close()"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(path), str(root)], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_change_that_is_never_applied_changes_nothing(index: Index) -> None:
    index.change().put_block(1, key(1), located(1))
    assert index.find(1, [key(1)]) == [None]


def test_a_change_that_was_applied_outlives_a_kill(path: Path) -> None:
    code = (
        "import os, sys, pathlib; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.test_tiers_index import *\n"
        "index = Index(pathlib.Path(sys.argv[1]), cache_bytes=CACHE)\n"
        "filled(index, 1000)\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(path), str(root)], capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    index = Index(path, cache_bytes=CACHE)
    assert index.find(1, [key(i) for i in range(1000)]) == [located(i) for i in range(1000)]
    index.close()


def test_a_torn_end_of_the_log_costs_what_was_torn(path: Path) -> None:
    index = Index(path, cache_bytes=CACHE)
    filled(index, 10)
    change = index.change()
    change.put_block(1, key(500), located(500))
    index.apply(change)
    copy = path.with_name("copy")
    shutil.copytree(path, copy)  # As a kill leaves it: nothing was closed.
    index.close()
    log = max(copy.glob("*.log"), key=lambda p: p.name)
    log.write_bytes(log.read_bytes()[:-7])
    again = Index(copy, cache_bytes=CACHE)
    assert again.find(1, [key(0), key(9), key(500)]) == [located(0), located(9), None]
    again.close()


def test_a_database_is_opened_once(path: Path, index: Index) -> None:
    with pytest.raises(IndexBroken, match=r"(?i)lock"):
        Index(path, cache_bytes=CACHE)
    filled(index, 1)


@pytest.mark.parametrize("what", ["CURRENT", "MANIFEST-*"])
def test_a_database_that_is_damaged_says_so(path: Path, what: str) -> None:
    index = Index(path, cache_bytes=CACHE)
    filled(index, 10)
    index.close()
    for found in path.glob(what):
        found.write_bytes(b"\xff" * 100)
    with pytest.raises(IndexBroken, match=str(path)):
        Index(path, cache_bytes=CACHE)


@pytest.mark.parametrize("at", [0.0, 0.5])
def test_looking_through_a_damaged_table_says_so(path: Path, at: float) -> None:
    index = Index(path, cache_bytes=CACHE)
    filled(index, 1000)
    index._families["blocks"].flush()
    index.close()
    table = max(path.glob("*.sst"), key=lambda p: p.stat().st_size)
    content = bytearray(table.read_bytes())
    content[int(at * len(content)) : int(at * len(content)) + 32] = bytes(32)
    table.write_bytes(content)
    index = Index(path, cache_bytes=CACHE)
    with pytest.raises(IndexBroken, match="Corruption"):
        list(index.blocks())
    with pytest.raises(IndexBroken, match="Corruption"):
        list(index.rows())
    index.close()


def test_a_folder_that_is_no_database_says_so(path: Path) -> None:
    path.write_bytes(b"a file")
    with pytest.raises(IndexBroken, match=str(path)):
        Index(path, cache_bytes=CACHE)


def test_a_closed_index_answers_nothing(path: Path) -> None:
    index = Index(path, cache_bytes=CACHE)
    index.close()
    with pytest.raises((IndexBroken, KeyError)):
        index.find(1, [key(1)])
