"""How a client makes sure of a shard and shows who it is itself."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore_client.target import checked_host
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.pem import PemError, load_authorities, load_pair


@dataclass(frozen=True)
class TlsOptions:
    """TLS of one client. Raises InvalidArgument (field, as in `tls.cert`) on construction.

    `ca`: certificates, PEM, of the authorities that may have signed the shard's; None = the system's roots.
    `cert`, `key`: what the client shows of itself, PEM, both or neither.
    `server_name`: the name in the shard's certificate, where it is not the host of the address.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if value is not None and not isinstance(value, bytes):
                raise InvalidArgument(f"must be PEM as bytes, not {type(value).__name__}", field=f"tls.{name}")
        if (self.cert is None) != (self.key is None):
            lacking = "tls.key" if self.key is None else "tls.cert"
            raise InvalidArgument("is not given: a certificate and its key go together", field=lacking)
        if self.server_name is not None:
            checked_host(self.server_name, field="tls.server_name")
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def grpc_credentials(self) -> Any:
        """The `grpc.ChannelCredentials` of a channel. Raises InvalidArgument where the system has no roots."""
        from kvstore_client.channel import channel_credentials  # Loads gRPC, with its settings.

        return channel_credentials(self)

    def grpc_arguments(self) -> list[tuple[str, str]]:
        """What a channel is told beside its credentials."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]

    def ssl_context(self) -> ssl.SSLContext:
        """A new context for the client's side of a socket, TLS 1.2 and above; connect with `server_hostname`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # Checks certificate and host name.
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is None:
            context.load_default_certs()
        self._load(context)
        return context

    def server_hostname(self, host: str) -> str:
        """Returns the name that the certificate of a shard at `host` must have."""
        return self.server_name or host

    def roots(self) -> bytes:
        """Returns the certificates of the authorities trusted, PEM. Raises InvalidArgument."""
        return _system_roots() if self.ca is None else self.ca

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.ca is not None:
                load_authorities(context, self.ca)
            if self.cert is not None and self.key is not None:
                load_pair(context, cert=self.cert, key=self.key)
        except PemError as error:
            raise InvalidArgument(str(error), field=f"tls.{error.part}") from None


def tls_for(target: str, tls: TlsOptions | None) -> TlsOptions | None:
    """Returns how a connection to `target` is encrypted; None = not at all, as over every Unix socket."""
    return None if target.startswith("unix:") else tls


def _system_roots() -> bytes:
    """The roots that OpenSSL takes by itself; gRPC, left alone, would trust a list of its own instead."""
    places = ssl.get_default_verify_paths()
    if places.cafile is not None:
        return Path(places.cafile).read_bytes()
    files = [] if places.capath is None else sorted(Path(places.capath).glob("*.[0-9]"))
    if not files:
        raise InvalidArgument("must be given: this machine has no root certificates", field="tls.ca")
    return b"\n".join(path.read_bytes() for path in files)
