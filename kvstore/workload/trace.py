"""A trace: requests in time order, each with the ids of its full blocks, head first.

Rules: an id stands for a block *and its whole prefix*, so two requests that share an id share everything before it;
only full blocks have ids, because a store never holds a partly filled one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BlockIds: TypeAlias = npt.NDArray[np.int64]

MAX_BLOCK_ID = (1 << 63) - 1


def as_block_ids(ids: list[int]) -> BlockIds:
    """Pack ids into a read-only array: eight bytes an id, where a tuple of ints takes forty."""
    packed = np.array(ids, dtype=np.int64)
    packed.flags.writeable = False
    return packed


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One prompt as the store sees it.

    Shapes: block_ids int64[full blocks], head first.
    Units: time_s seconds from the start of the trace; turn counts from 1, and is 1 where the trace names no session.
    Owns: block_ids is shared and never written to.
    """

    time_s: float
    session: int | None
    turn: int
    input_tokens: int
    output_tokens: int
    block_ids: BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in time order, over blocks of one size."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def accesses(self) -> int:
        """Return the count of block look-ups: every full block of every request."""
        return sum(len(request.block_ids) for request in self.requests)

    def distinct_blocks(self) -> int:
        """Return the count of different block ids; capacities are stated as a share of it."""
        if not self.requests:
            return 0
        return int(np.unique(np.concatenate([request.block_ids for request in self.requests])).size)

    def span_s(self) -> float:
        """Return the seconds from the first request to the last."""
        if not self.requests:
            return 0.0
        return self.requests[-1].time_s - self.requests[0].time_s
