"""The blocking client for threads: calls with deadlines, and tickets that nobody waits for.

Rules:
- All of it may be called from any thread. One background thread with one event loop owns session and gRPC channel, and
  runs tickets; blocking calls go over the fast channel straight from the calling thread where a shard offers it.
- Nothing is inherited by a forked child: every call there raises ForkedClient, and nothing is waited for or closed.
- `close` is bounded and may be called any number of times; the interpreter's exit calls it too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from kvstore_client.blocking import Namespace
from kvstore_client.client import CLOSE_MS, AsyncClient
from kvstore_client.core import NeedsLoop
from kvstore_client.deadline import Deadline
from kvstore_client.direct import DirectCore, run_now
from kvstore_client.errors import ClientClosed, ForkedClient, PathDown
from kvstore_client.leases import ReadLease, WriteLease
from kvstore_client.loop_thread import LoopThread
from kvstore_client.namespace import AsyncNamespace
from kvstore_client.options import ClientOptions
from kvstore_client.regions import Region
from kvstore_client.stats import ClientStats, ThreadCounters
from kvstore_client.tickets import Completion, Job, Result, Ticket, Tickets
from kvstore_wire.errors import DeadlineExceeded, InvalidArgument, KvStoreError
from kvstore_wire.namespace import NamespaceSpec

OVERDUE_MS = 1000  # A verb keeps its own deadline; only a loop that stands still is given up on this much later.
EXIT_MS = 500

R = TypeVar("R")


class Client:
    """A client of one shard for blocking callers: `with Client(options) as client`. Opening sends nothing."""

    def __init__(self, options: ClientOptions) -> None:
        self._pid = os.getpid()
        self.options = options
        self._inner = AsyncClient(options)
        self._thread = LoopThread("kvstore_client")
        try:
            self._thread.start(self._inner.open()).result()
        except KvStoreError:
            self._thread.stop(1.0)
            raise
        self._counters = ThreadCounters(self._inner.counters)
        self.direct = DirectCore(self._inner.core, self._thread, self._counters)
        self._tickets = Tickets(thread=self._thread, queue_bytes=options.queue_bytes, stats=self._inner.counters)
        self._closed = False
        owned = (self._pid, self._inner, self.direct, self._thread, self._tickets)
        self._at_exit = weakref.finalize(self, _shut, *owned, EXIT_MS)

    def namespace(self, spec: NamespaceSpec) -> Namespace:
        """Returns the verbs of a namespace; it attaches when first used."""
        self.check()
        inner = self._inner.namespace(spec)
        return Namespace(self, inner, AsyncNamespace(self.direct, spec))

    @property
    def transport(self) -> str:
        """Name of the transport that the last call used; empty before the first."""
        return self._inner.transport

    @property
    def draining(self) -> bool:
        """Whether the shard has said that it is going away."""
        return self._inner.draining

    @property
    def generation(self) -> int | None:
        """The shard's life that was last attached to; None before the first attach."""
        return self._inner.generation

    def stats(self) -> ClientStats:
        """Returns a snapshot of the counters."""
        return self._counters.snapshot()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while completions wait to be polled. Do not read or close it."""
        self.check_pid()
        return self._tickets.fileno()

    def poll(self) -> list[Completion]:
        """Takes all finished tickets. Never blocks; allowed after close."""
        self.check_pid()
        return self._tickets.poll()

    def wait(self, ticket: Ticket, timeout_ms: int) -> Result | None:
        """Takes one ticket's result; None if it is not finished in time, or was taken before."""
        self.check_pid()
        return self._tickets.wait(ticket, timeout_ms / 1000)

    def cancel(self, ticket: Ticket) -> bool:
        """Asks for an early end of a ticket; False if it is finished. It still completes, with failure Cancelled."""
        self.check_pid()
        return self._tickets.cancel(ticket)

    def close(self, deadline_ms: int = CLOSE_MS) -> None:
        """Waits for queued tickets, then ends session, channel and thread, all within the deadline. Idempotent."""
        Deadline.after(deadline_ms)
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._at_exit.detach()
        _shut(self._pid, self._inner, self.direct, self._thread, self._tickets, deadline_ms)

    def check_pid(self) -> None:
        """Raises ForkedClient in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedClient(
                "was made before the fork: make a new Client in a process that was spawned, or forked earlier",
                field="client",
            )

    def check(self) -> None:
        """Raises ForkedClient, ClientClosed, or InvalidArgument in the client's own thread."""
        self.check_pid()
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        if self._thread.is_current:
            raise InvalidArgument("a blocking call would wait for its own thread", field="client")

    def run(
        self, start: Callable[[], Coroutine[Any, Any, R]], deadline_ms: int | None, failed: Callable[[KvStoreError], R]
    ) -> R:
        """Makes a call in the background loop and waits for its answer."""
        self.check()
        wait_ms = self.options.default_deadline_ms if deadline_ms is None else deadline_ms
        future = self._thread.start(start())
        try:
            return future.result((wait_ms + OVERDUE_MS) / 1000)
        except FutureTimeout:
            return failed(DeadlineExceeded("the client's own loop stands still"))
        finally:
            future.cancel()  # Where the caller was interrupted; a no-op on a finished call.

    def run_lease(
        self,
        lease: ReadLease | WriteLease,
        start: Callable[[], Coroutine[Any, Any, R]],
        *,
        deadline_ms: int | None,
        failed: Callable[[KvStoreError], R],
    ) -> R:
        """Makes a call on a lease where that was made."""
        self.check()
        if lease.core is not self.direct:
            return self.run(start, deadline_ms, failed)
        try:
            return run_now(start())
        except NeedsLoop:  # Its way to the shard is down just now: the lease ends by its deadline.
            return failed(PathDown("the fast channel does not work"))

    def register(self, fd: int, *, offset: int = 0, length: int | None = None, buffer: Any | None = None) -> Region:
        """Registers shared memory of the caller's own (see AsyncClient.register)."""
        self.check()
        return self._inner.register(fd, offset=offset, length=length, buffer=buffer)

    def allocate(self, length: int) -> Region:
        """Registers fresh shared memory, the kind that is moved fastest (see AsyncClient.allocate)."""
        self.check()
        return self._inner.allocate(length)

    def unregister(self, region: Region) -> None:
        """Ends a region. No call may use it any more. The shard is told, and has let go of it when this returns."""
        self.check_pid()
        memory = self.direct.memory
        memory.regions.remove(region)
        memory.retire(region)

    def submit(self, job: Job[Any]) -> Ticket:
        """Queues a ticket's job."""
        self.check()
        return self._tickets.submit(job)

    def deadline(self, deadline_ms: int | None) -> Deadline:
        return Deadline.after(self.options.default_deadline_ms if deadline_ms is None else deadline_ms)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shut(
    pid: int, inner: AsyncClient, direct: DirectCore, thread: LoopThread, tickets: Tickets, deadline_ms: int
) -> None:
    """Ends everything a client owns. Holds no reference to the client, so that it can run when the client is gone."""
    if os.getpid() != pid:
        return
    deadline = Deadline.after(deadline_ms)
    direct.close(deadline.remaining_s() / 4)
    tickets.close(deadline.remaining_s() / 2)
    tickets.settle(deadline.remaining_s() / 2)
    left_ms = max(1, deadline.remaining_ms())
    with suppress(FutureTimeout, RuntimeError):
        thread.start(inner.close(left_ms)).result(left_ms / 1000)
    thread.stop(max(0.05, deadline.remaining_s()))
