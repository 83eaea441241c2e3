"""A setting of the C allocator that inline streams of large pieces need."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 256 << 20
_LARGEST_HEAP_BLOCK_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Tells the C allocator to keep what transfers free, up to 256 MiB, instead of giving it back; true if it took it.

    Every piece of an inline stream is a fresh buffer; given back and taken anew, each costs a page fault every 4 KiB.
    Process-wide, so that only programs call it, never a library on its own: the server does for its own process, and an
    application that reads many gigabytes inline may.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # Not glibc.
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES) and kept)
