"""A client's side of a comparison: the values, the timed rounds, and the conversation with who measures.

Rules:
- Standard library and numpy only: this runs inside the environment of every store that is compared.
- `python -m bench.compare.clients.NAME JOB` with JOB as JSON. The client says one line when it is ready, or why it
  cannot be, then answers one line for each line it is asked. It ends when its input does.
- The conversation owns the first standard output; whatever else prints there is sent to standard error.
- A get lands in the caller's own warm buffer. A library that hands out new objects has their copy in its time.
- The C allocator keeps freed memory in every client alike: page faults of new objects are in no store's figures.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

VERIFY_BATCH = 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES, _LARGEST_HEAP_BLOCK_BYTES = 256 << 20, 32 << 20
Op = Callable[[int, int], None]


class Unusable(Exception):
    """What this client was made for is not there; the text says what."""


@dataclass(frozen=True)
class Job:
    """What one client is to move. `address` and `variant` are for the store's client alone."""

    size_bytes: int
    value_count: int
    address: str
    variant: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))


class Values:
    """The set that is written and read, and the buffer that reads land in, both of them warm.

    Owns: both buffers, for as long as the process runs; addresses may be registered with a library.
    """

    def __init__(self, job: Job) -> None:
        self.size_bytes, self.count = job.size_bytes, job.value_count
        total_bytes = self.size_bytes * self.count
        self.source = _seeded(total_bytes)
        self.target = _warm(total_bytes)
        self.names = [hashlib.sha256(b"value %d" % i).hexdigest() for i in range(self.count)]
        self.sources, self.targets = self._cut(self.source), self._cut(self.target)
        self.source_at, self.target_at = self._addresses(self.source), self._addresses(self.target)

    def _cut(self, array: npt.NDArray[np.uint8]) -> list[memoryview]:
        size_bytes, view = self.size_bytes, array.data
        return [view[i * size_bytes : (i + 1) * size_bytes] for i in range(self.count)]

    def _addresses(self, array: npt.NDArray[np.uint8]) -> list[int]:
        return [array.ctypes.data + i * self.size_bytes for i in range(self.count)]


class Store(ABC):
    """One store under one client. Values `first` to `last` (half-open) of the set go in one call where it has one."""

    @abstractmethod
    def put(self, first: int, last: int) -> None:
        """Stores values of the source. Raises if one was not stored."""

    @abstractmethod
    def get(self, first: int, last: int) -> None:
        """Reads values into the target. Raises if one is missing."""

    def land(self, first: int, last: int) -> None:
        """As `get`, where the bytes are verified: they are in the target afterwards in any case."""
        self.get(first, last)

    def clean(self) -> None:
        """Untimed, before each round of puts: makes room for it where a put of a held key would write nothing."""
        return

    def close(self) -> None:
        """Gives back what the client holds of its server."""
        return


def serve(open_store: Callable[[Job, Values], Store]) -> None:
    """Opens the store for the job on the command line, and answers until the input ends."""
    _keep_freed_memory()
    answers = own_output()
    job = Job.from_json(sys.argv[1])
    values = Values(job)
    try:
        store = open_store(job, values)
    except Unusable as unusable:
        say(answers, {"skip": str(unusable)})
        return
    say(answers, {"ready": True})
    gc.freeze()
    try:
        for line in sys.stdin:
            say(answers, answer(json.loads(line), store=store, values=values))
    finally:
        store.close()


def answer(question: Mapping[str, Any], *, store: Store, values: Values) -> dict[str, Any]:
    """What one line is answered with."""
    what = question["do"]
    if what == "put":
        store.clean()
        return {"s": _round_s(store.put, values.count, question["batch"])}
    if what == "get":
        return {"s": _round_s(store.get, values.count, question["batch"])}
    if what == "latency":
        calls = range(question["first"], question["first"] + question["calls"])
        return {"ms": [_call_ms(store.get, i % values.count) for i in calls]}
    if what == "verify":
        return {"equal": _verified(store, values)}
    raise ValueError(f"cannot do {what!r}")


def _round_s(op: Op, count: int, batch: int) -> float:
    start = time.perf_counter()
    for first in range(0, count, batch):
        op(first, min(first + batch, count))
    return time.perf_counter() - start


def _call_ms(op: Op, index: int) -> float:
    start = time.perf_counter()
    op(index, index + 1)
    return (time.perf_counter() - start) * 1e3


def _verified(store: Store, values: Values) -> bool:
    values.target.fill(0)
    _round_s(store.land, values.count, VERIFY_BATCH)
    return bool(np.array_equal(values.source, values.target))


def _seeded(size_bytes: int) -> npt.NDArray[np.uint8]:
    """The same bytes in every process, so that a reader can check what another one stored."""
    return np.random.default_rng(7).integers(0, 256, size_bytes, np.uint8)


def _warm(size_bytes: int) -> npt.NDArray[np.uint8]:
    array = np.empty(size_bytes, np.uint8)
    array.fill(1)
    return array


def _keep_freed_memory() -> None:
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES)


def own_output() -> TextIO:
    """Takes the standard output for the conversation, from native libraries too."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def say(answers: TextIO, line: Mapping[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()
