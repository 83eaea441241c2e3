"""Writes one life of a segment: header, payload as it comes, and at the end the table that makes it count.

Every method blocks. One thread at a time writes; what was written can be read by others at once, and is durable once
the segment is sealed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.tiers.device import Device, Disk, aligned, read_bytes, write_bytes
from kvstore.tiers.sealing import Keyring, SegmentKey, WrongKey, about_part
from kvstore.tiers.segment import BLOCK_BYTES, UNSEALED, BadSegment, Described, Footer, Header, Layout, blocks_of

BOUNCE_BYTES = 8 << 20  # Sealed, and written in one piece.


class BlockOut(NamedTuple):
    """One block on its way to disk: of each part its index, its length and checksum, and the memory it lies in.

    `pieces` are whole blocks of the device, `blocks_of(length)` each: what lies behind a part's end is written too,
    unless it is sealed. `tags` are those of the parts once they were sealed.
    """

    described: Described
    key: bytes
    parts: Sequence[int]
    lengths: Sequence[int]
    checksums: Sequence[int]
    pieces: Sequence[memoryview]
    created: float
    expires: float = 0.0
    tags: Sequence[bytes] = ()


class Placed(NamedTuple):
    """A block as it was written, and where it lies: the offset of each of its parts in the segment, in bytes."""

    block: BlockOut
    offsets: list[int]

    def rows(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        """Yields index, offset, length, checksum and tag of each part, in the order of `PartAt`."""
        block = self.block
        tags = block.tags or [b""] * len(self.offsets)
        return zip(block.parts, self.offsets, block.lengths, block.checksums, tags, strict=True)


class SegmentWriter:
    """Owns the device of a segment from `begin` to `seal` or `close`. `key`: where payload is sealed."""

    def __init__(self, device: Device, header: Header, key: SegmentKey | None = None) -> None:
        self.device, self.header, self.key = device, header, key
        self.layout = Layout(header.size_bytes)
        self.failed = False  # A write of it has: nothing of it is to count.
        self._bounce = _Bounce(device) if key is not None else None

    @staticmethod
    def begin(disk: Disk, name: str, header: Header, *, keyring: Keyring | None = None) -> SegmentWriter:
        """Makes the segment, or takes it for another life; what it held is gone when this returns. Raises OSError.

        A segment of another size is made anew. `keyring`: payload is sealed, and the header says so.
        """
        key: SegmentKey | None = None
        if keyring is not None:
            header, key = keyring.begin(header)
        device: Device | None = None
        if name in disk.names():
            device = disk.open(name)
            if device.size_bytes != header.size_bytes:
                device.close()
                disk.remove(name)
                device = None
        if device is None:
            device = disk.create(name, header.size_bytes)
        try:
            # Durable before any payload: a footer of the last life must not pass for one of what is written over it.
            write_bytes(device, 0, header.to_block())
            device.sync()
        except OSError:
            device.close()
            raise
        return SegmentWriter(device, header, key)

    def write(self, blocks: Sequence[BlockOut]) -> list[Placed]:
        """Writes leading blocks, as many as fit, in one piece; returns where they lie. Raises OSError.

        After an error nothing of the segment may be used: close it and begin another life.
        """
        placed, write = self.place(blocks)
        write()
        return placed

    def place(self, blocks: Sequence[BlockOut]) -> tuple[list[Placed], Callable[[], object]]:
        """Gives leading blocks their places, as many as fit; returns these, and what writes them and raises OSError.

        That may be called while others are placed and written. What is to be sealed is written here and now.
        """
        if self.key is not None and self._bounce is not None:
            return self._write_sealed(blocks, self.key, self._bounce), _nothing
        placed: list[Placed] = []
        start = self.layout.end_bytes
        pieces: list[memoryview] = []
        for block in blocks:
            if not self.layout.fits(block.lengths, block.described):
                break
            placed.append(Placed(block, self._place(block)))
            pieces.extend(piece for piece in block.pieces if len(piece))
        return placed, (lambda: self.device.write(start, pieces)) if pieces else _nothing

    def seal(self, sealed_ns: int) -> None:
        """Makes all of it durable, the footer last. Raises OSError. The device stays open."""
        at, raw = self.layout.seal(self.header, sealed_ns)
        write_bytes(self.device, at, raw[:-BLOCK_BYTES])
        self.device.sync()
        write_bytes(self.device, self.header.size_bytes - BLOCK_BYTES, raw[-BLOCK_BYTES:])
        self.device.sync()

    def close(self) -> None:
        """Gives the device back. Idempotent."""
        self.device.close()

    def _write_sealed(self, blocks: Sequence[BlockOut], key: SegmentKey, bounce: _Bounce) -> list[Placed]:
        placed: list[Placed] = []
        bounce.begin(self.layout.end_bytes)
        for block in blocks:
            if not self.layout.fits(block.lengths, block.described):
                break
            tags = []
            for i, offset in enumerate(self.layout.offsets(block.lengths)):
                about = about_part(block.described.digest, block.key, block.parts[i], block.lengths[i])
                source = block.pieces[i][: block.lengths[i]]
                tags.append(key.seal(source, about, offset=offset, into=bounce))
                bounce.pad()
            sealed = block._replace(tags=tags)
            placed.append(Placed(sealed, self._place(sealed)))
        bounce.flush()
        return placed

    def _place(self, block: BlockOut) -> list[int]:
        for length, piece in zip(block.lengths, block.pieces, strict=True):
            assert len(piece) == blocks_of(length) * BLOCK_BYTES, "a piece that is not as long as its part takes"
        return self.layout.add(
            block.described,
            block.key,
            parts=block.parts,
            lengths=block.lengths,
            checksums=block.checksums,
            created=block.created,
            expires=block.expires,
            tags=block.tags,
        )


def _nothing() -> None:
    """Writes what is written already."""


class _Bounce:
    """The memory that sealed bytes go through on their way to a device: filled, written, and filled again."""

    def __init__(self, device: Device) -> None:
        self._device, self._memory = device, aligned(BOUNCE_BYTES)
        self._start = self._used = 0  # What is in memory goes there, and is so long.

    def begin(self, offset: int) -> None:
        """Goes on at an offset. Raises OSError where something was sealed for it before."""
        if offset < self._start + self._used:
            raise OSError(errno.EIO, "a write failed before, and its place cannot be sealed twice")
        self._start, self._used = offset, 0

    def room(self) -> memoryview:
        if self._used == len(self._memory):
            self.flush()
        return self._memory[self._used :]

    def filled(self, size_bytes: int) -> None:
        self._used += size_bytes

    def pad(self) -> None:
        """Fills up the block of a part's end, so that nothing is written there that is not sealed."""
        end = blocks_of(self._used) * BLOCK_BYTES
        self._memory[self._used : end] = bytes(end - self._used)
        self._used = end

    def flush(self) -> None:
        """Writes what is in memory. Raises OSError."""
        if self._used:
            self._device.write(self._start, [self._memory[: self._used]])
        self._start += self._used
        self._used = 0


def sealed_life(device: Device, *, store_id: bytes, number: int) -> tuple[Header, Footer] | None:
    """Returns header and footer of a segment that is sealed, None of one that is not. Raises OSError.

    Raises BadSegment where it is no segment of this folder, of this number, or of this format.
    """
    header = Header.of_block(read_bytes(device, 0, BLOCK_BYTES))
    if header.store_id != store_id:
        raise BadSegment("header.store", "is another folder's")
    if (header.number, header.size_bytes) != (number, device.size_bytes):
        raise BadSegment("header.number", f"is {header.number}, of {header.size_bytes} bytes")
    try:
        footer = Footer.of_block(read_bytes(device, header.size_bytes - BLOCK_BYTES, BLOCK_BYTES))
        footer.tables_at(header.size_bytes)
    except BadSegment:
        return None  # It was begun, and not finished.
    is_same_life = (footer.store_id, footer.number, footer.sequence) == (store_id, number, header.sequence)
    return (header, footer) if is_same_life else None


def key_in(device: Device, keyring: Keyring | None, *, store_id: bytes, life: tuple[int, int]) -> SegmentKey | None:
    """Returns the key of the life that a segment is in; None where its payload is not sealed. Raises OSError.

    Raises BadSegment where the segment is in another life, and WrongKey.
    """
    header = Header.of_block(read_bytes(device, 0, BLOCK_BYTES))
    if (header.store_id, header.number, header.sequence) != (store_id, *life):
        raise BadSegment("header.sequence", f"is {header.sequence}, of segment {header.number}")
    if header.key_id == UNSEALED:
        return None
    if keyring is None:
        raise WrongKey([header.key_id])
    return keyring.key_of(header)
