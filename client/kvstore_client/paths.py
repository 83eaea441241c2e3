"""The ways to a shard: which are offered, which work, and which one was used.

Rules
- Preferred order is the caller's (`ClientOptions.transports`), what may be used is what Attach offered.
- A way that failed is left out for a while, twice as long each time in a row; then the next call tries it again.
- gRPC is never left out: whether the shard is there at all shows there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore_client.errors import PathDown
from kvstore_client.fast.dial import Endpoint
from kvstore_client.options import ClientOptions
from kvstore_client.quiet import QuietLog
from kvstore_client.session import Binding
from kvstore_wire.errors import KvStoreError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
GRPC, SHM, BULK = "grpc", "shm", "bulk"


@dataclass
class _Health:
    """Of one way to one life of one shard."""

    generation: int = 0
    address: str = ""
    down_until_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class Path:
    """One way: an endpoint of the fast channel, at one life of the shard."""

    endpoint: Endpoint
    generation: int

    @property
    def name(self) -> str:
        return self.endpoint.transport

    def __hash__(self) -> int:  # Looked up in every call.
        return hash(self.generation)


@dataclass(frozen=True)
class _Ways:
    """What one session was offered."""

    offers: Mapping[str, str]
    paths: tuple[tuple[_Health, Path], ...]


@dataclass
class Paths:
    """Shared by all cores of one client; may be used from any thread."""

    options: ClientOptions
    log: QuietLog
    used: str = ""
    _ways: _Ways | None = None
    falls: int = 0  # Times that a way in use was given up.
    _health: dict[str, _Health] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    clock: Callable[[], float] = time.monotonic  # In seconds.

    def best(self, binding: Binding) -> Path | None:
        """Returns the best way of the fast channel that may work now; None where gRPC is left."""
        ways = self._ways
        if ways is None or ways.offers is not binding.offers:
            ways = self._ways = self._made(binding)
        for health, path in ways.paths:
            if not health.down_until_s or health.down_until_s <= self.clock():
                return path
        return None

    def takes_grpc(self) -> bool:
        """Whether calls may go over gRPC where no other way works."""
        return GRPC in self.options.transports

    def failed(self, path: Path, error: KvStoreError) -> None:
        """Leaves a way out for a while."""
        with self._lock:
            health = self._health.get(path.name)
            if health is None or health.generation != path.generation:
                return
            now = self.clock()
            if health.down_until_s <= now:
                # Without gRPC to fall back to, calls fail as long as the pause lasts: it must end soon.
                longest_s = LONGEST_PAUSE_S if self.takes_grpc() else self.options.connect_backoff_max_ms / 1000
                health.pause_s = min(max(FIRST_PAUSE_S, 2 * health.pause_s), longest_s)
                health.down_until_s = now + health.pause_s
                self.falls += 1
        self.log.warning(f"down {path.name}", f"{path.name} does not work, trying another way: {error}")

    def worked(self, path: Path) -> None:
        """Notes that a way carried a call."""
        health = self._health.get(path.name)
        if health is not None and health.pause_s:
            health.pause_s = health.down_until_s = 0.0
        self.used = path.name

    def _made(self, binding: Binding) -> _Ways:
        """Returns the ways that a session was offered, those that its owner wants and that make sense here."""
        paths = []
        for name in self.options.transports:
            if name == GRPC:
                break
            address = binding.offers.get(name)
            endpoint = None if address is None else Endpoint.of_offer(name, address, self.options)
            if endpoint is not None and address is not None:
                paths.append((self._of(name, binding.generation, address), Path(endpoint, binding.generation)))
        return _Ways(binding.offers, tuple(paths))

    def _of(self, name: str, generation: int, address: str) -> _Health:
        health = self._health.get(name)
        if health is None or (health.generation, health.address) != (generation, address):
            with self._lock:
                health = self._health[name] = _Health(generation, address)
        return health


def no_way(options: ClientOptions) -> PathDown:
    """The error of a call whose transports are all down, where gRPC was not to be used."""
    return PathDown(f"none of {', '.join(options.transports)} works at {options.target}")
