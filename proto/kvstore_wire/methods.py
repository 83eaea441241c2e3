"""Every method of the contract by name: its messages and how it streams. Doors are built from these tables."""

from __future__ import annotations

import re
from dataclasses import dataclass

from google.protobuf.message import Message

from kvstore_wire.v1 import admin_pb2 as admin
from kvstore_wire.v1 import block_store_pb2 as store

ERROR_METADATA = "kvstore-error-bin"
BLOCK_STORE = "kvstore.v1.BlockStore"
ADMIN = "kvstore.v1.Admin"


@dataclass(frozen=True)
class Method:
    """One rpc. `requests` and `responses` say whether that side is a stream."""

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    requests: bool = False
    responses: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def _table(service: str, *rows: Method) -> dict[str, Method]:
    return {row.name: row for row in rows if row.service == service}


STORE_METHODS = _table(
    BLOCK_STORE,
    Method(BLOCK_STORE, "Attach", store.AttachRequest, store.AttachResponse),
    Method(BLOCK_STORE, "Session", store.SessionPulse, store.SessionNotice, requests=True, responses=True),
    Method(BLOCK_STORE, "Match", store.MatchRequest, store.MatchResponse),
    Method(BLOCK_STORE, "Acquire", store.AcquireRequest, store.AcquireResponse, responses=True),
    Method(BLOCK_STORE, "Renew", store.RenewRequest, store.RenewResponse),
    Method(BLOCK_STORE, "Release", store.ReleaseRequest, store.ReleaseResponse),
    Method(BLOCK_STORE, "Reserve", store.ReserveRequest, store.ReserveResponse),
    Method(BLOCK_STORE, "Commit", store.CommitRequest, store.CommitResponse),
    Method(BLOCK_STORE, "Abort", store.AbortRequest, store.AbortResponse),
    Method(BLOCK_STORE, "Get", store.GetRequest, store.GetResponse, responses=True),
    Method(BLOCK_STORE, "Put", store.PutRequest, store.PutResponse, requests=True),
    Method(BLOCK_STORE, "Delete", store.DeleteRequest, store.DeleteResponse),
    Method(BLOCK_STORE, "Over", store.OverRequest, store.OverResponse),
    Method(BLOCK_STORE, "Explain", store.ExplainRequest, store.ExplainResponse),
)

ADMIN_METHODS = _table(
    ADMIN,
    Method(ADMIN, "GetStats", admin.GetStatsRequest, admin.Stats),
    Method(ADMIN, "WatchStats", admin.WatchStatsRequest, admin.Stats, responses=True),
    Method(ADMIN, "GetConfig", admin.GetConfigRequest, admin.GetConfigResponse),
    Method(ADMIN, "ListNamespaces", admin.ListNamespacesRequest, admin.ListNamespacesResponse),
    Method(ADMIN, "Purge", admin.PurgeRequest, admin.PurgeResponse),
    Method(ADMIN, "SetWarmTier", admin.SetWarmTierRequest, admin.WarmTierStatus),
)


def method_name(name: str) -> str:
    """Returns the Python name of an rpc's handler: GetStats -> get_stats."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
