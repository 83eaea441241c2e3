"""Shapes of load: what the sessions of a service look like to a block store.

Source: fitted to kvcache-ai/Mooncake FAST25-release/traces (chat), callanjfox/kv-cache-tester traces (agent) and the
published aggregates of business-API traffic in Wang et al., USENIX ATC 2025 (api: a model, no trace behind it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A lognormal distribution by its median and the sigma of its logarithm."""

    median: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Pareto:
    """A Pareto distribution by its minimum and shape."""

    minimum: float
    shape: float


@dataclass(frozen=True, slots=True)
class Templates:
    """Long-lived prompt heads, shared by sessions; their popularity follows Zipf's law."""

    count: int
    zipf: float
    tokens: LogNormal
    probability: float


@dataclass(frozen=True, slots=True)
class Bursts:
    """One fresh document, asked several times within seconds."""

    probability: float
    size: Pareto
    max_size: int
    gap_s: LogNormal
    document_tokens: LogNormal


@dataclass(frozen=True, slots=True)
class Turns:
    """Conversations: prompt k + 1 is prompt k, its answer and new text.

    more_probability[k - 1] is the chance of another turn after turn k; the last value repeats. With
    rewrite_probability the history is replaced by a summary a quarter as long behind the same head.
    """

    more_probability: tuple[float, ...]
    think_s: LogNormal
    added_tokens: LogNormal
    rewrite_probability: float = 0.0

    def probability_after(self, turn: int) -> float:
        """Return the chance that a session goes on after this turn, counted from 1."""
        return self.more_probability[min(turn, len(self.more_probability)) - 1]


@dataclass(frozen=True, slots=True)
class Profile:
    """One shape of load; sessions_per_s scales it, and working sets grow in proportion."""

    name: str
    block_tokens: int
    sessions_per_s: float
    span_s: float
    templates: Templates
    user_tokens: LogNormal
    output_tokens: LogNormal
    max_input_tokens: int
    bursts: Bursts | None = None
    turns: Turns | None = None


API = Profile(
    name="api",
    block_tokens=16,
    sessions_per_s=9.0,
    span_s=900,
    templates=Templates(count=250, zipf=1.2, tokens=LogNormal(120, 0.8), probability=0.30),
    bursts=Bursts(
        probability=0.62,
        size=Pareto(1.7, 1.45),
        max_size=32,
        gap_s=LogNormal(1.3, 1.45),
        document_tokens=LogNormal(480, 0.9),
    ),
    user_tokens=LogNormal(110, 1.25),
    output_tokens=LogNormal(34, 1.1),
    max_input_tokens=14_000,
)

CHAT = Profile(
    name="chat",
    block_tokens=512,
    sessions_per_s=2.05,
    span_s=3600,
    templates=Templates(count=1, zipf=1.0, tokens=LogNormal(512, 0.0), probability=1.0),
    turns=Turns(
        more_probability=(0.30, 0.42, 0.51, 0.60),
        think_s=LogNormal(123, 1.07),
        added_tokens=LogNormal(700, 1.7),
    ),
    user_tokens=LogNormal(4_600, 1.3),
    output_tokens=LogNormal(350, 0.7),
    max_input_tokens=126_000,
)

AGENT = Profile(
    name="agent",
    block_tokens=512,
    sessions_per_s=0.033,
    span_s=7200,
    templates=Templates(count=60, zipf=0.8, tokens=LogNormal(13_000, 0.25), probability=1.0),
    turns=Turns(
        more_probability=(0.984,),
        think_s=LogNormal(17, 1.35),
        added_tokens=LogNormal(330, 1.7),
        rewrite_probability=0.012,
    ),
    user_tokens=LogNormal(18_000, 1.4),
    output_tokens=LogNormal(218, 1.1),
    max_input_tokens=430_000,
)

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in (API, CHAT, AGENT)})
