"""Regions: shared memory of the clients' own, by descriptor, that the shard copies from and to.

Rules
- A region is mapped here only where its file cannot become shorter: a memfd sealed against it. Any other is read by
  preadv, and all are written by pwritev, so that a file which its client cuts short gives an error and never a signal.
- A region is of one session and unknown to all others. Its number is never used again in that session.
- Its descriptor is closed once: when the region was given back (or its session ended) and no copy uses it.
- Only the event loop's thread calls here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.columns import Flags, Longs, Words
from kvstore.core.few import Offsets
from kvstore_wire.errors import InvalidArgument, TableFull
from kvstore_wire.limits import MAX_CALL_SLICES
from kvstore_wire.v1 import types_pb2 as types

_FEW_SLICES = 64  # From where columns are faster than a loop.
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which Python before 3.13 does not name.


@dataclass(frozen=True, eq=False)
class Copies:
    """What to copy between the arena and one region, a row a slice; of few slices, the columns are lists.

    Shapes: (slices,) each. Units: bytes, from the start of the arena and of the region.
    """

    arena: Offsets
    region: Offsets
    lengths: Offsets

    def __len__(self) -> int:
        return len(self.lengths)

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        return listed(self.arena), listed(self.region), listed(self.lengths)

    def columns(self) -> tuple[Longs, Longs, Longs]:
        return np.asarray(self.arena), np.asarray(self.region), np.asarray(self.lengths)

    @property
    def size_bytes(self) -> int:
        return int(sum(self.lengths)) if isinstance(self.lengths, list) else int(self.lengths.sum())


def listed(numbers: Offsets) -> list[int]:
    return numbers if isinstance(numbers, list) else numbers.tolist()


@dataclass(eq=False)
class Region:
    """`length` bytes of a file from `offset`. Owns its descriptor. `file` is the same for all regions of one file.

    `mapped`: the bytes themselves, read-only, (length,), where they can be had at no risk. It goes with the descriptor.
    """

    fd: int
    offset: int
    length: int
    file: tuple[int, int]
    is_readable: bool
    is_writable: bool
    mapped: npt.NDArray[np.uint8] | None = None
    copies: int = 0
    is_given_back: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_whole(self, at: int, size: int) -> bool:
        """Whether all pages of some mapped bytes are there. One that is not would be made, and be this process's to pay
        for, if it was looked at by the mapping."""
        assert self.mapped is not None
        start = self.mapped.ctypes.data + at
        first = start - start % mmap.PAGESIZE
        pages = -(-(start + size - first) // mmap.PAGESIZE)
        found = ctypes.create_string_buffer(pages)
        return _mincore(first, pages * mmap.PAGESIZE, found) == 0 and found.raw.count(1) == pages

    def use(self) -> None:
        """Keeps the descriptor open until `unuse`. Raises InvalidArgument if the region was given back."""
        if self.is_given_back:
            raise InvalidArgument("the region was given back", field="region")
        self.copies += 1

    def unuse(self) -> None:
        self.copies -= 1
        self._close_if_unused()

    def give_back(self) -> None:
        """Closes the descriptor, now or when the last copy ends. Call it once."""
        self.is_given_back = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.is_given_back and not self.copies:
            self.mapped = None
            os.close(self.fd)
            self.closed.set()


@dataclass(eq=False)
class _Own:
    """One session's regions by number, and the last number given."""

    regions: dict[int, Region] = field(default_factory=dict)
    last: int = 0


class RegionTable:
    """Regions by session and number. Both limits are of one session."""

    def __init__(self, max_regions: int, max_region_bytes: int) -> None:
        self._max_regions, self._max_region_bytes = max_regions, max_region_bytes
        self._sessions: dict[bytes, _Own] = {}
        self.registered_count = 0  # Since the start: one a buffer is right, one a call is a client's fault.

    @property
    def region_count(self) -> int:
        return sum(len(own.regions) for own in self._sessions.values())

    @property
    def region_bytes(self) -> int:
        return sum(region.length for own in self._sessions.values() for region in own.regions.values())

    def register(self, session_id: bytes, fd: int, *, offset: int, length: int) -> int:
        """Adds a region and returns its number. Owns: `fd` from here on, whatever comes of it.

        Raises InvalidArgument (field `fd`: not shared memory; `length`: empty, or the file ends before the region
        does) and TableFull (field `max_regions` or `max_region_bytes`).
        """
        own = self._sessions.get(session_id, _Own())
        try:
            self._check_room(own, length)
            region = _opened(fd, offset, length)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        self._sessions[session_id] = own
        own.last += 1
        own.regions[own.last] = region
        self.registered_count += 1
        return own.last

    def get(self, session_id: bytes, number: int) -> Region:
        """Raises InvalidArgument if the session has no region of that number."""
        own = self._sessions.get(session_id)
        found = own and own.regions.get(number)
        if not found:
            raise InvalidArgument(f"{number} is not a region of this session", field="region")
        return found

    def unregister(self, session_id: bytes, number: int) -> bool:
        """Gives a region back; false if there is none of that number. Copies under way go on."""
        return self._take(session_id, number) is not None

    async def retire(self, session_id: bytes, number: int) -> bool:
        """As `unregister`, and waits until no copy uses the region any more."""
        region = self._take(session_id, number)
        if region is None:
            return False
        await region.closed.wait()
        return True

    def end_session(self, session_id: bytes) -> None:
        """Gives all regions of a session back."""
        own = self._sessions.pop(session_id, _Own())
        for region in own.regions.values():
            region.give_back()

    def close(self) -> None:
        """Gives all regions back."""
        for session_id in list(self._sessions):
            self.end_session(session_id)

    def _take(self, session_id: bytes, number: int) -> Region | None:
        own = self._sessions.get(session_id, _Own())
        region = own.regions.pop(number, None)
        if region is not None:
            region.give_back()
        return region

    def _check_room(self, own: _Own, length: int) -> None:
        if len(own.regions) >= self._max_regions:
            message = f"{len(own.regions)} regions in this session"
            raise TableFull(message, field="max_regions", limit=f"{self._max_regions}")
        used = sum(region.length for region in own.regions.values())
        if used + length > self._max_region_bytes:
            message = f"{used} bytes of regions in this session and {length} more"
            raise TableFull(message, field="max_region_bytes", limit=f"{self._max_region_bytes} bytes")


def _opened(fd: int, offset: int, length: int) -> Region:
    """Returns the region of a descriptor. Raises InvalidArgument."""
    try:
        seals, flags, status = fcntl.fcntl(fd, fcntl.F_GET_SEALS), fcntl.fcntl(fd, fcntl.F_GETFL), os.fstat(fd)
    except OSError:  # Only files of memory file systems have seals.
        limit = "a memfd or a file of tmpfs or hugetlbfs"
        raise InvalidArgument("is not shared memory", field="fd", limit=limit) from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("is not a file", field="fd")
    if length < 1 or offset < 0 or offset + length > status.st_size:
        message = f"{length} bytes from byte {offset} are not all in the file"
        raise InvalidArgument(message, field="length", limit=f"1-{max(0, status.st_size - offset)} bytes")
    mode = flags & os.O_ACCMODE
    may_write = mode != os.O_RDONLY and not flags & os.O_APPEND and not seals & _WRITE_SEALS and _takes_writes(fd)
    file = (status.st_dev, status.st_ino)
    region = Region(fd, offset, length, file, is_readable=mode != os.O_WRONLY, is_writable=may_write)
    if may_write and seals & fcntl.F_SEAL_SHRINK and not _is_overcommit_strict():
        region.mapped = _mapped(region)
    return region


def _mapped(region: Region) -> npt.NDArray[np.uint8] | None:
    """Maps a region whose file cannot become shorter, and is none of hugetlbfs, where a hole may have no page left."""
    before = region.offset % mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(
            region.fd,
            region.length + before,
            flags=mmap.MAP_SHARED,
            prot=mmap.PROT_READ,
            offset=region.offset - before,
        )
    except (OSError, ValueError):  # Out of address space: it is read by system calls then.
        return None
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)  # A core dump of the shard is no place for its clients' memory.
    return np.frombuffer(memory, np.uint8)[before:]


def _is_overcommit_strict() -> bool:
    """Whether the kernel may refuse a page for a hole of a mapped file, which is a signal there."""
    try:
        with open("/proc/sys/vm/overcommit_memory") as told:
            return told.read().strip() == "2"
    except OSError:
        return True


def _takes_writes(fd: int) -> bool:
    """Whether the file system has a write call at all: hugetlbfs has none."""
    try:
        os.pwritev(fd, [b""], 0)
    except OSError:
        return False
    return True


def plan(
    slices: types.RegionSlices,
    region: Region,
    part_lengths: Sequence[int] | Longs,
    offsets: Sequence[int] | Longs,
    *,
    field: str,
) -> Copies:
    """Checks the slices of one call and returns what to copy for the parts that have an arena offset (not -1).

    Each part's slices must have its length together; a length of -1 is not known, and not checked.
    Raises InvalidArgument naming `field`, the part and the limit.
    """
    if len(slices.offsets) <= _FEW_SLICES and not slices.counts:
        few = _plan_few(slices, region, part_lengths, offsets)
        if few is not None:
            return few
    lengths = np.array(part_lengths, np.int64)
    counts = _counts(slices, len(lengths), field)
    part: Longs = np.repeat(np.arange(len(lengths)), counts)
    at, sizes = (np.fromiter(numbers, np.uint64, len(part)) for numbers in (slices.offsets, slices.lengths))
    _check_inside(at, sizes, part, region=region, field=field)
    region_at, size = at.astype(np.int64), sizes.astype(np.int64)
    known = lengths >= 0
    _check_slices(size, part, np.where(known, lengths, region.length), field)
    before, ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(size))), np.cumsum(counts)
    _check_sums(before[ends] - before[ends - counts], lengths, known, field)
    within = before[:-1] - np.repeat(before[ends - counts], counts)
    arena = np.where(known, np.array(offsets, np.int64), -1)[part]
    wanted = np.flatnonzero((arena >= 0) & (size > 0))
    return Copies((arena + within)[wanted], region_at[wanted], size[wanted])


def _plan_few(
    slices: types.RegionSlices, region: Region, part_lengths: Sequence[int] | Longs, offsets: Sequence[int] | Longs
) -> Copies | None:
    """As `plan`, for few parts of one slice each, in a quarter of its time; None where something is wrong."""
    if not len(slices.offsets) == len(slices.lengths) == len(part_lengths):
        return None
    arena, region_at, sizes = list[int](), list[int](), list[int]()
    for at, size, length, offset in zip(slices.offsets, slices.lengths, part_lengths, offsets, strict=True):
        if at + size > region.length or (size != length and length >= 0):
            return None
        if offset >= 0 and length >= 0 and size:
            arena.append(offset)
            region_at.append(at)
            sizes.append(size)
    return Copies(arena, region_at, sizes)


def _counts(slices: types.RegionSlices, parts: int, field: str) -> Longs:
    """Returns the number of slices of each part."""
    given = len(slices.offsets)
    if given > MAX_CALL_SLICES:
        raise InvalidArgument(f"{given} slices", field=field, limit=f"{MAX_CALL_SLICES} slices a call")
    if len(slices.lengths) != given:
        raise InvalidArgument(f"{given} offsets for {len(slices.lengths)} lengths", field=field, limit="one each")
    if not slices.counts:
        if given != parts:
            raise InvalidArgument(f"{given} slices for {parts} parts", field=field, limit="one a part without counts")
        return np.ones(parts, np.int64)
    counts = np.fromiter(slices.counts, np.int64, len(slices.counts))
    if len(counts) != parts or counts.sum() != given:
        message = f"{len(counts)} counts of {counts.sum()} slices for {parts} parts of {given} slices"
        raise InvalidArgument(message, field=field, limit="one count a part")
    return counts


def _check_inside(at: Words, sizes: Words, part: Longs, *, region: Region, field: str) -> None:
    """Raises InvalidArgument for a slice that does not lie in the region (without a sum that could wrap around)."""
    length = np.uint64(region.length)
    outside = (sizes > length) | (at > length - np.minimum(sizes, length))
    if outside.any():
        i = int(np.argmax(outside))
        message = f"part {part[i]}: {sizes[i]} bytes from byte {at[i]} are not all in the region"
        raise InvalidArgument(message, field=field, limit=f"{region.length} bytes")


def _check_slices(sizes: Longs, part: Longs, most: Longs, field: str) -> None:
    """Raises InvalidArgument for a slice longer than its part, so that no part's sum can wrap around."""
    over = sizes > most[part]
    if over.any():
        i = int(np.argmax(over))
        raise _wrong_length(int(part[i]), f"a slice of {sizes[i]} bytes", limit=int(most[part[i]]), field=field)


def _check_sums(sums: Longs, lengths: Longs, known: Flags, field: str) -> None:
    """Raises InvalidArgument for a part whose slices do not have its length."""
    wrong = known & (sums != lengths)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise _wrong_length(i, f"slices of {sums[i]} bytes", limit=int(lengths[i]), field=field)


def _wrong_length(part: int, found: str, *, limit: int, field: str) -> InvalidArgument:
    return InvalidArgument(f"part {part}: {found}", field=field, limit=f"{limit} bytes")
