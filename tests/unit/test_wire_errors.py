"""One table of errors: class, reason, status, and the way there and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_wire import errors
from kvstore_wire.errors import KvStoreError, error_classes, from_detail
from kvstore_wire.v1 import types_pb2 as types

FAMILIES = (errors.CallerError, errors.CapacityError, errors.MediaError, errors.PeerError)

# (class, number of its reason, status, retryable): what clients of every release rely on.
TABLE: list[tuple[type[KvStoreError], int, str, bool]] = [
    (errors.InvalidArgument, 1, "INVALID_ARGUMENT", False),
    (errors.NamespaceMismatch, 2, "FAILED_PRECONDITION", False),
    (errors.UnknownNamespace, 3, "NOT_FOUND", False),
    (errors.UnknownSession, 4, "UNAUTHENTICATED", True),
    (errors.LeaseExpired, 5, "ABORTED", False),
    (errors.Unsupported, 6, "UNIMPLEMENTED", False),
    (errors.VersionMismatch, 7, "FAILED_PRECONDITION", False),
    (errors.Denied, 8, "PERMISSION_DENIED", False),
    (errors.TableFull, 9, "RESOURCE_EXHAUSTED", True),
    (errors.OverQuota, 10, "RESOURCE_EXHAUSTED", False),
    (errors.Draining, 11, "UNAVAILABLE", True),
    (errors.Damaged, 12, "DATA_LOSS", False),
    (errors.Unreachable, 13, "UNAVAILABLE", True),
    (errors.DeadlineExceeded, 14, "DEADLINE_EXCEEDED", False),
    (errors.WrongShard, 15, "FAILED_PRECONDITION", True),
    (errors.Internal, 16, "INTERNAL", False),
]
STATUSES = {
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "UNAUTHENTICATED",
    "ABORTED",
    "UNIMPLEMENTED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
}


def descendants(cls: type[KvStoreError]) -> Iterator[type[KvStoreError]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def test_the_table_holds_every_error_that_crosses_the_wire() -> None:
    here = {c for c in descendants(KvStoreError) if c.__module__ == errors.__name__}
    assert here - set(FAMILIES) == {row[0] for row in TABLE}
    assert set(error_classes()) >= {row[0] for row in TABLE}


def test_every_reason_has_one_class() -> None:
    reasons = set(types.Reason.values()) - {types.REASON_UNSPECIFIED}
    assert {row[1] for row in TABLE} == reasons
    assert len(TABLE) == len(reasons)


@pytest.mark.parametrize(("cls", "reason", "status", "retryable"), TABLE)
def test_an_error_has_the_reason_and_status_it_always_had(
    cls: type[KvStoreError], reason: int, status: str, retryable: bool
) -> None:
    assert (int(cls.reason), cls.status, cls.retryable) == (reason, status, retryable)
    assert status in STATUSES
    assert issubclass(cls, FAMILIES) or cls is errors.Internal


@pytest.mark.parametrize("cls", [row[0] for row in TABLE])
def test_an_error_crosses_the_wire_and_comes_out_as_it_was(cls: type[KvStoreError]) -> None:
    error = cls("what happened", field="a.field", limit="0-9", retry_after_ms=20)
    detail = types.ErrorDetail.FromString(error.to_detail().SerializeToString())
    back = from_detail(detail)
    assert type(back) is cls
    assert (back.message, back.field, back.limit) == ("what happened", "a.field", "0-9")
    assert (back.retry_after_ms, detail.retryable) == (20, cls.retryable)
    assert str(back) == str(error) == "a.field: what happened (limit: 0-9)"


def test_a_reason_that_is_not_known_yet_is_an_internal_error() -> None:
    detail = types.ErrorDetail(reason=999, message="from the future")  # type: ignore[arg-type]
    assert type(from_detail(detail)) is errors.Internal


def test_an_error_made_elsewhere_does_not_take_over_a_reason() -> None:
    """Programs may derive errors of their own; those never come off the wire."""

    class Derived(errors.TableFull):
        """A client's own."""

    assert type(from_detail(Derived("x").to_detail())) is errors.TableFull
