"""Whose a folder of the warm tier is, and in which format: the file `identity` in it.

    kvcommons warm tier
    format 1
    store 00112233445566778899aabbccddeeff
    segment_bytes 268435456
    checksum 0123456789abcdef

Rules
- The first two lines and the last, the xxh3-64 of all bytes before it, are the same in every format: a program that
  does not know it must be able to say so. `format` grows with every change that an older one would misread.
- The file is written before anything else is, and is durable then. A folder without it, that has something else in it,
  is not the tier's.
- `store` is random, given once, and in every segment. Nothing of it comes from the machine: the folder can be served
  under another address, or moved.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from kvstore.tiers.device import sync_names
from kvstore.tiers.segment import STORE_ID_BYTES

NAME = "identity"
FORMAT = 1
_NEW = f".new-{NAME}"
_MOST_BYTES = 4096
_WHOLE = re.compile(
    rb"(?P<body>kvcommons warm tier\nformat (?P<format>[0-9]{1,9})\n(?P<rest>.*))checksum (?P<sum>[0-9a-f]{16})\n",
    re.DOTALL,
)
_REST = re.compile(rb"store (?P<store>[0-9a-f]{32})\nsegment_bytes (?P<size>[0-9]{1,15})\n")


class FolderRefused(OSError):
    """The folder is not to be used as it is. The text names it and says why."""


@dataclass(frozen=True)
class Identity:
    """What the file says. `segment_bytes`: the size that segments were last made with."""

    store_id: bytes
    segment_bytes: int

    @staticmethod
    def new(segment_bytes: int) -> Identity:
        return Identity(secrets.token_bytes(STORE_ID_BYTES), segment_bytes)

    def to_bytes(self) -> bytes:
        rest = f"store {self.store_id.hex()}\nsegment_bytes {self.segment_bytes}\n"
        body = f"kvcommons warm tier\nformat {FORMAT}\n{rest}".encode()
        return body + f"checksum {xxh3_64_hexdigest(body)}\n".encode()

    def write(self, folder: Path) -> None:
        """Makes it the folder's; durable when this returns. Raises OSError: then the folder has the one it had."""
        new = folder / _NEW
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                os.write(fd, self.to_bytes())
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(new, folder / NAME)
        except OSError:
            with suppress(OSError):
                os.unlink(new)
            raise
        sync_names(folder)


def read_identity(folder: Path) -> Identity | None:
    """Returns what a folder has, None if it has none.

    Raises: FolderRefused for another format, and for what cannot be read as any; OSError.
    """
    path = folder / NAME
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    whole = _WHOLE.fullmatch(raw)
    if whole is None or xxh3_64_hexdigest(whole["body"]).encode() != whole["sum"]:
        raise FolderRefused(
            f"{path} is damaged, or another program's, and nobody can say what the folder holds without it: restore "
            "it, or take another folder, or empty this one"
        )
    rest = _REST.fullmatch(whole["rest"])
    if int(whole["format"]) != FORMAT or rest is None:
        raise FolderRefused(
            f"{folder} was written in format {int(whole['format'])}, this program knows format {FORMAT}: use the "
            "program that wrote it, or take another folder, or empty this one"
        )
    return Identity(bytes.fromhex(rest["store"].decode()), int(rest["size"]))


def is_untouched(folder: Path, *, segments: str) -> bool:
    """Whether a folder without an identity holds nothing but what a first start may have left. Raises OSError.

    `segments`: the name of the folder in it that may be there already, with nothing in it but its lock.
    """
    for entry in os.scandir(folder):
        if entry.name == segments and entry.is_dir(follow_symlinks=False):
            if any(inner.name != "LOCK" for inner in os.scandir(entry.path)):
                return False
        elif entry.name not in (_NEW, "lost+found"):  # The latter is that of a file system's own.
            return False
    return True
