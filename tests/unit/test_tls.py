"""TLS material on both sides: what is refused and how it is named, and what two contexts make of each other."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvstore.config import ConfigError, load_config
from kvstore.service.tls import MAX_PEM_BYTES, ServerTls, load_tls
from kvstore_client import InvalidArgument, TlsOptions
from kvstore_client.tls import tls_for
from tests.certificates import HOST, Authority, Pair, tls_flags, write

NO_PEM = b"-----BEGIN CERTIFICATE-----\nzzzz\n-----END CERTIFICATE-----\n"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.pair(HOST, "kv.test")


def faults(flags: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load_tls(load_config(None, {}, flags))
    return [f"{fault.key}: {fault.problem}" for fault in refusal.value.faults]


def with_passphrase(pair: Pair) -> Pair:
    key = load_pem_private_key(pair.key, None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    return Pair(pair.cert, locked)


# --- The server's files


def test_no_certificate_is_no_tls() -> None:
    assert load_tls(load_config(None, {}, {})) is None


def test_the_files_are_read_as_they_are(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    config = load_config(None, {}, tls_flags(tmp_path, pair, client_ca=authority.ca))
    assert load_tls(config) == ServerTls(pair.cert, pair.key, authority.ca)


def test_a_key_is_never_shown(authority: Authority, pair: Pair) -> None:
    secret = pair.key.decode().splitlines()[1]
    assert secret not in repr(ServerTls(pair.cert, pair.key))
    assert secret not in repr(TlsOptions(cert=pair.cert, key=pair.key))


def test_every_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    absent, large = tmp_path / "absent", write(tmp_path / "large", bytes(MAX_PEM_BYTES + 1))
    flags = {"tls.cert": str(absent), "tls.key": str(tmp_path), "tls.client_ca": large}
    assert faults(flags) == [
        f"tls.cert: {absent} cannot be read: No such file or directory",
        f"tls.key: {tmp_path} cannot be read: Is a directory",
        f"tls.client_ca: {large} cannot be read: it is larger than {MAX_PEM_BYTES} bytes",
    ]


def test_what_is_no_pair_is_named_by_its_option(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    other, folder = authority.pair(HOST), tmp_path
    cases = {
        "tls.cert: {}/cert.pem holds no certificate in PEM": Pair(pair.key, pair.key),
        "tls.key: {}/key.pem holds no private key in PEM": Pair(pair.cert, pair.cert),
        "tls.key: {}/key.pem is not the key of the certificate": Pair(pair.cert, other.key),
        "tls.key: {}/key.pem needs a passphrase: store the key without one": with_passphrase(pair),
    }
    for said, given in cases.items():
        assert faults(dict(tls_flags(folder, given))) == [said.format(folder)]
    assert faults(dict(tls_flags(folder, pair, client_ca=NO_PEM))) == [
        f"tls.client_ca: {folder}/client_ca.pem holds no certificate in PEM"
    ]
    assert len(faults(dict(tls_flags(folder, Pair(NO_PEM, pair.key), client_ca=NO_PEM)))) == 2


# --- The client's options


@pytest.mark.parametrize(
    ("fields", "named", "said"),
    [
        ({"ca": "text"}, "tls.ca", "must be PEM as bytes, not str"),
        ({"ca": NO_PEM}, "tls.ca", "holds no certificate"),
        ({"ca": b""}, "tls.ca", "holds no certificate"),
        ({"cert": b"x"}, "tls.key", "is not given"),
        ({"key": b"x"}, "tls.cert", "is not given"),
        ({"cert": b"x", "key": b"x"}, "tls.cert", "holds no certificate"),
        ({"server_name": ""}, "tls.server_name", "is not a host name"),
        ({"server_name": "a b"}, "tls.server_name", "is not a host name"),
        ({"server_name": "host:7070"}, "tls.server_name", "no valid IPv6 address"),
        ({"server_name": 1}, "tls.server_name", "must be text"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], named: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        TlsOptions(**fields)  # type: ignore[arg-type]
    assert caught.value.field == named


def test_a_pair_that_is_none_is_named(authority: Authority, pair: Pair) -> None:
    with pytest.raises(InvalidArgument, match=r"tls\.key: is not the key of the certificate"):
        TlsOptions(cert=pair.cert, key=authority.pair("other").key)


def test_unix_sockets_stay_plain() -> None:
    tls = TlsOptions()
    assert tls_for("unix:/run/k", tls) is None
    assert tls_for("host:1", tls) is tls
    assert tls_for("host:1", None) is None


def test_names_are_the_hosts_unless_told(authority: Authority) -> None:
    plain, named = TlsOptions(ca=authority.ca), TlsOptions(ca=authority.ca, server_name="kv.test")
    assert (plain.server_hostname("h"), named.server_hostname("h")) == ("h", "kv.test")
    assert plain.grpc_arguments() == []
    assert named.grpc_arguments() == [("grpc.ssl_target_name_override", "kv.test")]


def test_the_systems_roots_are_openssls(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", write(tmp_path / "roots.pem", authority.ca))
    assert TlsOptions().roots() == authority.ca
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"tls\.ca: must be given: this machine has no root certificates"):
        TlsOptions().roots()
    write(tmp_path / "0a1b2c3d.0", authority.ca)
    assert TlsOptions().roots() == authority.ca


# --- Two contexts, in memory


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """Returns the server's side once both are done. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = server.wrap_bio(to_server, to_client, server_side=True)
    there = client.wrap_bio(to_client, to_server, server_hostname=name)
    waiting = [there, here]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return here
    raise AssertionError("the handshake does not end")


def test_contexts_agree_where_authority_and_name_do(authority: Authority, pair: Pair) -> None:
    server = ServerTls(pair.cert, pair.key).ssl_context()
    client = TlsOptions(ca=authority.ca).ssl_context()
    for name in (HOST, "kv.test"):
        assert shake_hands(server, client, name).version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        shake_hands(server, client, "other.test")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get|self.signed"):
        shake_hands(server, TlsOptions(ca=Authority().ca).ssl_context(), HOST)


def test_clients_are_asked_for_a_certificate_where_an_authority_is_named(authority: Authority, pair: Pair) -> None:
    server = ServerTls(pair.cert, pair.key, authority.ca).ssl_context()
    own = authority.pair("client")
    client = TlsOptions(ca=authority.ca, cert=own.cert, key=own.key).ssl_context()
    assert shake_hands(server, client, HOST).getpeercert()
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(server, TlsOptions(ca=authority.ca).ssl_context(), HOST)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_versions_are_refused(authority: Authority, pair: Pair) -> None:
    server = ServerTls(pair.cert, pair.key).ssl_context()
    client = TlsOptions(ca=authority.ca).ssl_context()
    assert {server.minimum_version, client.minimum_version} == {ssl.TLSVersion.TLSv1_2}
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client, HOST)
