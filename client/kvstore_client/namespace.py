"""The verbs of one namespace.

Every verb runs under one deadline, retries and waits included. It raises CallerError where the caller must change the
call (wrong buffer, bad key, another spec under the name); everything else - a miss, a lost or late shard, a malformed
answer - is in its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore_client.acquiring import AcquireCall
from kvstore_client.batches import check_most as check_limit
from kvstore_client.batches import runs
from kvstore_client.buffers import Entry, Slices, check_exact, check_most, readable, writable
from kvstore_client.core import ClientCore, NeedsLoop
from kvstore_client.deadline import Deadline
from kvstore_client.errors import MalformedAnswer
from kvstore_client.leases import ReadLease, WriteLease
from kvstore_client.question import Hint, Keys, Question, Range, question, ranged_bytes
from kvstore_client.reading import GetCall
from kvstore_client.receivers import check_states
from kvstore_client.results import (
    STORED,
    DeleteResult,
    ExplainedBlock,
    ExplainResult,
    GetResult,
    MatchResult,
    OverResult,
    PutResult,
    ReadResult,
    RenewResult,
    leading,
)
from kvstore_client.session import Binding
from kvstore_client.viewing import AsyncViews, copied, in_place, read_leased, views_of
from kvstore_client.views import BlockViews
from kvstore_client.writing import PutCall, ReserveCall, write_leased
from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument, KvStoreError, LeaseExpired
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage, DeleteState
from kvstore_wire.v1 import block_store_pb2 as store


class AsyncNamespace:
    """One namespace of one client. Attaches when first used. Use it inside the client's event loop."""

    def __init__(self, core: ClientCore, spec: NamespaceSpec) -> None:
        self._core = core
        self.spec = spec

    def __repr__(self) -> str:
        return f"AsyncNamespace({self.spec.name!r}, {self._core.options.target!r})"

    async def match(
        self,
        keys: Keys,
        *,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        deadline_ms: int | None = None,
    ) -> MatchResult:
        """Tells which blocks are stored. Leases nothing; cut to the shard's limits."""
        asked = question(self.spec, keys, parts, coverage)
        deadline = self._core.deadline(deadline_ms)
        states = bytearray(asked.block_count)
        return await self._core.run(
            "match",
            deadline,
            work=lambda: self._match(asked, states, deadline),
            failed=lambda e: self._matched(asked, states, e),
        )

    async def get(
        self,
        keys: Keys,
        *,
        into: Sequence[Entry] | None = None,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        wait_ms: int | None = None,
        hint: Hint | None = None,
        ranges: Sequence[Range] = (),
        deadline_ms: int | None = None,
    ) -> GetResult:
        """Reads blocks and checks what landed; cut to the shard's limits.

        Shapes: `into` has one entry for each part, in key then part order: a writable buffer or a list of them. No two
        may share memory: each part is checked as it lands, and what lands later overwrites it.
        KV: each entry holds exactly part_bytes. OPAQUE: one that is too small makes its block a miss.
        `ranges`: what is read of every part, one range after another; entries of `into` hold exactly that.
        Owns: the client writes to `into` until this returns. Only HOT blocks hold data; treat all else as undefined.
        `wait_ms`: how long blocks in flight, or on the shard's disk, may be waited for, at most three quarters of the
        time left; None = `disk_wait_ms` of the options where the shard has a warm tier, else 0.
        """
        asked = question(self.spec, keys, parts, coverage)
        views = None if into is None else self.checked_into(into, asked, ranges)
        waits_ms = None if wait_ms is None else _number("wait_ms", wait_ms)
        call = GetCall(self._core, asked, into=views, wait_ms=waits_ms, hint=hint, ranges=tuple(ranges))
        deadline = self._core.deadline(deadline_ms)
        return await self._core.run("get", deadline, work=lambda: call.run(deadline), failed=call.result)

    async def put(
        self,
        keys: Keys,
        values: Sequence[Entry],
        *,
        parts: Sequence[int] = (),
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> PutResult:
        """Stores blocks that are not stored yet; cut to the shard's limits.

        Shapes: `values` has one entry for each part, in key then part order: a buffer or a list of slices.
        Owns: the caller; the values must stay as they are until this returns.
        """
        asked = question(self.spec, keys, parts)
        call = PutCall(self._core, asked, values=self.checked_values(values, asked), hint=hint)
        deadline = self._core.deadline(deadline_ms)
        return await self._core.run("put", deadline, work=lambda: call.run(deadline), failed=call.result)

    async def acquire(
        self,
        keys: Keys,
        *,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        wait_ms: int | None = None,
        lease_ms: int | None = None,
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> ReadLease:
        """Leases stored blocks for reading: `async with await ns.acquire(keys) as lease`."""
        asked = question(self.spec, keys, parts, coverage)
        deadline = self._core.deadline(deadline_ms)
        call = AcquireCall(
            self._core,
            asked,
            wait_ms=None if wait_ms is None else _number("wait_ms", wait_ms),
            lease_ms=self._lease_ms(lease_ms),
            hint=hint,
            deadline=deadline,
        )
        return await self._core.run(
            "acquire",
            deadline,
            work=lambda: self._core.safe(self.spec, deadline, call),
            failed=lambda e: self.unleased(asked, e),
        )

    async def view(
        self, keys: Keys, *, parts: Sequence[int] = (), wait_ms: int | None = None, deadline_ms: int | None = None
    ) -> AsyncViews:
        """Leases stored blocks and lets them be looked at in the shard's own memory; elsewhere than on its host, or
        where it may not be mapped, in a copy. The lease is kept alive until the views are closed.

        Nothing is checked against checksums by itself (`views.verify`). Where nothing could be leased the views are
        empty: every block is a miss.
        """
        lease = await self.acquire(keys, parts=parts, wait_ms=wait_ms, deadline_ms=deadline_ms)
        corrupt: list[int] = []

        def note(found: Sequence[int]) -> bool:
            corrupt.extend(found)
            return True

        views = await self.viewed(lease, self._core.deadline(deadline_ms), note)

        async def release() -> bool:
            self._core.keeper.drop(lease)
            return await lease.release(corrupt=corrupt, deadline_ms=deadline_ms) if lease.held else not views.in_place

        return AsyncViews(views, release)

    async def viewed(
        self, lease: ReadLease, deadline: Deadline, release: Callable[[Sequence[int]], bool]
    ) -> BlockViews:
        """Returns the views of a lease, which `release` ends where they are in place; else it has ended already."""
        lease.hand_to(self._core)
        try:
            mapping = await in_place(self._core, lease, deadline)
            if mapping is not None:
                return views_of(mapping, lease, lease.grants, release=release)
            return await copied(self._core, lease, deadline)
        except NeedsLoop:
            raise
        except BaseException as error:
            if lease.held:
                self._core.background(lease.release())
            if not isinstance(error, KvStoreError):
                raise
            return await copied(self._core, self.unleased(lease.asked, error), deadline)

    async def reserve(
        self,
        keys: Keys,
        *,
        lengths: Sequence[int] = (),
        parts: Sequence[int] = (),
        lease_ms: int | None = None,
        wait_ms: int = 0,
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> WriteLease:
        """Takes slots for parts that are not stored. `lengths`: OPAQUE only, bytes of each key's value.

        `wait_ms`: how long it may wait for a shard's disk to take blocks that else are lost to make room; for those who
        store aside of what they serve.
        """
        asked = question(self.spec, keys, parts)
        sizes = self._sizes(asked, lengths)
        deadline = self._core.deadline(deadline_ms)
        call = ReserveCall(
            self._core,
            asked,
            sizes=sizes,
            lease_ms=self._lease_ms(lease_ms),
            wait_ms=wait_ms,
            hint=hint,
            deadline=deadline,
        )
        return await self._core.run(
            "reserve",
            deadline,
            work=lambda: self._core.safe(self.spec, deadline, call),
            failed=lambda e: self.unreserved(asked, e),
        )

    async def read(
        self, lease: ReadLease, into: Sequence[Entry] | None = None, *, deadline_ms: int | None = None
    ) -> ReadResult:
        """Reads everything under a lease, in the order of its grants. Use it only if the release then answers True."""
        views = None if into is None else self._granted_into(into, lease)
        deadline = self._core.deadline(deadline_ms)
        return await self._core.run(
            "read",
            deadline,
            work=lambda: self._read(lease, views, deadline),
            failed=lambda e: ReadResult(None, failure=e),
        )

    async def write(self, lease: WriteLease, values: Sequence[Entry], *, deadline_ms: int | None = None) -> PutResult:
        """Fills and commits the CREATED parts of a lease: one entry for each index in `lease.created`."""
        views = readable(values, len(lease.created), "values")
        for i, (slices, size) in enumerate(zip(views, lease.sizes, strict=True)):
            check_exact([slices], size, f"values[{i}] of")
        deadline = self._core.deadline(deadline_ms)
        return await self._core.run(
            "write",
            deadline,
            work=lambda: self._write(lease, views, deadline),
            failed=lambda e: PutResult.failed(len(views), e),
        )

    async def renew(
        self, leases: Sequence[ReadLease | WriteLease], *, lease_ms: int | None = None, deadline_ms: int | None = None
    ) -> RenewResult:
        """Lengthens leases to `lease_ms` from now."""
        check_limit("leases", len(leases), contract.MAX_LEASES_PER_CALL)
        deadline, length_ms = self._core.deadline(deadline_ms), self._lease_ms(lease_ms)
        return await self._core.run(
            "renew",
            deadline,
            work=lambda: self._renew(leases, length_ms, deadline),
            failed=lambda e: RenewResult((False,) * len(leases), e),
        )

    async def delete(self, keys: Keys, *, deadline_ms: int | None = None) -> DeleteResult:
        """Removes blocks; cut to the shard's limits. Idempotent."""
        asked = question(self.spec, keys)
        deadline = self._core.deadline(deadline_ms)
        states = bytearray(asked.block_count)
        return await self._core.run(
            "delete",
            deadline,
            work=lambda: self._delete(asked, states, deadline),
            failed=lambda e: DeleteResult(bytes(states), e),
        )

    async def over(self, keys: Keys = (), *, session_tag: int = 0, deadline_ms: int | None = None) -> OverResult:
        """Says that a conversation is over, by its keys or by the tag of its hints. Advice."""
        asked = question(self.spec, keys)
        if bool(asked.block_count) == bool(session_tag):
            raise InvalidArgument("give either keys or a session tag", field="session_tag")
        tag = Hint(session_tag=session_tag).session_tag
        deadline = self._core.deadline(deadline_ms)
        return await self._core.run(
            "over",
            deadline,
            work=lambda: self._core.safe(self.spec, deadline, lambda b: self._over(b, asked, tag, deadline)),
            failed=lambda e: OverResult(failure=e),
        )

    async def explain(self, keys: Keys, *, deadline_ms: int | None = None) -> ExplainResult:
        """Shows what the shard makes of this namespace and the keys. For people."""
        asked = question(self.spec, keys)
        deadline = self._core.deadline(deadline_ms)
        return await self._core.run(
            "explain",
            deadline,
            work=lambda: self._core.safe(self.spec, deadline, lambda b: self._explain(b, asked, deadline)),
            failed=lambda e: ExplainResult(failure=e),
        )

    def unleased(self, asked: Question, failure: KvStoreError) -> ReadLease:
        """Returns the lease of an acquire that failed: it holds nothing."""
        return ReadLease(self._core, asked, states=bytes(asked.block_count), failure=failure)

    def unreserved(self, asked: Question, failure: KvStoreError) -> WriteLease:
        """Returns the lease of a reserve that failed: it holds nothing."""
        states = bytes(asked.block_count * asked.parts_per_block)
        return WriteLease(self._core, asked, states=states, failure=failure)

    def checked_into(self, into: Sequence[Entry], asked: Question, ranges: Sequence[Range] = ()) -> list[Slices]:
        """Returns the views of a get's buffers. Raises InvalidArgument (into)."""
        views = writable(into, asked.block_count * asked.parts_per_block, "into")
        if ranges:
            check_exact(views, ranged_bytes(ranges), "into")
        elif self.spec.kind is Kind.KV:
            check_exact(views, self.spec.part_bytes, "into")
        return views

    def checked_values(self, values: Sequence[Entry], asked: Question) -> list[Slices]:
        """Returns the views of a put's values. Raises InvalidArgument (values)."""
        views = readable(values, asked.block_count * asked.parts_per_block, "values")
        check = check_exact if self.spec.kind is Kind.KV else check_most
        check(views, self.spec.part_bytes, "values")
        return views

    async def _match(self, asked: Question, states: bytearray, deadline: Deadline) -> MatchResult:
        at = 0
        while at < asked.block_count:
            got = await self._core.safe(self.spec, deadline, partial(self._match_from, asked, at, deadline))
            states[at : at + len(got)] = got
            self._core.stats.matched_blocks += sum(got.count(state) for state in STORED)
            at += len(got)
            if asked.coverage is Coverage.PREFIX and leading(got, STORED) < len(got):
                states[at:] = bytes((BlockState.BEYOND,)) * (asked.block_count - at)
                break
        return self._matched(asked, states, None)

    def _matched(self, asked: Question, states: bytearray, failure: KvStoreError | None) -> MatchResult:
        self._core.stats.matched_blocks_asked += asked.block_count
        return MatchResult(bytes(states), leading(states, STORED), failure)

    async def _match_from(self, asked: Question, first: int, deadline: Deadline, binding: Binding) -> bytes:
        most = min(binding.limits.max_match_blocks, max(1, contract.MAX_MATCH_PARTS // asked.parts_per_block))
        piece = asked.piece(first, min(first + most, asked.block_count))
        request = store.MatchRequest(
            session=binding.session,
            namespace=binding.namespace,
            chain=piece.chain_message(),
            parts=piece.parts_message(),
            coverage=int(piece.coverage),  # type: ignore[arg-type]
        )
        answer: store.MatchResponse = await self._core.unary(binding, "Match", request, deadline)
        check_states(answer.states, piece.block_count, highest=BlockState.BEYOND)
        if answer.prefix_blocks != leading(answer.states, STORED):
            raise MalformedAnswer(f"Match counts {answer.prefix_blocks} leading blocks, its states say otherwise")
        return answer.states

    async def _read(self, lease: ReadLease, into: list[Slices] | None, deadline: Deadline) -> ReadResult:
        made = into is None
        if not len(lease.grants):
            return ReadResult([] if made else None, failure=lease.failure)
        if not lease.held:
            raise LeaseExpired("the lease has ended")
        receiver = await read_leased(self._core, lease, into, deadline)
        values = [slices[0] for slices in receiver.targets] if made else None
        self._core.stats.corrupt_blocks += len({part // lease.asked.parts_per_block for part in receiver.corrupt})
        return ReadResult(values, int(lease.grants.lengths.sum()), receiver.corrupt)

    async def _write(self, lease: WriteLease, values: list[Slices], deadline: Deadline) -> PutResult:
        if not values:
            return PutResult(b"", failure=lease.failure)
        if not lease.held:
            raise LeaseExpired("the lease has ended")
        return await write_leased(self._core, lease, values, deadline)

    async def _renew(self, leases: Sequence[ReadLease | WriteLease], lease_ms: int, deadline: Deadline) -> RenewResult:
        held = [i for i, lease in enumerate(leases) if lease.held]
        valid = [False] * len(leases)
        if held:
            lives = [leases[i].life for i in held]
            request = store.RenewRequest(
                session=lives[0].session, leases=[life.lease for life in lives], lease_ms=lease_ms
            )
            answer: store.RenewResponse = await self._core.unary(leases[held[0]].binding, "Renew", request, deadline)
            if len(answer.valid) != len(held):
                raise MalformedAnswer(f"Renew answered {len(answer.valid)} items for {len(held)}")
            for i, still in zip(held, answer.valid, strict=True):
                valid[i] = still
                leases[i].life.ended = not still
        return RenewResult(tuple(valid))

    async def _delete(self, asked: Question, states: bytearray, deadline: Deadline) -> DeleteResult:
        most = (await self._core.safe(self.spec, deadline, _itself)).limits.max_match_blocks
        for first, last in runs(asked.block_count, most):
            keys = asked.chain.keys[first:last]
            states[first:last] = await self._core.safe(self.spec, deadline, partial(self._delete_keys, keys, deadline))
        return DeleteResult(bytes(states))

    async def _delete_keys(self, keys: Sequence[bytes], deadline: Deadline, binding: Binding) -> bytes:
        request = store.DeleteRequest(session=binding.session, namespace=binding.namespace, keys=keys)
        answer: store.DeleteResponse = await self._core.unary(binding, "Delete", request, deadline)
        check_states(answer.states, len(keys), highest=DeleteState.DEFERRED)
        return answer.states

    async def _over(self, binding: Binding, asked: Question, session_tag: int, deadline: Deadline) -> OverResult:
        check_limit("keys", asked.block_count, binding.limits.max_match_blocks)
        request = store.OverRequest(
            session=binding.session,
            namespace=binding.namespace,
            chain=asked.chain_message() if asked.block_count else None,
            session_tag=session_tag,
        )
        answer: store.OverResponse = await self._core.unary(binding, "Over", request, deadline)
        return OverResult(answer.blocks)

    async def _explain(self, binding: Binding, asked: Question, deadline: Deadline) -> ExplainResult:
        check_limit("keys", asked.block_count, binding.limits.max_match_blocks)
        request = store.ExplainRequest(
            session=binding.session, namespace=binding.namespace, chain=asked.chain_message()
        )
        answer: store.ExplainResponse = await self._core.unary(binding, "Explain", request, deadline)
        if [block.key for block in answer.blocks] != list(asked.chain.keys):
            raise MalformedAnswer(f"Explain answered {len(answer.blocks)} blocks for {asked.block_count}")
        return _explained(answer)

    def _granted_into(self, into: Sequence[Entry], lease: ReadLease) -> list[Slices]:
        views = writable(into, len(lease.grants), "into")
        for i, (slices, size) in enumerate(zip(views, lease.grants.lengths.tolist(), strict=True)):
            if sum(map(len, slices)) < size:
                raise InvalidArgument("is too small", field=f"into[{i}]", limit=f"at least {size} bytes")
        return views

    def _sizes(self, asked: Question, lengths: Sequence[int]) -> list[int]:
        if self.spec.kind is Kind.KV:
            if lengths:
                raise InvalidArgument("are given only for OPAQUE namespaces", field="lengths")
            return [self.spec.part_bytes] * (asked.block_count * asked.parts_per_block)
        if len(lengths) != asked.block_count:
            raise InvalidArgument(f"{len(lengths)} given", field="lengths", limit=f"{asked.block_count}, one a key")
        for size in lengths:
            if not isinstance(size, int) or not 0 <= size <= self.spec.part_bytes:
                raise InvalidArgument(f"{size!r}", field="lengths", limit=f"0-{self.spec.part_bytes} bytes")
        return list(lengths)

    def _lease_ms(self, lease_ms: int | None) -> int:
        return self._core.options.lease_ms if lease_ms is None else _number("lease_ms", lease_ms)


def _number(field: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise InvalidArgument(f"is {value!r}", field=field, limit="0-4294967295")
    return value


def _explained(answer: store.ExplainResponse) -> ExplainResult:
    blocks = tuple(
        ExplainedBlock(
            key=b.key,
            state=BlockState(b.state),
            parts_present=b.parts_present,
            parts_total=b.parts_total,
            leases=b.leases,
            age_ms=b.age_ms,
            idle_ms=b.idle_ms,
            note=b.note,
        )
        for b in answer.blocks
    )
    fields = tuple((f.name, f.value) for f in answer.fields)
    first = answer.first_missing if answer.HasField("first_missing") else None
    return ExplainResult(fields, answer.digest, blocks, first)


async def _itself(binding: Binding) -> Binding:
    return binding
