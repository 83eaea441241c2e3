"""Canonical byte encoding that every digest is computed over.

A record is a sequence of fields `tag (1 byte) | length (4 bytes, little-endian) | value`. Because every field carries
its tag and its length, no value can pass for another field, and no boundary can move (docs/keys.md).
"""

from __future__ import annotations

from blake3 import blake3

LABEL_TAG = 0


def field(tag: int, value: bytes) -> bytes:
    """Encodes one field."""
    return bytes((tag,)) + len(value).to_bytes(4, "little") + value


def text(value: str) -> bytes:
    """Encodes text as UTF-8, byte for byte, without normalisation. A lone surrogate raises UnicodeEncodeError."""
    return value.encode("utf-8")


def number(value: int) -> bytes:
    """Encodes a non-negative number below 2^64 as 8 bytes, little-endian."""
    return value.to_bytes(8, "little")


def digest(label: str, *fields: bytes) -> bytes:
    """Returns the 32-byte BLAKE3 of a labelled record; labels keep the digests of different kinds apart."""
    return bytes(blake3(field(LABEL_TAG, label.encode("ascii")) + b"".join(fields)).digest())
