"""A shard in a thread of this process, clients of every kind over every way to it, and buffers that tell what was
written beside them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore_client import AsyncClient, Client, ClientOptions, GetResult, MatchResult, PutResult, Region, Verify
from kvstore_client.loop_thread import LoopThread
from kvstore_wire.namespace import NamespaceSpec
from tests.integration.server_process import LocalServer, serve_here

T = TypeVar("T")
MIB = 1 << 20
GUARD_BYTES = 64  # Around each buffer.
GUARD = 0xEE
START_S = CALL_S = 30.0

# More than a shard waits for the stream of a session that its client attached and did not live to open.
PATIENCE_S = 20.0


class Shard:
    """A server in an event loop of its own. `local` may be looked at through `ask` only."""

    def __init__(self, flags: Mapping[str, str] | None = None) -> None:
        self._thread = LoopThread("shard")
        self._serving = serve_here({"hot.capacity": "32MiB", **(flags or {})})
        self.local: LocalServer = self.run(self._serving.__aenter__())
        self.target = self.local.target
        bulk = [place for place in self.local.channel if not place.startswith("unix:")]
        unix = [place for place in self.local.channel if place.startswith("unix:")]
        self.bulk, self.socket_path = (bulk or [""])[0], (unix or [""])[0].removeprefix("unix:")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.start(work).result(START_S)

    def ask(self, question: Callable[[LocalServer], T]) -> T:
        """Answers a question in the shard's own loop."""

        async def answer() -> T:
            return question(self.local)

        return self.run(answer())

    def until(self, holds: Callable[[LocalServer], bool], otherwise: str, *, within_s: float = PATIENCE_S) -> None:
        until(lambda: self.ask(holds), otherwise, within_s=within_s)

    def cut(self) -> int:
        """Closes every connection of the fast channel; tells how many there were."""

        def close(local: LocalServer) -> int:
            connections = list(local.server.channel._connections)
            for connection in connections:
                connection.close()
            return len(connections)

        return self.ask(close)

    def end_sessions(self) -> None:
        """Ends the sessions of all clients, as when their streams break."""

        def end(local: LocalServer) -> None:
            shell = local.server.shell
            for session in list(shell.boards):
                shell.store.end_session(shell.session(session), shell.now())
            shell.settle()

        self.ask(end)

    def arm(self, name: str, action: str) -> None:
        self.ask(lambda local: local.failpoints.arm(name, action))

    def until_hit(self, name: str) -> None:
        """Waits until a point that was armed for one time has been hit."""
        self.until(lambda local: not local.failpoints.any_armed(name), f"{name} is not hit")

    def disarm(self, name: str) -> None:
        self.ask(lambda local: local.failpoints.disarm(name))

    def check_nothing_is_left(self) -> None:
        """Once all clients are gone: no connection, session, lease or region, and every table agrees."""
        self.until(lambda local: not local.server.channel.connection_count, "a connection is left")
        self.until(lambda local: local.gauge("sessions") == 1, "a session is left beside the probe's")
        self.until(lambda local: not local.server.shell.regions.region_count, "a region is left")
        self.run(self.local.until_idle())

    def close(self) -> None:
        self.run(self._serving.__aexit__(None, None, None))
        self._thread.stop(5.0)


@contextmanager
def sharded(flags: Mapping[str, str] | None = None) -> Iterator[Shard]:
    """Runs a shard until left, when nothing may be left of its clients."""
    shard = Shard(flags)
    try:
        yield shard
        shard.check_nothing_is_left()
    finally:
        shard.close()


def until(holds: Callable[[], bool], otherwise: str, *, within_s: float = PATIENCE_S) -> None:
    """Polls until something holds. Raises AssertionError(`otherwise`) when it does not in time."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.01)


# -- clients ----------------------------------------------------------------------------------------------------------


class Driver(ABC):
    """A client of any kind, for tests that block. `run` makes one call on a namespace of its own kind."""

    client: Client | AsyncClient

    @abstractmethod
    def run(self, spec: NamespaceSpec, call: Callable[[Any], Any]) -> Any:
        """Makes one call and returns its answer."""

    def put(self, spec: NamespaceSpec, blocks: Sequence[bytes], values: Sequence[Any]) -> PutResult:
        found: PutResult = self.run(spec, lambda ns: ns.put(blocks, values))
        return found

    def get(
        self, spec: NamespaceSpec, blocks: Sequence[bytes], into: Sequence[Any] | None = None, **more: Any
    ) -> GetResult:
        found: GetResult = self.run(spec, lambda ns: ns.get(blocks, into=into, **more))
        return found

    @abstractmethod
    def close(self) -> None:
        """Ends the client."""


class Blocking(Driver):
    """Calls from this thread."""

    client: Client

    def __init__(self, options: ClientOptions) -> None:
        self.client = Client(options)

    def run(self, spec: NamespaceSpec, call: Callable[[Any], Any]) -> Any:
        return call(self.client.namespace(spec))

    def close(self) -> None:
        self.client.close()


class Ticketed(Blocking):
    """As Blocking, but match, get and put are submitted and waited for."""

    def run(self, spec: NamespaceSpec, call: Callable[[Any], Any]) -> Any:
        return call(_Submitting(self.client, spec))


class InLoop(Driver):
    """An asyncio client in a thread of its own."""

    client: AsyncClient

    def __init__(self, options: ClientOptions) -> None:
        self._thread = LoopThread("client")
        self.client = AsyncClient(options)
        self.wait(self.client.open())

    def run(self, spec: NamespaceSpec, call: Callable[[Any], Any]) -> Any:
        namespace = self.client.namespace(spec)

        async def made() -> Any:
            found = call(namespace)
            return await found if asyncio.iscoroutine(found) else found

        return self.wait(made())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.start(work).result(CALL_S)

    def close(self) -> None:
        self.wait(self.client.close())
        self._thread.stop(5.0)


class _Submitting:
    """A blocking namespace whose short verbs are tickets."""

    def __init__(self, client: Client, spec: NamespaceSpec) -> None:
        self._client, self._namespace = client, client.namespace(spec)

    def match(self, keys: Any, **more: Any) -> MatchResult:
        return self._waited(self._namespace.submit_match(keys, **more), MatchResult)

    def get(self, keys: Any, **more: Any) -> GetResult:
        if "ranges" in more:
            return self._namespace.get(keys, **more)
        return self._waited(self._namespace.submit_get(keys, **more), GetResult)

    def put(self, keys: Any, values: Any, **more: Any) -> PutResult:
        return self._waited(self._namespace.submit_put(keys, values, **more), PutResult)

    def _waited(self, ticket: Any, kind: type[T]) -> T:
        found = self._client.wait(ticket, int(CALL_S * 1000))
        assert isinstance(found, kind)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)


DRIVERS: Mapping[str, Callable[[ClientOptions], Driver]] = {
    "blocking": Blocking,
    "tickets": Ticketed,
    "asyncio": InLoop,
}


def options_of(target: str, *transports: str, deadline_ms: int = 5000, verify: Verify = Verify.ON) -> ClientOptions:
    return ClientOptions(target, default_deadline_ms=deadline_ms, transports=transports, verify=verify)


@contextmanager
def driven(kind: str, options: ClientOptions) -> Iterator[Driver]:
    driver = DRIVERS[kind](options)
    try:
        yield driver
    finally:
        driver.close()


# -- buffers ----------------------------------------------------------------------------------------------------------


class Rooms:
    """Buffers for the parts of calls, cut from one piece of memory, with guards between them."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0
        self._guards: list[memoryview] = []

    def of(self, sizes: Sequence[int]) -> list[memoryview]:
        """Returns one buffer for each size, filled with what no value begins with."""
        return [self._cut(size) for size in sizes]

    def holding(self, values: Sequence[bytes]) -> list[memoryview]:
        """Returns buffers with these bytes."""
        rooms = self.of([len(value) for value in values])
        for room, value in zip(rooms, values, strict=True):
            room[:] = value
        return rooms

    def clear(self) -> None:
        """Makes room for others."""
        self._at, self._guards = 0, []

    def check(self) -> None:
        """Fails if a byte beside the buffers was written."""
        assert all(bytes(guard) == bytes((GUARD,)) * len(guard) for guard in self._guards)

    def _cut(self, size: int) -> memoryview:
        start = self._at + GUARD_BYTES
        self._at = start + size + GUARD_BYTES
        assert self._at <= len(self._memory), "the memory is too small for the test"
        self._memory[start - GUARD_BYTES : self._at] = bytes((GUARD,)) * (size + 2 * GUARD_BYTES)
        self._guards += [self._memory[start - GUARD_BYTES : start], self._memory[start + size : self._at]]
        return self._memory[start : start + size]


@contextmanager
def region_of(client: Client | AsyncClient, size_bytes: int) -> Iterator[Region]:
    """A region of shared memory, registered with a client."""
    fd = os.memfd_create("test-region")
    try:
        os.ftruncate(fd, size_bytes)
        yield client.register(fd)
    finally:
        os.close(fd)


# -- a way that can be cut --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Pair:
    """One connection and its continuation."""

    near: socket.socket
    far: socket.socket

    def close(self) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Proxy:
    """Passes TCP on, until told otherwise. `most_bytes`: cuts a connection after so many bytes towards the client."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._to = ("", 0)
        self._pairs: list[_Pair] = []
        self._lock = threading.Lock()
        self.most_bytes: int | None = None
        self.most_sent_bytes: int | None = None
        self.is_deaf = False  # Takes connections and passes nothing on.
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))

    def cut(self) -> int:
        """Cuts all connections; tells how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()
        return len(pairs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            pair = _Pair(near, far)
            with self._lock:
                self._pairs.append(pair)
            for out, back, limit in ((near, far, "most_sent_bytes"), (far, near, "most_bytes")):
                threading.Thread(target=self._pass, args=(pair, out, back, limit), daemon=True).start()

    def _pass(self, pair: _Pair, source: socket.socket, target: socket.socket, limit: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                most = getattr(self, limit)
                while self.is_deaf:
                    time.sleep(0.01)
                if most is not None and passed + len(data) > most:
                    target.sendall(data[: most - passed])
                    break
                target.sendall(data)
                passed += len(data)
        pair.close()


@contextmanager
def proxied() -> Iterator[Proxy]:
    proxy = Proxy()
    try:
        yield proxy
    finally:
        proxy.close()


def unregister(driver: Driver, region: Region) -> None:
    """Ends a region where its client lives."""
    client = driver.client

    async def inside() -> None:
        client.unregister(region)

    if isinstance(driver, InLoop):
        driver.wait(inside())
    else:
        client.unregister(region)
