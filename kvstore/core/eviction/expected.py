"""Expected reuse: the block goes that is least likely to be asked for again while it could stay.

Blocks are of a kind by how often they were asked for: once, twice, more often. Of each kind the policy learns, with a
half-life, the share `p` that is asked for again, and the mean gap `tau` until then. One queue a kind holds its blocks
in the order of their last touch, so that only the heads of the queues have to be compared: after `a` idle seconds a
block is worth the chance that it is asked for within the time W that blocks stay at all,

    p e^(-a/tau) (1 - e^(-W/tau)) / (1 - p + p e^(-a/tau)).

Blocks that went are remembered for as long as twice as many others go, or `p` would only tell of those that stayed. A
block counts as asked for at least as often as each behind it in a request: one that was forgotten must not leave a hole
in its chain. Source: compared with other policies on public traces of chat, agents and API calls (docs/policies.md);
more kinds (turns, forks of chains) gained less than 0.6 points there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf, log

import numpy as np

from kvstore.core.columns import BlockColumns, Floats, Ids
from kvstore.core.eviction.base import SAME_REQUEST_S, BlockQueue, TouchHint
from kvstore.core.eviction.ghosts import GhostTable
from kvstore.core.few import Rows

KINDS = 3
HALF_LIFE = 20_000  # Touches after which what was learned counts half.
GHOSTS_PER_BLOCK = 2
_FORGETS = 0.5 ** (1 / HALF_LIFE)
_FIRST_GAP_S = _FIRST_STAY_S = 60.0  # Before anything is known.
_STAY_WEIGHT = 0.002  # Of one eviction in the mean time that blocks stay.
_MOST_P, _LEAST_TAU_S = 0.999, 1e-3
_MOST_TOUCHES = 255
_MANY = 24  # Source: measured, from so many on all at once is faster than one by one.


class _Kind:
    """What is known of one kind: `came` touches led to it, `again` of its blocks were asked for again."""

    __slots__ = ("again", "came", "gaps_s", "queue")

    def __init__(self, queue: BlockQueue) -> None:
        self.queue = queue
        self.came, self.again, self.gaps_s = 2.0, 1.0, _FIRST_GAP_S

    def learn(self, again: int, gaps_s: float, came: int) -> None:
        """Takes in how many blocks of this kind were asked for again, after how long in sum, and how many are new."""
        if again:
            forgets = _FORGETS**again
            self.came *= forgets
            self.again = self.again * forgets + again
            self.gaps_s = self.gaps_s * forgets + gaps_s
        self.came += came

    @property
    def p(self) -> float:
        return min(_MOST_P, self.again / self.came)

    @property
    def tau_s(self) -> float:
        return max(_LEAST_TAU_S, self.gaps_s / self.again)

    def worth(self, idle_s: float, stay_s: float) -> float:
        """The chance that a block idle for so long is asked for within `stay_s`."""
        p, tau_s = self.p, self.tau_s
        alive = p * exp(-max(0.0, idle_s) / tau_s)
        return alive * (1 - exp(-stay_s / tau_s)) / (1 - p + alive)

    def worths(self, idle_s: Floats, stay_s: float) -> Floats:
        """As `worth`, of many."""
        p, tau_s = self.p, self.tau_s
        alive = p * np.exp(-np.maximum(0.0, idle_s) / tau_s)
        found: Floats = alive * (1 - exp(-stay_s / tau_s)) / (1 - p + alive)
        return found

    def idle_until_worth(self, worth: float, stay_s: float) -> float:
        """After how many idle seconds a block is worth no more than that; -inf where it never is worth more."""
        p, tau_s = self.p, self.tau_s
        share = worth / max(1e-300, 1 - exp(-stay_s / tau_s))
        if share >= 1:
            return -inf
        alive = (1 - p) * share / (1 - share)
        return -inf if alive >= p else (inf if alive <= 0 else -tau_s * log(alive / p))


class ExpectedReuse:
    """EvictionPolicy by learned worth. Hints are not used.

    Uses the column `touches`: how often each block was asked for, while it was here or not long gone. A touch soon
    after another one belongs to the same request, and counts for nothing but recency; likewise that of a writer who
    names what is here already.
    """

    __slots__ = ("_columns", "_ghosts", "_kinds", "_now", "_stay_s")

    def __init__(self, columns: BlockColumns) -> None:
        self._columns = columns
        self._kinds = [_Kind(BlockQueue(columns.queue_place)) for _ in range(KINDS)]
        self._ghosts = GhostTable()
        self._now = 0.0
        self._stay_s = _FIRST_STAY_S

    def __len__(self) -> int:
        return sum(len(kind.queue) for kind in self._kinds)

    # -- touches -------------------------------------------------------------------------------------------------

    def touch(self, blocks: Rows, now: float, hint: TouchHint, *, asked: bool = True) -> None:
        """O(1) a block, amortised."""
        self._now = max(self._now, now)
        if isinstance(blocks, list) and len(blocks) < _MANY:
            self._touch_few(blocks, now, asked)
        else:
            self._touch_many(np.asarray(blocks, np.int32), now, asked)

    def _touch_few(self, blocks: list[int], now: float, asked: bool) -> None:
        columns, kinds = self._columns, self._kinds
        place, touched, touches = columns.queue_place.cell, columns.cell.touched, columns.cell.touches
        again, gaps_s, came = [0] * KINDS, [0.0] * KINDS, [0] * KINDS
        into: list[list[int]] = [[] for _ in kinds]
        most = 1
        for block in blocks:
            if place[block]:
                count, last_s = touches[block], touched[block]
            else:
                count, last_s = self._ghosts.take(hash(columns.key[block])) or (0, 0.0)
            was, is_new = min(count, KINDS) - 1, not count
            is_again = not is_new and now - last_s >= SAME_REQUEST_S and (asked or not place[block])
            if is_again:
                again[was] += 1
                gaps_s[was] += now - last_s
            most = max(most, min(count + (is_new or is_again), _MOST_TOUCHES))
            kind = min(most, KINDS) - 1
            if was != kind and place[block]:
                kinds[was].queue.remove(block)
            came[kind] += is_new or is_again
            touches[block], touched[block] = most, now
            into[kind].append(block)
        for kind_of, more, gap_s, fresh, rows in zip(kinds, again, gaps_s, came, into, strict=True):
            kind_of.learn(more, gap_s, fresh)
            if rows:
                kind_of.queue.append(rows)

    def _touch_many(self, blocks: Ids, now: float, asked: bool) -> None:
        columns = self._columns
        place = columns.queue_place.at[blocks]
        counts, last_s = columns.touches[blocks].astype(np.int64), columns.touched[blocks]
        new = (place == 0).nonzero()[0]
        if len(new):
            key = columns.key
            counts[new], last_s[new] = self._ghosts.take_many([hash(key[row]) for row in blocks[new].tolist()])
            if len(new) == len(blocks) and not counts.any():
                self._enter(blocks, now)
                return
        gap_s = now - last_s
        is_again = (gap_s >= SAME_REQUEST_S) & (counts > 0)
        if not asked:
            is_again &= place == 0
        is_counted = is_again | (counts == 0)
        before = np.minimum(counts, KINDS) - 1
        counts = np.maximum.accumulate(np.minimum(counts + is_counted, _MOST_TOUCHES))
        after = np.minimum(counts, KINDS) - 1
        moves = ((before != after) & (place != 0)).nonzero()[0]
        if len(moves):
            was_queued = before[moves[place[moves] > 0]]
            columns.queue_place.at[blocks[moves]] = 0
            for kind, left in zip(self._kinds, np.bincount(was_queued, minlength=KINDS).tolist(), strict=True):
                kind.queue.left(left)
        was = before[is_again]
        again = np.bincount(was, minlength=KINDS).tolist()
        gaps_s = np.bincount(was, gap_s[is_again], KINDS).tolist()
        came = np.bincount(after[is_counted], minlength=KINDS).tolist()
        columns.touches[blocks] = counts
        columns.touched[blocks] = now
        ends = [*np.searchsorted(after, np.arange(1, KINDS)).tolist(), len(blocks)]  # Counts grow towards the head.
        start = 0
        for number, (kind, end) in enumerate(zip(self._kinds, ends, strict=True)):
            kind.learn(again[number], gaps_s[number], came[number])
            if end > start:
                kind.queue.append(blocks[start:end])
            start = end

    def _enter(self, blocks: Ids, now: float) -> None:
        """Takes in blocks none of which is known."""
        self._columns.touches[blocks] = 1
        self._columns.touched[blocks] = now
        self._kinds[0].learn(0, 0.0, len(blocks))
        self._kinds[0].queue.append(blocks)

    # -- leaving -------------------------------------------------------------------------------------------------

    def remove(self, block: int) -> None:
        self._kind_of(block).queue.remove(block)

    def take(self, count: int) -> Ids:
        """O(1) a victim, amortised: all that is worth less than what every other kind offers goes at once."""
        holds, touched = self._columns.holds, self._columns.touched
        found: list[Ids] = []
        while count > 0:
            heads = sorted(self._heads(), key=lambda head: head[0])
            if not heads:
                break
            (_, number, head), rest = heads[0], heads[1:]
            kind = self._kinds[number]
            idle_s = kind.idle_until_worth(rest[0][0], self._stay_s) if rest else -inf
            limit_s = max(self._now - idle_s, float(touched[head]))
            victims = kind.queue.take(count, holds, times=touched, limit=limit_s)
            self._went(victims)
            count -= len(victims)
            found.append(victims)
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def _heads(self) -> Iterable[tuple[float, int, int]]:
        """Yields of each kind that has any, what its next victim is worth, the kind's number, and the victim."""
        for number, kind in enumerate(self._kinds):
            oldest = kind.queue.oldest(self._columns.holds)
            if oldest is not None:
                yield kind.worth(self._now - float(self._columns.touched[oldest]), self._stay_s), number, oldest

    def _went(self, victims: Ids) -> None:
        columns = self._columns
        times = columns.touched[victims]
        keep = (1 - _STAY_WEIGHT) ** len(victims)
        self._stay_s = keep * self._stay_s + (1 - keep) * (self._now - float(times.sum()) / len(times))
        key = columns.key
        self._ghosts.fit(int(GHOSTS_PER_BLOCK * len(self)))
        self._ghosts.add([hash(key[row]) for row in victims.tolist()], columns.touches[victims], times)

    # -- looking -------------------------------------------------------------------------------------------------

    def peek(self, count: int) -> Ids:
        return self._by_worth([kind.queue.peek(count, self._columns.holds) for kind in self._kinds])[:count]

    def order(self) -> Ids:
        return self._by_worth([kind.queue.order() for kind in self._kinds])

    def _by_worth(self, rows: Sequence[Ids]) -> Ids:
        """Joins the kinds' blocks, what is worth least first; those of one kind stay in their order."""
        idle_s = [self._now - self._columns.touched[some] for some in rows]
        worth = [kind.worths(idle, self._stay_s) for kind, idle in zip(self._kinds, idle_s, strict=True)]
        found: Ids = np.concatenate(rows)[np.argsort(np.concatenate(worth), kind="stable")]
        return found

    def unpark(self, blocks: Ids, now: float) -> None:
        self._now = max(self._now, now)
        numbers = np.minimum(self._columns.touches[blocks], KINDS) - 1
        for number, kind in enumerate(self._kinds):
            parked = kind.queue.unpark(blocks[numbers == number])
            self._columns.touched[parked] = now  # They stand at the young end, and times follow the order.

    def idle_since(self) -> float | None:
        """The time of the block that is idle longest, which need not go first: so it never falls while blocks go."""
        return min((float(self._columns.touched[head]) for _, _, head in self._heads()), default=None)

    def _kind_of(self, block: int) -> _Kind:
        return self._kinds[min(max(1, self._columns.cell.touches[block]), KINDS) - 1]
