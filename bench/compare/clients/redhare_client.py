"""Redhare: values lie in the arena of the process that put them; others read them over TCP.

Address: `REDIS_URL,DATA_PORT,CAPACITY`. The variant names the client, which its cluster wants to be unique.
"""

from __future__ import annotations

from typing import Any

from redhare import KvStore

from bench.compare.clients.work import Job, Store, Values, serve


class Redhare(Store):
    def __init__(self, job: Job, values: Values) -> None:
        redis_url, port, capacity = job.address.split(",")
        self._store: Any = KvStore(
            redis_url=redis_url,
            client_id=job.variant,
            data_plane_addr=f"127.0.0.1:{port}",
            capacity=capacity,
            cluster="compare",
            transport="tcp",
        )
        for array in (values.source, values.target):
            _check("registration", [self._store.register_buffer(array.ctypes.data, array.nbytes)])
        self._values = values

    def clean(self) -> None:
        for name in self._values.names:
            self._store.remove(name)

    def put(self, first: int, last: int) -> None:
        values = self._values
        pieces, sizes = [[at] for at in values.source_at[first:last]], [[values.size_bytes]] * (last - first)
        _check("put", self._store.batch_put_from_multi_buffers(values.names[first:last], pieces, sizes))

    def get(self, first: int, last: int) -> None:
        values = self._values
        pieces, sizes = [[at] for at in values.target_at[first:last]], [[values.size_bytes]] * (last - first)
        _check("get", self._store.batch_get_into_multi_buffers(values.names[first:last], pieces, sizes))

    def close(self) -> None:
        self._store.close()


def _check(what: str, done: Any) -> None:
    if any(done):
        raise RuntimeError(f"a {what} answered {done}")


if __name__ == "__main__":
    serve(Redhare)
