"""The client library of KV Commons (docs/client.md).

Importing this package does not import grpc; the first use of Client or AsyncClient does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_client.errors import Cancelled, ClientClosed, ForkedClient, MalformedAnswer, QueueFull
from kvstore_client.options import VERIFY_OFF, VERIFY_ON, ClientOptions, Verify
from kvstore_client.question import OVER, Chain, Hint, Range
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
from kvstore_client.stats import ClientStats
from kvstore_client.tls import TlsOptions
from kvstore_wire.errors import CallerError, CapacityError, InvalidArgument, KvStoreError, MediaError, PeerError
from kvstore_wire.keys import Adapter, Extras, Media, block_key, chain_keys, root_key
from kvstore_wire.namespace import Attention, Chains, Geometry, Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage, DeleteState, PartState

if TYPE_CHECKING:
    from kvstore_client.blocking import Namespace
    from kvstore_client.client import AsyncClient
    from kvstore_client.facade import Client
    from kvstore_client.leases import ReadLease, WriteLease
    from kvstore_client.namespace import AsyncNamespace
    from kvstore_client.regions import Region
    from kvstore_client.tickets import Completion, Ticket
    from kvstore_client.viewing import AsyncViews
    from kvstore_client.views import BlockViews

_LATER = {
    "AsyncClient": "client",
    "AsyncNamespace": "namespace",
    "Client": "facade",
    "Completion": "tickets",
    "Namespace": "blocking",
    "AsyncViews": "viewing",
    "BlockViews": "views",
    "ReadLease": "leases",
    "Region": "regions",
    "Ticket": "tickets",
    "WriteLease": "leases",
}

__all__ = [
    "OVER",
    "VERIFY_OFF",
    "VERIFY_ON",
    "Adapter",
    "AsyncClient",
    "AsyncNamespace",
    "AsyncViews",
    "Attention",
    "BlockState",
    "BlockViews",
    "CallerError",
    "Cancelled",
    "CapacityError",
    "Chain",
    "Chains",
    "Client",
    "ClientClosed",
    "ClientOptions",
    "ClientStats",
    "Completion",
    "Coverage",
    "DeleteResult",
    "DeleteState",
    "ExplainResult",
    "Extras",
    "ForkedClient",
    "Geometry",
    "GetResult",
    "Hint",
    "InvalidArgument",
    "Kind",
    "KvStoreError",
    "MalformedAnswer",
    "MatchResult",
    "Media",
    "MediaError",
    "Namespace",
    "NamespaceSpec",
    "OverResult",
    "PartState",
    "PeerError",
    "PutResult",
    "QueueFull",
    "Range",
    "ReadLease",
    "ReadResult",
    "Region",
    "RenewResult",
    "Ticket",
    "TlsOptions",
    "Verify",
    "WriteLease",
    "block_key",
    "chain_keys",
    "root_key",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kvstore_client' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kvstore_client.{_LATER[name]}"), name)
