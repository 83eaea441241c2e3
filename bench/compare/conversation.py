"""Our end of a conversation with a client process: it is asked one thing at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.compare.clients.work import Job
from bench.compare.processes import QUIET, ROOT, STOP_S, die_with_parent, stop, tail

ANSWER_S = 180.0


class ClientFailed(Exception):
    """A client ended or stood still; the text has the end of its log."""


class ClientSkips(Exception):
    """A client cannot do its job here and says why."""


class Conversation:
    """One client process. Owns: the process, until `close`."""

    def __init__(self, python: Path, *, module: str, job: Job, log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", f"bench.compare.clients.{module}", job.to_json()],
                cwd=ROOT,
                env={**os.environ, **QUIET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=die_with_parent,
            )
        try:
            first = self._answer()
        except BaseException:
            self.close()
            raise
        if "skip" in first:
            self.close()
            raise ClientSkips(first["skip"])

    def round_s(self, op: str, batch: int) -> float:
        """Seconds of one pass over the whole set."""
        return float(self._ask({"do": op, "batch": batch})["s"])

    def latencies_ms(self, first: int, calls: int) -> list[float]:
        """Milliseconds of each of `calls` single gets, walking over the set from value `first`."""
        return [float(ms) for ms in self._ask({"do": "latency", "first": first, "calls": calls})["ms"]]

    def verify(self) -> bool:
        """Whether every byte of the set reads as it was put."""
        return bool(self._ask({"do": "verify"})["equal"])

    def close(self) -> None:
        """Ends the input and waits for the process; one that stays is stopped."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            stop(self._process)
        self._process.stdout.close()

    def _ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ClientFailed(f"the client ended: {tail(self._log)}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        start = time.monotonic()
        if not select.select([output], [], [], ANSWER_S)[0]:
            raise ClientFailed(f"the client said nothing for {time.monotonic() - start:.0f} s: {tail(self._log)}")
        line = output.readline()
        if not line:
            raise ClientFailed(f"the client ended: {tail(self._log)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
