"""The order of prefills. Requests look up and reserve one after another in trace order, whichever worker has them.

Rules: request i belongs to prefill worker i % N; the workers stand in a ring and pass one token. Who has it looks up
and reserves for its next request, then passes it on; bytes move without it. So no request sees a block missing that an
earlier one is about to write: it is stored or in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from multiprocessing.connection import Connection


class Turn:
    """One worker's place in the ring. Without neighbours it hands the token to itself."""

    def __init__(self, *, inbox: Connection | None, outbox: Connection | None, first: bool) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._tokens = int(first)
        self._waiting: deque[asyncio.Future[None]] = deque()
        if inbox is not None:
            asyncio.get_running_loop().add_reader(inbox.fileno(), self._receive)

    async def take(self) -> None:
        """Waits for the token. Callers get it in the order of their calls."""
        if self._tokens and not self._waiting:
            self._tokens -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def pass_on(self) -> None:
        """Gives the token to the next worker."""
        if self._outbox is None:
            self._arrived()
        else:
            self._outbox.send_bytes(b"t")

    def _receive(self) -> None:
        assert self._inbox is not None
        try:
            self._inbox.recv_bytes()
        except (EOFError, OSError):  # The neighbour has gone, and with it the replay.
            asyncio.get_running_loop().remove_reader(self._inbox.fileno())
            return
        self._arrived()

    def _arrived(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # Else its request was cancelled: the replay is ending.
                turn.set_result(None)
                return
        self._tokens += 1
