"""Read a trace file; its format is told from its content, never from its name.

Formats, one JSON object a line, plain or gzip:
*mooncake* - `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; 512 tokens a block unless stated; the last
id mostly names a partly filled block, which is dropped.
*generated* - what `kvstore gen` prints: the same with `session` and `turn`, ids of full blocks only. The lines do not
carry the block size: it is the only power of two that gives each line its count of ids, or the caller states it.
*sessions* - one recorded session a line (`req`), merged as SessionMerge says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Literal

from kvstore.workload.block_size import BlockSizeBounds
from kvstore.workload.lines import Record, TraceError, parse_record, read_lines
from kvstore.workload.sessions import SessionMerge, SessionReader
from kvstore.workload.trace import MAX_BLOCK_ID, Trace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512

_DEFAULT_MERGE = SessionMerge()
_COMMON_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(path: Path | str, *, block_tokens: int | None = None, merge: SessionMerge = _DEFAULT_MERGE) -> Trace:
    """Load a trace of any known format, its requests in time order (requests of one instant in file order).

    block_tokens: states the block size; needed only where the file leaves it open. merge: used by session files only.
    Raises: TraceError naming file, line and field; OSError if the file cannot be read.
    """
    path = Path(path)
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens: is {block_tokens}, below 1")
    with closing(read_lines(path)) as lines:
        first = next(lines, None)
        if first is None:
            raise TraceError("the file is empty", path=path, line_number=1, field="line")
        head = parse_record(path, *first)
        kind = _kind(head)
        if kind == "sessions":
            size, requests = _read_sessions(chain([first], lines), path, stated_tokens=block_tokens, merge=merge)
        elif kind == "generated":
            size, requests = _read_generated(_records(head, lines), stated_tokens=block_tokens)
        else:
            size = block_tokens or MOONCAKE_BLOCK_TOKENS
            requests = [_mooncake_request(record, size) for record in _records(head, lines)]
    requests.sort(key=lambda request: request.time_s)
    return Trace(name=_name(path), block_tokens=size, requests=tuple(requests))


def _kind(head: Record) -> Literal["mooncake", "generated", "sessions"]:
    if "req" in head.fields:
        return "sessions"
    if "chat_id" in head.fields:
        # Such traces (Qwen-Bailian) hash a block's own content: equal ids do not mean equal prefixes.
        raise head.fault("chat_id", "ids of this format do not stand for prefixes; they must be chained first")
    if not all(field in head.fields for field in _COMMON_FIELDS):
        raise head.fault("line", f"unknown format: neither `req` nor all of {', '.join(_COMMON_FIELDS)}")
    return "generated" if "session" in head.fields and "turn" in head.fields else "mooncake"


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _records(head: Record, rest: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
    yield head
    for line_number, line in rest:
        yield parse_record(head.path, line_number, line)


def _mooncake_request(record: Record, block_tokens: int) -> TraceRequest:
    """Build a request from a line whose last id may name a partly filled block."""
    input_tokens = record.tokens("input_length")
    full_blocks = input_tokens // block_tokens
    ids = record.block_ids("hash_ids")
    if len(ids) not in (full_blocks, -(-input_tokens // block_tokens)):
        raise record.fault(
            "hash_ids", f"has {len(ids)} ids for {input_tokens} tokens in blocks of {block_tokens} (block_tokens)"
        )
    return TraceRequest(
        time_s=_timestamp_s(record),
        session=None,
        turn=1,
        input_tokens=input_tokens,
        output_tokens=record.tokens("output_length"),
        block_ids=ids[:full_blocks],
    )


def _timestamp_s(record: Record) -> float:
    return record.seconds(record.value("timestamp"), field="timestamp", units_per_s=1000)


def _read_generated(records: Iterator[Record], *, stated_tokens: int | None) -> tuple[int, list[TraceRequest]]:
    """Read lines whose ids name full blocks only, and find the one block size that agrees with them all."""
    bounds = BlockSizeBounds() if stated_tokens is None else BlockSizeBounds(stated_tokens, stated_tokens)
    requests: list[TraceRequest] = []
    for record in records:
        request = _generated_request(record)
        requests.append(request)
        full_blocks = len(request.block_ids)
        narrowed = bounds.narrowed(input_tokens=request.input_tokens, full_blocks=full_blocks)
        if narrowed.is_empty():
            raise record.fault(
                "hash_ids",
                f"has {full_blocks} ids for {request.input_tokens} tokens, which no block size of "
                f"{bounds.low_tokens}..{bounds.high_tokens} tokens gives",
            )
        bounds = narrowed
    size = bounds.only_size()
    if size is None:
        raise record.fault(
            "block_tokens", f"the lines agree with {bounds.low_tokens}..{bounds.high_tokens}; state the block size"
        )
    return size, requests


def _generated_request(record: Record) -> TraceRequest:
    return TraceRequest(
        time_s=_timestamp_s(record),
        session=record.whole(record.value("session"), field="session", limit=MAX_BLOCK_ID),
        turn=record.whole(record.value("turn"), field="turn", limit=MAX_BLOCK_ID),
        input_tokens=record.tokens("input_length"),
        output_tokens=record.tokens("output_length"),
        block_ids=record.block_ids("hash_ids"),
    )


def _read_sessions(
    lines: Iterator[tuple[int, bytes]], path: Path, *, stated_tokens: int | None, merge: SessionMerge
) -> tuple[int, list[TraceRequest]]:
    """Read the kept sessions; lines of the others are skipped unparsed, which is most of the time saved."""
    reader = SessionReader(merge)
    block_tokens = stated_tokens
    requests: list[TraceRequest] = []
    for index, (line_number, line) in enumerate(lines):
        if not merge.keeps(index):
            continue
        record = parse_record(path, line_number, line)
        requests.extend(reader.requests(index, record))
        size = record.tokens("block") * merge.group
        if block_tokens not in (None, size):
            raise record.fault("block", f"gives blocks of {size} tokens, not {block_tokens}")
        block_tokens = size
    if block_tokens is None:
        raise TraceError(f"no session with n % {merge.every} == {merge.phase}", path=path, line_number=1, field="req")
    return block_tokens, requests
