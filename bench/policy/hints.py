"""The store's policy with what clients would say of the next use, and what is known of such hints on these traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.policy.figures import CAPACITIES, ORACLE, Cell
from bench.policy.play import Played
from bench.report import Row
from kvstore.core.eviction.base import TouchHint
from kvstore.workload.hints import Sayings, Sessions, said_of
from kvstore_wire.limits import MAX_NEXT_USE

NOTHING = Sayings()
ENDS, TOOLS = "over 70 %, 5 % wrong", "tool calls as 15 s, 10 % wrong"
BOTH, WORSE = "over 70 %, 5 % wrong; N, sigma 0.5", "over 40 %; N, sigma 1"
EXACT = "N, exact"
SAYINGS: Mapping[str, Sayings] = {
    "nothing": NOTHING,
    ENDS: Sayings(over=0.7, wrong=0.05),
    BOTH: Sayings(over=0.7, sigma=0.5, wrong=0.05),
    WORSE: Sayings(over=0.4, sigma=1.0),
    TOOLS: Sayings(sigma=0.0, tool=True, flip=0.1),
    EXACT: Sayings(sigma=0.0),
    "N three times too short, sigma 0.5": Sayings(sigma=0.5, bias=1 / 3),
    "over, 20 % wrong": Sayings(over=1.0, wrong=0.2),
    "N, sigma 0.5; every end promises a return": Sayings(sigma=0.5, lie=1.0),
}
# What a study of these hints reached on these traces with the worse of its two policies, less half a point: prefix hit
# in percent at 1, 2, 5, 10, 20 and 50 % of the distinct blocks.
KNOWN: Mapping[tuple[str, str], Sequence[float]] = {
    ("mooncake_conversation", ENDS): (6.5, 14.3, 26.6, 33.7, 35.9, 37.7),
    ("mooncake_conversation", BOTH): (19.9, 26.2, 34.7, 35.6, 36.1, 37.7),
    ("mooncake_conversation", WORSE): (18.4, 24.9, 35.2, 37.1, 37.2, 37.6),
    ("claude_code_sessions", ENDS): (1.4, 6.8, 39.5, 76.6, 91.3, 95.1),
    ("claude_code_sessions", TOOLS): (14.8, 28.3, 58.3, 81.7, 90.6, 94.8),
    ("claude_code_sessions", BOTH): (19.9, 35.4, 66.2, 85.9, 93.1, 95.2),
    ("claude_code_sessions", WORSE): (16.3, 29.3, 60.9, 83.7, 92.7, 95.2),
    ("gen:api", ENDS): (46.7, 50.0, 51.1, 51.4, 51.8, 52.3),
    ("gen:api", BOTH): (49.8, 51.0, 51.3, 51.6, 51.9, 52.3),
    ("gen:api", WORSE): (49.4, 51.5, 52.0, 52.2, 52.3, 52.5),
    ("gen:chat", ENDS): (9.5, 17.4, 30.5, 34.9, 36.2, 37.5),
    ("gen:chat", BOTH): (24.2, 31.2, 35.3, 35.7, 36.2, 37.5),
    ("gen:chat", WORSE): (22.4, 31.0, 37.5, 37.5, 37.5, 37.5),
    ("gen:agent", ENDS): (9.6, 20.6, 47.0, 73.4, 92.5, 96.2),
    ("gen:agent", TOOLS): (14.3, 24.7, 52.9, 79.7, 92.4, 96.1),
    ("gen:agent", BOTH): (26.5, 41.2, 65.0, 83.2, 94.4, 96.2),
    ("gen:agent", WORSE): (22.9, 36.1, 59.7, 79.9, 94.1, 96.2),
}
_MOST_UNDER_KNOWN = 1.0  # Points: draws of the errors spread by as much.
_OF_ORACLE, _FROM_PERCENT = 0.98, 5.0
_EXACT_TRACES = ("mooncake_conversation", "claude_code_sessions")


def hint_verdicts(cells: Sequence[Cell]) -> list[Row]:
    """What must hold of the store's policy with hints."""
    by = {(cell.trace, cell.policy, cell.percent): cell.prefix for cell in cells}
    rows = []
    for (trace, said), known in KNOWN.items():
        under = [
            target - by[trace, said, percent]
            for percent, target in zip(CAPACITIES, known, strict=True)
            if (trace, said, percent) in by
        ]
        if under:
            rows.append(
                Row(f"{trace}, {said}: most under what is known", max(under), "points", at_most=_MOST_UNDER_KNOWN)
            )
    for trace in _EXACT_TRACES:
        shares = [
            prefix / by[trace, ORACLE, percent]
            for (of, said, percent), prefix in by.items()
            if (of, said) == (trace, EXACT) and percent >= _FROM_PERCENT
        ]
        if shares:
            rows.append(Row(f"{trace}, {EXACT}: least share of the oracle", min(shares), "", at_least=_OF_ORACLE))
    return rows


def hinted(trace: Played, sessions: Sessions, sayings: Sayings) -> Played:
    """Returns the trace with what its clients say of it."""
    said = said_of(sessions, sayings)
    pairs = zip(said.next_use_s.tolist(), said.tags.tolist(), strict=True)
    return replace(trace, hints=[TouchHint(_on_the_wire(seconds), tag) for seconds, tag in pairs])


def _on_the_wire(seconds: float) -> int | None:
    """As clients send it: rounded up to a power of two of seconds."""
    if math.isnan(seconds):
        return None
    return 0 if not seconds else min(MAX_NEXT_USE, 1 + math.ceil(math.log2(max(1.0, seconds))))
