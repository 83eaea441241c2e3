from kvstore_wire.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("session", "credit_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    credit_bytes: int
    def __init__(self, session: _Optional[bytes] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class HelloAnswer(_message.Message):
    __slots__ = ("generation", "max_frame_bytes", "credit_bytes", "may_map")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAY_MAP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    max_frame_bytes: int
    credit_bytes: int
    may_map: bool
    def __init__(self, generation: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., may_map: bool = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: _types_pb2.ErrorDetail
    def __init__(self, why: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class MapArenaRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class MapArenaResponse(_message.Message):
    __slots__ = ("generation", "size_bytes")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    size_bytes: int
    def __init__(self, generation: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("session", "offset", "length")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    offset: int
    length: int
    def __init__(self, session: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ("region",)
    REGION_FIELD_NUMBER: _ClassVar[int]
    region: int
    def __init__(self, region: _Optional[int] = ...) -> None: ...

class UnregisterRegionRequest(_message.Message):
    __slots__ = ("session", "region")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    region: int
    def __init__(self, session: _Optional[bytes] = ..., region: _Optional[int] = ...) -> None: ...

class UnregisterRegionResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...
