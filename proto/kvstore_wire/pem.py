"""Certificates and keys from memory into an SSL context.

Python's ssl takes a certificate and its key from files only; a memfd is such a file and never touches a disk.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NoReturn

Part = Literal["cert", "key", "ca"]


class PemError(ValueError):
    """What is in `part` cannot be used; the message is the reason."""

    def __init__(self, part: Part, reason: str) -> None:
        super().__init__(reason)
        self.part: Part = part


def load_pair(context: ssl.SSLContext, *, cert: bytes, key: bytes) -> None:
    """Gives the context its own certificate chain and private key, both PEM. Raises PemError."""
    _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, "cert")  # Finds which of the two is no PEM.
    with _file(cert) as cert_path, _file(key) as key_path:
        try:
            context.load_cert_chain(cert_path, key_path, password=_refuse_passphrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise PemError("key", "is not the key of the certificate") from None
            if error.reason in (None, "PEM_LIB", "NO_START_LINE", "BAD_BASE64_DECODE", "UNSUPPORTED"):
                raise PemError("key", "holds no private key in PEM") from None
            raise PemError("cert", f"is refused: {error.reason.replace('_', ' ').lower()}") from None


def load_authorities(context: ssl.SSLContext, ca: bytes) -> None:
    """Makes the context trust what the certificates in `ca`, PEM, have signed. Raises PemError."""
    _load_authorities(context, ca, "ca")


def _load_authorities(context: ssl.SSLContext, pem: bytes, part: Part) -> None:
    with _file(pem) as path:
        try:
            context.load_verify_locations(cafile=path)
        except ssl.SSLError:
            raise PemError(part, "holds no certificate in PEM") from None


def _refuse_passphrase() -> NoReturn:
    # Without this OpenSSL would ask the terminal.
    raise PemError("key", "needs a passphrase: store the key without one")


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Yields the path of a file in memory that ends with the block."""
    descriptor = os.memfd_create("kvstore-pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
