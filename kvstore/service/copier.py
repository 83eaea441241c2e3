"""Copies between regions and the arena, in threads, without the GIL while bytes move.

Rules
- A call is cut into pieces, and the threads take a piece of each call in turn: a small call waits for one piece of
  each other call, never for a large call's end.
- Two writes into one file never run side by side: the kernel takes them one after another, and the second thread would
  only wait.
- A call's caller gets control back when no thread touches its arena slots or its descriptor any more, however the call
  ends. One that is cancelled or fails takes no further piece.
- A small call is done at once, where nothing is under way that could hold it up.
- What the threads share is touched under one lock, which is never held while bytes move.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.core.columns import Flags, Longs
from kvstore.core.few import Offsets
from kvstore.service.failpoints import Failpoints
from kvstore.service.regions import Copies, Region, listed
from kvstore.tiers.memory import ArenaMemory
from kvstore_wire.errors import Draining, InvalidArgument

# Two tenths of a millisecond's work: what a small call waits for, what a cancelled one still does, and by how much one
# thread can be done before the others. In smaller ones the threads would wait for each other in Python.
PIECE_BYTES = 2 << 20
PIECE_SLICES = 1024  # The kernel's limit on buffers of one system call.
SMALL_BYTES, SMALL_SLICES = 64 << 10, 16  # Less work than to wake a thread and be woken by it, 60 us.
_FEW_SLICES = 64  # Made into rows at once: a thread takes longer to wake than this.

MAPPED_SLICE_BYTES = 16 << 10  # On average: below, a system call for many of them costs less than each by itself.

Move: TypeAlias = "Callable[[Region, Sequence[memoryview], int, int], int]"


class _FileEnded(Exception):
    """The file is shorter than the region; `at` is its length in bytes."""

    def __init__(self, at: int) -> None:
        self.at = at


@dataclass(frozen=True)
class _Rows:
    """A call's slices in the order of the region: joined where they can be, cut at the length of a piece.

    `starts` are the rows that do not follow the one before in the region; `ends` are running sums of lengths. Of few
    slices, the columns are lists.
    """

    arena: Offsets
    region: Offsets
    lengths: Offsets
    starts: Sequence[int]
    ends: Offsets

    @staticmethod
    def of(copies: Copies, piece_bytes: int) -> _Rows:
        if len(copies) <= _FEW_SLICES:
            return _Rows._of_few(copies, piece_bytes)
        arena, region, lengths = copies.columns()
        if (region[1:] < region[:-1]).any():
            order = np.argsort(region, kind="stable")
            arena, region, lengths = arena[order], region[order], lengths[order]
        first = np.flatnonzero(~(_follows(region, lengths) & _follows(arena, lengths)))
        arena, region, lengths = arena[first], region[first], np.add.reduceat(lengths, first)
        cuts = -(-lengths // piece_bytes)
        row = np.repeat(np.arange(len(cuts)), cuts)
        skipped = (np.arange(len(row)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * piece_bytes
        arena, region, lengths = arena[row] + skipped, region[row] + skipped, lengths[row] - skipped
        lengths = np.minimum(lengths, piece_bytes)
        starts: list[int] = np.flatnonzero(~_follows(region, lengths)).tolist()
        return _Rows(arena, region, lengths, starts, np.cumsum(lengths))

    @staticmethod
    def _of_few(copies: Copies, piece_bytes: int) -> _Rows:
        """As `of`, in a fifth of its time for few slices."""
        arena, region, lengths, starts = list[int](), list[int](), list[int](), list[int]()
        arena_end = region_end = -1
        for at, start, size in sorted(zip(*copies.lists(), strict=True), key=itemgetter(1)):
            follows = start == region_end
            if follows and at == arena_end and lengths:
                room = min(size, piece_bytes - lengths[-1])
                lengths[-1] += room
                at, start, size = at + room, start + room, size - room
            while size:
                if not follows:
                    starts.append(len(lengths))
                arena.append(at)
                region.append(start)
                lengths.append(min(size, piece_bytes))
                at, start, size, follows = at + lengths[-1], start + lengths[-1], size - lengths[-1], True
            arena_end, region_end = at, start
        return _Rows(arena, region, lengths, starts, list(accumulate(lengths)))

    def piece_end(self, first: int) -> int:
        """Returns the row after the last one of the piece that begins with row `first`."""
        ends = self.ends
        most = (int(ends[first - 1]) if first else 0) + PIECE_BYTES
        if isinstance(ends, list):
            return bisect_right(ends, most, first)
        return min(first + PIECE_SLICES, int(np.searchsorted(ends, most, "right")))

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields the bounds of what follows one another in the region."""
        starts = self.starts
        inner = starts[bisect_right(starts, first) : bisect_left(starts, last)]
        return pairwise((first, *inner, last))


def _follows(at: Longs, lengths: Longs) -> Flags:
    """Whether each row begins where the one before ends; the first does not."""
    out = np.zeros(len(at), np.bool_)
    out[1:] = at[:-1] + lengths[:-1] == at[1:]
    return out


@dataclass(eq=False)
class _Call:
    """One call under way. All but `copies`, `view`, `region` and `move` is touched under the copier's lock."""

    copies: Copies
    region: Region
    view: memoryview
    move: Move
    field: str
    is_writing: bool
    on_end: Callable[[], None] | None = None  # Told once, by whichever thread ends it.
    rows: _Rows | None = None  # None until a thread has made them.
    next_row: int = 0
    turns: int = 0  # Threads at work on it.
    is_stopped: bool = False
    fault: BaseException | None = None

    @property
    def is_exhausted(self) -> bool:
        return self.is_stopped or (self.rows is not None and self.next_row == len(self.rows.lengths))

    def take(self) -> tuple[int, int] | None:
        """Returns the rows of the next piece; None where the rows are to be made first."""
        if self.rows is None:
            return None
        first, self.next_row = self.next_row, self.rows.piece_end(self.next_row)
        return first, self.next_row

    def work(self, piece: tuple[int, int] | None) -> _Rows | None:
        """Moves the bytes of a piece; returns the rows where they are to be made. Raises InvalidArgument."""
        if piece is None or self.rows is None:
            return _Rows.of(self.copies, PIECE_BYTES)
        rows = self.rows
        for first, last in rows.runs(*piece):
            if self.is_stopped:
                break
            slots = zip(listed(rows.arena[first:last]), listed(rows.lengths[first:last]), strict=True)
            self._move([self.view[at : at + size] for at, size in slots], int(rows.region[first]))
        return None

    def _move(self, views: list[memoryview], at: int) -> None:
        """Moves one run of the region. A system call that moves less than all is asked again, to say why."""
        left = sum(map(len, views))
        failure, limit = "", ""
        while left and not failure:
            try:
                moved = self.move(self.region, views, at, left)
            except OSError as error:
                failure = f"{error.strerror} at byte {at} of the region"
            except _FileEnded as end:
                failure = f"the file ended at byte {max(0, end.at - self.region.offset)} of the region"
                limit = f"{self.region.length} bytes"
            else:
                left, at, views = left - moved, at + moved, _after(views, moved)
        if failure:  # Raised here, so that it refers to no error whose frames keep views of the arena.
            raise InvalidArgument(failure, field=self.field, limit=limit)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers after their first `count` bytes."""
    if count == sum(map(len, views)):
        return []
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []


def _read(region: Region, views: Sequence[memoryview], at: int, size: int) -> int:
    mapped = region.mapped
    if mapped is not None and size >= MAPPED_SLICE_BYTES * len(views) and region.is_whole(at, size):
        return _read_mapped(mapped, views, at)
    count = os.preadv(region.fd, views, region.offset + at)
    if not count:
        raise _FileEnded(os.fstat(region.fd).st_size)
    return count


def _read_mapped(mapped: npt.NDArray[np.uint8], views: Sequence[memoryview], at: int) -> int:
    """Twice as fast as by a system call, which looks each page up."""
    start = at
    for view in views:
        np.copyto(np.frombuffer(view, np.uint8), mapped[at : at + len(view)])
        at += len(view)
    return at - start


def _write(region: Region, views: Sequence[memoryview], at: int, size: int) -> int:
    end, offset = os.fstat(region.fd).st_size, region.offset + at
    if end < offset + size:  # A write would make it longer again.
        raise _FileEnded(end)
    return os.pwritev(region.fd, views, offset)


@dataclass
class _Queue:
    """What the threads share: calls that have a piece to give, all calls, files being written."""

    ready: deque[_Call] = field(default_factory=deque)
    calls: set[_Call] = field(default_factory=set)
    written: set[tuple[int, int]] = field(default_factory=set)
    is_closed: bool = False

    def pick(self) -> _Call | None:
        """Takes out the first call whose file may be used now."""
        for _ in range(len(self.ready)):
            call = self.ready.popleft()
            if not (call.is_writing and call.region.file in self.written):
                return call
            self.ready.append(call)
        return None


class Copying(asyncio.Future[None]):
    """A copy under way; done, in the event loop, when no thread touches its slots or its descriptor any more.

    One that is cancelled takes no further piece, and is done as soon as those under way are.
    Raises InvalidArgument (field `source` or `into`: the region ended, or the kernel refused) and Draining when the
    copier closes. What landed before an error stays.
    """

    def __init__(self, call: _Call, stop: Callable[[_Call], None]) -> None:
        super().__init__()
        self.call, self._stop = call, stop
        self.delay: asyncio.Task[None] | None = None  # Of a failpoint.
        self._is_cancelled = False
        call.region.use()

    @property
    def is_stopped(self) -> bool:
        """Whether it was cancelled, done or not."""
        return self._is_cancelled

    def cancel(self, msg: object = None) -> bool:
        """Stops the copy. Returns false if it was done."""
        if self.done():
            return False
        self._is_cancelled = True
        if self.delay is not None:
            self.delay.cancel()
        else:
            self._stop(self.call)
        return True

    def end(self) -> None:
        """Tells that nothing of it is under way any more."""
        self.call.on_end = None  # It refers to this.
        self.call.region.unuse()
        if self._is_cancelled:
            super().cancel()
        elif self.call.fault is not None:
            self.set_exception(self.call.fault)
        else:
            self.set_result(None)


class RegionCopier:
    """Owns its threads from construction to `close`, which must come before the arena's own."""

    def __init__(self, memory: ArenaMemory, failpoints: Failpoints, *, threads: int) -> None:
        self._memory, self._failpoints = memory, failpoints
        self._queue, self._lock = _Queue(), threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(cpus,), name=f"kvstore-region-{i}", daemon=True)
            for i, cpus in enumerate(_apart(threads))
        ]
        for thread in self._threads:
            thread.start()

    def fill(self, region: Region, copies: Copies) -> Copying:
        """Begins to copy from a region to the arena. Raises InvalidArgument if the region cannot be read."""
        if not region.is_readable:
            raise InvalidArgument("the region cannot be read", field="source", limit="open for reading")
        return self._begin(region, copies, move=_read, field="source", point="region.fill")

    def drain(self, region: Region, copies: Copies) -> Copying:
        """Begins to copy from the arena to a region. Raises InvalidArgument if the region cannot be written."""
        if not region.is_writable:
            limit = "open for writing, not for appending, not sealed, not of hugetlbfs"
            raise InvalidArgument("the region cannot be written", field="into", limit=limit)
        return self._begin(region, copies, move=_write, field="into", point="region.drain")

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._queue.calls)

    def close(self) -> None:
        """Ends the calls under way at their next piece and waits for the threads."""
        with self._lock:
            self._queue.is_closed = True
            for call in list(self._queue.calls):
                call.fault = call.fault or Draining("the shard closes")
                self._stop_locked(call)
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _begin(self, region: Region, copies: Copies, *, move: Move, field: str, point: str) -> Copying:
        self._check(region, copies)
        call = _Call(copies, region, self._memory.view, move, field=field, is_writing=move is _write)
        copying = Copying(call, self._stop)
        if self._failpoints.any_armed(point):
            copying.delay = copying.get_loop().create_task(self._failpoints.hit(point))
            copying.delay.add_done_callback(lambda hit: self._begin_late(copying, hit))
        else:
            self._start(copying)
        return copying

    def _begin_late(self, copying: Copying, hit: asyncio.Task[None]) -> None:
        copying.delay = None
        failure = None if hit.cancelled() else hit.exception()
        if hit.cancelled() or failure is not None or copying.is_stopped:
            copying.call.fault = failure
            copying.end()
        else:
            self._start(copying)

    def _start(self, copying: Copying) -> None:
        call, copies, loop = copying.call, copying.call.copies, copying.get_loop()
        if not len(copies):
            copying.end()
            return
        if len(copies) <= _FEW_SLICES:
            call.rows = _Rows.of(copies, PIECE_BYTES)
            if self._is_small(copies):
                try:
                    call.work(call.take())
                except Exception as error:  # noqa: BLE001 - raised where the call is awaited
                    call.fault = error.with_traceback(None)  # Its frames refer to the arena.
                copying.end()
                return
        call.on_end = lambda: _tell(loop, copying.end)
        with self._lock:
            if not self._queue.is_closed:
                self._queue.calls.add(call)
                self._queue.ready.append(call)
                self._lock.notify(1 if call.rows is None or call.is_writing else len(call.rows.lengths))
                return
        call.fault = Draining("the shard closes")
        copying.end()

    def _stop(self, call: _Call) -> None:
        with self._lock:
            self._stop_locked(call)

    def _is_small(self, copies: Copies) -> bool:
        return not self._queue.calls and len(copies) <= SMALL_SLICES and copies.size_bytes <= SMALL_BYTES

    def _check(self, region: Region, copies: Copies) -> None:
        """Raises ValueError for a slice that no plan would give: the bytes beside a slot are somebody else's."""
        arena_bytes, region_bytes = len(self._memory.view), region.length
        if isinstance(copies.lengths, list):
            rows = zip(*copies.lists(), strict=True)
            bad = not all(
                0 <= at <= arena_bytes - size and 0 <= start <= region_bytes - size and size > 0
                for at, start, size in rows
            )
        else:
            arena, start, size = copies.columns()
            bad = bool(((arena < 0) | (start < 0) | (size < 1)).any())
            bad = bad or bool(((arena > arena_bytes - size) | (start > region_bytes - size)).any())
        if bad:
            raise ValueError("a slice lies outside the arena or the region")

    # -- shared with the threads ---------------------------------------------------------------------------------

    def _stop_locked(self, call: _Call) -> None:
        call.is_stopped = True
        with contextlib.suppress(ValueError):
            self._queue.ready.remove(call)
        self._end_locked(call)

    def _end_locked(self, call: _Call) -> None:
        """Tells the caller, once, when nobody works on a call and nothing is left of it."""
        if call.is_exhausted and not call.turns and call in self._queue.calls:
            self._queue.calls.remove(call)
            if call.on_end is not None:
                call.on_end()

    def _run(self, cpus: set[int]) -> None:
        """Works until the copier closes. The outermost loop of a thread."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
        while self._take_turn():
            pass

    def _take_turn(self) -> bool:
        """Does one piece of one call; false when the copier closes."""
        turn = self._begin_turn()
        if turn is None:
            return False
        call, piece = turn
        rows: _Rows | None = None
        fault: Exception | None = None
        try:
            rows = call.work(piece)
        except Exception as error:  # noqa: BLE001 - raised where the call is awaited
            fault = error.with_traceback(None)  # Its frames refer to the arena.
        self._end_turn(call, rows, fault)
        return True

    def _begin_turn(self) -> tuple[_Call, tuple[int, int] | None] | None:
        with self._lock:
            while (call := self._queue.pick()) is None:
                if self._queue.is_closed:
                    return None
                self._lock.wait()
            piece = call.take()
            call.turns += 1
            if call.is_writing:
                self._queue.written.add(call.region.file)
            elif piece is not None and not call.is_exhausted:
                self._queue.ready.append(call)
                self._lock.notify()
            return call, piece

    def _end_turn(self, call: _Call, rows: _Rows | None, fault: Exception | None) -> None:
        with self._lock:
            call.turns -= 1
            call.rows = rows or call.rows
            if call.is_writing:
                self._queue.written.discard(call.region.file)
            if fault is not None:
                call.fault = call.fault or fault
                self._stop_locked(call)
            elif (call.is_writing or rows is not None) and not call.is_exhausted:
                self._queue.ready.append(call)
                if len(self._queue.ready) > 1:  # This thread takes one itself.
                    self._lock.notify()
            self._end_locked(call)


def _apart(threads: int) -> list[set[int]]:
    """Returns the CPUs of each thread: no two threads' are the same, as long as there are enough.

    The kernel wakes threads on the CPU of whoever wakes them, where two would take turns for milliseconds beside an
    idle CPU.
    """
    cpus = sorted(os.sched_getaffinity(0))
    return [set(cpus[i % len(cpus) :: threads]) for i in range(threads)]


def _tell(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # The loop was closed: nobody waits.
        loop.call_soon_threadsafe(ended)
