"""Store keys for the block ids of a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvstore.workload.trace import BlockIds

KEY_BYTES = 32

_TAG = b"kvs.trace.v1"


def chain_keys(block_ids: BlockIds | Sequence[int], salt: bytes) -> list[bytes]:
    """Return one opaque 32-byte key an id, in the order given.

    An id already stands for its whole prefix, so a key needs no parent. Two salts share no key: one salt a run keeps
    runs apart. About 1 us an id; callers that meet an id often keep its key.
    """
    base = hashlib.blake2b(digest_size=KEY_BYTES, person=_TAG)
    base.update(len(salt).to_bytes(8, "little") + salt)
    packed = np.asarray(block_ids, dtype="<i8").tobytes()
    keys: list[bytes] = []
    for start in range(0, len(packed), 8):
        digest = base.copy()
        digest.update(packed[start : start + 8])
        keys.append(digest.digest())
    return keys
