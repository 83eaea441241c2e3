"""What a verb asks about: keys in order, the parts meant, how far to go, and what is known of the next use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.keys import checked_key
from kvstore_wire.namespace import Chains, NamespaceSpec
from kvstore_wire.states import Coverage
from kvstore_wire.v1 import types_pb2 as types

MAX_POSITION = (1 << 32) - 1


@dataclass(frozen=True)
class Chain:
    """Keys of consecutive blocks, head first, with what is known of where they hang.

    `parent` is the key of the block before keys[0] (empty: unknown, or keys[0] is a head); `position` is the index
    of keys[0] in its chain.
    """

    keys: Sequence[bytes]
    parent: bytes = b""
    position: int | None = None


Keys: TypeAlias = "Sequence[bytes] | Chain"


@dataclass(frozen=True)
class Hint:
    """What the caller knows of the next use. Advice only.

    `next_use_s`: seconds within which a return is expected (a tool call: its usual time); 0 = over, no return is
    expected (a one-shot request); None = no statement (a human's turn). `session_tag`: the conversation's own
    number, 0 = none. Raises InvalidArgument (hint).
    """

    next_use_s: float | None = None
    session_tag: int = 0

    def __post_init__(self) -> None:
        use = self.next_use_s
        if use is not None and not (isinstance(use, (int, float)) and math.isfinite(use) and use >= 0):
            raise InvalidArgument(f"is {use!r}", field="hint.next_use_s", limit="0 or more seconds")
        if not isinstance(self.session_tag, int) or not 0 <= self.session_tag < 1 << 64:
            raise InvalidArgument(f"is {self.session_tag!r}", field="hint.session_tag", limit="0-18446744073709551615")

    def to_message(self) -> types.Hint:
        return types.Hint(next_use=self._code(), session_tag=self.session_tag)

    def _code(self) -> int | None:
        if self.next_use_s is None or self.next_use_s == 0:
            return None if self.next_use_s is None else 0
        code = 1 + (math.ceil(self.next_use_s) - 1).bit_length()
        return min(code, contract.MAX_NEXT_USE)


OVER = Hint(next_use_s=0)


@dataclass(frozen=True)
class Range:
    """A strided piece of every part: `count` runs of `length` bytes, `stride` bytes apart, from `offset`.

    Units: bytes. Raises InvalidArgument on construction.
    """

    offset: int
    length: int
    stride: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        for name, value in (("offset", self.offset), ("stride", self.stride)):
            if not isinstance(value, int) or not 0 <= value < 1 << 63:
                raise InvalidArgument(f"is {value!r}", field=f"ranges.{name}", limit="0-2^63")
        for name, value, high in (("length", self.length, 1 << 63), ("count", self.count, 1 << 32)):
            if not isinstance(value, int) or not 1 <= value < high:
                raise InvalidArgument(f"is {value!r}", field=f"ranges.{name}", limit="at least 1")
        if self.count > 1 and self.stride < self.length:
            raise InvalidArgument(f"is {self.stride}", field="ranges.stride", limit=f"at least {self.length}")

    def to_message(self) -> types.Range:
        return types.Range(offset=self.offset, length=self.length, stride=self.stride, count=self.count)


def ranged_bytes(ranges: Sequence[Range]) -> int:
    """Returns what the ranges take of one part."""
    return sum(r.length * r.count for r in ranges)


@dataclass(frozen=True)
class Question:
    """Checked keys and parts of one call in one namespace."""

    spec: NamespaceSpec
    chain: Chain
    parts: tuple[int, ...] = ()
    coverage: Coverage = Coverage.PREFIX

    @property
    def block_count(self) -> int:
        return len(self.chain.keys)

    @property
    def parts_per_block(self) -> int:
        """Parts asked for of each block."""
        return len(self.parts) or self.spec.parts_per_block

    @property
    def linked(self) -> bool:
        """Whether a block is of no use without the ones before it."""
        return self.spec.chains is not Chains.NONE

    def piece(self, first: int, last: int) -> Question:
        """Returns the question about blocks first:last, told where it hangs if the namespace knows its chains."""
        if first == 0 and last == self.block_count:
            return self
        chain = self.chain
        parent = chain.parent if first == 0 else b""
        if first and self.spec.chains is Chains.CHAINED:
            parent = chain.keys[first - 1]
        position = None if chain.position is None else chain.position + first
        return Question(self.spec, Chain(chain.keys[first:last], parent, position), self.parts, self.coverage)

    def chain_message(self) -> types.Chain:
        return types.Chain(keys=self.chain.keys, parent=self.chain.parent, position=self.chain.position)

    def parts_message(self) -> types.PartSelection | None:
        return types.PartSelection(parts=self.parts) if self.parts else None


def question(
    spec: NamespaceSpec, keys: Keys, parts: Sequence[int] = (), coverage: Coverage = Coverage.PREFIX
) -> Question:
    """Checks what a caller asks. Raises InvalidArgument (keys, parent, position, parts, coverage)."""
    chain = keys if isinstance(keys, Chain) else Chain(keys)
    _check_keys(chain)
    try:
        coverage = Coverage(coverage)
    except ValueError:
        raise InvalidArgument(f"{coverage!r} is not a Coverage", field="coverage", limit="PREFIX, EACH") from None
    return Question(spec, chain, _checked_parts(spec, parts), coverage)


def _check_keys(chain: Chain) -> None:
    keys = chain.keys
    if not isinstance(keys, (list, tuple)):
        raise InvalidArgument(f"must be a list or tuple of bytes, not {type(keys).__name__}", field="keys")
    if not set(map(type, keys)) <= {bytes}:
        raise InvalidArgument("every key must be bytes", field="keys")
    sizes = set(map(len, keys))
    if len(sizes) > 1:
        raise InvalidArgument(f"have lengths {sorted(sizes)}", field="keys", limit="one length in a call")
    if keys:
        checked_key(keys[0], "keys")
    if chain.parent:
        checked_key(chain.parent, "parent")
    position = chain.position
    if position is not None and not (isinstance(position, int) and 0 <= position <= MAX_POSITION):
        raise InvalidArgument(f"is {position!r}", field="position", limit=f"0-{MAX_POSITION}")


def _checked_parts(spec: NamespaceSpec, parts: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(parts)
    top = spec.parts_per_block
    if any(not isinstance(p, int) or not 0 <= p < top for p in chosen):
        raise InvalidArgument(f"{chosen!r} names a part that is not there", field="parts", limit=f"0-{top - 1}")
    if any(b <= a for a, b in pairwise(chosen)):
        raise InvalidArgument("must be strictly ascending", field="parts")
    return chosen
