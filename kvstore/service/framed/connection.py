"""One socket of the fast channel: bytes in, bytes out, as the socket is ready for them.

Sockets are read and written here, without a transport of the event loop in between: payload goes straight between the
kernel and the arena, and descriptors can pass. Each turn of the loop moves at most a quantum a socket (turns.py), and
takes few requests of it, so that many connections share the loop fairly.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable

from kvstore.service.framed.channel import ChannelVerbs, Peer, stray_descriptor
from kvstore.service.framed.outbox import Outbox
from kvstore.service.framed.requests import Requests
from kvstore.service.framed.turns import ALONE_BYTES, BESIDE_SMALL_BYTES, Turns
from kvstore.service.handlers import StoreHandlers
from kvstore.service.shell import Shell
from kvstore.service.transfer import Transfers
from kvstore_wire.errors import KvStoreError, LeaseExpired
from kvstore_wire.frames import END, FrameReader, Verb, head
from kvstore_wire.v1 import channel_pb2 as channel

_LOG = logging.getLogger("kvstore.framed")
_TURN_FRAMES = 64  # Taken in one turn: a few milliseconds' work. One read more may bring what the scratch holds.
_LOOKS = 16  # A few microseconds: less than a turn of the loop costs.
_TURN_SENDS = 16  # System calls in one turn: payload of tiny pieces needs many.
_TLS_BYTES = 256 << 10
_TAIL_BYTES = 4 << 10  # Beyond a turn's quantum: a few heads of frames, which are not worth another turn.
_TURN_TLS_SENDS = 256  # Each sends one buffer, however small.
MOST_QUEUED_BYTES = 8 << 20  # Answers that a peer does not take: nothing more is read from it beyond this.
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_TRY_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """One connection. `closed` is called once, with the reason where this side cut it."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        *,
        shell: Shell,
        handlers: StoreHandlers,
        transfers: Transfers,
        frame_bytes: int,
        credit_bytes: int,
        turns: Turns,
        closed: Callable[[Connection, KvStoreError | None], None],
    ) -> None:
        self._sock, self._shell, self._turns, self._closed = sock, shell, turns, closed
        self._loop = asyncio.get_running_loop()
        self._fd = sock.fileno()
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._shaking = self._tls is not None
        self._most_sends = _TURN_SENDS if self._tls is None else _TURN_TLS_SENDS
        self._quantum_bytes = self._sent_bytes = 0  # In this turn.
        self._takes_descriptors = sock.family == socket.AF_UNIX
        self._outbox = Outbox(frame_bytes=frame_bytes)
        self._verbs = ChannelVerbs(shell, peer, frame_bytes=frame_bytes, credit_bytes=credit_bytes)
        self._requests = Requests(
            shell,
            handlers,
            transfers,
            outbox=self._outbox,
            verbs=self._verbs,
            wake=self._wake,
            send_now=self._send_now,
            room_now=self._room_now,
        )
        self._reader = FrameReader(
            self._requests, max_message_bytes=shell.limits.max_message_bytes, max_payload_bytes=frame_bytes
        )
        self._writing = self._waking = self._over = False
        self._paused = self._is_reset = False
        self.opened_s = self.moved_s = shell.now()
        self._loop.add_reader(self._fd, self._readable)

    @property
    def greeted(self) -> bool:
        return self._verbs.greeted

    @property
    def peer(self) -> str:
        return self._verbs.peer

    def is_stalled(self, now: float, patience_s: float) -> bool:
        """Whether the peer must take or send something, and has not for so long. Ask again and again."""
        if not self._is_waiting_for_peer:
            self.moved_s = now
        return now - self.moved_s > patience_s

    @property
    def _is_waiting_for_peer(self) -> bool:
        return (not self._outbox.is_empty) or not self._reader.between_frames or self._requests.is_receiving

    def close(self, why: KvStoreError | None = None) -> None:
        """Closes the socket; tells the peer why where that is possible at once. Idempotent."""
        if self._over:
            return
        self._over = True
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        if why is not None and self._outbox.between_frames:
            message = channel.Goodbye(why=why.to_detail()).SerializeToString()
            with contextlib.suppress(OSError):
                self._sock.send(head(Verb.GOODBYE, 0, message, flags=END))
        self._requests.close()
        self._outbox.close()
        self._verbs.close()
        self._sock.close()
        self._turns.forget(self)
        self._closed(self, why)

    # -- in ------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        self._sent_bytes = 0
        self._quantum_bytes = self._turns.begin(self, came=True)
        try:
            if self._shaking and not self._shake():
                return
            self._read()
            self._look_for_reset()
        except KvStoreError as error:
            self._flush()  # What was answered before is still true.
            self.close(error)
        except OSError as error:
            _LOG.debug("connection of %s: %s", self._verbs.peer, error)
            self.close()
        except Exception:  # noqa: BLE001 - the outermost place of the door
            _LOG.exception("connection of %s failed", self._verbs.peer)
            self.close()
        else:
            self._flush()
        self._turns.end(small=0 < self._sent_bytes <= BESIDE_SMALL_BYTES and self._outbox.is_empty)

    def _read(self) -> None:
        reader, requests, left = self._reader, self._requests, self._quantum_bytes
        last_frame = requests.frame_count + _TURN_FRAMES
        looks = self._looks
        while left > 0 and requests.frame_count < last_frame and not self._over:
            view = reader.wanted()[:left]
            try:
                size = self._receive(view)
            except _TRY_LATER:
                if not looks or not reader.payload_left:
                    return
                looks -= 1
                os.sched_yield()
                continue
            looks = self._looks
            if size == 0:
                self.close()
                return
            reader.landed(size)
            if self._verbs.peer_credit:
                self._outbox.credit += self._verbs.peer_credit
                self._verbs.peer_credit = 0
            if self._verbs.has_descriptor and reader.between_frames:
                raise stray_descriptor()
            if requests.said_goodbye:
                self.close()
                return
            self.moved_s = self._shell.now()
            left -= size
            if size < len(view) and self._tls is None and not (looks and reader.payload_left):
                return
        if self._tls is not None and self._tls.pending():
            self._loop.call_soon(self._readable_again)

    def _look_for_reset(self) -> None:
        """Reads on to the end where the peer has reset the connection.

        uvloop tells of an error once and then watches the socket no more, while a first read still brings what came
        before the error: nobody would hear of the end.
        """
        if self._over:
            return
        self._is_reset = self._is_reset or self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if self._is_reset:
            self._loop.call_soon(self._readable_again)

    @property
    def _looks(self) -> int:
        """How often a read looks for payload that must be on its way, before the loop is asked to tell of it."""
        return _LOOKS if self._quantum_bytes == ALONE_BYTES and self._tls is None else 0

    def _readable_again(self) -> None:
        """Reads on what the kernel has given to TLS already, and tells nobody of any more."""
        if not self._over and not self._paused:
            self._readable()

    def _receive(self, view: memoryview) -> int:
        if not self._takes_descriptors:
            return self._sock.recv_into(view)
        size, ancillary, flags, _ = self._sock.recvmsg_into([view], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._take_descriptors(data)
        if flags & socket.MSG_CTRUNC:
            raise stray_descriptor()
        return size

    def _take_descriptors(self, data: bytes) -> None:
        came = array.array("i")
        came.frombytes(data[: len(data) - len(data) % came.itemsize])
        if len(came) == 1:
            self._verbs.descriptor_came(came[0])
            return
        for descriptor in came:
            os.close(descriptor)
        raise stray_descriptor()

    def _shake(self) -> bool:
        """Goes on with the TLS handshake; true once it is done."""
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._want_to_write(wanted=True)
            return False
        self._shaking = False
        return True

    # -- out -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Sends soon: within a read, at its end; else in the next turn of the loop."""
        if not self._waking and not self._over:
            self._waking = True
            self._loop.call_soon(self._woken)

    def _woken(self) -> None:
        self._waking = False
        if not self._over:
            self._take_turn()

    def _writable(self) -> None:
        if self._shaking:
            self._want_to_write(wanted=False)
            self._readable()
        else:
            self._take_turn()

    def _take_turn(self) -> None:
        """Sends, without anything having come."""
        self._quantum_bytes = self._turns.begin(self, came=False)
        self._flush()
        self._turns.end(small=False)

    def _flush(self) -> None:
        """Sends what can be sent, at most a quantum."""
        if self._over or self._shaking:
            return
        sent = calls = 0
        try:
            while sent < self._quantum_bytes and calls < self._most_sends:
                buffers = self._outbox.pending()
                if self._outbox.broken:
                    self.close(LeaseExpired("a lease ended under the last frame of a Get", field="lease"))
                    return
                if not buffers:
                    self._want_to_write(wanted=False)
                    break
                size = self._send(buffers, self._quantum_bytes - sent)
                self._outbox.sent(size)
                sent += size
                calls += 1
            else:
                self._want_to_write(wanted=True)
        except _TRY_LATER:
            self._want_to_write(wanted=True)
        except OSError as error:
            _LOG.debug("connection of %s: %s", self._verbs.peer, error)
            self.close()
            return
        if sent:
            self._sent_bytes += sent
            self.moved_s = self._shell.now()
        self._pause_or_go_on()

    def _send(self, buffers: list[memoryview], most: int) -> int:
        if self._tls is not None:  # What TLS did not take must be tried again with no less: most may be less by then.
            return self._tls.send(buffers[0][:_TLS_BYTES])
        buffers = _first(buffers, most + _TAIL_BYTES)
        if self._outbox.descriptor is None:
            return self._sock.sendmsg(buffers)
        rights = array.array("i", [self._outbox.descriptor])
        return self._sock.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def _send_now(self, buffers: list[bytes | memoryview]) -> int:
        """Sends while nothing else waits to be sent; returns how many bytes went out. Never raises."""
        if self._over or self._writing or self._tls is not None:
            return 0
        try:
            sent = self._sock.sendmsg(buffers)
            self._sent_bytes += sent
            return sent
        except OSError:  # Full, or broken: what is queued finds out.
            return 0

    def _room_now(self) -> int:
        """Returns what is left to send of this turn."""
        return 0 if self._tls is not None else self._quantum_bytes - self._sent_bytes

    def _want_to_write(self, *, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._writable)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _pause_or_go_on(self) -> None:
        """Reads nothing more from a peer that does not take its answers."""
        if not self._paused and self._outbox.queued_bytes > MOST_QUEUED_BYTES:
            self._paused = True
            self._loop.remove_reader(self._fd)
        elif self._paused and self._outbox.queued_bytes < MOST_QUEUED_BYTES // 2:
            self._paused = False
            self._loop.add_reader(self._fd, self._readable)
            if self._tls is not None:
                self._loop.call_soon(self._readable_again)


def _first(buffers: list[memoryview], most: int) -> list[memoryview]:
    """Returns the first `most` bytes of buffers."""
    for i, buffer in enumerate(buffers):
        if len(buffer) >= most:
            return buffers if len(buffer) == most and i == len(buffers) - 1 else [*buffers[:i], buffer[:most]]
        most -= len(buffer)
    return buffers
