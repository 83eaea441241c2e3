"""The bytes of a write, cut into messages and hashed as they leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64

from kvstore_client.buffers import Slices, size_of


class Outgoing:
    """Parts in order. `checksums` is complete when `pieces` is exhausted.

    Owns: nothing; the buffers must stay as they are until then.
    """

    def __init__(self, parts: Sequence[Slices], chunk_bytes: int) -> None:
        self.parts = parts
        self._chunk_bytes = chunk_bytes
        self.checksums: list[int] = []

    @property
    def size_bytes(self) -> int:
        return sum(map(size_of, self.parts))

    def pieces(self, chunk_bytes: int | None = None) -> Iterator[tuple[list[memoryview], int]]:
        """Yields (views, their bytes together), each at most `chunk_bytes`; hashes each view just before."""
        chunk, self.checksums = chunk_bytes or self._chunk_bytes, []
        held: list[memoryview] = []
        filled = 0
        for slices in self.parts:
            digest = xxh3_64()
            for view in slices:
                for at, take in _cuts(len(view), chunk - filled, chunk):
                    cut = view[at : at + take]
                    digest.update(cut)
                    held.append(cut)
                    filled += take
                    if filled == chunk:
                        yield held, filled
                        held, filled = [], 0
            self.checksums.append(digest.intdigest())
        if filled:
            yield held, filled


def _cuts(size: int, first: int, rest: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, length): the first of at most `first` bytes, the others of at most `rest`."""
    at, room = 0, first
    while at < size:
        take = min(room, size - at)
        yield at, take
        at, room = at + take, rest
