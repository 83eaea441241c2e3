"""Trace files: what is read, and what a broken one says."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvstore.workload.formats import read_trace
from kvstore.workload.generate import generate, write_jsonl
from kvstore.workload.lines import MAX_LINE_BYTES, TraceError
from kvstore.workload.profiles import PROFILES
from kvstore.workload.sessions import SessionMerge

Fields = dict[str, object]

KEEP_ALL = SessionMerge(every=1, phase=0, starts_over_s=100.0, cut_s=50.0, group=2)


def mooncake(time_ms: object, input_length: object, ids: object) -> Fields:
    return {"timestamp": time_ms, "input_length": input_length, "output_length": 7, "hash_ids": ids}


def generated(input_length: int, ids: list[int], *, time_ms: int = 0) -> Fields:
    return {"session": 1, "turn": 1, **mooncake(time_ms, input_length, ids)}


def session(requests: list[object]) -> Fields:
    return {"id": "s", "block": 64, "tool_tokens": 1, "system_tokens": 1, "req": requests}


def session_request(time_s: object, input_tokens: object, runs: object, *, agent: int = 0) -> list[object]:
    return [time_s, input_tokens, 9, "n", agent, None, 1.5, runs]


def written(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fault_of(path: Path, *, block_tokens: int | None = None, merge: SessionMerge = KEEP_ALL) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read_trace(path, block_tokens=block_tokens, merge=merge)
    assert str(path) in str(caught.value)
    return caught.value


def test_mooncake_drops_the_partly_filled_block(tmp_path: Path) -> None:
    path = written(
        tmp_path / "conv.jsonl",
        [mooncake(0, 1100, [0, 1, 2]), mooncake(3000, 1024, [0, 1]), mooncake(3500, 100, [5]), mooncake(4000, 0, [])],
    )
    trace = read_trace(path)
    assert (trace.name, trace.block_tokens) == ("conv", 512)
    assert [request.block_ids.tolist() for request in trace.requests] == [[0, 1], [0, 1], [], []]
    assert [request.time_s for request in trace.requests] == [0.0, 3.0, 3.5, 4.0]
    assert {(request.session, request.turn, request.output_tokens) for request in trace.requests} == {(None, 1, 7)}
    assert (trace.accesses(), trace.distinct_blocks(), trace.span_s()) == (4, 2, 4.0)


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain.jsonl.gz", [mooncake(0, 512, [1])])
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).requests[0].block_ids.tolist() == [1]
    assert read_trace(str(plain)).name == "plain"


def test_mooncake_with_another_stated_block_size(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [mooncake(0, 40, [1, 2, 3])])
    assert read_trace(path, block_tokens=16).requests[0].block_ids.tolist() == [1, 2]
    assert "block_tokens" in str(fault_of(path))


def test_block_ids_cannot_be_written_to(tmp_path: Path) -> None:
    request = read_trace(written(tmp_path / "t.jsonl", [mooncake(0, 1024, [1, 2])])).requests[0]
    assert request.block_ids.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        request.block_ids[0] = 3


def test_requests_are_put_in_time_order_and_ties_keep_file_order(tmp_path: Path) -> None:
    lines = [mooncake(5000, 512, [1]), mooncake(0, 512, [2]), mooncake(5000, 512, [3]), mooncake(0, 512, [4])]
    trace = read_trace(written(tmp_path / "t.jsonl", lines))
    assert [request.block_ids.tolist() for request in trace.requests] == [[2], [4], [1], [3]]


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(mooncake(0, 512, [1])) + "\n\n" + json.dumps(mooncake(-1, 512, [1])))
    fault = fault_of(path)
    assert (fault.line_number, fault.field) == (4, "timestamp")


@pytest.mark.parametrize("profile", ["api", "chat", "agent"])
def test_generated_lines_come_back_with_the_block_size_inferred(tmp_path: Path, profile: str) -> None:
    requests = list(islice(generate(PROFILES[profile], seed=3), 200))
    text = io.StringIO()
    write_jsonl(requests, text)
    path = tmp_path / "gen.jsonl"
    path.write_text(text.getvalue())
    trace = read_trace(path)
    assert trace.block_tokens == PROFILES[profile].block_tokens
    for read, made in zip(trace.requests, requests, strict=True):
        assert read.block_ids.tolist() == made.block_ids.tolist()
        assert (read.session, read.turn, read.input_tokens) == (made.session, made.turn, made.input_tokens)
        assert read.output_tokens == made.output_tokens
        assert read.time_s == pytest.approx(made.time_s, abs=0.0006)


def test_generated_lines_that_leave_the_block_size_open_need_it_stated(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [generated(512, []), generated(1000, [1])])
    fault = fault_of(path)
    assert (fault.field, fault.problem) == ("block_tokens", "the lines agree with 513..1000; state the block size")
    assert read_trace(path, block_tokens=700).block_tokens == 700


def test_generated_lines_that_no_block_size_fits(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [generated(1600, list(range(100))), generated(1600, list(range(99)))])
    fault = fault_of(path)
    assert (fault.line_number, fault.field) == (2, "hash_ids")


def test_a_stated_block_size_is_held_against_each_generated_line(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [generated(1600, list(range(100)))])
    assert read_trace(path, block_tokens=16).block_tokens == 16
    assert fault_of(path, block_tokens=32).field == "hash_ids"


def test_a_generated_block_size_that_is_no_power_of_two(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [generated(480, list(range(10))), generated(47, []), generated(95, [1])])
    assert read_trace(path).block_tokens == 48


def test_sessions_are_merged_on_one_clock_with_ids_apart(tmp_path: Path) -> None:
    lines = [
        session([session_request(0.0, 64 * 5 + 3, [[1, 3], [10, 2]]), session_request(60.0, 64, [[1, 1]])]),
        session([session_request(0.0, 64 * 4, [[1, 4]]), session_request(1.0, 64 * 2, [[7, 2]], agent=1)]),
    ]
    merge = SessionMerge(every=1, phase=0, starts_over_s=10.0, cut_s=50.0, group=2)
    trace = read_trace(written(tmp_path / "s.jsonl", lines), merge=merge)
    assert trace.block_tokens == 128
    second_start_s = 10.0 * 0.6180339887498949
    assert [request.time_s for request in trace.requests] == pytest.approx([0.0, second_start_s, second_start_s + 1])
    apart = 1 << 32
    assert [request.block_ids.tolist() for request in trace.requests] == [[2, 10], [apart + 2, apart + 4], [apart + 8]]
    assert [(request.session, request.turn) for request in trace.requests] == [(1, 1), (2, 1), (3, 1)]


def test_sessions_that_are_not_kept_are_not_even_parsed(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    kept = json.dumps(session([session_request(t, 128, [[1, 2]]) for t in (0.0, 1.0, 99.0)]))
    path.write_text(f"{kept}\nnot JSON\n{kept}\n")
    merge = SessionMerge(every=2, phase=0, starts_over_s=0.0, cut_s=10.0, group=2)
    assert [(request.session, request.turn) for request in read_trace(path, merge=merge).requests] == [
        (1, 1),
        (2, 1),
        (1, 2),
        (2, 2),
    ]


def test_sessions_of_unequal_block_size_are_refused(tmp_path: Path) -> None:
    other = {**session([]), "block": 32}
    path = written(tmp_path / "s.jsonl", [session([]), other])
    assert (fault_of(path).line_number, fault_of(path).field) == (2, "block")
    assert fault_of(path, block_tokens=512).line_number == 1


def test_a_merge_that_keeps_no_session(tmp_path: Path) -> None:
    path = written(tmp_path / "s.jsonl", [session([])])
    assert "no session" in fault_of(path, merge=SessionMerge(every=6, phase=5)).problem


@pytest.mark.parametrize(
    ("request_values", "field"),
    [
        (session_request(-1.0, 64, [[1, 1]]), "req[0][0]"),
        (session_request(float("nan"), 64, [[1, 1]]), "req[0][0]"),
        (session_request(0.0, -64, [[1, 1]]), "req[0][1]"),
        (session_request(0.0, 64, [[1, -1]]), "req[0][7]"),
        (session_request(0.0, 64, [[1]]), "req[0][7]"),
        (session_request(0.0, 64, [[1, 1 << 31]]), "req[0][7]"),
        (session_request(0.0, 640, [[1, 9]]), "req[0][7]"),
        (session_request(0.0, 64, [[1, 1]], agent=-1), "req[0][4]"),
        ([0.0, 64, 9], "req[0]"),
        ("text", "req[0]"),
    ],
)
def test_a_broken_session_request_is_named(tmp_path: Path, request_values: object, field: str) -> None:
    fault = fault_of(written(tmp_path / "s.jsonl", [session([request_values])]))
    assert (fault.line_number, fault.field) == (1, field)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (mooncake(-1, 512, [1]), "timestamp"),
        (mooncake("0", 512, [1]), "timestamp"),
        (mooncake(float("inf"), 512, [1]), "timestamp"),
        (mooncake(0, -512, [1]), "input_length"),
        (mooncake(0, 512.5, [1]), "input_length"),
        (mooncake(0, True, [1]), "input_length"),
        (mooncake(0, 1 << 40, [1]), "input_length"),
        (mooncake(0, 512, [-1]), "hash_ids"),
        (mooncake(0, 512, [1.5]), "hash_ids"),
        (mooncake(0, 512, [1 << 63]), "hash_ids"),
        (mooncake(0, 512, "1"), "hash_ids"),
        (mooncake(0, 1536, [1, 2]), "hash_ids"),
        (mooncake(0, 512, [1, 2, 3]), "hash_ids"),
        ({"timestamp": 0, "input_length": 512, "hash_ids": [1]}, "output_length"),
        ([1, 2], "line"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, field: str) -> None:
    fault = fault_of(written(tmp_path / "t.jsonl", [mooncake(0, 512, [1]), line]))
    assert (fault.line_number, fault.field) == (2, field)
    assert "line 2" in str(fault)


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"", mtime=0)])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    assert "empty" in fault_of(path).problem


def test_a_truncated_gzip_stream(tmp_path: Path) -> None:
    lines = "".join(json.dumps(mooncake(i, 512 * 50, list(range(i, i + 50)))) + "\n" for i in range(500))
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-2000])
    fault = fault_of(path)
    assert fault.field == "gzip stream"
    assert fault.line_number > 1


def test_a_corrupted_gzip_stream(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps(mooncake(0, 512, [1])).encode()))
    packed[-8] ^= 0xFF
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(packed)
    assert fault_of(path).field == "gzip stream"


def test_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = json.dumps(mooncake(0, 512, [1]))
    path.write_text(text + "\n" + text[:-3])
    fault = fault_of(path)
    assert (fault.line_number, fault.field) == (2, "line")


def test_a_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"1" * (MAX_LINE_BYTES + 10), compresslevel=1))
    assert str(MAX_LINE_BYTES) in fault_of(path).problem


@pytest.mark.parametrize("content", [b"TIMESTAMP,ContextTokens\n", b"\xff\xfe\x00", b"[" * 100_000])
def test_what_is_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    assert fault_of(path).field == "line"


def test_an_unknown_format(tmp_path: Path) -> None:
    assert "unknown format" in fault_of(written(tmp_path / "t", [{"prompt": "x"}])).problem


def test_ids_that_do_not_stand_for_prefixes_are_refused(tmp_path: Path) -> None:
    line = {"chat_id": 1, "parent_chat_id": -1, "turn": 1, **mooncake(0, 16, [1])}
    assert fault_of(written(tmp_path / "t", [line])).field == "chat_id"


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent")


@pytest.mark.parametrize(("every", "phase", "group"), [(0, 0, 1), (2, 2, 1), (2, -1, 1), (1, 0, 0)])
def test_an_impossible_merge_is_refused(every: int, phase: int, group: int) -> None:
    with pytest.raises(ValueError, match=r"phase|group"):
        SessionMerge(every=every, phase=phase, group=group)


def test_generated_lines_without_one_full_block_need_the_size_stated(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [generated(12, [])])
    assert fault_of(path).field == "block_tokens"
    assert read_trace(path, block_tokens=16).accesses() == 0
