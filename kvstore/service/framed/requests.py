"""The requests of one connection: frames in, handlers called, frames out.

Rules
- A request is open from its first frame until both its last frame came and its answer was queued whole.
- Each request gets one answer that ends, or the connection ends. A cancelled one gets it once nothing of the request
  is touched any more.
- What a caller did wrong within a request is that request's answer. What breaks the framing ends the connection.
- Everything that answers at once is answered within the call that brought the frame, without a task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message

from kvstore.service.framed.channel import ChannelVerbs
from kvstore.service.framed.outbox import GetAnswer, Outbox
from kvstore.service.framed.puts import DISCARD, PutStream, as_error
from kvstore.service.framed.underway import Open, Pauses, Sending, SessionStream, TaskAnswer, parsed
from kvstore.service.handlers import StoreHandlers
from kvstore.service.outgoing import Reading
from kvstore.service.shell import Call, Shell
from kvstore.service.transfer import Glance, Transfers
from kvstore_wire.errors import DeadlineExceeded, InvalidArgument, KvStoreError, TableFull
from kvstore_wire.frames import END, ERROR, MAX_OPEN_REQUESTS, Frame, Sink, Verb, head
from kvstore_wire.methods import STORE_METHODS, method_name
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel

_LOG = logging.getLogger("kvstore.framed")
HELD_MESSAGES = 8  # Of the largest size: what the requests that wait may hold together.
SMALL_GET_BYTES = 256 << 10  # Up to here a Get is answered in one go, without a lease.
_STREAMS = frozenset((Verb.PUT, Verb.SESSION))  # Requests of more than one frame.
_NAMES = {verb: name for name, verb in ((n, Verb[n.upper()]) for n in STORE_METHODS)}


class Requests:
    """The open requests of one connection; a receiver of frames. `wake` is called when there is something to send.

    `room_now`: bytes that `send_now` may send in this turn.
    """

    def __init__(
        self,
        shell: Shell,
        handlers: StoreHandlers,
        transfers: Transfers,
        *,
        outbox: Outbox,
        verbs: ChannelVerbs,
        wake: Callable[[], None],
        send_now: Callable[[list[bytes | memoryview]], int],
        room_now: Callable[[], int],
    ) -> None:
        self._shell, self._handlers, self._transfers = shell, handlers, transfers
        self._outbox, self._verbs, self._wake = outbox, verbs, wake
        self._send_now, self._room_now = send_now, room_now
        self._open: dict[int, Open | None] = {}
        self._sync: dict[int, Callable[[bytes, Call], Message]] = {}
        for name in ("Attach", "Match", "Renew", "Release", "Commit", "Abort", "Over"):
            self._sync[Verb[name.upper()]] = self._bound(name)
        self._pauses = Pauses(shell.failpoints, wake)
        self.said_goodbye = self._over = False
        self.frame_count = self._held_bytes = 0

    @property
    def is_receiving(self) -> bool:
        """Whether a Put is under way, so that silence of the peer holds slots."""
        return any(isinstance(o, PutStream) and o.is_receiving for o in self._open.values())

    def frame(self, frame: Frame, message: memoryview) -> Sink | None:
        """Takes one frame. Raises InvalidArgument for what breaks the framing."""
        self.frame_count += 1
        verb = frame.verb
        if self.said_goodbye:
            raise InvalidArgument("nothing follows a GOODBYE", field="frame.verb")
        if frame.request in self._open and verb in _STREAMS:
            return self._continue(frame, message)
        self._check(frame)
        if verb == Verb.RELEASE and not frame.request:
            self._release_unasked(frame, message)
        elif verb in self._sync:
            self._answer_now(frame, message)
        elif verb == Verb.GET:
            self._get(frame, message)
        elif verb == Verb.ACQUIRE:
            self._acquire(frame, message)
        elif verb == Verb.RESERVE:
            self._reserve(frame, message)
        elif verb == Verb.PUT:
            return self._begin_put(frame, message)
        elif verb == Verb.SESSION:
            self._begin_session(frame, message)
        elif verb in (Verb.DELETE, Verb.EXPLAIN):
            self._answer_later(frame, message)
        elif verb == Verb.CANCEL:
            self._cancel(frame.request)
        elif verb == Verb.CREDIT:
            self._grant(message)
        elif verb == Verb.GOODBYE:
            self.said_goodbye = True
        elif verb == Verb.UNREGISTER_REGION:
            self._start(frame, self._unregister(frame, bytes(message)))
        else:
            self._channel_verb(frame, message)
        return None

    def payload_landed(self, frame: Frame) -> None:
        opened = self._open.get(frame.request)
        if isinstance(opened, PutStream) and frame.ends:
            opened.ended()
        elif frame.ends and frame.request in self._open and opened is None:
            del self._open[frame.request]
        granted = self._verbs.consumed(frame.payload_bytes)
        if granted:
            self._outbox.add(head(Verb.CREDIT, 0, channel.Credit(bytes=granted).SerializeToString(), flags=END))
            self._wake()

    def close(self) -> None:
        """Drops every request."""
        self._over = True
        opened, self._open = self._open, {}
        for request in opened.values():
            if request is not None:
                request.close()

    # -- frames --------------------------------------------------------------------------------------------------

    def _check(self, frame: Frame) -> None:
        if not self._verbs.greeted and frame.verb not in (Verb.HELLO, Verb.GOODBYE):
            raise InvalidArgument("the first frame must be HELLO", field="frame.verb", limit=f"{int(Verb.HELLO)}")
        if frame.flags & ERROR:
            raise InvalidArgument("requests carry no error", field="frame.flags", limit=f"{END}")
        if frame.payload_bytes and frame.verb != Verb.PUT:
            raise InvalidArgument(f"verb {frame.verb} carries none", field="frame.payload_bytes", limit="0")
        if frame.verb in (Verb.CANCEL, Verb.CREDIT, Verb.GOODBYE):
            return
        if frame.verb == Verb.RELEASE and not frame.request and frame.ends:
            return
        if not frame.request:
            raise InvalidArgument("is 0", field="frame.request", limit="at least 1")
        if frame.request in self._open:
            raise InvalidArgument(f"{frame.request} is in use", field="frame.request")
        if len(self._open) >= MAX_OPEN_REQUESTS:
            limit = f"{MAX_OPEN_REQUESTS}"
            raise InvalidArgument(f"{len(self._open)} requests are open", field="frame.request", limit=limit)
        if not frame.ends and frame.verb not in _STREAMS:
            raise InvalidArgument(f"verb {frame.verb} has one frame", field="frame.flags", limit=f"{END}")

    def _continue(self, frame: Frame, message: memoryview) -> Sink | None:
        opened = self._open[frame.request]
        if frame.flags & ERROR:
            raise InvalidArgument("requests carry no error", field="frame.flags", limit=f"{END}")
        if isinstance(opened, PutStream) and frame.verb == Verb.PUT and not opened.has_ended:
            return opened.frame(frame, message)
        if isinstance(opened, SessionStream) and frame.verb == Verb.SESSION and not opened.has_ended:
            if frame.payload_bytes:
                raise InvalidArgument(f"verb {frame.verb} carries none", field="frame.payload_bytes", limit="0")
            opened.frame(frame, bytes(message))
            return None
        if opened is None:  # Refused already: the rest of what was on its way.
            if frame.ends and not frame.payload_bytes:
                del self._open[frame.request]
            return DISCARD
        raise InvalidArgument(f"{frame.request} is in use", field="frame.request")

    def _cancel(self, request: int) -> None:
        """Drops a request. Where nobody gave its answer yet, an error ends it, so that both sides forget it."""
        opened = self._open.get(request)
        if opened is None:  # Not known any more, or refused already.
            self._open.pop(request, None)
        elif opened.close():
            self._open.pop(request, None)
            self._outbox.add(head(opened.verb, request, _cancelled().to_detail().SerializeToString(), flags=ERROR))

    def _grant(self, message: memoryview) -> None:
        self._outbox.credit += parsed(channel.Credit, bytes(message)).bytes
        self._wake()

    # -- answers at once -----------------------------------------------------------------------------------------

    def _bound(self, name: str) -> Callable[[bytes, Call], Message]:
        handler: Callable[[Any, Call], Message] = getattr(self._handlers, method_name(name))
        kind = STORE_METHODS[name].request
        return lambda raw, call: handler(parsed(kind, raw), call)

    def _answer_now(self, frame: Frame, message: memoryview) -> None:
        name = _NAMES[Verb(frame.verb)]
        if self._shell.failpoints.any_armed(f"before.{name}", f"after.{name}"):
            self._answer_later(frame, message)
            return
        started = time.perf_counter_ns()
        try:
            answer = self._sync[frame.verb](bytes(message), self._call(frame))
        except Exception as error:  # noqa: BLE001 - the outermost place of the door
            self._refuse(frame, error)
        else:
            self._outbox.add(head(frame.verb, frame.request, answer.SerializeToString(), flags=END))
        self._shell.latencies.add(name, time.perf_counter_ns() - started)

    def _release_unasked(self, frame: Frame, message: memoryview) -> None:
        """Ends leases without telling anybody: their reader knows already that what it read is right."""
        started = time.perf_counter_ns()
        try:
            self._sync[frame.verb](bytes(message), self._call(frame))
        except KvStoreError as error:
            _LOG.debug("a release of %s: %s", self._verbs.peer, error)
        except Exception:  # noqa: BLE001 - the outermost place of the door
            _LOG.exception("a release of %s failed", self._verbs.peer)
        self._shell.latencies.add("Release", time.perf_counter_ns() - started)

    def _acquire(self, frame: Frame, message: memoryview) -> None:
        try:
            request = parsed(pb.AcquireRequest, bytes(message))
            if self._handlers.acquire_waits(request) or self._shell.failpoints.any_armed("before.Acquire"):
                self._start(frame, self._acquire_later(frame, request))
                return
            started = time.perf_counter_ns()
            answer = self._handlers.acquire_now(request, self._call(frame))
            self._outbox.add(head(frame.verb, frame.request, answer.SerializeToString(), flags=END))
            self._shell.latencies.add("Acquire", time.perf_counter_ns() - started)
        except Exception as error:  # noqa: BLE001 - the outermost place of the door
            self._refuse(frame, error)

    def _reserve(self, frame: Frame, message: memoryview) -> None:
        started = time.perf_counter_ns()
        try:
            request = parsed(pb.ReserveRequest, bytes(message))
            failpoints = self._shell.failpoints
            if self._handlers.reserve_waits(request) or failpoints.any_armed("before.Reserve", "after.Reserve"):
                self._start(frame, self._answered(frame, "Reserve", request, self._handlers.reserve_in_time))
                return
            answer = self._handlers.reserve(request, self._call(frame))
            self._outbox.add(head(frame.verb, frame.request, answer.SerializeToString(), flags=END))
        except Exception as error:  # noqa: BLE001 - the outermost place of the door
            self._refuse(frame, error)
        self._shell.latencies.add("Reserve", time.perf_counter_ns() - started)

    def _get(self, frame: Frame, message: memoryview) -> None:
        started = time.perf_counter_ns()
        try:
            request = parsed(pb.GetRequest, bytes(message))
            failpoints = self._shell.failpoints
            if not self._transfers.is_immediate(request) or failpoints.any_armed("before.Get"):
                self._start(frame, self._get_later(frame, request, started))
                return
            if not failpoints.any_armed("get.chunk"):
                most_bytes = max(SMALL_GET_BYTES, self._room_now() if self._outbox.is_empty else 0)
                glance = self._transfers.glance(request, min(most_bytes, self._outbox.room))
                if glance is not None:
                    self._send_at_once(frame, request, glance, started)
                    return
            reading = self._transfers.read_now(request, self._call(frame))
        except Exception as error:  # noqa: BLE001 - the outermost place of the door
            self._refuse(frame, error)
            self._shell.latencies.add("Get", time.perf_counter_ns() - started)
        else:
            self._send(frame, reading, started)

    def _send_at_once(self, frame: Frame, request: pb.GetRequest, glance: Glance, started: int) -> None:
        """Answers a Get whose bytes are not leased: sends them now. What the socket does not take is copied, where it
        is little, and else leased."""
        size = glance.size_bytes
        made = head(Verb.GET, frame.request, glance.message, flags=END, payload_bytes=size)
        self._outbox.credit -= size
        sent = self._send_now([made, *glance.pieces]) if self._outbox.is_empty else 0
        left = len(made) + size - sent
        if left > SMALL_GET_BYTES:
            with suppress(TableFull):
                reading = self._transfers.keep(request, glance, self._call(frame))
                self._outbox.add_begun(self._answer(frame, reading, started), size, sent)
                return
        if left:
            self._outbox.add(b"".join([made, *glance.pieces])[sent:])
        self._shell.latencies.add("Get", time.perf_counter_ns() - started)

    def _send(self, frame: Frame, reading: Reading, started: int) -> None:
        self._outbox.add_answer(self._answer(frame, reading, started))

    def _answer(self, frame: Frame, reading: Reading, started: int) -> GetAnswer:
        """Opens the answer of a Get."""

        def ended() -> None:
            self._open.pop(frame.request, None)
            self._pauses.forget(answer)
            self._shell.latencies.add("Get", time.perf_counter_ns() - started)

        answer = GetAnswer(frame.request, reading, may_go=self._pauses.may_go, ended=ended)
        self._open[frame.request] = Sending(self._outbox, answer)
        return answer

    def _channel_verb(self, frame: Frame, message: memoryview) -> None:
        try:
            answer, descriptor = self._verbs.answer(frame.verb, bytes(message))
        except Exception as error:  # noqa: BLE001 - the outermost place of the door
            self._refuse(frame, error)
            return
        made = head(frame.verb, frame.request, answer.SerializeToString(), flags=END)
        if descriptor is None:
            self._outbox.add(made)
        else:
            self._outbox.add_with_descriptor(made, descriptor)

    # -- answers later -------------------------------------------------------------------------------------------

    def _answer_later(self, frame: Frame, message: memoryview) -> None:
        name = _NAMES[Verb(frame.verb)]
        try:
            request = parsed(STORE_METHODS[name].request, bytes(message))
        except KvStoreError as error:
            self._refuse(frame, error)
            return
        self._start(frame, self._answered(frame, name, request, getattr(self._handlers, method_name(name))))

    async def _answered(self, frame: Frame, name: str, request: Message, handler: Callable[..., Any]) -> None:
        started, call = time.perf_counter_ns(), self._call(frame)
        try:
            await self._shell.failpoints.hit(f"before.{name}")
            made = handler(request, call)
            answer = await made if inspect.isawaitable(made) else made
            await self._shell.failpoints.hit(f"after.{name}")
            self._outbox.add(head(frame.verb, frame.request, answer.SerializeToString(), flags=END))
        finally:
            self._shell.latencies.add(name, time.perf_counter_ns() - started)

    async def _acquire_later(self, frame: Frame, request: pb.AcquireRequest) -> None:
        started = time.perf_counter_ns()
        try:
            await self._shell.failpoints.hit("before.Acquire")
            async for answer in self._handlers.acquire(request, self._call(frame)):
                flags = END if answer.settled else 0
                self._outbox.add(head(frame.verb, frame.request, answer.SerializeToString(), flags=flags))
                self._wake()
        finally:
            self._shell.latencies.add("Acquire", time.perf_counter_ns() - started)

    async def _unregister(self, frame: Frame, message: bytes) -> None:
        answer = await self._verbs.unregister(message)
        self._outbox.add(head(frame.verb, frame.request, answer.SerializeToString(), flags=END))

    async def _get_later(self, frame: Frame, request: pb.GetRequest, started: int) -> None:
        await self._shell.failpoints.hit("before.Get")
        reading = await self._transfers.read(request, self._call(frame))
        self._send(frame, reading, started)

    def _start(self, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        """Runs the rest of a request as a task; whatever it raises is the answer."""
        most_bytes = HELD_MESSAGES * self._shell.limits.max_message_bytes
        if self._held_bytes + frame.message_bytes > most_bytes:
            work.close()
            limit = f"{most_bytes} bytes"
            self._refuse(frame, TableFull(f"{self._held_bytes} bytes of requests wait", field="message", limit=limit))
            return
        self._held_bytes += frame.message_bytes
        task = TaskAnswer(frame.verb, asyncio.ensure_future(work))
        self._open[frame.request] = task

        def done(finished: asyncio.Task[None]) -> None:
            self._held_bytes -= frame.message_bytes
            if self._open.get(frame.request) is task:
                del self._open[frame.request]
            self._ended(frame, finished)

        task.task.add_done_callback(done)

    # -- streams -------------------------------------------------------------------------------------------------

    def _begin_put(self, frame: Frame, message: memoryview) -> Sink | None:
        def answered(answer: bytes, flags: int) -> None:
            self._outbox.add(head(Verb.PUT, frame.request, answer, flags=flags))
            self._wake()

        def ended(*, came: bool) -> None:
            """The request is over; None in its place takes what is still on its way."""
            if frame.request in self._open:
                if came:
                    del self._open[frame.request]
                else:
                    self._open[frame.request] = None

        stream = PutStream(self._shell, self._transfers, answered=answered, ended=ended)
        self._open[frame.request] = stream
        return stream.frame(frame, message)

    def _begin_session(self, frame: Frame, message: memoryview) -> None:
        stream = SessionStream()
        self._open[frame.request] = stream

        async def run() -> None:
            await self._shell.failpoints.hit("before.Session")
            async for notice in self._handlers.session(stream.pulses(), self._call(frame)):
                self._outbox.add(head(Verb.SESSION, frame.request, notice.SerializeToString()))
                self._wake()
            self._outbox.add(head(Verb.SESSION, frame.request, flags=END))

        def done(finished: asyncio.Task[None]) -> None:
            if self._open.get(frame.request) is stream:
                if stream.has_ended:
                    del self._open[frame.request]
                else:
                    self._open[frame.request] = None  # Takes what is still on its way.
            self._ended(frame, finished)

        stream.frame(frame, bytes(message))
        stream.task = asyncio.ensure_future(run())
        stream.task.add_done_callback(done)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _call(self, frame: Frame) -> Call:
        deadline = self._shell.now() + frame.timeout_ms / 1000 if frame.timeout_ms else None
        return Call(deadline, self._verbs.peer)

    def _ended(self, frame: Frame, task: asyncio.Task[None]) -> None:
        """Gives the answer of a task that gave none itself."""
        error = _cancelled() if task.cancelled() else task.exception()
        if error is not None and not self._over:
            self._refuse(frame, error)
        self._wake()

    def _refuse(self, frame: Frame, error: BaseException) -> None:
        made = as_error(frame.verb, error)
        self._outbox.add(head(frame.verb, frame.request, made.to_detail().SerializeToString(), flags=ERROR))


def _cancelled() -> DeadlineExceeded:
    return DeadlineExceeded("the caller cancelled it")
