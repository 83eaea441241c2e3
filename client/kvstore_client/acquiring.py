"""Acquire: one lease, told in several messages."""

from __future__ import annotations

from contextlib import aclosing

from kvstore_client.batches import check_most
from kvstore_client.core import ClientCore
from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer
from kvstore_client.grants import Grants
from kvstore_client.leases import ReadLease
from kvstore_client.question import Hint, Question
from kvstore_client.reading import bounded_wait_ms, chosen_wait_ms, hint_message
from kvstore_client.receivers import check_lengths, check_states
from kvstore_client.session import Binding, LeaseLife
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types


class AcquireCall:
    """One Acquire, repeatable. A lease that comes and cannot be handed on is released on the side."""

    def __init__(
        self,
        core: ClientCore,
        asked: Question,
        *,
        wait_ms: int | None,
        lease_ms: int,
        hint: Hint | None,
        deadline: Deadline,
    ) -> None:
        self._core, self._asked, self._deadline = core, asked, deadline
        self._wait_ms, self._lease_ms, self._hint = wait_ms, lease_ms, hint

    async def __call__(self, binding: Binding) -> ReadLease:
        check_most("keys", self._asked.block_count, binding.limits.max_blocks)
        check_most("wait_ms", self._wait_ms or 0, binding.limits.max_wait_ms)
        check_most("lease_ms", self._lease_ms, binding.limits.max_lease_ms)
        told = _Told()
        try:
            async with aclosing(
                self._core.answers(binding, "Acquire", self._request(binding), self._deadline)
            ) as answers:
                async for answer in answers:
                    told.take(answer)
            return self._lease(binding, told)
        except BaseException:
            if told.lease is not None:
                self._core.background(_released(self._core, binding, told.lease))
            raise

    def _request(self, binding: Binding) -> store.AcquireRequest:
        asked = self._asked
        return store.AcquireRequest(
            session=binding.session,
            namespace=binding.namespace,
            chain=asked.chain_message(),
            parts=asked.parts_message(),
            coverage=int(asked.coverage),  # type: ignore[arg-type]
            wait_ms=bounded_wait_ms(chosen_wait_ms(self._wait_ms, binding, self._core.options), self._deadline),
            lease_ms=self._lease_ms,
            hint=hint_message(binding, self._hint),
        )

    def _lease(self, binding: Binding, told: _Told) -> ReadLease:
        asked, states = self._asked, bytes(told.states)
        check_states(states, asked.block_count, highest=BlockState.BEYOND)
        granted = states.count(BlockState.HOT) * asked.parts_per_block
        if not told.settled or len(told.offsets) != granted:
            raise MalformedAnswer(f"{len(told.offsets)} grants for {granted} parts, settled: {told.settled}")
        check_lengths(asked.spec, told.lengths, len(told.checksums), granted)
        if granted and told.lease is None:
            raise MalformedAnswer("blocks were granted without a lease")
        life = None if told.lease is None else LeaseLife(binding.session, told.lease)
        if life is not None:
            self._core.keeper.watch(life)
        grants = Grants.of(told.offsets, told.lengths, told.checksums)
        return ReadLease(self._core, asked, states=states, binding=binding, life=life, grants=grants)


class _Told:
    """The messages of one Acquire, added up."""

    def __init__(self) -> None:
        self.lease: types.Lease | None = None
        self.states = bytearray()
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.checksums: list[int] = []
        self.settled = False

    def take(self, answer: store.AcquireResponse) -> None:
        if answer.HasField("lease"):
            self.lease = answer.lease
        if self.settled or (answer.states and answer.first != len(self.states)):
            raise MalformedAnswer(f"states from {answer.first} after {len(self.states)}")
        self.states += answer.states
        self.offsets.extend(answer.offsets)
        self.lengths.extend(answer.lengths)
        self.checksums.extend(answer.checksums)
        self.settled = answer.settled


async def _released(core: ClientCore, binding: Binding, lease: types.Lease) -> None:
    request = store.ReleaseRequest(session=binding.session, leases=[lease])
    await core.unary(binding, "Release", request, core.deadline(None))
