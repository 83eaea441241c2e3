"""pymemcache: `set` and `get` of one value, `set_many` and `get_many` of more."""

from __future__ import annotations

from typing import Any

from pymemcache.client.base import Client

from bench.compare.clients.work import Job, Store, Values, serve


class Memcached(Store):
    def __init__(self, port: int, values: Values) -> None:
        self._client: Any = Client(("127.0.0.1", port), no_delay=True)
        self._names, self._targets = values.names, values.targets
        self._values = [bytes(view) for view in values.sources]  # pymemcache sends nothing but bytes.

    def put(self, first: int, last: int) -> None:
        named = dict(zip(self._names[first:last], self._values[first:last], strict=True))
        if last - first == 1:
            refused = not self._client.set(self._names[first], self._values[first], noreply=False)
        else:
            refused = bool(self._client.set_many(named, noreply=False))
        if refused:
            raise RuntimeError("memcached refused a value")

    def get(self, first: int, last: int) -> None:
        names = self._names[first:last]
        found = {names[0]: self._client.get(names[0])} if len(names) == 1 else self._client.get_many(names)
        for target, name in zip(self._targets[first:last], names, strict=True):
            target[:] = found[name]

    def close(self) -> None:
        self._client.close()


def open_memcached(job: Job, values: Values) -> Store:
    return Memcached(int(job.address), values)


if __name__ == "__main__":
    serve(open_memcached)
