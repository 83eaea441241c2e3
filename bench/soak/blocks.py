"""What is stored: namespaces that share their keys, and bytes that follow from key, namespace and part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from kvstore.workload.payload import check_payload, fill_payload
from kvstore_client import Chains, Geometry, Kind, NamespaceSpec

CHAINS, CHAIN_BLOCKS = 8, 48
_PARTS = 100  # Numbers of payloads that one namespace may use.


@dataclass(frozen=True)
class Space:
    """A namespace, and which of them it is."""

    number: int
    spec: NamespaceSpec

    @property
    def is_fixed(self) -> bool:
        return self.spec.kind is Kind.KV

    def keys(self, chosen: random.Random) -> list[bytes]:
        """A run of keys: from the head of a chain, or anywhere where blocks do not hang together."""
        chain, first = chosen.randrange(CHAINS), 0 if self.is_fixed else chosen.randrange(40)
        count = chosen.randrange(1, CHAIN_BLOCKS if self.is_fixed else 8)
        return [key(chain, block) for block in range(first, first + count)]

    def size(self, key_: bytes) -> int:
        """Bytes of a part: fixed, or drawn from the key."""
        part_bytes = self.spec.part_bytes
        return part_bytes if self.is_fixed else int.from_bytes(key_[:4], "little") % part_bytes

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of each part of the blocks."""
        return [self.size(k) for k in keys for _ in range(self.spec.parts_per_block)]

    def fill(self, keys: Sequence[bytes], rooms: Sequence[memoryview]) -> None:
        """Writes what the blocks hold."""
        for i, room in enumerate(rooms):
            if len(room):
                fill_payload(keys[i // self.spec.parts_per_block], self._part(i), room)

    def is_right(self, key_: bytes, part: int, data: memoryview) -> bool:
        """Whether these are the bytes of a part, all of them and of no other namespace."""
        right_size = len(data) == self.size(key_)
        return right_size and (not len(data) or check_payload(key_, self._part(part), data))

    def _part(self, at: int) -> int:
        return _PARTS * self.number + at % self.spec.parts_per_block


def spaces() -> tuple[Space, ...]:
    """The namespaces every client uses."""
    one = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=4, head_dim=64)
    four = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=4, head_dim=64, layer_groups=2, head_shards=2)
    specs = (
        NamespaceSpec(name="one", model="soak", part_bytes=65_536, geometry=one),
        NamespaceSpec(name="twin", model="soak", part_bytes=65_536, geometry=one, tenant="other"),
        NamespaceSpec(name="four", model="soak", part_bytes=20_000, geometry=four),
        NamespaceSpec(name="any", model="soak", part_bytes=256 << 10, kind=Kind.OPAQUE, chains=Chains.NONE),
    )
    return tuple(Space(number, spec) for number, spec in enumerate(specs))


@cache
def key(chain: int, block: int) -> bytes:
    """A block's key, the same in every namespace."""
    return random.Random(f"{chain}/{block}").randbytes(32)
