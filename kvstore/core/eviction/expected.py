"""Expected reuse: the block goes that is least likely to be asked for again while it could stay.

Blocks are of a kind by how often they were asked for: once, twice, more often. Of each kind the policy learns, with a
half-life, the share `p` that is asked for again, and the mean gap `tau` until then. One queue a kind holds its blocks
in the order of their last touch, so that only the heads of the queues have to be compared: after `a` idle seconds a
block is worth the chance that it is asked for within the time W that blocks stay at all,

    p e^(-a/tau) (1 - e^(-W/tau)) / (1 - p + p e^(-a/tau)).

Blocks that went are remembered for as long as twice as many others go, or `p` would only tell of those that stayed. A
block counts as asked for at least as often as each behind it in a request: one that was forgotten must not leave a hole
in its chain. Source: compared with other policies on public traces of chat, agents and API calls (docs/policies.md).

Hints add three kinds. Blocks promised to be asked for again within some seconds are worth p (1 - e^(-W/r)) with r
seconds to go, so that those go first whose time is furthest; promised ones whose time has passed are overdue, and worth
as others are, idle from then on; both p are learned, so that promises weigh what they are worth. Blocks of what is
over go first of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, inf, log
from typing import ClassVar, NamedTuple

import numpy as np

from kvstore.core.columns import BlockColumns, Flags, Floats, Ids, Longs
from kvstore.core.eviction.base import NO_HINT, OVER, SAME_REQUEST_S, BlockQueue, TouchHint
from kvstore.core.eviction.ghosts import GhostTable
from kvstore.core.few import Rows

KINDS = 3
OVERDUE = KINDS
PROMISED = 8  # Plus the level: a return within 2^(level - 1) seconds.
MOST_LEVEL = 13  # Longer promises count as this one, somewhat more than an hour.
GRACE_S = 1.0  # After its time a promise counts as kept for so long.
HALF_LIFE = 20_000  # Touches after which what was learned counts half.
GHOSTS_PER_BLOCK = 2
# Blocks called over that come back: more than this share, beyond a few, and the statement is not believed any more.
_MOST_WRONG, _FEW_WRONG = 0.1, 64.0
_FORGETS = 0.5 ** (1 / HALF_LIFE)
_FIRST_GAP_S = _FIRST_STAY_S = 60.0  # Before anything is known.
_STAY_WEIGHT = 0.002  # Of one eviction in the mean time that blocks stay.
_MOST_P, _LEAST_TAU_S = 0.999, 1e-3
_MOST_TOUCHES = 63  # As many as a ghost's byte has beside what the block was.
_WAS_PROMISED, _WAS_OVERDUE, _WAS_OVER = 1, 2, 3
_WAS = np.zeros(PROMISED + MOST_LEVEL + 1, np.int64)  # By kind.
_WAS[PROMISED:], _WAS[OVERDUE], _WAS[OVER] = _WAS_PROMISED, _WAS_OVERDUE, _WAS_OVER
_SECONDS = np.zeros(len(_WAS), np.float64)
_SECONDS[PROMISED + 1 :] = 2.0 ** np.arange(MOST_LEVEL)
_MANY = 24  # Source: measured, from so many on all at once is faster than one by one.
_GOES_FIRST = -1.0
_FEWEST_PEEKED = 64  # Of each level: of all of them together as many as of another kind.


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


class _Head(NamedTuple):
    """What one queue would give next, and what that is worth."""

    worth: float
    kind: int
    block: int


class ExpectedReuse:
    """EvictionPolicy by learned worth, and by what callers say of the next use.

    Uses the columns `touches` - how often each block was asked for, while it was here or not long gone -, `asked` -
    when that counted last -, `kind`, and, from the first hint on, `session_tag` and `shared`. A touch soon after one
    that counted belongs to the same request, and counts for nothing but recency; likewise that of a writer who names
    what is here already. `touched` of an overdue block is when it was expected. A cohort that never had a hint decides
    as if there were none.
    """

    __slots__ = (
        "_columns",
        "_due_s",
        "_ghosts",
        "_is_hinted",
        "_kinds",
        "_levels",
        "_now",
        "_over",
        "_overs",
        "_promises",
        "_stay_s",
    )
    takes_hints: ClassVar[bool] = True

    def __init__(self, columns: BlockColumns) -> None:
        self._columns = columns
        self._kinds = [_Kind(BlockQueue(columns.queue_place)) for _ in range(KINDS + 1)]
        self._promises = _Kind(BlockQueue(columns.queue_place))  # Of all levels; its own queue is not used.
        self._levels: dict[int, BlockQueue] = {}  # Each in the order of its time, the head of a chain before its tail.
        self._over = BlockQueue(columns.queue_place)
        self._overs = [0.0, 0.0]  # Blocks called over, and those that came back.
        self._ghosts = GhostTable()
        self._is_hinted = False
        self._due_s = inf  # No promise's time has passed before.
        self._now = 0.0
        self._stay_s = _FIRST_STAY_S

    def __len__(self) -> int:
        count = sum(len(kind.queue) for kind in self._kinds)
        return count + len(self._over) + sum(map(len, self._levels.values())) if self._is_hinted else count

    # -- touches -------------------------------------------------------------------------------------------------

    def touch(self, blocks: Rows, now: float, hint: TouchHint, *, asked: bool = True) -> None:
        """O(1) a block, amortised."""
        self._now = max(self._now, now)
        if self._is_hinted or hint is not NO_HINT:
            self._is_hinted = True
            self._expire()
            self._touch_hinted(np.asarray(blocks, np.int32), now, hint, asked)
        elif isinstance(blocks, list) and len(blocks) < _MANY:
            self._touch_few(blocks, now, asked)
        else:
            self._touch_many(np.asarray(blocks, np.int32), now, asked)

    def _touch_few(self, blocks: list[int], now: float, asked: bool) -> None:
        columns, kinds = self._columns, self._kinds
        place, touched, touches = columns.queue_place.cell, columns.cell.touched, columns.cell.touches
        asked_at, kind_of = columns.cell.asked, columns.cell.kind
        again, gaps_s, came = [0] * KINDS, [0.0] * KINDS, [0] * KINDS
        into: list[list[int]] = [[] for _ in range(KINDS)]
        most = 1
        for block in blocks:
            if place[block]:
                count, last_s = touches[block], asked_at[block]
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
            if is_new or is_again or not place[block]:
                came[kind] += is_new or is_again
                asked_at[block] = now
            touches[block], touched[block], kind_of[block] = most, now, kind
            into[kind].append(block)
        for of, more, gap_s, fresh, rows in zip(kinds, again, gaps_s, came, into, strict=False):
            of.learn(more, gap_s, fresh)
            if rows:
                of.queue.append(rows)

    def _touch_many(self, blocks: Ids, now: float, asked: bool) -> None:
        columns = self._columns
        place = columns.queue_place.at[blocks]
        counts, last_s = columns.touches[blocks].astype(np.int64), columns.asked[blocks]
        new = (place == 0).nonzero()[0]
        if len(new):
            counts[new], last_s[new] = self._remembered(blocks[new])
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
            for number, left in enumerate(np.bincount(was_queued, minlength=KINDS).tolist()):
                self._kinds[number].queue.left(left)
        was = before[is_again]
        again = np.bincount(was, minlength=KINDS).tolist()
        gaps_s = np.bincount(was, gap_s[is_again], KINDS).tolist()
        came = np.bincount(after[is_counted], minlength=KINDS).tolist()
        columns.touches[blocks], columns.touched[blocks], columns.kind[blocks] = counts, now, after
        columns.asked[blocks[is_counted | (place == 0)]] = now
        ends = [*np.searchsorted(after, np.arange(1, KINDS)).tolist(), len(blocks)]  # Counts grow towards the head.
        start = 0
        for number, end in enumerate(ends):
            kind = self._kinds[number]
            kind.learn(again[number], gaps_s[number], came[number])
            if end > start:
                kind.queue.append(blocks[start:end])
            start = end

    def _remembered(self, blocks: Ids) -> tuple[Longs, Floats]:
        """What is known of blocks that enter."""
        key = self._columns.key
        return self._ghosts.take_many([hash(key[row]) for row in blocks.tolist()])

    def _enter(self, blocks: Ids, now: float) -> None:
        """Takes in blocks none of which is known."""
        columns = self._columns
        columns.touches[blocks], columns.touched[blocks], columns.asked[blocks] = 1, now, now
        columns.kind[blocks] = 0
        self._kinds[0].learn(0, 0.0, len(blocks))
        self._kinds[0].queue.append(blocks)

    # -- hints ---------------------------------------------------------------------------------------------------

    def _touch_hinted(self, blocks: Ids, now: float, hint: TouchHint, asked: bool) -> None:
        columns = self._columns
        place = columns.queue_place.at[blocks]
        is_here = place != 0
        kind = columns.kind[blocks].astype(np.int64)
        was = _WAS[kind]
        counts, last_s = columns.touches[blocks].astype(np.int64), columns.asked[blocks]
        new = (~is_here).nonzero()[0]
        if len(new):
            packed, last_s[new] = self._remembered(blocks[new])
            counts[new], was[new] = packed & _MOST_TOUCHES, packed >> 6
        is_apart = now - last_s >= SAME_REQUEST_S
        is_again = is_apart & (counts > 0) & (asked | ~is_here)
        shared = self._share(blocks, is_here, is_apart, counts, hint.session_tag)
        due_s = columns.touched[blocks] + _SECONDS[kind]
        late_s = now - np.where(is_here & (kind == OVERDUE), columns.touched[blocks], last_s)
        self._learn(is_again, was, counts, late_s)
        is_counted = is_again | (counts == 0)
        counts = np.maximum.accumulate(np.minimum(counts + is_counted, _MOST_TOUCHES))
        columns.touches[blocks] = counts
        columns.asked[blocks[is_counted | ~is_here]] = now
        plain = np.minimum(counts, KINDS) - 1
        worth = np.array([of.worth(0.0, self._stay_s) for of in self._kinds[:KINDS]])[plain]
        to, stays = plain.copy(), np.zeros(len(blocks), np.bool_)
        if hint.next_use == 0 and self._believes_over:
            to[~shared] = OVER
        elif hint.next_use:  # For a shared block one's promise may only add to what others make of it.
            level = min(hint.next_use, MOST_LEVEL)
            to[~shared | (worth <= self._worth_promised(2.0 ** (level - 1)))] = PROMISED + level
        elif hint.next_use is None:  # The rest of a request that has said what it knows.
            stays = is_here & ~is_apart & ~shared & (kind >= OVER)
        # The earliest promise for a shared block holds.
        is_earlier = (to >= PROMISED) & (now + _SECONDS[to] < due_s)
        held = is_here & (kind >= PROMISED) & shared & (due_s > now) & ~is_earlier
        if held.any():
            stays |= held & (self._worths_promised(due_s - now) >= worth)
        to[stays] = kind[stays]
        self._count(is_counted, is_here, kind, to)
        goes = ~stays
        self._move(blocks[goes], place[goes], kind[goes], to[goes], now)

    def _learn(self, is_again: Flags, was: Longs, counts: Longs, gap_s: Floats) -> None:
        """Takes in which blocks were asked for again, and of what kind they were."""
        plain = is_again & (was == 0)
        before = np.minimum(counts[plain], KINDS) - 1
        again, gaps_s = np.bincount(before, minlength=KINDS), np.bincount(before, gap_s[plain], KINDS)
        for number in range(KINDS):
            self._kinds[number].learn(int(again[number]), float(gaps_s[number]), 0)
        late = is_again & (was == _WAS_OVERDUE)
        late_count = int(np.count_nonzero(late))
        self._kinds[OVERDUE].learn(late_count, float(gap_s[late].sum()), 0)
        self._promises.learn(int(np.count_nonzero(is_again & (was == _WAS_PROMISED))) + late_count, 0.0, 0)
        forgets = _FORGETS ** len(was)  # Also while it is not believed, so that it may be again.
        self._overs[0] *= forgets
        self._overs[1] = self._overs[1] * forgets + float(np.count_nonzero(is_again & (was == _WAS_OVER)))

    def _count(self, is_counted: Flags, is_here: Flags, kind: Longs, to: Longs) -> None:
        """Counts what came to each kind; what the same request had said otherwise a moment ago is taken back."""
        before, after = np.minimum(kind, PROMISED), np.minimum(to, PROMISED)
        changed = is_here & ~is_counted & (before != after)
        came = np.bincount(after[is_counted | changed], minlength=PROMISED + 1) - np.bincount(
            before[changed], minlength=PROMISED + 1
        )
        for number in range(KINDS):
            self._kinds[number].came = max(2.0, self._kinds[number].came + int(came[number]))
        self._promises.came = max(2.0, self._promises.came + int(came[PROMISED]))
        self._overs[0] += float(came[OVER])

    def _share(self, blocks: Ids, is_here: Flags, is_apart: Flags, counts: Longs, tag: int) -> Flags:
        """Notes whose session asked last, and which blocks more than one session asked for; returns these.

        Without a tag, every other request may have been another session's.
        """
        columns = self._columns
        owner = columns.session_tag[blocks]
        if tag:
            others = (owner != np.uint64(tag)) & ((owner != 0) | is_apart | (counts > 1))
        else:
            others = is_apart | ((owner == 0) & (counts > 1))
        shared: Flags = is_here & (columns.shared[blocks] | others)
        columns.shared[blocks] = shared
        columns.session_tag[blocks if tag else blocks[is_apart | ~is_here]] = tag
        return shared

    def _move(self, blocks: Ids, place: Longs, kind: Longs, to: Longs, now: float) -> None:
        """Puts blocks into the queues where they belong now."""
        columns = self._columns
        for number, left in enumerate(np.bincount(kind[place > 0]).tolist()):
            if left:
                self._queue(number).left(left)
        columns.queue_place.at[blocks] = 0
        columns.touched[blocks], columns.kind[blocks] = now, to
        for number, count in enumerate(np.bincount(to).tolist()):
            if not count:
                continue
            some = blocks if count == len(blocks) else blocks[to == number]
            if number >= PROMISED:
                some = some[::-1]
                self._due_s = min(self._due_s, now + 2.0 ** (number - PROMISED - 1) + GRACE_S)
            self._queue(number).append(some)

    def _expire(self) -> None:
        """Makes overdue what was promised to be asked for by now."""
        if self._now < self._due_s:
            return
        columns = self._columns
        found: list[Ids] = []
        self._due_s = inf
        for level, queue in self._levels.items():
            seconds = 2.0 ** (level - 1)
            rows = queue.take_while_older(self._now - seconds - GRACE_S, columns.touched, 1 << 30)
            columns.touched[rows] += seconds
            found.append(rows)
            first = queue.first()
            if first is not None:
                self._due_s = min(self._due_s, float(columns.touched[first]) + seconds + GRACE_S)
        rows = np.concatenate(found) if found else np.empty(0, np.int32)
        if len(rows):
            rows = rows[np.lexsort((-np.arange(len(rows)), columns.touched[rows]))]  # Of one chain the tail first.
            columns.kind[rows] = OVERDUE
            self._kinds[OVERDUE].queue.append(rows)
            self._kinds[OVERDUE].came += len(rows)

    def over(self, blocks: Ids, session_tag: int) -> int:
        """Buries what a session asked for last and no other did, its blocks given tail first; returns how many.

        Without a tag: of the session that asked for the deepest of them last; of what came without a tag, only what was
        asked for once.
        """
        columns = self._columns
        self._is_hinted = True
        place, owner = columns.queue_place.at[blocks], columns.session_tag[blocks]
        mine = (place != 0) & ~columns.shared[blocks] & (columns.kind[blocks] != OVER)
        mine &= (owner != 0) | (columns.touches[blocks] <= 1)
        if not mine.any():
            return 0
        mine &= owner == (np.uint64(session_tag) if session_tag else owner[int(mine.argmax())])
        blocks, place = blocks[mine], place[mine]
        if not len(blocks) or not self._believes_over:
            return 0
        kind, to = columns.kind[blocks].astype(np.int64), np.full(len(blocks), OVER, np.int64)
        self._count(np.zeros(len(blocks), np.bool_), place != 0, kind, to)
        self._move(blocks, place, kind, to, self._now)
        return len(blocks)

    @property
    def _believes_over(self) -> bool:
        called, back = self._overs
        return back <= _FEW_WRONG + _MOST_WRONG * called

    def _queue(self, kind: int) -> BlockQueue:
        if kind <= OVERDUE:
            return self._kinds[kind].queue
        if kind == OVER:
            return self._over
        level = kind - PROMISED
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = BlockQueue(self._columns.queue_place)
        return found

    # -- leaving -------------------------------------------------------------------------------------------------

    def remove(self, block: int) -> None:
        if self._columns.queue_place.cell[block]:
            self._queue(self._columns.cell.kind[block]).remove(block)

    def take(self, count: int) -> Ids:
        """O(1) a victim, amortised: all that is worth less than what every other kind offers goes at once."""
        holds, touched = self._columns.holds, self._columns.touched
        if self._is_hinted:
            self._expire()
        found: list[Ids] = []
        while count > 0:
            heads = sorted(self._heads())
            if not heads:
                break
            worst, rest = heads[0], heads[1:]
            queue = self._queue(worst.kind)
            if worst.kind == OVER:
                victims = queue.take(count, holds)
            elif worst.kind >= PROMISED:
                victims = queue.take_young(count, holds, times=touched, since=float(touched[worst.block]))
            else:
                idle_s = self._kinds[worst.kind].idle_until_worth(rest[0].worth, self._stay_s) if rest else -inf
                limit_s = max(self._now - idle_s, float(touched[worst.block]))
                victims = queue.take(count, holds, times=touched, limit=limit_s)
            self._went(victims)
            count -= len(victims)
            found.append(victims)
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def _heads(self) -> Iterator[_Head]:
        """Yields the next victim of each kind that has any."""
        holds, touched = self._columns.holds, self._columns.cell.touched
        for number, kind in enumerate(self._kinds):
            oldest = kind.queue.oldest(holds)
            if oldest is not None:
                yield _Head(kind.worth(self._now - touched[oldest], self._stay_s), number, oldest)
        if not self._is_hinted:
            return
        oldest = self._over.oldest(holds)
        if oldest is not None:
            yield _Head(_GOES_FIRST, OVER, oldest)
        furthest = _Head(inf, PROMISED, -1)
        furthest_s = -inf
        for level, queue in self._levels.items():
            youngest = queue.youngest(holds)
            if youngest is not None and touched[youngest] + 2.0 ** (level - 1) > furthest_s:
                furthest_s = touched[youngest] + 2.0 ** (level - 1)
                furthest = _Head(self._worth_promised(furthest_s - self._now), PROMISED + level, youngest)
        if furthest.block >= 0:
            yield furthest

    def _worth_promised(self, left_s: float) -> float:
        return self._promises.p * (1 - exp(-self._stay_s / max(left_s, _LEAST_TAU_S)))

    def _worths_promised(self, left_s: Floats) -> Floats:
        found: Floats = self._promises.p * (1 - np.exp(-self._stay_s / np.maximum(left_s, _LEAST_TAU_S)))
        return found

    def _went(self, victims: Ids) -> None:
        columns = self._columns
        times, packed, asked = columns.touched[victims], columns.touches[victims], columns.asked[victims]
        if self._is_hinted:
            kind = columns.kind[victims]
            packed = packed | (_WAS[kind] << 6).astype(np.uint8)
            asked = np.where(kind == OVERDUE, times, asked)  # What it was late for.
            stayed = times[kind != OVER]
        else:
            stayed = times
        if len(stayed):
            keep = (1 - _STAY_WEIGHT) ** len(stayed)
            self._stay_s = keep * self._stay_s + (1 - keep) * (self._now - float(stayed.sum()) / len(stayed))
        key = columns.key
        self._ghosts.fit(int(GHOSTS_PER_BLOCK * len(self)))
        self._ghosts.add([hash(key[row]) for row in victims.tolist()], packed, asked)

    # -- looking -------------------------------------------------------------------------------------------------

    def peek(self, count: int) -> Ids:
        holds = self._columns.holds
        return self._by_worth(
            [kind.queue.peek(count, holds) for kind in self._kinds],
            self._over.peek(count, holds),
            {level: queue.peek_young(max(_FEWEST_PEEKED, count // 8), holds) for level, queue in self._levels.items()},
        )[:count]

    def order(self) -> Ids:
        return self._by_worth(
            [kind.queue.order() for kind in self._kinds],
            self._over.order(),
            {level: queue.order()[::-1] for level, queue in self._levels.items()},
        )

    def _by_worth(self, rows: Sequence[Ids], over: Ids, promised: dict[int, Ids]) -> Ids:
        """Joins the kinds' blocks, what is worth least first; those of one kind stay in their order."""
        touched = self._columns.touched
        parts = [over, *rows]
        worth: list[Floats] = [np.full(len(over), _GOES_FIRST)]
        worth += [
            kind.worths(self._now - touched[some], self._stay_s) for kind, some in zip(self._kinds, rows, strict=True)
        ]
        for level, some in promised.items():
            worth.append(self._worths_promised(touched[some] + 2.0 ** (level - 1) - self._now))
            parts.append(some)
        found: Ids = np.concatenate(parts)[np.argsort(np.concatenate(worth), kind="stable")]
        return found

    def unpark(self, blocks: Ids, now: float) -> None:
        self._now = max(self._now, now)
        kind = self._columns.kind[blocks]
        for number in np.unique(kind).tolist():
            some = blocks[kind == number]
            parked = self._queue(number).unpark(some[::-1] if number >= PROMISED else some)
            if number >= PROMISED:
                self._due_s = min(self._due_s, now + 2.0 ** (number - PROMISED - 1) + GRACE_S)
            self._columns.touched[parked] = now  # They stand at the young end, and times follow the order.

    def idle_since(self) -> float | None:
        heads = sorted(self._heads())
        if not heads:
            return None
        return -inf if heads[0].kind == OVER else float(self._columns.touched[heads[0].block])
