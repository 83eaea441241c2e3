"""What a server's warm tier did in a replay, as its counters tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.replay.sampler import Sample

STATES = ("off", "on", "degraded", "disabled")  # By the gauge warm_state.
_DROPPED = re.compile(r"warm_dropped_(\w+)_blocks")


@dataclass(frozen=True)
class Wear:
    """Counted from the first sample to the last; what is stored, and the state, as in the last.

    `rewritten_blocks` are of `written_blocks`. `promoted_blocks`: brought to memory, whoever asked. `dropped`: blocks
    that left memory and were not written, by why.
    """

    state: str
    capacity_bytes: int
    stored_bytes: int
    stored_blocks: int
    written_blocks: int
    rewritten_blocks: int
    written_bytes: int
    promoted_blocks: int
    dropped: dict[str, int]

    def writes_per_access(self, accesses: int) -> float:
        """Blocks written a block looked up."""
        return self.written_blocks / max(1, accesses)

    def to_json(self, accesses: int) -> dict[str, object]:
        """Returns the figures by name; `accesses`: blocks looked up."""
        return {
            "state": self.state,
            "capacity_bytes": self.capacity_bytes,
            "stored_bytes": self.stored_bytes,
            "stored_blocks": self.stored_blocks,
            "writes_per_access": self.writes_per_access(accesses),
            "written_blocks": self.written_blocks,
            "rewritten_blocks": self.rewritten_blocks,
            "written_bytes": self.written_bytes,
            "promoted_blocks": self.promoted_blocks,
            "dropped_blocks": self.dropped,
        }


def wear_of(samples: Sequence[Sample]) -> Wear | None:
    """Returns None where the server has no warm tier, or its admin port did not answer."""
    if len(samples) < 2:
        return None
    first, last = samples[0].values, samples[-1].values
    state = last.get("warm_state", 0)
    if not state:
        return None

    def grown(name: str) -> int:
        return last.get(name, 0) - first.get(name, 0)

    return Wear(
        state=STATES[state] if state < len(STATES) else f"unknown ({state})",
        capacity_bytes=last.get("warm_capacity_bytes", 0),
        stored_bytes=last.get("warm_stored_bytes", 0),
        stored_blocks=last.get("warm_stored_blocks", 0),
        # The server counts what is written for the first time, and what is written again, each for itself.
        written_blocks=grown("warm_written_blocks") + grown("warm_rewritten_blocks"),
        rewritten_blocks=grown("warm_rewritten_blocks"),
        written_bytes=grown("warm_written_bytes"),
        promoted_blocks=grown("warm_promoted_blocks"),
        dropped={match[1]: grown(name) for name in last if (match := _DROPPED.fullmatch(name))},
    )
