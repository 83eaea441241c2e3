"""Who moves bytes in a client process: this store by one transport, or the bare program that is its ceiling.

Each player has the same parts, `first` to `last` (half-open) in one call. Gets land in a warm buffer of the caller's;
puts come from shared memory that the store's own clients register.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.ceilings import Bare, Memory, Raw
from bench.jobs import BARE_GRPC, MEMCPY, OWN, RAW_TCP, RAW_UNIX, RAW_UNPACED, VIEWS, Buffers, Job, Player, cut, keys_of
from bench.rig import spec
from kvstore_client import Client, ClientOptions
from kvstore_client.options import Verify
from kvstore_wire.namespace import NamespaceSpec

DEADLINE_MS = 60_000


def open_player(job: Job, buffers: Buffers) -> Player:
    """Opens the player of a job. Raises RuntimeError where the bytes would go another way."""
    if job.kind == VIEWS:
        return OwnViews(job, buffers)
    if job.kind in OWN:
        return Own(job, buffers)
    if job.kind == MEMCPY:
        return Memory(job, buffers)
    if job.kind in (RAW_TCP, RAW_UNPACED, RAW_UNIX):
        return Raw(job, buffers)
    if job.kind == BARE_GRPC:
        return Bare(job, buffers)
    raise ValueError(f"no player {job.kind!r}")


def namespace_of(part_bytes: int) -> NamespaceSpec:
    """The namespace of one size, so that one server can hold several."""
    return replace(spec(part_bytes), name=f"bench-{part_bytes}")


class Own(Player):
    """This store through its blocking client, by one transport."""

    def __init__(self, job: Job, buffers: Buffers) -> None:
        transport = job.kind.split()[0]
        self._client = Client(
            ClientOptions(
                target=job.address,
                default_deadline_ms=DEADLINE_MS,
                transports=(transport,),
                verify=Verify(job.verify),
            )
        )
        self._namespace = self._client.namespace(namespace_of(job.part_bytes))
        self._keys = keys_of(job)
        self._part_count = job.part_count
        self._source = buffers.source[: job.size_bytes]
        self._client.register(buffers.fd, length=job.size_bytes, buffer=self._source)
        sources = cut(self._source, job.part_bytes, job.part_count)
        self._sources = [*sources, *(sources[i % job.part_count] for i in range(job.fresh_count))]
        self._target = buffers.target[: job.size_bytes]
        self._targets = cut(self._target, job.part_bytes, job.part_count)
        self._first_call(transport)

    def put(self, first: int, last: int) -> None:
        result = self._namespace.put(self._keys[first:last], self._sources[first:last])
        _check(result.failure, "put stored", result.stored, last - first)

    def get(self, first: int, last: int) -> None:
        result = self._namespace.get(self._keys[first:last], into=self._targets[first:last])
        _check(result.failure, "get found", result.prefix_blocks, last - first)

    def match(self, first: int, last: int) -> None:
        result = self._namespace.match(self._keys[first:last])
        _check(result.failure, "match found", result.prefix_blocks, last - first)

    def clean(self, first: int, last: int) -> None:
        failure = self._namespace.delete(self._keys[first:last]).failure
        if failure is not None:
            raise failure

    def verify(self) -> bool:
        np.frombuffer(self._target, np.uint8).fill(0)
        self.get(0, self._part_count)
        return bool(np.array_equal(np.frombuffer(self._target, np.uint8), np.frombuffer(self._source, np.uint8)))

    def close(self) -> None:
        self._client.close()

    def _first_call(self, transport: str) -> None:
        failure = self._namespace.match(self._keys[:1]).failure
        if failure is not None:
            self._client.close()
            raise failure
        if self._client.transport != transport:
            self._client.close()
            raise RuntimeError(f"asked for {transport}, but bytes would go by {self._client.transport}")


class OwnViews(Own):
    """Reads in place: a batch is leased, each part's view is made, and the lease ends. Nothing is copied."""

    def get(self, first: int, last: int) -> None:
        with self._namespace.view(self._keys[first:last]) as views:
            for part in range(len(views)):
                views[part]
            found = views.prefix_blocks if views.in_place else 0
        _check(None, "view showed", found if views.valid else 0, last - first)

    def verify(self) -> bool:
        with self._namespace.view(self._keys[: self._part_count]) as views:
            equal = [view == source for view, source in zip(views, self._sources[: self._part_count], strict=True)]
        return all(equal) and bool(views.valid)


def _check(failure: Exception | None, what: str, found: int, wanted: int) -> None:
    if failure is not None:
        raise failure
    if found != wanted:
        raise RuntimeError(f"a {what} {found} of {wanted} parts")
