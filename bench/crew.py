"""Our end of client processes: they are asked one thing each, and start together."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.processes import ROOT, die_with_parent, stop
from bench.jobs import Job
from bench.worker import GET, MIXED, PUT

ANSWER_S = 300.0
TOGETHER_S = 0.005


class WorkerFailed(Exception):
    """A client process ended, stood still, or could not do what it was asked."""


@dataclass(frozen=True)
class Played:
    """What one client did. `calls_ms` are its calls one by one; `end_s` is on the clock that processes share."""

    seconds: float
    end_s: float
    cpu_s: float
    parts: int
    calls_ms: Sequence[float]


class Worker:
    """One client process. Owns: the process, until `close`. As a player of a turn it plays whole rounds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )

    def open(self, job: Job) -> None:
        """Opens a player; the one before is closed. Raises WorkerFailed."""
        self.ask({"do": "open", **job.to_dict()})

    def fill(self) -> None:
        """Stores all parts anew."""
        self.ask({"do": "fill"})

    def clean(self) -> None:
        """Removes all parts."""
        self.ask({"do": "clean"})

    def check(self) -> None:
        """Raises WorkerFailed if one byte reads otherwise than it was put."""
        if not self.ask({"do": "verify"})["equal"]:
            raise WorkerFailed("what was read differs from what was put")

    def round(self, op: str, batch: int) -> Played:
        """Plays one pass over all parts; what a put would find there is removed before, untimed."""
        return Crew([self]).round(op, batch)[0]

    def round_s(self, op: str, batch: int) -> float:
        return self.round(op, batch).seconds

    def calls(self, op: str, *, batch: int, first: int, count: int) -> Played:
        """Plays a number of calls."""
        return played(self.ask({"do": "calls", "op": op, "batch": batch, "first": first, "count": count}))

    def latencies_ms(self, first: int, calls: int) -> list[float]:
        return list(self.calls(GET, batch=1, first=first, count=calls).calls_ms)

    def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        """Asks and waits. Raises WorkerFailed."""
        self.tell(question)
        return self.hear()

    def tell(self, question: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed("the client process ended") from None

    def hear(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], ANSWER_S)[0]:
            raise WorkerFailed(f"the client process said nothing for {ANSWER_S:.0f} s")
        line = output.readline()
        if not line:
            raise WorkerFailed("the client process ended")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise WorkerFailed(found["error"])
        return found

    def close(self) -> None:
        """Ends the input and waits for the process; one that stays is stopped."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            stop(self._process)
        self._process.stdout.close()


@dataclass(frozen=True)
class Crew:
    """Clients that do the same at the same time."""

    workers: Sequence[Worker]

    def open(self, jobs: Sequence[Job]) -> None:
        """Opens one player each."""
        self.all([{"do": "open", **job.to_dict()} for job in jobs])

    def each(self, question: Mapping[str, object]) -> list[dict[str, Any]]:
        """Asks all of them the same."""
        return self.all([question] * len(self.workers))

    def all(self, questions: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
        """Asks each its own question; all answers are heard before a failure is raised."""
        answers: list[dict[str, Any]] = []
        failure: WorkerFailed | None = None
        told = []
        for worker, question in zip(self.workers, questions, strict=True):
            try:
                worker.tell(question)
                told.append(worker)
            except WorkerFailed as error:
                failure = error
        for worker in told:
            try:
                answers.append(worker.hear())
            except WorkerFailed as error:
                failure = error
        if failure is not None:
            raise failure
        return answers

    def round(self, op: str, batch: int) -> list[Played]:
        """One round of each, started together; what a put would find there is removed before, untimed."""
        self.prepare(op, batch)
        return self.play(op, batch)

    def prepare(self, op: str, batch: int) -> None:
        """Removes what the puts of a round would find there."""
        if op in (PUT, MIXED):
            self.each({"do": "prepare", "op": op, "batch": batch})

    def play(self, op: str, batch: int) -> list[Played]:
        """One round of each, started together."""
        at = time.perf_counter() + TOGETHER_S
        return [played(a) for a in self.each({"do": "round", "op": op, "batch": batch, "at": at})]

    def until(self, op: str, *, batch: int, seconds: float) -> list[Played]:
        """Calls of each for a while, started together."""
        at = time.perf_counter() + TOGETHER_S
        seeds = range(len(self.workers))
        questions = [until_question(op, batch=batch, at=at, end=at + seconds, seed=seed) for seed in seeds]
        return [played(answer) for answer in self.all(questions)]


@contextlib.contextmanager
def crew_of(count: int) -> Iterator[Crew]:
    """Starts client processes."""
    with contextlib.ExitStack() as stack:
        yield Crew([stack.enter_context(contextlib.closing(Worker())) for _ in range(count)])


def until_question(op: str, *, batch: int, at: float, end: float, seed: int = 0) -> dict[str, object]:
    """Asks for calls from one moment to another. The seed tells clients apart that draw their parts."""
    return {"do": "until", "op": op, "batch": batch, "at": at, "end": end, "seed": seed}


def played(answer: Mapping[str, Any]) -> Played:
    """What an answer says."""
    return Played(answer["s"], answer["end"], answer["cpu_s"], answer["parts"], answer["calls_ms"])
