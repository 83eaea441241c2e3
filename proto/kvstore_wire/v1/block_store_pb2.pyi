from kvstore_wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeleteState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELETE_STATE_NOT_FOUND: _ClassVar[DeleteState]
    DELETE_STATE_DELETED: _ClassVar[DeleteState]
    DELETE_STATE_DEFERRED: _ClassVar[DeleteState]
DELETE_STATE_NOT_FOUND: DeleteState
DELETE_STATE_DELETED: DeleteState
DELETE_STATE_DEFERRED: DeleteState

class AttachRequest(_message.Message):
    __slots__ = ("min_version", "max_version", "client", "session", "namespace", "digest", "features")
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    max_version: int
    client: str
    session: bytes
    namespace: _types_pb2.NamespaceSpec
    digest: bytes
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., client: _Optional[str] = ..., session: _Optional[bytes] = ..., namespace: _Optional[_Union[_types_pb2.NamespaceSpec, _Mapping]] = ..., digest: _Optional[bytes] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("version", "session", "generation", "namespace", "digest", "limits", "transports", "features", "shard")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: bytes
    generation: int
    namespace: int
    digest: bytes
    limits: _types_pb2.Limits
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    features: _containers.RepeatedScalarFieldContainer[str]
    shard: str
    def __init__(self, version: _Optional[int] = ..., session: _Optional[bytes] = ..., generation: _Optional[int] = ..., namespace: _Optional[int] = ..., digest: _Optional[bytes] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., features: _Optional[_Iterable[str]] = ..., shard: _Optional[str] = ...) -> None: ...

class Transport(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class SessionPulse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class SessionNotice(_message.Message):
    __slots__ = ("opened", "draining", "leases_ended", "purged")
    class Opened(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Draining(_message.Message):
        __slots__ = ("within_ms",)
        WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
        within_ms: int
        def __init__(self, within_ms: _Optional[int] = ...) -> None: ...
    class LeasesEnded(_message.Message):
        __slots__ = ("ids",)
        IDS_FIELD_NUMBER: _ClassVar[int]
        ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...
    class Purged(_message.Message):
        __slots__ = ("namespace",)
        NAMESPACE_FIELD_NUMBER: _ClassVar[int]
        namespace: int
        def __init__(self, namespace: _Optional[int] = ...) -> None: ...
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    opened: SessionNotice.Opened
    draining: SessionNotice.Draining
    leases_ended: SessionNotice.LeasesEnded
    purged: SessionNotice.Purged
    def __init__(self, opened: _Optional[_Union[SessionNotice.Opened, _Mapping]] = ..., draining: _Optional[_Union[SessionNotice.Draining, _Mapping]] = ..., leases_ended: _Optional[_Union[SessionNotice.LeasesEnded, _Mapping]] = ..., purged: _Optional[_Union[SessionNotice.Purged, _Mapping]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("session", "namespace", "chain", "parts", "coverage")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    parts: _types_pb2.PartSelection
    coverage: _types_pb2.Coverage
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ..., parts: _Optional[_Union[_types_pb2.PartSelection, _Mapping]] = ..., coverage: _Optional[_Union[_types_pb2.Coverage, str]] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("prefix_blocks", "states")
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    prefix_blocks: int
    states: bytes
    def __init__(self, prefix_blocks: _Optional[int] = ..., states: _Optional[bytes] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session", "namespace", "chain", "parts", "coverage", "wait_ms", "lease_ms", "hint", "ranges")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    parts: _types_pb2.PartSelection
    coverage: _types_pb2.Coverage
    wait_ms: int
    lease_ms: int
    hint: _types_pb2.Hint
    ranges: _containers.RepeatedCompositeFieldContainer[_types_pb2.Range]
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ..., parts: _Optional[_Union[_types_pb2.PartSelection, _Mapping]] = ..., coverage: _Optional[_Union[_types_pb2.Coverage, str]] = ..., wait_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., hint: _Optional[_Union[_types_pb2.Hint, _Mapping]] = ..., ranges: _Optional[_Iterable[_Union[_types_pb2.Range, _Mapping]]] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease", "first", "states", "offsets", "lengths", "checksums", "settled")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    lease: _types_pb2.Lease
    first: int
    states: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    settled: bool
    def __init__(self, lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., first: _Optional[int] = ..., states: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., settled: bool = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session", "leases", "lease_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    leases: _containers.RepeatedCompositeFieldContainer[_types_pb2.Lease]
    lease_ms: int
    def __init__(self, session: _Optional[bytes] = ..., leases: _Optional[_Iterable[_Union[_types_pb2.Lease, _Mapping]]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, valid: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "leases", "corrupt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    leases: _containers.RepeatedCompositeFieldContainer[_types_pb2.Lease]
    corrupt: _containers.RepeatedCompositeFieldContainer[CorruptPart]
    def __init__(self, session: _Optional[bytes] = ..., leases: _Optional[_Iterable[_Union[_types_pb2.Lease, _Mapping]]] = ..., corrupt: _Optional[_Iterable[_Union[CorruptPart, _Mapping]]] = ...) -> None: ...

class CorruptPart(_message.Message):
    __slots__ = ("lease", "part")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    lease: int
    part: int
    def __init__(self, lease: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, valid: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "namespace", "chain", "parts", "lengths", "lease_ms", "hint", "wait_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    parts: _types_pb2.PartSelection
    lengths: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    hint: _types_pb2.Hint
    wait_ms: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ..., parts: _Optional[_Union[_types_pb2.PartSelection, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ..., hint: _Optional[_Union[_types_pb2.Hint, _Mapping]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease", "states", "offsets", "retry_after_ms")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    lease: _types_pb2.Lease
    states: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    retry_after_ms: int
    def __init__(self, lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., states: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "lease", "checksums", "parts")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    lease: _types_pb2.Lease
    checksums: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[bytes] = ..., lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    def __init__(self, states: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "leases")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    leases: _containers.RepeatedCompositeFieldContainer[_types_pb2.Lease]
    def __init__(self, session: _Optional[bytes] = ..., leases: _Optional[_Iterable[_Union[_types_pb2.Lease, _Mapping]]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, valid: _Optional[_Iterable[bool]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session", "namespace", "chain", "lease", "parts", "coverage", "wait_ms", "hint", "ranges", "into")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    lease: _types_pb2.Lease
    parts: _types_pb2.PartSelection
    coverage: _types_pb2.Coverage
    wait_ms: int
    hint: _types_pb2.Hint
    ranges: _containers.RepeatedCompositeFieldContainer[_types_pb2.Range]
    into: _types_pb2.RegionSlices
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ..., lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., parts: _Optional[_Union[_types_pb2.PartSelection, _Mapping]] = ..., coverage: _Optional[_Union[_types_pb2.Coverage, str]] = ..., wait_ms: _Optional[int] = ..., hint: _Optional[_Union[_types_pb2.Hint, _Mapping]] = ..., ranges: _Optional[_Iterable[_Union[_types_pb2.Range, _Mapping]]] = ..., into: _Optional[_Union[_types_pb2.RegionSlices, _Mapping]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("header", "data", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    data: bytes
    trailer: GetTrailer
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[GetTrailer, _Mapping]] = ...) -> None: ...

class GetHeader(_message.Message):
    __slots__ = ("states", "lengths", "checksums")
    STATES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    lengths: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, states: _Optional[bytes] = ..., lengths: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class GetTrailer(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "data", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    data: bytes
    trailer: PutTrailer
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[PutTrailer, _Mapping]] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("session", "namespace", "chain", "lease", "parts", "lengths", "hint", "source")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    lease: _types_pb2.Lease
    parts: _types_pb2.PartSelection
    lengths: _containers.RepeatedScalarFieldContainer[int]
    hint: _types_pb2.Hint
    source: _types_pb2.RegionSlices
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ..., lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., parts: _Optional[_Union[_types_pb2.PartSelection, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., hint: _Optional[_Union[_types_pb2.Hint, _Mapping]] = ..., source: _Optional[_Union[_types_pb2.RegionSlices, _Mapping]] = ...) -> None: ...

class PutTrailer(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("states", "retry_after_ms")
    STATES_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    retry_after_ms: int
    def __init__(self, states: _Optional[bytes] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    def __init__(self, states: _Optional[bytes] = ...) -> None: ...

class OverRequest(_message.Message):
    __slots__ = ("session", "namespace", "chain", "session_tag")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SESSION_TAG_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    session_tag: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ..., session_tag: _Optional[int] = ...) -> None: ...

class OverResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("session", "namespace", "chain")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: int
    chain: _types_pb2.Chain
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.Chain, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("fields", "digest", "blocks", "first_missing")
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[_types_pb2.Fact]
    digest: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[ExplainedBlock]
    first_missing: int
    def __init__(self, fields: _Optional[_Iterable[_Union[_types_pb2.Fact, _Mapping]]] = ..., digest: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[ExplainedBlock, _Mapping]]] = ..., first_missing: _Optional[int] = ...) -> None: ...

class ExplainedBlock(_message.Message):
    __slots__ = ("key", "state", "parts_present", "parts_total", "leases", "age_ms", "idle_ms", "note")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARTS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    state: _types_pb2.BlockState
    parts_present: int
    parts_total: int
    leases: int
    age_ms: int
    idle_ms: int
    note: str
    def __init__(self, key: _Optional[bytes] = ..., state: _Optional[_Union[_types_pb2.BlockState, str]] = ..., parts_present: _Optional[int] = ..., parts_total: _Optional[int] = ..., leases: _Optional[int] = ..., age_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...
