"""Checks of what callers send, once for every door. Each failure names the field and the limit it broke."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass

from kvstore.core.eviction.base import NO_HINT, TouchHint
from kvstore.core.namespaces import Namespace
from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument, Unsupported
from kvstore_wire.namespace import Kind
from kvstore_wire.states import Coverage
from kvstore_wire.v1 import types_pb2 as types

# A table, since calling an enum costs as much as parsing a small request.
_COVERAGES = {int(value): value for value in Coverage}


@dataclass(frozen=True)
class Checks:
    """Checks against one shard's limits."""

    limits: types.Limits

    def keys(self, chain: types.Chain, limit: int) -> Sequence[bytes]:
        """Returns the keys of a chain, checked."""
        keys = chain.keys[:]  # Each reading of a message's field makes it anew.
        checked_keys(keys, field="chain.keys", limit=limit)
        parent = chain.parent
        if parent:
            _key_length(len(parent), "chain.parent")
        return keys

    def lease_s(self, lease_ms: int) -> float:
        """Returns how long a lease is asked for, the default for 0."""
        _at_most("lease_ms", lease_ms, self.limits.max_lease_ms)
        return (lease_ms or self.limits.default_lease_ms) / 1000

    def wait_s(self, wait_ms: int) -> float:
        _at_most("wait_ms", wait_ms, self.limits.max_wait_ms)
        return wait_ms / 1000


def checked_keys(keys: Collection[bytes], *, field: str, limit: int) -> None:
    """Raises InvalidArgument unless keys are few enough, 16-64 bytes long and of one length."""
    _at_most(field, len(keys), limit)
    sizes = set(map(len, keys))
    for size in sizes:
        _key_length(size, field)
    if len(sizes) > 1:
        raise InvalidArgument(
            f"keys of {min(sizes)} and {max(sizes)} bytes in one call", field=field, limit="one length"
        )


def parts(selection: types.PartSelection, namespace: Namespace, *, key_count: int, limit: int) -> tuple[int, ...]:
    """Returns the parts selected, empty for all. `limit` bounds keys times parts."""
    chosen = tuple(selection.parts[:])
    count = namespace.parts_per_block
    if chosen:
        _ascending(chosen, count)
    asked = key_count * (len(chosen) or count)
    if asked > limit:
        raise InvalidArgument(f"{key_count} keys make {asked} parts", field="chain.keys", limit=f"{limit} parts a call")
    return () if len(chosen) == count else chosen


def coverage(value: int) -> Coverage:
    found = _COVERAGES.get(value)
    if found is None:
        raise InvalidArgument(f"{value} is not a known value", field="coverage", limit="0-1")
    return found


def hint(message: types.Hint) -> TouchHint:
    """Returns the hint, NO_HINT for an empty message."""
    if not message.HasField("next_use"):
        return TouchHint(None, message.session_tag) if message.session_tag else NO_HINT
    _at_most("hint.next_use", message.next_use, contract.MAX_NEXT_USE)
    return TouchHint(message.next_use, message.session_tag)


def no_ranges(ranges: Collection[types.Range]) -> None:
    """Raises Unsupported: a lease is over whole parts, ranges are for Get."""
    if len(ranges):
        raise Unsupported("a lease is over whole parts", field="ranges")


def lengths(values: Sequence[int], *, namespace: Namespace, key_count: int) -> list[int]:
    """Returns the lengths of an OPAQUE call's values, empty for KV."""
    if namespace.spec.kind is Kind.KV:
        if len(values):
            raise InvalidArgument("is for namespaces of kind OPAQUE", field="lengths")
        return []
    if len(values) != key_count:
        raise InvalidArgument(f"{len(values)} lengths for {key_count} keys", field="lengths")
    return list(values)


def at_most_leases(leases: Sized) -> None:
    _at_most("leases", len(leases), contract.MAX_LEASES_PER_CALL)


def text(value: str, *, field: str, limit: int) -> None:
    size = len(value.encode())
    if size > limit:
        raise InvalidArgument(f"has {size} bytes", field=field, limit=f"{limit} bytes")


def _ascending(parts: tuple[int, ...], count: int) -> None:
    if any(a >= b for a, b in itertools.pairwise(parts)):
        raise InvalidArgument("must be strictly ascending", field="parts")
    if parts[-1] >= count:
        raise InvalidArgument(f"names part {parts[-1]}", field="parts", limit=f"0-{count - 1}")


def _key_length(size: int, field: str) -> None:
    if not contract.MIN_KEY_BYTES <= size <= contract.MAX_KEY_BYTES:
        limit = f"{contract.MIN_KEY_BYTES}-{contract.MAX_KEY_BYTES} bytes"
        raise InvalidArgument(f"a key has {size} bytes", field=field, limit=limit)


def _at_most(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidArgument(f"is {value}", field=field, limit=f"{limit}")
