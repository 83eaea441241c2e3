"""`view`: blocks looked at where they are, or, where that cannot be, in a copy of the caller's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore_client.buffers import Slices
from kvstore_client.core import ClientCore
from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer, PathDown
from kvstore_client.grants import Grants
from kvstore_client.leases import ReadLease
from kvstore_client.mapping import ArenaMapping
from kvstore_client.receivers import LeaseReceiver
from kvstore_client.transports.shm import ShmTransport
from kvstore_client.views import BlockViews
from kvstore_wire.errors import LeaseExpired
from kvstore_wire.v1 import block_store_pb2 as store


class PrivateMemory:
    """Bytes of this process, where views are taken of a copy."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.bytes = memoryview(bytearray(size_bytes))
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.bytes.toreadonly(), np.uint8)

    def view(self, offset: int, length: int) -> memoryview:
        """Returns a read-only view. Raises MalformedAnswer outside of it."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise MalformedAnswer(f"{length} bytes at {offset} are outside of {self.size_bytes} bytes")
        return self.bytes.toreadonly()[offset : offset + length]


class _Lasting:
    """The life of a copy: it has no end."""

    ended = False


class AsyncViews:
    """Views in an event loop: `async with await ns.view(keys) as viewed: viewed.views[i]`."""

    def __init__(self, views: BlockViews, release: Callable[[], Awaitable[bool]]) -> None:
        self.views, self._release = views, release
        self.valid: bool | None = None

    async def close(self) -> bool:
        """Ends the lease; tells whether it was valid to this moment. If not, drop what was read. Idempotent."""
        if self.valid is None:
            found = self.views.close()
            ended = await self._release()
            self.valid = found and ended
        return self.valid

    async def __aenter__(self) -> AsyncViews:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def in_place(core: ClientCore, lease: ReadLease, deadline: Deadline) -> ArenaMapping | None:
    """Returns the shard's memory where this client may look at it, and keeps the lease alive. Raises KvStoreError."""
    if not len(lease.grants):
        return None
    transport = core.transport(lease.binding)
    if not isinstance(transport, ShmTransport):
        return None
    try:
        mapping = await transport.mapping(lease.binding.session, deadline)
    except PathDown:  # Another way brings a copy.
        return None
    if mapping is not None:
        core.keeper.keep(lease.life)
    return mapping


async def read_leased(
    core: ClientCore, lease: ReadLease, into: Sequence[Slices] | None, deadline: Deadline
) -> LeaseReceiver:
    """Reads everything under a lease, to new memory where `into` is None. Raises KvStoreError."""
    binding = lease.binding
    request = store.GetRequest(session=binding.session, namespace=binding.namespace, lease=lease.life.lease)

    async def attempt() -> LeaseReceiver:
        receiver = LeaseReceiver(lease.grants, into, core.options.verify)
        await core.transport(binding).read(request, lease.grants, receiver, deadline)
        return receiver

    return await core.by_any_path(deadline, attempt)


async def copied(core: ClientCore, lease: ReadLease, deadline: Deadline) -> BlockViews:
    """Reads everything under a lease into memory of this process and ends the lease.

    Raises KvStoreError; LeaseExpired if the lease was not valid to the end, or a part came damaged.
    """
    lengths = lease.grants.lengths
    ends = np.cumsum(lengths, dtype=np.uint64)
    memory = PrivateMemory(int(ends[-1]) if len(ends) else 0)
    grants = Grants(ends - lengths, lengths, lease.grants.checksums)
    starts = zip(grants.offsets.tolist(), lengths.tolist(), strict=True)
    targets: list[Slices] = [[memory.bytes[start : start + size]] for start, size in starts]
    if len(grants):
        receiver = await read_leased(core, lease, targets, deadline)
        if not await lease.release(corrupt=receiver.corrupt) or receiver.corrupt:
            raise LeaseExpired("the blocks changed while they were read")
    return views_of(memory, lease, grants, release=lambda _: True, life=_Lasting())


def views_of(
    memory: ArenaMapping | PrivateMemory,
    lease: ReadLease,
    grants: Grants,
    *,
    release: Callable[[Sequence[int]], bool],
    life: _Lasting | None = None,
) -> BlockViews:
    """Returns the views of a lease's parts."""
    return BlockViews(
        memory,
        states=lease.states,
        grants=grants,
        parts_per_block=lease.asked.parts_per_block,
        life=life if life is not None else lease.life,
        release=release,
    )
