"""Answers of the verbs. A miss, a refusal and a lost shard are values here; `failure` says why a call as a whole
got nothing (or, for a batch that was cut, why the rest got nothing).

State bytes stand in the order of the question: `states[i]` speaks of block (or part) i and compares equal to the
enums below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_wire.errors import KvStoreError
from kvstore_wire.states import BlockState

STORED = bytes((BlockState.HOT, BlockState.WARM))


def leading(states: bytes | bytearray, wanted: bytes) -> int:
    """Returns how many leading states are among `wanted`."""
    return len(states) - len(states.lstrip(wanted))


@dataclass(frozen=True, eq=False)
class MatchResult:
    """`prefix_blocks` leading blocks are stored. A statement about the past."""

    states: bytes
    prefix_blocks: int = 0
    failure: KvStoreError | None = None

    @staticmethod
    def failed(block_count: int, failure: KvStoreError) -> MatchResult:
        return MatchResult(bytes(block_count), failure=failure)


@dataclass(frozen=True, eq=False)
class GetResult:
    """What a get brought. HOT blocks were read and checked; nothing else may be used.

    Shapes: `lengths` (blocks, parts) int64, bytes of each part read, 0 where the block was missed. `values` in key
    then part order, None where missed; None as a whole if the caller gave buffers.
    Owns: the caller; values of one call may share one allocation.
    `corrupt_blocks` did not match their checksum, `mismatched_blocks` were larger than the caller's buffers; both
    are misses. A block of HOT state with length 0 is a hit of an empty value.
    """

    states: bytes
    prefix_blocks: int
    lengths: npt.NDArray[np.int64]
    values: Sequence[memoryview | None] | None
    size_bytes: int = 0
    corrupt_blocks: int = 0
    mismatched_blocks: int = 0
    failure: KvStoreError | None = None

    @staticmethod
    def failed(
        block_count: int,
        parts_per_block: int,
        failure: KvStoreError,
        *,
        values: Sequence[memoryview | None] | None = None,
    ) -> GetResult:
        lengths = np.zeros((block_count, parts_per_block), np.int64)
        return GetResult(bytes(block_count), 0, lengths, values, failure=failure)


@dataclass(frozen=True, eq=False)
class PutResult:
    """What became of each part, key by key. Only COMMITTED and PRESENT parts are stored.

    `stored` parts were written by this call, `present` were there. `retry_after_ms`: when to try FULL parts again.
    """

    states: bytes
    stored: int = 0
    present: int = 0
    retry_after_ms: int = 0
    failure: KvStoreError | None = None

    @property
    def ok(self) -> bool:
        """Whether every part is stored."""
        return self.failure is None and self.stored + self.present == len(self.states)

    @staticmethod
    def failed(part_count: int, failure: KvStoreError) -> PutResult:
        return PutResult(bytes(part_count), failure=failure)


@dataclass(frozen=True, eq=False)
class ReadResult:
    """What reading under a lease brought, in the order of its grants.

    `corrupt` holds the indexes of grants whose bytes did not match: pass them to the lease's release. Nothing may be
    used before that release answered True.
    """

    values: Sequence[memoryview] | None
    size_bytes: int = 0
    corrupt: tuple[int, ...] = ()
    failure: KvStoreError | None = None


@dataclass(frozen=True, eq=False)
class DeleteResult:
    """What became of each key."""

    states: bytes
    failure: KvStoreError | None = None


@dataclass(frozen=True, eq=False)
class OverResult:
    """How many blocks the statement applied to."""

    blocks: int = 0
    failure: KvStoreError | None = None


@dataclass(frozen=True, eq=False)
class RenewResult:
    """One answer a lease: False = it has ended."""

    valid: tuple[bool, ...]
    failure: KvStoreError | None = None


@dataclass(frozen=True)
class ExplainedBlock:
    """What the shard knows of one block."""

    key: bytes
    state: BlockState
    parts_present: int
    parts_total: int
    leases: int
    age_ms: int
    idle_ms: int
    note: str


@dataclass(frozen=True, eq=False)
class ExplainResult:
    """What the shard makes of a namespace and keys. For people."""

    fields: tuple[tuple[str, str], ...] = ()
    digest: bytes = b""
    blocks: tuple[ExplainedBlock, ...] = ()
    first_missing: int | None = None
    failure: KvStoreError | None = None
