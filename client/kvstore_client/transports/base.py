"""What a transport is: it carries calls and moves bytes, and knows neither namespaces nor callers' buffers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from kvstore_client.buffers import Slices
from kvstore_client.deadline import Deadline
from kvstore_client.grants import Grants
from kvstore_client.outgoing import Outgoing
from kvstore_wire.frames import Sink
from kvstore_wire.v1 import block_store_pb2 as store


class Receiver(Sink, Protocol):
    """Takes an answer: `begin` once; then `room` and `landed`, or `feed`, until all bytes came, or `moved` once;
    `trail` where checksums come last; `finish` once. Each may raise MalformedAnswer."""

    @property
    def targets(self) -> Sequence[Slices | None]:
        """Where each part that comes goes; None: passed over. Known once begun."""

    @property
    def all_targets(self) -> Sequence[Slices] | None:
        """Where each part asked for would go, as far as that is known before."""

    @property
    def most_bytes(self) -> int:
        """Bytes that the answer can have at most."""

    def begin(self, header: store.GetHeader) -> None: ...

    def feed(self, piece: memoryview) -> None: ...

    def moved(self, corrupt: Sequence[int]) -> None: ...

    def trail(self, trailer: store.GetTrailer) -> None: ...

    def finish(self) -> None: ...


class Transport(Protocol):
    """Every method raises KvStoreError when the call fails as a whole; what fails alone is in the answer."""

    @property
    def name(self) -> str: ...

    async def unary(self, name: str, request: Message, deadline: Deadline) -> Any:
        """Calls a method that answers once, and returns its parsed answer."""

    def answers(self, name: str, request: Message, deadline: Deadline) -> AsyncGenerator[Any, None]:
        """Yields the parsed answers of a method that answers several times."""

    async def get(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        """Reads blocks by chain: lease, bytes and release in one exchange."""

    def skips_what_is_stored(self, parts: Sequence[Slices]) -> bool:
        """Whether no byte moves for parts that are stored already, so that a put need not ask for them first."""

    async def put(self, header: store.PutHeader, outgoing: Outgoing, deadline: Deadline) -> store.PutResponse:
        """Writes blocks by chain: reserve, bytes and commit in one exchange."""

    async def read(self, request: store.GetRequest, grants: Grants, receiver: Receiver, deadline: Deadline) -> None:
        """Reads what the lease in `request` grants."""

    async def write(
        self, header: store.PutHeader, offsets: tuple[int, ...], outgoing: Outgoing, deadline: Deadline
    ) -> store.PutResponse:
        """Fills the slots (at `offsets`) of the lease in `header` and commits them."""
