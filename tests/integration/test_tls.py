"""TLS over real sockets: who may speak to whom, and that a refusal is an answer in time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.cli import exit_codes, main
from kvstore.replay.admin import admin_peer
from kvstore_client import AsyncClient, ClientOptions, KvStoreError, TlsOptions
from kvstore_wire.errors import PeerError, Unreachable
from tests.certificates import HOST, Authority, Pair, tls_flags, write
from tests.integration.server_process import LocalServer, ServerProcess, serve_here, serving
from tests.shards import keys, kv_spec

pytestmark = pytest.mark.integration

SPEC = kv_spec("tls")
DEADLINE_MS = 3000
SLACK_S = 2.0  # For a busy machine; a call that hangs never comes back.


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.pair(HOST)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Path:
    """A folder with what a user of the commands has."""
    folder = tmp_path_factory.mktemp("client")
    own = authority.pair("client")
    for name, content in (("ca", authority.ca), ("cert", own.cert), ("key", own.key), ("value", b"x" * 100)):
        write(folder / name, content)
    return folder


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, authority: Authority, pair: Pair) -> Iterator[ServerProcess]:
    """A server that asks its clients for certificates."""
    flags = tls_flags(tmp_path_factory.mktemp("server"), pair, client_ca=authority.ca)
    with serving({**flags, "hot.capacity": "64MiB"}) as running:
        yield running


@asynccontextmanager
async def tls_server(folder: Path, pair: Pair, *, client_ca: bytes = b"") -> AsyncIterator[LocalServer]:
    async with serve_here(tls_flags(folder, pair, client_ca=client_ca)) as local:
        yield local


async def failure_of(target: str, tls: TlsOptions | None) -> KvStoreError | None:
    """How a first call ends; checks that it ends within its deadline."""
    begun = time.monotonic()
    async with AsyncClient(ClientOptions(target, default_deadline_ms=DEADLINE_MS, tls=tls)) as client:
        failure = (await client.namespace(SPEC).match(keys(0, 1))).failure
        assert time.monotonic() - begun < DEADLINE_MS / 1000 + SLACK_S
    return failure


# --- Data


async def test_values_go_both_ways_to_a_server_of_the_right_authority(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    values = [bytes([i]) * SPEC.part_bytes for i in range(4)]
    async with tls_server(tmp_path, pair) as local:
        options = ClientOptions(local.target, default_deadline_ms=10_000, tls=TlsOptions(ca=authority.ca))
        async with AsyncClient(options) as client:
            namespace = client.namespace(SPEC)
            assert (await namespace.put(keys(0, 4), values)).ok
            got = await namespace.get(keys(0, 4))
    assert [bytes(value or b"") for value in got.values or ()] == values


async def test_a_plain_client_is_refused_in_time(tmp_path: Path, pair: Pair) -> None:
    async with tls_server(tmp_path, pair) as local:
        assert isinstance(await failure_of(local.target, None), Unreachable)


async def test_a_plain_server_is_refused_in_time(authority: Authority) -> None:
    async with serve_here() as local:
        assert isinstance(await failure_of(local.target, TlsOptions(ca=authority.ca)), Unreachable)
        assert await failure_of(local.target, None) is None


async def test_a_server_of_another_authority_is_refused(tmp_path: Path, pair: Pair) -> None:
    async with tls_server(tmp_path, pair) as local:
        failure = await failure_of(local.target, TlsOptions(ca=Authority().ca))
    assert isinstance(failure, Unreachable)
    assert "CERTIFICATE_VERIFY_FAILED" in failure.message


async def test_the_name_must_be_that_of_the_certificate(tmp_path: Path, authority: Authority) -> None:
    trusted = TlsOptions(ca=authority.ca)
    named = TlsOptions(ca=authority.ca, server_name="kv.test")
    async with tls_server(tmp_path, authority.pair("kv.test")) as local:
        assert isinstance(await failure_of(local.target, trusted), Unreachable)
        assert await failure_of(local.target, named) is None
    async with tls_server(tmp_path, authority.pair(HOST)) as local:
        assert isinstance(await failure_of(local.target, named), Unreachable)
        assert await failure_of(local.target, trusted) is None


async def test_a_client_must_show_a_certificate_where_one_is_asked_for(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    own, stranger = authority.pair("client"), Authority().pair("client")
    async with tls_server(tmp_path, pair, client_ca=authority.ca) as local:
        for shown, right in ((None, False), (stranger, False), (own, True)):
            cert, key = (None, None) if shown is None else (shown.cert, shown.key)
            failure = await failure_of(local.target, TlsOptions(ca=authority.ca, cert=cert, key=key))
            assert (failure is None) == right
            assert right or isinstance(failure, Unreachable)


async def test_a_unix_socket_stays_plain(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    flags = tls_flags(tmp_path, pair, client_ca=authority.ca)
    with serving({**flags, "server.listen": f"127.0.0.1:0,unix:{tmp_path}/kv.sock"}) as process:
        tcp, unix = process.target.split(", ")
        assert await failure_of(unix, None) is None
        assert await failure_of(unix, TlsOptions(ca=authority.ca)) is None
        assert isinstance(await failure_of(tcp, None), Unreachable)


# --- Administrators


async def test_the_admin_port_speaks_tls_alone(process: ServerProcess, authority: Authority) -> None:
    own = authority.pair("admin")
    right = TlsOptions(ca=authority.ca, cert=own.cert, key=own.key)
    with admin_peer(process.admin_target, tls=right) as peer:
        assert {option.key for option in peer.config().options} >= {"tls.cert", "bulk.listen", "shm.socket"}
    for wrong in (None, TlsOptions(ca=authority.ca), TlsOptions(ca=Authority().ca, cert=own.cert, key=own.key)):
        begun = time.monotonic()
        refused = pytest.raises(PeerError)
        with admin_peer(process.admin_target, tls=wrong, deadline_s=DEADLINE_MS / 1000) as peer, refused:
            peer.stats()
        assert time.monotonic() - begun < DEADLINE_MS / 1000 + SLACK_S


# --- Commands


def flags_of(files: Path) -> list[str]:
    return ["--tls-ca", f"{files}/ca", "--tls-cert", f"{files}/cert", "--tls-key", f"{files}/key"]


def test_commands_speak_tls(process: ServerProcess, files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server, tls = ["--server", process.target], flags_of(files)
    assert main(["put", "--text", "k", f"{files}/value", *server, *tls]) == exit_codes.OK
    assert main(["get", "--text", "k", *server, *tls]) == exit_codes.OK
    assert "x" * 100 in capfd.readouterr().out
    assert main(["stats", "--json", "--admin", process.admin_target, *tls]) == exit_codes.OK
    assert main(["get", "--text", "k", *server]) == exit_codes.UNREACHABLE
    assert main(["stats", "--admin", process.admin_target, "--tls-ca", f"{files}/ca"]) == exit_codes.UNREACHABLE
    assert main(["get", "--text", "k", *server, *tls, "--tls-server-name", "other"]) == exit_codes.UNREACHABLE


def test_a_replay_speaks_tls(process: ServerProcess, files: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    load = ["gen:api", "--rate", "2", "--seconds", "5", "--limit", "4", "--no-plot", "--json", str(report)]
    where = ["--server", process.target, "--admin", process.admin_target, *flags_of(files)]
    assert main(["replay", *load, *where]) == exit_codes.OK
    assert report.stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls-ca", "/nowhere/ca"], "/nowhere/ca: No such file"),
        (["--tls-ca", "/dev/null"], "--tls-ca: holds no certificate"),
        (["--tls-cert", "/dev/null"], "--tls-key: is not given"),
        (["--tls-server-name", "a b"], "--tls-server-name: 'a b' is not a host name"),
    ],
)
def test_a_bad_flag_is_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["get", "--text", "k"], ["stats"], ["replay", "gen:api", "--server", "127.0.0.1:9"]):
        assert main([*command, *flags]) == exit_codes.USAGE
        assert said in capsys.readouterr().err


def test_a_replay_of_its_own_server_takes_no_tls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "gen:api", "--tls-server-name", "kv.test"]) == exit_codes.USAGE
    assert "name it with --server" in capsys.readouterr().err


# --- The server's start


def test_a_server_does_not_start_with_files_that_are_wrong(
    tmp_path: Path, pair: Pair, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = tls_flags(tmp_path, Pair(pair.cert, authority.pair(HOST).key))
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    assert main(["serve", "--check", *words]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert "tls.key (flag): " in said
    assert "is not the key of the certificate" in said
    with pytest.raises(AssertionError, match="is not the key of the certificate"), serving(flags):
        pass


def test_open_ports_are_warned_of_by_what_they_lack(
    tmp_path: Path, pair: Pair, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cases = {
        "callers are not authenticated and nothing is encrypted": {},
        "and callers are not authenticated": tls_flags(tmp_path, pair),
        "": tls_flags(tmp_path, pair, client_ca=authority.ca),
    }
    for said, flags in cases.items():
        caplog.clear()
        words = [word for key, value in flags.items() for word in (f"--{key}", value)]
        assert main(["serve", "--check", "--hot.capacity", "1MiB", "--bulk.listen", "0.0.0.0:7072", *words]) == 0
        warnings = [r.getMessage() for r in caplog.records if "other hosts" in r.getMessage()]
        assert len(warnings) == bool(said)
        assert all(w.startswith("0.0.0.0:7072 can be") and w.endswith(said) for w in warnings)
