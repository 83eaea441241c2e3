"""The index of the warm tier, in a real database."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.index import Index, IndexBroken, Located, NamespaceAt, PartAt, SegmentAt

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


def test_a_change_that_is_never_applied_changes_nothing(index: Index) -> None:
    index.change().put_block(1, key(1), located(1))
    assert index.find(1, [key(1)]) == [None]


def test_a_change_is_durable_when_it_was_applied(path: Path) -> None:
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


def test_a_folder_that_is_no_database_says_so(path: Path) -> None:
    path.write_bytes(b"a file")
    with pytest.raises(IndexBroken, match=str(path)):
        Index(path, cache_bytes=CACHE)


def test_a_closed_index_answers_nothing(path: Path) -> None:
    index = Index(path, cache_bytes=CACHE)
    index.close()
    with pytest.raises((IndexBroken, KeyError)):
        index.find(1, [key(1)])
