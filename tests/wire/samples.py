"""One message of every kind with every field set, by name alone: no number of the contract is used to make it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvstore_wire.methods import ADMIN_METHODS, STORE_METHODS
from kvstore_wire.v1 import types_pb2 as types


def sample(kind: type[Message], chosen: str = "") -> Message:
    """A message with every field set; `chosen` names the member of its oneof that is set."""
    message = kind()
    for field in _fields(message):
        if field.containing_oneof is None or len(field.containing_oneof.fields) == 1 or field.name == chosen:
            _set(message, field)
    return message


def samples() -> Iterator[tuple[str, Message]]:
    """(name, message) of everything that crosses the wire: requests and answers of every rpc, and the error detail."""
    rows = [*STORE_METHODS.values(), *ADMIN_METHODS.values()]
    kinds = {kind.DESCRIPTOR.name: kind for row in rows for kind in (row.request, row.response)}
    kinds["ErrorDetail"] = types.ErrorDetail
    for name, kind in sorted(kinds.items()):
        choices = sorted(f.name for o in kind.DESCRIPTOR.oneofs if len(o.fields) > 1 for f in o.fields)
        for chosen in choices or [""]:
            yield f"{name}.{chosen}" if chosen else name, sample(kind, chosen)


def _fields(message: Message) -> list[FieldDescriptor]:
    """Fields by name, so that neither their numbers nor their order in the contract matter."""
    fields = cast("list[FieldDescriptor]", list(message.DESCRIPTOR.fields))
    return sorted(fields, key=lambda f: f.name)


def _set(message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None:
        target = getattr(message, field.name)
        inner = target.add() if field.is_repeated else target
        inner.SetInParent()
        for child in _fields(inner):
            _set(inner, child)
        return
    value = _value(field)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _value(field: FieldDescriptor) -> object:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return field.name.encode() if field.type == FieldDescriptor.TYPE_BYTES else field.name
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return 1
    return zlib.crc32(field.name.encode()) % 1000 + 1
