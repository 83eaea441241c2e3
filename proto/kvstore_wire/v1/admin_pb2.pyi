from kvstore_wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WarmTierState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WARM_TIER_STATE_OFF: _ClassVar[WarmTierState]
    WARM_TIER_STATE_ON: _ClassVar[WarmTierState]
    WARM_TIER_STATE_DEGRADED: _ClassVar[WarmTierState]
    WARM_TIER_STATE_DISABLED: _ClassVar[WarmTierState]
WARM_TIER_STATE_OFF: WarmTierState
WARM_TIER_STATE_ON: WarmTierState
WARM_TIER_STATE_DEGRADED: WarmTierState
WARM_TIER_STATE_DISABLED: WarmTierState

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class LatencyHistogram(_message.Message):
    __slots__ = ("verb", "buckets", "sum_us")
    VERB_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SUM_US_FIELD_NUMBER: _ClassVar[int]
    verb: str
    buckets: _containers.RepeatedScalarFieldContainer[int]
    sum_us: int
    def __init__(self, verb: _Optional[str] = ..., buckets: _Optional[_Iterable[int]] = ..., sum_us: _Optional[int] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("generation", "uptime_ms", "counters", "gauges", "latencies")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    uptime_ms: int
    counters: _containers.RepeatedCompositeFieldContainer[Count]
    gauges: _containers.RepeatedCompositeFieldContainer[Count]
    latencies: _containers.RepeatedCompositeFieldContainer[LatencyHistogram]
    def __init__(self, generation: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., counters: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., gauges: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[LatencyHistogram, _Mapping]]] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedCompositeFieldContainer[Option]
    def __init__(self, options: _Optional[_Iterable[_Union[Option, _Mapping]]] = ...) -> None: ...

class Option(_message.Message):
    __slots__ = ("key", "value", "source")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    source: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next_page_token")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    next_page_token: str
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("spec", "digest", "sessions", "blocks", "hot_bytes", "quota_bytes", "max_bytes", "ttl_ms", "counters")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.NamespaceSpec
    digest: bytes
    sessions: int
    blocks: int
    hot_bytes: int
    quota_bytes: int
    max_bytes: int
    ttl_ms: int
    counters: _containers.RepeatedCompositeFieldContainer[Count]
    def __init__(self, spec: _Optional[_Union[_types_pb2.NamespaceSpec, _Mapping]] = ..., digest: _Optional[bytes] = ..., sessions: _Optional[int] = ..., blocks: _Optional[int] = ..., hot_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., counters: _Optional[_Iterable[_Union[Count, _Mapping]]] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "digest", "older_than_ms", "all")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    digest: bytes
    older_than_ms: int
    all: bool
    def __init__(self, tenant: _Optional[str] = ..., digest: _Optional[bytes] = ..., older_than_ms: _Optional[int] = ..., all: bool = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("blocks", "deferred_blocks", "bytes", "warm_blocks", "warm_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WARM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WARM_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    deferred_blocks: int
    bytes: int
    warm_blocks: int
    warm_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., deferred_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., warm_blocks: _Optional[int] = ..., warm_bytes: _Optional[int] = ...) -> None: ...

class SetWarmTierRequest(_message.Message):
    __slots__ = ("enabled", "capacity_bytes")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    capacity_bytes: int
    def __init__(self, enabled: bool = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class WarmTierStatus(_message.Message):
    __slots__ = ("state", "reason", "capacity_bytes", "stored_bytes", "stored_blocks", "writing_bytes", "promoting_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMOTING_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: WarmTierState
    reason: str
    capacity_bytes: int
    stored_bytes: int
    stored_blocks: int
    writing_bytes: int
    promoting_bytes: int
    def __init__(self, state: _Optional[_Union[WarmTierState, str]] = ..., reason: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., writing_bytes: _Optional[int] = ..., promoting_bytes: _Optional[int] = ...) -> None: ...
