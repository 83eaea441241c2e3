"""The asynchronous client against a peer that stalls, lies, restarts or is not there."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from kvstore_client import (
    AsyncClient,
    AsyncNamespace,
    BlockState,
    ClientClosed,
    ClientOptions,
    Coverage,
    MalformedAnswer,
    PartState,
)
from kvstore_wire import errors
from kvstore_wire.v1 import block_store_pb2 as store
from tests.integration.client_cases import keys, kv_spec, opaque_spec, value
from tests.integration.client_peer import FaultyPeer

HIT, MISS, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND
BLOCKS = keys(4)
VALUES = [value(i) for i in range(4)]


@pytest.fixture
def peer() -> Iterator[FaultyPeer]:
    made = FaultyPeer().start()
    yield made
    made.stop()


@pytest.fixture
async def client(peer: FaultyPeer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(ClientOptions(peer.target, default_deadline_ms=3000)) as made:
        yield made


@pytest.fixture
async def ns(client: AsyncClient) -> AsyncNamespace:
    made = client.namespace(kv_spec())
    assert (await made.put(BLOCKS, VALUES)).ok
    return made


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "did not come about in time"
        await asyncio.sleep(0.01)


def closed_port() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"


async def test_no_shard_is_a_value_and_is_counted() -> None:
    async with AsyncClient(ClientOptions(closed_port(), default_deadline_ms=500)) as client:
        ns = client.namespace(kv_spec())
        match, got, put = await ns.match(BLOCKS), await ns.get(BLOCKS), await ns.put(BLOCKS, VALUES)
        lease, slots = await ns.acquire(BLOCKS), await ns.reserve(BLOCKS)
        gone = await ns.delete(BLOCKS)
        for answer in (match, got, put, lease, slots, gone):
            assert isinstance(answer.failure, errors.Unreachable)
        assert match.states == got.states == lease.states == bytes(4)
        assert put.states == bytes((PartState.REFUSED,)) * 4
        assert not put.ok
        assert (lease.held, await lease.release(), await slots.abort()) == (False, False, False)
        assert client.stats().failures == {"Unreachable": 6}


@pytest.mark.parametrize("method", ["Attach", "Match", "Get", "Put", "Acquire", "Reserve", "Delete"])
async def test_a_stalled_shard_costs_the_deadline_at_most(peer: FaultyPeer, client: AsyncClient, method: str) -> None:
    peer.faults.stall.add(method)
    ns = client.namespace(kv_spec())
    verb: dict[str, Callable[[], Any]] = {
        "Get": lambda: ns.get(BLOCKS, deadline_ms=200),
        "Put": lambda: ns.put(BLOCKS, VALUES, deadline_ms=200),
        "Acquire": lambda: ns.acquire(BLOCKS, wait_ms=5000, deadline_ms=200),
        "Reserve": lambda: ns.reserve(BLOCKS, deadline_ms=200),
        "Delete": lambda: ns.delete(BLOCKS, deadline_ms=200),
    }
    began_s = time.monotonic()
    answer = await verb.get(method, lambda: ns.match(BLOCKS, deadline_ms=200))()
    assert isinstance(answer.failure, errors.DeadlineExceeded)
    assert not any(answer.states)
    assert time.monotonic() - began_s < 2.5  # Far above 200 ms for a busy machine, far below the stall.


async def test_the_deadline_covers_the_queue_before_the_call(peer: FaultyPeer) -> None:
    options = ClientOptions(peer.target, max_concurrent_calls=1, default_deadline_ms=5000)
    async with AsyncClient(options) as client:
        ns = client.namespace(kv_spec())
        peer.faults.stall.add("Match")
        first = asyncio.create_task(ns.match(BLOCKS, deadline_ms=600))
        await until(lambda: peer.calls["Match"])
        second = await ns.match(BLOCKS, deadline_ms=50)
        assert isinstance(second.failure, errors.DeadlineExceeded)
        assert peer.calls["Match"] == 1
        assert isinstance((await first).failure, errors.DeadlineExceeded)


async def test_a_restart_is_cured_by_one_transparent_retry(
    peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace
) -> None:
    generation = client.generation
    lease = await ns.acquire(BLOCKS)
    peer.stop()
    await until(lambda: client.stats().sessions_lost)
    assert not lease.held
    down = await ns.match(BLOCKS)
    assert isinstance(down.failure, errors.Unreachable)
    peer.start()

    async def works() -> bool:
        return (await ns.match(BLOCKS)).failure is None

    end_s = time.monotonic() + 5
    while not await works():
        assert time.monotonic() < end_s, "the client stayed in back-off"
        await asyncio.sleep(0.05)
    assert (await ns.get(BLOCKS)).prefix_blocks == 4
    assert (await ns.put(keys(1, "new"), [value("new")])).ok
    assert client.generation == (generation or 0) + 1
    assert await lease.release() is False
    assert client.stats().reattaches == 1


async def test_the_first_call_after_an_unnoticed_restart_succeeds(
    peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace
) -> None:
    peer.stop()
    peer.start()
    got = await ns.get(BLOCKS)
    assert (got.failure, got.prefix_blocks) == (None, 4)
    assert client.stats().reattaches == 1


async def test_a_forgotten_session_is_attached_anew_once_for_all(
    peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace
) -> None:
    attaches = peer.calls["Attach"]
    peer.forget_sessions()
    answers = await asyncio.gather(*(ns.match(BLOCKS) for _ in range(20)), ns.put(keys(1, "x"), [value(0)]))
    failures: list[object] = [a.failure for a in answers]  # type: ignore[attr-defined]
    assert failures == [None] * 21
    assert peer.calls["Attach"] - attaches == 1
    assert client.stats().reattaches == 1


async def test_a_shard_that_always_forgets_is_a_value(peer: FaultyPeer, ns: AsyncNamespace) -> None:
    peer.faults.errors["Match"] = [errors.UnknownSession("gone") for _ in range(5)]
    answer = await ns.match(BLOCKS)
    assert isinstance(answer.failure, errors.UnknownSession)
    assert len(peer.faults.errors["Match"]) == 3  # One call and one retry.


async def test_a_dropped_stream_ends_leases_and_the_next_call_attaches(
    peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace
) -> None:
    lease = await ns.acquire(BLOCKS)
    assert lease.held
    peer.drop_sessions()
    await until(lambda: not lease.held)
    assert (await ns.read(lease)).failure is not None
    assert (await ns.match(BLOCKS)).prefix_blocks == 4
    assert client.stats().sessions_lost == 1


async def test_notices_are_seen_and_counted(peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace) -> None:
    lease, kept = await ns.acquire(BLOCKS), await ns.acquire(BLOCKS)
    ended = store.SessionNotice.LeasesEnded(ids=[lease.life.lease.id])
    peer.notify(store.SessionNotice(leases_ended=ended))
    peer.notify(store.SessionNotice(draining=store.SessionNotice.Draining(within_ms=10)))
    peer.notify(store.SessionNotice(purged=store.SessionNotice.Purged(namespace=1)))
    await until(lambda: client.stats().purges)
    assert (lease.held, kept.held, client.draining) == (False, True, True)
    assert client.stats().leases_ended == 1


@pytest.mark.parametrize("fault", ["states", "lengths", "checksums", "state"])
async def test_a_get_that_does_not_fit_the_question_is_no_hit(peer: FaultyPeer, ns: AsyncNamespace, fault: str) -> None:
    def change(raw: bytes) -> bytes:
        answer = store.GetResponse.FromString(raw)
        if answer.WhichOneof("body") == "header":
            changes: dict[str, Callable[[store.GetHeader], object]] = {
                "states": lambda h: setattr(h, "states", h.states[:-1]),
                "lengths": lambda h: h.lengths.pop(),
                "checksums": lambda h: h.checksums.append(1),
                "state": lambda h: setattr(h, "states", b"\x63" * 4),
            }
            changes[fault](answer.header)
        return answer.SerializeToString()

    peer.faults.answers["Get"] = change
    got = await ns.get(BLOCKS)
    assert isinstance(got.failure, MalformedAnswer)
    assert got.states == bytes(4)
    assert got.values == [None] * 4


async def test_answers_of_wrong_length_are_failures(peer: FaultyPeer, ns: AsyncNamespace) -> None:
    def shorter(answer: Any) -> Any:
        answer.states = answer.states[:-1]
        return answer

    peer.faults.answers.update(
        dict.fromkeys(("Match", "Acquire", "Reserve", "Put", "Delete"), shorter), Renew=_no_items, Release=_no_items
    )
    peer.faults.answers["Commit"] = shorter
    answers: list[Any] = [
        await ns.match(BLOCKS),
        await ns.acquire(BLOCKS),
        await ns.reserve(keys(2, "r")),
        await ns.put(keys(2, "p"), VALUES[:2]),
        await ns.delete(keys(2, "d")),
    ]
    for answer in answers:
        assert isinstance(answer.failure, MalformedAnswer)
        assert not any(answer.states)
    del peer.faults.answers["Acquire"]
    lease = await ns.acquire(BLOCKS)
    assert isinstance((await ns.renew([lease])).failure, MalformedAnswer)
    assert await lease.release() is False


def _no_items(answer: Any) -> Any:
    del answer.valid[:]
    return answer


async def test_garbage_is_a_failure(peer: FaultyPeer, ns: AsyncNamespace) -> None:
    peer.faults.answers["Get"] = lambda _: b"\xff\xff\xff"
    peer.faults.answers["Match"] = lambda _: b"\xff\xff\xff"
    assert isinstance((await ns.get(BLOCKS)).failure, MalformedAnswer)
    assert isinstance((await ns.match(BLOCKS)).failure, MalformedAnswer)


@pytest.mark.parametrize("cut_after", [0, 1500])
async def test_a_stream_cut_in_the_middle_is_a_miss(peer: FaultyPeer, ns: AsyncNamespace, cut_after: int) -> None:
    peer.faults.cut_after = cut_after
    got = await ns.get(BLOCKS)
    assert isinstance(got.failure, MalformedAnswer)
    assert got.prefix_blocks == 0
    assert got.size_bytes == 0


async def test_damaged_bytes_end_the_prefix_there(peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace) -> None:
    peer.faults.corrupt.add(BLOCKS[1])
    got = await ns.get(BLOCKS)
    assert got.states == bytes((HIT, MISS, BEYOND, BEYOND))
    assert (got.corrupt_blocks, got.failure) == (1, None)
    assert got.values is not None
    assert [v is None for v in got.values] == [False, True, True, True]
    each = await ns.get(BLOCKS, coverage=Coverage.EACH)
    assert each.states == bytes((HIT, MISS, HIT, HIT))
    assert client.stats().corrupt_blocks == 2
    await until(lambda: peer.calls["Release"] == 2)
    named = [r.corrupt[0].part for r in peer.requests if isinstance(r, store.ReleaseRequest)]
    assert named == [0, 0]


async def test_a_block_that_left_after_the_lookup_is_a_miss_from_there(peer: FaultyPeer, ns: AsyncNamespace) -> None:
    assert (await ns.match(BLOCKS)).prefix_blocks == 4
    await ns.delete(BLOCKS[2:3])
    got = await ns.get(BLOCKS)
    assert got.states == bytes((HIT, HIT, MISS, BEYOND))
    assert (got.prefix_blocks, got.failure) == (2, None)


async def test_a_late_cut_keeps_what_came_before(peer: FaultyPeer, ns: AsyncNamespace, client: AsyncClient) -> None:
    peer.limits.max_blocks = 2
    client2 = AsyncClient(client.options)
    async with client2:
        cut = client2.namespace(kv_spec())
        assert (await cut.match(BLOCKS)).prefix_blocks == 4
        calls = iter(range(9))
        peer.faults.answers["Get"] = lambda raw: raw if next(calls) < 2 else b"\xff"
        got = await cut.get(BLOCKS)
    peer.limits.max_blocks = 256
    assert got.states == bytes((HIT, HIT, MISS, MISS))
    assert isinstance(got.failure, MalformedAnswer)


@pytest.mark.parametrize("state", [PartState.FULL, PartState.DRAINING, PartState.IN_FLIGHT, PartState.CREATED])
@pytest.mark.parametrize("size", [1000, 600_000])
async def test_a_refused_put_never_passes_for_a_stored_one(
    peer: FaultyPeer, client: AsyncClient, state: PartState, size: int
) -> None:
    peer.faults.refuse = state
    ns = client.namespace(kv_spec(part_bytes=size))
    put = await ns.put(BLOCKS, [value(i, size) for i in range(4)])
    assert (put.ok, put.stored, put.present) == (False, 0, 0)
    assert client.stats().stored_parts == 0


@pytest.mark.parametrize("size", [1000, 600_000])
@pytest.mark.parametrize(
    "error", [errors.LeaseExpired("ended"), errors.Internal("disk"), errors.Draining("bye"), errors.Unreachable("cut")]
)
async def test_a_failed_put_stores_nothing_and_says_so(
    peer: FaultyPeer, client: AsyncClient, size: int, error: errors.KvStoreError
) -> None:
    peer.faults.errors["Put"] = [error]
    ns = client.namespace(kv_spec(part_bytes=size))
    put = await ns.put(BLOCKS, [value(i, size) for i in range(4)])
    assert type(put.failure) is type(error)
    assert put.states == bytes(4)
    assert client.stats().failures == {type(error).__name__: 1}
    if size > 1000:
        await until(lambda: peer.calls["Abort"])


async def test_a_tail_without_its_head_is_not_sent(peer: FaultyPeer, client: AsyncClient) -> None:
    peer.faults.refuse = PartState.FULL
    peer.limits.max_blocks = 2
    put = await client.namespace(kv_spec("chain")).put(BLOCKS, VALUES)
    assert put.states == bytes((PartState.FULL,) * 2 + (PartState.BEYOND,) * 2)
    each = await client.namespace(opaque_spec()).put(BLOCKS, VALUES)
    assert each.states == bytes((PartState.FULL,) * 4)
    peer.limits.max_blocks = 256


async def test_a_callers_fault_is_raised(peer: FaultyPeer, client: AsyncClient) -> None:
    peer.faults.errors["Attach"] = [errors.NamespaceMismatch("differs", field="model")]
    with pytest.raises(errors.NamespaceMismatch, match="model"):
        await client.namespace(kv_spec()).match(BLOCKS)
    assert client.stats().failures == {"NamespaceMismatch": 1}


async def test_a_cancelled_get_goes_away_and_the_client_stays(
    peer: FaultyPeer, client: AsyncClient, ns: AsyncNamespace
) -> None:
    peer.faults.stall.add("Get")
    task = asyncio.create_task(ns.get(BLOCKS))
    await until(lambda: peer.calls["Get"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    peer.faults.stall.clear()
    assert (await ns.get(BLOCKS)).prefix_blocks == 4


async def test_closing_under_calls_answers_them(peer: FaultyPeer) -> None:
    client = await AsyncClient(ClientOptions(peer.target, default_deadline_ms=20_000)).open()
    ns = client.namespace(kv_spec())
    await ns.match(BLOCKS)
    peer.faults.stall.add("Match")
    task = asyncio.create_task(ns.match(BLOCKS))
    await until(lambda: peer.calls["Match"] == 2)
    await client.close(200)
    with pytest.raises(ClientClosed):
        await task
    await client.close(200)
    with pytest.raises(ClientClosed):
        await ns.match(BLOCKS)
    with pytest.raises(ClientClosed):
        client.namespace(kv_spec())


async def test_the_log_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvstore_client")
    async with AsyncClient(ClientOptions(closed_port(), default_deadline_ms=500)) as client:
        ns = client.namespace(kv_spec())
        for _ in range(30):
            await ns.match(BLOCKS)
    lines = [r for r in caplog.records if r.name == "kvstore_client"]
    assert len(lines) == 1
    assert "cannot attach" in lines[0].getMessage()
