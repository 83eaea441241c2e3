"""The ways to a shard: which are offered, which work, and which one was used.

Rules
- Preferred order is the caller's (`ClientOptions.transports`), what may be used is what Attach offered.
- A way that failed is left out for a while, twice as long each time in a row. Then it is tried on the side, while calls
  go on by the next one; only where none is left a call tries it.
- gRPC is never left out: whether the shard is there at all shows there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore_client.deadline import Deadline
from kvstore_client.errand import begun
from kvstore_client.errors import PathDown
from kvstore_client.fast.dial import OPEN_MS, Endpoint, dial, orphaned
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
    down_until_s: float = 0.0  # 0: it works, as far as is known.
    pause_s: float = 0.0
    is_probed: bool = False


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
    probe: Callable[[Path], None] = lambda path: orphaned(  # Raises KvStoreError where a way does not work.
        dial(path.endpoint, path.generation, Deadline.after(OPEN_MS))
    )
    aside: Callable[[Callable[[], None]], object] = begun

    def best(self, binding: Binding) -> Path | None:
        """Returns the best way of the fast channel that may work now; None where gRPC is left."""
        ways = self._ways
        if ways is None or ways.offers is not binding.offers:
            ways = self._ways = self._made(binding)
        for health, path in ways.paths:
            if not health.down_until_s or (health.down_until_s <= self.clock() and self._probe(health, path)):
                return path
        if self.takes_grpc():
            return None
        # Nothing else is left: the call itself finds out.
        return next((path for health, path in ways.paths if health.down_until_s <= self.clock()), None)

    def takes_grpc(self) -> bool:
        """Whether calls may go over gRPC where no other way works."""
        return GRPC in self.options.transports

    def failed(self, path: Path, error: KvStoreError) -> None:
        """Leaves a way out for a while."""
        with self._lock:
            health = self._health.get(path.name)
            if health is None or health.generation != path.generation:
                return
            now, was_used = self.clock(), not health.down_until_s
            if health.down_until_s <= now:
                # Without gRPC to fall back to, calls fail as long as the pause lasts: it must end soon.
                longest_s = LONGEST_PAUSE_S if self.takes_grpc() else self.options.connect_backoff_max_ms / 1000
                health.pause_s = min(max(FIRST_PAUSE_S, 2 * health.pause_s), longest_s)
                health.down_until_s = now + health.pause_s
                self.falls += was_used
        self.log.warning(f"down {path.name}", f"{path.name} does not work, trying another way: {error}")

    def worked(self, path: Path) -> None:
        """Notes that a way carried a call."""
        health = self._health.get(path.name)
        if health is not None and health.pause_s:
            health.pause_s = health.down_until_s = 0.0
        self.used = path.name

    def _probe(self, health: _Health, path: Path) -> bool:
        """Tries a way on the side, once at a time. Returns whether it is known to work by now."""
        with self._lock:
            if health.is_probed or not health.down_until_s:
                return not health.down_until_s
            health.is_probed = True
        try:
            self.aside(lambda: self._probed(health, path))
        except PathDown:  # No thread is left; another time.
            health.is_probed = False
        return not health.down_until_s

    def _probed(self, health: _Health, path: Path) -> None:
        try:
            self.probe(path)
        except KvStoreError as error:
            self.failed(path, error)
        else:
            health.down_until_s = 0.0  # The pause stays as long as it is until a call has come through.
        finally:
            health.is_probed = False

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
