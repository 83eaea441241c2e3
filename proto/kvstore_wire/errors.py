"""The errors of KV Commons, one class a reason, in four families named after who must act.

A miss, a throttle and a rejection of one block are values in an answer, never exceptions. An error means that a call
failed as a whole. The same table serves every door: `Reason` number <-> class <-> name of the gRPC status code.
"""

from __future__ import annotations

from kvstore_wire.v1 import types_pb2 as types


class KvStoreError(Exception):
    """A call failed as a whole.

    `retryable` says whether the same call can succeed later, `retry_after_ms` how long to wait first (0 = at once);
    `field` and `limit` name what a bad argument broke, where that is the cause.
    """

    reason: types.Reason = types.REASON_INTERNAL
    status: str = "INTERNAL"
    retryable: bool = False

    def __init__(self, message: str, *, field: str = "", limit: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = limit
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        limit = f" (limit: {self.limit})" if self.limit else ""
        return f"{where}{self.message}{limit}"

    def to_detail(self) -> types.ErrorDetail:
        return types.ErrorDetail(
            reason=self.reason,
            message=self.message,
            retryable=self.retryable,
            retry_after_ms=self.retry_after_ms,
            field=self.field,
            limit=self.limit,
        )


class CallerError(KvStoreError):
    """The caller must change the call."""


class CapacityError(KvStoreError):
    """Room is missing; the call is right."""


class MediaError(KvStoreError):
    """Bytes or the device holding them are damaged; becomes a miss, never wrong bytes."""


class PeerError(KvStoreError):
    """The other side cannot be reached, is too late, or is not the right one."""


class InvalidArgument(CallerError):
    """A field is out of its limits."""

    reason, status = types.REASON_INVALID_ARGUMENT, "INVALID_ARGUMENT"


class NamespaceMismatch(CallerError):
    """The namespace's name is bound to another spec; `field` names the first difference."""

    reason, status = types.REASON_NAMESPACE_MISMATCH, "FAILED_PRECONDITION"


class UnknownNamespace(CallerError):
    """The session has no namespace of that handle."""

    reason, status = types.REASON_UNKNOWN_NAMESPACE, "NOT_FOUND"


class UnknownSession(CallerError):
    """The session ended or belongs to an earlier life of the shard: attach again."""

    reason, status, retryable = types.REASON_UNKNOWN_SESSION, "UNAUTHENTICATED", True


class LeaseExpired(CallerError):
    """The lease ended, or belongs to an earlier life of the shard."""

    reason, status = types.REASON_LEASE_EXPIRED, "ABORTED"


class Unsupported(CallerError):
    """The shard lacks an optional feature that was asked for."""

    reason, status = types.REASON_UNSUPPORTED, "UNIMPLEMENTED"


class VersionMismatch(CallerError):
    """Client and shard have no protocol version in common."""

    reason, status = types.REASON_VERSION, "FAILED_PRECONDITION"


class Denied(CallerError):
    """The credentials do not allow the call."""

    reason, status = types.REASON_DENIED, "PERMISSION_DENIED"


class TableFull(CapacityError):
    """A bounded table of the shard (sessions, namespaces, leases) is full."""

    reason, status, retryable = types.REASON_FULL, "RESOURCE_EXHAUSTED", True


class OverQuota(CapacityError):
    """The namespace's own limit leaves no room."""

    reason, status = types.REASON_OVER_QUOTA, "RESOURCE_EXHAUSTED"


class Draining(CapacityError):
    """The shard is going away and admits nothing new."""

    reason, status, retryable = types.REASON_DRAINING, "UNAVAILABLE", True


class Damaged(MediaError):
    """Bytes are damaged or the device failed."""

    reason, status = types.REASON_MEDIA, "DATA_LOSS"


class Unreachable(PeerError):
    """No shard answered."""

    reason, status, retryable = types.REASON_UNREACHABLE, "UNAVAILABLE", True


class DeadlineExceeded(PeerError):
    """The deadline passed first."""

    reason, status = types.REASON_DEADLINE, "DEADLINE_EXCEEDED"


class WrongShard(PeerError):
    """Another shard owns the keys."""

    reason, status, retryable = types.REASON_WRONG_SHARD, "FAILED_PRECONDITION", True


class Internal(KvStoreError):
    """A fault of the shard itself."""

    reason, status = types.REASON_INTERNAL, "INTERNAL"


def error_classes() -> tuple[type[KvStoreError], ...]:
    """Every concrete error, found by walking the families."""
    found: list[type[KvStoreError]] = [Internal]
    for family in (CallerError, CapacityError, MediaError, PeerError):
        found.extend(family.__subclasses__())
    return tuple(found)


def from_detail(detail: types.ErrorDetail) -> KvStoreError:
    """Rebuilds the error that `to_detail` described; an unknown reason becomes Internal."""
    by_reason = {cls.reason: cls for cls in error_classes()}
    cls = by_reason.get(detail.reason, Internal)
    return cls(detail.message, field=detail.field, limit=detail.limit, retry_after_ms=detail.retry_after_ms)
