"""`python -m kvstore.replay.child ARGUMENTS`: the command kvstore as a child that never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kvstore.cli import main

_PR_SET_PDEATHSIG = 1  # prctl(2), Linux.


def _end_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGTERM when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # It died before the request.
        sys.exit(1)


if __name__ == "__main__":
    _end_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
