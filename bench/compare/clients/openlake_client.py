"""OpenLake's KV client on the server's host: values move through the daemon's slab of shared memory."""

from __future__ import annotations

import hashlib
from typing import Any

import openlake_client

from bench.compare.clients.work import Job, Store, Values, serve

KEY_BYTES = 54  # The client's fixed key: a digest, then tag and rank fields. It stands before the value in a slot.
CLIENT_ID = 2048
SLAB_BYTES = 1 << 30
FILL_BATCH = 32


class OpenLake(Store):
    def __init__(self, address: str, values: Values) -> None:
        self._client: Any = openlake_client.Client(device="local", client_id=CLIENT_ID)
        for array in (values.source, values.target):
            self._client.register_memory(array.ctypes.data, array.nbytes)
        self._client.attach(address, 0, values.size_bytes + KEY_BYTES)
        self._values = values
        self._keys = [bytes.fromhex(name).ljust(KEY_BYTES, b"\0") for name in values.names]
        self._touch_slab()

    def _touch_slab(self) -> None:
        """Fills every slot once, so that the timed puts find warm pages."""
        size_bytes = self._values.size_bytes
        pieces = [[at] for at in self._values.source_at[:FILL_BATCH]]
        for first in range(0, SLAB_BYTES // size_bytes, FILL_BATCH):
            named = [hashlib.sha256(b"fill %d" % i).digest() for i in range(first, first + FILL_BATCH)]
            keys = [name.ljust(KEY_BYTES, b"\0") for name in named]
            self._client.put_batch(keys, pieces, [[size_bytes]] * FILL_BATCH)
        self._client.reset()

    def put(self, first: int, last: int) -> None:
        pieces = [[at] for at in self._values.source_at[first:last]]
        sizes = [[self._values.size_bytes]] * (last - first)
        _check("put", self._client.put_batch(self._keys[first:last], pieces, sizes))

    def get(self, first: int, last: int) -> None:
        pieces = [[at] for at in self._values.target_at[first:last]]
        sizes = [[self._values.size_bytes]] * (last - first)
        _check("get", self._client.get_batch(self._keys[first:last], pieces, sizes))


def _check(what: str, done: Any) -> None:
    if any(done):
        raise RuntimeError(f"a {what} answered {done}")


def open_openlake(job: Job, values: Values) -> Store:
    return OpenLake(job.address, values)


if __name__ == "__main__":
    serve(open_openlake)
