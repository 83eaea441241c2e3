"""A real shard in a process of its own, for tests of the client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


class ShardProcess:
    """`kvstore serve` on one address; may be killed and started again."""

    def __init__(self, *flags: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.port = port or _free_port()
        self.target = f"{host}:{self.port}"
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> ShardProcess:
        command = [sys.executable, "-m", "kvstore", "serve", "--server.listen", self.target]
        command += [
            "--server.admin_listen",
            "127.0.0.1:0",
            "--bulk.listen",
            "127.0.0.1:0",
            "--hot.capacity",
            "64MiB",
            *self._flags,
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ}
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("listening on"):
                return self
        raise AssertionError(f"the shard ended with {self._process.wait()}")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the shard at once, as a crash does."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
