"""Codec of the inline streams' data messages.

`GetResponse.data` and `PutRequest.data` are both field 2 of type bytes. Serialising them with the protobuf library
copies the payload twice more than needed, so that one shape is written and read by hand here: the bytes on the wire
are exactly those of the library, and every other message goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import block_store_pb2 as store

DATA_TAG = 0x12  # Field 2, length-delimited.

Buffer: TypeAlias = "bytes | bytearray | memoryview"
_M = TypeVar("_M", store.GetResponse, store.PutRequest)


def encode_data(pieces: Sequence[Buffer], size_bytes: int) -> bytes:
    """Returns the message that carries `pieces` (together `size_bytes` long) as its data: one copy of each piece."""
    return b"".join((_prefix(size_bytes), *pieces))


def data_of(raw: bytes) -> memoryview | None:
    """Returns a view of the data if `raw` is exactly one data field, else None. The view keeps `raw` alive."""
    if not raw or raw[0] != DATA_TAG:
        return None
    size, at = _varint(raw, 1)
    if at < 0 or len(raw) - at != size:
        return None
    return memoryview(raw)[at:]


def decode_get(raw: bytes) -> memoryview | store.GetResponse:
    """Decodes one message of a Get stream: its payload, or the parsed message."""
    data = data_of(raw)
    return data if data is not None else _parsed(store.GetResponse(), raw)


def decode_put(raw: bytes) -> memoryview | store.PutRequest:
    """Decodes one message of a Put stream. Raises InvalidArgument if it is not a message at all."""
    data = data_of(raw)
    return data if data is not None else _parsed(store.PutRequest(), raw)


def _parsed(message: _M, raw: bytes) -> _M:
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidArgument("is not a message of this stream", field="message") from error
    return message


def _prefix(size: int) -> bytes:
    out = bytearray((DATA_TAG,))
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Returns (value, index after it), or (0, -1) if `raw` ends first or the number is too long."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(raw):
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, -1
