"""Where the bytes of a read land: parts arrive one after another, cut at any place.

Rules: every piece goes straight to the caller's slices and is hashed there, while it is hot in the cache. A part whose
target is None is passed over. A part that does not match its checksum is noted and changes nothing else. More or fewer
bytes than announced make the whole read fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore_client.buffers import Slices
from kvstore_client.errors import MalformedAnswer
from kvstore_client.options import Verify


class Landing:
    """Takes the payload of one read. `targets[i]` must hold at least `lengths[i]` bytes.

    Owns: writes to the targets until `finish`; on failure their content is undefined.
    """

    def __init__(
        self, *, lengths: Sequence[int], checksums: Sequence[int], targets: Sequence[Slices | None], verify: Verify
    ) -> None:
        self._lengths, self._checksums, self._targets = lengths, checksums, targets
        self._verify = verify is Verify.ON
        self._part = 0  # The part being filled, its bytes so far, and where its next byte goes.
        self._done = 0
        self._slice, self._offset = 0, 0
        self._hash = xxh3_64()
        self.corrupt: list[int] = []

    def feed(self, piece: memoryview) -> None:
        """Lands the next piece. Raises MalformedAnswer if it is more than was announced."""
        at, size, lengths = 0, len(piece), self._lengths
        while at < size:
            if self._part == len(lengths):
                raise MalformedAnswer("more bytes came than were announced")
            length = lengths[self._part]
            if self._done == 0 and size - at >= length:
                self._whole(piece[at : at + length])
                at += length
            else:
                at += self._some(piece[at : at + length - self._done], length)

    def finish(self) -> None:
        """Ends the read. Raises MalformedAnswer if bytes are missing."""
        while self._part < len(self._lengths) and self._done == 0 and self._lengths[self._part] == 0:
            self._whole(memoryview(b""))
        if self._part < len(self._lengths):
            raise MalformedAnswer(f"the stream was cut in part {self._part} of {len(self._lengths)}")

    def _whole(self, data: memoryview) -> None:
        target = self._targets[self._part]
        if target is not None and len(target) == 1:
            landed = target[0][: len(data)]
            landed[:] = data
            if self._verify and xxh3_64_intdigest(landed) != self._checksums[self._part]:
                self.corrupt.append(self._part)
            self._part += 1
        else:
            self._some(data, len(data))

    def _some(self, data: memoryview, length: int) -> int:
        target = self._targets[self._part]
        if target is not None:
            self._scatter(data, target)
        self._done += len(data)
        if self._done == length:
            self._close_part(target)
        return len(data)

    def _scatter(self, data: memoryview, target: Slices) -> None:
        at = 0
        while at < len(data):
            view = target[self._slice]
            take = min(len(view) - self._offset, len(data) - at)
            landed = view[self._offset : self._offset + take]
            landed[:] = data[at : at + take]
            if self._verify:
                self._hash.update(landed)
            at += take
            self._offset += take
            if self._offset == len(view):
                self._slice, self._offset = self._slice + 1, 0

    def _close_part(self, target: Slices | None) -> None:
        if target is not None and self._verify and self._hash.intdigest() != self._checksums[self._part]:
            self.corrupt.append(self._part)
        self._hash.reset()
        self._part += 1
        self._done = self._slice = self._offset = 0
