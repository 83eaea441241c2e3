"""The shard that a replay starts for itself: a child process on ports of its own."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from kvstore.replay.faults import ServerDied

START_S = 30.0
STOP_S = 5.0
LOG_TAIL_BYTES = 2000
_BOUND = re.compile(rb"^listening on (\S+); admin on (\S+)$", re.MULTILINE)


class OwnServer:
    """A running shard. `target` and `admin_target` are where it listens."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process, self._log = process, log
        self.target, self.admin_target = self._bound()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises ServerDied, with the end of its log, unless it runs."""
        if self._process.poll() is not None:
            raise ServerDied(f"the server died with exit code {self._process.returncode}{self._last_words()}")

    def _bound(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        said, end_s, descriptor = b"", time.monotonic() + START_S, self._process.stdout.fileno()
        while (found := _BOUND.search(said)) is None:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end_s - time.monotonic()))
            piece = os.read(descriptor, 65536) if ready else b""
            if not piece:
                self._process.wait(STOP_S) if ready else self._process.kill()
                raise ServerDied(f"the server did not start{self._last_words()}")
            said += piece
        return found[1].decode(), found[2].decode()

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL_BYTES))
        text = self._log.read().decode(errors="replace").strip()
        return f"; its log ends: {text}" if text else ""


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[OwnServer]:
    """Starts a shard and ends it on leaving. Raises ServerDied if it does not start."""
    command = [sys.executable, "-m", "kvstore.replay.child", str(os.getpid()), "serve", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    with tempfile.TemporaryFile() as log:
        # A session of its own, so that Ctrl-C reaches only the parent, which then ends all in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        with process:
            try:
                server = OwnServer(process, log)
                yield server
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
