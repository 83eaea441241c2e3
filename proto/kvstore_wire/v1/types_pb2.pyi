from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NamespaceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NAMESPACE_KIND_UNSPECIFIED: _ClassVar[NamespaceKind]
    NAMESPACE_KIND_KV: _ClassVar[NamespaceKind]
    NAMESPACE_KIND_OPAQUE: _ClassVar[NamespaceKind]

class ChainKnowledge(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAIN_KNOWLEDGE_UNSPECIFIED: _ClassVar[ChainKnowledge]
    CHAIN_KNOWLEDGE_CHAINED: _ClassVar[ChainKnowledge]
    CHAIN_KNOWLEDGE_ORDERED: _ClassVar[ChainKnowledge]
    CHAIN_KNOWLEDGE_NONE: _ClassVar[ChainKnowledge]

class AttentionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTENTION_KIND_UNSPECIFIED: _ClassVar[AttentionKind]
    ATTENTION_KIND_MHA: _ClassVar[AttentionKind]
    ATTENTION_KIND_MLA: _ClassVar[AttentionKind]

class Coverage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COVERAGE_PREFIX: _ClassVar[Coverage]
    COVERAGE_EACH: _ClassVar[Coverage]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_MISSING: _ClassVar[BlockState]
    BLOCK_STATE_HOT: _ClassVar[BlockState]
    BLOCK_STATE_WARM: _ClassVar[BlockState]
    BLOCK_STATE_IN_FLIGHT: _ClassVar[BlockState]
    BLOCK_STATE_BUSY: _ClassVar[BlockState]
    BLOCK_STATE_BEYOND: _ClassVar[BlockState]

class PartState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PART_STATE_REFUSED: _ClassVar[PartState]
    PART_STATE_CREATED: _ClassVar[PartState]
    PART_STATE_PRESENT: _ClassVar[PartState]
    PART_STATE_IN_FLIGHT: _ClassVar[PartState]
    PART_STATE_COMMITTED: _ClassVar[PartState]
    PART_STATE_FULL: _ClassVar[PartState]
    PART_STATE_QUOTA: _ClassVar[PartState]
    PART_STATE_TOO_LARGE: _ClassVar[PartState]
    PART_STATE_DRAINING: _ClassVar[PartState]
    PART_STATE_BEYOND: _ClassVar[PartState]
    PART_STATE_UNFILLED: _ClassVar[PartState]
    PART_STATE_LOST: _ClassVar[PartState]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_INVALID_ARGUMENT: _ClassVar[Reason]
    REASON_NAMESPACE_MISMATCH: _ClassVar[Reason]
    REASON_UNKNOWN_NAMESPACE: _ClassVar[Reason]
    REASON_UNKNOWN_SESSION: _ClassVar[Reason]
    REASON_LEASE_EXPIRED: _ClassVar[Reason]
    REASON_UNSUPPORTED: _ClassVar[Reason]
    REASON_VERSION: _ClassVar[Reason]
    REASON_DENIED: _ClassVar[Reason]
    REASON_FULL: _ClassVar[Reason]
    REASON_OVER_QUOTA: _ClassVar[Reason]
    REASON_DRAINING: _ClassVar[Reason]
    REASON_MEDIA: _ClassVar[Reason]
    REASON_UNREACHABLE: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_WRONG_SHARD: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
NAMESPACE_KIND_UNSPECIFIED: NamespaceKind
NAMESPACE_KIND_KV: NamespaceKind
NAMESPACE_KIND_OPAQUE: NamespaceKind
CHAIN_KNOWLEDGE_UNSPECIFIED: ChainKnowledge
CHAIN_KNOWLEDGE_CHAINED: ChainKnowledge
CHAIN_KNOWLEDGE_ORDERED: ChainKnowledge
CHAIN_KNOWLEDGE_NONE: ChainKnowledge
ATTENTION_KIND_UNSPECIFIED: AttentionKind
ATTENTION_KIND_MHA: AttentionKind
ATTENTION_KIND_MLA: AttentionKind
COVERAGE_PREFIX: Coverage
COVERAGE_EACH: Coverage
BLOCK_STATE_MISSING: BlockState
BLOCK_STATE_HOT: BlockState
BLOCK_STATE_WARM: BlockState
BLOCK_STATE_IN_FLIGHT: BlockState
BLOCK_STATE_BUSY: BlockState
BLOCK_STATE_BEYOND: BlockState
PART_STATE_REFUSED: PartState
PART_STATE_CREATED: PartState
PART_STATE_PRESENT: PartState
PART_STATE_IN_FLIGHT: PartState
PART_STATE_COMMITTED: PartState
PART_STATE_FULL: PartState
PART_STATE_QUOTA: PartState
PART_STATE_TOO_LARGE: PartState
PART_STATE_DRAINING: PartState
PART_STATE_BEYOND: PartState
PART_STATE_UNFILLED: PartState
PART_STATE_LOST: PartState
REASON_UNSPECIFIED: Reason
REASON_INVALID_ARGUMENT: Reason
REASON_NAMESPACE_MISMATCH: Reason
REASON_UNKNOWN_NAMESPACE: Reason
REASON_UNKNOWN_SESSION: Reason
REASON_LEASE_EXPIRED: Reason
REASON_UNSUPPORTED: Reason
REASON_VERSION: Reason
REASON_DENIED: Reason
REASON_FULL: Reason
REASON_OVER_QUOTA: Reason
REASON_DRAINING: Reason
REASON_MEDIA: Reason
REASON_UNREACHABLE: Reason
REASON_DEADLINE: Reason
REASON_WRONG_SHARD: Reason
REASON_INTERNAL: Reason

class Geometry(_message.Message):
    __slots__ = ("block_tokens", "dtype", "layers", "kv_heads", "head_dim", "attention", "layout", "layer_groups", "head_shards")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHARDS_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    attention: AttentionKind
    layout: str
    layer_groups: int
    head_shards: int
    def __init__(self, block_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., attention: _Optional[_Union[AttentionKind, str]] = ..., layout: _Optional[str] = ..., layer_groups: _Optional[int] = ..., head_shards: _Optional[int] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("name", "tenant", "kind", "model", "weights_revision", "geometry", "part_bytes", "key_scheme", "chains", "facts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEME_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    kind: NamespaceKind
    model: str
    weights_revision: str
    geometry: Geometry
    part_bytes: int
    key_scheme: str
    chains: ChainKnowledge
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., kind: _Optional[_Union[NamespaceKind, str]] = ..., model: _Optional[str] = ..., weights_revision: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., part_bytes: _Optional[int] = ..., key_scheme: _Optional[str] = ..., chains: _Optional[_Union[ChainKnowledge, str]] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("id", "generation", "ttl_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    ttl_ms: int
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("keys", "parent", "position")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    position: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., position: _Optional[int] = ...) -> None: ...

class PartSelection(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parts: _Optional[_Iterable[int]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("offset", "length", "stride", "count")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    stride: int
    count: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., stride: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class RegionSlices(_message.Message):
    __slots__ = ("region", "offsets", "lengths", "counts")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    region: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, region: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Hint(_message.Message):
    __slots__ = ("next_use", "session_tag")
    NEXT_USE_FIELD_NUMBER: _ClassVar[int]
    SESSION_TAG_FIELD_NUMBER: _ClassVar[int]
    next_use: int
    session_tag: int
    def __init__(self, next_use: _Optional[int] = ..., session_tag: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "retryable", "retry_after_ms", "field", "limit")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    retryable: bool
    retry_after_ms: int
    field: str
    limit: str
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., retryable: bool = ..., retry_after_ms: _Optional[int] = ..., field: _Optional[str] = ..., limit: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_match_blocks", "max_blocks", "max_parts_per_block", "max_part_bytes", "max_call_bytes", "max_wait_ms", "default_lease_ms", "max_lease_ms", "max_message_bytes", "chunk_bytes", "session_open_ms")
    MAX_MATCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_PARTS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CALL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_OPEN_MS_FIELD_NUMBER: _ClassVar[int]
    max_match_blocks: int
    max_blocks: int
    max_parts_per_block: int
    max_part_bytes: int
    max_call_bytes: int
    max_wait_ms: int
    default_lease_ms: int
    max_lease_ms: int
    max_message_bytes: int
    chunk_bytes: int
    session_open_ms: int
    def __init__(self, max_match_blocks: _Optional[int] = ..., max_blocks: _Optional[int] = ..., max_parts_per_block: _Optional[int] = ..., max_part_bytes: _Optional[int] = ..., max_call_bytes: _Optional[int] = ..., max_wait_ms: _Optional[int] = ..., default_lease_ms: _Optional[int] = ..., max_lease_ms: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., session_open_ms: _Optional[int] = ...) -> None: ...
