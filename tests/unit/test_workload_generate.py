"""Generated load: bit-exact test vectors, and the rules its requests obey."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from itertools import islice

import pytest

from kvstore.workload.generate import generate, generate_trace, write_jsonl
from kvstore.workload.profiles import AGENT, API, CHAT, PROFILES
from kvstore.workload.prompt import Prompt, Segment
from kvstore.workload.reuse import infinite_hit_rate
from kvstore.workload.splitmix import SplitMix64, mix
from kvstore.workload.trace import TraceRequest


def printed(requests: list[TraceRequest]) -> str:
    text = io.StringIO()
    write_jsonl(requests, text)
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "digest"), [("api", "fb4e81d78b3a124e"), ("chat", "38436b9ed86cd778"), ("agent", "d9fb5874078dbd63")]
)
def test_the_first_2000_lines_at_seed_1_are_the_known_ones(name: str, digest: str) -> None:
    text = printed(list(islice(generate(PROFILES[name], seed=1), 2000)))
    assert text.count("\n") == 2000
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_splitmix64_gives_the_published_words() -> None:
    # Source: the reference splitmix64 stream from seed 1234567.
    gamma = 0x9E3779B97F4A7C15
    words = [mix((1234567 + step * gamma) % (1 << 64)) for step in range(3)]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_draws_stay_inside_the_open_interval() -> None:
    rng = SplitMix64(5)
    draws = [rng.uniform() for _ in range(1000)]
    assert 0 < min(draws) < 0.01
    assert 0.99 < max(draws) < 1


def test_an_index_is_drawn_by_weight() -> None:
    rng = SplitMix64(5)
    draws = [rng.weighted_index([1.0, 1.0, 4.0]) for _ in range(3000)]
    assert set(draws) == {0, 2}
    assert draws.count(0) == pytest.approx(750, abs=100)


def test_a_line_has_the_stated_fields_in_order() -> None:
    (request,) = islice(generate(CHAT), 1)
    fields = json.loads(printed([request]))
    assert list(fields) == ["timestamp", "session", "turn", "input_length", "output_length", "hash_ids"]
    assert fields["timestamp"] == round(request.time_s * 1000)


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    first, again, other = (printed(list(generate(API, seed=seed, seconds=20))) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", list(PROFILES))
def test_requests_come_in_time_order_with_full_blocks_only(name: str) -> None:
    profile = PROFILES[name]
    trace = generate_trace(profile, seed=2, seconds=profile.span_s / 20)
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    assert 0 < times[-1] <= profile.span_s / 20
    for request in trace.requests:
        assert len(request.block_ids) == request.input_tokens // profile.block_tokens
        assert 1 <= request.input_tokens <= profile.max_input_tokens
        assert request.output_tokens >= 1


def test_an_id_has_one_parent_and_one_depth() -> None:
    trace = generate_trace(AGENT, seed=4, rate=0.2, seconds=600)
    places: dict[int, tuple[int, int]] = {}
    for request in trace.requests:
        ids = request.block_ids.tolist()
        for depth, (parent, block_id) in enumerate(zip([-1, *ids], ids, strict=False)):
            assert places.setdefault(block_id, (depth, parent)) == (depth, parent)
    assert len(places) == trace.distinct_blocks()


def test_a_next_turn_extends_the_last_one() -> None:
    turns = replace(CHAT.turns, more_probability=(1.0,)) if CHAT.turns else None
    last: dict[int | None, TraceRequest] = {}
    continued = 0
    for request in generate(replace(CHAT, turns=turns), seed=1, rate=0.05, seconds=1200):
        before = last.get(request.session)
        if before is not None:
            assert request.turn == before.turn + 1
            assert request.block_ids[: len(before.block_ids)].tolist() == before.block_ids.tolist()
            continued += 1
        last[request.session] = request
    assert continued > 50


def test_a_rewrite_keeps_the_head_and_shortens_the_prompt() -> None:
    assert AGENT.turns is not None
    always = replace(AGENT, turns=replace(AGENT.turns, rewrite_probability=1.0, more_probability=(1.0,)))
    first, second = islice(generate(always, seed=1, rate=1e-6, seconds=1e8), 2)
    assert (first.session, first.turn, second.turn) == (second.session, 1, 2)
    shared = sum(a == b for a, b in zip(first.block_ids.tolist(), second.block_ids.tolist(), strict=False))
    assert 0 < shared < len(first.block_ids)
    assert second.input_tokens < first.input_tokens


def test_rate_scales_the_load_and_the_ceiling_stays_put() -> None:
    slow, fast = (generate_trace(API, seed=1, rate=rate, seconds=60) for rate in (9.0, 36.0))
    assert len(fast.requests) == pytest.approx(4 * len(slow.requests), rel=0.25)
    assert 0.4 < infinite_hit_rate(slow) < 0.6
    assert infinite_hit_rate(fast) == pytest.approx(infinite_hit_rate(slow), abs=0.08)


def test_a_prompt_folded_in_steps_equals_one_folded_at_once() -> None:
    segments = [Segment(3, 5), Segment(4, 40), Segment(5, 1), Segment(6, 18)]
    stepwise = Prompt.empty(16)
    for segment in segments:
        stepwise = stepwise.extended(segment)
    assert (stepwise.tokens, len(stepwise.block_ids)) == (64, 4)
    other_tail = Prompt.empty(16).extended(segments[0]).extended(segments[1]).extended(Segment(9, 19))
    assert other_tail.block_ids[:2].tolist() == stepwise.block_ids[:2].tolist()
    assert other_tail.block_ids[2] != stepwise.block_ids[2]
    assert stepwise.head_only().tokens == 5
    assert Prompt.empty(16).head_only().tokens == 0


@pytest.mark.parametrize(
    ("seed", "rate", "seconds", "name"),
    [(-1, 1.0, 1.0, "seed"), (1 << 64, 1.0, 1.0, "seed"), (1, 0.0, 1.0, "rate"), (1, 1.0, float("inf"), "seconds")],
)
def test_an_impossible_load_is_refused_at_once(seed: int, rate: float, seconds: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        generate(API, seed=seed, rate=rate, seconds=seconds)
