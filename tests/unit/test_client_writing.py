"""A write under a lease that goes by several ways, in the calling thread and then in the event loop."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvstore_client.core import ClientCore, NeedsLoop
from kvstore_client.deadline import Deadline
from kvstore_client.direct import run_now
from kvstore_client.errors import PathDown
from kvstore_client.leases import WriteLease
from kvstore_client.question import question
from kvstore_client.session import Binding, LeaseLife
from kvstore_client.stats import Counters
from kvstore_client.writing import _sent
from kvstore_wire.errors import InvalidArgument, LeaseExpired
from kvstore_wire.states import PartState
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types
from tests.shards import keys, kv_spec

SPEC = kv_spec("writing", part_bytes=10)
BUSY = InvalidArgument("another Put writes under this lease", field="lease")


class Core:
    """Ways that end as they were told to, one after the other."""

    def __init__(self, *outcomes: BaseException | store.PutResponse) -> None:
        self.stats = Counters()
        self._outcomes = list(outcomes)

    def transport(self, binding: object) -> Core:
        if isinstance(self._outcomes[0], NeedsLoop):
            raise cast(NeedsLoop, self._outcomes.pop(0))
        return self

    async def write(self, *_: object) -> store.PutResponse:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def lease() -> WriteLease:
    limits = types.Limits(chunk_bytes=100)
    binding = cast(Binding, type("_Binding", (), {"session": b"s" * 16, "namespace": 1, "limits": limits})())
    life = LeaseLife(b"s" * 16, types.Lease(id=1))
    states = bytes((PartState.CREATED,))
    asked = question(SPEC, keys(0, 1))
    return WriteLease(
        cast(ClientCore, None), asked, states=states, binding=binding, life=life, offsets=(0,), sizes=(10,)
    )


def send(core: Core, leased: WriteLease) -> Any:
    values = [[memoryview(b"x" * 10)]]
    return run_now(_sent(cast(ClientCore, core), leased, values, Deadline.after(1000)))


def test_a_write_that_was_cut_goes_by_another_way() -> None:
    answer = store.PutResponse(states=bytes((PartState.COMMITTED,)))
    assert send(Core(PathDown("cut", sent=True), answer), lease()) == answer


@pytest.mark.parametrize("told", [BUSY, LeaseExpired("ended", field="lease")])
def test_what_the_shard_says_of_the_second_try_is_no_fault_of_the_caller(told: Exception) -> None:
    """The first one may have stored it, or the shard has not seen the end of it yet."""
    with pytest.raises(PathDown, match="cut"):
        send(Core(PathDown("cut", sent=True), told), lease())


def test_that_there_was_a_first_try_is_known_when_the_verb_begins_anew_in_the_event_loop() -> None:
    leased = lease()
    with pytest.raises(NeedsLoop):
        send(Core(PathDown("cut", sent=True), NeedsLoop()), leased)
    with pytest.raises(PathDown, match="cut"):
        send(Core(BUSY), leased)


def test_two_writes_of_the_caller_under_one_lease_are_the_callers_fault() -> None:
    with pytest.raises(InvalidArgument, match="another Put"):
        send(Core(BUSY), lease())
