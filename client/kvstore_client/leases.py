"""Leases in a caller's hands. Each ends itself when its `async with` block is left."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvstore_client.core import ClientCore
from kvstore_client.errors import MalformedAnswer, PathDown
from kvstore_client.grants import Grants
from kvstore_client.question import Question
from kvstore_client.results import PutResult, leading
from kvstore_client.session import Binding, LeaseLife
from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument, KvStoreError
from kvstore_wire.states import BlockState, PartState
from kvstore_wire.v1 import block_store_pb2 as store

HOT = bytes((BlockState.HOT,))
_CREATED, _REFUSED = bytes((PartState.CREATED,)), bytes((PartState.REFUSED,))


class _Lease:
    """What both kinds share. `life` is None where the shard granted nothing."""

    def __init__(self, core: ClientCore, asked: Question, binding: Binding | None, life: LeaseLife | None) -> None:
        self._core, self.asked, self._binding, self._life = core, asked, binding, life

    @property
    def core(self) -> ClientCore:
        """Where it was made, and where it is released."""
        return self._core

    def hand_to(self, core: ClientCore) -> None:
        """Lets another core of the same client make its calls from here on."""
        self._core = core

    @property
    def known_life(self) -> LeaseLife | None:
        """As `life`, None if nothing was granted."""
        return self._life

    @property
    def held(self) -> bool:
        """Whether something is leased and, as far as is known, still is."""
        return self._life is not None and not self._life.ended

    @property
    def life(self) -> LeaseLife:
        """Raises InvalidArgument if nothing was granted."""
        if self._life is None:
            raise InvalidArgument("holds nothing: the shard granted no part", field="lease")
        return self._life

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise InvalidArgument("holds nothing: the shard did not answer", field="lease")
        return self._binding


class ReadLease(_Lease):
    """Leased blocks. `states[i]` is HOT where block i is leased; `grants` says where its parts are.

    `failure` tells why nothing was leased. `valid` is what the release answered, None before it.
    """

    def __init__(
        self,
        core: ClientCore,
        asked: Question,
        *,
        states: bytes,
        binding: Binding | None = None,
        life: LeaseLife | None = None,
        grants: Grants | None = None,
        failure: KvStoreError | None = None,
    ) -> None:
        super().__init__(core, asked, binding, life)
        self.states = states
        self.grants = Grants.of([], [], []) if grants is None else grants
        self.failure = failure
        self.valid: bool | None = None

    @property
    def prefix_blocks(self) -> int:
        """Leading blocks under lease."""
        return leading(self.states, HOT)

    async def release(self, *, corrupt: Sequence[int] = (), deadline_ms: int | None = None) -> bool:
        """Ends the lease and tells whether it was valid to this moment; if not, drop what was read under it.

        `corrupt`: indexes of grants whose bytes did not match their checksum; the shard checks and drops them.
        False also where nothing was leased, the lease was released before, or the shard cannot be asked.
        """
        if any(not 0 <= part < len(self.grants) for part in corrupt):
            raise InvalidArgument(f"{tuple(corrupt)}", field="corrupt", limit=f"below {len(self.grants)}")
        if self._life is None or self._life.ended:
            self.valid = bool(self.valid)
            return False
        life, deadline = self._life, self._core.deadline(deadline_ms)
        life.ended = True
        parts = [store.CorruptPart(lease=0, part=part) for part in corrupt[: contract.MAX_CORRUPT_PER_CALL]]
        request = store.ReleaseRequest(session=life.session, leases=[life.lease], corrupt=parts)

        async def ask() -> bool:
            answer: store.ReleaseResponse = await self._core.unary(self.binding, "Release", request, deadline)
            if len(answer.valid) != 1:
                raise MalformedAnswer(f"Release answered {len(answer.valid)} items for 1")
            return bool(answer.valid[0])

        self.valid = await self._core.run("release", deadline, work=ask, failed=lambda _: False)
        return self.valid

    async def __aenter__(self) -> ReadLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.held:
            await self.release()


class WriteLease(_Lease):
    """Slots that wait for bytes. `created` are the indexes (key by key, part by part) of the parts to write."""

    def __init__(
        self,
        core: ClientCore,
        asked: Question,
        *,
        states: bytes,
        binding: Binding | None = None,
        life: LeaseLife | None = None,
        offsets: tuple[int, ...] = (),
        retry_after_ms: int = 0,
        failure: KvStoreError | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(core, asked, binding, life)
        self.states = states
        self.created = tuple(i for i, state in enumerate(states) if state == PartState.CREATED)
        self.offsets = offsets
        self.retry_after_ms = retry_after_ms
        self.failure = failure
        self.sizes = sizes
        self.lost: PathDown | None = None  # A write under it was cut, and the shard may not know that yet.

    async def commit(
        self, checksums: Sequence[int], parts: Sequence[int] = (), *, deadline_ms: int | None = None
    ) -> PutResult:
        """Makes filled parts visible. `parts` are indexes into `created`, empty = all; one checksum a part."""
        life, deadline = self.life, self._core.deadline(deadline_ms)
        count = len(parts) or len(self.created)
        if len(checksums) != count:
            raise InvalidArgument(f"{len(checksums)} given", field="checksums", limit=f"{count}, one a part")
        request = store.CommitRequest(session=life.session, lease=life.lease, checksums=checksums, parts=parts)

        async def ask() -> PutResult:
            answer: store.CommitResponse = await self._core.unary(self.binding, "Commit", request, deadline)
            if len(answer.states) != count:
                raise MalformedAnswer(f"Commit answered {len(answer.states)} items for {count}")
            life.ended = PartState.UNFILLED not in answer.states and count == len(self.created)
            return written(self._core, answer.states, [self.sizes[p] for p in parts or range(count)])

        return await self._core.run("commit", deadline, work=ask, failed=lambda e: PutResult.failed(count, e))

    async def abort(self, *, deadline_ms: int | None = None) -> bool:
        """Ends the lease and drops what it reserved. False where it had ended or the shard cannot be asked."""
        if self._life is None or self._life.ended:
            return False
        life, deadline = self._life, self._core.deadline(deadline_ms)
        life.ended = True
        request = store.AbortRequest(session=life.session, leases=[life.lease])

        async def ask() -> bool:
            answer: store.AbortResponse = await self._core.unary(self.binding, "Abort", request, deadline)
            return len(answer.valid) == 1 and bool(answer.valid[0])

        return await self._core.run("abort", deadline, work=ask, failed=lambda _: False)

    async def __aenter__(self) -> WriteLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.held:
            await self.abort()


def written(core: ClientCore, states: bytes, sizes: Sequence[int], retry_after_ms: int = 0) -> PutResult:
    """Counts what a write made visible and returns its answer. CREATED is no end: such a part is not stored."""
    states = states.replace(_CREATED, _REFUSED)
    stored, present = states.count(PartState.COMMITTED), states.count(PartState.PRESENT)
    stored_bytes = sum(size for state, size in zip(states, sizes, strict=True) if state == PartState.COMMITTED)
    core.stats.stored_parts += stored
    core.stats.stored_bytes += stored_bytes
    core.stats.present_parts += present
    return PutResult(states, stored, present, retry_after_ms)
