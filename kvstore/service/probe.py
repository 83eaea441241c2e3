"""Health by doing: a real put and get through the shard's own handlers and arena.

A port that answers while data calls hang is the worst kind of healthy. The probe reserves, fills, commits, acquires,
compares and deletes one block in a namespace of its own; the shard is ready only while that works in time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable

import xxhash

from kvstore.service.handlers import StoreHandlers
from kvstore.service.shell import Call, Shell
from kvstore.service.transfer import InlineTransfer, Payload
from kvstore_wire.errors import KvStoreError
from kvstore_wire.limits import PROTOCOL_VERSION
from kvstore_wire.namespace import Chains, Kind, NamespaceSpec
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from kvstore_wire.waiting import within

_LOG = logging.getLogger("kvstore.probe")
PROBE_TENANT = "kvstore.probe"
_SIZE = 4096
_SPEC = NamespaceSpec(
    name="probe",
    tenant=PROBE_TENANT,
    model="probe",
    kind=Kind.OPAQUE,
    chains=Chains.NONE,
    part_bytes=_SIZE,
    key_scheme="probe.v1",
)


class Probe:
    """Runs `once` at an interval and reports changes of health."""

    def __init__(
        self,
        shell: Shell,
        handlers: StoreHandlers,
        transfer: InlineTransfer,
        *,
        interval_s: float,
        timeout_s: float,
        report: Callable[[bool], None],
    ) -> None:
        self._shell, self._handlers, self._transfer = shell, handlers, transfer
        self._interval_s, self._timeout_s, self._report = interval_s, timeout_s, report
        self._session = b""
        self._namespace = 0

    async def run(self) -> None:
        """Probes until cancelled, an interval from now for the first time."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def check(self) -> None:
        """Probes once and reports the outcome; a shard that drains is not probed, since it refuses new work."""
        if self._shell.draining:
            return
        started = self._shell.now()
        try:
            await within(self._timeout_s, self.once())
            if self._shell.now() - started > self._timeout_s:  # A loop that stands still cannot strike in time.
                raise asyncio.TimeoutError
        except (KvStoreError, AssertionError, asyncio.TimeoutError) as error:
            _LOG.warning("probe failed: %s: %s", type(error).__name__, error)
            self._report(False)
        else:
            self._report(True)

    async def once(self) -> None:
        """Puts and gets one block. Raises KvStoreError, or AssertionError where the answer is not what was put.

        A full arena is not ill: refusing a write in time is what it should do.
        """
        await self._shell.failpoints.hit("before.Put")
        if not self._session:
            self._open()
        key, value, call = os.urandom(32), os.urandom(_SIZE), Call()
        answer = await self._transfer.put(_put(self._session, self._namespace, key, value), call)
        if answer.states[0] == types.PART_STATE_FULL:
            return
        assert answer.states[0] == types.PART_STATE_COMMITTED, f"put answered state {answer.states[0]}"
        await self._shell.failpoints.hit("before.Get")
        chain = types.Chain(keys=[key])
        request = pb.GetRequest(session=self._session, namespace=self._namespace, chain=chain)
        got = b""
        async for out in self._transfer.get(request, call):
            if isinstance(out, Payload):
                got += b"".join(out.pieces)
        assert got == value or not got, "get returned other bytes than were put"
        delete = pb.DeleteRequest(session=self._session, namespace=self._namespace, keys=[key])
        await self._handlers.delete(delete, call)

    def _open(self) -> None:
        request = pb.AttachRequest(
            min_version=PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, client="probe", namespace=_SPEC.to_message()
        )
        answer = self._handlers.attach(request, Call())
        self._session, self._namespace = answer.session, answer.namespace
        self._shell.session(self._session).open_until = None


async def _put(session: bytes, namespace: int, key: bytes, value: bytes) -> AsyncIterator[pb.PutRequest | memoryview]:
    chain = types.Chain(keys=[key])
    yield pb.PutRequest(header=pb.PutHeader(session=session, namespace=namespace, chain=chain, lengths=[len(value)]))
    yield memoryview(value)
    yield pb.PutRequest(trailer=pb.PutTrailer(checksums=[xxhash.xxh3_64_intdigest(value)]))
