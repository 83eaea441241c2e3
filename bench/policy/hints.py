"""Hints as clients would give them, with their errors: drawn from what a trace's sessions did next.

`over`: share of the true ends that are announced. `wrong`: share of the announcements that are false. `sigma`: the
lognormal error of the promised time, None = nothing is promised. `tool`: only gaps of up to a minute are promised, all
of them as 15 s; `flip`: for this share of the requests the other way round. `bias`: factor on the promised time. `lie`:
share of the ends that promise a return. What comes after the end of a trace counts where it is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bench.policy.figures import CAPACITIES, ORACLE, Cell
from bench.policy.play import Played
from bench.report import Row
from kvstore.core.eviction.base import TouchHint
from kvstore.workload.trace import TraceRequest
from kvstore_wire.limits import MAX_NEXT_USE

_TOOL_MOST_S, _TOOL_SAID_S = 60.0, 15.0
_SEED = 8
_LEAST_S = 0.001
_HUB_CHILDREN = 3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sayings:
    """What clients say, and how wrong they are."""

    over: float = 0.0
    wrong: float = 0.0
    sigma: float | None = None
    tool: bool = False
    flip: float = 0.0
    bias: float = 1.0
    lie: float = 0.0


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


@dataclass(frozen=True)
class Sessions:
    """Whose each request is, and the seconds until its session's next one, -1 where there is none."""

    of: Sequence[int]
    gaps_s: Floats


def sessions_of(requests: Sequence[TraceRequest], count: int) -> Sessions:
    """Tells of the first `count` requests; the others are what came after the end."""
    names: list[int] = [r.session for r in requests if r.session is not None]
    if len(names) != len(requests):
        names = _guessed(requests)
    following: dict[int, float] = {}
    gaps_s = np.full(len(requests), -1.0)
    for number in range(len(requests) - 1, -1, -1):
        name, time_s = names[number], requests[number].time_s
        if name in following:
            gaps_s[number] = max(_LEAST_S, following[name] - time_s)
        following[name] = time_s
    return Sessions(names[:count], gaps_s[:count])


def _guessed(requests: Iterable[TraceRequest]) -> list[int]:
    """Follows the longest known prefix; a new session begins where many go on from the same block."""
    owner: dict[int, int] = {}
    children: dict[int, set[int]] = {}
    found = []
    for number, request in enumerate(requests):
        ids: list[int] = request.block_ids.tolist()
        known = sum(block in owner for block in ids)
        tail = ids[known - 1] if known else None
        is_new = known < 2 or tail is None or len(children.get(tail, ())) >= _HUB_CHILDREN
        session = number if is_new or tail is None else owner[tail]
        for parent, child in pairwise(ids):
            children.setdefault(parent, set()).add(child)
        owner.update(dict.fromkeys(ids, session))
        found.append(session)
    return found


def hinted(trace: Played, sessions: Sessions, sayings: Sayings, *, seed: int = _SEED) -> Played:
    """Returns the trace with what its clients say of it."""
    gaps_s = sessions.gaps_s
    rng = np.random.default_rng(seed)
    first, second, third, normal, last = (
        rng.random(len(gaps_s)),
        rng.random(len(gaps_s)),
        rng.random(len(gaps_s)),
        rng.standard_normal(len(gaps_s)),
        rng.random(len(gaps_s)),
    )
    ends = gaps_s < 0
    over = ends & (first < sayings.over)
    if sayings.wrong:
        wanted = over.sum() * sayings.wrong / (1 - sayings.wrong)
        over |= ~ends & (second < wanted / max(1, int((~ends).sum())))
    promised_s = np.zeros(len(gaps_s))
    if sayings.tool:
        is_tool = (gaps_s >= 0) & (gaps_s <= _TOOL_MOST_S)
        promised_s[is_tool ^ (third >= 1 - sayings.flip)] = _TOOL_SAID_S
    elif sayings.sigma is not None:
        told = gaps_s * np.exp(sayings.sigma * normal) * sayings.bias
        promised_s[~ends] = np.maximum(_LEAST_S, told[~ends])
        liars = ends & ~over & (last < sayings.lie)
        promised_s[liars] = rng.choice(gaps_s[~ends], int(liars.sum()))
    hints = [
        TouchHint(0 if is_over else _on_the_wire(seconds), session + 1)
        for is_over, seconds, session in zip(over.tolist(), promised_s.tolist(), sessions.of, strict=True)
    ]
    return replace(trace, hints=hints)


def _on_the_wire(seconds: float) -> int | None:
    """As clients send it: rounded up to a power of two of seconds."""
    if not seconds:
        return None
    return min(MAX_NEXT_USE, max(1, 1 + math.ceil(math.log2(max(1.0, seconds)))))
