"""Finding a chain's blocks without asking the index for each key.

Blocks that were stored together mostly lie in neighbouring rows, so that after one look-up the following keys can be
compared with the following rows: two arrays walked in order, where the index would miss the cache for every key. Rows
found that way are checked to be this namespace's and still linked; where they are not, the index decides.
`python -m bench rates` prints what a key costs at ten thousand and at a million blocks.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np

from kvstore.core.columns import BlockColumns, Ids
from kvstore.core.namespaces import Namespace

FIRST_STEP = 8
STEP_GROWTH = 4
MAX_SHORT_RUNS = 4  # After these the rows are scattered and comparing costs more than it saves.


def leading_blocks(columns: BlockColumns, namespace: Namespace, keys: list[bytes]) -> Ids:
    """Returns the blocks of the leading keys that are in the index."""
    get, stored = namespace.blocks.get, columns.key
    runs: list[Ids] = []
    at = short = 0
    while at < len(keys) and short < MAX_SHORT_RUNS:
        block = get(keys[at])
        if block is None:
            return _checked(columns, namespace, keys, runs)
        length = _run_length(stored, block, keys, at)
        runs.append(np.arange(block, block + length, dtype=np.int32))
        at += length
        short += length < FIRST_STEP
    if at < len(keys):
        runs.append(_by_index(namespace, keys[at:]))
    return _checked(columns, namespace, keys, runs)


def each_block(namespace: Namespace, keys: list[bytes]) -> Ids:
    """Returns the block of each key, -1 for those that are not in the index."""
    return np.fromiter(map(namespace.blocks.get, keys, repeat(-1)), np.int32, len(keys))


def _run_length(stored: list[bytes | None], block: int, keys: list[bytes], at: int) -> int:
    """How many keys from `at` on stand in the rows from `block` on."""
    length, step, most = 1, FIRST_STEP, len(keys) - at
    while length < most:
        end = min(most, length + step)
        if stored[block + length : block + end] == keys[at + length : at + end]:
            length, step = end, step * STEP_GROWTH
        elif step == FIRST_STEP:
            while stored[block + length : block + length + 1] == keys[at + length : at + length + 1]:
                length += 1
            return length
        else:
            step = FIRST_STEP
    return length


def _checked(columns: BlockColumns, namespace: Namespace, keys: list[bytes], runs: list[Ids]) -> Ids:
    """Joins runs; asks the index instead if a row is another namespace's, or its block was removed and waits for
    its last lease."""
    if not runs:
        return np.empty(0, np.int32)
    blocks = runs[0] if len(runs) == 1 else np.concatenate(runs)
    if (columns.namespace[blocks] == namespace.index).all() and not columns.doomed[blocks].any():
        return blocks
    return _by_index(namespace, keys)


def _by_index(namespace: Namespace, keys: list[bytes]) -> Ids:
    found = list(map(namespace.blocks.get, keys))
    count = found.index(None) if None in found else len(found)
    return np.array(found[:count], np.int32)
