"""Where a batch is so small that numpy costs more than it saves.

A numpy call costs 0.3-1.6 us however little it is given, a number read or written through a memoryview 20 ns. So each
hot function has two ways: rows one by one for a few, columns at once for many. Both decide the same in the same order;
which one a batch takes never shows but in time.
"""

from __future__ import annotations

from collections.abc import Sized

MOST_ROWS = 32  # Blocks or parts. Source: by function, the two ways cost the same between 30 and 50.


def is_few(rows: Sized) -> bool:
    """Whether rows are handled one by one."""
    return len(rows) <= MOST_ROWS
