"""Namespaces, keys and values that the client's tests share."""

from __future__ import annotations

import hashlib

from kvstore_client import Chains, Geometry, Kind, NamespaceSpec

PART_BYTES = 1000


def kv_spec(
    name: str = "kv", *, part_bytes: int = PART_BYTES, layer_groups: int = 1, chains: Chains = Chains.ORDERED
) -> NamespaceSpec:
    geometry = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=2, head_dim=64, layer_groups=layer_groups)
    return NamespaceSpec(name=name, model="m", part_bytes=part_bytes, geometry=geometry, chains=chains)


def opaque_spec(name: str = "opaque", *, part_bytes: int = 8 << 20) -> NamespaceSpec:
    return NamespaceSpec(name=name, model="m", part_bytes=part_bytes, kind=Kind.OPAQUE, chains=Chains.NONE)


def keys(count: int, label: str = "k") -> list[bytes]:
    return [hashlib.sha256(f"{label}{i}".encode()).digest() for i in range(count)]


def value(label: object, size_bytes: int = PART_BYTES) -> bytes:
    """Returns bytes that differ from label to label."""
    return hashlib.shake_128(repr(label).encode()).digest(size_bytes)
