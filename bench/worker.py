"""A client process of a benchmark: `python -m bench.worker` answers one line of JSON for each that it is asked.

It has one player at a time and keeps its buffers between players of the same size. It ends when its input does.
Times are of the clock that all processes of a machine share, so that clients can start together.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.compare.clients.work import own_output, say
from bench.jobs import Buffers, Job, Player, spans
from bench.players import open_player
from kvstore_wire.malloc import keep_freed_memory

GET, PUT, MIXED, MATCH = "get", "put", "mixed", "match"
MIXED_CALLS = 10  # Of which one is a put.
HOT_PARTS, HOT_SHARE = 10, 0.9
FILL_BYTES, CLEAN_BATCH = 64 << 20, 1024

Act = Callable[[int, int], None]
Call = tuple[Act, int, int]


class Worker:
    """Answers questions. Owns: the player and the buffers, until `close`."""

    def __init__(self) -> None:
        self._buffers: Buffers | None = None
        self._player: Player | None = None
        self._job: Job | None = None
        self._at = 0

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What one line is answered with; a failure is an answer too."""
        asked = dict(question)
        answers: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self._open,
            "clean": self._clean,
            "prepare": self._prepare,
            "fill": self._fill,
            "round": self._round,
            "calls": self._calls,
            "until": self._until,
            "verify": self._verify,
            "shut": self._shut,
        }
        try:
            return answers[asked.pop("do")](**asked)
        except Exception as error:  # noqa: BLE001  The process that asks decides what becomes of it.
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        self._shut()
        if self._buffers is not None:
            self._buffers.close()

    def _open(self, **job: Any) -> dict[str, Any]:
        self._shut()
        self._job, self._at = Job(**job), 0
        if self._buffers is None or self._buffers.size_bytes < self._job.size_bytes:
            if self._buffers is not None:
                self._buffers.close()
                self._buffers = None
            self._buffers = Buffers(self._job.size_bytes, self._job.owner)
        self._player = open_player(self._job, self._buffers)
        gc.collect()
        gc.freeze()
        return {}

    def _prepare(self, *, op: str, batch: int) -> dict[str, Any]:
        """Removes what the puts of the next round would find there."""
        player, job = self._opened()
        if op == PUT:
            for first, last in merged(pieces_of(job, batch, self._at), CLEAN_BATCH):
                player.clean(first, last)
        elif op == MIXED:
            for first, last in spans(job.fresh_count, CLEAN_BATCH):
                player.clean(job.part_count + first, job.part_count + last)
        return {}

    def _round(self, *, op: str, batch: int, at: float) -> dict[str, Any]:
        """Plays one round and moves on by it."""
        player, job = self._opened()
        calls: list[Call]
        if op == MIXED:
            acts: dict[str, Act] = {PUT: player.put, GET: player.get}
            calls = [(acts[name], first, last) for name, first, last in mixed_of(job, batch, self._at)]
        else:
            act: Act = getattr(player, op)
            calls = [(act, first, last) for first, last in pieces_of(job, batch, self._at)]
        answer = _played(calls, at=at)
        self._at += job.round_calls
        return answer

    def _calls(self, *, op: str, batch: int, first: int, count: int) -> dict[str, Any]:
        """A number of calls that walk over the parts, `first` being the number of the first call."""
        player, job = self._opened()
        act: Act = getattr(player, op)
        pieces = spans(job.part_count, batch)
        return _played([(act, *pieces[i % len(pieces)]) for i in range(first, first + count)], at=0.0)

    def _until(self, *, op: str, batch: int, at: float, end: float, seed: int) -> dict[str, Any]:
        """Calls from `at` to `end`, walking over the parts, or, for the op "hot", mostly to the first ten."""
        player, job = self._opened()
        hot = op == "hot"
        pieces = spans(job.part_count, batch)
        order = hot_indexes(len(pieces), seed) if hot else walk(len(pieces))
        act: Act = player.get if hot else getattr(player, op)
        return _played_until(((act, *pieces[i]) for i in order), at=at, end=end)

    def _clean(self) -> dict[str, Any]:
        player, job = self._opened()
        for first, last in spans(job.part_count + job.fresh_count, CLEAN_BATCH):
            player.clean(first, last)
        return {}

    def _fill(self) -> dict[str, Any]:
        player, job = self._opened()
        self._clean()
        for first, last in spans(job.part_count, max(1, FILL_BYTES // job.part_bytes)):
            player.put(first, last)
        return {}

    def _verify(self) -> dict[str, Any]:
        return {"equal": self._opened()[0].verify()}

    def _shut(self) -> dict[str, Any]:
        if self._player is not None:
            self._player.close()
        self._player = None
        return {}

    def _opened(self) -> tuple[Player, Job]:
        if self._player is None or self._job is None:
            raise RuntimeError("no player is open")
        return self._player, self._job


def pieces_of(job: Job, batch: int, at: int) -> Sequence[tuple[int, int]]:
    """The parts of each call of a round that begins with call `at` of the walk over all parts."""
    pieces = spans(job.part_count, batch)
    if not job.round_calls or job.round_calls >= len(pieces):
        return pieces
    return [pieces[i % len(pieces)] for i in range(at, at + job.round_calls)]


def merged(pieces: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The same parts in fewer ranges: neighbours are joined, to at most `most` parts where they were shorter."""
    made: list[tuple[int, int]] = []
    for first, last in pieces:
        if made and made[-1][1] == first and last - made[-1][0] <= most:
            made[-1] = (made[-1][0], last)
        else:
            made.append((first, last))
    return made


def mixed_of(job: Job, batch: int, at: int) -> list[tuple[str, int, int]]:
    """The calls of a mixed round: those of one round, rounded up to tens; every tenth is a put of fresh parts."""
    pieces = pieces_of(job, batch, at)
    calls = mixed_calls(len(pieces))
    fresh = [(job.part_count + a, job.part_count + b) for a, b in spans(job.fresh_count, batch)]
    half = MIXED_CALLS // 2
    return [
        (PUT, *fresh[i // MIXED_CALLS]) if i % MIXED_CALLS == half else (GET, *pieces[i % len(pieces)])
        for i in range(calls)
    ]


def mixed_calls(calls: int) -> int:
    return -(-calls // MIXED_CALLS) * MIXED_CALLS


def fresh_count(calls: int, batch: int) -> int:
    """Parts that the puts of one mixed round of so many calls take."""
    return mixed_calls(calls) // MIXED_CALLS * batch


def walk(count: int) -> Iterator[int]:
    """0, 1, ... count - 1, and again."""
    while True:
        yield from range(count)


def hot_indexes(count: int, seed: int) -> Iterator[int]:
    """Nine of ten among the first ten, the others anywhere."""
    draw = random.Random(seed)
    while True:
        yield draw.randrange(min(HOT_PARTS, count)) if draw.random() < HOT_SHARE else draw.randrange(count)


def _played(calls: list[Call], *, at: float) -> dict[str, Any]:
    _sleep_until(at)
    cpu, start = time.process_time(), time.perf_counter()
    times_s = []
    before = start
    for act, first, last in calls:
        act(first, last)
        now = time.perf_counter()
        times_s.append(now - before)
        before = now
    return {
        "end": before,
        "s": before - start,
        "cpu_s": time.process_time() - cpu,
        "parts": sum(last - first for _, first, last in calls),
        "calls_ms": [round(s * 1e3, 5) for s in times_s],
    }


def _played_until(calls: Iterator[Call], *, at: float, end: float) -> dict[str, Any]:
    _sleep_until(at)
    times_s: list[float] = []
    before = start = time.perf_counter()
    cpu = time.process_time()
    parts = 0
    while before < end:
        act, first, last = next(calls)
        act(first, last)
        now = time.perf_counter()
        if now <= end:  # What ends later is not of this window.
            times_s.append(now - before)
            parts += last - first
        before = now
    return {
        "end": before,
        "s": before - start,
        "cpu_s": time.process_time() - cpu,
        "parts": parts,
        "calls_ms": [round(s * 1e3, 5) for s in times_s],
    }


def _sleep_until(at: float) -> None:
    left = at - time.perf_counter()
    if left > 0:
        time.sleep(left)


def main() -> None:
    keep_freed_memory()
    answers = own_output()
    worker = Worker()
    try:
        for line in sys.stdin:
            say(answers, worker.answer(json.loads(line)))
    finally:
        worker.close()


if __name__ == "__main__":
    main()
