"""Client processes and their tormentor."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Sequence

from bench.soak.tally import Tally

CLIENTS = 4


class Crew:
    """Clients of several servers, replaced as they are killed."""

    def __init__(self, targets: Sequence[str], seed: int) -> None:
        self._targets, self._random = targets, random.Random(seed)
        self._processes: dict[subprocess.Popen[str], asyncio.Task[None]] = {}
        self._lines: dict[subprocess.Popen[str], str] = {}  # The last of each client, living or not.
        self.killed = self.stopped = self.died = 0

    @property
    def total(self) -> Tally:
        """What all clients have told so far."""
        total = Tally()
        for line in list(self._lines.values()):
            total.add(line)
        return total

    def fill(self) -> None:
        while len(self._processes) < CLIENTS:
            target, seed = self._random.choice(self._targets), str(self._random.randrange(1 << 30))
            command = [sys.executable, "-m", "bench.soak", "--client", target, seed]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # Its stderr is ours: loud.
            self._processes[process] = asyncio.ensure_future(asyncio.to_thread(self._read, process))

    async def torment(self) -> None:
        """Kills, stops or spares one client; starts another where one has gone."""
        await asyncio.sleep(self._random.random() * 3)
        for process in [p for p in self._processes if p.poll() is not None]:
            self.died += 1
            await self._processes.pop(process)
        victim = self._random.choice(list(self._processes)) if self._processes else None
        choice = self._random.random()
        if victim is not None and choice < 0.4:
            await self._kill(victim)
            self.killed += 1
        elif victim is not None and choice < 0.75:
            victim.send_signal(signal.SIGSTOP)
            self.stopped += 1
            await asyncio.sleep(self._random.random() * 4)  # Leases of clients last 50 ms to 2 s.
            victim.send_signal(signal.SIGCONT)
        self.fill()

    async def end(self) -> None:
        for process in list(self._processes):
            await self._kill(process)

    async def _kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        await self._processes.pop(process)
        process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.endswith("\n"):
                    self._lines[process] = line
