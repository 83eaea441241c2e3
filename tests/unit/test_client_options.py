"""Options, addresses, hints and questions are checked before anything is sent."""

from __future__ import annotations

import logging
import time

import pytest

from kvstore_client import (
    Chain,
    Chains,
    ClientOptions,
    Coverage,
    Geometry,
    Hint,
    InvalidArgument,
    NamespaceSpec,
    Verify,
)
from kvstore_client.batches import runs, sized_runs
from kvstore_client.deadline import Deadline
from kvstore_client.question import question
from kvstore_client.quiet import QuietLog
from kvstore_client.stats import Counters
from kvstore_client.target import checked_target
from kvstore_wire import errors, states
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

GEOMETRY = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=2, head_dim=64, layer_groups=4)
SPEC = NamespaceSpec(name="n", model="m", part_bytes=100, geometry=GEOMETRY)


@pytest.mark.parametrize(
    "target",
    [
        "[::1]:50051",
        "[fe80::1]:1",
        "127.0.0.1:65535",
        "localhost:7070",
        "kv-0.kv.svc.cluster.local:7070",
        "unix:/run/k",
    ],
)
def test_plain_addresses_are_taken_as_they_are(target: str) -> None:
    assert checked_target(target) == target
    assert ClientOptions(target).target == target


@pytest.mark.parametrize(
    "target",
    [
        "::1",
        "::1:50051",
        "[::1]",
        "[::1",
        "[]:1",
        "[localhost]:1",
        "host",
        "host:",
        ":7070",
        "host:90abc",
        "host:0",
        "host:70000",
        "host:+80",
        "host: 80",
        "host:８０",
        " host:80",
        "ho st:80",
        "host/path:80",
        "dns:///host:80",
        "-host:80",
        "1.2.3:80",
        "256.1.1.1:80",
        "unix:",
        "unix:run/kv",
        "unix:/",
        "unix:/" + "x" * 107,
        "",
    ],
)
def test_sloppy_addresses_are_refused_with_a_reason(target: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^target: "):
        ClientOptions(target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("default_deadline_ms", 0),
        ("default_deadline_ms", True),
        ("default_deadline_ms", 1.5),
        ("queue_bytes", 0),
        ("max_concurrent_calls", 0),
        ("lease_ms", -1),
        ("connect_backoff_min_ms", 5),
        ("connect_backoff_max_ms", 50),
        ("keepalive_ms", 9_999),
        ("verify", True),
        ("gives_hints", 1),
        ("name", "x" * 256),
        ("name", "\ud800"),
        ("tls", True),
        ("tls", {"ca": b""}),
        ("transports", ()),
        ("transports", "grpc"),
        ("transports", ["grpc"]),
        ("transports", ("grpc", "grpc")),
        ("transports", ("shm", "rdma")),
        ("transports", ("shm", b"grpc")),
        ("transports", ("shm", ["grpc"])),
    ],
)
def test_a_bad_option_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ClientOptions("h:1", **{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_options_have_the_stated_defaults() -> None:
    options = ClientOptions("h:1")
    assert (options.default_deadline_ms, options.queue_bytes, options.verify) == (1000, 256 << 20, Verify.ON)
    assert (options.connect_backoff_min_ms, options.connect_backoff_max_ms) == (100, 1000)
    assert options.keepalive_ms == 30_000
    assert (options.tls, options.transports) == (None, ("shm", "bulk", "grpc"))
    assert ClientOptions("h:1", transports=("grpc", "shm")).transports == ("grpc", "shm")


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(0, 0), (0.2, 1), (1, 1), (1.5, 2), (2, 2), (3, 3), (4, 3), (5, 4), (30, 6), (32, 6), (33, 7), (1e12, 32)],
)
def test_hints_round_up_to_the_next_power(seconds: float, code: int) -> None:
    assert Hint(next_use_s=seconds).to_message().next_use == code


def test_no_statement_is_not_over() -> None:
    assert not Hint(session_tag=3).to_message().HasField("next_use")
    assert Hint(next_use_s=0).to_message().HasField("next_use")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="next_use_s"):
            Hint(next_use_s=wrong)
    with pytest.raises(InvalidArgument, match="session_tag"):
        Hint(session_tag=1 << 64)


def test_questions_are_checked() -> None:
    key = bytes(32)
    assert question(SPEC, [key, key]).parts_per_block == 4
    assert question(SPEC, Chain([key], parent=key, position=0), (0, 3), Coverage.EACH).parts_per_block == 2
    for bad in ((1, 1), (2, 1), (4,), (-1,)):
        with pytest.raises(InvalidArgument, match="parts"):
            question(SPEC, [key], bad)
    with pytest.raises(InvalidArgument, match="parent"):
        question(SPEC, Chain([key], parent=b"short"))
    with pytest.raises(InvalidArgument, match="position"):
        question(SPEC, Chain([key], position=-1))
    with pytest.raises(InvalidArgument, match=r"keys.*16-64"):
        question(SPEC, [bytes(65)])
    with pytest.raises(InvalidArgument, match="coverage"):
        question(SPEC, [key], (), 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="list or tuple"):
        question(SPEC, key)  # type: ignore[arg-type]


def test_blocks_are_linked_unless_the_namespace_says_otherwise() -> None:
    loose = NamespaceSpec(name="n", model="m", part_bytes=100, geometry=GEOMETRY, chains=Chains.NONE)
    assert question(SPEC, []).linked
    assert not question(loose, []).linked


def test_batches_cover_everything_once() -> None:
    assert list(runs(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(runs(0, 3)) == []
    assert list(sized_runs([5, 5, 5, 1], most=2, most_bytes=10, field="f")) == [(0, 2), (2, 4)]
    assert list(sized_runs([6, 6, 4], most=9, most_bytes=10, field="f")) == [(0, 1), (1, 3)]
    assert list(sized_runs([0] * 5, most=2, most_bytes=1, field="f")) == [(0, 2), (2, 4), (4, 5)]
    with pytest.raises(InvalidArgument, match=r"f: block 1 has 11 bytes"):
        list(sized_runs([1, 11], most=2, most_bytes=10, field="f"))


@pytest.mark.parametrize(
    ("mine", "wire", "prefix"),
    [
        (states.BlockState, types.BlockState, "BLOCK_STATE_"),
        (states.PartState, types.PartState, "PART_STATE_"),
        (states.DeleteState, store.DeleteState, "DELETE_STATE_"),
        (Coverage, types.Coverage, "COVERAGE_"),
    ],
)
def test_states_are_those_of_the_wire(mine: type, wire: object, prefix: str) -> None:
    names = {prefix + m.name: m.value for m in mine}  # type: ignore[attr-defined]
    assert names == dict(wire.items())  # type: ignore[attr-defined]


def test_local_errors_leave_the_contracts_table_alone() -> None:
    table = {cls.reason: cls for cls in errors.error_classes()}
    assert table[types.REASON_INTERNAL] is errors.Internal
    assert table[types.REASON_FULL] is errors.TableFull
    assert all(cls.__module__ == "kvstore_wire.errors" for cls in errors.error_classes())


def test_deadlines_only_shrink() -> None:
    deadline = Deadline.after(10)
    assert 0 < deadline.remaining_s() <= 0.01
    time.sleep(0.02)
    assert (deadline.remaining_s(), deadline.remaining_ms(), deadline.passed) == (0.0, 0, True)
    with pytest.raises(errors.DeadlineExceeded, match="while resting"):
        deadline.check("resting")


def test_snapshots_stand_still() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.calls["get"] += 1
    counters.failed(errors.Unreachable("x"))
    assert dict(before.calls) == {}
    assert counters.snapshot().failures == {"Unreachable": 1}


def test_the_log_says_a_thing_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstore_client")
    log = QuietLog("h:1")
    for i in range(5):
        log.warning("lost", f"lost {i}")
    log.info("attached", "attached")
    assert [r.getMessage() for r in caplog.records] == ["h:1: lost 0", "h:1: attached"]
