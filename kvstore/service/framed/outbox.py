"""What one connection has to send: whole answers first, then the payload of Gets, a frame of each in turn.

No I/O here: `pending` gives buffers, `sent` takes away what went out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.service.outgoing import Reading
from kvstore_wire.errors import KvStoreError
from kvstore_wire.frames import END, ERROR, Verb, head
from kvstore_wire.v1 import block_store_pb2 as pb

_ZEROS = memoryview(bytes(1 << 20))
_MOST_BUFFERS = 512  # Below the kernel's limit of 1024 for one call.


@dataclass(frozen=True)
class _WithDescriptor:
    data: bytes
    descriptor: int


class GetAnswer:
    """The answer of one Get, frame by frame. `ended` is called once, when its last frame went out or it was dropped.

    `may_go` is asked before each frame; where it says no, the answer waits for the outbox to be looked at again.
    """

    def __init__(
        self, request: int, reading: Reading, *, may_go: Callable[[GetAnswer], bool], ended: Callable[[], None]
    ) -> None:
        self.request, self._reading = request, reading
        self._may_go, self._ended = may_go, ended
        self.fault: KvStoreError | None = None  # Fails the answer with its next frame.
        self._begun = self.done = False
        self.last_made = False  # The frame that ends the answer was made.
        self.cancelled = False

    @property
    def alive(self) -> bool:
        """Whether the arena still holds what was taken from it."""
        return self._reading.alive

    def is_ready(self, credit: int) -> bool:
        """Whether its next frame can be made now."""
        return (credit > 0 or not self._reading.left_bytes or not self._reading.alive) and self._may_go(self)

    def frame(self, most: int) -> tuple[bytes, list[memoryview]]:
        """Returns the next frame: its head and its payload, at most `most` bytes. Never raises."""
        message = b"" if self._begun else pb.GetResponse(header=self._reading.header).SerializeToString()
        self._begun = True
        try:
            if self.fault is not None:
                raise self.fault
            if self._reading.left_bytes:
                pieces, size = self._reading.take(most)
            else:
                self._reading.check()
                pieces, size = [], 0
        except KvStoreError as error:
            self.last_made = True
            self.close()
            return head(Verb.GET, self.request, error.to_detail().SerializeToString(), flags=ERROR), []
        last = not self._reading.left_bytes
        trailer = self._reading.trailer
        if last and trailer is not None and not message and not size:
            self.last_made = True
            self.close()
            trailing = pb.GetResponse(trailer=trailer).SerializeToString()
            return head(Verb.GET, self.request, trailing, flags=END), []
        ends = last and trailer is None
        if last and trailer is not None:
            self._reading.take(1)  # Lets the last part's checksum be noted.
        flags = END if ends else 0
        made = head(Verb.GET, self.request, message, flags=flags, payload_bytes=size), pieces
        if ends:
            self.last_made = self.done = True  # Its lease must last until the payload has gone out: see Outbox.sent.
        return made

    def close(self) -> None:
        """Ends the Get. Idempotent."""
        self.done = True
        ended, self._ended = self._ended, _nothing
        self._reading.close()
        ended()


def _nothing() -> None:
    return


class Outbox:
    """The outgoing side of one connection. `credit` is the payload that the peer is ready to take."""

    def __init__(self, *, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self.credit = 0
        self._whole: deque[bytes | _WithDescriptor] = deque()
        self._answers: deque[GetAnswer] = deque()
        self._buffers: list[memoryview] = []
        self._payload_buffers = 0  # So many of the last `_buffers` are payload of `_sending`.
        self._sending: GetAnswer | None = None
        self.broken = False  # A frame that claims to be the last cannot be finished: only a cut tells the peer.
        self.descriptor: int | None = None  # Goes with the next buffer.
        self.queued_bytes = 0  # In whole answers.

    def add(self, frame: bytes) -> None:
        """Queues a whole frame."""
        self._whole.append(frame)
        self.queued_bytes += len(frame)

    def add_with_descriptor(self, frame: bytes, descriptor: int) -> None:
        """Queues a whole frame that carries a descriptor; the caller keeps owning it."""
        self._whole.append(_WithDescriptor(frame, descriptor))
        self.queued_bytes += len(frame)

    def add_answer(self, answer: GetAnswer) -> None:
        self._answers.append(answer)

    def add_begun(self, answer: GetAnswer, size: int, sent: int) -> None:
        """Queues an answer of one frame, with `size` bytes of payload, of which so many bytes went out already.

        Only where the outbox is empty.
        """
        made, pieces = answer.frame(size)
        self._buffers, self._payload_buffers, self._sending = [memoryview(made), *pieces], len(pieces), answer
        self.sent(sent)

    def drop_answer(self, answer: GetAnswer) -> None:
        """Takes out an answer that nobody waits for; the frame under way is finished, with zeros from here on."""
        answer.cancelled = True
        if answer in self._answers:
            self._answers.remove(answer)
        answer.close()

    @property
    def between_frames(self) -> bool:
        """Whether no frame is under way, so that another may be said beside the order."""
        return not self._buffers

    @property
    def room(self) -> int:
        """Payload that one frame may carry now."""
        return min(self._frame_bytes, self.credit)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send, not even when the peer grants more."""
        return not (self._buffers or self._whole or self._answers)

    def pending(self) -> list[memoryview]:
        """Returns the buffers to send next, empty if there is nothing to send now."""
        if self._buffers:
            self._check_alive()
        elif self._whole or self._answers:
            self._fill()
        return self._buffers if len(self._buffers) <= _MOST_BUFFERS else self._buffers[:_MOST_BUFFERS]

    def sent(self, size: int) -> None:
        """Takes away the first `size` bytes of `pending`."""
        buffers, at = self._buffers, 0
        self.descriptor = None
        while at < len(buffers) and size >= len(buffers[at]):
            size -= len(buffers[at])
            at += 1
        del buffers[:at]
        if size:
            buffers[0] = buffers[0][size:]
        self._payload_buffers = min(self._payload_buffers, len(buffers))
        if not buffers and self._sending is not None:
            answer, self._sending = self._sending, None
            if answer.done:
                answer.close()

    def close(self) -> None:
        """Ends every answer."""
        if self._sending is not None:
            self._sending.close()
        for answer in self._answers:
            answer.close()
        self._answers.clear()
        self._whole.clear()
        self._buffers = []

    def _fill(self) -> None:
        while self._whole and len(self._buffers) < _MOST_BUFFERS // 2:
            first = self._whole[0]
            if isinstance(first, _WithDescriptor):
                if not self._buffers:
                    self._whole.popleft()
                    self.queued_bytes -= len(first.data)
                    self._buffers.append(memoryview(first.data))
                    self.descriptor = first.descriptor
                return
            self._whole.popleft()
            self.queued_bytes -= len(first)
            self._buffers.append(memoryview(first))
        self._fill_from_answers()

    def _fill_from_answers(self) -> None:
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            if not answer.is_ready(self.credit):
                self._answers.append(answer)
                continue
            made, pieces = answer.frame(min(self._frame_bytes, max(1, self.credit)))
            self._buffers.append(memoryview(made))
            self._buffers.extend(pieces)
            self._payload_buffers = len(pieces)
            self.credit -= sum(map(len, pieces))
            if not answer.done:
                self._answers.append(answer)
            if pieces:
                self._sending = answer
                return
            if answer.done:
                answer.close()

    def _check_alive(self) -> None:
        """The rest of a frame whose lease has ended is sent as zeros: its slots may hold somebody else's bytes."""
        if self._payload_buffers and self._sending is not None and not self._sending.alive:
            self.broken = self._sending.last_made and not self._sending.cancelled
            for i in range(len(self._buffers) - self._payload_buffers, len(self._buffers)):
                self._buffers[i] = _zeros(len(self._buffers[i]))


def _zeros(size: int) -> memoryview:
    return _ZEROS[:size] if size <= len(_ZEROS) else memoryview(bytes(size))
