"""This store through its blocking client, by the one transport that the variant names.

Over shm, puts come from shared memory that the client registers, as rivals have theirs. `shm views` reads where the
bytes lie: it maps the arena and copies nothing, so its time is what a call costs. `shm unverified` leaves out the check
of what landed, which the other stores do not make.
"""

from __future__ import annotations

from bench.compare.clients.work import Job, Store, Unusable, Values, serve
from bench.rig import spec
from kvstore_client import Client, ClientOptions
from kvstore_client.blocking import Namespace
from kvstore_client.options import VERIFY_OFF, VERIFY_ON

DEADLINE_MS = 60_000
SHM, VIEWS, UNVERIFIED = "shm", "shm views", "shm unverified"


class Own(Store):
    def __init__(self, client: Client, values: Values, sources: list[memoryview]) -> None:
        self._client, self._values, self._sources = client, values, sources
        self.namespace: Namespace = client.namespace(spec(values.size_bytes))
        self.keys = [bytes.fromhex(name) for name in values.names]

    def clean(self) -> None:
        failure = self.namespace.delete(self.keys).failure
        if failure is not None:
            raise failure

    def put(self, first: int, last: int) -> None:
        result = self.namespace.put(self.keys[first:last], self._sources[first:last])
        if result.failure is not None:
            raise result.failure
        if result.stored != last - first:
            raise RuntimeError(f"a put stored {result.stored} of {last - first} values: {result}")

    def get(self, first: int, last: int) -> None:
        result = self.namespace.get(self.keys[first:last], into=self._values.targets[first:last])
        if result.failure is not None:
            raise result.failure
        if result.prefix_blocks != last - first:
            raise RuntimeError(f"a get found {result.prefix_blocks} of {last - first} values")

    def close(self) -> None:
        self._client.close()


class OwnViews(Own):
    """Reads by views under a lease."""

    def get(self, first: int, last: int) -> None:
        with self.namespace.view(self.keys[first:last]) as views:
            for i in range(len(views)):
                views[i]
            found = views.prefix_blocks if views.in_place else 0
        if found != last - first or not views.valid:
            raise RuntimeError(f"a view shows {found} of {last - first} values in place")

    def land(self, first: int, last: int) -> None:
        with self.namespace.view(self.keys[first:last]) as views:
            for target, view in zip(self._values.targets[first:last], views, strict=True):
                target[:] = view


def open_own(job: Job, values: Values) -> Store:
    """Opens the store and makes its first call. Raises Unusable where the bytes would go another way."""
    transport = job.variant.split()[0]
    verify = VERIFY_OFF if job.variant == UNVERIFIED else VERIFY_ON
    client = Client(
        ClientOptions(target=job.address, default_deadline_ms=DEADLINE_MS, transports=(transport,), verify=verify)
    )
    sources = _registered(client, values) if transport == SHM else values.sources
    store = OwnViews(client, values, sources) if job.variant == VIEWS else Own(client, values, sources)
    failure = store.namespace.match(store.keys[:1]).failure
    reason = "" if failure is None else f"the first call failed: {failure}"
    if not reason and client.transport != transport:
        reason = f"asked for {transport}, but the client moves bytes by {client.transport}"
    if reason:
        client.close()
        raise Unusable(reason)
    return store


def _registered(client: Client, values: Values) -> list[memoryview]:
    """The values once more, in shared memory that the server may copy from."""
    memory = client.allocate(values.source.nbytes).memory
    memory[:] = values.source.data
    size_bytes = values.size_bytes
    return [memory[i * size_bytes : (i + 1) * size_bytes] for i in range(values.count)]


if __name__ == "__main__":
    serve(open_own)
