"""The worker processes of a replay, seen from the parent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kvstore.replay.faults import WorkerDied
from kvstore.replay.outcomes import Broken, Decoded, Prefilled
from kvstore.replay.plan import Plan
from kvstore.replay.worker import READY, Post, Role, work
from kvstore_client import TlsOptions

START_S = 60.0
STOP_S = 3.0


@dataclass(frozen=True)
class CrewSize:
    """How many workers of each role."""

    prefill: int = 1
    decode: int = 1


class Crew:
    """Sends requests to workers and collects what came of them. Request i is worker i % N's of each role."""

    def __init__(self, prefill: list[Connection], decode: list[Connection]) -> None:
        self._prefill, self._decode = prefill, decode
        self._all = [*prefill, *decode]

    def wait_ready(self) -> None:
        """Waits until every worker runs. Raises WorkerDied."""
        end_s = time.monotonic() + START_S
        for pipe in self._all:
            if not pipe.poll(max(0.0, end_s - time.monotonic())):
                raise WorkerDied(f"a worker did not start within {START_S:g} s")
            try:
                said = pipe.recv_bytes()
            except (EOFError, OSError):
                raise WorkerDied("a worker ended before it began") from None
            assert said == READY

    def prefill(self, index: int) -> None:
        """Hands a request to its prefill worker. Call in trace order. Raises WorkerDied."""
        _send(self._prefill[index % len(self._prefill)], index)

    def decode(self, index: int) -> None:
        """Hands a request to its decode worker. Raises WorkerDied."""
        _send(self._decode[index % len(self._decode)], index)

    def outcomes(self, wait_s: float) -> Iterator[Prefilled | Decoded]:
        """Yields what has come, waiting at most so long for the first. Raises WorkerDied."""
        for pipe in connection.wait(self._all, wait_s):
            assert isinstance(pipe, Connection)
            while True:
                try:
                    outcome = pipe.recv()
                except (EOFError, OSError):
                    raise WorkerDied("a worker process ended") from None
                if isinstance(outcome, Broken):
                    raise WorkerDied(outcome.reason)
                yield outcome
                if not pipe.poll():
                    break


@contextmanager
def crew_at_work(
    size: CrewSize, plan: Plan, *, target: str, wait_ms: int, tls: TlsOptions | None = None
) -> Iterator[Crew]:
    """Starts the workers and ends them on leaving, however that comes about."""
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: dict[Role, list[Connection]] = {Role.PREFILL: [], Role.DECODE: []}
    ring = _ring(size.prefill)
    try:
        for role, count in ((Role.PREFILL, size.prefill), (Role.DECODE, size.decode)):
            for number in range(count):
                ours, theirs = context.Pipe()
                turn_in, turn_out = ring[number] if role is Role.PREFILL else (None, None)
                post = Post(
                    role=role,
                    number=number,
                    target=target,
                    pipe=theirs,
                    wait_ms=wait_ms,
                    turn_in=turn_in,
                    turn_out=turn_out,
                    tls=tls,
                )
                process = context.Process(target=work, args=(post,), daemon=True, name=f"{role.value}-{number}")
                process.start()
                theirs.close()
                processes.append(process)
                pipes[role].append(ours)
        _close(end for pair in ring for end in pair)
        for pipe in (pipe for group in pipes.values() for pipe in group):
            _send_plan(pipe, plan)  # Once all of them are starting: each takes it when it has.
        yield Crew(pipes[Role.PREFILL], pipes[Role.DECODE])
    finally:
        _close(pipe for group in pipes.values() for pipe in group)
        _end(processes)


def _ring(count: int) -> list[tuple[Connection | None, Connection | None]]:
    """Returns each prefill worker's (inbox, outbox): what worker i sends, worker i + 1 gets."""
    if count == 1:
        return [(None, None)]
    pairs = [get_context("spawn").Pipe(duplex=False) for _ in range(count)]
    return [(pairs[i][0], pairs[(i + 1) % count][1]) for i in range(count)]


def _send_plan(pipe: Connection, plan: Plan) -> None:
    try:
        pipe.send(plan)
    except OSError:
        raise WorkerDied("a worker ended before it began") from None


def _send(pipe: Connection, index: int) -> None:
    try:
        pipe.send_bytes(index.to_bytes(8, "little"))
    except OSError:
        raise WorkerDied("a worker process ended") from None


def _close(pipes: Iterator[Connection | None]) -> None:
    for pipe in pipes:
        if pipe is not None:
            pipe.close()


def _end(processes: list[BaseProcess]) -> None:
    end_s = time.monotonic() + STOP_S
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
