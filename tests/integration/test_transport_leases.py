"""Leases that end under reads, views and writes by shared memory: a miss, never another block's bytes."""

from __future__ import annotations

import gc
import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvstore_client import BlockViews, Verify
from kvstore_client.copying import Copier
from kvstore_wire.errors import LeaseExpired
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.server_process import ROOT
from tests.integration.transport_child import SIZE, SPEC
from tests.integration.transport_scene import (
    MIB,
    Blocking,
    Driver,
    Rooms,
    Shard,
    driven,
    options_of,
    region_of,
    sharded,
    until,
)

pytestmark = pytest.mark.integration
COUNT = 3
BLOCKS, VALUES = keys(COUNT), [value(("held", i), SIZE) for i in range(COUNT)]
KINDS = ("blocking", "asyncio")
SHORT = {"lease.default": "300ms", "hot.capacity": "8MiB"}


class Child:
    """A client process (see transport_child)."""

    def __init__(self, shard: Shard, role: str, *, transport: str = "shm") -> None:
        command = [sys.executable, "-m", "tests.integration.transport_child", shard.target, f"{transport}:{role}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Waits for its end; returns its exit code and what it complained of."""
        _, complaints = self.process.communicate(timeout=20)
        return self.process.returncode, complaints


@contextmanager
def child(shard: Shard, role: str, *, transport: str = "shm") -> Iterator[Child]:
    made = Child(shard, role, transport=transport)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def filled(driver: Driver) -> None:
    assert driver.put(SPEC, BLOCKS, VALUES).ok


def view(driver: Driver) -> tuple[Any, BlockViews]:
    viewed = driver.run(SPEC, lambda ns: ns.view(BLOCKS))
    return viewed, getattr(viewed, "views", viewed)


def buffers(given: str) -> list[memoryview] | None:
    return [memoryview(bytearray(SIZE)) for _ in BLOCKS] if given == "buffers" else None


def overwrite(local: Any, others: list[bytes]) -> None:
    """Puts other bytes where the blocks lie."""
    memory = local.server.shell.memory.view
    held = bytes(memory)
    for mine, other in zip(VALUES, others, strict=True):
        at = held.index(mine)
        memory[at : at + SIZE] = other


def expire_leases(shard: Shard) -> int:
    """Lets every lease run out now; tells how many there were."""

    def expire(local: Any) -> int:
        shell = local.server.shell
        leases = shell.store.leases.all()
        for lease in leases:
            shell.store.leases.renew(lease, shell.now() - 10)
        shell.tick()
        return len(leases)

    return shard.ask(expire)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_that_ends_under_a_read_makes_it_a_miss_where_nothing_else_proves_the_bytes(kind: str) -> None:
    with sharded() as shard, driven(kind, options_of(shard.target, "shm", verify=Verify.OFF)) as driver:
        filled(driver)
        assert driver.get(SPEC, BLOCKS).prefix_blocks == COUNT
        shard.arm("before.Release", "delay:200ms*1")
        reading = threading.Thread(target=lambda: found.append(driver.get(SPEC, BLOCKS)))
        found: list[Any] = []
        reading.start()
        shard.until_hit("before.Release")
        assert expire_leases(shard) == 1
        reading.join()
        assert isinstance(found[0].failure, LeaseExpired)
        assert found[0].states == bytes(COUNT)
        assert list(found[0].values) == [None] * COUNT
        again = driver.get(SPEC, BLOCKS)
        assert [bytes(v or b"") for v in again.values or ()] == VALUES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["buffers", "nothing"])
def test_bytes_of_others_that_a_lease_ended_under_are_never_a_hit(
    kind: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the lease and the copy, the slots go to other blocks."""
    with sharded() as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        filled(driver)
        assert driver.get(SPEC, BLOCKS, into=buffers(given)).prefix_blocks == COUNT
        copy_out, others = Copier.copy_out, [value(("other", i), SIZE) for i in range(COUNT)]
        taken: list[int] = []

        def copy_late(self: Copier, array: Any, **what: Any) -> list[int]:
            if not taken:
                taken.append(expire_leases(shard))
                shard.ask(lambda local: overwrite(local, others))
            return copy_out(self, array, **what)

        monkeypatch.setattr(Copier, "copy_out", copy_late)
        into = buffers(given)
        got = driver.get(SPEC, BLOCKS, into=into)
        assert taken == [1], "nothing was copied: the test shows nothing"
        assert got.prefix_blocks == 0
        assert got.failure is not None or got.corrupt_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_its_checksums_prove_waits_for_no_release(kind: str) -> None:
    with sharded() as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        filled(driver)
        assert driver.get(SPEC, BLOCKS, into=buffers("buffers")).prefix_blocks == COUNT
        shard.arm("before.Release", "fail")
        for given in ("buffers", "nothing"):
            for _ in range(3):
                assert driver.get(SPEC, BLOCKS, into=buffers(given)).prefix_blocks == COUNT
        shard.until(lambda local: not local.gauge("leases"), "a lease stays that nobody needs")
        shard.disarm("before.Release")


@pytest.mark.parametrize("count", [150, 200, 256, 300])
def test_a_read_of_many_small_blocks_leaves_no_lease_and_keeps_its_connection(count: int) -> None:
    """What is told of many blocks is longer than a connection's own buffer."""
    spec, blocks = kv_spec("many", part_bytes=4 << 10), keys(count, "many")
    values = [value(("many", i), 4 << 10) for i in range(count)]
    with sharded() as shard, driven("blocking", options_of(shard.target, "shm", deadline_ms=60_000)) as driver:
        assert driver.put(spec, blocks, values).stored == count
        into = [memoryview(bytearray(4 << 10)) for _ in blocks]
        assert driver.get(spec, blocks, into=into).prefix_blocks == count
        opened = shard.ask(lambda local: local.server.channel.opened_total)
        for _ in range(5):
            assert driver.get(spec, blocks, into=into).prefix_blocks == count
            assert [bytes(room) for room in into] == values
        assert shard.ask(lambda local: local.server.channel.opened_total) == opened
        shard.until(lambda local: not local.gauge("leases"), "a lease is left")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", ["its lease", "its session"])
def test_views_of_a_lease_that_has_ended_say_so(kind: str, ends: str) -> None:
    with sharded() as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        filled(driver)
        viewed, views = view(driver)
        assert views.in_place
        taken = views[0]
        assert [bytes(v) for v in views] == VALUES
        expire_leases(shard) if ends == "its lease" else shard.end_sessions()
        until(lambda: not views.held, "no word of the end comes")
        with pytest.raises(LeaseExpired):
            views[1]
        with pytest.raises(ValueError, match="released"):
            taken[0]
        assert driver.run(SPEC, lambda ns: viewed.close()) is False
        assert driver.get(SPEC, BLOCKS).prefix_blocks == COUNT
        viewed, views = view(driver)
        assert views.verify() == ()
        assert driver.run(SPEC, lambda ns: viewed.close()) is True


@pytest.mark.parametrize("kind", KINDS)
def test_views_outlive_the_lease_they_began_with(kind: str) -> None:
    with sharded(SHORT) as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        filled(driver)
        viewed, views = view(driver)
        others = Blocking(options_of(shard.target, "bulk"))
        end_s, at = time.monotonic() + 1.0, 0
        while time.monotonic() < end_s:  # Others fill the arena many times over.
            others.put(SPEC, keys(4, f"pressure{at}"), [value(at, SIZE)] * 4)
            at += 1
            assert [bytes(v) for v in views] == VALUES
        others.close()
        assert driver.run(SPEC, lambda ns: viewed.close()) is True
        shard.until(lambda local: not local.gauge("leases"), "a lease is left")


@pytest.mark.parametrize("kind", KINDS)
def test_views_that_are_forgotten_let_their_lease_run_out(kind: str) -> None:
    with sharded(SHORT) as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        filled(driver)
        viewed, views = view(driver)
        time.sleep(0.5)
        assert shard.ask(lambda local: local.gauge("leases")) == 1, "it is kept alive as long as it is there"
        del viewed, views
        gc.collect()
        shard.until(lambda local: not local.gauge("leases"), "it is kept alive for nobody", within_s=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_purge_takes_nothing_from_whoever_looks_at_it(kind: str) -> None:
    with sharded() as shard, driven(kind, options_of(shard.target, "shm")) as driver:
        filled(driver)
        viewed, views = view(driver)
        purged = shard.ask(
            lambda local: [list(local.server.shell.store.purge_in_steps(lambda n: True, created_before=1e18))]
        )
        assert purged
        assert driver.get(SPEC, BLOCKS).prefix_blocks == 0
        assert driver.put(SPEC, keys(COUNT, "other"), [value("x", SIZE)] * COUNT).ok
        assert [bytes(v) for v in views] == VALUES
        assert driver.run(SPEC, lambda ns: viewed.close()) is True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transport", "flags"), [("bulk", {}), ("grpc", {}), ("shm", {"shm.map_uids": "none"})])
def test_where_nothing_is_mapped_views_are_of_a_copy(kind: str, transport: str, flags: dict[str, str]) -> None:
    with sharded(flags) as shard, driven(kind, options_of(shard.target, transport)) as driver:
        filled(driver)
        viewed, views = view(driver)
        assert not views.in_place
        assert shard.ask(lambda local: local.gauge("leases")) == 0
        shard.end_sessions()
        assert driver.get(SPEC, BLOCKS).prefix_blocks == COUNT
        assert [bytes(v) for v in views] == VALUES
        assert driver.run(SPEC, lambda ns: viewed.close()) is True


def test_a_reader_that_was_stopped_past_its_lease_is_told() -> None:
    """Its slots have gone to others meanwhile, whose bytes it may see: the answer of close is what counts."""
    with sharded(SHORT) as shard, driven("blocking", options_of(shard.target, "bulk")) as driver:
        filled(driver)
        with child(shard, "views") as reader:
            assert reader.line() == "in place"
            reader.process.send_signal(signal.SIGSTOP)
            shard.until(lambda local: not local.gauge("leases"), "a stopped reader keeps its lease")
            for at in range(3):
                assert driver.put(SPEC, keys(8, f"b{at}"), [value((at, i), SIZE) for i in range(8)]).failure is None
            reader.process.send_signal(signal.SIGCONT)
            reader.tell()
            seen = reader.line()
            assert reader.line() == "False"
            assert seen != hashlib.sha256(VALUES[0]).hexdigest(), "the slot was to be reused: the test shows nothing"
            assert reader.end()[0] == 0


def test_a_writer_that_was_stopped_past_its_lease_touches_nobody() -> None:
    """Its slots are given to other blocks; it is resumed, writes from its region and is refused."""
    with ExitStack() as stack:
        shard = stack.enter_context(sharded({**SHORT, "shm.map_uids": "none"}))
        driver = stack.enter_context(driven("blocking", options_of(shard.target, "bulk")))
        writer = stack.enter_context(child(shard, "writes_late"))
        assert writer.line() == "3"
        writer.process.send_signal(signal.SIGSTOP)
        shard.until(lambda local: not local.gauge("leases"), "a stopped writer keeps its slots")
        others = [value(("other", i), SIZE) for i in range(8)]
        assert driver.put(SPEC, keys(8, "other"), others).stored == 8
        writer.process.send_signal(signal.SIGCONT)
        writer.tell()
        assert writer.line() == "0 LeaseExpired"
        assert writer.end()[0] == 0
        got = driver.get(SPEC, keys(8, "other"))
        assert [bytes(v or b"") for v in got.values or ()] == others
        assert driver.run(SPEC, lambda ns: ns.match(keys(3, "late"))).prefix_blocks == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_seen_whole_or_not_at_all(kind: str) -> None:
    """The shard is slow to take the bytes from the writer's region, while a reader asks again and again."""
    with ExitStack() as stack:
        shard = stack.enter_context(sharded())
        writer = stack.enter_context(driven(kind, options_of(shard.target, "shm")))
        reader = stack.enter_context(driven("blocking", options_of(shard.target, "shm")))
        region = stack.enter_context(region_of(writer.client, 4 * MIB))
        source = Rooms(region.memory).holding(VALUES)
        assert reader.get(SPEC, BLOCKS).prefix_blocks == 0
        shard.arm("region.fill", "delay:200ms*1")
        put = threading.Thread(target=lambda: done.append(writer.put(SPEC, BLOCKS, source)))
        done: list[Any] = []
        put.start()
        misses = 0
        while True:
            into = [bytearray(SIZE) for _ in BLOCKS]
            found = reader.get(SPEC, BLOCKS, into)
            if found.prefix_blocks:
                break
            misses += 1
        assert found.prefix_blocks == COUNT
        assert list(map(bytes, into)) == VALUES
        assert misses > 0
        put.join()
        assert done[0].ok
        assert reader.client.stats().corrupt_blocks == 0
