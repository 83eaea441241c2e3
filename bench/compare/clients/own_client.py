"""This store through its blocking client, by the one transport that the variant names.

`shm views` reads where the bytes lie: it maps the arena and copies nothing, so its time is what a call costs.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bench.compare.clients.work import Job, Store, Unusable, Values, serve
from bench.rig import spec
from kvstore_client import Client, ClientOptions
from kvstore_client.blocking import Namespace

DEADLINE_MS = 60_000
VIEWS = "shm views"


class Own(Store):
    def __init__(self, client: Client, values: Values) -> None:
        self._client, self._values = client, values
        self.namespace: Namespace = client.namespace(spec(values.size_bytes))
        self.keys = [bytes.fromhex(name) for name in values.names]

    def clean(self) -> None:
        failure = self.namespace.delete(self.keys).failure
        if failure is not None:
            raise failure

    def put(self, first: int, last: int) -> None:
        result = self.namespace.put(self.keys[first:last], self._values.sources[first:last])
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
        with self.namespace.acquire(self.keys[first:last]) as lease:
            views: Any = getattr(lease, "views", None)
            if lease.prefix_blocks != last - first or views is None or len(views) != last - first:
                raise RuntimeError(f"a lease shows {lease.prefix_blocks} of {last - first} values")

    def land(self, first: int, last: int) -> None:
        with self.namespace.acquire(self.keys[first:last]) as lease:
            views: Any = getattr(lease, "views", ())
            for target, view in zip(self._values.targets[first:last], views, strict=True):
                target[:] = view


def open_own(job: Job, values: Values) -> Store:
    """Opens the store and makes its first call. Raises Unusable where the bytes would go another way."""
    transport = job.variant.split()[0]
    client = Client(_options(job.address, transport))
    store = OwnViews(client, values) if job.variant == VIEWS else Own(client, values)
    failure = store.namespace.match(store.keys[:1]).failure
    reason = "" if failure is None else f"the first call failed: {failure}"
    if not reason and client.transport != transport:
        reason = f"asked for {transport}, but the client moves bytes by {client.transport}"
    if not reason and job.variant == VIEWS:
        reason = _views_missing(store)
    if reason:
        client.close()
        raise Unusable(reason)
    return store


def _options(target: str, transport: str) -> ClientOptions:
    chosen: dict[str, Any] = {"target": target, "default_deadline_ms": DEADLINE_MS}
    if "transports" in {field.name for field in fields(ClientOptions)}:
        chosen["transports"] = (transport,)
    return ClientOptions(**chosen)


def _views_missing(store: Own) -> str:
    with store.namespace.acquire(store.keys[:1]) as lease:
        return "" if hasattr(lease, "views") else "the client's leases have no views of the arena"


if __name__ == "__main__":
    serve(open_own)
