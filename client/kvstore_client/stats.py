"""Counters of one client. They only grow (but `inflight_bytes`), and each event is counted in one place."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore_wire.errors import KvStoreError


@dataclass(frozen=True)
class ClientStats:
    """A snapshot. Every number counts from the client's start.

    calls: verbs called, by name.                failures: calls answered with a failure, by error name.
    matched_blocks_asked: blocks asked of Match. matched_blocks: of those, stored.
    fetched_blocks_asked: blocks asked of get.   fetched_blocks, fetched_bytes: of those, landed and checked.
    stored_parts, stored_bytes: parts that a put or write made visible.  present_parts: parts that were there already.
    corrupt_blocks: blocks that did not match their checksum.  size_mismatches: blocks larger than the buffers given.
    unverified_parts: parts whose checksum was not looked at, since the client was told not to.
    dropped: tickets refused because the queue was full.       retries: second attempts of a safe call.
    path_changes: calls that went on by another transport because one did not work.
    attaches: sessions opened.  reattaches: of those, after the first.  sessions_lost: sessions that ended under us.
    leases_ended: leases that the shard ended early.           purges: notices that a namespace was emptied.
    inflight_bytes: payload that tickets hold now.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    matched_blocks_asked: int = 0
    matched_blocks: int = 0
    fetched_blocks_asked: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    stored_parts: int = 0
    stored_bytes: int = 0
    present_parts: int = 0
    corrupt_blocks: int = 0
    size_mismatches: int = 0
    unverified_parts: int = 0
    dropped: int = 0
    retries: int = 0
    path_changes: int = 0
    attaches: int = 0
    reattaches: int = 0
    sessions_lost: int = 0
    leases_ended: int = 0
    purges: int = 0
    inflight_bytes: int = 0


class Counters:
    """The live counters behind ClientStats; each object is written by one thread only."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.matched_blocks_asked = 0
        self.matched_blocks = 0
        self.fetched_blocks_asked = 0
        self.fetched_blocks = 0
        self.fetched_bytes = 0
        self.stored_parts = 0
        self.stored_bytes = 0
        self.present_parts = 0
        self.corrupt_blocks = 0
        self.size_mismatches = 0
        self.unverified_parts = 0
        self.dropped = 0
        self.retries = 0
        self.path_changes = 0
        self.attaches = 0
        self.reattaches = 0
        self.sessions_lost = 0
        self.leases_ended = 0
        self.purges = 0
        self.inflight_bytes = 0

    def failed(self, error: KvStoreError) -> None:
        self.failures[type(error).__name__] += 1

    def snapshot(self) -> ClientStats:
        return _summed([self])


class ThreadCounters:
    """Counters of many threads, summed when looked at. `main` is the event loop's."""

    def __init__(self, main: Counters) -> None:
        # By thread number: the system gives a dead thread's number to a new one, which goes on with its counters.
        self._main = main
        self._own: dict[int, Counters] = {}

    def own(self) -> Counters:
        """Returns the counters of the calling thread."""
        number = threading.get_ident()
        found = self._own.get(number)
        return found if found is not None else self._own.setdefault(number, Counters())

    def snapshot(self) -> ClientStats:
        return _summed([self._main, *list(self._own.values())])


def _summed(counters: Sequence[Counters]) -> ClientStats:
    values: dict[str, Any] = {f.name: sum(getattr(c, f.name) for c in counters) for f in _NUMBERS}
    for name in ("calls", "failures"):
        total: Counter[str] = Counter()
        for one in counters:
            total.update(dict(getattr(one, name)))
        values[name] = dict(total)
    return ClientStats(**values)


_NUMBERS = [f for f in fields(ClientStats) if f.name not in ("calls", "failures")]
