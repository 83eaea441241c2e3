"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.compare.environments import ENVIRONMENTS
from bench.compare.peers import Row


def machine() -> dict[str, str]:
    """Processor, cores, memory, kernel and Python of this machine."""
    return {
        "processor": _line_of(Path("/proc/cpuinfo"), "model name"),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "memory": f"{int(_line_of(Path('/proc/meminfo'), 'MemTotal').split()[0]) >> 20} GiB",
        "kernel": f"Linux {platform.release()}",
        "Python": f"Python {platform.python_version()}",
        "TCP": f"congestion control {_word_of(Path('/proc/sys/net/ipv4/tcp_congestion_control'))}",
    }


def versions(rows: Sequence[Row]) -> str:
    """The libraries and the servers of these rows, with their versions."""
    libraries = [ENVIRONMENTS[row.environment].subject for row in rows if row.environment]
    programs = [_version(name) for row in rows for name in row.programs]
    return ", ".join(dict.fromkeys([*libraries, *filter(None, programs)]))


def _version(program: str) -> str:
    if shutil.which(program) is None:
        return ""
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    return " ".join(done.stdout.split()[:3])


def _word_of(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "unknown"


def _line_of(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "0"
