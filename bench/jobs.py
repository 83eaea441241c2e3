"""What a client process is to move, the memory it moves, and what each way of moving must offer."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.rig import MIB, warm
from kvstore_client.options import Verify

SHM, VIEWS, BULK, GRPC = "shm", "shm views", "bulk", "grpc"
MEMCPY, RAW_TCP, RAW_UNIX, BARE_GRPC = "memcpy", "raw TCP", "raw Unix socket", "bare gRPC"
RAW_UNPACED = "raw TCP, unpaced"  # As the store's own connections within a host.
OWN = (SHM, VIEWS, BULK, GRPC)
CEILINGS = (MEMCPY, RAW_TCP, RAW_UNIX, BARE_GRPC)
KEY_BYTES = 32


@dataclass(frozen=True)
class Job:
    """What a player is to move. `owner` tells clients apart; each has parts of its own.

    `fresh_count`: further parts that only puts use, with the bytes of the first ones. `round_calls`: calls of one
    round, each round going on where the last one ended; 0 = as many as take all parts once.
    """

    kind: str
    address: str
    part_bytes: int
    part_count: int
    owner: int = 0
    fresh_count: int = 0
    verify: str = Verify.ON.value
    round_calls: int = 0

    @property
    def size_bytes(self) -> int:
        return self.part_bytes * self.part_count

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Buffers:
    """Memory of one client process: what it puts (`source`, shared memory), and where its gets land. Both are warm.

    Owns: the descriptor of the shared memory, until `close`.
    """

    def __init__(self, size_bytes: int, seed: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # As `Client.allocate` does.
        self.source = memoryview(mmap.mmap(self.fd, size_bytes))
        _fill(self.source, seed)
        self.target = warm(size_bytes)

    def close(self) -> None:
        os.close(self.fd)


class Player(ABC):
    """One way to move parts."""

    @abstractmethod
    def put(self, first: int, last: int) -> None:
        """Stores parts. Raises if one was not stored."""

    @abstractmethod
    def get(self, first: int, last: int) -> None:
        """Reads parts. Raises if one is missing."""

    def match(self, first: int, last: int) -> None:
        """Asks which parts are stored. Raises ValueError where there is nobody to ask."""
        raise ValueError(f"{type(self).__name__} has nothing to look up")

    def clean(self, first: int, last: int) -> None:
        """Makes room for puts of the same parts; nothing where a put overwrites."""
        return

    def verify(self) -> bool:
        """Whether what gets bring is what was put; True where no one promises it."""
        return True

    def close(self) -> None:
        """Gives back what the player holds."""
        return


def keys_of(job: Job) -> list[bytes]:
    """The keys of a job's parts: the same in every process, others for every owner and size."""
    names = range(job.part_count + job.fresh_count)
    return [hashlib.sha256(f"{job.part_bytes}/{job.owner}/{i}".encode()).digest()[:KEY_BYTES] for i in names]


def cut(memory: memoryview, part_bytes: int, count: int) -> list[memoryview]:
    """Views of the parts that lie in a buffer one after another."""
    return [memory[i * part_bytes : (i + 1) * part_bytes] for i in range(count)]


def spans(count: int, batch: int) -> Sequence[tuple[int, int]]:
    """Half-open ranges of at most `batch` parts that make up `count`."""
    return [(first, min(first + batch, count)) for first in range(0, count, batch)]


def _fill(memory: memoryview, seed: int) -> None:
    """Fills memory in pieces: no second buffer of its size."""
    generator = np.random.default_rng(seed)
    for at in range(0, len(memory), 8 * MIB):
        piece = memory[at : at + 8 * MIB]
        piece[:] = generator.bytes(len(piece))
