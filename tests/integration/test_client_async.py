"""The asynchronous client against a peer that behaves."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import (
    OVER,
    AsyncClient,
    AsyncNamespace,
    BlockState,
    Chain,
    Chains,
    ClientOptions,
    Coverage,
    DeleteState,
    Extras,
    Hint,
    InvalidArgument,
    PartState,
    chain_keys,
)
from kvstore_client.question import Question
from kvstore_wire.keys import Adapter
from kvstore_wire.v1 import types_pb2 as types
from tests.integration.client_cases import PART_BYTES, keys, kv_spec, opaque_spec, value
from tests.integration.client_peer import LIMITS, FaultyPeer

HIT, MISS, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND


@pytest.fixture
def peer() -> Iterator[FaultyPeer]:
    made = FaultyPeer().start()
    yield made
    made.stop()


@pytest.fixture
async def client(peer: FaultyPeer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(ClientOptions(peer.target, default_deadline_ms=5000)) as made:
        yield made


@pytest.fixture
def ns(client: AsyncClient) -> AsyncNamespace:
    return client.namespace(kv_spec())


async def test_what_is_put_comes_back_as_it_was(ns: AsyncNamespace, client: AsyncClient) -> None:
    blocks, values = keys(5), [value(i) for i in range(5)]
    put = await ns.put(blocks, values)
    assert put.ok
    assert (put.stored, put.present) == (5, 0)
    again = await ns.put(blocks, values)
    assert again.ok
    assert (again.stored, again.present) == (0, 5)
    assert (await ns.match(blocks)).prefix_blocks == 5
    got = await ns.get(blocks)
    assert got.values is not None
    assert [bytes(v or b"") for v in got.values] == values
    assert (got.prefix_blocks, got.size_bytes, got.failure) == (5, 5 * PART_BYTES, None)
    assert got.lengths.tolist() == [[PART_BYTES]] * 5
    assert client.transport == "grpc"


async def test_get_lands_in_scattered_slices_and_arrays(client: AsyncClient) -> None:
    ns = client.namespace(kv_spec(layer_groups=2))
    blocks, values = keys(3), [value(i) for i in range(6)]
    assert (await ns.put(blocks, values)).ok
    pool = np.zeros((6, 5, 100), np.float16)  # Five pieces of 200 bytes a part.
    got = await ns.get(blocks, into=[[pool[i, j] for j in range(5)] for i in range(6)])
    assert got.values is None
    assert got.prefix_blocks == 3
    assert [pool[i].tobytes() for i in range(6)] == values
    second = bytearray(PART_BYTES)
    some = await ns.get(blocks[1:2], into=[second], parts=(1,))
    assert some.states == bytes((HIT,))
    assert bytes(second) == values[3]


async def test_a_missing_block_ends_a_prefix_but_not_a_set(ns: AsyncNamespace) -> None:
    blocks = keys(4)
    await ns.put([blocks[0], blocks[1], blocks[3]], [value(i) for i in (0, 1, 3)])
    match = await ns.match(blocks)
    assert match.states == bytes((HIT, HIT, MISS, BEYOND))
    got = await ns.get(blocks)
    assert got.states == bytes((HIT, HIT, MISS, BEYOND))
    each = await ns.get(blocks, coverage=Coverage.EACH)
    assert each.states == bytes((HIT, HIT, MISS, HIT))
    assert each.prefix_blocks == 2
    assert each.values is not None
    assert each.values[2] is None
    assert bytes(each.values[3] or b"") == value(3)


@pytest.mark.parametrize("size", [1, 511, 4095, 4096, 4097, 3_098_112])
async def test_values_keep_their_length(client: AsyncClient, size: int) -> None:
    ns = client.namespace(opaque_spec())
    data = value("v", size)
    assert (await ns.put(keys(1), [data])).ok
    room = bytearray(size + 100)
    got = await ns.get(keys(1), into=[room])
    assert got.lengths.tolist() == [[size]]
    assert bytes(room[:size]) == data
    assert bytes(room[size:]) == bytes(100)


@pytest.mark.parametrize("size", [(4 << 20) - 1, 4 << 20, (4 << 20) + 1, 16 << 20])
async def test_blocks_around_grpcs_own_limit_pass_both_ways(client: AsyncClient, size: int) -> None:
    ns = client.namespace(opaque_spec(part_bytes=16 << 20))
    data = value("big", size)
    assert (await ns.put(keys(1), [data])).ok
    got = await ns.get(keys(1))
    assert got.values is not None
    assert bytes(got.values[0] or b"") == data


async def test_above_the_stated_maximum_the_error_names_it(ns: AsyncNamespace, client: AsyncClient) -> None:
    small = client.namespace(opaque_spec(part_bytes=100))
    with pytest.raises(InvalidArgument, match=r"values\[0\].*at most 100 bytes"):
        await small.put(keys(1), [bytes(101)])
    with pytest.raises(InvalidArgument, match=r"wait_ms.*10000"):
        await ns.get(keys(1), wait_ms=10_001)
    with pytest.raises(InvalidArgument, match=r"keys.*256"):
        await ns.acquire(keys(257))


async def test_an_empty_value_is_a_hit_and_a_missing_one_is_not(client: AsyncClient) -> None:
    ns = client.namespace(opaque_spec())
    blocks = keys(3)
    put = await ns.put(blocks[:2], [b"", b"x"])
    assert put.stored == 2
    got = await ns.get(blocks, coverage=Coverage.EACH)
    assert got.states == bytes((HIT, HIT, MISS))
    assert got.values is not None
    assert [None if v is None else bytes(v) for v in got.values] == [b"", b"x", None]
    assert got.lengths.tolist() == [[0], [1], [0]]


async def test_a_value_larger_than_its_buffer_is_a_counted_miss(client: AsyncClient) -> None:
    ns = client.namespace(opaque_spec())
    blocks = keys(2)
    await ns.put(blocks, [bytes(3900), b"small"])
    short, wide = bytearray(b"\x55" * 1000), bytearray(15_500)
    got = await ns.get(blocks, into=[short, wide], coverage=Coverage.EACH)
    assert got.states == bytes((MISS, HIT))
    assert got.mismatched_blocks == client.stats().size_mismatches == 1
    assert bytes(short) == b"\x55" * 1000
    assert got.failure is None


async def test_a_buffer_of_another_size_is_refused_before_a_byte_moves(ns: AsyncNamespace, peer: FaultyPeer) -> None:
    await ns.put(keys(1), [value(0)])
    for wrong in (bytearray(PART_BYTES - 1), bytearray(PART_BYTES + 1)):
        with pytest.raises(InvalidArgument, match=r"into\[0\].*exactly 1000 bytes"):
            await ns.get(keys(1), into=[wrong])
    with pytest.raises(InvalidArgument, match=r"into\[0\]: is read-only"):
        await ns.get(keys(1), into=[bytes(PART_BYTES)])
    with pytest.raises(InvalidArgument, match="not contiguous"):
        await ns.get(keys(1), into=[np.zeros((PART_BYTES, 2), np.uint8)[:, 0]])
    assert peer.calls["Get"] == 0


async def test_stored_bytes_stay_bytes(client: AsyncClient, tmp_path: Path) -> None:
    witness = tmp_path / "made-by-pickle"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (witness,))

    data = pickle.dumps(Trap())
    ns = client.namespace(opaque_spec())
    await ns.put(keys(1), [data])
    got = await ns.get(keys(1))
    assert got.values is not None
    assert bytes(got.values[0] or b"") == data
    assert not witness.exists()


async def test_large_puts_send_only_what_is_not_stored(client: AsyncClient, peer: FaultyPeer) -> None:
    ns = client.namespace(kv_spec(part_bytes=600_000))
    blocks, values = keys(4), [value(i, 600_000) for i in range(4)]
    await ns.put(blocks[:2], values[:2])
    before = peer.received_bytes
    put = await ns.put(blocks, values)
    assert put.states == bytes((PartState.PRESENT,) * 2 + (PartState.COMMITTED,) * 2)
    assert put.ok
    assert peer.received_bytes - before == 2 * 600_000
    got = await ns.get(blocks)
    assert got.values is not None
    assert [bytes(v or b"") for v in got.values] == values


async def test_batches_beyond_the_limits_are_cut_and_put_together(client: AsyncClient, peer: FaultyPeer) -> None:
    peer.limits.MergeFrom(types.Limits(max_match_blocks=10, max_blocks=4))
    ns = client.namespace(kv_spec())
    blocks, values = keys(23), [value(i) for i in range(23)]
    put = await ns.put(blocks, values)
    assert put.ok
    assert put.stored == 23
    got = await ns.get(blocks)
    assert got.values is not None
    assert [bytes(v or b"") for v in got.values] == values
    assert (peer.calls["Put"], peer.calls["Get"]) == (6, 6)
    assert (await ns.match(blocks)).prefix_blocks == 23
    assert (await ns.delete(blocks[10:11])).states == bytes((DeleteState.DELETED,))
    calls = peer.calls["Get"]
    ended = await ns.get(blocks)
    assert ended.states == bytes((HIT,) * 10 + (MISS,) + (BEYOND,) * 12)
    assert peer.calls["Get"] - calls == 3
    match = await ns.match(blocks)
    assert match.states == ended.states
    assert (await ns.match(blocks, coverage=Coverage.EACH)).states.count(HIT) == 22
    peer.limits.CopyFrom(LIMITS)


async def test_a_cut_chain_says_where_its_pieces_hang() -> None:
    blocks = keys(3)
    whole = Question(kv_spec(chains=Chains.CHAINED), Chain(blocks, parent=b"p" * 32, position=7))
    assert whole.piece(0, 3) is whole
    later = whole.piece(2, 3).chain
    assert (later.keys, later.parent, later.position) == (blocks[2:], blocks[1], 9)
    unchained = Question(kv_spec(), Chain(blocks)).piece(1, 2).chain
    assert (unchained.parent, unchained.position) == (b"", None)


async def test_reading_under_a_lease(ns: AsyncNamespace) -> None:
    blocks = keys(3)
    await ns.put(blocks[:2], [value(0), value(1)])
    async with await ns.acquire(blocks) as lease:
        assert lease.states == bytes((HIT, HIT, MISS))
        assert lease.prefix_blocks == len(lease.grants) == 2
        assert lease.grants.lengths.dtype == np.uint64
        read = await ns.read(lease)
        assert read.values is not None
        assert [bytes(v) for v in read.values] == [value(0), value(1)]
        assert read.corrupt == ()
        assert (await ns.renew([lease])).valid == (True,)
        assert await lease.release() is True
    assert lease.valid is True
    assert await lease.release() is False
    late = await ns.read(lease)
    assert late.values is None
    assert late.failure is not None


async def test_writing_under_a_lease(ns: AsyncNamespace, client: AsyncClient) -> None:
    blocks = keys(3)
    await ns.put(blocks[:1], [value(0)])
    lease = await ns.reserve(blocks)
    assert lease.created == (1, 2)
    assert lease.held
    with pytest.raises(InvalidArgument, match=r"values\[1\]"):
        await ns.write(lease, [value(1), b"short"])
    done = await ns.write(lease, [value(1), [value(2)[:10], value(2)[10:]]])
    assert done.stored == 2
    assert not lease.held
    assert (await ns.match(blocks)).prefix_blocks == 3
    assert client.stats().stored_bytes == 3 * PART_BYTES
    async with await ns.reserve(keys(1, "other")) as dropped:
        assert dropped.held
    assert not dropped.held
    assert await dropped.abort() is False


async def test_commit_of_what_never_landed_stores_nothing(ns: AsyncNamespace, client: AsyncClient) -> None:
    lease = await ns.reserve(keys(1))
    done = await lease.commit([123])
    assert (done.states, done.stored, done.ok) == (bytes((PartState.UNFILLED,)), 0, False)
    assert lease.held
    assert await lease.abort() is True
    assert client.stats().stored_parts == 0


async def test_hints_travel_to_shards_that_take_them(ns: AsyncNamespace, peer: FaultyPeer) -> None:
    await ns.put(keys(1), [value(0)], hint=Hint(next_use_s=30, session_tag=9))
    await ns.get(keys(1), hint=OVER)
    await ns.get(keys(1))
    put, first, second = (r for r in peer.requests if hasattr(r, "hint"))
    assert (put.hint.next_use, put.hint.session_tag) == (6, 9)
    assert first.hint.HasField("next_use")
    assert first.hint.next_use == 0
    assert not second.HasField("hint")


async def test_hints_stay_at_home_where_the_shard_does_not_know_them() -> None:
    peer = FaultyPeer(features=()).start()
    async with AsyncClient(ClientOptions(peer.target, gives_hints=True)) as client:
        await client.namespace(kv_spec()).get(keys(1), hint=OVER)
    attach, get = peer.requests
    assert list(attach.features) == ["hints"]
    assert not get.HasField("hint")
    peer.stop()


async def test_adapters_and_namespaces_never_share(client: AsyncClient) -> None:
    spec, tokens = kv_spec(), list(range(64))
    a, b = (chain_keys(spec, tokens, extras=[Extras(Adapter(n, "1"))] * 4) for n in ("a", "b"))
    plain = chain_keys(spec, tokens)
    ns = client.namespace(spec)
    assert (await ns.put(a, [value(i) for i in range(4)])).ok
    assert [(await ns.match(k)).prefix_blocks for k in (a, b, plain)] == [4, 0, 0]
    other = client.namespace(kv_spec("fp8", layer_groups=2))
    assert (await other.match(a)).prefix_blocks == 0


async def test_one_session_serves_all_namespaces_and_attaches_once(client: AsyncClient, peer: FaultyPeer) -> None:
    spaces = [client.namespace(kv_spec(f"n{i % 3}", part_bytes=1000 + i % 3)) for i in range(12)]
    await asyncio.gather(*(ns.match(keys(2)) for ns in spaces))
    assert peer.calls["Attach"] == 3
    assert peer.session_count == 1
    assert client.stats().attaches == 1


async def test_small_verbs(ns: AsyncNamespace) -> None:
    assert (await ns.over(keys(3))).blocks == 3
    assert (await ns.over(session_tag=5)).failure is None
    with pytest.raises(InvalidArgument, match="session_tag"):
        await ns.over()
    told = await ns.explain(keys(2))
    assert told.digest == ns.spec.digest
    assert ("model", "m") in told.fields
    assert [b.key for b in told.blocks] == keys(2)
    assert (await ns.match([])).states == b""
    assert (await ns.get([])).states == b""
    assert (await ns.put([], [])).ok
    assert (await ns.delete([])).states == b""


async def test_counters_match_a_known_run(ns: AsyncNamespace, client: AsyncClient) -> None:
    blocks = keys(10)
    await ns.put(blocks[:5], [value(i) for i in range(5)])
    await ns.match(blocks)
    await ns.match(blocks)
    await ns.get(blocks)
    stats = client.stats()
    assert dict(stats.calls) == {"put": 1, "match": 2, "get": 1}
    assert (stats.matched_blocks_asked, stats.matched_blocks) == (20, 10)
    assert (stats.fetched_blocks_asked, stats.fetched_blocks, stats.fetched_bytes) == (10, 5, 5 * PART_BYTES)
    assert (stats.stored_parts, stats.stored_bytes) == (5, 5 * PART_BYTES)
    assert (stats.retries, stats.reattaches, dict(stats.failures)) == (0, 0, {})


async def test_wrong_arguments_are_raised_with_their_field(ns: AsyncNamespace) -> None:
    with pytest.raises(InvalidArgument, match="keys"):
        await ns.match([b"short"])
    with pytest.raises(InvalidArgument, match="every key must be bytes"):
        await ns.match(["0123456789abcdef"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="one length"):
        await ns.match([bytes(16), bytes(32)])
    with pytest.raises(InvalidArgument, match="parts"):
        await ns.match(keys(1), parts=(1,))
    with pytest.raises(InvalidArgument, match=r"values.*one for each part"):
        await ns.put(keys(2), [value(0)])
    with pytest.raises(InvalidArgument, match="not a buffer"):
        await ns.put(keys(1), ["text"])
    with pytest.raises(InvalidArgument, match="deadline_ms"):
        await ns.match(keys(1), deadline_ms=0)
