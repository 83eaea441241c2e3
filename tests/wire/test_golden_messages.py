"""The contract's bytes: a field that is renumbered, retyped or dropped changes what a message looks like here."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from kvstore_wire.methods import ADMIN, ADMIN_METHODS, BLOCK_STORE, STORE_METHODS, Method
from kvstore_wire.namespace import Attention, Chains, Kind
from kvstore_wire.states import BlockState, Coverage, PartState
from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as store
from kvstore_wire.v1 import types_pb2 as types
from tests.wire.golden import GOLDEN
from tests.wire.samples import samples

SAMPLES = dict(samples())


def test_every_message_of_the_contract_has_its_bytes_written_down() -> None:
    assert sorted(GOLDEN) == sorted(SAMPLES)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_message_is_written_as_it_always_was(name: str) -> None:
    assert SAMPLES[name].SerializeToString(deterministic=True).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_bytes_written_by_an_older_release_are_read_as_they_were_meant(name: str) -> None:
    kind: type[Message] = type(SAMPLES[name])
    message = kind.FromString(bytes.fromhex(GOLDEN[name]))
    assert message == SAMPLES[name]


ENUMS: dict[str, dict[str, int]] = {
    "NamespaceKind": {"UNSPECIFIED": 0, "KV": 1, "OPAQUE": 2},
    "ChainKnowledge": {"UNSPECIFIED": 0, "CHAINED": 1, "ORDERED": 2, "NONE": 3},
    "AttentionKind": {"UNSPECIFIED": 0, "MHA": 1, "MLA": 2},
    "Coverage": {"PREFIX": 0, "EACH": 1},
    "BlockState": {"MISSING": 0, "HOT": 1, "WARM": 2, "IN_FLIGHT": 3, "BUSY": 4, "BEYOND": 5},
    "PartState": {
        "REFUSED": 0,
        "CREATED": 1,
        "PRESENT": 2,
        "IN_FLIGHT": 3,
        "COMMITTED": 4,
        "FULL": 5,
        "QUOTA": 6,
        "TOO_LARGE": 7,
        "DRAINING": 8,
        "BEYOND": 9,
        "UNFILLED": 10,
        "LOST": 11,
    },
}


def values_of(descriptor: EnumDescriptor) -> dict[str, int]:
    """Names without their common prefix."""
    prefix = "".join("_" + c if c.isupper() else c.upper() for c in descriptor.name).lstrip("_") + "_"
    return {v.name.removeprefix(prefix): v.number for v in descriptor.values}


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_numbers_of_states_and_kinds_never_change(name: str) -> None:
    assert values_of(types.DESCRIPTOR.enum_types_by_name[name]) == ENUMS[name]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind, "NamespaceKind"),
        (Chains, "ChainKnowledge"),
        (Attention, "AttentionKind"),
        (Coverage, "Coverage"),
        (BlockState, "BlockState"),
        (PartState, "PartState"),
    ],
)
def test_the_code_s_own_enums_have_the_wire_s_numbers(kind: type[Kind], name: str) -> None:
    assert {m.name: m.value for m in kind} == {n: v for n, v in ENUMS[name].items() if n != "UNSPECIFIED"}


def streams(file: object, service: str) -> dict[str, tuple[str, str]]:
    """Request and answer of each rpc of a service, as the contract says."""
    descriptor = file.services_by_name[service]  # type: ignore[attr-defined]
    return {m.name: (m.input_type.full_name, m.output_type.full_name) for m in descriptor.methods}


@pytest.mark.parametrize(
    ("table", "file", "service"), [(STORE_METHODS, store, BLOCK_STORE), (ADMIN_METHODS, admin, ADMIN)]
)
def test_the_tables_of_methods_list_every_rpc_of_the_contract(
    table: dict[str, Method], file: object, service: str
) -> None:
    found = {m.name: (m.request.DESCRIPTOR.full_name, m.response.DESCRIPTOR.full_name) for m in table.values()}
    assert found == streams(file.DESCRIPTOR, service.rpartition(".")[2])  # type: ignore[attr-defined]
    methods = file.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods  # type: ignore[attr-defined]
    for method in methods:
        row = table[method.name]
        assert (row.requests, row.responses) == (method.client_streaming, method.server_streaming)
        assert row.path == f"/{service}/{method.name}"
