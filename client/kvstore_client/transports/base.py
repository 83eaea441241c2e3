"""What a transport is: it moves the bytes of one call, and knows neither namespaces nor callers' buffers."""

from __future__ import annotations

from typing import Protocol

from kvstore_client.deadline import Deadline
from kvstore_client.grants import Grants
from kvstore_client.outgoing import Outgoing
from kvstore_wire.v1 import block_store_pb2 as store


class Receiver(Protocol):
    """Takes an answer: `begin` once, `feed` for every piece in order, `finish` once. Each may raise MalformedAnswer."""

    def begin(self, header: store.GetHeader) -> None: ...

    def feed(self, piece: memoryview) -> None: ...

    def finish(self) -> None: ...


class Transport(Protocol):
    """Every method raises KvStoreError when the call fails as a whole; what fails alone is in the answer."""

    @property
    def name(self) -> str: ...

    async def get(self, request: store.GetRequest, receiver: Receiver, deadline: Deadline) -> None:
        """Reads blocks by chain: lease, bytes and release in one exchange."""

    async def put(self, header: store.PutHeader, outgoing: Outgoing, deadline: Deadline) -> store.PutResponse:
        """Writes blocks by chain: reserve, bytes and commit in one exchange."""

    async def read(self, request: store.GetRequest, grants: Grants, receiver: Receiver, deadline: Deadline) -> None:
        """Reads what the lease in `request` grants."""

    async def write(
        self, header: store.PutHeader, offsets: tuple[int, ...], outgoing: Outgoing, deadline: Deadline
    ) -> store.PutResponse:
        """Fills the slots (at `offsets`) of the lease in `header` and commits them."""
