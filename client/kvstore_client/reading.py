"""Get by chain: cut to the shard's limits, received, checked, and put together again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvstore_client.batches import check_most, runs, sized_runs
from kvstore_client.buffers import Slices, size_of
from kvstore_client.core import ClientCore
from kvstore_client.deadline import Deadline
from kvstore_client.leases import HOT
from kvstore_client.options import ClientOptions, Verify
from kvstore_client.question import Hint, Question, Range, ranged_bytes
from kvstore_client.receivers import ChainReceiver, Landed
from kvstore_client.results import GetResult, leading
from kvstore_client.session import HINTS, RANGES, Binding
from kvstore_wire import limits as contract
from kvstore_wire.errors import KvStoreError, Unsupported
from kvstore_wire.namespace import Kind
from kvstore_wire.states import BlockState, Coverage
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types


class GetCall:
    """One get of the caller, over as many Gets as it takes. Keeps what came, whatever happens later."""

    def __init__(
        self,
        core: ClientCore,
        asked: Question,
        *,
        into: list[Slices] | None,
        wait_ms: int | None,
        hint: Hint | None,
        ranges: tuple[Range, ...] = (),
    ) -> None:
        self._core, self._asked, self._into = core, asked, into
        self._wait_ms, self._hint, self._ranges = wait_ms, hint, ranges
        count, parts = asked.block_count, asked.parts_per_block
        self._spent_ms = 0
        self._states = bytearray(count)
        self._lengths = np.zeros((count, parts), np.int64)
        self._values: list[memoryview | None] = [None] * (count * parts)
        self._corrupt_blocks = self._mismatched_blocks = self._size_bytes = 0

    async def run(self, deadline: Deadline) -> GetResult:
        asked, core = self._asked, self._core
        limits = (await core.limits(asked.spec, deadline)) if asked.block_count else types.Limits()
        check_most("wait_ms", self._wait_ms or 0, limits.max_wait_ms)
        check_most("parts", asked.parts_per_block, limits.max_parts_per_block or asked.parts_per_block)
        todo, started = deque(self._runs(limits)), time.monotonic()
        while todo:
            self._spent_ms = int(1000 * (time.monotonic() - started))  # All of a call waits no longer than it may.
            first, last = todo.popleft()
            piece = asked.piece(first, last)
            landed = await core.safe(asked.spec, deadline, self._attempt(piece, first, deadline))
            if landed.corrupt_parts:
                core.background(report_corrupt(core, piece, landed.corrupt_parts))
            end = self._cut_short(landed.states)
            if end > 0:  # More than one call may lease: what came has been given back, so go on from there.
                landed = landed.head(end, asked.parts_per_block)
                todo.appendleft((first + end, last))
            self._add(first, landed)
            if asked.coverage is Coverage.PREFIX and leading(landed.states, HOT) < len(landed.states):
                self._states[last:] = bytes((BlockState.BEYOND,)) * (asked.block_count - last)
                break
        return self.result(None)

    def _cut_short(self, states: bytes | bytearray) -> int:
        """Returns how many blocks came before the shard had no room for more: to lease, or to bring from its disk."""
        busy = states.find(BlockState.BUSY)
        if busy < 0 and self._asked.coverage is Coverage.PREFIX and self._wait_ms != 0:
            return states.find(BlockState.WARM)
        return busy

    def result(self, failure: KvStoreError | None) -> GetResult:
        """Returns what came so far; everything else is a miss."""
        states = bytes(self._states)
        self._core.stats.fetched_blocks_asked += self._asked.block_count
        return GetResult(
            states=states,
            prefix_blocks=leading(states, HOT),
            lengths=self._lengths,
            values=None if self._into is not None else self._values,
            size_bytes=self._size_bytes,
            corrupt_blocks=self._corrupt_blocks,
            mismatched_blocks=self._mismatched_blocks,
            failure=failure,
        )

    def _runs(self, limits: types.Limits) -> list[tuple[int, int]]:
        asked, parts = self._asked, self._asked.parts_per_block
        most = min(limits.max_blocks, max(1, contract.MAX_CALL_PARTS // self._asked.parts_per_block))
        if self._into is None and asked.spec.kind is Kind.OPAQUE:
            return list(runs(asked.block_count, most or 1))
        size = asked.spec.part_bytes * parts
        if asked.block_count <= most and size * asked.block_count <= limits.max_call_bytes:
            return [(0, asked.block_count)]
        sizes = [size] * asked.block_count
        if self._into is not None and asked.spec.kind is Kind.OPAQUE:
            sizes = [min(size_of(slices), asked.spec.part_bytes) for slices in self._into]
        return list(sized_runs(sizes, most=most, most_bytes=limits.max_call_bytes, field="keys"))

    def _attempt(self, piece: Question, first: int, deadline: Deadline) -> _Attempt:
        parts = piece.parts_per_block
        into = None if self._into is None else self._into[first * parts : (first + piece.block_count) * parts]
        return _Attempt(
            self._core,
            piece,
            into=into,
            wait_ms=self._wait_ms,
            spent_ms=self._spent_ms,
            hint=self._hint,
            ranges=self._ranges,
            deadline=deadline,
        )

    def _add(self, first: int, landed: Landed) -> None:
        parts, count = self._asked.parts_per_block, len(landed.states)
        self._states[first : first + count] = landed.states
        self._lengths[first : first + count] = np.array(landed.lengths, np.int64).reshape(count, parts)
        if self._into is None:
            self._values[first * parts : (first + count) * parts] = [v[0] if v else None for v in landed.values]
        self._size_bytes += sum(landed.lengths)
        self._corrupt_blocks += len(landed.corrupt_blocks)
        self._mismatched_blocks += len(landed.mismatched_blocks)
        stats = self._core.stats
        stats.fetched_blocks += landed.states.count(BlockState.HOT)
        stats.fetched_bytes += sum(landed.lengths)
        if self._core.options.verify is Verify.OFF:
            stats.unverified_parts += landed.states.count(BlockState.HOT) * self._asked.parts_per_block
        stats.corrupt_blocks += len(landed.corrupt_blocks)
        stats.size_mismatches += len(landed.mismatched_blocks)


class _Attempt:
    """One Get over the wire, repeatable: each run receives afresh."""

    def __init__(
        self,
        core: ClientCore,
        piece: Question,
        *,
        into: Sequence[Slices] | None,
        wait_ms: int | None,
        spent_ms: int,
        hint: Hint | None,
        ranges: tuple[Range, ...],
        deadline: Deadline,
    ) -> None:
        self._core, self._piece, self._into = core, piece, into
        self._wait_ms, self._spent_ms, self._hint, self._deadline = wait_ms, spent_ms, hint, deadline
        self._ranges = ranges

    async def __call__(self, binding: Binding) -> Landed:
        piece = self._piece
        wait_ms = max(0, chosen_wait_ms(self._wait_ms, binding, self._core.options) - self._spent_ms)
        request = store.GetRequest(
            session=binding.session,
            namespace=binding.namespace,
            chain=piece.chain_message(),
            parts=piece.parts_message(),
            coverage=int(piece.coverage),  # type: ignore[arg-type]
            wait_ms=bounded_wait_ms(wait_ms, self._deadline),
            hint=hint_message(binding, self._hint),
            ranges=[r.to_message() for r in self._ranges],
        )
        if self._ranges and RANGES not in binding.features:
            raise Unsupported("this shard does not read ranges", field="ranges")
        ranged = ranged_bytes(self._ranges) if self._ranges else None
        receiver = ChainReceiver(piece, self._into, self._core.options.verify, ranged)
        await self._core.transport(binding).get(request, receiver, self._deadline)
        return receiver.result()


def chosen_wait_ms(wait_ms: int | None, binding: Binding, options: ClientOptions) -> int:
    """Returns how long a read may wait: what its caller said, or what is usual."""
    return binding.default_wait_ms(options) if wait_ms is None else wait_ms


def bounded_wait_ms(wait_ms: int, deadline: Deadline) -> int:
    """Returns how long the shard may wait and still answer in time; a quarter of what is left is for the answer."""
    return min(wait_ms, deadline.remaining_ms() * 3 // 4)


def hint_message(binding: Binding, hint: Hint | None) -> types.Hint | None:
    """Returns the hint for a shard that takes hints, else None."""
    return hint.to_message() if hint is not None and HINTS in binding.features else None


async def report_corrupt(core: ClientCore, piece: Question, parts: Sequence[int]) -> None:
    """Names damaged parts to the shard, which checks them and drops what is damaged on its side too.

    A Get by chain has no lease to name parts of, so the blocks are leased for the report.
    """
    per_block = piece.parts_per_block
    blocks = sorted({part // per_block for part in parts})
    place = {block: i for i, block in enumerate(blocks)}
    asked = Question(piece.spec, type(piece.chain)([piece.chain.keys[b] for b in blocks]), piece.parts, Coverage.EACH)
    deadline = core.deadline(None)
    binding = await core.bind(piece.spec, deadline)
    request = store.AcquireRequest(
        session=binding.session,
        namespace=binding.namespace,
        chain=asked.chain_message(),
        parts=asked.parts_message(),
        coverage=int(Coverage.EACH),  # type: ignore[arg-type]
    )
    lease: types.Lease | None = None
    states = b""
    async for answer in core.answers(binding, "Acquire", request, deadline):
        lease = answer.lease if answer.HasField("lease") else lease
        states += answer.states
    if lease is None:
        return
    hot = [i for i, state in enumerate(states) if state == BlockState.HOT]
    named = [(place[p // per_block], p % per_block) for p in parts]
    corrupt = [
        store.CorruptPart(lease=0, part=hot.index(block) * per_block + part) for block, part in named if block in hot
    ]
    release = store.ReleaseRequest(
        session=binding.session, leases=[lease], corrupt=corrupt[: contract.MAX_CORRUPT_PER_CALL]
    )
    await core.unary(binding, "Release", release, deadline)
