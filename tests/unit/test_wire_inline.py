"""The hand-written codec of payload messages gives and takes exactly the protobuf library's bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_wire.errors import InvalidArgument
from kvstore_wire.inline import data_of, decode_get, decode_put, encode_data
from kvstore_wire.v1 import block_store_pb2 as store

payloads = st.one_of(st.binary(max_size=300), st.sampled_from([0, 1, 127, 128, 16383, 16384, 1 << 21]).map(bytes))


@given(st.lists(payloads, max_size=4))
def test_encoded_data_is_what_the_library_writes(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    views = [memoryview(bytearray(p)) for p in pieces]
    raw = encode_data(views, len(whole))
    assert raw == store.GetResponse(data=whole).SerializeToString()
    assert raw == store.PutRequest(data=whole).SerializeToString()


@given(payloads)
def test_data_that_the_library_wrote_is_read_without_a_copy(payload: bytes) -> None:
    raw = store.PutRequest(data=payload).SerializeToString()
    for data in (decode_put(raw), decode_get(raw), data_of(raw)):
        assert isinstance(data, memoryview)
        assert data == payload
        assert data.obj is raw


headers = st.builds(
    store.GetHeader,
    states=st.binary(max_size=20),
    lengths=st.lists(st.integers(0, 2**64 - 1), max_size=4),
    checksums=st.lists(st.integers(0, 2**64 - 1), max_size=4),
)


@given(headers)
def test_every_other_message_goes_through_the_library(header: store.GetHeader) -> None:
    message = store.GetResponse(header=header)
    assert decode_get(message.SerializeToString()) == message


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_trailers_go_through_the_library(checksums: list[int]) -> None:
    message = store.PutRequest(trailer=store.PutTrailer(checksums=checksums))
    assert decode_put(message.SerializeToString()) == message


def payload_of(message: memoryview | store.PutRequest) -> tuple[str | None, bytes]:
    """What a message says, whichever way it was decoded."""
    if isinstance(message, memoryview):
        return "data", bytes(message)
    return message.WhichOneof("body"), message.data


@given(st.one_of(st.binary(max_size=40), st.binary(max_size=40).map(lambda b: b"\x12" + b)))
def test_any_bytes_mean_what_the_library_says_they_mean_or_are_refused(raw: bytes) -> None:
    try:
        expected = store.PutRequest.FromString(raw)
    except Exception:  # noqa: BLE001 - the library's own error has no public base on all versions
        with pytest.raises(InvalidArgument) as caught:
            decode_put(raw)
        assert caught.value.field == "message"
        return
    assert payload_of(decode_put(raw)) == (expected.WhichOneof("body"), expected.data)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x12",
        b"\x12\x80",
        b"\x12\x05abc",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x03ab",
        b"\xff\xff\xff",
    ],
)
def test_torn_messages_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArgument):
        decode_put(raw)
    with pytest.raises(InvalidArgument):
        decode_get(raw)


def test_two_data_fields_in_one_message_are_the_last_one_as_the_library_says() -> None:
    raw = encode_data([b"first"], 5) + encode_data([b"second"], 6)
    message = decode_put(raw)
    assert isinstance(message, store.PutRequest)
    assert message.data == b"second"
