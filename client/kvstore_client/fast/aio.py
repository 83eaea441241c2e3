"""A connection of the fast channel in an event loop: many requests at once on one socket."""

from __future__ import annotations

import asyncio
import socket
import ssl

from kvstore_client.deadline import Deadline
from kvstore_client.errors import PathDown
from kvstore_client.fast.dial import Dialed
from kvstore_client.fast.wire import Exchange, MakePieces, Taker
from kvstore_client.quiet import LOGGER
from kvstore_wire.errors import DeadlineExceeded, KvStoreError, Unreachable

_QUANTUM_BYTES = 2 << 20  # Moved in one turn of the loop at most, so that the loop's other work goes on.
_MOST_BUFFERS = 512
_TRY_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class AsyncLane:
    """Owns one connection. Lives in one event loop, which must be able to watch sockets."""

    def __init__(self, dialed: Dialed) -> None:
        self._sock, self.wire = dialed.sock, dialed.wire
        self._sock.setblocking(False)
        self._fd = self._sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._tls = self._sock if isinstance(self._sock, ssl.SSLSocket) else None
        self._writing = self._is_reset = False
        self.broken = False
        self._loop.add_reader(self._fd, self._readable)

    async def exchange(
        self,
        verb: int,
        message: bytes,
        *,
        taker: Taker,
        deadline: Deadline,
        source: MakePieces | None = None,
    ) -> None:
        """Makes one request and takes its answer. Raises KvStoreError; PathDown where the connection is to blame.

        However this ends, the taker and the source are not touched afterwards.
        """
        remaining_ms = deadline.remaining_ms()
        if remaining_ms < 1:
            raise DeadlineExceeded("the deadline passed before the call was sent")
        if self.wire.failure is not None:
            self.close(self.wire.failure)
            raise PathDown(str(self.wire.failure))
        over: asyncio.Future[None] = self._loop.create_future()
        made = self.wire.begin(
            verb, message, taker=taker, ended=lambda: _resolve(over), timeout_ms=remaining_ms, source=source
        )
        try:
            self._flush()
            if not over.done():
                await asyncio.wait({over}, timeout=deadline.remaining_s())
        finally:
            self._give_up(made)
        if not over.done():
            raise DeadlineExceeded("the shard did not answer in time")
        if made.error is not None:
            raise made.error if not isinstance(made.error, Unreachable) else PathDown(str(made.error), sent=True)

    def tell(self, verb: int, message: bytes) -> bool:
        """Says something that the shard does not answer; false where the connection has ended."""
        if self.broken or self.wire.failure is not None:
            return False
        self.wire.tell(verb, message)
        self._flush()
        return not self.broken

    def close(self, why: KvStoreError | None = None) -> None:
        """Closes the connection; what is under way fails. Idempotent."""
        if self.broken:
            return
        self.broken = True
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._sock.close()
        self.wire.fail(why or Unreachable("the connection was closed"))

    def _give_up(self, made: Exchange) -> None:
        if made.done:
            return
        self.wire.cancel(made)
        self._flush()

    # -- in ------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            self._read()
            self._look_for_reset()
        except (OSError, KvStoreError) as error:
            self.close(Unreachable(f"the connection broke: {error}"))
        except Exception as error:  # noqa: BLE001 - the outermost place: the loop would call again and again
            LOGGER.exception("a connection failed by a fault of the client")
            self.close(Unreachable(f"a fault of the client: {error!r}"))
        else:
            if self.wire.failure is not None:
                self.close(self.wire.failure)
            else:
                self._flush()

    def _read(self) -> None:
        reader, left = self.wire.reader, _QUANTUM_BYTES
        while left > 0 and not self.broken:
            view = reader.wanted()
            try:
                size = self._sock.recv_into(view)
            except _TRY_LATER:
                return
            if size == 0:
                raise ConnectionResetError("the shard closed it")
            reader.landed(size)
            left -= size
            if size < len(view) and self._tls is None:
                return
        if self._tls is not None and not self.broken and self._tls.pending():
            self._loop.call_soon(self._read_on)

    def _look_for_reset(self) -> None:
        """Reads on to the end where the shard has reset the connection: uvloop tells of an error once, and a first read
        still brings what came before it."""
        if self.broken:
            return
        self._is_reset = self._is_reset or self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if self._is_reset:
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self.broken:
            self._readable()

    # -- out -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Sends what can be sent, at most a quantum."""
        if self.broken:
            return
        sent = 0
        try:
            while sent < _QUANTUM_BYTES:
                buffers = self.wire.pending()
                if not buffers:
                    self._want_to_write(wanted=False)
                    return
                size = self._tls.send(buffers[0]) if self._tls else self._sock.sendmsg(buffers[:_MOST_BUFFERS])
                self.wire.sent(size)
                sent += size
            self._want_to_write(wanted=True)
        except _TRY_LATER:
            self._want_to_write(wanted=True)
        except OSError as error:
            self.close(Unreachable(f"the connection broke: {error}"))

    def _want_to_write(self, *, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._flush)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted


def _resolve(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
