"""Subcommands that need no server, what users get wrong, and how a warm tier is shown."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.cli import COMMANDS, exit_codes, main
from kvstore.cli.command_errors import CommandError
from kvstore.cli.key_args import add_key_flags, keys_of, read_tokens
from kvstore.cli.stats_view import DROPPED as WHY_DROPPED
from kvstore.cli.stats_view import match_hit_rate, quantile_us, warm_rows, warm_state, write_amplification
from kvstore.replay.own_server import OwnServer, own_server
from kvstore.service.tiering import DROPPED
from kvstore.workload.formats import read_trace
from kvstore.workload.generate import generate_trace
from kvstore.workload.profiles import CHAT
from kvstore_client import Geometry, Kind, NamespaceSpec, chain_keys, root_key
from kvstore_wire.errors import InvalidArgument, KvStoreError
from kvstore_wire.methods import ADMIN, ADMIN_METHODS, ERROR_METADATA
from kvstore_wire.v1 import admin_pb2 as pb
from tests.integration.shard import FLAGS, shard
from tests.integration.transport_scene import until

KV = NamespaceSpec(name="n", model="m", part_bytes=8, geometry=Geometry(4, "uint8", 1, 1, 1))
OPAQUE = NamespaceSpec(name="n", model="m", part_bytes=8, kind=Kind.OPAQUE)
FILE = """\
name = "{name}"
model = "{model}"
part_bytes = 8
[geometry]
block_tokens = 4
dtype = "uint8"
layers = 1
kv_heads = 1
head_dim = 1
"""


def _keys(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_key_flags(parser)
    return parser.parse_args(arguments)


def _namespace(folder: Path, *, name: str = "n", model: str = "m") -> str:
    path = folder / f"{name}-{model}.toml"
    path.write_text(FILE.format(name=name, model=model))
    return str(path)


def test_keys_are_hex_text_or_tokens() -> None:
    assert keys_of(_keys("ab" * 32), OPAQUE) == [b"\xab" * 32]
    assert keys_of(_keys("--text", "héllo"), OPAQUE) == [hashlib.sha256("héllo".encode()).digest()]
    assert keys_of(_keys("--tokens", "1,2,3,4,5,6,7,8,9"), KV) == chain_keys(KV, range(1, 10))


@pytest.mark.parametrize(
    ("arguments", "spec", "said"),
    [
        (["xyz"], OPAQUE, "is not hex"),
        (["ab" * 15], OPAQUE, "has 15 bytes"),
        (["--tokens", "1,2,3,4"], OPAQUE, "only namespaces of kind kv"),
        (["--tokens", "1,2,3"], KV, "3 tokens fill no block of 4"),
        (["--tokens", "1,2,3,x"], KV, "'x' is not a token number"),
        (["--tokens", "1,2,3,4294967296"], KV, "out of range"),
        (["--tokens", "9" * 5000], KV, "is not a token number"),
    ],
)
def test_a_bad_key_is_named(arguments: list[str], spec: NamespaceSpec, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        keys_of(_keys(*arguments), spec)


def test_tokens_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("[1, 2,\n 3 4]\n")
    assert read_tokens(f"@{path}", "--tokens") == [1, 2, 3, 4]


def test_explain_offline_shows_fields_digests_and_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["explain", "--namespace-file", _namespace(tmp_path), "--tokens", "1,2,3,4,5", "--offline"]
    assert main(common) == exit_codes.OK
    said = capsys.readouterr().out
    key = chain_keys(KV, [1, 2, 3, 4])[0]
    for text in (KV.digest.hex(), root_key(KV).hex(), key.hex(), "geometry.block_tokens", "1 tokens left over"):
        assert text in said
    assert main([*common, "--json"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["digest"] == KV.digest.hex()
    assert found["blocks"] == [{"key": key.hex()}]


def test_explain_names_the_first_field_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = _namespace(tmp_path), _namespace(tmp_path, model="m2")
    assert main(["explain", "--namespace-file", one, "--against", other]) == exit_codes.FAILED
    assert "first difference: model: 'm' here, 'm2' there" in capsys.readouterr().out
    renamed = _namespace(tmp_path, name="another")
    assert main(["explain", "--namespace-file", one, "--against", renamed]) == exit_codes.OK
    assert "the same namespace" in capsys.readouterr().out


def test_gen_prints_what_the_generator_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.jsonl"
    assert main(["gen", "chat", "--rate", "1", "--seconds", "30", "--seed", "5", "-o", str(path)]) == exit_codes.OK
    assert main(["gen", "chat", "--rate", "1", "--seconds", "30", "--seed", "5"]) == exit_codes.OK
    assert capsys.readouterr().out == path.read_text()
    read, made = read_trace(path), generate_trace(CHAT, seed=5, rate=1, seconds=30)
    assert [r.block_ids.tolist() for r in read.requests] == [r.block_ids.tolist() for r in made.requests]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gen", "api", "--seconds", "-1"], "--seconds: is -1.0"),
        (["gen", "api", "--rate", "nan"], "--rate: is nan"),
        (["gen", "api", "--seed", "-3"], "--seed: is -3"),
        (["gen", "api", "--seconds", "1e-6"], "no session arrives"),
        (["gen", "api", "-o", "/nowhere/x"], "/nowhere/x: No such file"),
        (["put", "--text", "a", "/nowhere/x"], "/nowhere/x: No such file"),
        (["put", "--text", "a", "/dev/null", "--timeout", "5"], "--timeout: '5' is not a duration"),
        (["get", "--text", "a", "--server", "here"], "needs a host and a port"),
        (["get", "--text", "a", "--part-bytes", "0"], "part_bytes: is 0"),
        (["stats", "--admin", "here"], "needs a host and a port"),
        (["stats", "--interval", "1ms"], "--interval: 1ms is outside"),
        (["tier", "--admin", "here"], "needs a host and a port"),
        (["tier", "--capacity", "lots"], "--capacity: 'lots' is not a size"),
        (["tier", "--capacity", "0"], "--capacity: is 0 bytes, outside 1..16TiB"),
        (["tier", "--capacity", "999999999999999TiB"], "outside 1..16TiB"),
        (["replay", "/nowhere/x"], "/nowhere/x: No such file"),
        (["replay", "gen:web"], "'gen:web' is not one of gen:agent, gen:api, gen:chat"),
        (["replay", "gen:api", "--speed", "fast"], "--speed: 'fast' is neither max nor"),
        (["replay", "gen:api", "--speed", "0x"], "--speed: '0x' is neither max nor"),
        (["replay", "gen:api", "--capacity", "120%"], "--capacity: 120% is above 100%"),
        (["replay", "gen:api", "--capacity", "lots"], "--capacity: 'lots' is not a size"),
        (["replay", "gen:api", "--seconds", "9", "--capacity", "1%"], "less than the smallest server"),
        (["replay", "gen:api", "--capacity", "10%", "--server", "127.0.0.1:1"], "--capacity: is a running server's"),
        (
            ["replay", "gen:api", "--seconds", "9", "--part-size", "1GiB"],
            "--part-size: is 1073741824 bytes, above 67108864",
        ),
        (["replay", "gen:api", "--seconds", "9", "--limit", "0"], "--limit: is 0, below 1"),
        (["replay", "gen:api", "--prefill", "0"], "--prefill: is 0, outside 1..64"),
        (["replay", "gen:api", "--plot", "/nowhere/x.png"], "/nowhere/x.png: cannot be written"),
        (["replay", "gen:api", "--no-plot", "--json", "/nowhere/x"], "/nowhere/x: cannot be written"),
        (["replay", __file__], "line 1: line: is not JSON"),
        (["replay", __file__, "--rate", "3"], "--rate and --seconds: shape a generated load"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == exit_codes.USAGE
    found = capsys.readouterr()
    assert len(found.err.splitlines()) == 1
    assert found.err.startswith(f"kvstore {arguments[0]}: ")
    assert said in found.err
    assert found.out == ""


def test_a_broken_gzip_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"timestamp": 0}\n' * 1000)[:-20])
    assert main(["replay", str(path)]) == exit_codes.USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"kvstore {command}" in said
    assert "examples:" in said


def test_an_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bogus"])
    assert ended.value.code == exit_codes.USAGE
    assert all(command in capsys.readouterr().err for command in COMMANDS[:1])


def test_quantiles_are_upper_bounds_of_buckets() -> None:
    buckets = [0] * 32
    assert quantile_us(buckets, 0.5) is None
    buckets[3], buckets[10] = 98, 2
    assert (quantile_us(buckets, 0.5), quantile_us(buckets, 0.99)) == (8, 1024)
    buckets[31] = 1000
    assert quantile_us(buckets, 0.99) == 1 << 30


def test_a_hit_rate_of_nothing_is_none() -> None:
    assert match_hit_rate({}) is None
    assert match_hit_rate({"match_asked_blocks": 4, "match_hit_blocks": 1}) == 0.25


@pytest.mark.parametrize("flag", ["--hot.cap", "--hot.capasity"])
def test_a_flag_of_serve_cut_short_or_misspelt_names_the_nearest(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--check", flag, "1GiB", "--hot.page=3KiB"]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert "hot.capacity" in said
    assert flag in said
    assert "hot.page" in said, "every fault is told, not only the first"


def test_a_flag_of_another_command_cut_short_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gen", "chat", "--see", "3"])
    assert ended.value.code == exit_codes.USAGE
    assert "--see" in capsys.readouterr().err


def test_an_unknown_failpoint_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVCOMMONS_FAILPOINTS", "get.chnk=delay:250ms")
    assert main(["serve", "--check"]) == exit_codes.USAGE
    assert "'get.chnk' does not exist; the nearest is get.chunk" in capsys.readouterr().err


# -- the warm tier -------------------------------------------------------------------------------------------------


class AdminPort:
    """An admin port that answers SetWarmTier as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: pb.WarmTierStatus | KvStoreError = pb.WarmTierStatus()
        self.asked: list[pb.SetWarmTierRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        method = ADMIN_METHODS["SetWarmTier"]
        handler = grpc.unary_unary_rpc_method_handler(
            self._set_warm_tier,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(ADMIN, {method.name: handler})])
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _set_warm_tier(self, request: pb.SetWarmTierRequest, context: Any) -> pb.WarmTierStatus:
        self.asked.append(request)
        if isinstance(self.answer, pb.WarmTierStatus):
            return self.answer
        context.set_trailing_metadata([(ERROR_METADATA, self.answer.to_detail().SerializeToString())])
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(self.answer))
        raise AssertionError("abort raises")

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def port() -> Iterator[AdminPort]:
    opened = AdminPort()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], pb.SetWarmTierRequest()),
        (["--enable"], pb.SetWarmTierRequest(enabled=True)),
        (["--disable"], pb.SetWarmTierRequest(enabled=False)),
        (["--capacity", "3GiB"], pb.SetWarmTierRequest(capacity_bytes=3 << 30)),
        (["--enable", "--capacity", "1GiB"], pb.SetWarmTierRequest(enabled=True, capacity_bytes=1 << 30)),
    ],
)
def test_tier_asks_for_what_its_flags_say(port: AdminPort, flags: list[str], wanted: pb.SetWarmTierRequest) -> None:
    port.answer = pb.WarmTierStatus(state=pb.WARM_TIER_STATE_ON)
    assert main(["tier", "--admin", port.target, *flags]) == exit_codes.OK
    assert port.asked == [wanted]


def test_tier_shows_all_that_it_was_told(port: AdminPort, capsys: pytest.CaptureFixture[str]) -> None:
    status: dict[str, Any] = {
        "reason": "the disk hangs",
        "capacity_bytes": 64 << 30,
        "stored_bytes": 3 << 30,
        "stored_blocks": 12_345,
        "writing_bytes": 5 << 20,
        "promoting_bytes": 7 << 20,
    }
    port.answer = pb.WarmTierStatus(state=pb.WARM_TIER_STATE_DEGRADED, **status)
    assert main(["tier", "--admin", port.target]) == exit_codes.FAILED, "a tier that is degraded is not well"
    said = capsys.readouterr().out
    for told in ("degraded: the disk hangs", "12,345 blocks, 3.0 GiB of 64.0 GiB", "5.0 MiB", "7.0 MiB"):
        assert told in said
    assert main(["tier", "--admin", port.target, "--json"]) == exit_codes.FAILED
    assert json.loads(capsys.readouterr().out) == {"state": "degraded", **status}


def test_a_tier_that_was_taken_out_is_no_failure(port: AdminPort, capsys: pytest.CaptureFixture[str]) -> None:
    port.answer = pb.WarmTierStatus(state=pb.WARM_TIER_STATE_DISABLED)
    assert main(["tier", "--admin", port.target, "--disable"]) == exit_codes.OK
    assert "disabled\n" in capsys.readouterr().out


def test_a_capacity_that_the_server_refuses_names_the_flag(port: AdminPort, capsys: pytest.CaptureFixture[str]) -> None:
    port.answer = InvalidArgument("is 4096", field="capacity_bytes", limit="2097152-17592186044416")
    assert main(["tier", "--admin", port.target, "--capacity", "4KiB"]) == exit_codes.USAGE
    assert capsys.readouterr().err == "kvstore tier: --capacity: is 4096 bytes (limit: 2097152-17592186044416)\n"


def test_enable_and_disable_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tier", "--enable", "--disable"])
    assert ended.value.code == exit_codes.USAGE
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.integration
def test_tier_of_a_server_without_one_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with shard("1MiB") as server:
        assert main(["tier", "--admin", server.admin_target]) == exit_codes.FAILED
        said = capsys.readouterr()
        assert said.err == f"kvstore tier: the server at {server.admin_target} has no warm tier\n"
        assert said.out == ""
        assert main(["stats", "--admin", server.admin_target]) == exit_codes.OK
        assert "warm tier" not in capsys.readouterr().out


@pytest.mark.integration
def test_a_tier_is_taken_out_and_back_in_and_resized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(server: OwnServer, *flags: str) -> dict[str, Any]:
        assert main(["tier", "--json", "--admin", server.admin_target, *flags]) == exit_codes.OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    flags = ["--warm.path", str(tmp_path / "warm"), "--warm.capacity", "64MiB", "--warm.segment", "1MiB"]
    limits = ["--limits.max_part", "64KiB", "--hot.capacity", "1MiB"]
    with own_server([*FLAGS, *flags, *limits]) as server:
        assert told(server) == {
            "state": "on",
            "reason": "",
            "capacity_bytes": 64 << 20,
            **dict.fromkeys(("stored_bytes", "stored_blocks", "writing_bytes", "promoting_bytes"), 0),
        }
        assert told(server, "--disable")["state"] == "disabled"
        assert told(server)["state"] == "disabled", "it stays out"
        assert told(server, "--enable", "--capacity", "128MiB")["state"] == "on"
        until(lambda: told(server)["capacity_bytes"] == 128 << 20, "the capacity is as it was")
        assert main(["tier", "--admin", server.admin_target, "--capacity", "1MiB"]) == exit_codes.USAGE
        assert "--capacity: is 1048576 bytes (limit: 2097152-17592186044416)" in capsys.readouterr().err
        assert main(["stats", "--admin", server.admin_target]) == exit_codes.OK
        assert "0 blocks, 0 B of 128.0 MiB" in capsys.readouterr().out


def test_states_of_the_tier_are_words() -> None:
    assert [warm_state(number) for number in range(5)] == ["off", "on", "degraded", "disabled", "unknown (4)"]


def test_amplification_is_of_what_came_from_memory() -> None:
    assert write_amplification({}) is None
    assert write_amplification({"warm_written_bytes": 150, "warm_rewritten_bytes": 50}) == 1.5


def test_stats_show_what_left_memory_unwritten_and_why() -> None:
    values = {"warm_state": 1, "warm_dropped_behind_blocks": 1234, "warm_dropped_budget_blocks": 5}
    values |= {"warm_written_bytes": 3 << 20, "warm_rewritten_bytes": 1 << 20, "warm_promoted_blocks": 77}
    rows = warm_rows(values)
    assert rows["left memory unwritten"] == "1,234 not written in time, 5 over the write budget"
    assert rows["written to disk"] == "3.0 MiB, 1.50 x what came from memory"
    assert rows["hits from disk"] == "77 blocks"
    assert warm_rows({"warm_state": 2})["left memory unwritten"] == "none"


def test_every_reason_to_drop_a_block_has_words() -> None:
    assert list(WHY_DROPPED) == [f"warm_dropped_{why}_blocks" for why in DROPPED]
