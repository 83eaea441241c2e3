"""How the kernel schedules the thread of the event loop: soon, and not on a CPU where others compute."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

SLICE_NS = 100_000  # The shortest that Linux takes.
_CALL_NUMBERS = {"x86_64": 314, "aarch64": 274}  # sched_setattr, which Python does not have.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def ask_for_short_slices() -> bool:
    """Asks that the calling thread be let run soon and briefly; false where the kernel does not take it.

    Why: a request that wakes the loop on a CPU where an engine computes would else wait for that one's slice to end,
    some milliseconds. From Linux 6.12 on; older kernels take it and do nothing. Threads made later inherit it.
    """
    number = _CALL_NUMBERS.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:  # Whoever chose another policy is to keep it.
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    try:
        return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
    except (AttributeError, OSError):
        return False


def move_away() -> bool:
    """Moves the calling thread to another of its CPUs; false where it has none. It may be moved back any time."""
    own = os.sched_getaffinity(0)
    try:
        others = own - {ctypes.CDLL(None).sched_getcpu()}
    except AttributeError:
        return False
    if not others:
        return False
    try:
        os.sched_setaffinity(0, others)
    except OSError:
        return False
    try:
        os.sched_setaffinity(0, own)
    except OSError:  # They were taken from the process meanwhile: whatever it has now.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return True
