"""A worker process: takes indexes of requests from its pipe, serves several at once, sends what came of each.

Rules: the parent owns its life. A closed pipe means that the replay is over or the parent is gone: the worker ends at
once, and the shard drops its leases with its session. Signals meant for the terminal's process group are the parent's.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection

from kvstore.replay.buffers import BufferPool
from kvstore.replay.decode import Decode
from kvstore.replay.outcomes import Broken, Outcome
from kvstore.replay.plan import Plan
from kvstore.replay.prefill import Prefill
from kvstore.replay.turns import Turn
from kvstore_client import AsyncClient, ClientOptions, KvStoreError, TlsOptions

READY = b"ready"
CALL_DEADLINE_MS = 15_000


class Role(Enum):
    """What a worker does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, eq=False)
class Post:
    """What a worker is told at its start; its plan, which may be long, is the first that comes through the pipe.

    `turn_in` and `turn_out` join prefill workers where there are several.
    """

    role: Role
    number: int
    target: str
    pipe: Connection
    wait_ms: int
    turn_in: Connection | None = None
    turn_out: Connection | None = None
    tls: TlsOptions | None = None


def work(post: Post) -> None:
    """Runs one worker until its pipe closes."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("kvstore_client").addHandler(logging.NullHandler())  # What fails is in the outcomes.
    try:
        plan = post.pipe.recv()
    except (EOFError, OSError):  # The parent has ended before it began.
        return
    uvloop.run(_serve(post, plan))


async def _serve(post: Post, plan: Plan) -> None:
    options = ClientOptions(
        target=post.target,
        default_deadline_ms=CALL_DEADLINE_MS,
        name=f"kvstore replay {post.role.value}",
        tls=post.tls,
    )
    async with AsyncClient(options) as client:
        serve = _handler(post, plan, client)
        inbox = Inbox(post.pipe)
        try:
            post.pipe.send_bytes(READY)
        except OSError:
            return
        tasks: set[asyncio.Task[None]] = set()
        while (index := await inbox.next()) is not None:
            task = asyncio.create_task(_answer(post.pipe, serve, index))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()


def _handler(post: Post, plan: Plan, client: AsyncClient) -> Callable[[int], Awaitable[Outcome]]:
    namespace = client.namespace(plan.spec())
    pool = BufferPool(part_bytes=plan.part_bytes, part_count=plan.longest_blocks)
    if post.role is Role.DECODE:
        return Decode(plan, namespace, pool=pool, wait_ms=post.wait_ms).run
    turn = Turn(inbox=post.turn_in, outbox=post.turn_out, first=post.number == 0)
    return Prefill(plan, namespace, turn=turn, pool=pool, wait_ms=post.wait_ms).run


async def _answer(pipe: Connection, serve: Callable[[int], Awaitable[Outcome]], index: int) -> None:
    try:
        outcome = await serve(index)
    except KvStoreError as error:  # The shard or this program refuses the call: no later one would fare better.
        outcome = Broken(str(error))
    try:
        pipe.send(outcome)
    except OSError:  # The parent has gone; the inbox ends this worker.
        return


class Inbox:
    """Indexes from the parent, in order; None when the pipe is closed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._receive)

    async def next(self) -> int | None:
        return await self._queue.get()

    def _receive(self) -> None:
        try:
            index: int | None = int.from_bytes(self._pipe.recv_bytes(), "little")
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            index = None
        self._queue.put_nowait(index)
