"""Recorded agent sessions, each on a clock of its own, merged into one stream.

A line is one session: `block` (tokens), `req` = [seconds from session start, input tokens, output tokens, kind,
agent, think seconds, api seconds, [[first id, run length], ...]] a request.

Rules: the source has no absolute times, so the merge assumes them; ids are local to a session and stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.workload.lines import MAX_TOKENS, Record
from kvstore.workload.trace import BlockIds, TraceRequest

_REQUEST_FIELDS = 8
_LOCAL_ID_BITS = 32
_MAX_AGENT = 1 << 16
_GOLDEN_RATIO_FRACTION = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class SessionMerge:
    """Which sessions are kept and how their clocks are laid over each other.

    Session n is kept if n % every == phase. Kept sessions start at the multiples of the golden ratio within
    `starts_over_s`, which spreads any count of them evenly; requests after `cut_s` are dropped; `group` source blocks
    make one block of the trace, named by the last id of the group.
    """

    every: int = 6
    phase: int = 0
    starts_over_s: float = 3600.0
    cut_s: float = 7200.0
    group: int = 8

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 <= self.phase < self.every:
            raise ValueError(f"phase: is {self.phase}, outside 0..every - 1 with every = {self.every}")
        if self.starts_over_s < 0 or self.cut_s < 0:
            raise ValueError(f"starts_over_s, cut_s: are {self.starts_over_s}, {self.cut_s}, below 0")
        if self.group < 1:
            raise ValueError(f"group: is {self.group}, below 1")

    def keeps(self, index: int) -> bool:
        """Return whether the session of this index is part of the stream."""
        return index % self.every == self.phase

    def start_s(self, index: int) -> float:
        """Return when the kept session of this index starts."""
        return (index // self.every * _GOLDEN_RATIO_FRACTION) % 1.0 * self.starts_over_s


class SessionReader:
    """Turns session records into requests on the merged clock; numbers each agent of each session as one session."""

    def __init__(self, merge: SessionMerge) -> None:
        self._merge = merge
        self._numbers: dict[tuple[int, int], int] = {}
        self._turns: dict[int, int] = {}

    def requests(self, index: int, record: Record) -> Iterator[TraceRequest]:
        """Yield the requests of one session up to the cut. Raises: TraceError naming the field."""
        source_tokens = record.tokens("block")
        if source_tokens < 1:
            raise record.fault("block", "is 0, below 1")
        for position, entry in enumerate(record.items(record.value("req"), field="req")):
            field = f"req[{position}]"
            values = record.items(entry, field=field)
            if len(values) != _REQUEST_FIELDS:
                raise record.fault(field, f"has {len(values)} values, not {_REQUEST_FIELDS}")
            request = self._request(index, record, field=field, values=values, source_tokens=source_tokens)
            if request.time_s <= self._merge.cut_s:
                yield request

    def _request(
        self, index: int, record: Record, *, field: str, values: list[object], source_tokens: int
    ) -> TraceRequest:
        offset_s = record.seconds(values[0], field=f"{field}[0]", units_per_s=1)
        input_tokens = record.whole(values[1], field=f"{field}[1]", limit=MAX_TOKENS)
        session = self._session(index, agent=record.whole(values[4], field=f"{field}[4]", limit=_MAX_AGENT))
        local_ids = _expanded(record, values[7], field=f"{field}[7]", block_count=input_tokens // source_tokens)
        self._turns[session] = turn = self._turns.get(session, 0) + 1
        return TraceRequest(
            time_s=self._merge.start_s(index) + offset_s,
            session=session,
            turn=turn,
            input_tokens=input_tokens,
            output_tokens=record.whole(values[2], field=f"{field}[2]", limit=MAX_TOKENS),
            block_ids=_apart(local_ids[self._merge.group - 1 :: self._merge.group], index),
        )

    def _session(self, index: int, *, agent: int) -> int:
        return self._numbers.setdefault((index, agent), len(self._numbers) + 1)


def _apart(local_ids: BlockIds, index: int) -> BlockIds:
    """Return the ids with the session's index above them, so that no two sessions share one."""
    ids: BlockIds = local_ids | np.int64(index << _LOCAL_ID_BITS)
    ids.flags.writeable = False
    return ids


def _expanded(record: Record, value: object, *, field: str, block_count: int) -> BlockIds:
    """Expand runs of consecutive ids, after checking that they name exactly the full blocks."""
    runs = [_run(record, entry, field=field) for entry in record.items(value, field=field)]
    named = sum(length for _, length in runs)
    if named != block_count:
        raise record.fault(field, f"names {named} blocks where the prompt has {block_count} full ones")
    if not runs:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(first, first + length, dtype=np.int64) for first, length in runs])


def _run(record: Record, value: object, *, field: str) -> tuple[int, int]:
    pair = record.items(value, field=field)
    if len(pair) != 2:
        raise record.fault(field, f"has a run of {len(pair)} values, not [first id, length]")
    first = record.whole(pair[0], field=field, limit=(1 << _LOCAL_ID_BITS) - 1)
    length = record.whole(pair[1], field=field, limit=(1 << _LOCAL_ID_BITS) - first)
    return first, length
