"""Put: small calls in one exchange; large ones reserve first, so that what is stored already is not sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from kvstore_client.batches import check_most, sized_runs
from kvstore_client.buffers import Slices, size_of
from kvstore_client.core import MAX_PATH_CHANGES, ClientCore, NeedsLoop
from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer, PathDown
from kvstore_client.leases import WriteLease, written
from kvstore_client.outgoing import Outgoing
from kvstore_client.question import Hint, Question
from kvstore_client.reading import bounded_wait_ms, hint_message
from kvstore_client.receivers import check_states
from kvstore_client.results import PutResult
from kvstore_client.session import Binding, LeaseLife
from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument, KvStoreError, LeaseExpired, UnknownNamespace, UnknownSession
from kvstore_wire.namespace import Kind
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types

# Below this one exchange costs less than the second round trip that asking first would take.
INLINE_PUT_BYTES = 1 << 20
Attempt: TypeAlias = "Callable[[Binding], Awaitable[store.PutResponse]]"
ENDS_CHAIN = frozenset(
    (PartState.REFUSED, PartState.FULL, PartState.QUOTA, PartState.TOO_LARGE, PartState.DRAINING, PartState.BEYOND)
)


class ReserveCall:
    """One Reserve, repeatable: no bytes have moved. A lease that cannot be handed on is ended on the side."""

    def __init__(
        self,
        core: ClientCore,
        asked: Question,
        *,
        sizes: Sequence[int],
        lease_ms: int,
        hint: Hint | None,
        deadline: Deadline,
        wait_ms: int = 0,
    ) -> None:
        self._core, self._asked, self._sizes = core, asked, sizes
        self._lease_ms, self._hint, self._deadline = lease_ms, hint, deadline
        self._wait_ms = wait_ms

    async def __call__(self, binding: Binding) -> WriteLease:
        limits = binding.limits
        check_most("keys", self._asked.block_count, limits.max_blocks)
        check_most("parts", self._asked.parts_per_block, limits.max_parts_per_block or self._asked.parts_per_block)
        check_most("lease_ms", self._lease_ms, limits.max_lease_ms)
        check_most("wait_ms", self._wait_ms, limits.max_wait_ms)
        answer: store.ReserveResponse = await self._core.unary(
            binding, "Reserve", self._request(binding), self._deadline
        )
        try:
            return self._lease(binding, answer)
        except MalformedAnswer:
            if answer.HasField("lease"):
                self._core.background(aborted(self._core, binding, answer.lease))
            raise

    def _request(self, binding: Binding) -> store.ReserveRequest:
        asked = self._asked
        return store.ReserveRequest(
            session=binding.session,
            namespace=binding.namespace,
            chain=asked.chain_message(),
            parts=asked.parts_message(),
            lengths=_lengths(asked, self._sizes),
            lease_ms=self._lease_ms,
            hint=hint_message(binding, self._hint),
            wait_ms=bounded_wait_ms(self._wait_ms, self._deadline),
        )

    def _lease(self, binding: Binding, answer: store.ReserveResponse) -> WriteLease:
        asked = self._asked
        check_states(answer.states, asked.block_count * asked.parts_per_block, highest=PartState.LOST)
        created = answer.states.count(PartState.CREATED)
        if len(answer.offsets) != created or (created and not answer.HasField("lease")):
            raise MalformedAnswer(f"{len(answer.offsets)} slots for {created} parts")
        life = LeaseLife(binding.session, answer.lease) if answer.HasField("lease") else None
        if life is not None:
            self._core.keeper.watch(life)
        sizes = tuple(self._sizes[i] for i, state in enumerate(answer.states) if state == PartState.CREATED)
        return WriteLease(
            self._core,
            asked,
            states=answer.states,
            binding=binding,
            life=life,
            offsets=tuple(answer.offsets),
            retry_after_ms=answer.retry_after_ms,
            sizes=sizes,
        )


class PutCall:
    """One put of the caller, over as many exchanges as it takes. What was not committed is never told as stored."""

    def __init__(self, core: ClientCore, asked: Question, *, values: list[Slices], hint: Hint | None) -> None:
        self._core, self._asked, self._values, self._hint = core, asked, values, hint
        self._sizes = [size_of(slices) for slices in values]
        self._states = bytearray(len(values))
        self._stored = self._present = self._retry_after_ms = 0

    async def run(self, deadline: Deadline) -> PutResult:
        asked, parts = self._asked, self._asked.parts_per_block
        if not self._values:
            return self.result(None)
        limits = await self._core.limits(asked.spec, deadline)
        check_most("parts", parts, limits.max_parts_per_block or parts)
        blocks = [sum(self._sizes[i : i + parts]) for i in range(0, len(self._sizes), parts)]
        most = min(limits.max_blocks, max(1, contract.MAX_CALL_PARTS // parts))
        cuts = list(sized_runs(blocks, most=most, most_bytes=limits.max_call_bytes, field="values"))
        for first, last in cuts:
            await self._piece(first, last, deadline)
            states = self._states[first * parts : last * parts]
            if asked.linked and not ENDS_CHAIN.isdisjoint(states):
                self._states[last * parts :] = bytes((PartState.BEYOND,)) * (len(self._states) - last * parts)
                break
        return self.result(None)

    def result(self, failure: KvStoreError | None) -> PutResult:
        """Returns what is known to be stored so far; everything else is refused."""
        return PutResult(bytes(self._states), self._stored, self._present, self._retry_after_ms, failure)

    def _skips_what_is_stored(self, values: list[Slices]) -> bool:
        binding = self._core.keeper.ready(self._asked.spec)
        try:
            return binding is not None and self._core.transport(binding).skips_what_is_stored(values)
        except PathDown:
            return False

    async def _piece(self, first: int, last: int, deadline: Deadline) -> None:
        parts = self._asked.parts_per_block
        asked = self._asked.piece(first, last)
        values = self._values[first * parts : last * parts]
        sizes = self._sizes[first * parts : last * parts]
        if sum(sizes) <= INLINE_PUT_BYTES or self._skips_what_is_stored(values):
            done = await put_chain(self._core, asked, values=values, hint=self._hint, deadline=deadline)
            self._add(first * parts, done)
            return
        reserve = ReserveCall(
            self._core, asked, sizes=sizes, lease_ms=self._core.options.lease_ms, hint=self._hint, deadline=deadline
        )
        changes = 0
        while True:
            lease = await self._core.safe(asked.spec, deadline, reserve)
            try:
                done = await self._filled(lease, values, deadline)
                break
            except NeedsLoop:
                await aborted(self._core, lease.binding, lease.life.lease)
                raise
            except KvStoreError as error:
                changes += 1
                if not isinstance(error, PathDown) or changes > MAX_PATH_CHANGES or deadline.passed:
                    self._add_reserved(first * parts, lease)
                    raise
                self._core.stats.path_changes += 1
        self._add_reserved(first * parts, lease)
        for i, state in zip(lease.created, done.states, strict=True):
            self._states[first * parts + i] = state
        self._count(done)

    def _add_reserved(self, at: int, lease: WriteLease) -> None:
        """Adds what a lease says of its parts: CREATED ones stand as refused until the shard says otherwise."""
        self._add(at, written(self._core, lease.states, [0] * len(lease.states), lease.retry_after_ms))

    async def _filled(self, lease: WriteLease, values: list[Slices], deadline: Deadline) -> PutResult:
        if not lease.created:
            return PutResult(b"")
        return await write_leased(self._core, lease, [values[i] for i in lease.created], deadline)

    def _add(self, at: int, done: PutResult) -> None:
        self._states[at : at + len(done.states)] = done.states
        self._count(done)

    def _count(self, done: PutResult) -> None:
        self._stored += done.stored
        self._present += done.present
        self._retry_after_ms = max(self._retry_after_ms, done.retry_after_ms)


async def put_chain(
    core: ClientCore, asked: Question, *, values: list[Slices], hint: Hint | None, deadline: Deadline
) -> PutResult:
    """Writes by chain in one exchange. Raises KvStoreError: then nothing is known to be stored."""
    sizes = [size_of(slices) for slices in values]

    async def attempt(binding: Binding) -> store.PutResponse:
        header = store.PutHeader(
            session=binding.session,
            namespace=binding.namespace,
            chain=asked.chain_message(),
            parts=asked.parts_message(),
            lengths=_lengths(asked, sizes),
            hint=hint_message(binding, hint),
        )
        return await core.transport(binding).put(header, Outgoing(values, chunk_bytes(binding.limits)), deadline)

    answer = await _retried_if_refused(core, asked, attempt, deadline)
    check_states(answer.states, len(values), highest=PartState.LOST)
    return written(core, answer.states, sizes, answer.retry_after_ms)


async def write_leased(core: ClientCore, lease: WriteLease, values: list[Slices], deadline: Deadline) -> PutResult:
    """Fills and commits the CREATED parts of a lease. On any failure the lease is ended and nothing is stored."""
    binding, life = lease.binding, lease.life
    try:
        answer = await _sent(core, lease, values, deadline)
        check_states(answer.states, len(values), highest=PartState.LOST)
    except NeedsLoop:
        raise
    except BaseException as error:
        life.ended = True
        if isinstance(error, PathDown):  # The caller may begin anew: the slots must be free.
            with suppress(KvStoreError):
                await aborted(core, binding, life.lease)
        else:
            core.background(aborted(core, binding, life.lease))
        if isinstance(error, KvStoreError):
            core.unbound(lease.asked.spec, binding, error)
        raise
    life.ended = PartState.UNFILLED not in answer.states
    return written(core, answer.states, lease.sizes, answer.retry_after_ms)


async def _sent(core: ClientCore, lease: WriteLease, values: list[Slices], deadline: Deadline) -> store.PutResponse:
    """Sends the parts of a lease, by another way where one does not work.

    Raises KvStoreError; PathDown where the lease had ended by the second time, since the first may have stored them, or
    where the shard does not know yet that the first has ended. That there was a first one is kept with the lease: the
    second may be made by the event loop, which begins the verb anew.
    """
    binding = lease.binding
    for left in reversed(range(MAX_PATH_CHANGES + 1)):
        header = store.PutHeader(session=binding.session, namespace=binding.namespace, lease=lease.life.lease)
        outgoing = Outgoing(values, chunk_bytes(binding.limits))
        try:
            return await core.transport(binding).write(header, lease.offsets, outgoing, deadline)
        except PathDown as error:
            if not left or deadline.passed:
                raise
            core.stats.path_changes += 1
            lease.lost = error
        except (LeaseExpired, InvalidArgument):
            if lease.lost is None:
                raise
            raise lease.lost from None
    raise AssertionError("the last try answers or raises")


def chunk_bytes(limits: types.Limits) -> int:
    """Returns the payload of one message: what the shard likes best, less than what it takes at most."""
    room = limits.max_message_bytes - 16 if limits.max_message_bytes else limits.chunk_bytes
    return max(1, min(limits.chunk_bytes, room))


async def aborted(core: ClientCore, binding: Binding, lease: types.Lease) -> None:
    """Ends a write lease."""
    request = store.AbortRequest(session=binding.session, leases=[lease])
    await core.unary(binding, "Abort", request, core.deadline(None))


async def _retried_if_refused(
    core: ClientCore, asked: Question, attempt: Attempt, deadline: Deadline
) -> store.PutResponse:
    # A put is repeated only where the shard refused its header, or one way to it does not work. In the second case it
    # may have been stored already: then the answer is that it is present.
    binding = await core.safe(asked.spec, deadline, _binding)
    for _ in range(MAX_PATH_CHANGES):
        try:
            return await attempt(binding)
        except PathDown as error:
            if deadline.passed:
                raise
            core.stats.path_changes += 1
            last: KvStoreError = error
        except (UnknownSession, UnknownNamespace) as error:
            core.unbound(asked.spec, binding, error)
            core.stats.retries += 1
            return await attempt(await core.bind(asked.spec, deadline))
    raise last


def _lengths(asked: Question, sizes: Sequence[int]) -> Sequence[int]:
    return sizes if asked.spec.kind is Kind.OPAQUE else ()


async def _binding(binding: Binding) -> Binding:
    return binding
