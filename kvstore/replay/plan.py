"""What a replay will do, as flat arrays: small to hand to worker processes, which find each request by its index."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstore.workload.hints import Said
from kvstore.workload.keys import chain_keys
from kvstore.workload.trace import Trace
from kvstore_client import Hint
from kvstore_wire.namespace import Chains, Geometry, NamespaceSpec

NAME_CHARACTERS = 100  # Of a trace's name, so that the namespace's name stays within its limit.


@dataclass(frozen=True, eq=False)
class Plan:
    """Requests by index.

    Shapes: block_ids int64[accesses], starts int64[requests + 1]: request i has block_ids[starts[i] : starts[i + 1]].
    Units: times_s seconds from the first request.
    """

    trace_name: str
    block_tokens: int
    block_ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.float64]
    part_bytes: int
    salt: bytes
    said: Said | None = None  # What the caller of each request says of its next one, in seconds of the replay.

    @property
    def request_count(self) -> int:
        return len(self.starts) - 1

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest request."""
        return int(np.diff(self.starts).max(initial=0))

    def keys(self, index: int) -> list[bytes]:
        """Returns the store keys of one request, head first."""
        return chain_keys(self.block_ids[self.starts[index] : self.starts[index + 1]], self.salt)

    def hint(self, index: int) -> Hint | None:
        """Returns what the caller of one request says."""
        if self.said is None:
            return None
        seconds = float(self.said.next_use_s[index])
        return Hint(None if math.isnan(seconds) else seconds, int(self.said.tags[index]))

    def spec(self) -> NamespaceSpec:
        """Returns the namespace that the workers share. Its geometry has the trace's block and one part a block."""
        return NamespaceSpec(
            name=f"replay/{self.trace_name[:NAME_CHARACTERS]}",
            model="replay",
            part_bytes=self.part_bytes,
            key_scheme="kvcommons.trace.v1",
            geometry=Geometry(
                block_tokens=self.block_tokens, dtype="uint8", layers=1, kv_heads=1, head_dim=1, layout="payload"
            ),
            chains=Chains.CHAINED,
        )


def plan_of(trace: Trace, *, part_bytes: int, salt: bytes, said: Said | None = None, speed: float = 1.0) -> Plan:
    """Packs a trace. Two salts share no key, so that a replay finds nothing of an earlier one.

    `said`: in the trace's own seconds, of which `speed` pass in one.
    """
    ids = [request.block_ids for request in trace.requests]
    first_s = trace.requests[0].time_s if trace.requests else 0.0
    return Plan(
        trace_name=trace.name,
        block_tokens=trace.block_tokens,
        block_ids=np.concatenate(ids) if ids else np.empty(0, np.int64),
        starts=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        times_s=np.array([request.time_s - first_s for request in trace.requests]),
        part_bytes=part_bytes,
        salt=salt,
        said=None if said is None else replace(said, next_use_s=said.next_use_s / speed),
    )


def first_requests(trace: Trace, count: int | None) -> Trace:
    """Returns the trace cut to its first requests; all of it for None."""
    return trace if count is None else replace(trace, requests=trace.requests[:count])
