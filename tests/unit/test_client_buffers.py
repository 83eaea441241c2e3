"""Callers' buffers, where bytes land, and how they leave."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore_client import Coverage, Geometry, InvalidArgument, Kind, MalformedAnswer, NamespaceSpec, Verify
from kvstore_client.buffers import Slices, check_exact, check_most, readable, size_of, writable
from kvstore_client.grants import Grants
from kvstore_client.landing import Landing
from kvstore_client.outgoing import Outgoing
from kvstore_client.question import question
from kvstore_client.receivers import ChainReceiver, LeaseReceiver
from kvstore_wire.states import BlockState
from kvstore_wire.v1 import block_store_pb2 as store

GEOMETRY = Geometry(block_tokens=16, dtype="bfloat16", layers=4, kv_heads=2, head_dim=64, layer_groups=2)
KV = NamespaceSpec(name="kv", model="m", part_bytes=4, geometry=GEOMETRY)
OPAQUE = NamespaceSpec(name="o", model="m", part_bytes=8, kind=Kind.OPAQUE)
HOT, MISSING, BEYOND = BlockState.HOT, BlockState.MISSING, BlockState.BEYOND


def split(data: bytearray, rng: random.Random) -> Slices:
    """Cuts a buffer into views at random places, empty ones included."""
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4)))
    ends = [0, *cuts, len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("seed", range(30))
def test_parts_survive_any_cutting(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.randbytes(rng.choice([0, 1, 7, 100, 1000])) for _ in range(rng.randint(1, 20))]
    sources = [split(bytearray(v), rng) for v in values]
    outgoing = Outgoing(sources, chunk_bytes=rng.choice([1, 13, 256, 5000]))
    stream = b"".join(b"".join(views) for views, _ in outgoing.pieces())
    assert stream == b"".join(values)
    assert outgoing.checksums == [xxh3_64_intdigest(v) for v in values]
    rooms = [bytearray(len(v)) for v in values]
    landing = Landing(
        lengths=[len(v) for v in values],
        checksums=outgoing.checksums,
        targets=[split(room, rng) for room in rooms],
        verify=Verify.ON,
    )
    step = rng.choice([1, 9, 128, 4000])
    for at in range(0, len(stream), step):
        landing.feed(memoryview(stream)[at : at + step])
    landing.finish()
    assert rooms == values
    assert landing.corrupt == []


def test_pieces_keep_to_their_size() -> None:
    outgoing = Outgoing([[memoryview(bytes(10))], [memoryview(b"")], [memoryview(bytes(7))]], chunk_bytes=4)
    assert [size for _, size in outgoing.pieces()] == [4, 4, 4, 4, 1]
    assert len(outgoing.checksums) == 3


@pytest.mark.parametrize("step", [1, 3, 100])
def test_damage_is_noted_for_its_part_alone(step: int) -> None:
    values = [b"aaaa", b"bbbb", b"", b"cccc"]
    sums = [xxh3_64_intdigest(v) for v in values]
    rooms = [bytearray(4) for _ in values]
    for verify, noted in ((Verify.ON, [1]), (Verify.OFF, [])):
        landing = Landing(lengths=[4, 4, 0, 4], checksums=sums, targets=[[memoryview(r)] for r in rooms], verify=verify)
        for at in range(0, 12, step):
            landing.feed(memoryview(b"aaaabXbbcccc")[at : at + step])
        landing.finish()
        assert landing.corrupt == noted


def test_more_or_fewer_bytes_than_announced_fail() -> None:
    def landing() -> Landing:
        return Landing(lengths=[2], checksums=[0], targets=[[memoryview(bytearray(2))]], verify=Verify.OFF)

    with pytest.raises(MalformedAnswer, match="more bytes"):
        landing().feed(memoryview(b"abc"))
    short = landing()
    short.feed(memoryview(b"a"))
    with pytest.raises(MalformedAnswer, match="cut in part 0"):
        short.finish()


def test_parts_without_a_target_are_passed_over() -> None:
    room = bytearray(2)
    landing = Landing(lengths=[3, 2], checksums=[1, 1], targets=[None, [memoryview(room)]], verify=Verify.OFF)
    for byte in b"abcde":
        landing.feed(memoryview(bytes((byte,))))
    landing.finish()
    assert room == b"de"


def test_all_kinds_of_buffers_are_seen_as_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    entries = [b"ab", bytearray(3), memoryview(b"xyz"), array, np.float64(1.5), [array[0], array[1]], np.empty(0), []]
    views = readable(entries, 8, "values")
    assert [size_of(v) for v in views] == [2, 3, 3, 24, 8, 24, 0, 0]
    assert views[3][0].tobytes() == array.tobytes()
    assert b"".join(views[5]) == array.tobytes()


def test_writes_reach_the_array_behind_a_view() -> None:
    array = np.zeros((2, 2), np.uint16)
    (view,) = writable([array], 1, "into")
    view[0][0:2] = b"\x01\x02"
    assert array[0, 0] == 0x0201


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("text", "not a buffer"),
        (5, "not a buffer"),
        ([b"ok", 5], "not a buffer"),
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        (np.zeros((4, 4)).T, "not contiguous"),
        (memoryview(b"abcd")[::2], "not contiguous"),
        (np.array([object()]), "Python objects"),
    ],
)
def test_what_is_no_flat_buffer_is_refused_by_name(entry: object, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"values\[1\].*{reason}"):
        readable([b"", entry], 2, "values")


def test_sizes_and_counts_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"into\[0\]: is read-only"):
        writable([b"abc"], 1, "into")
    with pytest.raises(InvalidArgument, match="has 1 entries"):
        readable([b"a"], 2, "values")
    with pytest.raises(InvalidArgument, match="list or tuple"):
        readable(b"ab", 2, "values")
    with pytest.raises(InvalidArgument, match=r"v\[1\].*exactly 2 bytes"):
        check_exact([[memoryview(b"ab")], [memoryview(b"a")]], 2, "v")
    with pytest.raises(InvalidArgument, match=r"v\[0\].*at most 1 bytes"):
        check_most([[memoryview(b"ab")]], 1, "v")


def header(states: bytes, values: list[bytes]) -> store.GetHeader:
    sums = [xxh3_64_intdigest(v) for v in values]
    return store.GetHeader(states=states, lengths=[len(v) for v in values], checksums=sums)


def received(receiver: ChainReceiver, head: store.GetHeader, data: bytes) -> ChainReceiver:
    receiver.begin(head)
    receiver.feed(memoryview(data))
    receiver.finish()
    return receiver


def test_a_corrupt_part_takes_its_block_and_what_follows() -> None:
    asked = question(KV, [bytes(32)] * 3)
    values = [b"0000", b"1111", b"2222", b"3333", b"4444", b"5555"]
    head = header(bytes((HOT,)) * 3, values)
    landed = received(ChainReceiver(asked, None, Verify.ON), head, b"000011112222XXXX44445555").result()
    assert bytes(landed.states) == bytes((HOT, MISSING, BEYOND))
    assert (landed.corrupt_blocks, landed.corrupt_parts) == ([1], [3])
    assert landed.lengths == [4, 4, 0, 0, 0, 0]
    assert [v is not None for v in landed.values] == [True, True, False, False, False, False]
    each = question(KV, [bytes(32)] * 3, (), Coverage.EACH)
    landed = received(ChainReceiver(each, None, Verify.ON), head, b"000011112222XXXX44445555").result()
    assert bytes(landed.states) == bytes((HOT, MISSING, HOT))


def test_a_block_larger_than_its_buffer_is_passed_over() -> None:
    asked = question(OPAQUE, [bytes(32)] * 2, (), Coverage.EACH)
    small, wide = bytearray(2), bytearray(8)
    receiver = ChainReceiver(asked, [[memoryview(small)], [memoryview(wide)]], Verify.ON)
    landed = received(receiver, header(bytes((HOT, HOT)), [b"abc", b"de"]), b"abcde").result()
    assert bytes(landed.states) == bytes((MISSING, HOT))
    assert landed.mismatched_blocks == [0]
    assert small == bytearray(2)
    assert wide == b"de" + bytes(6)


@pytest.mark.parametrize(
    "head",
    [
        store.GetHeader(states=bytes((HOT,))),
        store.GetHeader(states=bytes((HOT, 77))),
        store.GetHeader(states=bytes((HOT, HOT)), lengths=[4] * 3, checksums=[0] * 3),
        store.GetHeader(states=bytes((HOT, HOT)), lengths=[4] * 4, checksums=[0] * 3),
        store.GetHeader(states=bytes((HOT, HOT)), lengths=[4, 4, 4, 5], checksums=[0] * 4),
        store.GetHeader(states=bytes((HOT, HOT)), lengths=[4, 4, 4, 1 << 60], checksums=[0] * 4),
        store.GetHeader(states=bytes((MISSING, MISSING)), lengths=[4], checksums=[0]),
    ],
)
def test_headers_that_do_not_fit_the_question_are_refused(head: store.GetHeader) -> None:
    with pytest.raises(MalformedAnswer):
        ChainReceiver(question(KV, [bytes(32)] * 2), None, Verify.ON).begin(head)


def test_bytes_before_a_header_are_refused() -> None:
    receiver = ChainReceiver(question(KV, [bytes(32)]), None, Verify.ON)
    with pytest.raises(MalformedAnswer):
        receiver.feed(memoryview(b"x"))
    with pytest.raises(MalformedAnswer):
        receiver.finish()


def test_a_lease_announces_what_it_granted() -> None:
    grants = Grants.of([0, 8], [4, 4], [xxh3_64_intdigest(b"abcd"), xxh3_64_intdigest(b"efgh")])
    receiver = LeaseReceiver(grants, None, Verify.ON)
    receiver.begin(header(b"", [b"abcd", b"efgh"]))
    receiver.feed(memoryview(b"abcdefgX"))
    receiver.finish()
    assert receiver.corrupt == (1,)
    with pytest.raises(MalformedAnswer):
        LeaseReceiver(grants, None, Verify.ON).begin(header(b"", [b"abcd"]))
