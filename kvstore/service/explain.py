"""What a shard makes of a namespace and keys, in words: the answer to "why do these two not hit each other?"."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.core.columns import PRESENT, RESERVED
from kvstore.core.namespaces import Namespace
from kvstore.core.store import STEP_BLOCKS, Store
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types


async def explain(store: Store, namespace: Namespace, keys: Sequence[bytes], now: float) -> pb.ExplainResponse:
    """Describes each key's block; changes nothing. Calls of others pass in between."""
    fields = [types.Fact(name=name, value=shown) for name, shown, _ in namespace.spec.canonical_fields()]
    answer = pb.ExplainResponse(fields=fields, digest=namespace.spec.digest)
    for i, key in enumerate(keys, start=1):
        answer.blocks.append(_explained(store, namespace, key, now))
        if i % STEP_BLOCKS == 0:
            await asyncio.sleep(0)
    missing = (i for i, b in enumerate(answer.blocks) if b.state not in (types.BLOCK_STATE_HOT, types.BLOCK_STATE_WARM))
    first = next(missing, None)
    if first is not None:
        answer.first_missing = first
    return answer


def _explained(store: Store, namespace: Namespace, key: bytes, now: float) -> pb.ExplainedBlock:
    total = namespace.parts_per_block
    block = namespace.blocks.get(key)
    if block is None and store.reader.elsewhere is not None and store.reader.elsewhere(namespace, [key])[0]:
        note = "on disk; a read that may wait brings it into memory"
        return pb.ExplainedBlock(
            key=key, state=types.BLOCK_STATE_WARM, parts_present=total, parts_total=total, note=note
        )
    if block is None:
        note = "not in this shard's index: never stored here, or removed since"
        return pb.ExplainedBlock(key=key, parts_total=total, note=note)
    blocks = store.records.blocks
    first = int(blocks.first_part[block])
    parts = store.records.parts.state[first : first + total]
    present, waiting = int((parts == PRESENT).sum()), int((parts == RESERVED).sum())
    age, ttl = now - float(blocks.created[block]), namespace.rules.ttl_s
    state, note = types.BLOCK_STATE_HOT, ""
    if ttl is not None and age >= ttl:
        state, note = types.BLOCK_STATE_MISSING, f"past the namespace's ttl of {ttl:g} s"
    elif present < total:
        in_flight = present + waiting == total
        state = types.BLOCK_STATE_IN_FLIGHT if in_flight else types.BLOCK_STATE_MISSING
        note = f"{present} of {total} parts committed, {waiting} being written"
    return pb.ExplainedBlock(
        key=key,
        state=state,
        parts_present=present,
        parts_total=total,
        leases=int(blocks.holds[block]),
        age_ms=max(0, int(age * 1000)),
        idle_ms=max(0, int((now - float(blocks.touched[block])) * 1000)),
        note=note,
    )
