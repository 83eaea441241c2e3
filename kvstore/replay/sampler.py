"""The shard's counters over the time of a replay, read beside it by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.replay.admin import AdminPeer, admin_peer
from kvstore_client import TlsOptions
from kvstore_wire.errors import KvStoreError

INTERVAL_S = 0.5


@dataclass(frozen=True)
class Sample:
    """Counters and gauges by name, `at_s` seconds after the sampler started."""

    at_s: float
    values: Mapping[str, int]


class Sampler:
    """Collects samples until it is closed. `samples` may be read at any time."""

    def __init__(self, peer: AdminPeer) -> None:
        self._peer = peer
        self._ended = threading.Event()
        self._start_s = time.monotonic()
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name="replay-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def sample(self) -> bool:
        """Adds a sample now; False if the shard does not answer."""
        try:
            stats = self._peer.stats()
        except KvStoreError:
            return False
        values = {count.name: count.value for count in (*stats.counters, *stats.gauges)}
        self.samples.append(Sample(time.monotonic() - self._start_s, values))
        return True

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.sample()


@contextmanager
def sampling(admin_target: str, tls: TlsOptions | None = None) -> Iterator[Sampler]:
    """Samples a shard until left."""
    with admin_peer(admin_target, tls=tls, deadline_s=2.0) as peer:
        sampler = Sampler(peer)
        sampler.sample()
        sampler.start()
        try:
            yield sampler
        finally:
            sampler.close()
