"""Rows of a few blocks or parts are a list and are handled one by one; many are an array and are handled at once.

A numpy call costs 0.3-1.6 us however little it is given, a number read or written through a memoryview 20 ns. So each
hot function has two ways, and takes the one that its rows' type tells. Both decide the same in the same order: which
one a batch takes never shows but in time.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvstore.core.columns import Ids, Longs

# Source: measured, function by function the two ways cost the same between 30 and 50 rows while all is in the caches.
# Right after a large transfer, which leaves nothing there, numpy costs half as much again.
MOST_ROWS = 64

Rows: TypeAlias = "list[int] | Ids"
Offsets: TypeAlias = "list[int] | Longs"


def as_rows(numbers: Rows) -> Rows:
    """Returns a list of few, an array of many."""
    if len(numbers) > MOST_ROWS:
        return np.asarray(numbers, np.int32)
    return numbers if isinstance(numbers, list) else numbers.tolist()


def joined(first: Rows, second: Rows) -> Rows:
    """Returns both, one after the other."""
    if isinstance(first, list) and isinstance(second, list):
        return as_rows(first + second)
    return as_rows(np.concatenate((np.asarray(first, np.int32), np.asarray(second, np.int32))))


def distinct_tail_first(rows: Rows) -> Rows:
    """Returns the distinct rows, the last one first."""
    if len(rows) < 2:
        return rows
    numbers = rows if isinstance(rows, list) else rows.tolist()
    return as_rows(list(dict.fromkeys(reversed(numbers))))
