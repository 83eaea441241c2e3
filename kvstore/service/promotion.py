"""Bringing blocks of the warm tier back into memory: read straight into their slots, visible when they are checked.

Rules
- A promotion is a writer like any other: it reserves, fills and commits, so that whoever asks for a block under way
  waits for it as for any block in flight, and nobody sees one that is not whole.
- What is on its way is bounded in bytes; a chain is cut where the room ends.
- When nobody waits any more, what has not begun to be read is given up, unless so little is on its way that it costs
  nobody anything: then it lands for the next reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.cleaning import Ahead
from kvstore.core.leases import WriteLease
from kvstore.core.namespaces import Namespace
from kvstore.core.sessions import Session
from kvstore.core.sight import Ask
from kvstore.core.store import Store
from kvstore.core.writing import ReserveRequest
from kvstore.service.demotion import AHEAD_S, Demotion
from kvstore.service.latency import Latencies
from kvstore.tiers.index import Located
from kvstore.tiers.memory import ArenaMemory
from kvstore.tiers.segment import BLOCK_BYTES, blocks_of
from kvstore.tiers.warm import Clocks, Wanted, WarmTier
from kvstore_wire.errors import KvStoreError, LeaseExpired
from kvstore_wire.namespace import Kind
from kvstore_wire.states import PartState

_LOG = logging.getLogger("kvstore.promotion")
READ_BYTES = 4 << 20  # Handed to a reading thread at once: as fast as more, and the first blocks land sooner.
# For each read that the disk has at once. A chain is of use from its head on, and of many reads at once the kernel's
# scheduler may serve the first one last, since it prefers what lies behind the last place read.
READS_AHEAD = 2
MOST_TRIES, TRY_AGAIN_S = 10, 0.005  # Where others hold all of memory: mostly not for long.
RESERVED_BYTES = 32 << 20  # By one lease: the disk begins with these while slots are taken for more.
LEASE_S = 3600.0  # A disk that hangs for longer loses the slots to others.
_CREATED, _COMMITTED = int(PartState.CREATED), int(PartState.COMMITTED)


@dataclass(eq=False)
class Fetch:
    """Blocks `keys` of a chain on their way. `reserved` is done once they have slots, or never will.

    `users`: Acquires that wait for some of them. `landed`: how many of `reads`, from the first on, have ended.
    """

    namespace: Namespace
    chain: Sequence[bytes]
    keys: list[bytes]
    reserved: asyncio.Future[None]
    users: int = 0
    reads: list[_Read] = field(default_factory=list)
    landed: int = 0


@dataclass(eq=False)
class _Read:
    """Blocks under one lease that one thread reads: of each its key, its place and the indexes of its parts.

    `future` is None until few enough are ahead of it.
    """

    lease: WriteLease
    blocks: list[tuple[bytes, Located, range]]
    wanted: list[Wanted]
    size_bytes: int
    started: float
    future: Future[list[bool]] | None = None
    has_ended: bool = False


class Promotion:
    """Lives on the event loop. `settle` performs the core's effects."""

    def __init__(
        self,
        store: Store,
        memory: ArenaMemory,
        warm: WarmTier,
        demotion: Demotion,
        *,
        session: Session,
        queue_bytes: int,
        clocks: Clocks,
        settle: Callable[[], None],
        latencies: Latencies,
    ) -> None:
        self._store, self._memory, self._warm, self._demotion = store, memory, warm, demotion
        self._session, self._queue_bytes, self._clocks, self._settle = session, queue_bytes, clocks, settle
        self._fetches: dict[tuple[int, bytes], Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._came = asyncio.Event()
        self.reads_ahead = READS_AHEAD * warm.settings.readers
        self.bytes_on_the_way = 0
        self._latencies = latencies
        self.counts: Counter[str] = Counter()

    @property
    def cheap_bytes(self) -> int:
        """What may be on its way for nobody."""
        return self._queue_bytes // 4

    async def begin(self, ask: Ask, until: float) -> list[Fetch]:
        """Begins to bring what an Acquire wants and only the disk has; returns once all of it has slots, or at `until`.

        Give what it returns to `leave`.
        """
        keys = list(dict.fromkeys(ask.keys[at] for at in self._store.reader.wanted_from_disk(ask)))
        if not keys:
            return []
        name = ask.namespace.index
        known = dict.fromkeys(f for f in (self._fetches.get((name, key)) for key in keys) if f is not None)
        fetches = list(known)
        new = [key for key in keys if (name, key) not in self._fetches]
        if new:
            fetches.append(self._fetch(ask, new))
        for fetch in fetches:
            fetch.users += 1
        left_s = until - self._clocks.now()
        try:
            await asyncio.wait([fetch.reserved for fetch in fetches], timeout=max(0.0, left_s))
        except BaseException:  # Its caller has gone.
            self.leave(fetches)
            raise
        return fetches

    def leave(self, fetches: Sequence[Fetch]) -> None:
        """Ends an Acquire's interest."""
        for fetch in fetches:
            fetch.users -= 1
            if fetch.users or self.bytes_on_the_way <= self.cheap_bytes:
                continue
            for read in fetch.reads:
                if read.has_ended or self._is_waited_for(fetch, read):
                    continue
                if read.future is not None:
                    read.future.cancel()  # One that has begun goes on.
                else:
                    self.counts["cancelled_blocks"] += len(read.blocks)
                    self._end(fetch, read, [False] * len(read.blocks))

    def _is_waited_for(self, fetch: Fetch, read: _Read) -> bool:
        """Whether an Acquire that came later, when the blocks had slots already, waits for some of them."""
        waiting = (a for found in self._store.reader.waiting.values() for a in found if a.namespace is fetch.namespace)
        keys = {key for key, _, _ in read.blocks}
        return any(not keys.isdisjoint(a.request.keys) for a in waiting)

    # -- one fetch -------------------------------------------------------------------------------------------------

    def _fetch(self, ask: Ask, keys: list[bytes]) -> Fetch:
        fetch = Fetch(ask.namespace, ask.keys, keys, asyncio.get_running_loop().create_future())
        for key in keys:
            self._fetches[ask.namespace.index, key] = fetch
        self._start(self._run(fetch))
        return fetch

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            if not ended.cancelled() and ended.exception() is not None:
                _LOG.error("a promotion failed", exc_info=ended.exception())

        task.add_done_callback(done)

    async def _run(self, fetch: Fetch) -> None:
        started = self._clocks.now()
        try:
            located = await asyncio.wrap_future(self._warm.locate(fetch.namespace.spec.digest, fetch.keys))
            now = self._clocks.now()
            for at in located:  # So that none is given up for what is written until its turn comes.
                if at is not None:
                    self._warm.note(at.life, at.start, now, used=True)
            await self._reserve(fetch, located, started)
        finally:
            for key in fetch.keys:
                self._fetches.pop((fetch.namespace.index, key), None)
            if not fetch.reserved.done():
                fetch.reserved.set_result(None)

    async def _reserve(self, fetch: Fetch, located: Sequence[Located | None], started: float) -> None:
        """Takes slots for the leading blocks that there is room for, and begins to read them; waits while too much is
        on its way, as long as somebody wants it."""
        namespace = fetch.namespace
        found = [
            (key, at)
            for key, at in zip(fetch.keys, located, strict=True)
            if at is not None and self._is_usable(namespace, key, at)
        ]
        self.counts["vanished_blocks"] += len(fetch.keys) - len(found)
        most = min(RESERVED_BYTES, self._queue_bytes // 2, self._store.settings.max_call_bytes)
        left, tries = deque(found), 0
        # For all of it together: what has landed may have to go again before whoever asked can lease it.
        ahead_until = self._clocks.now() + AHEAD_S
        while left:
            group, size = _leading(left, most)
            while self.bytes_on_the_way and self.bytes_on_the_way + size > self._queue_bytes and fetch.users:
                self._came.clear()
                await self._came.wait()
            slot_bytes = namespace.slot_bytes(group[0][1].parts[0].length)
            if not fetch.users or not self._is_known(namespace):
                break
            there = sum(key in namespace.blocks for key in fetch.chain)
            wait_s = max(0.0, ahead_until - self._clocks.now())
            await self._demotion.get_ahead(Ahead(namespace, slot_bytes, len(group), spared=there), wait_s)
            if not fetch.users:
                break
            refused = self._reserve_group(fetch, group, started)
            for _ in group:
                left.popleft()
            left.extendleft(reversed(refused))
            if not refused:
                await asyncio.sleep(0)
                continue
            tries += 1
            if fetch.reads or tries > MOST_TRIES:  # Whoever wants it is to take what there is, and come again.
                break
            await asyncio.sleep(TRY_AGAIN_S)
        self.counts["refused_blocks"] += len(left)

    def _is_usable(self, namespace: Namespace, key: bytes, at: Located) -> bool:
        """Whether a block can be brought: whole, as long as its namespace says, not past its life, not there by now."""
        if key in namespace.blocks or len(at.parts) != namespace.parts_per_block:
            return False
        spec, ttl_s = namespace.spec, namespace.rules.ttl_s
        if ttl_s is not None and at.created + ttl_s <= self._clocks.wall():
            return False
        if spec.kind is Kind.KV:
            return all(part.length == spec.part_bytes for part in at.parts)
        return all(part.length <= spec.part_bytes for part in at.parts)

    def _is_known(self, namespace: Namespace) -> bool:
        """Whether a namespace was not dropped, unused and empty, so that its index may be another's by now."""
        return self._store.namespaces.by_digest(namespace.spec.digest) is namespace

    def _is_settled(self, namespace: Namespace, key: bytes, now: float) -> bool:
        """Whether a block is in memory, or being written there, whole: a Reserve that names it makes no part of it."""
        row = namespace.blocks.get(key)
        if row is None:
            return False
        cell, ttl_s = self._store.records.blocks.cell, namespace.rules.ttl_s
        is_young = ttl_s is None or cell.created[row] + ttl_s > now
        return is_young and cell.present[row] + cell.reserved[row] == namespace.parts_per_block

    def _reserve_group(
        self, fetch: Fetch, group: list[tuple[bytes, Located]], started: float
    ) -> list[tuple[bytes, Located]]:
        """Reserves and begins to read; returns what there was no room for.

        The chain's blocks in memory are named too, so that making room takes none of them.
        """
        namespace, now = fetch.namespace, self._clocks.now()
        if not self._is_known(namespace):
            return []
        # Deleted or given up meanwhile: not any more; deleted and written again: not what was looked up.
        there = self._warm.has(namespace.spec.digest, [key for key, _ in group])
        places = {
            key: at
            for (key, at), is_there in zip(group, there, strict=True)
            if is_there and self._warm.still_has(at.life, at.start) and key not in namespace.blocks
        }
        self.counts["vanished_blocks"] += len(group) - len(places)
        if not places:
            return []
        keys = [key for key in fetch.chain if key in places or self._is_settled(namespace, key, now)]
        lengths = []
        if namespace.spec.kind is not Kind.KV:
            lengths = [places[key].parts[0].length if key in places else 0 for key in keys]
        request = ReserveRequest(keys, LEASE_S, lengths=lengths)
        try:
            reserved = self._store.writer.reserve(self._session, namespace, request, now)
        except KvStoreError:  # Too many leases are open.
            return list(places.items())
        finally:
            self._settle()
        width = namespace.parts_per_block
        got = [key for i, key in enumerate(keys) if reserved.states[i * width] == _CREATED]
        if reserved.lease is not None:
            try:
                self._read(fetch, reserved.lease, [(key, places[key]) for key in got], started)
            except BaseException:
                self._store.end_lease(self._session, reserved.lease, now)
                self._settle()
                raise
        granted = frozenset(got)
        return [(key, at) for key, at in places.items() if key not in granted]

    def _read(self, fetch: Fetch, lease: WriteLease, blocks: list[tuple[bytes, Located]], started: float) -> None:
        """Divides blocks into reads, each as much as one thread is to read at once, and begins with the first ones."""
        width, wall, now = fetch.namespace.parts_per_block, self._clocks.wall(), self._clocks.now()
        offsets, _, _ = self._store.part_views(lease.parts)
        parts = lease.parts if isinstance(lease.parts, list) else lease.parts.tolist()
        assert len(parts) == width * len(blocks), "slots for other parts than those of the blocks to be read"
        records, view = self._store.records, self._memory.view
        batch: list[tuple[bytes, Located, range]] = []
        size = 0
        for number, (key, at) in enumerate(blocks):
            row = records.parts.cell.block[parts[number * width]]
            records.blocks.cell.created[row] = now - (wall - at.created)  # Its life goes on where it was.
            batch.append((key, at, range(number * width, (number + 1) * width)))
            size += at.size_bytes
            if size < READ_BYTES and number + 1 < len(blocks):
                continue
            wanted = [
                Wanted(
                    fetch.namespace.spec.digest,
                    key,
                    at,
                    [
                        view[offsets[i] : offsets[i] + blocks_of(part.length) * BLOCK_BYTES]
                        for i, part in zip(indexes, at.parts, strict=True)
                    ],
                )
                for key, at, indexes in batch
            ]
            self._store.pin(lease)
            self.bytes_on_the_way += size
            fetch.reads.append(_Read(lease, batch, wanted, size, started))
            batch, size = [], 0
        self._begin_reads(fetch)

    def _begin_reads(self, fetch: Fetch) -> None:
        """Hands those reads to the threads that have few enough ahead of them which have not ended."""
        reads = fetch.reads
        while fetch.landed < len(reads) and reads[fetch.landed].has_ended:
            fetch.landed += 1
        for read in reads[fetch.landed : fetch.landed + self.reads_ahead]:
            if read.future is None and not read.has_ended:
                read.future = self._warm.read(read.wanted)
                self._start(self._land(fetch, read, read.future))

    async def _land(self, fetch: Fetch, read: _Read, future: Future[list[bool]]) -> None:
        """Waits for one read, makes visible what is as it was written, and drops the rest."""
        good = [False] * len(read.blocks)
        try:
            good = await asyncio.wrap_future(future)
            self.counts["missed_blocks"] += good.count(False)
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            self.counts["cancelled_blocks"] += len(read.blocks)
        finally:
            try:
                self._end(fetch, read, good)
            finally:
                self._begin_reads(fetch)
        self._latencies.add("Promote", int(1e9 * (self._clocks.now() - read.started)))

    def _end(self, fetch: Fetch, read: _Read, good: Sequence[bool]) -> None:
        """Commits the good blocks of a read, drops the others, and lets go of the slots."""
        lease, now = read.lease, self._clocks.now()
        read.has_ended = True
        read.wanted.clear()
        self.bytes_on_the_way -= read.size_bytes
        self._came.set()
        landed = [block for block, is_good in zip(read.blocks, good, strict=True) if is_good]
        try:
            self._commit(fetch.namespace, lease, landed, now)
        except LeaseExpired:
            self.counts["late_blocks"] += len(landed)
        lost = [i for (_, _, indexes), is_good in zip(read.blocks, good, strict=True) if not is_good for i in indexes]
        if lost and not lease.ended:
            self._store.writer.drop(lease, lost, now)
        if lease.ended:
            self._session.leases.discard(lease.id)
        self._store.unpin(lease, now)
        self._settle()

    def _commit(
        self, namespace: Namespace, lease: WriteLease, landed: list[tuple[bytes, Located, range]], now: float
    ) -> None:
        indexes = [i for _, _, at in landed for i in at]
        if not indexes:
            return
        for i in indexes:
            lease.landed[i] = 1
        checksums = [part.checksum for _, located, _ in landed for part in located.parts]
        states = self._store.commit(self._session, lease, indexes, checksums=checksums, now=now)
        width = namespace.parts_per_block
        came = [block for i, block in enumerate(landed) if states[i * width] == _COMMITTED]
        self.counts["promoted_blocks"] += len(came)
        self.counts["vanished_blocks"] += len(landed) - len(came)  # Deleted meanwhile.
        for key, located, _ in came:
            row = namespace.blocks.get(key)
            if row is not None:
                self._demotion.place(row, located)
            else:  # Its page has gone to others in this moment.
                self._demotion.left(located)


def _leading(blocks: Iterable[tuple[bytes, Located]], most_bytes: int) -> tuple[list[tuple[bytes, Located]], int]:
    """Returns the first blocks that take at most so many bytes together, at least one, and the bytes."""
    found: list[tuple[bytes, Located]] = []
    size = 0
    for key, at in blocks:
        if found and size + at.size_bytes > most_bytes:
            break
        found.append((key, at))
        size += at.size_bytes
    return found, size
