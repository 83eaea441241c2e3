"""Verbs in the calling thread: the same coroutines as in an event loop, with transports that block and never suspend.

Rules: a call of this core runs to its end in one go. Where only the event loop can help - attaching, gRPC - it says so
with `NeedsLoop` before anything was done, and the caller runs the verb there.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvstore_client.core import MAX_BACKGROUND_TASKS, ClientCore, LoopCore, NeedsLoop
from kvstore_client.deadline import Deadline
from kvstore_client.errand import Errands
from kvstore_client.errors import ClientClosed
from kvstore_client.fast.pools import BlockingLanes
from kvstore_client.loop_thread import LoopThread
from kvstore_client.paths import Path, no_way
from kvstore_client.session import Binding, SessionKeeper
from kvstore_client.slots import Slots
from kvstore_client.stats import Counters, ThreadCounters
from kvstore_client.transports.base import Transport
from kvstore_client.transports.framed import FramedTransport
from kvstore_wire.errors import DeadlineExceeded, KvStoreError
from kvstore_wire.namespace import NamespaceSpec

R = TypeVar("R")


class DirectCore(ClientCore):
    """Runs verbs for threads, beside the core of the client's event loop. Thread-safe."""

    def __init__(self, loop_core: LoopCore, thread: LoopThread, counters: ThreadCounters) -> None:
        super().__init__(loop_core.options, paths=loop_core.paths, memory=loop_core.memory, log=loop_core.log)
        self._loop_core, self._thread, self._counters = loop_core, thread, counters
        self._slots = Slots(self.options.max_concurrent_calls)
        self._making = threading.Lock()
        self._errands = Errands(MAX_BACKGROUND_TASKS)
        self._closed = False

    @property
    def stats(self) -> Counters:
        return self._counters.own()

    @property
    def keeper(self) -> SessionKeeper:
        return self._loop_core.keeper

    @property
    def closed(self) -> bool:
        return self._closed

    def is_ready(self, spec: NamespaceSpec) -> bool:
        """Whether a call can be made without the event loop."""
        binding = self.keeper.ready(spec)
        return binding is not None and self.paths.best(binding) is not None

    async def run(
        self, verb: str, deadline: Deadline, *, work: Callable[[], Awaitable[R]], failed: Callable[[KvStoreError], R]
    ) -> R:
        try:
            return await super().run(verb, deadline, work=work, failed=failed)
        except NeedsLoop:
            self.stats.calls[verb] -= 1  # It is counted where it runs in the end.
            raise

    async def bind(self, spec: NamespaceSpec, deadline: Deadline) -> Binding:
        binding = self.keeper.ready(spec)
        if binding is not None:
            return binding
        return self._waited(self.keeper.bind(spec, deadline), deadline)

    def transport(self, binding: Binding) -> Transport:
        path = self.paths.best(binding)
        if path is None:
            if self.paths.takes_grpc():
                raise NeedsLoop
            raise no_way(self.options)
        found = self._transports.get(path)
        if found is not None:
            return found
        with self._making:
            return self.framed(path, binding.limits)

    def made_transport(self, binding: Binding) -> FramedTransport | None:
        """Returns the transport of the way that works best, None if there is none or it was not used yet."""
        path = self.paths.best(binding)
        return None if path is None else self._transports.get(path)

    async def unary(self, binding: Binding, name: str, request: Message, deadline: Deadline) -> Any:
        """As in any core; where no way of the fast channel works, by the event loop's."""
        try:
            return await super().unary(binding, name, request, deadline)
        except NeedsLoop:
            return self._waited(self._loop_core.unary(binding, name, request, deadline), deadline)

    def _waited(self, work: Coroutine[Any, Any, R], deadline: Deadline) -> R:
        """Runs something in the event loop and waits for it. Raises KvStoreError."""
        try:
            future = self._thread.start(work)
        except RuntimeError:
            work.close()
            raise ClientClosed("the client was closed", field="client") from None
        try:
            return future.result(deadline.remaining_s() + 1.0)
        except FutureTimeout:
            raise DeadlineExceeded("the client's own loop stands still") from None
        except FutureCancelled:
            raise ClientClosed("the client was closed under the call", field="client") from None
        finally:
            future.cancel()  # Where the caller was interrupted; a no-op on a finished one.

    def unbound(self, spec: NamespaceSpec, binding: Binding | None, error: KvStoreError) -> None:
        future = self._thread.start(_called(lambda: self._loop_core.unbound(spec, binding, error)))
        with suppress(FutureTimeout, RuntimeError):
            future.result(1.0)

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs it in another thread: a shard that does not answer must not hold up a call that is over."""
        if not self._errands.take(lambda: _run_quietly(work)):
            work.close()

    async def aside(self, work: Callable[[], R]) -> R:
        return work()

    def close(self, wait_s: float) -> None:
        """Lets no call begin, waits so long at most for what runs on the side, and closes the connections unused."""
        self._closed = True
        self._errands.close(wait_s)
        self._close_lanes()

    def _new_lanes(self, path: Path) -> BlockingLanes:
        return BlockingLanes(path, self.paths, self.options.busy_poll_us / 1e6)

    async def _enter(self, deadline: Deadline) -> None:
        if not self._slots.enter(deadline):
            raise DeadlineExceeded("the deadline passed while other calls ran")

    def _leave(self) -> None:
        self._slots.leave()

    def try_enter(self) -> bool:
        """Takes a slot if one is free; give it back by `leave`."""
        return self._slots.try_enter()

    def leave(self) -> None:
        """Gives the slot of the calling thread back."""
        self._slots.leave()


def run_now(work: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine that never suspends, and returns what it returns."""
    try:
        work.send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    finally:
        work.close()
    raise AssertionError("a call that blocks was suspended")


def _run_quietly(work: Coroutine[Any, Any, object]) -> None:
    with suppress(KvStoreError, NeedsLoop):
        run_now(work)


async def _called(act: Callable[[], object]) -> None:
    act()
