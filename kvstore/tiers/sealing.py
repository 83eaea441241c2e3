"""Seals payload at rest: AES-256-GCM, under a key of its own for each life of a segment (docs/storage.md).

Rules
- No key and nonce are used twice. The key of a life comes from a master key, what the segment's header says and a salt
  that is random for each life; the nonce is the part's place, and in one life a place is written once.
- A part opens as what it was sealed as and as nothing else: of this namespace, key, index and length, at this place.
- What a key is made of is in no message, repr or log; keys go by their ids.
- The library is asked for where a key is given, and nowhere else.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvstore.tiers.segment import BLOCK_BYTES, KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, UNSEALED, Header
from kvstore_wire.limits import DIGEST_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

KEY_BYTES = 32
MOST_KEYS = 64
MOST_FILE_BYTES = 64 << 10
_NONCE_BYTES = 12
_OTHERS = 0o077
_SHOWN_IDS = 8
_HASH = "sha256"
_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_ID_LABEL, _LIFE_LABEL = b"kvcommons key id 1", b"kvcommons segment 1"
_LIFE = struct.Struct(f"<QQQ{SALT_BYTES}s")
_ABOUT = struct.Struct(f"<{DIGEST_BYTES}sHI")


class BadKeys(ValueError):
    """The keys cannot be used. The text says why and names the line."""


class WrongKey(Exception):
    """Segments are sealed with keys that were not given. Who runs the server must give them, or give the blocks up."""

    def __init__(self, key_ids: Iterable[bytes]) -> None:
        """`key_ids`: one for each segment."""
        ids = list(key_ids)
        self.segment_count, self.key_ids = len(ids), frozenset(ids)
        shown = [key_id.hex() for key_id in sorted(self.key_ids)]
        more = f" and {len(shown) - _SHOWN_IDS} more" if len(shown) > _SHOWN_IDS else ""
        segments = "1 segment is" if len(ids) == 1 else f"{len(ids)} segments are"
        super().__init__(
            f"{segments} sealed with a key that was not given: key id {', '.join(shown[:_SHOWN_IDS])}{more}. "
            'Add it to warm.encryption_key, or set warm.on_wrong_key = "empty" to give up what these segments hold'
        )


class Sink(Protocol):
    """Memory that sealed bytes are put in, one after another."""

    def room(self) -> memoryview:
        """Returns memory to go on with, at least a byte. Raises OSError."""

    def filled(self, size_bytes: int) -> None:
        """Takes what was put at the beginning of the room."""


def about_part(digest: bytes, key: bytes, part: int, length: int) -> bytes:
    """Returns what a part is sealed as: additional data, which is not stored with it."""
    return _ABOUT.pack(digest, part, length) + key


class SegmentKey:
    """The key of one life of a segment. Several threads may use it at a time; long parts go without the interpreter
    lock."""

    def __init__(self, master: bytes, header: Header) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        life = _LIFE_LABEL + _LIFE.pack(header.number, header.sequence, header.created_ns, header.salt)
        drawn = HKDF(algorithm=SHA256(), length=2 * KEY_BYTES, salt=header.store_id, info=life).derive(master)
        algorithm = algorithms.AES(drawn[:KEY_BYTES])
        self._cipher: Callable[[bytes], Cipher[GCM]] = lambda nonce: Cipher(algorithm, modes.GCM(nonce))
        self._empty_key = drawn[KEY_BYTES:]
        self._invalid_tag = InvalidTag

    def seal(self, source: memoryview, about: bytes, *, offset: int, into: Sink) -> bytes:
        """Seals a part that lies at `offset` of the segment; returns its tag. Raises OSError (of the sink).

        Once for each offset: what is sealed twice at one place is not secret any more.
        """
        if not len(source):
            return self._empty_tag(about, offset)
        context = self._cipher(_nonce(offset)).encryptor()
        context.authenticate_additional_data(about)
        done = 0
        while done < len(source):
            room = into.room()[: len(source) - done]
            context.update_into(source[done : done + len(room)], room)
            into.filled(len(room))
            done += len(room)
        context.finalize()
        return context.tag

    def open(self, memory: memoryview, tag: bytes, about: bytes, *, offset: int) -> bool:
        """Opens a part where it lies in memory; false if it is not what was sealed, and then nothing of it is left."""
        if len(tag) == TAG_BYTES and self._opens(memory, tag, about, offset):
            return True
        memory[:] = bytes(len(memory))
        return False

    def _opens(self, memory: memoryview, tag: bytes, about: bytes, offset: int) -> bool:
        if not len(memory):
            return hmac.compare_digest(tag, self._empty_tag(about, offset))
        context = self._cipher(_nonce(offset)).decryptor()
        context.authenticate_additional_data(about)
        context.update_into(memory, memory)
        try:
            context.finalize_with_tag(tag)
        except self._invalid_tag:
            return False
        return True

    def _empty_tag(self, about: bytes, offset: int) -> bytes:
        # A part without bytes lies where the next one begins: with GCM the two would share a nonce.
        return hmac.digest(self._empty_key, _nonce(offset) + about, _HASH)[:TAG_BYTES]


class Keyring:
    """Master keys. The first one seals, all of them open. Raises BadKeys where the library is missing."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        try:
            import cryptography.hazmat.primitives.ciphers  # noqa: F401
        except ImportError as error:
            text = f"to seal payload the package cryptography is needed, which kvcommons[server] has: {error}"
            raise BadKeys(text) from None
        self._keys = {_id_of(key): key for key in keys}
        self.writing_id = _id_of(keys[0])

    def __contains__(self, key_id: bytes) -> bool:
        return key_id in self._keys

    def __repr__(self) -> str:
        return f"<Keyring of {len(self._keys)}, seals with {self.writing_id.hex()}>"

    def begin(self, header: Header) -> tuple[Header, SegmentKey]:
        """Returns the header of a life that will be sealed, and its key."""
        sealed = replace(header, key_id=self.writing_id, salt=os.urandom(SALT_BYTES))
        return sealed, SegmentKey(self._keys[self.writing_id], sealed)

    def key_of(self, header: Header) -> SegmentKey:
        """Returns the key of a life that is sealed. Raises WrongKey."""
        master = self._keys.get(header.key_id)
        if master is None:
            raise WrongKey([header.key_id])
        return SegmentKey(master, header)


def can_open(keyring: Keyring | None, key_id: bytes) -> bool:
    """Whether payload can be read: it is not sealed, or its key is there."""
    return key_id == UNSEALED or (keyring is not None and key_id in keyring)


def read_keys(text: str) -> Keyring:
    """Reads a list of keys: one a line, 64 hex digits; what follows a `#` is a comment. Raises BadKeys."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if _KEY.fullmatch(word) is None:
            raise BadKeys(f"line {number}: a key has {2 * KEY_BYTES} hex digits, and nothing else is on its line")
        key = bytes.fromhex(word)
        if key in found:
            raise BadKeys(f"line {number}: the same key as in line {found[key]}")
        if len(found) == MOST_KEYS:
            raise BadKeys(f"line {number}: more than {MOST_KEYS} keys")
        found[key] = number
    if not found:
        raise BadKeys("there is no key")
    return Keyring(list(found))


def load_keys(path: Path) -> Keyring:
    """Reads a file of keys, which only its owner may read or write. Raises OSError and BadKeys."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe must not hold the start up.
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise BadKeys(f"{path} is not a regular file")
        if mode & _OTHERS:
            raise BadKeys(f"{path} is open to others than its owner (mode {mode:04o}): chmod 600 it")
        raw = file.read(MOST_FILE_BYTES + 1)
    if len(raw) > MOST_FILE_BYTES:
        raise BadKeys(f"{path} has more than {MOST_FILE_BYTES} bytes")
    try:
        return read_keys(raw.decode("utf-8", "replace"))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _id_of(master: bytes) -> bytes:
    return hmac.digest(master, _ID_LABEL, _HASH)[:KEY_ID_BYTES]


def _nonce(offset: int) -> bytes:
    assert offset % BLOCK_BYTES == 0
    return (offset // BLOCK_BYTES).to_bytes(_NONCE_BYTES, "little")
