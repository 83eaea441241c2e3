"""What all verbs of a client share: session, transports, concurrency, background work, and how calls are made.

Rules: a verb runs under one deadline and one of `max_concurrent_calls` slots. A safe call (one that may be repeated
without harm) is tried again at once: by another way where one way to the shard does not work, and one time for each
kind of trouble that attaching anew can cure.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvstore_client.channel import Connection
from kvstore_client.deadline import Deadline
from kvstore_client.errors import ClientClosed, PathDown, is_raised
from kvstore_client.fast.pools import AsyncLanes, in_thread
from kvstore_client.options import ClientOptions
from kvstore_client.paths import BULK, Path, Paths, no_way
from kvstore_client.quiet import QuietLog
from kvstore_client.session import Binding, SessionKeeper
from kvstore_client.stats import Counters
from kvstore_client.transports.base import Transport
from kvstore_client.transports.framed import FramedTransport, Lanes
from kvstore_client.transports.grpc_inline import GrpcInline
from kvstore_client.transports.shm import SharedMemory, ShmTransport
from kvstore_wire.errors import DeadlineExceeded, KvStoreError, UnknownNamespace, UnknownSession, Unreachable
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import acquired_within

MAX_BACKGROUND_TASKS = 256  # Releases and reports on their way; what is beyond ends with its lease's deadline.
MAX_PATH_CHANGES = 4  # In one call.

R = TypeVar("R")


class NeedsLoop(Exception):
    """The verb must run in the client's event loop. Nothing that this verb began is under way or was ended."""


class ClientCore(ABC):
    """One way of running verbs: in an event loop, or in threads that block."""

    def __init__(self, options: ClientOptions, *, paths: Paths, memory: SharedMemory, log: QuietLog) -> None:
        self.options, self.paths, self.memory, self.log = options, paths, memory, log
        self._transports: dict[Path, FramedTransport] = {}

    @property
    @abstractmethod
    def stats(self) -> Counters:
        """The counters that the running thread may write to."""

    @property
    @abstractmethod
    def keeper(self) -> SessionKeeper:
        """The client's session. Another thread's where this core blocks: only what may be called from any thread."""

    @abstractmethod
    async def bind(self, spec: NamespaceSpec, deadline: Deadline) -> Binding:
        """Returns a namespace's binding, attaching if needed. Raises KvStoreError."""

    @abstractmethod
    def transport(self, binding: Binding) -> Transport:
        """Returns the best transport that may work now. Raises PathDown where none may."""

    @abstractmethod
    def unbound(self, spec: NamespaceSpec, binding: Binding | None, error: KvStoreError) -> None:
        """Takes from the session what `error` says has ended."""

    @abstractmethod
    def background(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs `work` on the side; its failures change nothing. Dropped when closed or too many are on their way."""

    @abstractmethod
    async def _enter(self, deadline: Deadline) -> None:
        """Takes one of the slots of `max_concurrent_calls`. Raises DeadlineExceeded."""

    @abstractmethod
    def _leave(self) -> None:
        """Gives the slot back."""

    @abstractmethod
    def _new_lanes(self, path: Path) -> Lanes: ...

    @abstractmethod
    async def aside(self, work: Callable[[], R]) -> R:
        """Runs `work` where it holds nothing up; when this returns or raises, it has ended."""

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    def deadline(self, deadline_ms: int | None) -> Deadline:
        """Returns the absolute deadline of a call that starts now. Raises InvalidArgument."""
        return Deadline.after(self.options.default_deadline_ms if deadline_ms is None else deadline_ms)

    async def run(
        self, verb: str, deadline: Deadline, *, work: Callable[[], Awaitable[R]], failed: Callable[[KvStoreError], R]
    ) -> R:
        """Runs one verb: its answer, or `failed` of what went wrong. Raises CallerError where the caller must act."""
        if self.closed:
            raise ClientClosed("the client was closed", field="client")
        self.stats.calls[verb] += 1
        try:
            await self._enter(deadline)
            try:
                return await work()
            finally:
                self._leave()
        except KvStoreError as error:
            self.stats.failed(error)
            if is_raised(error):
                raise
            return failed(error)

    async def safe(self, spec: NamespaceSpec, deadline: Deadline, attempt: Callable[[Binding], Awaitable[R]]) -> R:
        """Runs a call that may be repeated, with a binding, again where another way or attaching anew can cure it."""
        cured: set[type[KvStoreError]] = set()
        changes = 0
        while True:
            binding: Binding | None = None
            try:
                binding = await self.bind(spec, deadline)
                return await attempt(binding)
            except PathDown:
                changes += 1
                if changes > MAX_PATH_CHANGES or deadline.passed:
                    raise
                self.stats.path_changes += 1
            except (UnknownSession, UnknownNamespace, Unreachable) as error:
                self.unbound(spec, binding, error)
                if type(error) in cured or deadline.passed:
                    raise
                cured.add(type(error))
                self.stats.retries += 1

    async def by_any_path(self, deadline: Deadline, attempt: Callable[[], Awaitable[R]]) -> R:
        """Runs something that may be repeated, again by another way where one does not work."""
        for _ in range(MAX_PATH_CHANGES):
            try:
                return await attempt()
            except PathDown:
                if deadline.passed:
                    raise
                self.stats.path_changes += 1
        return await attempt()

    async def limits(self, spec: NamespaceSpec, deadline: Deadline) -> types.Limits:
        """Returns the shard's limits, attaching if needed. Raises KvStoreError."""
        ready = self.keeper.ready(spec)
        return (ready if ready is not None else await self.safe(spec, deadline, _itself)).limits

    async def unary(self, binding: Binding, name: str, request: Message, deadline: Deadline) -> Any:
        """Calls a method that answers once, by the best transport; once more by another if nothing was sent."""
        try:
            return await self.transport(binding).unary(name, request, deadline)
        except PathDown as error:
            if error.sent or deadline.passed:
                raise
            self.stats.path_changes += 1
        return await self.transport(binding).unary(name, request, deadline)

    async def answers(
        self, binding: Binding, name: str, request: Message, deadline: Deadline
    ) -> AsyncGenerator[Any, None]:
        """Yields the answers of a method that answers several times, by the best transport."""
        async with aclosing(self.transport(binding).answers(name, request, deadline)) as answers:
            async for answer in answers:
                yield answer

    def framed(self, path: Path, limits: types.Limits) -> FramedTransport:
        """Returns the transport of a path of the fast channel, the same each time."""
        found = self._transports.get(path)
        if found is None:
            lanes, aside = self._new_lanes(path), _Aside(self)
            if path.name == BULK:
                found = FramedTransport(path.name, lanes, aside)
            else:
                found = ShmTransport(
                    path, lanes, memory=self.memory, aside=aside, verify=self.options.verify, limits=limits
                )
            self._keep_only(path.generation)
            self._transports = {**self._transports, path: found}
        return found

    def _keep_only(self, generation: int) -> None:
        """Lets go of the transports to earlier lives of the shard."""
        for path, transport in self._transports.items():
            if path.generation != generation:
                transport.lanes.retire()
        self._transports = {p: t for p, t in self._transports.items() if p.generation == generation}

    def _close_lanes(self) -> None:
        for transport in self._transports.values():
            transport.lanes.close()


class _Aside:
    """A core, as a transport knows it."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    async def run(self, work: Callable[[], R]) -> R:
        return await self._core.aside(work)

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        self._core.background(work)


class LoopCore(ClientCore):
    """Owns connection, session and transports of one client. Lives in one event loop."""

    def __init__(self, options: ClientOptions, stats: Counters) -> None:
        log = QuietLog(options.target)
        super().__init__(options, paths=Paths(options, log), memory=SharedMemory(log), log=log)
        self._stats = stats
        self.connection = Connection(options)
        self._keeper = SessionKeeper(connection=self.connection, options=options, stats=stats, log=self.log)
        self._grpc = GrpcInline(self.connection)
        self._slots = asyncio.Semaphore(options.max_concurrent_calls)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def stats(self) -> Counters:
        return self._stats

    @property
    def keeper(self) -> SessionKeeper:
        return self._keeper

    @property
    def closed(self) -> bool:
        return self._closed

    async def bind(self, spec: NamespaceSpec, deadline: Deadline) -> Binding:
        return await self._keeper.bind(spec, deadline)

    def transport(self, binding: Binding) -> Transport:
        path = self.paths.best(binding)
        if path is not None:
            return self.framed(path, binding.limits)
        if not self.paths.takes_grpc():
            raise no_way(self.options)
        self.paths.used = self._grpc.name
        return self._grpc

    def unbound(self, spec: NamespaceSpec, binding: Binding | None, error: KvStoreError) -> None:
        if binding is None:
            return
        if isinstance(error, UnknownSession):
            self._keeper.lost(binding.session, "unknown to the shard")
        elif isinstance(error, UnknownNamespace):
            self._keeper.forget(spec, binding)

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        if self._closed or len(self._background) >= MAX_BACKGROUND_TASKS:
            work.close()
            return
        task = asyncio.create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def aside(self, work: Callable[[], R]) -> R:
        future = in_thread(work)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:  # The thread writes to the caller's buffers: wait for it.
                cancelled = error
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()

    async def close(self, deadline: Deadline) -> None:
        """Ends the session and the channel within `deadline`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._background:
            await asyncio.wait(set(self._background), timeout=deadline.remaining_s() / 2)
        for task in list(self._background):
            task.cancel()
        self._close_lanes()
        await self._keeper.close()
        await self.connection.close(deadline.remaining_s())
        self.memory.close()

    def _new_lanes(self, path: Path) -> AsyncLanes:
        return AsyncLanes(path, self.paths)

    async def _enter(self, deadline: Deadline) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
        elif not await acquired_within(deadline.remaining_s(), self._slots):
            raise DeadlineExceeded("the deadline passed while other calls ran")

    def _leave(self) -> None:
        self._slots.release()


async def _itself(binding: Binding) -> Binding:
    return binding


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except KvStoreError:
        return
