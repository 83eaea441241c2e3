"""redis-py: SET and GET of one value, MSET and MGET of more. With hiredis where its environment has it."""

from __future__ import annotations

from typing import Any

import redis

from bench.compare.clients.work import Job, Store, Values, serve


class Redis(Store):
    def __init__(self, url: str, values: Values) -> None:
        self._connection: Any = redis.Redis.from_url(url)
        self._names, self._targets = values.names, values.targets
        self._values = [bytes(view) for view in values.sources]  # redis-py sends nothing but bytes.

    def put(self, first: int, last: int) -> None:
        if last - first == 1:
            self._connection.set(self._names[first], self._values[first])
        else:
            names, values = self._names[first:last], self._values[first:last]
            self._connection.mset(dict(zip(names, values, strict=True)))

    def get(self, first: int, last: int) -> None:
        if last - first == 1:
            found = [self._connection.get(self._names[first])]
        else:
            found = self._connection.mget(self._names[first:last])
        for target, value in zip(self._targets[first:last], found, strict=True):
            target[:] = value

    def close(self) -> None:
        self._connection.close()


def open_redis(job: Job, values: Values) -> Store:
    return Redis(job.address, values)


if __name__ == "__main__":
    serve(open_redis)
