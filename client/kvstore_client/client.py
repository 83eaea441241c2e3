"""The asynchronous client."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvstore_client.core import LoopCore
from kvstore_client.deadline import Deadline
from kvstore_client.errors import ClientClosed
from kvstore_client.namespace import AsyncNamespace
from kvstore_client.options import ClientOptions
from kvstore_client.regions import Region
from kvstore_client.stats import ClientStats, Counters
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.namespace import NamespaceSpec

CLOSE_MS = 2000


class AsyncClient:
    """A client of one shard, inside one event loop: `async with AsyncClient(options) as client`.

    Connecting and attaching wait for the first verb, so opening never fails for a shard that is away.
    """

    def __init__(self, options: ClientOptions) -> None:
        if not isinstance(options, ClientOptions):
            raise InvalidArgument(f"must be ClientOptions, not {type(options).__name__}", field="options")
        self.options = options
        self.counters = Counters()
        self._core: LoopCore | None = None
        self._closed = False

    async def open(self) -> AsyncClient:
        """Binds the client to the running event loop. Idempotent; sends nothing."""
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        if self._core is None:
            self._core = LoopCore(self.options, self.counters)
        return self

    def namespace(self, spec: NamespaceSpec) -> AsyncNamespace:
        """Returns the verbs of a namespace; it attaches when first used."""
        if self._core is None or self._closed:
            raise ClientClosed("the client is not open", field="client")
        if not isinstance(spec, NamespaceSpec):
            raise InvalidArgument(f"must be a NamespaceSpec, not {type(spec).__name__}", field="spec")
        return AsyncNamespace(self._core, spec)

    @property
    def transport(self) -> str:
        """Name of the transport that the last call used; empty before the first."""
        return "" if self._core is None else self._core.paths.used

    @property
    def core(self) -> LoopCore:
        """What runs the verbs. Raises ClientClosed before the client is open."""
        if self._core is None:
            raise ClientClosed("the client is not open", field="client")
        return self._core

    def register(self, fd: int, *, offset: int = 0, length: int | None = None, buffer: Any | None = None) -> Region:
        """Registers shared memory of the caller's own (a memfd or a file of /dev/shm) with the shards of this host.

        Buffers in it are then read and written by the shard itself, with no byte through a socket. `buffer` is the
        caller's own mapping of exactly these bytes; without it the client maps them (`Region.memory`). Elsewhere than
        on the shard's host a region changes nothing. Memory sealed against shrinking (F_SEAL_SHRINK), as that of
        `allocate` is, a shard reads twice as fast.
        Raises: InvalidArgument (fd, length, buffer).
        """
        return self.core.memory.regions.add(fd, offset=offset, length=length, buffer=buffer)

    def allocate(self, length: int) -> Region:
        """Registers fresh shared memory of `length` bytes, the kind that is moved fastest: `Region.memory`.

        Raises: InvalidArgument (length).
        """
        return self.core.memory.regions.allocate(length)

    def unregister(self, region: Region) -> None:
        """Ends a region. No call may use it any more; the shard is told on the side."""
        memory = self.core.memory
        memory.regions.remove(region)
        self.core.background(self.core.aside(lambda: memory.retire(region)))

    @property
    def draining(self) -> bool:
        """Whether the shard has said that it is going away."""
        return self._core is not None and self._core.keeper.draining

    @property
    def generation(self) -> int | None:
        """The shard's life that was last attached to; a restart has another. None before the first attach."""
        return None if self._core is None else self._core.keeper.generation

    def stats(self) -> ClientStats:
        """Returns a snapshot of the counters; allowed after close too."""
        return self.counters.snapshot()

    async def close(self, deadline_ms: int = CLOSE_MS) -> None:
        """Ends session and channel within the deadline; calls still out answer with a failure. Idempotent."""
        self._closed = True
        if self._core is not None:
            await self._core.close(Deadline.after(deadline_ms))

    async def __aenter__(self) -> AsyncClient:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
