"""LeaseTable against a dict of deadlines, on a manual clock."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.columns import Places
from kvstore.core.leases import TICK_S, Lease, LeaseTable, ReadLease
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore_wire.errors import TableFull
from tests.shards import kv_spec

LIMIT = 12
SESSIONS = [b"a" * 16, b"b" * 16]

seconds = st.sampled_from([0.01, 0.24, 0.25, 0.26, 1.0, 7.5])


class LeaseMachine(RuleBasedStateMachine):
    """Leases of two sessions begin, are renewed, end and run out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LIMIT)
        self.namespace = Namespace(0, kv_spec("n"), NamespaceRules(), Places(1))
        self.open: dict[int, Lease] = {}
        self.deadline: dict[int, float] = {}
        self.ended: list[Lease] = []
        self.last_id = 0
        self.now = 100.0

    @rule(session=st.sampled_from(SESSIONS), lease_s=seconds)
    def add(self, session: bytes, lease_s: float) -> None:
        if len(self.open) == LIMIT:
            with pytest.raises(TableFull):
                self.table.new_id()
            return
        lease = ReadLease(self.table.new_id(), session, self.namespace, self.now + lease_s)
        assert lease.id > self.last_id
        self.last_id = lease.id
        self.table.add(lease)
        self.open[lease.id] = lease
        self.deadline[lease.id] = self.now + lease_s

    @precondition(lambda self: self.last_id)
    @rule(data=st.data(), session=st.sampled_from(SESSIONS))
    def get(self, data: st.DataObject, session: bytes) -> None:
        lease_id = data.draw(st.integers(0, self.last_id + 1))
        found = self.table.get(lease_id, session, self.now)
        lease = self.open.get(lease_id)
        alive = lease is not None and lease.session == session and self.deadline[lease_id] > self.now
        assert found is (lease if alive else None)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), lease_s=seconds)
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        lease = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        if self.table.get(lease.id, lease.session, self.now) is not None:
            self.table.renew(lease, self.now + lease_s)
            self.deadline[lease.id] = self.now + lease_s

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.table.end(lease)
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        before = len(self.table)
        self.table.end(data.draw(st.sampled_from(self.ended)))
        assert len(self.table) == before

    @rule(step=seconds)
    def pass_time(self, step: float) -> None:
        self.now += step
        expired = self.table.take_expired(self.now)
        assert all(self.deadline[lease.id] <= self.now for lease in expired)
        for lease in expired:
            self.ended.append(self.open.pop(lease.id))
        late = [i for i in self.open if self.deadline[i] <= self.now - TICK_S]
        assert not late, "an ended lease outlived its bucket"

    @invariant()
    def tables_agree(self) -> None:
        assert len(self.table) == len(self.open)
        assert {lease.id for lease in self.table.all()} == set(self.open)
        assert not any(lease.ended for lease in self.open.values())
        assert all(lease.ended for lease in self.ended)


TestLeases = LeaseMachine.TestCase
