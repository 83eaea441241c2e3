"""The pure parts of the fast channel's benchmarks: bounds, rows, calls of a round, and the raw exchange."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import Counter

import pytest

from bench import channel, fairness
from bench.channel import BOUNDS, Bound, _share, _size
from bench.crew import Crew, until_question
from bench.jobs import MEMCPY, RAW_TCP, SHM, Buffers, Job, keys_of, spans
from bench.players import namespace_of, open_player
from bench.raw import RawClient, serve_connection
from bench.report import Row, grid_of, to_dicts, to_markdown
from bench.rig import cpu_s, on_cores, warm
from bench.worker import (
    GET,
    HOT_PARTS,
    MIXED_CALLS,
    PUT,
    Worker,
    fresh_count,
    hot_indexes,
    merged,
    mixed_calls,
    mixed_of,
    pieces_of,
    walk,
)

KIB, MIB = 1 << 10, 1 << 20
MEMORY_JOB = Job(MEMCPY, "", 4 * KIB, 10)


# -- bounds --------------------------------------------------------------------------------------------------------


def test_the_bounds_are_what_is_required() -> None:
    assert {(b.name, b.ceiling): b.at_least for b in BOUNDS if b.at_least is not None} == {
        ("shm Get, not verified", MEMCPY): 0.85,
        ("shm Get, verified", MEMCPY): 0.7,
        ("shm Put from a registered region", MEMCPY): 0.7,
        ("bulk Get, verified", RAW_TCP): 0.9,
        ("bulk Put", RAW_TCP): 0.85,
    }
    assert dict(channel.SINGLE_MS) == {64 * KIB: 0.12, 2 * MIB: 0.6}
    assert (channel.P99_OVER_P50, channel.VIEW_MS, channel.MATCH_KEYS_PER_S) == (3.0, 1.0, 600_000)
    assert (fairness.SLOWEST_SHARE, fairness.BUSY_OVER_QUIET) == (0.5, 10.0)
    assert (channel.CORES, channel.BATCHES, channel.SINGLE_CALLS, channel.UNCOUNTED_CALLS) == (2, (64, 16), 2000, 50)


def test_a_share_is_the_median_of_neighbouring_rounds_not_of_medians() -> None:
    bound = Bound("ours", GET, "Get", MEMCPY, 0.85)
    row = _share(bound, {"ours": [1.0, 2.0, 4.0], MEMCPY: [0.5, 1.8, 4.0]}, 64)
    assert row.ratio == 0.9
    assert row.holds is True
    assert row.value == pytest.approx(row.ceiling * 0.9 if row.ceiling else 0)
    assert row.name == "Get, 64 x 2 MiB a call"


def test_the_slowest_share() -> None:
    assert fairness.slowest_share([10, 10, 10, 10]) == 1.0
    assert fairness.slowest_share([5, 15]) == 0.5
    assert fairness.slowest_share([0, 0]) == 0.0


def test_sizes_are_written_with_units() -> None:
    assert [_size(size) for size in (64 * KIB, 2 * MIB)] == ["64 KiB", "2 MiB"]


# -- reports -------------------------------------------------------------------------------------------------------


def test_a_missed_bound_says_so_in_every_form() -> None:
    rows = [Row("a | b", 8.0, "GB/s", 10.0, MEMCPY, at_least=0.85), Row("c", 1.0, "ms", at_most=1.0)]
    grid = grid_of("Rates", rows)
    assert [row[-1] for row in grid.rows] == ["MISSED", "ok"]
    assert [row["holds"] for row in to_dicts(rows)] == [False, True]
    page = to_markdown("python -m bench channel", {"cores": "2 cores"}, [grid])
    assert page.startswith("<!-- Written by `python -m bench channel`. -->\n\n- cores: 2 cores\n\n**Rates**\n")
    assert "| a \\| b | 8 GB/s | 10 GB/s (memcpy) | 0.80 | >= 0.85 | MISSED |" in page


# -- the calls of a round ------------------------------------------------------------------------------------------


def test_a_round_takes_all_parts_once_and_the_last_call_may_be_shorter() -> None:
    assert list(spans(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(pieces_of(Job(SHM, "", KIB, 10), 4, 7)) == [(0, 4), (4, 8), (8, 10)]


def test_shorter_rounds_go_on_where_the_last_one_ended() -> None:
    job = Job(SHM, "", KIB, 10, round_calls=2)
    assert list(pieces_of(job, 4, 0)) == [(0, 4), (4, 8)]
    assert list(pieces_of(job, 4, 2)) == [(8, 10), (0, 4)]


def test_neighbours_are_removed_together() -> None:
    assert merged([(8, 10), (0, 4), (4, 8), (8, 10)], 8) == [(8, 10), (0, 8), (8, 10)]
    assert merged([(0, 20), (20, 40)], 8) == [(0, 20), (20, 40)]


@pytest.mark.parametrize(("calls", "batch"), [(1, 256), (10, 4), (25, 1)])
def test_one_of_ten_calls_of_a_mixed_round_is_a_put_of_fresh_parts(calls: int, batch: int) -> None:
    job = Job(SHM, "", KIB, calls * batch, fresh_count=fresh_count(calls, batch))
    played = mixed_of(job, batch, 0)
    assert len(played) == mixed_calls(calls)
    assert Counter(name for name, _, _ in played)[PUT] == len(played) // MIXED_CALLS
    puts = [i for name, first, last in played if name == PUT for i in range(first, last)]
    assert sorted(puts) == list(range(job.part_count, job.part_count + job.fresh_count))
    assert all(last <= job.part_count for name, _, last in played if name == GET)


def test_nine_of_ten_hot_reads_go_to_the_first_parts_and_seeds_differ() -> None:
    drawn = list(itertools.islice(hot_indexes(100, 1), 10_000))
    share = sum(i < HOT_PARTS for i in drawn) / len(drawn)
    assert 0.89 < share < 0.93  # A tenth of the others are among the first too.
    assert set(drawn) == set(range(100))
    assert drawn != list(itertools.islice(hot_indexes(100, 2), 10_000))
    assert list(itertools.islice(walk(3), 7)) == [0, 1, 2, 0, 1, 2, 0]


# -- clients -------------------------------------------------------------------------------------------------------


def test_keys_are_the_same_everywhere_and_owners_and_sizes_have_their_own() -> None:
    job = Job(SHM, "", KIB, 3, fresh_count=1)
    assert keys_of(job) == keys_of(Job(SHM, "elsewhere", KIB, 3, fresh_count=1))
    every = keys_of(job) + keys_of(Job(SHM, "", KIB, 4, owner=1)) + keys_of(Job(SHM, "", 2 * KIB, 4))
    assert len(set(every)) == 12
    assert namespace_of(KIB).name != namespace_of(2 * KIB).name


def test_a_worker_plays_rounds_and_tells_what_it_cannot_do() -> None:
    worker = Worker()
    assert "no player is open" in worker.answer({"do": "clean"})["error"]
    assert worker.answer({"do": "open", **MEMORY_JOB.to_dict()}) == {}
    found = worker.answer({"do": "round", "op": GET, "batch": 4, "at": 0.0})
    assert (found["parts"], len(found["calls_ms"])) == (10, 3)
    assert found["s"] > 0
    assert worker.answer({"do": "calls", "op": PUT, "batch": 5, "first": 1, "count": 3})["parts"] == 15
    window = worker.answer(until_question(GET, batch=1, at=0.0, end=0.0))
    assert (window["parts"], window["calls_ms"]) == (0, [])
    assert "nothing to look up" in worker.answer({"do": "round", "op": "match", "batch": 1, "at": 0.0})["error"]
    assert "KeyError" in worker.answer({"do": "dance"})["error"]
    worker.close()


def test_memory_is_really_copied() -> None:
    buffers = Buffers(MEMORY_JOB.size_bytes, seed=3)
    assert len(set(bytes(buffers.source[:64]))) > 8
    player = open_player(MEMORY_JOB, buffers)
    buffers.target[:4] = b"abcd"
    player.put(0, 10)
    buffers.target[:4] = b"none"
    player.get(0, 1)
    assert bytes(buffers.target[:4]) == b"abcd"
    player.close()
    buffers.close()


def test_an_unknown_kind_is_refused() -> None:
    buffers = Buffers(4 * KIB, seed=0)
    with pytest.raises(ValueError, match="pigeon"):
        open_player(Job("pigeon", "", 4 * KIB, 1), buffers)
    buffers.close()


def test_no_clients_have_no_answers() -> None:
    assert Crew([]).each({"do": "clean"}) == []


# -- the raw exchange ----------------------------------------------------------------------------------------------


def test_raw_bytes_come_back_as_they_were_put() -> None:
    held = warm(64 * KIB)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = RawClient(str(listener.getsockname()[1]))
        connection = listener.accept()[0]
    server = threading.Thread(target=serve_connection, args=(connection, held))
    server.start()
    client.put(4 * KIB, memoryview(bytes(range(256)) * 16))
    into = warm(8 * KIB)
    client.get(0, into)
    assert bytes(into) == b"\x01" * 4 * KIB + bytes(range(256)) * 16
    answer = warm(10)
    client.ask(b"k" * 320, answer)
    assert bytes(answer) == b"\x01" * 10
    client.close()
    server.join(10)
    assert not server.is_alive()


def test_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
    assert cpu_s(os.getpid()) > 0
