"""A real server for tests: in the test's own event loop, or as a `kvstore serve` process that may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.build import build_server, channel_places
from kvstore.config import Address, Config, load_config
from kvstore.service.failpoints import ENVIRONMENT, Failpoints
from kvstore.service.server import Server
from kvstore.tiers.memory import ArenaMemory

ROOT = Path(__file__).resolve().parents[2]
ANY_PORT = Address("127.0.0.1", 0)
START_S = 30.0
# One probe at start and then none: tests that count do not want its block among theirs.
QUIET: Mapping[str, str] = {
    "health.probe_interval": "1m",
    "hot.capacity": "4MiB",
    "hot.prefault": "off",
    "bulk.listen": "127.0.0.1:0",
}


@dataclass(frozen=True)
class LocalServer:
    """A server in this process: its parts may be looked at, its bytes travel over real sockets."""

    server: Server
    config: Config
    failpoints: Failpoints
    target: str
    admin_target: str
    channel: list[str]

    def gauge(self, name: str) -> int:
        return self.server.shell.store.gauges()[name]

    def used_bytes(self) -> int:
        """Bytes of the arena that are not free."""
        return self.gauge("capacity_bytes") - self.gauge("free_bytes")

    async def until_idle(self) -> None:
        """Waits until no lease is left, then checks every table against every other."""
        await until(lambda: not self.gauge("leases") and not self.gauge("waiting_acquires"), "a lease is left")
        self.server.shell.store.check()


@contextlib.asynccontextmanager
async def serve_here(flags: Mapping[str, str] | None = None) -> AsyncIterator[LocalServer]:
    """Runs a server in this event loop on free ports. `flags` are options by `section.key`."""
    config = load_config(None, {}, {**QUIET, **(flags or {})})
    memory, failpoints = ArenaMemory(config.hot.capacity), Failpoints()
    server = build_server(config, memory, failpoints)
    bound = await server.start([ANY_PORT], [ANY_PORT], channel_places(config))
    try:
        yield LocalServer(server, config, failpoints, bound.store[0], bound.admin[0], bound.channel)
    finally:
        await server.stop()
        memory.close()


class ServerProcess:
    """`kvstore serve` in a process of its own. `stderr_text` and `stdout_text` are what it has said so far."""

    def __init__(
        self, flags: Mapping[str, str] | None = None, *, failpoints: str = "", target: str = "127.0.0.1:0"
    ) -> None:
        chosen = {**QUIET, "server.listen": target, "server.admin_listen": "127.0.0.1:0", **(flags or {})}
        command = [sys.executable, "-m", "kvstore", "serve"]
        for name, value in chosen.items():
            command += [f"--{name}", value]
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-test-")
        self._stdout = Path(self._folder.name, "stdout")
        self._stderr = Path(self._folder.name, "stderr")
        environment = {**os.environ, ENVIRONMENT: failpoints}
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=environment)
        self.target = self.admin_target = ""

    def wait_for_start(self) -> ServerProcess:
        """Waits until it listens and fills in its addresses."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.stdout_text().splitlines():
                if line.startswith("listening on ") and "; admin on " in line:
                    self.target, _, self.admin_target = line.removeprefix("listening on ").partition("; admin on ")
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"the server did not start: {self.stderr_text()}")

    def stdout_text(self) -> str:
        return self._stdout.read_text()

    def stderr_text(self) -> str:
        return self._stderr.read_text()

    def kill(self) -> None:
        """Ends it as a crash does."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def rss_anon_bytes(self) -> int:
        """Its private memory: the arena, which is shared memory, not included."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise LookupError("RssAnon")

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def serving(
    flags: Mapping[str, str] | None = None, *, failpoints: str = "", target: str = "127.0.0.1:0"
) -> Iterator[ServerProcess]:
    """Runs a server process until left, then kills it if it still runs."""
    process = ServerProcess(flags, failpoints=failpoints, target=target)
    try:
        yield process.wait_for_start()
    finally:
        process.close()


class ChildClient:
    """A client in a process of its own (see server_child): says lines, takes lines, may be stopped or killed."""

    def __init__(self, target: str, role: str) -> None:
        command = [sys.executable, "-m", "tests.integration.server_child", target, role]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )

    async def line(self) -> str:
        """The next line it says."""
        out = self._process.stdout
        assert out is not None
        return (await asyncio.wait_for(asyncio.to_thread(out.readline), START_S)).strip()

    def tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


async def until(holds: Callable[[], bool], otherwise: str, *, within_s: float = 10.0) -> None:
    """Polls until something holds. Raises AssertionError(`otherwise`) when it does not in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(0.01)
