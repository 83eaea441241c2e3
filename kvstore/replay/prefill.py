"""What a prefill worker does for one request: look up, read and verify what is there, write what is not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvstore.replay.buffers import BufferPool, PartBuffer
from kvstore.replay.outcomes import NOT_MEASURED, Delivery, FromDisk, Prefilled
from kvstore.replay.plan import Plan
from kvstore.replay.turns import Turn
from kvstore_client import AsyncNamespace, BlockState, Chain, Coverage, Hint, PartState, ReadLease, WriteLease

_THERE = bytes((BlockState.HOT, BlockState.WARM, BlockState.IN_FLIGHT))
_STORED_PARTS = (PartState.CREATED, PartState.PRESENT, PartState.IN_FLIGHT)
_MAY_FIT = (PartState.FULL, PartState.BEYOND)
_HOT = bytes((BlockState.HOT,))
_MAY_COME = (BlockState.WARM, BlockState.BUSY)


@dataclass
class _Findings:
    """What is known of one request so far."""

    keys: list[bytes]
    hint: Hint | None
    matched: bytes = b""  # The state of each key.
    in_flight: list[int] = field(default_factory=list)
    match_ms: float = NOT_MEASURED
    acquire_ms: float = 0.0
    lease: ReadLease | None = None
    leased: bytes = b""  # The state of each key that was acquired.
    read_blocks: int = 0  # Leading ones that are in the buffer.
    released_blocks: int = 0  # Of them, before Reserve.
    delivery: Delivery = field(default_factory=Delivery)
    reserved: WriteLease | None = None
    created_blocks: int = 0
    refused_blocks: int = 0
    written_bytes: int = 0
    put_ms: float = NOT_MEASURED
    failures: list[str] = field(default_factory=list)

    def failed(self, verb: str, failure: Exception | None) -> None:
        if failure is not None:
            self.failures.append(f"{verb}: {failure}")

    @property
    def left(self) -> range:
        """Indexes of the keys behind what was read and released before the chain was reserved."""
        return range(self.released_blocks, len(self.keys))

    @property
    def more_may_come(self) -> bool:
        """Whether a lease has what there was room for, and more of the chain is on disk: once it is released."""
        return self.lease is not None and len(self.lease.grants) > 0 and self.end_state in _MAY_COME

    @property
    def end_state(self) -> int:
        """Why the first block that is not leased is not; HOT where all are."""
        end = len(self.leased) - len(self.leased.lstrip(_HOT))
        return self.leased[end] if end < len(self.leased) else BlockState.HOT


class Prefill:
    """One prefill worker's handling of requests, several at a time."""

    def __init__(self, plan: Plan, namespace: AsyncNamespace, *, turn: Turn, pool: BufferPool, wait_ms: int) -> None:
        self._plan, self._namespace, self._turn = plan, namespace, turn
        self._pool, self._wait_ms = pool, wait_ms
        self._has_disk = False  # The shard, as far as is known.

    async def run(self, index: int) -> Prefilled:
        """Serves one request. Calls must be made in trace order; they overlap where bytes move."""
        found = _Findings(self._plan.keys(index), self._plan.hint(index))
        with self._pool.lend() as buffer:
            await self._turn.take()
            try:
                if found.keys:
                    await self._look_up(found, buffer)
            finally:
                self._turn.pass_on()
            await self._read(found, buffer)
            await self._write(found, buffer)
        return _outcome(index, found)

    async def _look_up(self, found: _Findings, buffer: PartBuffer) -> None:
        """Matches all, leases the leading run, waiting for what is in flight or on disk, and reserves the chain: what
        is on disk behind a missing block too, since the request makes it anew and the store is to know that it is used.

        Where memory has no room for all of a run that is on disk, what came is read at once, and more asked for.
        """
        chain = Chain(found.keys, position=0)
        start_s = time.perf_counter()
        match = await self._namespace.match(chain, coverage=Coverage.EACH)
        found.match_ms = _since_ms(start_s)
        found.failed("match", match.failure)
        found.matched = match.states
        self._has_disk |= BlockState.WARM in match.states
        leading = len(match.states) - len(match.states.lstrip(_THERE))
        found.in_flight = [i for i in range(leading) if match.states[i] == BlockState.IN_FLIGHT]
        if leading:
            await self._acquire(found, leading)
            while found.more_may_come and found.acquire_ms < self._wait_ms and await self._read(found, buffer):
                found.released_blocks = found.read_blocks
                await self._acquire(found, leading)
        found.reserved = await self._reserve(found, list(found.left))

    async def _acquire(self, found: _Findings, leading: int) -> None:
        """Leases what is not read yet; all of a request waits no longer than it may."""
        start_s, first = time.perf_counter(), found.read_blocks
        wait_ms = max(0, self._wait_ms - int(found.acquire_ms))
        chain = Chain(found.keys[first:leading], position=0)
        found.lease = await self._namespace.acquire(chain, wait_ms=wait_ms, hint=found.hint)
        found.acquire_ms += _since_ms(start_s)
        found.leased = _HOT * first + found.lease.states
        found.failed("acquire", found.lease.failure)

    async def _read(self, found: _Findings, buffer: PartBuffer) -> bool:
        """Reads under the lease, releases it and verifies; what a release does not vouch for is dropped.

        Returns whether all that was leased came.
        """
        lease, found.lease = found.lease, None
        if lease is None or not len(lease.grants):
            return False
        start_s, first = time.perf_counter(), found.read_blocks
        count = len(lease.grants)
        read = await self._namespace.read(lease, buffer.parts[first : first + count])
        valid = await lease.release(corrupt=read.corrupt)
        get_ms = max(0.0, found.delivery.get_ms) + _since_ms(start_s)
        found.failed("read", read.failure)
        if not valid or read.failure is not None:
            corrupt_blocks = found.delivery.corrupt_blocks + len(read.corrupt)
            found.delivery = found.delivery._replace(corrupt_blocks=corrupt_blocks)
            return False
        usable = min(read.corrupt, default=count)
        wrong_bytes = buffer.wrong_bytes(found.keys[first : first + usable], first)
        found.read_blocks += count
        found.delivery = Delivery(
            good_blocks=found.delivery.good_blocks + (0 if wrong_bytes else usable),
            read_bytes=found.delivery.read_bytes + read.size_bytes,
            wrong_bytes=found.delivery.wrong_bytes + wrong_bytes,
            corrupt_blocks=found.delivery.corrupt_blocks + len(read.corrupt),
            get_ms=get_ms,
        )
        return usable == count and not wrong_bytes

    async def _reserve(self, found: _Findings, asked: list[int]) -> WriteLease:
        chain = Chain([found.keys[i] for i in asked], position=0)
        wait_ms = self._wait_ms if self._has_disk else 0
        reserved = await self._namespace.reserve(chain, wait_ms=wait_ms, hint=found.hint)
        found.failed("reserve", reserved.failure)
        return reserved

    async def _write(self, found: _Findings, buffer: PartBuffer) -> None:
        """Fills what was reserved. What a shard with a disk had no room for is reserved and filled a little later, when
        its disk has taken what was in the way, as long as a request may wait."""
        reserved, numbers, start_s = found.reserved, list(found.left), time.perf_counter()
        lost_blocks = 0
        while reserved is not None:
            states = reserved.states
            again = _MAY_FIT if PartState.FULL in states else ()
            left = [number for number, s in zip(numbers, states, strict=False) if s in again]
            lost_blocks += sum(s not in (*_STORED_PARTS, *again) for s in states)
            found.refused_blocks = lost_blocks + len(left)
            if reserved.created:
                values = buffer.fill([found.keys[numbers[i]] for i in reserved.created])
                write_s = time.perf_counter()
                done = await self._namespace.write(reserved, values)
                found.put_ms = max(0.0, found.put_ms) + _since_ms(write_s)
                found.failed("write", done.failure)
                found.created_blocks += len(reserved.created)
                found.written_bytes += done.stored * self._plan.part_bytes
            waited_ms = _since_ms(start_s) + reserved.retry_after_ms
            numbers = left
            if not numbers or not self._has_disk or waited_ms > self._wait_ms or reserved.failure is not None:
                return
            await asyncio.sleep(reserved.retry_after_ms / 1000)
            reserved = await self._reserve(found, numbers)


def _outcome(index: int, found: _Findings) -> Prefilled:
    delivery = found.delivery
    if delivery.get_ms != NOT_MEASURED:
        delivery = delivery._replace(get_ms=delivery.get_ms + found.acquire_ms)
    return Prefilled(
        request=index,
        prefix_hits=delivery.good_blocks,
        block_hits=sum(found.matched.count(state) for state in _THERE),
        waited_blocks=sum(i < delivery.good_blocks for i in found.in_flight),
        delivery=delivery,
        stored_blocks=found.created_blocks,
        refused_blocks=found.refused_blocks,
        written_bytes=found.written_bytes,
        match_ms=found.match_ms,
        put_ms=found.put_ms,
        failures=tuple(found.failures),
        from_disk=FromDisk.of(found.matched, found.leased, good_blocks=delivery.good_blocks),
    )


def _since_ms(start_s: float) -> float:
    return (time.perf_counter() - start_s) * 1000
