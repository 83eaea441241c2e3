"""The fast channel's bytes, as released: a frame of every kind, and the example of docs/fast-channel.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore_wire.errors import LeaseExpired
from kvstore_wire.frames import END, ERROR, HEADER, HEADER_BYTES, VERB_OF_METHOD, Frame, FrameReader, Verb, head
from kvstore_wire.methods import STORE_METHODS
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import channel_pb2 as channel
from kvstore_wire.v1 import types_pb2 as types

PAGE = Path(__file__).resolve().parents[2] / "docs/fast-channel.md"
VERBS = {
    "HELLO": 1,
    "GOODBYE": 2,
    "CREDIT": 3,
    "CANCEL": 4,
    "MAP_ARENA": 8,
    "REGISTER_REGION": 9,
    "UNREGISTER_REGION": 10,
    "ATTACH": 16,
    "SESSION": 17,
    "MATCH": 18,
    "ACQUIRE": 19,
    "RENEW": 20,
    "RELEASE": 21,
    "RESERVE": 22,
    "COMMIT": 23,
    "ABORT": 24,
    "GET": 25,
    "PUT": 26,
    "DELETE": 27,
    "OVER": 28,
    "EXPLAIN": 29,
}
SESSION = bytes(range(16))
KEY = bytes(range(32))
EXPIRED = LeaseExpired("ended", field="lease").to_detail()
REGION = types.RegionSlices(region=1, offsets=[4096], lengths=[3])

# What is sent of each kind of frame, and its bytes.
FRAMES: dict[str, tuple[bytes, str]] = {
    "hello": (
        head(Verb.HELLO, 1, channel.Hello(session=SESSION, credit_bytes=65536).SerializeToString(), flags=END),
        "4b56010101000000010000000000000016000000000000000a10000102030405060708090a0b0c0d0e0f10808004",
    ),
    "hello answered": (
        head(
            Verb.HELLO,
            1,
            channel.HelloAnswer(
                generation=0x1122334455667788, max_frame_bytes=1 << 20, credit_bytes=64 << 20, may_map=True
            ).SerializeToString(),
            flags=END,
        ),
        "4b56010101000000010000000000000014000000000000000988776655443322111080804018808080202001",
    ),
    "goodbye": (
        head(Verb.GOODBYE, 0, channel.Goodbye(why=EXPIRED).SerializeToString(), flags=END),
        "4b56010201000000000000000000000012000000000000000a1008051205656e6465642a056c65617365",
    ),
    "credit": (
        head(Verb.CREDIT, 0, channel.Credit(bytes=1 << 20).SerializeToString(), flags=END),
        "4b560103010000000000000000000000040000000000000008808040",
    ),
    "cancel": (head(Verb.CANCEL, 258, flags=END), "4b5601040100000002010000000000000000000000000000"),
    "map arena": (
        head(Verb.MAP_ARENA, 2, channel.MapArenaRequest(session=SESSION).SerializeToString(), flags=END),
        "4b56010801000000020000000000000012000000000000000a10000102030405060708090a0b0c0d0e0f",
    ),
    "register region": (
        head(
            Verb.REGISTER_REGION,
            3,
            channel.RegisterRegionRequest(session=SESSION, offset=4096, length=8192).SerializeToString(),
            flags=END,
        ),
        "4b56010901000000030000000000000018000000000000000a10000102030405060708090a0b0c0d0e0f108020188040",
    ),
    "unregister region": (
        head(
            Verb.UNREGISTER_REGION,
            4,
            channel.UnregisterRegionRequest(session=SESSION, region=1).SerializeToString(),
            flags=END,
        ),
        "4b56010a01000000040000000000000014000000000000000a10000102030405060708090a0b0c0d0e0f1001",
    ),
    "get": (
        head(
            Verb.GET,
            5,
            pb.GetRequest(session=SESSION, namespace=1, chain=types.Chain(keys=[KEY])).SerializeToString(),
            flags=END,
            timeout_ms=1000,
        ),
        "4b5601190100000005000000e80300003800000000000000"
        "0a10000102030405060708090a0b0c0d0e0f10011a220a20"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "get answered with its bytes": (
        head(
            Verb.GET,
            5,
            pb.GetResponse(
                header=pb.GetHeader(states=b"\1", lengths=[3], checksums=[0x0102030405060708])
            ).SerializeToString(),
            flags=END,
            payload_bytes=3,
        )
        + b"abc",
        "4b56011901000000050000000000000019000000030000000a170a0101120803000000000000001a080807060504030201616263",
    ),
    "get answered by an error": (
        head(Verb.GET, 5, EXPIRED.SerializeToString(), flags=ERROR),
        "4b560119020000000500000000000000100000000000000008051205656e6465642a056c65617365",
    ),
    "put begins": (
        head(
            Verb.PUT,
            6,
            pb.PutRequest(
                header=pb.PutHeader(session=SESSION, namespace=1, chain=types.Chain(keys=[KEY]))
            ).SerializeToString(),
        ),
        "4b56011a0000000006000000000000003a00000000000000"
        "0a380a10000102030405060708090a0b0c0d0e0f10011a220a20"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "put's bytes": (
        head(Verb.PUT, 6, payload_bytes=3) + b"abc",
        "4b56011a0000000006000000000000000000000003000000616263",
    ),
    "put's trailer": (
        head(
            Verb.PUT,
            6,
            pb.PutRequest(trailer=pb.PutTrailer(checksums=[0x0102030405060708])).SerializeToString(),
            flags=END,
        ),
        "4b56011a0100000006000000000000000c000000000000001a0a0a080807060504030201",
    ),
    "put from a region": (
        head(
            Verb.PUT,
            7,
            pb.PutRequest(header=pb.PutHeader(session=SESSION, namespace=1, source=REGION)).SerializeToString(),
        ),
        "4b56011a0000000007000000000000002e00000000000000"
        "0a2c0a10000102030405060708090a0b0c0d0e0f1001"
        "4216080112080010000000000000"
        "1a080300000000000000",
    ),
}


class Collector:
    """A receiver that keeps frames as (header, message, payload)."""

    def __init__(self) -> None:
        self.came: list[tuple[Frame, bytes, bytes]] = []
        self._payload = bytearray()
        self._room = memoryview(b"")

    def frame(self, frame: Frame, message: memoryview) -> Collector:
        self.came.append((frame, bytes(message), b""))
        self._payload.clear()
        return self

    def room(self, most: int) -> memoryview:
        self._room = memoryview(bytearray(most))
        return self._room

    def landed(self, size: int) -> None:
        self._payload += self._room[:size]

    def payload_landed(self, frame: Frame) -> None:
        self.came[-1] = (*self.came[-1][:2], bytes(self._payload))


def decoded(raw: bytes) -> list[tuple[Frame, bytes, bytes]]:
    collector = Collector()
    frames = FrameReader(collector, max_message_bytes=1 << 20, max_payload_bytes=1 << 20, scratch_bytes=1 << 20)
    frames.wanted()[: len(raw)] = raw
    frames.landed(len(raw))
    assert frames.between_frames
    return collector.came


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_a_frame_is_written_as_it_always_was(name: str) -> None:
    made, golden = FRAMES[name]
    assert made.hex() == golden


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_bytes_written_by_an_older_release_are_read_as_they_were_meant(name: str) -> None:
    raw = bytes.fromhex(FRAMES[name][1])
    ((frame, message, payload),) = decoded(raw)
    made = head(
        frame.verb,
        frame.request,
        message,
        flags=frame.flags,
        timeout_ms=frame.timeout_ms,
        payload_bytes=frame.payload_bytes,
    )
    assert made + payload == raw


def test_numbers_of_verbs_never_change() -> None:
    assert {verb.name: verb.value for verb in Verb} == VERBS


def test_every_rpc_of_the_data_door_has_its_verb() -> None:
    assert {name: VERBS[name.upper()] for name in STORE_METHODS} == VERB_OF_METHOD


# -- the page ------------------------------------------------------------------------------------------------------


def example() -> list[tuple[str, bytes]]:
    """The frames of the page's worked example: who sends it, and its bytes without the comments."""
    block = re.search(r"```text\n(client .*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    found: list[tuple[str, bytes]] = []
    for line in block[1].splitlines():
        who = re.match(r"(client|shard) ", line)
        if who is not None:
            found.append((who[1], b""))
        digits = "".join(re.findall(r"\b[0-9a-f]{2}\b", line.partition("|")[0].removeprefix(who[0] if who else "")))
        if found and digits:
            found[-1] = (found[-1][0], found[-1][1] + bytes.fromhex(digits))
    return [(who, raw) for who, raw in found if raw]


def test_the_example_of_the_page_is_what_the_codec_makes() -> None:
    sent = example()
    assert [who for who, _ in sent] == ["client", "shard", "client", "shard", "client", "client", "client", "shard"]
    expected = [
        "hello without a session",
        "hello answered",
        "get",
        "get answered with its bytes",
        "put begins",
        "put's bytes",
        "put's trailer",
    ]
    hello = head(Verb.HELLO, 1, channel.Hello(credit_bytes=1 << 20).SerializeToString(), flags=END)
    frames = {"hello without a session": hello, **{name: made for name, (made, _) in FRAMES.items()}}
    for (_, raw), name in zip(sent, expected, strict=False):
        assert raw.hex() == frames[name].hex(), name
    answer = pb.PutResponse(states=bytes((types.PART_STATE_COMMITTED,))).SerializeToString()
    assert sent[-1][1] == head(Verb.PUT, 6, answer, flags=END)
    assert len(decoded(b"".join(raw for _, raw in sent))) == len(sent)


def test_the_page_s_table_of_verbs_is_the_codec_s() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", PAGE.read_text(), re.MULTILINE))
    assert {name: int(number) for number, name in rows.items()} == VERBS


def test_the_page_s_table_of_the_header_is_the_codec_s() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    at, sizes = 0, {"B": 1, "H": 2, "I": 4}
    for (offset, size, _), kind in zip(rows, HEADER.format.lstrip("<"), strict=True):
        assert (int(offset), int(size)) == (at, sizes[kind])
        at += sizes[kind]
    assert at == HEADER_BYTES == 24
