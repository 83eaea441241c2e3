"""Certificates for tests: an authority, what it signs, and the files that options name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trustme

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True)
class Authority:
    """Signs certificates. `ca` is its own certificate, PEM."""

    _authority: trustme.CA = field(default_factory=trustme.CA)

    @property
    def ca(self) -> bytes:
        return self._authority.cert_pem.bytes()

    def pair(self, *names: str) -> Pair:
        """Signs a certificate for these host names or addresses."""
        made = self._authority.issue_cert(*names)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return Pair(chain, made.private_key_pem.bytes())


def tls_flags(folder: Path, pair: Pair, *, client_ca: bytes = b"") -> Mapping[str, str]:
    """Writes the files and returns the server's options that name them."""
    contents = {"cert": pair.cert, "key": pair.key, "client_ca": client_ca}
    return {f"tls.{name}": write(folder / f"{name}.pem", content) for name, content in contents.items() if content}


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)
