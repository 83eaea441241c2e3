"""Server processes of one turn: started, awaited, and stopped by their own pid in reverse order.

Rules: a process dies with the one that started it. What a server is known to leave behind is removed after its end,
and only what carries its pid.
"""

from __future__ import annotations

import ctypes
import glob
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0
STOP_S = 15.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# Rivals report their use to their makers, or print banners, unless told not to.
QUIET = {
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}

Ready = Callable[[Path], bool]


class ServerFailed(Exception):
    """A server ended, or said nothing in time; the text has the end of its log."""


class Processes:
    """What a turn has started. Owns: the processes, until the block is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._started = 0

    def start(self, command: Sequence[str], *, ready: Ready, leaves: str = "") -> int:
        """Starts a server and waits until it is ready. Returns its pid. Raises ServerFailed.

        `leaves` is a file pattern with {pid}: what to remove once the process has ended.
        """
        self._started += 1
        log = self._folder / f"{self._started}-{Path(command[0]).name}.log"
        path = os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", "")))
        process = spawn(command, log=log, env={"PATH": path})
        if leaves:
            self._stack.callback(_remove, leaves.format(pid=process.pid))
        self._stack.callback(stop, process)
        _await(process, log=log, ready=ready)
        return process.pid

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def spawn(command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts a process whose input and output are ours only where it is a client; its errors go to the log."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **QUIET, **env},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            text=True,
            preexec_fn=die_with_parent,
        )


def die_with_parent() -> None:
    """In a child before it runs its program: the kernel ends it when its parent ends, however that happens."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a process: SIGTERM, and SIGKILL where that is not heeded."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def listens(*ports: int) -> Ready:
    """Ready when all of these ports of this host answer."""
    return lambda _: all(_answers(port) for port in ports)


def says(text: str) -> Ready:
    """Ready when the log has this text."""
    return lambda log: text in log.read_text(errors="replace")


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on now, all different."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in held]


def tail(log: Path, line_count: int = 3) -> str:
    """The last lines of a log as one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-line_count:])[-400:]


def _await(process: subprocess.Popen[str], *, log: Path, ready: Ready) -> None:
    end = time.monotonic() + READY_S
    while not ready(log):
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with {process.returncode}: {tail(log)}")
        if time.monotonic() > end:
            raise ServerFailed(f"the server was not ready in {READY_S:.0f} s: {tail(log)}")
        time.sleep(_POLL_S)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _remove(pattern: str) -> None:
    for path in glob.glob(pattern):
        os.unlink(path)
