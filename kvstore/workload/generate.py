"""Synthetic load of a stated shape: the same profile, seed, rate and length give the same requests everywhere.

One event loop, earliest event first: new sessions arrive as a Poisson process; a served request may put its session's
next request into the future. The order of random draws is part of the output.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TextIO

from kvstore.workload.profiles import Bursts, LogNormal, Profile, Turns
from kvstore.workload.prompt import Prompt, Segment
from kvstore.workload.splitmix import MASK64, SplitMix64
from kvstore.workload.trace import Trace, TraceRequest

# Template seeds are small, fresh text counts up from the first of these, summaries lie above the last.
_FIRST_FRESH_SEED = 1 << 20
_SUMMARY_SEED_OFFSET = 7_000_000_000
_SUMMARY_DIVISOR = 4


def generate(
    profile: Profile, *, seed: int = 1, rate: float | None = None, seconds: float | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of a synthetic load in time order.

    Units: rate in new sessions a second, seconds of trace time; the profile's own where None.
    Raises: ValueError if seed is no 64-bit word, or rate or seconds is not a finite number above 0.
    """
    if not 0 <= seed <= MASK64:
        raise ValueError(f"seed: is {seed}, outside 0..{MASK64}")
    sessions_per_s = _positive("rate", profile.sessions_per_s if rate is None else rate)
    span_s = _positive("seconds", profile.span_s if seconds is None else seconds)
    scaled = replace(profile, sessions_per_s=sessions_per_s, span_s=span_s)
    return _Load(scaled, SplitMix64(seed)).requests()


def generate_trace(
    profile: Profile, *, seed: int = 1, rate: float | None = None, seconds: float | None = None
) -> Trace:
    """Return a synthetic load as a whole trace; arguments and errors as for generate()."""
    requests = generate(profile, seed=seed, rate=rate, seconds=seconds)
    return Trace(name=f"gen-{profile.name}", block_tokens=profile.block_tokens, requests=tuple(requests))


def write_jsonl(requests: Iterable[TraceRequest], stream: TextIO) -> None:
    """Write one JSON object a line, in the form that read_trace() takes for generated. Units: timestamp in ms."""
    for request in requests:
        fields = {
            "timestamp": round(request.time_s * 1000),
            "session": request.session,
            "turn": request.turn,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.block_ids.tolist(),
        }
        stream.write(json.dumps(fields) + "\n")


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: is {value}, not a finite number above 0")
    return value


@dataclass(frozen=True, slots=True)
class _Job:
    """A request to come: the text that stands before its new part, and how often the same is asked again."""

    session: int
    turn: int
    before: Prompt
    repeats: int


class _Load:
    def __init__(self, profile: Profile, rng: SplitMix64) -> None:
        self._profile = profile
        self._rng = rng
        self._popularity = list(accumulate((rank + 1) ** -profile.templates.zipf for rank in range(self._count())))
        self._template_tokens = [self._tokens(profile.templates.tokens) for _ in range(self._count())]
        self._last_seed = _FIRST_FRESH_SEED
        self._sessions = 0
        self._pending: list[tuple[float, int, _Job]] = []
        self._arrival_s = self._wait_s()

    def requests(self) -> Iterator[TraceRequest]:
        while True:
            arrives = not self._pending or self._arrival_s <= self._pending[0][0]
            time_s = self._arrival_s if arrives else self._pending[0][0]
            if time_s > self._profile.span_s:
                return
            yield self._serve(time_s, self._next_session() if arrives else heapq.heappop(self._pending)[2])

    def _count(self) -> int:
        return self._profile.templates.count

    def _tokens(self, distribution: LogNormal) -> int:
        return max(1, int(self._rng.lognormal(distribution.median, distribution.sigma)))

    def _wait_s(self) -> float:
        return self._rng.exponential(1 / self._profile.sessions_per_s)

    def _fresh_seed(self) -> int:
        self._last_seed += 1
        return self._last_seed

    def _next_session(self) -> _Job:
        """Open a session: a template or a fresh document, or neither, stands before its first question."""
        self._arrival_s += self._wait_s()
        self._sessions += 1
        choice = self._rng.uniform()
        before, repeats = Prompt.empty(self._profile.block_tokens), 0
        if choice < self._profile.templates.probability:
            rank = self._rng.weighted_index(self._popularity)
            before = before.extended(Segment(rank + 1, self._template_tokens[rank]))
        bursts = self._burst_at(choice)
        if bursts is not None:
            before = before.extended(Segment(self._fresh_seed(), self._tokens(bursts.document_tokens)))
            repeats = min(bursts.max_size, int(self._rng.pareto(bursts.size.minimum, bursts.size.shape))) - 1
        return _Job(session=self._sessions, turn=1, before=before, repeats=repeats)

    def _burst_at(self, choice: float) -> Bursts | None:
        """Return the profile's bursts if this session is one: beside a template only where all sessions have one."""
        bursts, template_share = self._profile.bursts, self._profile.templates.probability
        if template_share == 1:
            # The draw is made for every profile of this kind, so that giving it bursts does not shift its stream.
            draw = self._rng.uniform()
            return bursts if bursts is not None and draw < bursts.probability else None
        if bursts is not None and template_share <= choice < template_share + bursts.probability:
            return bursts
        return None

    def _serve(self, time_s: float, job: _Job) -> TraceRequest:
        prompt = self._asked(job)
        output_tokens = self._tokens(self._profile.output_tokens)
        self._schedule_next(time_s, job, prompt=prompt, output_tokens=output_tokens)
        return TraceRequest(
            time_s=time_s,
            session=job.session,
            turn=job.turn,
            input_tokens=prompt.tokens,
            output_tokens=output_tokens,
            block_ids=prompt.block_ids,
        )

    def _asked(self, job: _Job) -> Prompt:
        """Return the job's prompt with its new text, which is cut where the prompt would be too long."""
        turns = self._profile.turns
        seed = self._fresh_seed()
        new_tokens = self._tokens(self._profile.user_tokens if job.turn == 1 or turns is None else turns.added_tokens)
        excess = max(0, job.before.tokens + new_tokens - self._profile.max_input_tokens)
        return job.before.extended(Segment(seed, max(1, new_tokens - excess)))

    def _schedule_next(self, time_s: float, job: _Job, *, prompt: Prompt, output_tokens: int) -> None:
        bursts, turns = self._profile.bursts, self._profile.turns
        if job.repeats > 0 and bursts is not None:
            gap_s = self._rng.lognormal(bursts.gap_s.median, bursts.gap_s.sigma)
            self._push(time_s + gap_s, replace(job, turn=1, repeats=job.repeats - 1))
        elif turns is not None and self._goes_on(turns, job.turn, prompt):
            before = self._history(turns, prompt, output_tokens)
            think_s = self._rng.lognormal(turns.think_s.median, turns.think_s.sigma)
            self._push(time_s + think_s, _Job(session=job.session, turn=job.turn + 1, before=before, repeats=0))

    def _goes_on(self, turns: Turns, turn: int, prompt: Prompt) -> bool:
        return prompt.tokens < self._profile.max_input_tokens and self._rng.uniform() < turns.probability_after(turn)

    def _history(self, turns: Turns, prompt: Prompt, output_tokens: int) -> Prompt:
        """Return what stands before the next turn: prompt and answer, or the head and a summary."""
        seed = self._fresh_seed()
        if self._rng.uniform() < turns.rewrite_probability:
            summary_tokens = max(1, prompt.tokens // _SUMMARY_DIVISOR)
            return prompt.head_only().extended(Segment(seed + _SUMMARY_SEED_OFFSET, summary_tokens))
        return prompt.extended(Segment(seed, output_tokens))

    def _push(self, time_s: float, job: _Job) -> None:
        """Queue a request; of two at one instant the one of the older text comes first."""
        heapq.heappush(self._pending, (time_s, self._last_seed, job))
