"""Payload that is sealed: golden bytes, and a miss for whatever was changed, moved, or sealed with another key."""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.core.segments import SegmentBook, SegmentRules, SegmentState
from kvstore.tiers.device import Device, aligned
from kvstore.tiers.index import Located, PartAt
from kvstore.tiers.reader import PartIn, mismatched, read_run, runs_of
from kvstore.tiers.recovery import Clock, blocks_in, name_of, recover
from kvstore.tiers.sealing import (
    MOST_FILE_BYTES,
    MOST_KEYS,
    BadKeys,
    Keyring,
    SegmentKey,
    WrongKey,
    about_part,
    load_keys,
    read_keys,
)
from kvstore.tiers.segment import BLOCK_BYTES, BadSegment, Described, Header, blocks_of
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.writer import BlockOut, SegmentWriter, key_in
from tests.disks import FaultyDisk, MemoryDevice, MemoryDisk

STORE, SIZE = b"store of 16 byte", 1 << 20
MASTER, OTHER = bytes(range(32)), bytes(range(100, 132))
HEADER = Header(STORE, number=3, sequence=9, size_bytes=SIZE, created_ns=7)
ONE, TWO = Described(b"1" * 32, b"one"), Described(b"2" * 32, b"two")
Twist = Callable[[list[PartIn]], list[PartIn]]


def ring(*masters: bytes) -> Keyring:
    return read_keys("\n".join(master.hex() for master in masters or (MASTER,)))


def value(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def block(number: int, *lengths: int, described: Described = ONE) -> BlockOut:
    values = [value(number * 100 + i, length) for i, length in enumerate(lengths)]
    pieces = []
    for one in values:
        size = blocks_of(len(one)) * BLOCK_BYTES
        piece = aligned(size)[:size]
        piece[:] = b"\xdd" * size  # What lies behind a part in memory is another one's.
        piece[: len(one)] = one
        pieces.append(piece)
    key = hashlib.sha256(str(number).encode()).digest()
    sums = [xxh3_64_intdigest(one) for one in values]
    return BlockOut(described, key, range(len(lengths)), lengths, sums, pieces, created=1.0)


def expected(*blocks: BlockOut) -> dict[tuple[bytes, int], bytes]:
    return {(b.key, p): bytes(m[:n]) for b in blocks for p, n, m in zip(b.parts, b.lengths, b.pieces, strict=True)}


def written(*blocks: BlockOut, keyring: Keyring | None = None, size: int = SIZE) -> MemoryDevice:
    """A sealed segment with these blocks."""
    disk = MemoryDisk()
    writer = SegmentWriter.begin(disk, name_of(3), replace(HEADER, size_bytes=size), keyring=keyring or ring())
    assert len(writer.write(blocks)) == len(blocks)
    writer.seal(11)
    return disk.files[name_of(3)]


def header_of(device: MemoryDevice) -> Header:
    return Header.of_block(bytes(device.content[:BLOCK_BYTES]))


def as_it_is(parts: list[PartIn]) -> list[PartIn]:
    return parts


def held(device: Device, keyring: Keyring, twist: Twist = as_it_is) -> dict[tuple[bytes, int], bytes]:
    """What can be read of a segment by its own table."""
    return landed(device, twist(told(device)), key_in(device, keyring, store_id=STORE, life=(3, 9)))


def told(device: Device) -> list[PartIn]:
    """What the table of a segment says, with memory for it."""
    found, _ = blocks_in(device, store_id=STORE, number=3)
    return [landing(described, key, at) for described, key, located in found for at in located.parts]


def landing(described: Described, key: bytes, at: PartAt) -> PartIn:
    size = blocks_of(at.length) * BLOCK_BYTES
    return PartIn(0, at.offset, at.length, at.checksum, aligned(size)[:size], at.part, at.tag, described.digest, key)


def landed(device: Device, parts: Sequence[PartIn], key: SegmentKey | None) -> dict[tuple[bytes, int], bytes]:
    for run in runs_of(parts):
        read_run(device, run)
    wrong = [id(part) for part in mismatched(parts, key)]
    for part in parts:
        assert id(part) not in wrong or key is None or not any(part.piece[: part.length]), "bytes of a miss"
    return {(p.key, p.part): bytes(p.piece[: p.length]) for p in parts if id(p) not in wrong}


# -- the bytes -------------------------------------------------------------------------------------------------------


def test_what_was_sealed_is_read_as_it_was() -> None:
    blocks = [block(0, 5000, 1), block(1, BLOCK_BYTES, described=TWO), block(2, 0), block(3, 7, 0, 9000)]
    device = written(*blocks)
    assert held(device, ring()) == expected(*blocks)
    for one in blocks:
        for length, piece in zip(one.lengths, one.pieces, strict=True):
            assert length < 16 or bytes(piece[:16]) not in device.content, "payload as it was lies on disk"
    assert b"\xdd" * 16 not in device.content, "what lies behind a part in memory was written"


def test_a_part_longer_than_the_memory_it_goes_through_is_sealed_as_one() -> None:
    blocks = [block(0, 100), block(1, (8 << 20) + 5), block(2, 6 << 20, 3 << 20)]
    assert held(written(*blocks, size=32 << 20), ring()) == expected(*blocks)


def hkdf(master: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869, 64 bytes of it."""
    drawn = hmac.digest(salt, master, "sha256")
    first = hmac.digest(drawn, info + b"\1", "sha256")
    return first + hmac.digest(drawn, first + info + b"\2", "sha256")


def test_the_bytes_are_those_of_the_page() -> None:
    """Another program must be able to read what this one wrote: any change here is a new version."""
    salt, key_id = b"salt of 16 bytes", ring().writing_id
    header = replace(HEADER, key_id=key_id, salt=salt)
    disk = MemoryDisk()
    device = disk.create(name_of(3), SIZE)
    one = block(0, 40, 0)
    (placed,) = SegmentWriter(device, header, ring().key_of(header)).write([one])
    assert placed.offsets == [BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert key_id == hmac.digest(MASTER, b"kvcommons key id 1", "sha256")[:16]
    life = b"kvcommons segment 1" + b"".join(n.to_bytes(8, "little") for n in (3, 9, 7)) + salt
    keys = hkdf(MASTER, STORE, life)
    about = [
        b"1" * 32 + part.to_bytes(2, "little") + n.to_bytes(4, "little") + one.key for part, n in enumerate((40, 0))
    ]
    nonces = [n.to_bytes(12, "little") for n in (1, 2)]
    sealed = AESGCM(keys[:32]).encrypt(nonces[0], bytes(one.pieces[0][:40]), about[0])
    assert bytes(device.content[BLOCK_BYTES : 2 * BLOCK_BYTES]) == sealed[:-16].ljust(BLOCK_BYTES, b"\0")
    assert placed.block.tags == [sealed[-16:], hmac.digest(keys[32:], nonces[1] + about[1], "sha256")[:16]]
    assert key_id.hex() == "2de14d33a559ca09f4c2301920f3b086"
    assert sealed.hex(" ", 16) == (
        "6d213598eb293f96 921910170bb9e3ffcbd8e39bad106fc4 "
        "872ba0befb3730f0df263d2964da6120 c8d2e3b464241e7c251a007ac6c4a5c8"
    )
    assert placed.block.tags[1].hex() == "d0610010c6a3a60cc0a8a0251fd0346c"


@pytest.mark.parametrize("tags", [(), (b"a" * 16, b"b" * 16, b"c" * 16)], ids=["as it is", "sealed"])
@pytest.mark.parametrize("count", [1, 2, 3, 19])
def test_a_place_in_the_index_keeps_the_tags(count: int, tags: tuple[bytes, ...]) -> None:
    parts = tuple(PartAt(i, 4096 * i, 9, 2**64 - 1, tags[i % 3] if tags else b"") for i in range(count))
    place = Located(1.5, 0.0, 7, 2**63, parts)
    assert Located.of_bytes(place.to_bytes()) == place
    assert len(place.to_bytes()) == 28 + count * (38 if tags else 22) + bool(tags)


# -- a key and a nonce are used once ---------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from([0, 16, 4095, 4096, 4097, 9000]), min_size=1, max_size=4), max_size=12))
def test_no_two_parts_of_a_life_have_one_nonce(lengths: list[list[int]]) -> None:
    """All parts are alike: those that shared a nonce would be so when they are sealed."""
    blocks = [block(i, *of_one) for i, of_one in enumerate(lengths)]
    for piece in chain.from_iterable(one.pieces for one in blocks):
        piece[:] = bytes(len(piece))
    device = written(*blocks)
    parts = told(device)
    begins = [bytes(device.content[part.offset : part.offset + 16]) for part in parts if part.length]
    assert len(parts) == len({part.tag for part in parts}) == sum(map(len, lengths))
    assert len(begins) == len(set(begins)) == sum(map(bool, chain.from_iterable(lengths)))


def test_the_same_life_given_again_has_another_key() -> None:
    one = block(0, 5000)
    first, second = written(one), written(one)
    payload = slice(BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert first.content[payload] != second.content[payload]
    header = header_of(first)
    assert header == replace(header_of(second), salt=header.salt), "only the salt differs"


def test_a_place_is_not_sealed_again_after_a_write_that_failed() -> None:
    faulty = FaultyDisk(MemoryDisk())
    writer = SegmentWriter.begin(faulty, name_of(3), replace(HEADER, size_bytes=32 << 20), keyring=ring())
    faulty.faults.write_error = errno.EIO
    with pytest.raises(OSError, match="to fail"):  # In the middle of a block, which has no place yet.
        writer.write([block(0, 5 << 20, 5 << 20)])
    faulty.faults.write_error = 0
    with pytest.raises(OSError, match="sealed twice"):
        writer.write([block(1, 5000)])


# -- what was changed is a miss --------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[BlockOut, BlockOut]:
    return block(0, 5000, 300), block(1, 5000, 300)


@pytest.mark.parametrize("at", [0, 1, 15, 16, 2500, 4999])
def test_a_bit_of_payload_that_changed_is_a_miss(pair: tuple[BlockOut, BlockOut], at: int) -> None:
    device = written(*pair)
    device.content[BLOCK_BYTES + at] ^= 1
    assert held(device, ring()) == {k: v for k, v in expected(*pair).items() if k != (pair[0].key, 0)}


def test_parts_exchanged_on_disk_are_a_miss(pair: tuple[BlockOut, BlockOut]) -> None:
    device = written(*pair)
    first, second = slice(BLOCK_BYTES, 3 * BLOCK_BYTES), slice(4 * BLOCK_BYTES, 6 * BLOCK_BYTES)
    device.content[first], device.content[second] = device.content[second], device.content[first]
    assert held(device, ring()) == {k: v for k, v in expected(*pair).items() if k[1] == 1}


def other_tag(parts: list[PartIn]) -> list[PartIn]:
    return [p._replace(tag=bytes((p.tag[0] ^ 1,)) + p.tag[1:]) for p in parts]


def no_tag(parts: list[PartIn]) -> list[PartIn]:
    return [p._replace(tag=b"") for p in parts]


def short_tag(parts: list[PartIn]) -> list[PartIn]:
    return [p._replace(tag=p.tag[:12]) for p in parts]


def of_each_other(parts: list[PartIn]) -> list[PartIn]:
    """The table says of each block what is true of the other: right bytes, of another block."""
    places = [(p.offset, p.tag, p.checksum) for p in (*parts[2:], *parts[:2])]
    return [p._replace(offset=o, tag=t, checksum=c) for p, (o, t, c) in zip(parts, places, strict=True)]


def of_another_namespace(parts: list[PartIn]) -> list[PartIn]:
    return [p._replace(digest=TWO.digest) for p in parts]


def other_indexes(parts: list[PartIn]) -> list[PartIn]:
    return [p._replace(part=p.part + 2) for p in parts]


def shorter(parts: list[PartIn]) -> list[PartIn]:
    sums = [xxh3_64_intdigest(value(n, 296)) for n in (0, 1, 100, 101)]
    return [p._replace(length=296, checksum=s) for p, s in zip(parts, sums, strict=True)]


def emptied(parts: list[PartIn]) -> list[PartIn]:
    return [p._replace(length=0, checksum=xxh3_64_intdigest(b""), piece=p.piece[:0]) for p in parts]


@pytest.mark.parametrize(
    "twist",
    [other_tag, no_tag, short_tag, of_each_other, of_another_namespace, other_indexes, shorter, emptied],
    ids=lambda twist: twist.__name__,
)
def test_a_part_that_is_not_what_the_table_says_is_a_miss(pair: tuple[BlockOut, BlockOut], twist: Twist) -> None:
    device = written(*pair)
    assert value(0, 5000)[:296] == value(0, 296), "the test of shorter parts shows nothing"
    assert held(device, ring(), twist) == {}


def test_an_empty_part_opens_as_itself_alone() -> None:
    device = written(block(0, 0, 0), block(1, 0, 0))
    assert len(held(device, ring())) == 4
    for twist in (other_tag, no_tag, of_another_namespace, other_indexes):
        assert held(device, ring(), twist) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"number": 4},
        {"sequence": 10},
        {"created_ns": 8},
        {"store_id": b"another store 16"},
        {"salt": b"another salt 16b"},
        {"key_id": ring(OTHER).writing_id},
        {"key_id": bytes(16)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_segment_copied_under_another_name_or_key_opens_nothing(
    pair: tuple[BlockOut, BlockOut], change: dict[str, bytes | int]
) -> None:
    device = written(*pair)
    parts = told(device)
    header = replace(header_of(device), **change)  # type: ignore[arg-type]
    device.content[:BLOCK_BYTES] = header.to_block()
    key = key_in(device, ring(MASTER, OTHER), store_id=header.store_id, life=(header.number, header.sequence))
    assert landed(device, parts, key) == {}


def test_what_is_not_sealed_is_no_part_of_a_sealed_segment(pair: tuple[BlockOut, BlockOut]) -> None:
    device = written(*pair)
    for i, at in enumerate((1, 3, 4, 6)):
        piece = pair[i // 2].pieces[i % 2]
        device.content[at * BLOCK_BYTES : at * BLOCK_BYTES + len(piece)] = piece
    assert held(device, ring()) == {}
    assert held(device, ring(), no_tag) == {}


def test_the_key_of_another_life_is_not_given(pair: tuple[BlockOut, BlockOut]) -> None:
    device = written(*pair)
    assert key_in(device, ring(), store_id=STORE, life=(3, 9)) is not None
    for store, life in ((STORE, (3, 8)), (STORE, (4, 9)), (b"another store 16", (3, 9))):
        with pytest.raises(BadSegment, match="sequence"):
            key_in(device, ring(), store_id=store, life=life)
    with pytest.raises(WrongKey, match="1 segment is sealed"):
        key_in(device, None, store_id=STORE, life=(3, 9))
    with pytest.raises(WrongKey, match=ring().writing_id.hex()):
        key_in(device, ring(OTHER), store_id=STORE, life=(3, 9))


# -- a folder and its keys -------------------------------------------------------------------------------------------


class Ground:
    """A folder between two lives of a server."""

    def __init__(self, path: Path) -> None:
        self.path, self.disk = path, MemoryDisk()
        self.book = SegmentBook(SegmentRules(segment_bytes=SIZE), 10 * SIZE)

    def write(self, number: int, keyring: Keyring | None, *blocks: BlockOut, seal: bool = True) -> None:
        header = Header(STORE, number, sequence=number + 1, size_bytes=SIZE, created_ns=1)
        writer = SegmentWriter.begin(self.disk, name_of(number), header, keyring=keyring)
        assert len(writer.write(blocks)) == len(blocks)
        if seal:
            writer.seal(5)

    def opened(self, keyring: Keyring | None, *, empty: bool = False) -> dict[tuple[bytes, int], bytes]:
        """Everything that a server with these keys would read, by its index."""
        self.book = SegmentBook(SegmentRules(segment_bytes=SIZE), 10 * SIZE)
        tombstones = Tombstones(self.path / "deleted.log")
        try:
            found = recover(
                self.disk,
                self.book,
                tombstones,
                index_path=self.path / "index",
                cache_bytes=8 << 20,
                store_id=STORE,
                clock=Clock(0.0, 1e9),
                keyring=keyring,
                on_wrong_key="empty" if empty else "refuse",
            )
        finally:
            tombstones.close()
        digests = {n.id: digest for digest, n in found.namespaces.items()}
        read: dict[tuple[bytes, int], bytes] = {}
        for namespace, key, located in found.index.blocks():
            device = self.disk.open(name_of(located.segment))
            parts = [landing(Described(digests[namespace], b""), key, at) for at in located.parts]
            read |= landed(device, parts, key_in(device, keyring, store_id=STORE, life=located.life))
        found.index.close()
        return read


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def test_a_new_key_seals_and_the_old_one_still_opens(ground: Ground) -> None:
    old, new = block(0, 5000, 7), block(1, 5000)
    ground.write(0, ring(OTHER), old)
    assert ground.opened(ring(OTHER)) == expected(old)
    ground.write(1, ring(MASTER, OTHER), new)
    assert ground.opened(ring(MASTER, OTHER)) == expected(old, new)
    assert header_of(ground.disk.files[name_of(1)]).key_id == ring(MASTER).writing_id
    assert ground.opened(ring(OTHER, MASTER)) == expected(old, new), "their order says which one seals, no more"


def test_segments_without_their_key_are_refused_and_named(ground: Ground) -> None:
    ground.write(0, ring(OTHER), block(0, 5000))
    ground.write(1, ring(OTHER), block(1, 5000))
    ground.write(2, ring(MASTER), block(2, 5000))
    before = {name: bytes(file.content) for name, file in ground.disk.files.items()}
    for keyring, count, ids in ((ring(MASTER), 2, {OTHER}), (None, 3, {MASTER, OTHER})):
        with pytest.raises(WrongKey) as why:
            ground.opened(keyring)
        assert why.value.segment_count == count
        assert why.value.key_ids == {ring(m).writing_id for m in ids}
        text = str(why.value)
        assert text.startswith(f"{count} segments are sealed")
        assert all(ring(master).writing_id.hex() in text for master in ids)
        assert "warm.encryption_key" in text
        assert "warm.on_wrong_key" in text
    assert before == {name: bytes(file.content) for name, file in ground.disk.files.items()}
    assert not (ground.path / "index").exists(), "an index was made of a folder that was refused"


def test_segments_without_their_key_are_empty_where_that_is_wanted(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    kept, lost, plain = block(0, 5000), block(1, 5000), block(2, 5000)
    ground.write(0, ring(MASTER), kept)
    ground.write(2, ring(OTHER), lost)
    ground.write(1, None, plain)
    assert ground.opened(ring(MASTER, OTHER)) == expected(kept, lost, plain)
    with caplog.at_level(logging.WARNING):
        assert ground.opened(ring(MASTER), empty=True) == expected(kept, plain)
    assert "0000000002.seg holds nothing" in caplog.text
    assert ground.book[2].state is SegmentState.FREE
    again = ground.book.open()
    assert again is not None
    assert (again.number, again.sequence) == (2, 4), "its sequence number was given again"
    assert ground.opened(None, empty=True) == expected(plain)
    assert ground.opened(ring(MASTER, OTHER)) == expected(kept, lost, plain), "nothing was written over yet"


def test_what_is_not_sealed_is_read_in_a_folder_that_now_has_a_key(ground: Ground) -> None:
    plain, sealed = block(0, 5000, 0), block(1, 5000, 0)
    ground.write(0, None, plain)
    assert ground.opened(None) == expected(plain)
    ground.write(1, ring(), sealed)
    assert ground.opened(ring()) == expected(plain, sealed)


def test_a_segment_that_was_never_finished_needs_no_key(ground: Ground) -> None:
    ground.write(0, ring(OTHER), block(0, 5000), seal=False)
    assert ground.opened(None) == {}


# -- the list of keys ------------------------------------------------------------------------------------------------


def test_a_list_of_keys_has_comments_and_empty_lines() -> None:
    text = f"# keys\r\n\n  {MASTER.hex().upper()}  # the new one\n{OTHER.hex()}#the old one\n\n"
    keyring = read_keys(text)
    assert keyring.writing_id == ring(MASTER).writing_id
    assert ring(OTHER).writing_id in keyring
    assert ring(bytes(32)).writing_id not in keyring


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no key"),
        ("# only\n\n# comments", "there is no key"),
        (f"{MASTER.hex()}\n{OTHER.hex()[:-1]}", "line 2: a key has 64 hex digits"),
        (f"{MASTER.hex()}0", "line 1: a key has 64 hex digits"),
        (f"\n{MASTER.hex()[:-1]}g", "line 2: a key has 64 hex digits"),
        (f"{MASTER.hex()} {OTHER.hex()}", "line 1: a key has 64 hex digits"),
        (f"0x{MASTER.hex()[2:]}", "line 1: a key has 64 hex digits"),
        (f"{MASTER.hex()}\n\n{MASTER.hex().upper()}", "line 3: the same key as in line 1"),
        ("\n".join(f"{i:064x}" for i in range(MOST_KEYS + 1)), f"line {MOST_KEYS + 1}: more than"),
    ],
    ids=range(9),
)
def test_a_list_that_is_none_is_refused_by_its_line(text: str, problem: str) -> None:
    with pytest.raises(BadKeys, match=problem) as why:
        read_keys(text)
    assert not shows(str(why.value), MASTER, OTHER)
    assert why.value.__cause__ is None


def shows(text: str, *masters: bytes) -> bool:
    """Whether a piece of a key, or what it is called in a list, can be read in a text."""
    low = text.lower()
    pieces = [m.hex()[i : i + 8] for m in masters for i in range(57)] + [repr(m)[2:10] for m in masters]
    return any(piece in low for piece in pieces)


def test_keys_are_in_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ground, keyring = Ground(tmp_path), ring(MASTER, OTHER)
    ground.write(0, keyring, block(0, 5000))
    assert ground.opened(keyring) == expected(block(0, 5000))
    header, key = keyring.begin(HEADER)
    wrong = WrongKey([header.key_id, ring(OTHER).writing_id])
    texts = [repr(keyring), str(keyring), repr(key), str(key), repr(header), repr(wrong), str(wrong), caplog.text]
    assert shows(MASTER.hex(), MASTER), "the test shows nothing"
    assert not any(shows(text, MASTER, OTHER) for text in texts)
    assert keyring.writing_id.hex() in repr(keyring)


def test_a_wrong_key_names_some_of_many() -> None:
    text = str(WrongKey([bytes([i]) * 16 for i in range(20)]))
    assert text.startswith("20 segments are sealed")
    assert "07" * 16 + " and 12 more" in text


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_file_of_keys_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{MASTER.hex()}\n")
    path.chmod(mode)
    assert load_keys(path).writing_id == ring().writing_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644])
def test_a_file_of_keys_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{MASTER.hex()}\n")
    path.chmod(mode)
    with pytest.raises(BadKeys, match=rf"keys is open to others .*mode 0{mode:o}.*chmod 600"):
        load_keys(path)


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path) -> None:
    path, pipe = tmp_path / "keys", tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(BadKeys, match="pipe is not a regular file"):
        load_keys(pipe)
    with pytest.raises(FileNotFoundError):
        load_keys(path)
    path.touch(0o600)
    path.write_bytes(b"\n" * (MOST_FILE_BYTES + 1))
    with pytest.raises(BadKeys, match="keys has more than"):
        load_keys(path)
    path.write_bytes(b"# \xff\xfe\n" + MASTER.hex().encode()[:-1] + b"\xff")
    with pytest.raises(BadKeys, match=r"keys: line 2: a key has") as why:
        load_keys(path)
    assert not shows(str(why.value), MASTER)


def test_without_the_library_all_is_well_until_a_key_is_given() -> None:
    script = f"""
import sys
sys.modules["cryptography"] = None
import kvstore.tiers.reader, kvstore.tiers.recovery, kvstore.tiers.warm, kvstore.tiers.writer
from kvstore.tiers.sealing import BadKeys, read_keys
try:
    read_keys("{MASTER.hex()}")
except BadKeys as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "kvcommons[server]" in done.stdout
    assert not shows(done.stdout + done.stderr, MASTER)


def test_a_part_says_what_it_is_in_one_way_only() -> None:
    """No two parts have one name, whatever their keys are: all before the key has one length."""
    names = {
        about_part(digest, key, part, length)
        for digest in (b"1" * 32, b"2" * 32)
        for key in (b"k" * 16, b"k" * 17, b"k" * 15 + b"\0")
        for part in (0, 1, 256)
        for length in (0, 1, 1 << 31)
    }
    assert len(names) == 2 * 3 * 3 * 3
