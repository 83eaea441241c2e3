"""A shard with a small memory and a disk, and what is stored in it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.service.tiering import Tiering
from kvstore_client import Client, ClientOptions, GetResult, PutResult
from kvstore_wire.namespace import NamespaceSpec
from tests.integration.transport_scene import Shard, sharded
from tests.shards import key, kv_spec

PART_BYTES = 256 << 10
SPEC = kv_spec("warm", part_bytes=PART_BYTES)
HOT_BLOCKS = 64
AT_ONCE = 8  # Blocks in one put: fewer than are kept written ahead.


def flags(folder: Path, **more: str) -> dict[str, str]:
    """Options of a shard that holds 64 blocks in memory and 1,000 on disk."""
    chosen = {
        "hot.capacity": "16MiB",
        "hot.page": "1MiB",
        "limits.max_part": "1MiB",
        "warm.path": str(folder / "warm"),
        "warm.capacity": "256MiB",
        "warm.segment": "4MiB",
    }
    return chosen | {name.replace("__", "."): value for name, value in more.items()}


def chain(name: int, length: int) -> list[bytes]:
    """Keys of one prompt."""
    return [key(1_000_000 * name + i) for i in range(length)]


def value(block: bytes, size_bytes: int = PART_BYTES) -> bytes:
    """What is stored under a key."""
    return random.Random(block).randbytes(size_bytes)


class WarmShard:
    """The shard, and a client that stores and checks."""

    def __init__(self, shard: Shard, client: Client) -> None:
        self.shard, self.client = shard, client

    @property
    def tiering(self) -> Tiering:
        found = self.shard.local.server.shell.tiering
        assert found is not None
        return found

    def put(self, keys: Sequence[bytes], spec: NamespaceSpec = SPEC) -> None:
        """Stores blocks, a few at a time, each time waiting until the disk has caught up."""
        for at in range(0, len(keys), AT_ONCE):
            some = keys[at : at + AT_ONCE]
            done: PutResult = self.client.namespace(spec).put(some, [value(k, spec.part_bytes) for k in some])
            assert done.failure is None, done.failure
            assert done.stored == len(some)
            self.until_written()

    def until_written(self) -> None:
        """Waits until nothing is on its way to disk."""
        self.shard.ask(lambda local: self.tiering.demotion.pump())
        self.shard.until(lambda local: not self.tiering.demotion.writing_bytes, "writing does not end")

    def get(self, keys: Sequence[bytes], spec: NamespaceSpec = SPEC, wait_ms: int | None = 5000) -> GetResult:
        """Reads blocks; every byte that is said to be there is checked against what was stored."""
        rooms = [bytearray(spec.part_bytes) for _ in keys]
        found = self.client.namespace(spec).get(keys, into=rooms, wait_ms=wait_ms, deadline_ms=20_000)
        for block, room in zip(keys[: found.prefix_blocks], rooms, strict=False):
            assert bytes(room) == value(block, spec.part_bytes), "wrong bytes"
        return found

    def stored(self, keys: Sequence[bytes], spec: NamespaceSpec = SPEC) -> int:
        """How many leading blocks a match tells of."""
        return self.client.namespace(spec).match(keys).prefix_blocks

    def fill(self, name: int, blocks: int = 2 * HOT_BLOCKS) -> list[bytes]:
        """Stores another chain, long enough to take all of memory."""
        keys = chain(name, blocks)
        self.put(keys)
        return keys

    def count(self, name: str) -> int:
        """A counter or gauge of the tier."""
        values = self.shard.ask(lambda local: {**self.tiering.counters(), **self.tiering.gauges()})
        return values[name]


@contextmanager
def warm_shard(
    folder: Path, *transports: str, more: Mapping[str, str] | None = None, deadline_ms: int = 5000
) -> Iterator[WarmShard]:
    """Runs a shard until left; nothing may be left of its clients, and every table agrees."""
    with sharded(flags(folder, **(more or {}))) as shard:
        ways = transports or ("shm", "bulk", "grpc")
        with Client(ClientOptions(shard.target, default_deadline_ms=deadline_ms, transports=ways)) as client:
            yield WarmShard(shard, client)
