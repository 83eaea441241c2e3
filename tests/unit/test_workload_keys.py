"""Keys of trace ids."""

from __future__ import annotations

import numpy as np

from kvstore.workload.keys import KEY_BYTES, chain_keys

GOLDEN = "22c0d920ae7ba3b4"


def test_a_key_depends_on_id_and_salt_alone() -> None:
    keys = chain_keys([5, 6, 7], b"run")
    assert chain_keys([7, 5], b"run") == [keys[2], keys[0]]
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert len(set(keys + chain_keys([5, 6, 7], b"other"))) == 6
    assert chain_keys([], b"run") == []


def test_arrays_and_lists_give_the_same_keys() -> None:
    ids = [0, 1, (1 << 63) - 1]
    assert chain_keys(np.array(ids, dtype=np.int64), b"") == chain_keys(ids, b"")


def test_salt_and_id_cannot_be_shifted_into_each_other() -> None:
    # Without its length before it, the salt would run on into the id.
    assert chain_keys([0], b"") != chain_keys([0], bytes(8))
    assert len({chain_keys([1], bytes(length))[0] for length in range(20)}) == 20


def test_the_keys_are_the_same_on_every_machine() -> None:
    assert chain_keys([1], b"salt")[0].hex()[:16] == GOLDEN
