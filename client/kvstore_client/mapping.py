"""The shard's arena, mapped read-only into this process: reads by shared memory copy from it or look at it in place."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import MalformedAnswer
from kvstore_wire.errors import LeaseExpired

# From Linux's fcntl.h: Python's fcntl lacks the names where it was built on an old C library.
F_GET_SEALS = 1034
F_SEAL_SHRINK = 2


class ArenaMapping:
    """Maps the first `size_bytes` of a shard's memory, of that shard's life `generation`.

    Owns: `fd`, which is closed in every case (Python's map has a duplicate of its own, with the same end). The memory
    stays mapped until `close`, and beyond it until the last view or array taken from here is gone.
    Raises: MalformedAnswer where the file is no sealed memory, may shrink (a read behind its end would kill this
    process) or is smaller than `size_bytes`; OSError where the kernel refuses the map.
    """

    def __init__(self, fd: int, size_bytes: int, generation: int) -> None:
        self.size_bytes, self.generation = size_bytes, generation
        try:
            _check_file(fd, size_bytes)
            self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._view, np.uint8)

    @property
    def closed(self) -> bool:
        return self._map is None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as one array. Raises LeaseExpired once closed.

        Shapes: (size_bytes,) uint8, read-only.
        """
        array = self._array
        if array is None:
            raise _closed()
        return array

    def view(self, offset: int, length: int) -> memoryview:
        """Returns a read-only view. Raises MalformedAnswer outside of the map, LeaseExpired once closed.

        Units: bytes.
        """
        if offset < 0 or length < 0 or int(offset) + int(length) > self.size_bytes:
            raise MalformedAnswer(f"{length} bytes at {offset} are outside of an arena of {self.size_bytes} bytes")
        try:
            return self._view[offset : offset + length]
        except ValueError:  # It was released, perhaps by another thread just now.
            raise _closed() from None

    def close(self) -> None:
        """Ends the mapping, at the latest when the last view taken from it is gone. Idempotent."""
        mapped, self._map, self._array = self._map, None, None
        self._view.release()
        if mapped is not None:
            with suppress(BufferError):  # Views are out: each keeps the map, and the last one ends it.
                mapped.close()


def _check_file(fd: int, size_bytes: int) -> None:
    try:
        held_bytes = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        raise MalformedAnswer(f"the arena's descriptor is no sealed memory: {error}") from None
    if not seals & F_SEAL_SHRINK:
        raise MalformedAnswer("the arena's memory is not sealed against shrinking")
    if not 1 <= size_bytes <= held_bytes:
        raise MalformedAnswer(f"the arena's memory has {held_bytes} bytes where {size_bytes} were announced")


def _closed() -> LeaseExpired:
    return LeaseExpired("the arena is mapped no more: what was leased in it has ended")
