"""Block keys: a BLAKE3 chain over tokens, the same in every process that says the same things (docs/keys.md).

    root   = H("kvstore.root.v1",  namespace digest, salt)
    key[i] = H("kvstore.block.v1", key[i-1] or root, tokens of block i, extras of block i)

Only whole blocks have keys. Every function here is pure; keys are 32 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_wire import limits as contract
from kvstore_wire.canonical import digest, field, text
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.namespace import Chains, NamespaceSpec

ROOT_LABEL = "kvstore.root.v1"
BLOCK_LABEL = "kvstore.block.v1"

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


@dataclass(frozen=True)
class Adapter:
    """An adapter (LoRA) that changes the KV: stable name and content revision, never a load-order number."""

    name: str
    revision: str


@dataclass(frozen=True)
class Media:
    """A picture, sound or other input whose placeholder tokens lie in a block.

    `offset` is the token of the *block* where it begins, negative if it began in an earlier block; `content` is a
    digest of what it shows, 16-64 bytes.
    """

    offset: int
    content: bytes


@dataclass(frozen=True)
class Extras:
    """What besides tokens decides a block's KV. One per block; `EMPTY` where there is nothing."""

    adapter: Adapter | None = None
    media: tuple[Media, ...] = ()


EMPTY = Extras()


def root_key(spec: NamespaceSpec, salt: bytes = b"") -> bytes:
    """Returns the parent of every chain's first block. `salt` isolates callers within a namespace."""
    if len(salt) > contract.MAX_SALT_BYTES:
        raise InvalidArgument(f"has {len(salt)} bytes", field="salt", limit=f"0-{contract.MAX_SALT_BYTES} bytes")
    return digest(ROOT_LABEL, field(1, spec.digest), field(2, salt))


def block_key(parent: bytes, tokens: bytes, extras: Extras = EMPTY) -> bytes:
    """Returns the key of one block from its parent's key and its tokens as little-endian u32 bytes."""
    return digest(BLOCK_LABEL, field(1, parent), field(2, tokens), *_extra_fields(extras))


def chain_keys(
    spec: NamespaceSpec,
    tokens: Tokens,
    *,
    salt: bytes = b"",
    extras: Sequence[Extras] = (),
    parent: bytes | None = None,
) -> list[bytes]:
    """Returns the keys of all whole blocks of `tokens`, head first; a partly filled last block has none.

    Shapes: tokens (n,), any integer type, each 0 <= t < 2^32. `extras` has one entry a whole block, or is empty.
    `parent` continues a chain whose last key it is; without it the chain starts at the namespace's root. In a
    namespace with chains NONE each block hangs from the root by itself.
    Raises InvalidArgument for an OPAQUE namespace (its keys are the caller's), bad tokens, extras of another length.
    """
    if spec.geometry is None:
        raise InvalidArgument("an OPAQUE namespace has no token keys", field="namespace")
    block = spec.geometry.block_tokens
    data = _token_array(tokens)
    count = len(data) // block
    if extras and len(extras) != count:
        raise InvalidArgument(f"{len(extras)} entries for {count} whole blocks", field="extras")
    start = root_key(spec, salt) if parent is None else checked_key(parent, "parent")
    raw, step, keys = data.tobytes(), block * 4, list[bytes]()
    chained = spec.chains is not Chains.NONE
    for i in range(count):
        above = keys[-1] if keys and chained else start
        keys.append(block_key(above, raw[i * step : (i + 1) * step], extras[i] if extras else EMPTY))
    return keys


def checked_key(key: bytes, name: str) -> bytes:
    """Returns `key` if its length is allowed. Raises InvalidArgument naming `name`."""
    if not contract.MIN_KEY_BYTES <= len(key) <= contract.MAX_KEY_BYTES:
        limit = f"{contract.MIN_KEY_BYTES}-{contract.MAX_KEY_BYTES} bytes"
        raise InvalidArgument(f"has {len(key)} bytes", field=name, limit=limit)
    return key


def _token_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, "<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument("must be a flat sequence of whole numbers", field="tokens")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 1 << 32:
        raise InvalidArgument(f"{low if low < 0 else high} is out of range", field="tokens", limit="0-4294967295")
    return array.astype("<u4")


def _extra_fields(extras: Extras) -> list[bytes]:
    made: list[bytes] = []
    if extras.adapter is not None:
        made.append(field(3, field(1, text(extras.adapter.name)) + field(2, text(extras.adapter.revision))))
    for item in extras.media:
        checked_key(item.content, "media.content")
        if not -(1 << 63) <= item.offset < 1 << 63:
            raise InvalidArgument(f"is {item.offset}", field="media.offset", limit="64 bits, signed")
        made.append(field(4, field(1, item.offset.to_bytes(8, "little", signed=True)) + field(2, item.content)))
    return made
