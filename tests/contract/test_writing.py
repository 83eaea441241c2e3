"""Reserve, Commit, Abort, Put and Delete: nothing is visible before its commit, and everything comes back."""

from __future__ import annotations

import pytest

from kvstore_wire.errors import InvalidArgument, LeaseExpired
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import (
    COMMITTED,
    CREATED,
    FULL,
    HOT,
    IN_FLIGHT,
    LOST,
    MISSING,
    PART_BEYOND,
    PRESENT,
    TOO_LARGE,
    UNFILLED,
    WRITING,
    Caller,
    as_stream,
    checksum,
    put_messages,
    value,
)
from tests.contract.conftest import OpenShard, Shard
from tests.integration.server_process import until
from tests.shards import key, keys, kv_spec, opaque_spec

V = [value(i, 4096) for i in range(8)]
SUMS = [checksum(v) for v in V]


async def land(caller: Caller, lease: types.Lease, data: bytes) -> None:
    """Sends bytes of a write lease without the trailer: they land, and nothing is committed."""
    messages = [pb.PutRequest(header=caller.put_header(lease=lease)), pb.PutRequest(data=data)]
    with pytest.raises(InvalidArgument) as caught:
        await caller.door.send("Put", as_stream(messages))
    assert caught.value.field == "trailer"


async def test_reserve_fill_commit_part_by_part(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("parts", layer_groups=2))
    reserved = await caller.reserve(keys(0, 2))
    assert list(reserved.states) == [CREATED] * 4
    assert len(reserved.offsets) == 4
    assert 0 < reserved.lease.ttl_ms <= 10_000
    await land(caller, reserved.lease, b"".join(V[:3]) + V[3][:100])
    assert await caller.match(keys(0, 2)) == [IN_FLIGHT] * 2
    assert await caller.commit(reserved.lease, [SUMS[3], SUMS[0]], parts=[3, 0]) == [UNFILLED, COMMITTED]
    assert await caller.match(keys(0, 2), parts=[0]) == [HOT, IN_FLIGHT]
    assert await caller.commit(reserved.lease, SUMS[:3], parts=[0, 1, 2]) == [PRESENT, COMMITTED, COMMITTED]
    assert (await caller.get([key(0)])).parts == V[:2]
    assert await caller.match(keys(0, 2)) == [HOT, IN_FLIGHT]
    assert await caller.fill(reserved.lease, V[:4]) == [PRESENT] * 3 + [COMMITTED]
    with pytest.raises(LeaseExpired):
        await caller.commit(reserved.lease, SUMS[:4])
    assert (await caller.get(keys(0, 2))).parts == V[:4]
    await shard.local.until_idle()


async def test_a_second_put_cannot_change_what_is_committed(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve(keys(0, 2))
    await land(caller, reserved.lease, V[0])
    assert await caller.commit(reserved.lease, SUMS[:1], parts=[0]) == [COMMITTED]
    assert await caller.fill(reserved.lease, [V[5], V[1]]) == [PRESENT, COMMITTED]
    assert (await caller.get(keys(0, 2))).parts == V[:2]


async def test_a_part_that_is_sent_again_has_landed_only_when_it_is_whole_again(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve([key(0)])
    await land(caller, reserved.lease, V[0])
    await land(caller, reserved.lease, V[5][:100])
    assert await caller.commit(reserved.lease, SUMS[:1]) == [UNFILLED], "half of one value and half of another"
    assert await caller.fill(reserved.lease, V[5:6]) == [COMMITTED]
    assert (await caller.get([key(0)])).parts == V[5:6]


async def test_states_of_reserve_for_stored_written_and_repeated_keys(shard: Shard) -> None:
    caller, other = await shard.caller(), await shard.caller()
    await caller.put([key(0)], V[:1])
    await other.reserve([key(1)])
    reserved = await caller.reserve([key(0), key(1), key(2), key(2)])
    assert list(reserved.states) == [PRESENT, WRITING, CREATED, WRITING]
    assert len(reserved.offsets) == 1
    assert await caller.put([key(0), key(1), key(2)], V[:3]) == [PRESENT, WRITING, WRITING]
    assert await caller.match(keys(0, 3)) == [HOT, IN_FLIGHT, IN_FLIGHT]


async def test_commit_checks_its_arguments_and_changes_nothing(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve(keys(0, 2))
    await land(caller, reserved.lease, V[0] + V[1])
    for checksums, parts, field in (([1], [0, 1], "checksums"), ([1, 2], [0, 0], "parts"), ([1], [2], "parts")):
        with pytest.raises(InvalidArgument) as caught:
            await caller.commit(reserved.lease, checksums, parts=parts)
        assert caught.value.field == field
    assert await caller.commit(reserved.lease, SUMS[:2]) == [COMMITTED] * 2


async def test_abort_drops_what_was_reserved(shard: Shard) -> None:
    caller = await shard.caller()
    free = await caller.gauge("free_bytes")
    reserved = await caller.reserve(keys(0, 4))
    assert await caller.gauge("reserved_bytes") == 4 * 4096
    assert await caller.abort(reserved.lease, reserved.lease) == [True, False]
    assert await caller.gauge("free_bytes") == free
    assert await caller.match(keys(0, 4)) == [MISSING] * 4
    for late in (caller.commit(reserved.lease, SUMS[:4]), caller.fill(reserved.lease, V[:4])):
        with pytest.raises(LeaseExpired):
            await late


async def test_deleting_what_is_being_written_loses_it_at_commit(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve(keys(0, 2))
    await land(caller, reserved.lease, V[0] + V[1])
    assert await caller.delete([key(0)]) == [pb.DELETE_STATE_DEFERRED]
    assert await caller.commit(reserved.lease, SUMS[:2]) == [LOST, COMMITTED]
    assert await caller.match(keys(0, 2)) == [MISSING, HOT]
    assert await caller.put([key(0)], V[:1]) == [COMMITTED]
    await shard.local.until_idle()


async def test_delete_answers_each_key(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 2), V[:2])
    lease = await caller.lease([key(1)])
    gone, kept, absent = pb.DELETE_STATE_DELETED, pb.DELETE_STATE_DEFERRED, pb.DELETE_STATE_NOT_FOUND
    assert await caller.delete([key(9), key(0), key(1), key(0), key(1)]) == [absent, gone, kept, absent, absent]
    assert await caller.match(keys(0, 2)) == [MISSING] * 2
    assert await caller.release(lease) == [True]
    assert shard.local.used_bytes() == 0


async def test_opaque_values_have_lengths_of_their_own(shard: Shard) -> None:
    caller = await shard.caller(opaque_spec("values", part_bytes=5000))
    values = [value(0, 4999), value(1, 5000), value(2, 5001), b""]
    assert await caller.put(keys(0, 4), values, opaque=True) == [COMMITTED, COMMITTED, TOO_LARGE, COMMITTED]
    assert (await caller.get(keys(0, 4))).parts == [values[0], values[1], b""]
    for lengths in ([], [1], [1, 2, 3]):
        with pytest.raises(InvalidArgument) as caught:
            await caller.reserve(keys(5, 7), lengths=lengths)
        assert caught.value.field == "lengths"
    kv = await shard.caller(kv_spec("kv"))
    with pytest.raises(InvalidArgument) as caught:
        await kv.reserve([key(1)], lengths=[4096])
    assert caught.value.field == "lengths"


async def test_in_a_chain_nothing_follows_a_refused_block(shard: Shard) -> None:
    spec = opaque_spec("chain", part_bytes=5000)
    chained = type(spec)(spec.name, spec.model, spec.part_bytes, kind=spec.kind)
    caller = await shard.caller(chained)
    values = [value(0, 10), value(1, 5001), value(2, 10)]
    assert await caller.put(keys(0, 3), values, opaque=True) == [COMMITTED, TOO_LARGE, PART_BEYOND]
    assert await caller.match(keys(0, 3)) == [HOT, MISSING, MISSING]


async def test_a_full_arena_says_when_to_try_again_and_takes_the_block_later(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("big", part_bytes=256 << 10))
    for i in range(12):  # 0.8 of 4 MiB may be leased: 12 blocks.
        assert await caller.put([key(i)], [value(i, 256 << 10)]) == [COMMITTED]
    held = [await caller.lease(keys(i, i + 4)) for i in (0, 4, 8)]
    answer = await caller.reserve([key(20)])
    assert (list(answer.states), answer.HasField("lease")) == ([FULL], False)
    assert answer.retry_after_ms > 0
    header = caller.put_header([key(20)])
    put = await caller.door.send("Put", put_messages(header, [value(20, 256 << 10)]))
    assert (list(put.states), put.retry_after_ms > 0) == ([FULL], True)
    assert await caller.release(*held) == [True] * 3
    assert await caller.put([key(20)], [value(20, 256 << 10)]) == [COMMITTED]


async def test_no_call_reserves_more_bytes_than_its_limit(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("big", part_bytes=256 << 10))
    reserved = await caller.reserve(keys(0, 4))
    assert list(reserved.states) == [CREATED] * 4
    with pytest.raises(InvalidArgument) as caught:
        await caller.reserve(keys(4, 9))
    assert caught.value.limit == f"{1 << 20} bytes"
    assert await caller.abort(reserved.lease) == [True]


async def test_a_put_may_be_cut_anywhere(shard: Shard) -> None:
    caller = await shard.caller()
    for i, piece_bytes in enumerate((1000, 4096, 4097, 8192, 100_000)):
        chain = keys(10 * i, 10 * i + 4)
        messages = put_messages(caller.put_header(chain), V[:4], piece_bytes=piece_bytes)
        assert list((await caller.door.send("Put", messages)).states) == [COMMITTED] * 4
        assert (await caller.get(chain)).parts == V[:4]


HEADER, TRAILER = "header", "trailer"


@pytest.mark.parametrize(
    ("sizes", "checksums", "field"),
    [
        ([4096, 4095], 2, "data"),
        ([4096, 4097], 2, "data"),
        ([], 2, "data"),
        ([8192], 1, "checksums"),
        ([8192], 3, "checksums"),
        ([8192], None, "trailer"),
    ],
)
async def test_a_put_that_does_not_fit_its_header_stores_nothing(
    shard: Shard, sizes: list[int], checksums: int | None, field: str
) -> None:
    caller = await shard.caller()
    messages = [pb.PutRequest(header=caller.put_header(keys(0, 2)))]
    messages += [pb.PutRequest(data=bytes(size)) for size in sizes]
    if checksums is not None:
        messages.append(pb.PutRequest(trailer=pb.PutTrailer(checksums=SUMS[:checksums])))
    with pytest.raises(InvalidArgument) as caught:
        await caller.door.send("Put", as_stream(messages))
    assert caught.value.field == field
    assert await caller.match(keys(0, 2)) == [MISSING] * 2
    assert shard.local.used_bytes() == 0


async def test_a_put_starts_with_one_header(shard: Shard) -> None:
    caller = await shard.caller()
    header = pb.PutRequest(header=caller.put_header([key(0)]))
    for messages in ([], [pb.PutRequest()], [pb.PutRequest(data=V[0]), header], [header, header]):
        with pytest.raises(InvalidArgument) as caught:
            await caller.door.send("Put", as_stream(messages))
        assert caught.value.field == "header"
    assert shard.local.used_bytes() == 0


async def test_a_write_lease_takes_one_put_at_a_time(shard: Shard) -> None:
    caller = await shard.caller()
    reserved = await caller.reserve([key(0)])
    store = shard.local.server.shell.store
    (lease,) = store.leases.all()
    shard.local.failpoints.arm("put.commit", "delay:300ms*1")
    import asyncio

    first = asyncio.ensure_future(caller.fill(reserved.lease, V[:1]))
    await until(lambda: bool(getattr(lease, "busy", False)), "the first Put did not start")
    with pytest.raises(InvalidArgument) as caught:
        await caller.fill(reserved.lease, V[1:2])
    assert caught.value.field == "lease"
    assert await first == [COMMITTED]
    assert (await caller.get([key(0)])).parts == V[:1]


async def test_quota_of_the_namespace_itself(open_shard: OpenShard) -> None:
    shard = await open_shard({"namespaces.default_max_bytes": "16KiB"})
    caller = await shard.caller()
    reserved = await caller.reserve(keys(0, 5))
    assert list(reserved.states) == [CREATED] * 4 + [types.PART_STATE_QUOTA]
    assert reserved.retry_after_ms == 0
    await caller.fill(reserved.lease, V[:4])
    assert await caller.put([key(9)], V[4:5]) == [COMMITTED], "what is not held makes room for its own"
    assert (await caller.counters())["evicted_quota_blocks"] == 1


async def test_ttl_ends_a_block(open_shard: OpenShard) -> None:
    shard = await open_shard({"namespaces.default_ttl": "200ms"})
    caller = await shard.caller()
    await caller.put([key(0)], V[:1])
    store = shard.local.server.shell.store
    (namespace,) = (n for n in store.namespaces if n.spec.name == "a")
    await until(lambda: namespace.counters["expired_blocks"] == 1, "the block outlived its ttl")
    assert await caller.match([key(0)]) == [MISSING]
    assert await caller.put([key(0)], V[:1]) == [COMMITTED]


async def test_hints_and_chain_facts_are_taken_and_checked(shard: Shard) -> None:
    caller = await shard.caller()
    chain = types.Chain(keys=[key(1)], parent=key(0), position=1)
    for next_use in (None, 0, 1, 32):
        hint = types.Hint(session_tag=7) if next_use is None else types.Hint(next_use=next_use, session_tag=7)
        header = pb.PutHeader(session=caller.session, namespace=caller.namespace, chain=chain, hint=hint)
        states = (await caller.door.send("Put", put_messages(header, V[:1]))).states
        assert list(states) in ([COMMITTED], [PRESENT])
    hint = types.Hint(next_use=33)
    acquire, get = caller.acquire_request([key(1)]), caller.get_request([key(1)])
    reserve = pb.ReserveRequest(session=caller.session, namespace=caller.namespace, chain=chain)
    for request in (acquire, get, reserve):
        request.hint.CopyFrom(hint)
    header = pb.PutHeader(session=caller.session, namespace=caller.namespace, chain=chain, hint=hint)
    calls = [
        anext(caller.door.stream("Acquire", acquire)),
        anext(caller.door.stream("Get", get)),
        caller.door.call("Reserve", reserve),
        caller.door.send("Put", put_messages(header, V[:1])),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert caught.value.field.endswith("next_use")
        assert caught.value.limit == "32"


async def test_over_never_fails_for_what_is_not_there(shard: Shard) -> None:
    caller = await shard.caller()
    await caller.put(keys(0, 2), V[:2])
    for request, blocks in (
        (pb.OverRequest(session_tag=7), 0),
        (pb.OverRequest(), 0),
        (pb.OverRequest(chain=types.Chain(keys=keys(0, 4))), 2),
        (pb.OverRequest(chain=types.Chain(keys=keys(0, 4))), 0),
    ):
        request.session, request.namespace = caller.session, caller.namespace
        answer = await caller.door.call("Over", request)
        assert answer.blocks == blocks
    assert "hints" in caller.attached.features
    assert await caller.match(keys(0, 2)) == [HOT, HOT], "until room is needed"


async def test_explain_says_why_a_block_does_not_count(shard: Shard) -> None:
    caller = await shard.caller(kv_spec("parts", layer_groups=2))
    await caller.put([key(0)], V[:2])
    await caller.put([key(1)], V[:1], parts=[0])
    await caller.reserve([key(2)])
    lease = await caller.lease([key(0)])
    request = pb.ExplainRequest(session=caller.session, namespace=caller.namespace, chain=types.Chain(keys=keys(0, 4)))
    answer = await caller.door.call("Explain", request)
    assert [b.key for b in answer.blocks] == keys(0, 4)
    assert [b.state for b in answer.blocks] == [HOT, MISSING, IN_FLIGHT, MISSING]
    assert [b.parts_present for b in answer.blocks] == [2, 1, 0, 0]
    assert {b.parts_total for b in answer.blocks} == {2}
    assert [b.leases for b in answer.blocks] == [1, 0, 1, 0]
    assert [bool(b.note) for b in answer.blocks] == [False, True, True, True]
    assert answer.first_missing == 1
    assert answer.digest == caller.attached.digest
    facts = {f.name: f.value for f in answer.fields}
    assert (facts["geometry.layer_groups"], facts["part_bytes"], facts["kind"]) == ("2", "4096", "KV")
    request.chain.keys[:] = [key(0)]
    assert not (await caller.door.call("Explain", request)).HasField("first_missing")
    await caller.release(lease)
