"""What clients would say of the next use, with their errors: drawn from what a trace's sessions did next.

`over`: share of the true ends that are announced. `wrong`: share of the announcements that are false. `sigma`: the
lognormal error of the promised time, None = nothing is promised. `tool`: only gaps of up to a minute are promised, all
of them as 15 s; `flip`: for this share of the requests the other way round. `bias`: factor on the promised time. `lie`:
share of the ends that promise a return. What comes after the end of a trace counts where it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.workload.trace import TraceRequest

TOOL_MOST_S, TOOL_SAID_S = 60.0, 15.0
SEED = 8
_LEAST_S = 0.001
_HUB_CHILDREN = 3

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]


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


@dataclass(frozen=True)
class Said:
    """What the caller of each request says.

    Shapes: one entry a request. Units: next_use_s seconds until the next one, 0 = over, NaN = no statement. `tags`: of
    the sessions, from 1 on.
    """

    next_use_s: Floats
    tags: Longs


def said_of(sessions: Sessions, sayings: Sayings, *, seed: int = SEED) -> Said:
    """Draws what clients say."""
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
    next_use_s = np.full(len(gaps_s), np.nan)
    if sayings.tool:
        is_tool = (gaps_s >= 0) & (gaps_s <= TOOL_MOST_S)
        next_use_s[is_tool ^ (third >= 1 - sayings.flip)] = TOOL_SAID_S
    elif sayings.sigma is not None:
        told = gaps_s * np.exp(sayings.sigma * normal) * sayings.bias
        next_use_s[~ends] = np.maximum(_LEAST_S, told[~ends])
        liars = ends & ~over & (last < sayings.lie)
        next_use_s[liars] = rng.choice(gaps_s[~ends], int(liars.sum()))
    next_use_s[over] = 0.0
    return Said(next_use_s, np.array(sessions.of, np.int64) + 1)
