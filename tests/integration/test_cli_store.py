"""put, get, match, explain and stats against a real server process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli import exit_codes, main
from kvstore.replay.own_server import OwnServer
from tests.integration.shard import closed_address, shard

pytestmark = pytest.mark.integration

NAMESPACE = """\
name = "chat"
model = "test-model"
part_bytes = "4KiB"
chains = "chained"
[geometry]
block_tokens = 4
dtype = "uint8"
layers = 1
kv_heads = 1
head_dim = 1
"""


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    with shard() as running:
        yield running


@pytest.fixture
def value(tmp_path: Path) -> Path:
    path = tmp_path / "value.bin"
    path.write_bytes(bytes(range(256)) * 40)
    return path


@pytest.fixture
def namespace(tmp_path: Path) -> Path:
    path = tmp_path / "ns.toml"
    path.write_text(NAMESPACE)
    return path


def test_a_value_comes_back(server: OwnServer, value: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    assert main(["put", "--text", "one", str(value), "--server", server.target]) == exit_codes.OK
    assert main(["get", "--text", "one", "-o", str(out), "--server", server.target]) == exit_codes.OK
    assert out.read_bytes() == value.read_bytes()


def test_text_keys_are_sha256_of_the_text(server: OwnServer, value: Path, tmp_path: Path) -> None:
    hexadecimal = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # SHA-256 of "foo".
    assert main(["put", "--text", "foo", str(value), "--server", server.target]) == exit_codes.OK
    assert main(["match", hexadecimal, "--server", server.target]) == exit_codes.OK


def test_a_stored_key_keeps_its_value(
    server: OwnServer, value: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["put", "--text", "twice", str(value), "--server", server.target]) == exit_codes.OK
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"other")))
    assert main(["put", "--text", "twice", "-", "--server", server.target]) == exit_codes.OK
    assert capsys.readouterr().out.splitlines() == ["stored 1, there already 0", "stored 0, there already 1"]


def test_missing_is_not_empty(server: OwnServer, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert main(["put", "--text", "empty", str(empty), "--server", server.target]) == exit_codes.OK
    assert main(["get", "--text", "empty", "--server", server.target]) == exit_codes.OK
    assert b"the value is empty" in capfdbinary.readouterr().err
    assert main(["get", "--text", "absent", "--server", server.target]) == exit_codes.FAILED
    said = capfdbinary.readouterr()
    assert (said.out, said.err) == (b"", b"kvstore get: missing; nothing was written\n")


def test_match_says_what_is_stored(server: OwnServer, value: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["match", "--text", "three", "--json", "--server", server.target]) == exit_codes.FAILED
    assert json.loads(capsys.readouterr().out) == {"blocks": 1, "prefix_blocks": 0, "states": ["missing"]}
    main(["put", "--text", "three", str(value), "--server", server.target])
    assert main(["match", "--text", "three", "--server", server.target]) == exit_codes.OK
    assert capsys.readouterr().out.endswith("1 of 1 blocks from the start are stored\n")


def test_tokens_name_the_blocks_of_a_prompt(
    server: OwnServer, namespace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--namespace-file", str(namespace), "--server", server.target]
    blocks = tmp_path / "blocks"
    blocks.write_bytes(b"a" * 4096 + b"b" * 4096)
    assert main(["put", "--tokens", "1,2,3,4,5,6,7,8", str(blocks), *common]) == exit_codes.OK
    out = tmp_path / "out"
    assert main(["get", "--tokens", "1,2,3,4", "-o", str(out), *common]) == exit_codes.OK
    assert out.read_bytes() == b"a" * 4096
    assert main(["match", "--tokens", "1,2,3,4,9,9,9,9", *common]) == exit_codes.FAILED
    assert "1 of 2 blocks" in capsys.readouterr().out
    assert main(["get", "--tokens", "1,2,3,4,9,9,9,9", "-o", str(out), *common]) == exit_codes.FAILED
    assert "block 1 of 2: missing" in capsys.readouterr().err


def test_explain_names_the_first_missing_block(
    server: OwnServer, namespace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--namespace-file", str(namespace), "--server", server.target]
    block = tmp_path / "block"
    block.write_bytes(b"c" * 4096)
    main(["put", "--tokens", "11,12,13,14", str(block), *common])
    capsys.readouterr()
    assert main(["explain", "--tokens", "11,12,13,14,15,16,17,18,19", *common]) == exit_codes.FAILED
    said = capsys.readouterr().out
    assert "first missing block: 1" in said
    assert "2 whole ones of 4 tokens; 1 tokens left over" in said
    assert main(["explain", "--tokens", "11,12,13,14", "--json", *common]) == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["blocks"][0]["state"] == "hot"


def test_stats_show_what_was_done(server: OwnServer, value: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["put", "--text", "four", str(value), "--server", server.target])
    capsys.readouterr()
    assert main(["stats", "--json", "--config", "--admin", server.admin_target]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["counters"]["written_bytes"] >= len(value.read_bytes())
    assert found["latencies"]["Put"]["p50_us_at_most"] <= found["latencies"]["Put"]["p99_us_at_most"]
    assert "operator" in {n["name"] for n in found["namespaces"]}
    assert found["config"]["hot.capacity"]["source"] == "flag"
    assert main(["stats", "--admin", server.admin_target]) == exit_codes.OK
    table = capsys.readouterr().out
    assert "match hit rate" in table
    assert "latency inside the server" in table


def test_stats_of_the_wrong_port_say_so(server: OwnServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--admin", server.target]) == exit_codes.FAILED
    assert "has no admin service" in capsys.readouterr().err


def test_a_name_that_means_something_else_is_refused(
    server: OwnServer, value: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--name", "bound", "--server", server.target]
    assert main(["put", "--text", "x", str(value), *common]) == exit_codes.OK
    assert main(["get", "--text", "x", "--part-bytes", "64KiB", *common]) == exit_codes.USAGE
    assert "part_bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["put", "--text", "a", __file__], ["get", "--text", "a"], ["match", "--text", "a"], ["explain"]]
)
def test_a_missing_server_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--server", closed_address()]) == exit_codes.UNREACHABLE
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "no server answers at 127.0.0.1:" in said[0]


def test_stats_of_a_missing_server_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--admin", closed_address()]) == exit_codes.UNREACHABLE
    assert len(capsys.readouterr().err.splitlines()) == 1
