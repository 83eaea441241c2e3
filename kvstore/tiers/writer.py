"""Writes one life of a segment: header, payload as it comes, and at the end the table that makes it count.

Every method blocks. One thread at a time writes; what was written can be read by others at once, and is durable once
the segment is sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.tiers.device import Device, Disk, read_bytes, write_bytes
from kvstore.tiers.segment import BLOCK_BYTES, BadSegment, Described, Footer, Header, Layout, blocks_of


class BlockOut(NamedTuple):
    """One block on its way to disk: of each part its index, its length and checksum, and the memory it lies in.

    `pieces` are whole blocks of the device, `blocks_of(length)` each: what lies behind a part's end is written too.
    """

    described: Described
    key: bytes
    parts: Sequence[int]
    lengths: Sequence[int]
    checksums: Sequence[int]
    pieces: Sequence[memoryview]
    created: float
    expires: float = 0.0


class Placed(NamedTuple):
    """Where a block lies: the offset of each of its parts in the segment, in bytes."""

    block: BlockOut
    offsets: list[int]


class SegmentWriter:
    """Owns the device of a segment from `begin` to `seal` or `close`."""

    def __init__(self, device: Device, header: Header) -> None:
        self.device, self.header = device, header
        self.layout = Layout(header.size_bytes)

    @staticmethod
    def begin(disk: Disk, name: str, header: Header) -> SegmentWriter:
        """Makes the segment, or takes it for another life; what it held is gone when this returns. Raises OSError.

        A segment of another size is made anew.
        """
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
        return SegmentWriter(device, header)

    def write(self, blocks: Sequence[BlockOut]) -> list[Placed]:
        """Writes leading blocks, as many as fit, in one piece; returns where they lie. Raises OSError.

        After an error nothing of the segment may be used: close it and begin another life.
        """
        placed: list[Placed] = []
        start = self.layout.end_bytes
        pieces: list[memoryview] = []
        for block in blocks:
            if not self.layout.fits(block.lengths, block.described):
                break
            placed.append(Placed(block, self._place(block)))
            pieces.extend(piece for piece in block.pieces if len(piece))
        if pieces:
            self.device.write(start, pieces)
        return placed

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
        )


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
