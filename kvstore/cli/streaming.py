"""Streaming stores for large copies: a setting that the C library reads only when a process starts."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"
# Above one piece of an inline stream, which the kernel reads at once, and below one piece of a region's copy.
FROM_BYTES = 0x140000


def ask_for_streaming_stores(read: Sequence[Path]) -> None:
    """Executes this program anew with the setting, where the C library has it; returns where nothing is to be done.

    `read`: files that were read and will be again. What can be read once only, a pipe, would be found empty: then
    nothing is done. Only a process that was started to serve is restarted: one that calls the command line from its own
    code is not ours.
    """
    environment = with_streaming_stores(os.environ)
    if environment is None or sys.argv[1:2] != ["serve"]:
        return
    if not all(path.is_file() for path in read):
        return
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError:  # It runs on without.
        return


def with_streaming_stores(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Returns an environment with the setting, None for one that has it, whatever its value."""
    tunables = environment.get(VARIABLE, "")
    if f"{TUNABLE}=" in tunables:
        return None
    ours = f"{TUNABLE}={FROM_BYTES:#x}"
    return {**environment, VARIABLE: f"{tunables}:{ours}" if tunables else ours}
