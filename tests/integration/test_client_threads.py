"""The blocking client: calls from threads, tickets, forks and closing."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore_client import (
    BlockState,
    Cancelled,
    Client,
    ClientClosed,
    ClientOptions,
    GetResult,
    InvalidArgument,
    MatchResult,
    Namespace,
    PutResult,
    QueueFull,
)
from kvstore_wire import errors
from tests.integration.client_cases import PART_BYTES, keys, kv_spec, opaque_spec, value
from tests.integration.client_peer import FaultyPeer

BLOCKS = keys(4)
VALUES = [value(i) for i in range(4)]


@pytest.fixture
def peer() -> Iterator[FaultyPeer]:
    made = FaultyPeer().start()
    yield made
    made.stop()


@pytest.fixture
def client(peer: FaultyPeer) -> Iterator[Client]:
    with Client(ClientOptions(peer.target, default_deadline_ms=5000)) as made:
        yield made


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.namespace(kv_spec())


def test_every_verb_blocks_and_answers(ns: Namespace, client: Client) -> None:
    assert ns.put(BLOCKS, VALUES).ok
    assert ns.match(BLOCKS).prefix_blocks == 4
    room = [bytearray(PART_BYTES) for _ in range(4)]
    assert ns.get(BLOCKS, into=room).prefix_blocks == 4
    assert room == VALUES
    with ns.acquire(BLOCKS) as lease:
        assert lease.prefix_blocks == len(lease.grants) == 4
        read = ns.read(lease)
        assert [bytes(v) for v in read.values or ()] == VALUES
        assert ns.renew([lease]).valid == (True,)
    assert lease.valid is True
    with ns.reserve(keys(1, "new")) as slots:
        assert slots.created == (0,)
        assert ns.write(slots, [value("new")]).ok
    assert ns.delete(BLOCKS[:1]).states == b"\x01"
    assert ns.over(BLOCKS).blocks == 4
    assert ns.explain(BLOCKS).digest == ns.spec.digest
    assert (client.transport, client.draining) == ("grpc", False)
    with pytest.raises(InvalidArgument, match=r"into\[0\]"):
        ns.get(BLOCKS[:1], into=[bytearray(3)])


def test_tickets_finish_and_wake_the_descriptor(ns: Namespace, client: Client) -> None:
    put = ns.submit_put(BLOCKS, VALUES)
    assert select.select([client.fileno()], [], [], 5)[0]
    (done,) = client.poll()
    assert done.ticket == put
    assert isinstance(done.result, PutResult)
    assert done.result.ok
    assert not select.select([client.fileno()], [], [], 0)[0]
    room = [bytearray(PART_BYTES) for _ in range(4)]
    match, get = ns.submit_match(BLOCKS), ns.submit_get(BLOCKS, into=room)
    landed, matched = client.wait(get, 5000), client.wait(match, 5000)
    assert isinstance(landed, GetResult)
    assert isinstance(matched, MatchResult)
    assert landed.prefix_blocks == matched.prefix_blocks == 4
    assert room == VALUES
    assert client.wait(get, 10) is None
    assert client.poll() == []
    assert client.stats().inflight_bytes == 0


def test_submitting_never_waits_and_the_queue_is_bounded(peer: FaultyPeer) -> None:
    size = 1 << 20
    peer.faults.stall.add("Put")
    options = ClientOptions(peer.target, queue_bytes=10 * size, default_deadline_ms=1500)
    with Client(options) as client:
        ns, data = client.namespace(opaque_spec()), bytes(size)
        began_s = time.monotonic()
        tickets = [ns.submit_put(keys(1, f"k{i}"), [data]) for i in range(200)]
        assert time.monotonic() - began_s < 1.0  # The stall alone would take longer.
        refused = [c for c in client.poll() if isinstance(c.result.failure, QueueFull)]
        assert len(refused) == client.stats().dropped == 190
        assert client.stats().inflight_bytes == 10 * size
        kept = [client.wait(t, 5000) for t in tickets[:10]]
        assert all(isinstance(r.failure, errors.DeadlineExceeded) for r in kept if r is not None)
        assert None not in kept
        assert client.stats().inflight_bytes == 0


def test_gets_hold_the_queue_until_they_are_taken(peer: FaultyPeer) -> None:
    with Client(ClientOptions(peer.target, queue_bytes=4 * PART_BYTES, default_deadline_ms=5000)) as client:
        ns = client.namespace(kv_spec())
        assert ns.put(BLOCKS, VALUES).ok
        first = ns.submit_get(BLOCKS)
        assert select.select([client.fileno()], [], [], 5)[0]
        second = ns.submit_get(BLOCKS)
        refused = client.wait(second, 1000)
        assert refused is not None
        assert isinstance(refused.failure, QueueFull)
        assert client.wait(first, 1000) is not None
        third = client.wait(ns.submit_get(BLOCKS), 5000)
        assert isinstance(third, GetResult)
        assert third.prefix_blocks == 4


def test_a_cancelled_ticket_completes_as_cancelled(peer: FaultyPeer, client: Client, ns: Namespace) -> None:
    assert ns.put(BLOCKS, VALUES).ok
    peer.faults.stall.add("Get")
    ticket = ns.submit_get(BLOCKS)
    while not peer.calls["Get"]:
        time.sleep(0.01)
    assert client.cancel(ticket) is True
    result = client.wait(ticket, 5000)
    assert result is not None
    assert isinstance(result.failure, Cancelled)
    assert client.cancel(ticket) is False
    peer.faults.stall.clear()
    assert ns.get(BLOCKS).prefix_blocks == 4


def test_a_ticket_cancelled_at_once_completes_too(client: Client, ns: Namespace) -> None:
    tickets = [ns.submit_match(BLOCKS) for _ in range(50)]
    for ticket in tickets:
        client.cancel(ticket)
    results = [client.wait(t, 5000) for t in tickets]
    assert None not in results


def test_closing_with_work_queued_is_bounded_and_finishes_every_ticket(peer: FaultyPeer) -> None:
    peer.faults.stall.add("Put")
    client = Client(ClientOptions(peer.target, default_deadline_ms=30_000, max_concurrent_calls=2))
    ns = client.namespace(kv_spec())
    tickets = [ns.submit_put(keys(1, f"k{i}"), [value(i)]) for i in range(20)]
    began_s = time.monotonic()
    client.close(400)
    client.close(400)
    assert time.monotonic() - began_s < 5
    done = client.poll()
    assert {c.ticket for c in done} == set(tickets)
    assert all(isinstance(c.result.failure, ClientClosed) for c in done)
    for call in (lambda: ns.match(BLOCKS), lambda: ns.submit_match(BLOCKS), lambda: client.namespace(kv_spec())):
        with pytest.raises(ClientClosed):
            call()


def test_closing_waits_for_what_can_finish(ns: Namespace, client: Client, peer: FaultyPeer) -> None:
    tickets = [ns.submit_put([key], [data]) for key, data in zip(BLOCKS, VALUES, strict=True)]
    client.close(5000)
    results = [client.wait(t, 0) for t in tickets]
    assert all(isinstance(r, PutResult) and r.ok for r in results)
    assert len(peer.blocks) == 4


def test_no_shard_is_a_value_for_threads_and_tickets() -> None:
    with Client(ClientOptions("127.0.0.1:9", default_deadline_ms=500)) as client:
        ns = client.namespace(kv_spec())
        assert isinstance(ns.match(BLOCKS).failure, errors.Unreachable)
        result = client.wait(ns.submit_get(BLOCKS), 5000)
        assert result is not None
        assert isinstance(result.failure, errors.Unreachable)
        assert result.states == bytes((BlockState.MISSING,)) * 4


def test_many_threads_share_two_clients_without_a_line_in_the_log(
    peer: FaultyPeer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    wrong: list[object] = []
    options = ClientOptions(peer.target, default_deadline_ms=30_000)
    with Client(options) as one, Client(options) as two:
        spaces = [one.namespace(kv_spec()), two.namespace(kv_spec())]
        assert spaces[0].put(BLOCKS, VALUES).ok

        def work(ns: Namespace) -> None:
            for _ in range(50):
                if ns.match(BLOCKS).prefix_blocks != 4 or ns.get(BLOCKS).prefix_blocks != 4:
                    wrong.append(ns)

        threads = [threading.Thread(target=work, args=(spaces[i % 2],)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


CHILD = """
    import os, sys
    sys.path.insert(0, {root!r})
    from kvstore_client import Client, ClientOptions, ForkedClient
    from tests.integration.client_cases import keys, kv_spec, value
    client = Client(ClientOptions({target!r}, default_deadline_ms=5000))
    ns = client.namespace(kv_spec())
    ticket = ns.submit_put(keys(1), [value(0)])
    assert client.wait(ticket, 5000).ok
    pid = os.fork()
    if pid == 0:
        calls = [
            lambda: ns.match(keys(1)),
            lambda: ns.submit_get(keys(1)),
            lambda: client.namespace(kv_spec()),
            lambda: client.poll(),
            lambda: client.fileno(),
            lambda: client.wait(ticket, 1),
            lambda: client.cancel(ticket),
        ]
        told = 0
        for call in calls:
            try:
                call()
            except ForkedClient as error:
                told += "make a new Client" in str(error)
        client.close()
        try:
            Client(client.options)
        except ForkedClient as error:
            told += "spawn" in str(error)
        sys.exit(40 + told)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 48, status
    assert ns.match(keys(1)).prefix_blocks == 1
    print("parent fine")
"""


def test_a_forked_child_is_told_and_can_exit(peer: FaultyPeer) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    script = textwrap.dedent(CHILD).format(root=root, target=peer.target)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("parent fine\n", 0), done.stderr


def test_a_process_exits_without_closing_its_client(peer: FaultyPeer) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    peer.faults.stall.add("Match")
    script = f"""
import sys
sys.path.insert(0, {root!r})
from kvstore_client import Client, ClientOptions
from tests.integration.client_cases import keys, kv_spec
client = Client(ClientOptions({peer.target!r}, default_deadline_ms=60000))
client.namespace(kv_spec()).submit_match(keys(1))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_package_does_not_import_grpc() -> None:
    script = "import sys, kvstore_client; kvstore_client.ClientOptions('h:1'); sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
