"""What all namespaces of one client share, and the two ways to make a call.

Rules: a verb runs under one deadline and one of `max_concurrent_calls` slots. A safe call (one that may be repeated
without harm) is tried again at once, one time for each kind of trouble that attaching anew can cure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvstore_client.channel import Connection
from kvstore_client.deadline import Deadline
from kvstore_client.errors import ClientClosed, is_raised
from kvstore_client.options import ClientOptions
from kvstore_client.quiet import QuietLog
from kvstore_client.session import Binding, SessionKeeper
from kvstore_client.stats import Counters
from kvstore_client.transports.base import Transport
from kvstore_client.transports.grpc_inline import GrpcInline
from kvstore_wire.errors import DeadlineExceeded, KvStoreError, UnknownNamespace, UnknownSession, Unreachable
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.waiting import acquired_within

MAX_BACKGROUND_TASKS = 256  # Releases and reports on their way; what is beyond ends with its lease's deadline.

R = TypeVar("R")


class ClientCore:
    """Owns connection, session and transport of one client. Lives in one event loop."""

    def __init__(self, options: ClientOptions, stats: Counters) -> None:
        self.options, self.stats = options, stats
        self.log = QuietLog(options.target)
        self.connection = Connection(options)
        self.keeper = SessionKeeper(connection=self.connection, options=options, stats=stats, log=self.log)
        self.transport: Transport = GrpcInline(self.connection)
        self._slots = asyncio.Semaphore(options.max_concurrent_calls)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def deadline(self, deadline_ms: int | None) -> Deadline:
        """Returns the absolute deadline of a call that starts now. Raises InvalidArgument."""
        return Deadline.after(self.options.default_deadline_ms if deadline_ms is None else deadline_ms)

    async def run(
        self, verb: str, deadline: Deadline, *, work: Callable[[], Awaitable[R]], failed: Callable[[KvStoreError], R]
    ) -> R:
        """Runs one verb: its answer, or `failed` of what went wrong. Raises CallerError where the caller must act."""
        if self._closed:
            raise ClientClosed("the client was closed", field="client")
        self.stats.calls[verb] += 1
        try:
            async with self._slot(deadline):
                return await work()
        except KvStoreError as error:
            self.stats.failed(error)
            if is_raised(error):
                raise
            return failed(error)

    async def safe(self, spec: NamespaceSpec, deadline: Deadline, attempt: Callable[[Binding], Awaitable[R]]) -> R:
        """Runs a call that may be repeated, with a binding, again where attaching anew can cure it."""
        cured: set[type[KvStoreError]] = set()
        while True:
            binding: Binding | None = None
            try:
                binding = await self.keeper.bind(spec, deadline)
                return await attempt(binding)
            except (UnknownSession, UnknownNamespace, Unreachable) as error:
                self.unbound(spec, binding, error)
                if type(error) in cured or deadline.passed:
                    raise
                cured.add(type(error))
                self.stats.retries += 1

    def unbound(self, spec: NamespaceSpec, binding: Binding | None, error: KvStoreError) -> None:
        """Takes from the session what `error` says has ended."""
        if binding is None:
            return
        if isinstance(error, UnknownSession):
            self.keeper.lost(binding.session, "unknown to the shard")
        elif isinstance(error, UnknownNamespace):
            self.keeper.forget(spec, binding)

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs `work` on the side; its failures change nothing. Dropped when closed or too many are on their way."""
        if self._closed or len(self._background) >= MAX_BACKGROUND_TASKS:
            work.close()
            return
        task = asyncio.create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, deadline: Deadline) -> None:
        """Ends the session and the channel within `deadline`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._background:
            await asyncio.wait(set(self._background), timeout=deadline.remaining_s() / 2)
        for task in list(self._background):
            task.cancel()
        await self.keeper.close()
        await self.connection.close(deadline.remaining_s())

    @asynccontextmanager
    async def _slot(self, deadline: Deadline) -> AsyncIterator[None]:
        if self._slots.locked():
            if not await acquired_within(deadline.remaining_s(), self._slots):
                raise DeadlineExceeded("the deadline passed while other calls ran")
        else:
            await self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release()


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except KvStoreError:
        return
