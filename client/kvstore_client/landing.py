"""Where the bytes of a read land: parts arrive one after another, cut at any place.

Rules: every piece goes straight to the caller's slices and is hashed there, while it is hot in the cache. A part whose
target is None is passed over. A part that does not match its checksum is noted and changes nothing else. More or fewer
bytes than announced make the whole read fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64

from kvstore_client.buffers import Slices
from kvstore_client.errors import MalformedAnswer
from kvstore_client.options import Verify

_SCRATCH_BYTES = 256 << 10


class Landing:
    """Takes the payload of one read; a sink. `targets[i]` must hold at least `lengths[i]` bytes.

    `checksums` is None where they come after the bytes (`trail`).
    Owns: writes to the targets until `finish`; on failure their content is undefined.
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int],
        checksums: Sequence[int] | None,
        targets: Sequence[Slices | None],
        verify: Verify,
    ) -> None:
        self._lengths, self._checksums, self._targets = lengths, checksums or (), targets
        self._verify = verify is Verify.ON
        self._part = 0  # The part being filled, its bytes so far, and where its next byte goes.
        self._done = 0
        self._slice, self._offset = 0, 0
        self._hash = xxh3_64()
        self._view = memoryview(b"")
        self._scratch: memoryview | None = None
        self._trailing: list[int] | None = None if checksums is not None else []
        self.corrupt: list[int] = []

    def room(self, most: int) -> memoryview:
        """Returns where the next bytes go, at most `most`. Raises MalformedAnswer if it is more than was announced."""
        lengths = self._lengths
        while self._part < len(lengths) and self._done == lengths[self._part]:
            self._close_part()
        if self._part == len(lengths):
            raise MalformedAnswer("more bytes came than were announced")
        left = min(most, lengths[self._part] - self._done)
        target = self._targets[self._part]
        if target is None:
            self._view = self._passed_over()[:left]
            return self._view
        while self._offset == len(target[self._slice]):
            self._slice, self._offset = self._slice + 1, 0
        view = target[self._slice]
        self._view = view[self._offset : self._offset + left]
        return self._view

    def landed(self, size: int) -> None:
        """Takes the first `size` bytes of the last `room`."""
        if self._verify and self._targets[self._part] is not None:
            self._hash.update(self._view[:size])
        self._done += size
        self._offset += size

    def feed(self, piece: memoryview) -> None:
        """Lands the next piece by copying it. Raises MalformedAnswer if it is more than was announced."""
        at, size = 0, len(piece)
        while at < size:
            room = self.room(size - at)
            room[:] = piece[at : at + len(room)]
            at += len(room)
            self.landed(len(room))

    def finish(self) -> None:
        """Ends the read. Raises MalformedAnswer if bytes or checksums are missing."""
        self._complete()
        if self._trailing:
            raise MalformedAnswer("the checksums did not come")

    def trail(self, checksums: Sequence[int]) -> None:
        """Takes checksums that came after the bytes. Raises MalformedAnswer unless they were to come, one a part."""
        self._complete()
        if self._trailing is None or len(checksums) != len(self._trailing):
            raise MalformedAnswer(f"{len(checksums)} checksums came after the bytes of {len(self._lengths)} parts")
        pairs = zip(self._trailing, checksums, strict=True)
        self.corrupt.extend(part for part, (ours, told) in enumerate(pairs) if ours not in (-1, told))
        self._trailing = []

    def _complete(self) -> None:
        while self._part < len(self._lengths):
            if self._done < self._lengths[self._part]:
                raise MalformedAnswer(f"the stream was cut in part {self._part} of {len(self._lengths)}")
            self._close_part()

    def _close_part(self) -> None:
        if self._targets[self._part] is not None and self._verify:
            digest = self._hash.intdigest()
            if self._trailing is not None:
                self._trailing.append(digest)
            elif digest != self._checksums[self._part]:
                self.corrupt.append(self._part)
        elif self._trailing is not None:
            self._trailing.append(-1)
        self._hash.reset()
        self._part += 1
        self._done = self._slice = self._offset = 0

    def _passed_over(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch
