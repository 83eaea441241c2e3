"""Mooncake store over TCP: batches from and into registered buffers. The memory is mooncake_node's."""

from __future__ import annotations

from typing import Any

from mooncake.store import MooncakeDistributedStore

from bench.compare.clients.work import Job, Store, Values, serve

LOCAL_BUFFER_BYTES = 64 << 20


class Mooncake(Store):
    def __init__(self, address: str, values: Values) -> None:
        own, metadata, master = address.split(",")
        self._store: Any = MooncakeDistributedStore()
        done = self._store.setup(own, metadata, 0, LOCAL_BUFFER_BYTES, "tcp", "", master)
        for array in (values.source, values.target):
            done = done or self._store.register_buffer(array.ctypes.data, array.nbytes)
        if done:
            raise RuntimeError(f"the client's set-up answered {done}")
        self._values = values

    def clean(self) -> None:
        self._store.batch_remove(self._values.names, True)

    def put(self, first: int, last: int) -> None:
        values = self._values
        sizes = [values.size_bytes] * (last - first)
        done = self._store.batch_put_from(values.names[first:last], values.source_at[first:last], sizes)
        if any(done):
            raise RuntimeError(f"a put answered {done}")

    def get(self, first: int, last: int) -> None:
        values = self._values
        sizes = [values.size_bytes] * (last - first)
        done = self._store.batch_get_into(values.names[first:last], values.target_at[first:last], sizes)
        if list(done) != sizes:
            raise RuntimeError(f"a get answered {done}")

    def close(self) -> None:
        self._store.close()


def open_mooncake(job: Job, values: Values) -> Store:
    return Mooncake(job.address, values)


if __name__ == "__main__":
    serve(open_mooncake)
