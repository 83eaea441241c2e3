"""The verbs of a namespace for threads: each waits for its answer, or hands out a ticket at once.

What each argument and answer means is said at AsyncNamespace.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore_client.buffers import Entry, size_of
from kvstore_client.core import NeedsLoop
from kvstore_client.direct import run_now
from kvstore_client.grants import Grants
from kvstore_client.leases import ReadLease, WriteLease
from kvstore_client.namespace import AsyncNamespace
from kvstore_client.question import Hint, Keys, Question, Range, question
from kvstore_client.quick import quick_get
from kvstore_client.quick_put import quick_put
from kvstore_client.results import (
    DeleteResult,
    ExplainResult,
    GetResult,
    MatchResult,
    OverResult,
    PutResult,
    ReadResult,
    RenewResult,
)
from kvstore_client.tickets import Job, Ticket
from kvstore_client.views import BlockViews
from kvstore_wire.errors import KvStoreError
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.states import Coverage

if TYPE_CHECKING:
    from kvstore_client.facade import Client

R = TypeVar("R")


class HeldReadLease:
    """A read lease in a thread's hands; leaving its `with` block releases it."""

    def __init__(self, owner: Client, inner: ReadLease) -> None:
        self._owner, self.inner = owner, inner

    @property
    def states(self) -> bytes:
        return self.inner.states

    @property
    def prefix_blocks(self) -> int:
        return self.inner.prefix_blocks

    @property
    def grants(self) -> Grants:
        return self.inner.grants

    @property
    def held(self) -> bool:
        return self.inner.held

    @property
    def valid(self) -> bool | None:
        return self.inner.valid

    @property
    def failure(self) -> KvStoreError | None:
        return self.inner.failure

    def release(self, *, corrupt: Sequence[int] = (), deadline_ms: int | None = None) -> bool:
        """Ends the lease and tells whether it was valid to this moment."""
        return self._owner.run_lease(
            self.inner,
            lambda: self.inner.release(corrupt=corrupt, deadline_ms=deadline_ms),
            deadline_ms=deadline_ms,
            failed=lambda _: False,
        )

    def __enter__(self) -> HeldReadLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.held:
            self.release()


class HeldWriteLease:
    """A write lease in a thread's hands; leaving its `with` block aborts what was not committed."""

    def __init__(self, owner: Client, inner: WriteLease) -> None:
        self._owner, self.inner = owner, inner

    @property
    def states(self) -> bytes:
        return self.inner.states

    @property
    def created(self) -> tuple[int, ...]:
        return self.inner.created

    @property
    def held(self) -> bool:
        return self.inner.held

    @property
    def retry_after_ms(self) -> int:
        return self.inner.retry_after_ms

    @property
    def failure(self) -> KvStoreError | None:
        return self.inner.failure

    def commit(
        self, checksums: Sequence[int], parts: Sequence[int] = (), *, deadline_ms: int | None = None
    ) -> PutResult:
        """Makes filled parts visible."""
        count = len(parts) or len(self.created)
        return self._owner.run_lease(
            self.inner,
            lambda: self.inner.commit(checksums, parts, deadline_ms=deadline_ms),
            deadline_ms=deadline_ms,
            failed=lambda e: PutResult.failed(count, e),
        )

    def abort(self, *, deadline_ms: int | None = None) -> bool:
        """Ends the lease and drops what it reserved."""
        return self._owner.run_lease(
            self.inner,
            lambda: self.inner.abort(deadline_ms=deadline_ms),
            deadline_ms=deadline_ms,
            failed=lambda _: False,
        )

    def __enter__(self) -> HeldWriteLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.held:
            self.abort()


class Namespace:
    """One namespace of a blocking client. Thread-safe."""

    def __init__(self, owner: Client, inner: AsyncNamespace, direct: AsyncNamespace) -> None:
        self._owner, self._inner, self._direct = owner, inner, direct

    @property
    def spec(self) -> NamespaceSpec:
        return self._inner.spec

    def __repr__(self) -> str:
        return f"Namespace({self.spec.name!r}, {self._owner.options.target!r})"

    def _run(
        self,
        call: Callable[[AsyncNamespace], Coroutine[Any, Any, R]],
        deadline_ms: int | None,
        failed: Callable[[KvStoreError], R],
    ) -> R:
        """Makes a call in this very thread where the fast channel is there, else in the background loop."""
        self._owner.check()
        if self._owner.direct.is_ready(self.spec):
            try:
                return run_now(call(self._direct))
            except NeedsLoop:
                pass
        return self._owner.run(lambda: call(self._inner), deadline_ms, failed)

    def match(
        self,
        keys: Keys,
        *,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        deadline_ms: int | None = None,
    ) -> MatchResult:
        """Tells which blocks are stored."""
        return self._run(
            lambda ns: ns.match(keys, parts=parts, coverage=coverage, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: MatchResult.failed(question(self.spec, keys).block_count, e),
        )

    def get(
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
        """Reads blocks and checks what landed."""
        if into is not None and not (parts or hint or ranges):
            self._owner.check()
            found = quick_get(
                self._owner.direct,
                self.spec,
                keys,
                into=into,
                coverage=coverage,
                wait_ms=wait_ms,
                deadline=self._owner.deadline(deadline_ms),
            )
            if found is not None:
                return found
        return self._run(
            lambda ns: ns.get(
                keys,
                into=into,
                parts=parts,
                coverage=coverage,
                wait_ms=wait_ms,
                hint=hint,
                ranges=ranges,
                deadline_ms=deadline_ms,
            ),
            deadline_ms,
            lambda e: _failed_get(question(self.spec, keys, parts, coverage), into, e),
        )

    def put(
        self,
        keys: Keys,
        values: Sequence[Entry],
        *,
        parts: Sequence[int] = (),
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> PutResult:
        """Stores blocks that are not stored yet."""
        if not parts and hint is None:
            self._owner.check()
            done = quick_put(
                self._owner.direct, self.spec, keys, values=values, deadline=self._owner.deadline(deadline_ms)
            )
            if done is not None:
                return done
        return self._run(
            lambda ns: ns.put(keys, values, parts=parts, hint=hint, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: PutResult.failed(len(values), e),
        )

    def acquire(
        self,
        keys: Keys,
        *,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        wait_ms: int | None = None,
        lease_ms: int | None = None,
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> HeldReadLease:
        """Leases stored blocks for reading: `with ns.acquire(keys) as lease`."""
        asked = question(self.spec, keys, parts, coverage)
        inner = self._run(
            lambda ns: ns.acquire(
                keys,
                parts=parts,
                coverage=coverage,
                wait_ms=wait_ms,
                lease_ms=lease_ms,
                hint=hint,
                deadline_ms=deadline_ms,
            ),
            deadline_ms,
            lambda e: self._inner.unleased(asked, e),
        )
        return HeldReadLease(self._owner, inner)

    def view(
        self, keys: Keys, *, parts: Sequence[int] = (), wait_ms: int | None = None, deadline_ms: int | None = None
    ) -> BlockViews:
        """Leases stored blocks and lets them be looked at in place: `with ns.view(keys) as views`.

        `views.close()` tells whether what was looked at counts.
        """
        lease = self.acquire(keys, parts=parts, wait_ms=wait_ms, deadline_ms=deadline_ms)

        def release(corrupt: Sequence[int]) -> bool:
            self._owner.direct.keeper.drop(lease.inner)
            return lease.release(corrupt=corrupt, deadline_ms=deadline_ms)

        deadline = self._owner.deadline(deadline_ms)
        return self._run(
            lambda ns: ns.viewed(lease.inner, deadline, release),
            deadline_ms,
            lambda e: run_now(self._direct.viewed(self._inner.unleased(lease.inner.asked, e), deadline, release)),
        )

    def reserve(
        self,
        keys: Keys,
        *,
        lengths: Sequence[int] = (),
        parts: Sequence[int] = (),
        lease_ms: int | None = None,
        wait_ms: int = 0,
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> HeldWriteLease:
        """Takes slots for parts that are not stored; `wait_ms` as in `AsyncNamespace.reserve`."""
        asked = question(self.spec, keys, parts)
        inner = self._run(
            lambda ns: ns.reserve(
                keys,
                lengths=lengths,
                parts=parts,
                lease_ms=lease_ms,
                wait_ms=wait_ms,
                hint=hint,
                deadline_ms=deadline_ms,
            ),
            deadline_ms,
            lambda e: self._inner.unreserved(asked, e),
        )
        return HeldWriteLease(self._owner, inner)

    def read(
        self, lease: HeldReadLease, into: Sequence[Entry] | None = None, *, deadline_ms: int | None = None
    ) -> ReadResult:
        """Reads everything under a lease, in the order of its grants."""
        return self._run(
            lambda ns: ns.read(lease.inner, into, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: ReadResult(None, failure=e),
        )

    def write(self, lease: HeldWriteLease, values: Sequence[Entry], *, deadline_ms: int | None = None) -> PutResult:
        """Fills and commits the CREATED parts of a lease."""
        return self._run(
            lambda ns: ns.write(lease.inner, values, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: PutResult.failed(len(lease.created), e),
        )

    def renew(
        self,
        leases: Sequence[HeldReadLease | HeldWriteLease],
        *,
        lease_ms: int | None = None,
        deadline_ms: int | None = None,
    ) -> RenewResult:
        """Lengthens leases to `lease_ms` from now."""
        inner = [lease.inner for lease in leases]
        return self._run(
            lambda ns: ns.renew(inner, lease_ms=lease_ms, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: RenewResult((False,) * len(inner), e),
        )

    def delete(self, keys: Keys, *, deadline_ms: int | None = None) -> DeleteResult:
        """Removes blocks. Idempotent."""
        asked = question(self.spec, keys)
        return self._run(
            lambda ns: ns.delete(keys, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: DeleteResult(bytes(asked.block_count), e),
        )

    def over(self, keys: Keys = (), *, session_tag: int = 0, deadline_ms: int | None = None) -> OverResult:
        """Says that a conversation is over."""
        return self._run(
            lambda ns: ns.over(keys, session_tag=session_tag, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: OverResult(failure=e),
        )

    def explain(self, keys: Keys, *, deadline_ms: int | None = None) -> ExplainResult:
        """Shows what the shard makes of this namespace and the keys."""
        return self._run(
            lambda ns: ns.explain(keys, deadline_ms=deadline_ms),
            deadline_ms,
            lambda e: ExplainResult(failure=e),
        )

    def submit_match(
        self,
        keys: Keys,
        *,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        deadline_ms: int | None = None,
    ) -> Ticket:
        """Starts a match and returns at once."""
        asked = question(self.spec, keys, parts, coverage)
        job = Job(
            verb="match",
            size_bytes=0,
            deadline=self._owner.deadline(deadline_ms),
            start=lambda left_ms: self._inner.match(keys, parts=parts, coverage=coverage, deadline_ms=left_ms),
            failed=lambda e: MatchResult.failed(asked.block_count, e),
        )
        return self._owner.submit(job)

    def submit_get(
        self,
        keys: Keys,
        *,
        into: Sequence[Entry] | None = None,
        parts: Sequence[int] = (),
        coverage: Coverage = Coverage.PREFIX,
        wait_ms: int | None = None,
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> Ticket:
        """Starts a get and returns at once. It holds as much of the queue as it can bring: the size of `into`, else
        part_bytes for each part.

        Owns: the client writes to `into` until the ticket is finished.
        """
        asked = question(self.spec, keys, parts, coverage)
        views = None if into is None else self._inner.checked_into(into, asked)
        part_count = asked.block_count * asked.parts_per_block
        job = Job(
            verb="get",
            size_bytes=part_count * self.spec.part_bytes if views is None else sum(map(size_of, views)),
            deadline=self._owner.deadline(deadline_ms),
            start=lambda left_ms: self._inner.get(
                keys, into=views, parts=parts, coverage=coverage, wait_ms=wait_ms, hint=hint, deadline_ms=left_ms
            ),
            failed=lambda e: _failed_get(asked, into, e),
            held_until_taken=views is None,
        )
        return self._owner.submit(job)

    def submit_put(
        self,
        keys: Keys,
        values: Sequence[Entry],
        *,
        parts: Sequence[int] = (),
        hint: Hint | None = None,
        deadline_ms: int | None = None,
    ) -> Ticket:
        """Starts a put and returns at once.

        Owns: the client keeps the values until the ticket is finished; they must stay as they are until then.
        """
        asked = question(self.spec, keys, parts)
        views = self._inner.checked_values(values, asked)
        job = Job(
            verb="put",
            size_bytes=sum(map(size_of, views)),
            deadline=self._owner.deadline(deadline_ms),
            start=lambda left_ms: self._inner.put(keys, views, parts=parts, hint=hint, deadline_ms=left_ms),
            failed=lambda e: PutResult.failed(len(views), e),
        )
        return self._owner.submit(job)


def _failed_get(asked: Question, into: Sequence[Entry] | None, failure: KvStoreError) -> GetResult:
    values = [None] * (asked.block_count * asked.parts_per_block) if into is None else None
    return GetResult.failed(asked.block_count, asked.parts_per_block, failure, values=values)
