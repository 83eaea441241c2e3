"""What the doors need for TLS: the files of section `tls`, read once, as gRPC and as Python's ssl take them."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvstore.config import Config, ConfigError, Fault
from kvstore_wire.pem import Part, PemError, load_authorities, load_pair

MAX_PEM_BYTES = 1 << 20
_OPTIONS: dict[Part, str] = {"cert": "tls.cert", "key": "tls.key", "ca": "tls.client_ca"}


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate chain and key, and whose clients are let in; all PEM. None: anybody's."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC port; gRPC speaks TLS 1.2 and above."""
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """A new context for the server's side of a socket, TLS 1.2 and above. Raises PemError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        load_pair(context, cert=self.cert, key=self.key)
        if self.client_ca is not None:
            load_authorities(context, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def load_tls(config: Config) -> ServerTls | None:
    """Reads the files that the configuration names; None if it names none.

    Raises: ConfigError naming the option of each file that is missing, cannot be read or is not what it should be.
    """
    if not config.tls.cert:
        return None
    paths: dict[Part, str] = {"cert": config.tls.cert, "key": config.tls.key, "ca": config.tls.client_ca}
    files: dict[Part, bytes] = {}
    problems: list[tuple[Part, str]] = []
    for part, path in paths.items():
        try:
            if path:
                files[part] = _read(path)
        except OSError as error:
            problems.append((part, f"cannot be read: {error.strerror or error}"))
    if not problems:
        tls = ServerTls(files["cert"], files["key"], files.get("ca"))
        problems = [(error.part, str(error)) for error in _errors(tls)]
        if not problems:
            return tls
    raise ConfigError([_fault(config, part, paths[part], problem) for part, problem in problems])


def _read(path: str) -> bytes:
    """Raises OSError, also for a file that is too large to be PEM."""
    with Path(path).open("rb") as file:
        content = file.read(MAX_PEM_BYTES + 1)
    if len(content) > MAX_PEM_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_PEM_BYTES} bytes")
    return content


def _errors(tls: ServerTls) -> Iterator[PemError]:
    """What is wrong with the pair, and with the authority beside it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        load_pair(context, cert=tls.cert, key=tls.key)
    except PemError as error:
        yield error
    try:
        if tls.client_ca is not None:
            load_authorities(context, tls.client_ca)
    except PemError as error:
        yield error


def _fault(config: Config, part: Part, path: str, problem: str) -> Fault:
    key = _OPTIONS[part]
    return Fault(key=key, where=config.sources.of(key), value=path, problem=f"{path} {problem}")
