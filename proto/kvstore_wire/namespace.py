"""Namespaces: what a block is made of, and the digest that keeps unlike blocks apart.

Two clients share blocks exactly when the digests of their namespaces are equal. Every field but the name enters the
digest, as a tagged, length-prefixed value (docs/keys.md); nothing local to a process does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

from kvstore_wire import limits as contract
from kvstore_wire.canonical import digest, field, number, text
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import types_pb2 as types

LABEL = "kvstore.namespace.v1"
FACT_TAG = 32

_E = TypeVar("_E", bound=IntEnum)


class Kind(IntEnum):
    """What a namespace holds; values are those of the wire."""

    KV = 1
    OPAQUE = 2


class Chains(IntEnum):
    """What callers know about the order of keys; values are those of the wire."""

    CHAINED = 1
    ORDERED = 2
    NONE = 3


class Attention(IntEnum):
    """How attention lays out a token's KV; values are those of the wire."""

    MHA = 1
    MLA = 2


@dataclass(frozen=True)
class Geometry:
    """The shape of one block. A block has `layer_groups x head_shards` parts, layer group major.

    Raises InvalidArgument (field, limit) when a number is out of its limits or a split does not divide.
    """

    block_tokens: int
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    attention: Attention = Attention.MHA
    layout: str = "LBHNC"
    layer_groups: int = 1
    head_shards: int = 1

    def __post_init__(self) -> None:
        for name, high in (("block_tokens", 65536), ("layers", 65535), ("kv_heads", 65535), ("head_dim", 65535)):
            _check_range(f"geometry.{name}", getattr(self, name), low=1, high=high)
        _check_text("geometry.dtype", self.dtype, low=1, high=contract.MAX_DTYPE_BYTES)
        _check_text("geometry.layout", self.layout, low=1, high=contract.MAX_LAYOUT_BYTES)
        object.__setattr__(self, "attention", _enum("geometry.attention", Attention, self.attention))
        _check_divides("geometry.layer_groups", self.layer_groups, self.layers)
        _check_divides("geometry.head_shards", self.head_shards, self.kv_heads)

    @property
    def parts_per_block(self) -> int:
        return self.layer_groups * self.head_shards

    def part_index(self, layer_group: int, head_shard: int) -> int:
        """Returns the index of a part in its block."""
        _check_range("layer_group", layer_group, low=0, high=self.layer_groups - 1)
        _check_range("head_shard", head_shard, low=0, high=self.head_shards - 1)
        return layer_group * self.head_shards + head_shard


@dataclass(frozen=True)
class NamespaceSpec:
    """What a namespace is; see the message of the same name for each field and its limits.

    Raises InvalidArgument (field, limit) on construction when a field is out of its limits.
    """

    name: str
    model: str
    part_bytes: int
    key_scheme: str = "kvcommons.v1"
    tenant: str = ""
    weights_revision: str = ""
    kind: Kind = Kind.KV
    geometry: Geometry | None = None
    chains: Chains = Chains.ORDERED
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_text("name", self.name, low=1, high=contract.MAX_NAME_BYTES)
        _check_text("tenant", self.tenant, low=0, high=contract.MAX_TENANT_BYTES)
        _check_text("model", self.model, low=1, high=contract.MAX_MODEL_BYTES)
        _check_text("weights_revision", self.weights_revision, low=0, high=contract.MAX_REVISION_BYTES)
        _check_text("key_scheme", self.key_scheme, low=1, high=contract.MAX_SCHEME_BYTES)
        _check_range("part_bytes", self.part_bytes, low=1, high=(1 << 63) - 1)
        object.__setattr__(self, "kind", _enum("kind", Kind, self.kind))
        object.__setattr__(self, "chains", _enum("chains", Chains, self.chains))
        if (self.geometry is not None) != (self.kind is Kind.KV):
            raise InvalidArgument("is required for kind KV and absent for kind OPAQUE", field="geometry")
        object.__setattr__(self, "facts", _checked_facts(self.facts))

    @cached_property
    def parts_per_block(self) -> int:
        return 1 if self.geometry is None else self.geometry.parts_per_block

    def canonical_fields(self) -> tuple[tuple[str, str, bytes], ...]:
        """Returns (name, value as text, encoded field) of everything the digest covers, in hashing order."""
        rows: list[tuple[str, str, bytes]] = []
        for tag, (name, value) in enumerate(self._values(), start=1):
            encoded = number(value) if isinstance(value, int) else text(value)
            shown = value.name if isinstance(value, Kind | Chains | Attention) else _plain(value)
            rows.append((name, shown, field(tag, encoded)))
        for name, value in self.facts:
            pair = field(1, text(name)) + field(2, text(value))
            rows.append((f"facts.{name}", value, field(FACT_TAG, pair)))
        return tuple(rows)

    def _values(self) -> list[tuple[str, int | str]]:
        rows: list[tuple[str, int | str]] = [
            (n, getattr(self, n)) for n in ("kind", "tenant", "model", "weights_revision", "key_scheme")
        ]
        rows += [("chains", self.chains), ("part_bytes", self.part_bytes)]
        if self.geometry is not None:
            rows += [(f"geometry.{f.name}", getattr(self.geometry, f.name)) for f in fields(Geometry)]
        return rows

    @cached_property
    def digest(self) -> bytes:
        """The 32-byte namespace digest."""
        return digest(LABEL, *(encoded for _, _, encoded in self.canonical_fields()))

    def difference(self, other: NamespaceSpec) -> tuple[str, str, str] | None:
        """Returns (field, own value, other's value) of the first canonical difference, None if there is none."""
        absent = ("(absent)", b"")
        mine = {name: (shown, encoded) for name, shown, encoded in self.canonical_fields()}
        theirs = {name: (shown, encoded) for name, shown, encoded in other.canonical_fields()}
        for name in [*mine, *(n for n in theirs if n not in mine)]:
            (own, own_bytes), (yours, your_bytes) = mine.get(name, absent), theirs.get(name, absent)
            if own_bytes != your_bytes:
                return name, own, yours
        return None

    def to_message(self) -> types.NamespaceSpec:
        geometry = self.geometry
        return types.NamespaceSpec(
            name=self.name,
            tenant=self.tenant,
            kind=int(self.kind),  # type: ignore[arg-type]
            model=self.model,
            weights_revision=self.weights_revision,
            geometry=None if geometry is None else _geometry_message(geometry),
            part_bytes=self.part_bytes,
            key_scheme=self.key_scheme,
            chains=int(self.chains),  # type: ignore[arg-type]
            facts=[types.Fact(name=n, value=v) for n, v in self.facts],
        )

    @staticmethod
    def from_message(message: types.NamespaceSpec) -> NamespaceSpec:
        """Checks and converts a message. Raises InvalidArgument (field, limit)."""
        return NamespaceSpec(
            name=message.name,
            tenant=message.tenant,
            kind=_enum("kind", Kind, message.kind),
            model=message.model,
            weights_revision=message.weights_revision,
            geometry=_geometry(message.geometry) if message.HasField("geometry") else None,
            part_bytes=message.part_bytes,
            key_scheme=message.key_scheme,
            chains=_enum("chains", Chains, message.chains or int(Chains.ORDERED)),
            facts=tuple((f.name, f.value) for f in message.facts),
        )


def _geometry_message(g: Geometry) -> types.Geometry:
    return types.Geometry(**{f.name: getattr(g, f.name) for f in fields(Geometry)})


def _geometry(m: types.Geometry) -> Geometry:
    values = {f.name: getattr(m, f.name) for f in fields(Geometry)}
    values["attention"] = _enum("geometry.attention", Attention, m.attention)
    # Proto3 cannot tell an absent split from 0, and "unsplit" is what leaving it out means.
    values["layer_groups"] = m.layer_groups or 1
    values["head_shards"] = m.head_shards or 1
    return Geometry(**values)


def _checked_facts(facts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    if len(facts) > contract.MAX_FACTS:
        raise InvalidArgument(f"{len(facts)} facts", field="facts", limit=f"{contract.MAX_FACTS}")
    for name, value in facts:
        _check_text("facts.name", name, low=1, high=contract.MAX_FACT_NAME_BYTES)
        _check_text(f"facts.{name}", value, low=0, high=contract.MAX_FACT_VALUE_BYTES)
    ordered = tuple(sorted((_plain(n), _plain(v)) for n, v in facts))
    if len({n for n, _ in ordered}) != len(ordered):
        raise InvalidArgument("a fact is given twice", field="facts")
    return ordered


def _check_text(name: str, value: str, *, low: int, high: int) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"must be text, not {type(value).__name__}", field=name)
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidArgument("is not valid Unicode", field=name) from error
    if not low <= size <= high:
        raise InvalidArgument(f"has {size} bytes", field=name, limit=f"{low}-{high} bytes")


def _plain(value: str | int) -> str:
    """The text itself, also of a member of a text enum, whose str() differs between Python versions."""
    return str.__str__(value) if isinstance(value, str) else str(int(value))


def _check_range(name: str, value: int, *, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"must be a whole number, not {value!r}", field=name)
    if not low <= value <= high:
        raise InvalidArgument(f"is {value}", field=name, limit=f"{low}-{high}")


def _check_divides(name: str, value: int, whole: int) -> None:
    _check_range(name, value, low=1, high=whole)
    if whole % value:
        raise InvalidArgument(f"{value} does not divide {whole}", field=name)


def _enum(name: str, kind: type[_E], value: int) -> _E:
    """Takes the wire's number (or the member itself), never its text: text differs between Python versions."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(f"{m.name} ({m.value})" for m in kind)
        raise InvalidArgument(f"{value!r} is not a known value", field=name, limit=allowed) from None
