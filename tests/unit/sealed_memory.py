"""Memory as a shard hands it out: a memfd, sealed against shrinking."""

from __future__ import annotations

import fcntl
import os

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore_client.grants import Grants
from kvstore_client.mapping import ArenaMapping

F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
SIZES = (0, 1, 511, 4095, 4096, 4097, 3_098_112)


def noise(size_bytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


def memory_file(data: bytes, *, seals: int = F_SEAL_SHRINK) -> int:
    """Returns the descriptor of a new file of `data`."""
    fd = os.memfd_create("test-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, len(data))
    os.pwrite(fd, data, 0)
    if seals:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


class Shelf:
    """Parts laid out in an arena with gaps between them, the file kept open for later writes."""

    def __init__(self, parts: list[bytes], gap_bytes: int = 64) -> None:
        self.parts = parts
        offsets, at = [], gap_bytes
        for part in parts:
            offsets.append(at)
            at += len(part) + gap_bytes
        data = bytearray(noise(at, seed=7))
        for offset, part in zip(offsets, parts, strict=True):
            data[offset : offset + len(part)] = part
        self.fd = memory_file(bytes(data))
        self.mapping = ArenaMapping(os.dup(self.fd), len(data), generation=1)
        self.grants = Grants.of(offsets, [len(p) for p in parts], [xxh3_64_intdigest(p) for p in parts])

    def damage(self, part: int) -> None:
        """Changes the last byte of a part."""
        at = int(self.grants.offsets[part]) + len(self.parts[part]) - 1
        os.pwrite(self.fd, bytes((self.parts[part][-1] ^ 1,)), at)

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)
