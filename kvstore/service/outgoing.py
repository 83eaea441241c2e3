"""The bytes of one Get on their way out, whatever door they leave by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64

from kvstore.core.few import Rows
from kvstore.core.leases import ReadLease
from kvstore.core.sessions import Session
from kvstore.service import ranges
from kvstore.service.shell import Shell
from kvstore_wire.errors import LeaseExpired
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types

MOST_PIECES = 1024  # Taken at once: many tiny ones must not hold the event loop.


class Reading:
    """What a Get sends: a header, then the bytes of the granted parts. Close it, whatever happens.

    Owns: its lease, if it was made for this call (`ends_lease`). `is_counted`: its bytes count as read already.
    """

    def __init__(
        self,
        shell: Shell,
        session: Session,
        lease: ReadLease | None,
        *,
        states: bytes,
        parts: Rows,
        chosen: Sequence[types.Range] = (),
        ends_lease: bool,
        is_counted: bool = False,
    ) -> None:
        self._shell, self._session, self._lease, self._ends_lease = shell, session, lease, ends_lease
        self._is_counted = is_counted
        self.offsets, self.lengths, checksums = shell.store.part_views(parts)
        self.trailer: pb.GetTrailer | None = None
        self._ranged: Iterator[memoryview] | None = None
        if chosen:
            size = ranges.checked(chosen, self.lengths)
            self.trailer = pb.GetTrailer()
            self._ranged = self._strided(list(chosen))
            self.header = pb.GetHeader(states=states, lengths=[size] * len(self.lengths))
            self._left = size * len(self.lengths)
        else:
            self.header = pb.GetHeader(states=states, lengths=self.lengths, checksums=checksums)
            self._left = sum(self.lengths)
        self._part = self._done = 0
        self._held: memoryview | None = None

    @property
    def left_bytes(self) -> int:
        """Bytes that were not taken yet."""
        return self._left

    @property
    def lease(self) -> ReadLease | None:
        return self._lease

    @property
    def alive(self) -> bool:
        """Whether bytes taken may still be sent."""
        return self._lease is None or not self._lease.ended

    def take(self, most: int) -> tuple[list[memoryview], int]:
        """Returns the next bytes as views of the arena, at most `most`, and how many; nothing at the end.

        Valid until control goes back to the event loop, and again whenever `alive` says so. Raises LeaseExpired.
        """
        self.check()
        taken = self._take_ranged(most) if self._ranged is not None else self._take_parts(most)
        self._left -= taken[1]
        if self._lease is not None and taken[1] and not self._is_counted:
            self._lease.namespace.counters.add("read_bytes", taken[1])
        return taken

    def skip(self) -> None:
        """Leaves the payload out: somebody has moved it already."""
        if self._lease is not None:
            self._lease.namespace.counters.add("read_bytes", self._left)
        self._part, self._left = len(self.lengths), 0

    def check(self) -> None:
        """Raises LeaseExpired if what was leased may hold something else by now."""
        if self._lease is not None and self._lease.ended:
            raise LeaseExpired(f"read lease {self._lease.id} ended before all bytes were sent", field="lease")

    def close(self) -> None:
        """Ends the lease of a Get by chain. Idempotent."""
        if self._ends_lease and self._lease is not None:
            self._ends_lease = False
            self._shell.store.end_lease(self._session, self._lease, self._shell.now())
            self._shell.settle()

    def _take_parts(self, most: int) -> tuple[list[memoryview], int]:
        view, pieces, size = self._shell.memory.view, list[memoryview](), 0
        while size < most and self._part < len(self.lengths) and len(pieces) < MOST_PIECES:
            length = self.lengths[self._part]
            start = self.offsets[self._part] + self._done
            count = min(length - self._done, most - size)
            if count:
                pieces.append(view[start : start + count])
            size += count
            self._done += count
            if self._done == length:
                self._part, self._done = self._part + 1, 0
        return pieces, size

    def _take_ranged(self, most: int) -> tuple[list[memoryview], int]:
        assert self._ranged is not None
        pieces, size = list[memoryview](), 0
        while size < most and len(pieces) < MOST_PIECES:
            piece, self._held = (self._held or next(self._ranged, None)), None
            if piece is None:
                break
            if len(piece) > most - size:
                piece, self._held = piece[: most - size], piece[most - size :]
            pieces.append(piece)
            size += len(piece)
        return pieces, size

    def _strided(self, chosen: list[types.Range]) -> Iterator[memoryview]:
        """Yields the ranges of every part, and notes the checksum of each."""
        assert self.trailer is not None
        view, most = self._shell.memory.view, self._shell.limits.chunk_bytes
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            digest = xxh3_64()
            for piece in ranges.pieces(view[offset : offset + length], chosen, most):
                digest.update(piece)
                yield piece
            self.trailer.checksums.append(digest.intdigest())
