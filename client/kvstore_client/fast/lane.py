"""A connection of the fast channel in the hands of one thread at a time: calls block, within their deadline."""

from __future__ import annotations

import array
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer, PathDown
from kvstore_client.fast.busy import BusyPoll
from kvstore_client.fast.dial import Dialed
from kvstore_client.fast.wire import Exchange, MakePieces, Taker, drop_first
from kvstore_wire.errors import DeadlineExceeded, InvalidArgument, KvStoreError
from kvstore_wire.frames import END, HEADER, HEADER_BYTES, MAGIC, VERSION, Verb

_TIMEVAL = struct.Struct("ll")
_TIMEOUT_STEP_S = 0.05  # A call may be so late; the kernel's timer need not be set anew for less.
_LONG_BYTES = 256 << 10
_TRY_LATER = (BlockingIOError, TimeoutError, ssl.SSLWantWriteError, ssl.SSLWantReadError)
_MOST_MESSAGE_BYTES = 64 << 10  # Of an answer that is taken by the shortest way.
_FLAGS_AT = 4  # In a header; the low byte.
_MOST_BUFFERS = 512  # Below the kernel's limit of 1024 for one call.


class Plain(NamedTuple):
    """An answer of one frame: its message, the payload that came with it, and how many bytes more are to come. The
    views are valid until the lane is used again."""

    message: memoryview
    payload: memoryview
    left: int


class BlockingLane:
    """Owns one connection. Not thread-safe: a lane belongs to the call that took it.

    `busy_poll_s`: how long it looks for an answer before it sleeps until it comes.
    """

    def __init__(self, dialed: Dialed, busy_poll_s: float = 0.0) -> None:
        self._sock, self.wire = dialed.sock, dialed.wire
        self._pid = os.getpid()
        self._is_tls = isinstance(self._sock, ssl.SSLSocket)
        self._poll = BusyPoll(0.0 if self._is_tls else busy_poll_s)
        self._timeout_s = 0.0
        self.broken = False
        self.was_silent = True  # The last call got not a byte of an answer.

    @property
    def is_fit(self) -> bool:
        """Whether the next call may use it: nothing is left of the last one, and the peer has not closed it."""
        wire = self.wire
        return not self.broken and wire.failure is None and wire.is_idle and self._pid == os.getpid()

    def is_quiet(self) -> bool:
        """Whether the peer has sent nothing unasked: a close or a goodbye, or the rest of something."""
        try:
            readable, _, _ = select.select([self._sock], [], [], 0)
        except (OSError, ValueError):
            return False
        return not readable

    def exchange(
        self,
        verb: int,
        message: bytes,
        *,
        taker: Taker,
        deadline: Deadline,
        source: MakePieces | None = None,
    ) -> None:
        """Makes one request and takes its answer. Raises KvStoreError; PathDown where the connection is to blame."""
        remaining_ms = deadline.remaining_ms()
        if remaining_ms < 1:
            raise DeadlineExceeded("the deadline passed before the call was sent")
        try:
            made = self.wire.begin(verb, message, taker=taker, ended=_nothing, timeout_ms=remaining_ms, source=source)
            self._drive(made, deadline)
        except (OSError, InvalidArgument, MalformedAnswer) as error:  # What breaks the framing ends a connection too.
            self.close()
            raise PathDown(f"the connection broke: {error}", sent=True) from None
        except BaseException:
            self.close()
            raise
        if self.wire.has_pending:
            self.settle(deadline)
        if made.error is not None:
            raise made.error

    def tell(self, verb: int, message: bytes) -> bool:
        """Says something that the shard does not answer, where TLS is not spoken; false where the socket does not take
        it at once: then the lane is closed."""
        self.wire.tell(verb, message)
        with suppress(OSError):
            self.wire.sent(self._sock.sendmsg(self.wire.pending(), (), socket.MSG_DONTWAIT))
        if self.wire.has_pending:
            self.close()
        return not self.broken

    def ask(self, verb: int, message: bytes, deadline: Deadline) -> Plain | None:
        """Makes one request whose answer is one frame, by the shortest way; take all of its payload before anything
        else. None where the answer is another: then close the lane. Raises OSError, DeadlineExceeded.
        """
        request, view, came = self._begin(verb, message, deadline)
        return self._plain(verb, request, view, came, deadline)

    def ask_all(self, verb: int, message: bytes, taker: Taker, deadline: Deadline) -> bool:
        """As `ask`, whose answer may be several messages without payload: each is given to the taker as it comes.
        Returns whether all came; else close the lane. Raises OSError, KvStoreError.
        """
        request, view, came = self._begin(verb, message, deadline)
        if came >= HEADER_BYTES and not view[_FLAGS_AT] & END:
            made = self.wire.resume(verb, request, taker=taker, ended=_nothing)
            self.wire.reader.landed(came)
            self._drive(made, deadline)
            return made.error is None
        plain = self._plain(verb, request, view, came, deadline)
        if plain is None or plain.payload or plain.left:
            return False
        taker.message(bytes(plain.message))
        return True

    def stream(self, verb: int, message: bytes, taker: Taker, deadline: Deadline) -> bool:
        """As `ask`, whose answer may be many frames: messages and payload are given to the taker as they come.
        Returns whether all came; else close the lane. Raises OSError, KvStoreError.
        """
        request, _, came = self._begin(verb, message, deadline)
        if not came:
            return False
        made = self.wire.resume(verb, request, taker=taker, ended=_nothing)
        self.wire.reader.landed(came)
        self._drive(made, deadline)
        if self.wire.has_pending:
            self.settle(deadline)
        return made.error is None

    def _begin(self, verb: int, message: bytes, deadline: Deadline) -> tuple[int, memoryview, int]:
        """Sends a request; returns its number, the wire's own buffer, and how much of the answer is in it: nothing
        where the socket did not take the request at once."""
        wire = self.wire
        request = wire.next_request()
        self._set_timeouts(deadline)
        sent = HEADER.pack(MAGIC, VERSION, verb, END, 0, request, deadline.remaining_ms() or 1, len(message), 0)
        view = wire.reader.wanted()
        if self._sock.send(sent + message) < len(sent) + len(message):
            return request, view, 0
        return request, view, self._receive_first(view, deadline)

    def _plain(self, verb: int, request: int, view: memoryview, came: int, deadline: Deadline) -> Plain | None:
        wire = self.wire
        if came < HEADER_BYTES:
            return None
        magic, version, about, flags, _, answers, _, size, payload = HEADER.unpack_from(view)
        if (magic, version, about, flags, answers) != (MAGIC, VERSION, verb, END, request):
            return None
        start = HEADER_BYTES + size
        if came < start:
            is_long = not payload and size <= _MOST_MESSAGE_BYTES
            return self._long(view[HEADER_BYTES:came], size, deadline) if is_long else None
        left = start + payload - came
        if left < 0 or payload > wire.frame_bytes:
            return None
        wire.took(payload)
        return Plain(view[HEADER_BYTES:start], view[start:came], left)

    def _long(self, begun: memoryview, size: int, deadline: Deadline) -> Plain:
        """Takes the rest of a message that one receive did not bring, or the wire's own buffer does not hold."""
        message, at = memoryview(bytearray(size)), len(begun)
        message[:at] = begun
        while at < size:
            self._set_timeouts(deadline)
            came = self._receive(message[at:], deadline, whole=True)
            if not came:
                raise ConnectionResetError("the shard closed it")
            at += came
        return Plain(message, message[size:], 0)

    def put(self, header: bytes, trailer: bytes, payload: Sequence[memoryview], deadline: Deadline) -> bytes | None:
        """Makes one Put, whose payload fits into one frame and the credit, by the shortest way; returns the message of
        its answer. None where the answer is another: then the lane is closed. Raises OSError, DeadlineExceeded.
        """
        wire = self.wire
        request, size = wire.next_request(), sum(map(len, payload))
        self._set_timeouts(deadline)
        timeout_ms = deadline.remaining_ms() or 1
        first = HEADER.pack(MAGIC, VERSION, Verb.PUT, 0, 0, request, timeout_ms, len(header), 0)
        last = HEADER.pack(MAGIC, VERSION, Verb.PUT, END, 0, request, 0, len(trailer), size)
        wire.credit -= size
        self._send_all([memoryview(b"".join((first, header, last, trailer))), *payload], deadline)
        view = wire.reader.wanted()
        came = self._receive_first(view, deadline)
        if came < HEADER_BYTES:
            return None
        magic, version, about, flags, _, answers, _, message_bytes, payload_bytes = HEADER.unpack_from(view)
        start = HEADER_BYTES + message_bytes
        if (magic, version, about, flags, answers) != (MAGIC, VERSION, Verb.PUT, END, request):
            return None
        if payload_bytes or came < start:
            return None
        message, rest = bytes(view[HEADER_BYTES:start]), came - start
        if rest:  # Credit, most likely.
            view[:rest] = view[start:came]
            wire.reader.landed(rest)
        return message

    def take(self, into: memoryview, deadline: Deadline, landed: Callable[[memoryview], object]) -> None:
        """Fills a buffer with payload of an answer; `landed` gets each piece. Raises OSError, DeadlineExceeded."""
        at, size = 0, len(into)
        while at < size:
            came = self._poll.fill(self._sock, into[at:]) if self._poll.is_on else 0
            if not came:  # Every part of an answer may take its time: together they must end in time.
                self._set_timeouts(deadline)
                came = self._receive(into[at:], deadline, whole=True)
            if not came:
                raise ConnectionResetError("the shard closed it")
            landed(into[at : at + came])
            at += came
            if at < size:  # However little comes at a time, it must end in time.
                self._set_timeouts(deadline)

    @property
    def is_plain(self) -> bool:
        """Whether `ask` works here."""
        return not self._is_tls and not self.wire.has_pending

    def exchange_descriptor(
        self, verb: int, message: bytes, *, taker: Taker, deadline: Deadline, descriptor: int | None = None
    ) -> int | None:
        """As `exchange`, sending or receiving a descriptor with it. Returns the one that came; the caller owns it."""
        came: list[int] = []
        try:
            made = self.wire.begin(verb, message, taker=taker, ended=_nothing)
            buffers = self.wire.pending()
            self._set_timeouts(deadline)
            rights = [] if descriptor is None else [_rights(descriptor)]
            self.wire.sent(self._sock.sendmsg(buffers, rights))
            for buffer in self.wire.pending():
                self._sock.sendall(buffer)
            self.wire.sent(sum(map(len, self.wire.pending())))
            while not made.done:
                self._set_timeouts(deadline)
                self._receive_descriptor(came)
            if self.wire.failure is not None:
                raise ConnectionResetError(str(self.wire.failure))
        except (OSError, InvalidArgument, MalformedAnswer) as error:
            self._drop(came)
            self.close()
            raise PathDown(f"the connection broke: {error}", sent=True) from None
        except BaseException:
            self._drop(came)
            self.close()
            raise
        if made.error is not None:
            self._drop(came)
            raise made.error
        return came.pop() if came else None

    def close(self) -> None:
        """Closes the connection; the shard drops what was under way on it. Idempotent."""
        self.broken = True
        if self._pid == os.getpid():
            self._sock.close()

    # -- driving -------------------------------------------------------------------------------------------------

    def _drive(self, made: Exchange, deadline: Deadline) -> None:
        wire, reader = self.wire, self.wire.reader
        self.was_silent = True
        self._set_timeouts(deadline)
        while not made.done:
            if wire.has_pending:
                buffers = wire.pending()
                if buffers:
                    wire.sent(self._send(buffers, deadline))
                    if made.source is not None and not made.done:
                        self._look_for_answers()
                    continue
            view = reader.wanted()
            if self.was_silent and made.source is None:
                size = self._receive_first(view, deadline)
            else:
                size = self._receive(view, deadline, whole=reader.payload_left > 0)
            if size == 0:
                raise ConnectionResetError("the shard closed it")
            self.was_silent = False
            reader.landed(size)
            if not made.done:  # However little, or slowly, comes at a time, it must end in time.
                self._set_timeouts(deadline)
        if wire.failure is not None:
            raise PathDown(str(wire.failure), sent=True)

    def _send(self, buffers: list[memoryview], deadline: Deadline) -> int:
        while True:
            try:
                if len(buffers) == 1 or self._is_tls:
                    return self._sock.send(buffers[0])
                return self._sock.sendmsg(buffers[:_MOST_BUFFERS])
            except _TRY_LATER:
                self._set_timeouts(deadline)

    def _send_all(self, buffers: list[memoryview], deadline: Deadline) -> None:
        while buffers:
            drop_first(buffers, self._send(buffers, deadline))
            if buffers:
                self._set_timeouts(deadline)

    def _receive_first(self, view: memoryview, deadline: Deadline) -> int:
        """Receives the beginning of an answer, which may be there in a moment."""
        if self._poll.is_on:
            size = self._poll.receive(self._sock, view)
            if size >= 0:
                return size
        began = time.perf_counter()
        size = self._receive(view, deadline, whole=False)
        self._poll.slept(time.perf_counter() - began)
        return size

    def _receive(self, view: memoryview, deadline: Deadline, *, whole: bool) -> int:
        if whole and len(view) >= _LONG_BYTES:  # Many of these in one call: it must end in time all the same.
            self._set_timeouts(deadline)
        while True:
            try:
                if self._is_tls:
                    return self._sock.recv_into(view)
                return self._sock.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
            except _TRY_LATER:
                self._set_timeouts(deadline)

    def _look_for_answers(self) -> None:
        """Takes what the shard has said already: credit, or a refusal that makes the rest of a Put pointless."""
        if self._is_tls:
            if not select.select([self._sock], [], [], 0)[0]:
                return
            size = self._sock.recv_into(self.wire.reader.wanted())
        else:
            try:
                size = self._sock.recv_into(self.wire.reader.wanted(), 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
        if size == 0:
            raise ConnectionResetError("the shard closed it")
        self.wire.reader.landed(size)

    def settle(self, deadline: Deadline) -> None:
        """Sends what an exchange left to say, that it was given up or a grant; a lane not clean then is closed."""
        try:
            while buffers := self.wire.pending():
                self.wire.sent(self._send(buffers, deadline))
        except (OSError, KvStoreError):
            self.close()
        if not self.wire.is_idle:
            self.close()

    def _set_timeouts(self, deadline: Deadline) -> None:
        """Lets the kernel end waits at the deadline: cheaper than asking, before each, whether there is something."""
        left_s = deadline.remaining_s()
        if left_s <= 0:
            deadline.check("waiting for the shard")
        if left_s / 2 <= self._timeout_s <= left_s + _TIMEOUT_STEP_S:
            return
        self._timeout_s = max(0.001, left_s)
        if self._is_tls:
            self._sock.settimeout(self._timeout_s)
            return
        value = _TIMEVAL.pack(int(self._timeout_s), max(1, int(self._timeout_s % 1 * 1e6)))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _receive_descriptor(self, came: list[int]) -> None:
        size, ancillary, _, _ = self._sock.recvmsg_into(
            [self.wire.reader.wanted()], socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                came.extend(numbers)
        if size == 0:
            raise ConnectionResetError("the shard closed it")
        if len(came) > 1:
            raise MalformedAnswer("more descriptors came than were asked for")
        self.wire.reader.landed(size)

    @staticmethod
    def _drop(descriptors: list[int]) -> None:
        while descriptors:
            with suppress(OSError):
                os.close(descriptors.pop())


def _rights(descriptor: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _nothing() -> None:
    return
