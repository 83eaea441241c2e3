"""Bytes of a part derived from its key, so that any reader can verify them without a copy.

Rules: the bytes depend on key, part and size, and on nothing of the process, so writer and reader may be different
programs. A payload is a slice of one fixed pool of random words at an offset, XORed with a word; both come from a
hash of (key, part, size, chunk). So two payloads agree in no eight-byte word but by chance (2^-64 a word), and a
shifted, swapped or shortened payload does not pass either. It guards against mistakes, not against forgery.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.workload.splitmix import GOLDEN_GAMMA, MULTIPLIER_1, MULTIPLIER_2

ByteBuffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
WritableBuffer: TypeAlias = bytearray | memoryview | npt.NDArray[np.uint8]
_Words: TypeAlias = npt.NDArray[np.uint64]

MAX_PART: Final = (1 << 32) - 1

# One chunk, its slice of the pool and the scratch take 768 KiB, which stays within a core's 1 MiB L2 cache.
_CHUNK_BYTES: Final = 256 << 10
_CHUNK_WORDS: Final = _CHUNK_BYTES // 8
_OFFSET_MASK: Final = _CHUNK_WORDS - 1
_HEADER: Final = struct.Struct("<QQ")
_WORD_TYPE: Final = np.dtype("<u8")


def fill_payload(key: bytes, part: int, out: WritableBuffer) -> None:
    """Write the payload of (key, part) of the buffer's size into it.

    Owns: writes all of `out`, allocates nothing of its size.
    Raises: ValueError if part is outside 0..MAX_PART or the buffer is read-only or not contiguous.
    """
    data = np.frombuffer(out, dtype=np.uint8)
    size_bytes = data.size
    identity = _identity(key, part, size_bytes)
    for chunk, start in enumerate(range(0, size_bytes, _CHUNK_BYTES)):
        _fill_chunk(identity, chunk, data[start : start + _CHUNK_BYTES])


def check_payload(key: bytes, part: int, data: ByteBuffer) -> bool:
    """Return whether the buffer holds exactly the payload of (key, part) of its size.

    Raises: ValueError if part is outside 0..MAX_PART or the buffer is not contiguous.
    """
    found = np.frombuffer(data, dtype=np.uint8)
    size_bytes = found.size
    identity = _identity(key, part, size_bytes)
    for chunk, start in enumerate(range(0, size_bytes, _CHUNK_BYTES)):
        if not _chunk_matches(identity, chunk, found[start : start + _CHUNK_BYTES]):
            return False
    return True


def _identity(key: bytes, part: int, size_bytes: int) -> bytes:
    if not 0 <= part <= MAX_PART:
        raise ValueError(f"part: is {part}, outside 0..{MAX_PART}")
    return key + _HEADER.pack(part, size_bytes)


def _stream(identity: bytes, chunk: int) -> tuple[_Words, np.uint64]:
    """Return a slice of the pool, at least a chunk and a word long, and the word: the payload is one XOR the other."""
    digest = xxhash.xxh3_128_intdigest(identity, chunk)
    return _POOL[digest & _OFFSET_MASK :], np.uint64(digest >> 64)


def _fill_chunk(identity: bytes, chunk: int, out: npt.NDArray[np.uint8]) -> None:
    pool, word = _stream(identity, chunk)
    count, rest = divmod(out.size, 8)
    np.bitwise_xor(pool[:count], word, out=out[: count * 8].view(_WORD_TYPE))
    if rest:
        out[count * 8 :] = _tail(pool[count] ^ word, rest)


def _chunk_matches(identity: bytes, chunk: int, found: npt.NDArray[np.uint8]) -> bool:
    pool, word = _stream(identity, chunk)
    count, rest = divmod(found.size, 8)
    scratch = _SCRATCH.words[:count]
    np.bitwise_xor(found[: count * 8].view(_WORD_TYPE), pool[:count], out=scratch)
    # Zero where equal. np.count_nonzero costs a third of all() a call, and a part is often only 4 KiB.
    np.bitwise_xor(scratch, word, out=scratch)
    if np.count_nonzero(scratch):
        return False
    return not rest or bytes(found[count * 8 :]) == bytes(_tail(pool[count] ^ word, rest))


def _tail(word: np.uint64, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(int(word).to_bytes(8, "little"), dtype=np.uint8, count=size_bytes)


def _random_words(count: int) -> _Words:
    """Return `count` words of splitmix64 from state 0: the same on every machine and numpy version."""
    words: _Words = np.arange(1, count + 1, dtype=_WORD_TYPE) * np.uint64(GOLDEN_GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    words ^= words >> np.uint64(31)
    words.flags.writeable = False
    return words


class _Scratch(threading.local):
    """Where a thread compares: checks of two threads must not share it."""

    def __init__(self) -> None:
        self.words: _Words = np.empty(_CHUNK_WORDS, dtype=_WORD_TYPE)


_POOL: Final = _random_words(2 * _CHUNK_WORDS + 1)
_SCRATCH: Final = _Scratch()
