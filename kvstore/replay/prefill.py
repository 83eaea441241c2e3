"""What a prefill worker does for one request: look up, read and verify what is there, write what is not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvstore.replay.buffers import BufferPool, PartBuffer
from kvstore.replay.outcomes import NOT_MEASURED, Delivery, FromDisk, Prefilled
from kvstore.replay.plan import Plan
from kvstore.replay.turns import Turn
from kvstore_client import AsyncNamespace, BlockState, Chain, Coverage, PartState, ReadLease, WriteLease

_THERE = bytes((BlockState.HOT, BlockState.WARM, BlockState.IN_FLIGHT))
_STORED_PARTS = (PartState.CREATED, PartState.PRESENT, PartState.IN_FLIGHT)


@dataclass
class _Findings:
    """What is known of one request so far."""

    keys: list[bytes]
    matched: bytes = b""  # The state of each key.
    in_flight: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # Indexes of the keys that were given to Reserve.
    match_ms: float = NOT_MEASURED
    acquire_ms: float = 0.0
    lease: ReadLease | None = None
    reserved: WriteLease | None = None
    failures: list[str] = field(default_factory=list)

    def failed(self, verb: str, failure: Exception | None) -> None:
        if failure is not None:
            self.failures.append(f"{verb}: {failure}")


class Prefill:
    """One prefill worker's handling of requests, several at a time."""

    def __init__(self, plan: Plan, namespace: AsyncNamespace, *, turn: Turn, pool: BufferPool, wait_ms: int) -> None:
        self._plan, self._namespace, self._turn = plan, namespace, turn
        self._pool, self._wait_ms = pool, wait_ms

    async def run(self, index: int) -> Prefilled:
        """Serves one request. Calls must be made in trace order; they overlap where bytes move."""
        found = _Findings(self._plan.keys(index))
        await self._turn.take()
        try:
            if found.keys:
                await self._look_up(found)
        finally:
            self._turn.pass_on()
        with self._pool.lend() as buffer:
            delivery = await self._read(found, buffer)
            written_bytes, put_ms = await self._write(found, buffer)
        return _outcome(index, found, delivery, written_bytes=written_bytes, put_ms=put_ms)

    async def _look_up(self, found: _Findings) -> None:
        """Matches all, leases the leading run, waiting for what is in flight or on disk, and reserves the chain."""
        chain = Chain(found.keys, position=0)
        start_s = time.perf_counter()
        match = await self._namespace.match(chain, coverage=Coverage.EACH)
        found.match_ms = _since_ms(start_s)
        found.failed("match", match.failure)
        found.matched = match.states
        leading = len(match.states) - len(match.states.lstrip(_THERE))
        found.in_flight = [i for i in range(leading) if match.states[i] == BlockState.IN_FLIGHT]
        if leading:
            await self._acquire(found, Chain(found.keys[:leading], position=0))
        found.asked = worth_writing(found.matched, leading)
        found.reserved = await self._namespace.reserve(Chain([found.keys[i] for i in found.asked], position=0))
        found.failed("reserve", found.reserved.failure)

    async def _acquire(self, found: _Findings, chain: Chain) -> None:
        start_s = time.perf_counter()
        found.lease = await self._namespace.acquire(chain, wait_ms=self._wait_ms)
        found.acquire_ms = _since_ms(start_s)
        found.failed("acquire", found.lease.failure)

    async def _read(self, found: _Findings, buffer: PartBuffer) -> Delivery:
        """Reads under the lease, releases it and verifies; what a release does not vouch for is dropped."""
        lease = found.lease
        if lease is None or not len(lease.grants):
            return Delivery()
        start_s = time.perf_counter()
        count = len(lease.grants)
        read = await self._namespace.read(lease, buffer.parts[:count])
        valid = await lease.release(corrupt=read.corrupt)
        get_ms = found.acquire_ms + _since_ms(start_s)
        found.failed("read", read.failure)
        if not valid or read.failure is not None:
            return Delivery(corrupt_blocks=len(read.corrupt))
        usable = min(read.corrupt, default=count)
        wrong_bytes = buffer.wrong_bytes(found.keys[:usable])
        return Delivery(
            good_blocks=0 if wrong_bytes else usable,
            read_bytes=read.size_bytes,
            wrong_bytes=wrong_bytes,
            corrupt_blocks=len(read.corrupt),
            get_ms=get_ms,
        )

    async def _write(self, found: _Findings, buffer: PartBuffer) -> tuple[int, float]:
        """Fills what was reserved; returns bytes written and milliseconds taken."""
        reserved = found.reserved
        if reserved is None or not reserved.created:
            return 0, NOT_MEASURED
        values = buffer.fill([found.keys[found.asked[i]] for i in reserved.created])
        start_s = time.perf_counter()
        done = await self._namespace.write(reserved, values)
        put_ms = _since_ms(start_s)
        found.failed("write", done.failure)
        return done.stored * self._plan.part_bytes, put_ms


def _outcome(index: int, found: _Findings, delivery: Delivery, *, written_bytes: int, put_ms: float) -> Prefilled:
    states = b"" if found.reserved is None else found.reserved.states
    accepted = sum(states.count(state) for state in _STORED_PARTS)
    return Prefilled(
        request=index,
        prefix_hits=delivery.good_blocks,
        block_hits=sum(found.matched.count(state) for state in _THERE),
        waited_blocks=sum(i < delivery.good_blocks for i in found.in_flight),
        delivery=delivery,
        stored_blocks=0 if found.reserved is None else len(found.reserved.created),
        refused_blocks=len(states) - accepted,
        written_bytes=written_bytes,
        match_ms=found.match_ms,
        put_ms=put_ms,
        failures=tuple(found.failures),
        from_disk=FromDisk.of(
            found.matched,
            b"" if found.lease is None else found.lease.states,
            good_blocks=delivery.good_blocks,
        ),
    )


def worth_writing(matched: bytes, leading: int) -> list[int]:
    """Returns the indexes of a chain's blocks but those on disk behind a block that is in no tier: they are stored.

    What Acquire was asked for and did not bring is not there for this request, which has to make it anew.
    """
    return [i for i, state in enumerate(matched) if state != BlockState.WARM or i < leading]


def _since_ms(start_s: float) -> float:
    return (time.perf_counter() - start_s) * 1000
