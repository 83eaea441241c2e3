"""What a decode worker does for one request: read the whole chain, waiting for what is in flight, and verify it."""

from __future__ import annotations

import time

from kvstore.replay.buffers import BufferPool, PartBuffer
from kvstore.replay.outcomes import Decoded, Delivery
from kvstore.replay.plan import Plan
from kvstore_client import AsyncNamespace, Chain, GetResult


class Decode:
    """One decode worker's handling of requests, several at a time."""

    def __init__(self, plan: Plan, namespace: AsyncNamespace, *, pool: BufferPool, wait_ms: int) -> None:
        self._plan, self._namespace = plan, namespace
        self._pool, self._wait_ms = pool, wait_ms

    async def run(self, index: int) -> Decoded:
        """Serves one request: one exchange that leases, reads and releases."""
        keys = self._plan.keys(index)
        if not keys:
            return Decoded(index, 0, Delivery(), ())
        with self._pool.lend() as buffer:
            start_s = time.perf_counter()
            got = await self._namespace.get(
                Chain(keys, position=0), into=buffer.parts[: len(keys)], wait_ms=self._wait_ms
            )
            get_ms = (time.perf_counter() - start_s) * 1000
            delivery = _verified(keys, got, buffer, get_ms=get_ms)
        failures = () if got.failure is None else (f"get: {got.failure}",)
        return Decoded(index, len(keys), delivery, failures)


def _verified(keys: list[bytes], got: GetResult, buffer: PartBuffer, *, get_ms: float) -> Delivery:
    if not got.prefix_blocks:
        return Delivery(corrupt_blocks=got.corrupt_blocks)
    wrong_bytes = buffer.wrong_bytes(keys[: got.prefix_blocks])
    return Delivery(
        good_blocks=0 if wrong_bytes else got.prefix_blocks,
        read_bytes=got.size_bytes,
        wrong_bytes=wrong_bytes,
        corrupt_blocks=got.corrupt_blocks,
        get_ms=get_ms,
    )
