"""The format of segments: golden bytes, round trips, and damage that costs what lies in it and nothing else."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.segment import (
    BLOCK_BYTES,
    ENTRIES_PER_BLOCK,
    ENTRY,
    MAX_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    BadSegment,
    Described,
    Footer,
    Header,
    Layout,
    Table,
    keys_of,
    read_table,
    tags_of,
)

STORE = b"store of 16 byte"
SIZE = 4 << 20
HEADER = Header(STORE, number=7, sequence=41, size_bytes=SIZE, created_ns=1_700_000_000_000_000_000)
ONE, TWO = Described(b"1" * 32, b"the message of one"), Described(b"2" * 32, b"x" * 10_000)
DOCS = Path(__file__).resolve().parents[2] / "docs/storage.md"


def key(number: int, size: int = 32) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=size).digest()


def sealed(layout: Layout, header: Header = HEADER) -> memoryview:
    """The whole segment, without its payload."""
    raw = bytearray(layout.size_bytes)
    raw[:BLOCK_BYTES] = header.to_block()
    at, end = layout.seal(header, 5)
    raw[at : at + len(end)] = end
    assert at + len(end) == layout.size_bytes
    return memoryview(raw)


def table(raw: memoryview) -> Table:
    footer = Footer.of_block(raw[-BLOCK_BYTES:])
    start = footer.tables_at(len(raw))
    return read_table(raw[start:-BLOCK_BYTES], footer, len(raw))


def full_of(count: int, described: Described = ONE, length: int = 100) -> Layout:
    layout = Layout(SIZE)
    for i in range(count):
        assert layout.fits([length], described)
        layout.add(described, key(i), parts=[0], lengths=[length], checksums=[i], created=float(i))
    return layout


def test_what_was_placed_is_told_by_the_table() -> None:
    layout = Layout(SIZE)
    assert layout.is_empty
    first = layout.add(ONE, key(0), parts=[0, 3], lengths=[5000, 1], checksums=[1, 2**64 - 1], created=1.5, expires=9.0)
    second = layout.add(TWO, key(1, 64), parts=[2], lengths=[BLOCK_BYTES], checksums=[7], created=2.5)
    third = layout.add(ONE, key(2, 16), parts=[0], lengths=[0], checksums=[0], created=3.5)
    assert (first, second, third) == ([4096, 3 * 4096], [4 * 4096], [5 * 4096])
    found = table(sealed(layout))
    assert found.namespaces == (ONE, TWO)
    assert keys_of(found.entries) == [key(0), key(0), key(1, 64), key(2, 16)]
    assert found.entries["part"].tolist() == [0, 3, 2, 0]
    assert found.entries["namespace"].tolist() == [0, 0, 1, 0]
    assert (found.entries["offset"] * BLOCK_BYTES).tolist() == [*first, *second, *third]
    assert found.entries["length"].tolist() == [5000, 1, BLOCK_BYTES, 0]
    assert found.entries["checksum"].tolist() == [1, 2**64 - 1, 7, 0]
    assert found.entries["created"].tolist() == [1.5, 1.5, 2.5, 3.5]
    assert found.entries["expires"].tolist() == [9.0, 9.0, 0.0, 0.0]
    assert found.damaged_blocks == 0


def test_an_empty_segment_can_be_sealed() -> None:
    found = table(sealed(Layout(SIZE)))
    assert (found.namespaces, len(found.entries), found.damaged_blocks) == ((), 0, 0)


@given(st.integers(0, 2**32), st.integers(1, 70_000))
def test_what_fits_can_be_sealed_and_overlaps_nothing(seed: int, largest: int) -> None:
    rng, layout = random.Random(seed), Layout(MIN_SEGMENT_BYTES)
    names = [Described(bytes((i,)) * 32, bytes(rng.randrange(5000))) for i in range(rng.randrange(1, 6))]
    placed: list[tuple[int, int]] = []
    for at in range(400):
        described, lengths = rng.choice(names), [rng.randrange(largest) for _ in range(rng.randrange(1, 4))]
        if not layout.fits(lengths, described):
            break
        offsets = layout.add(
            described, key(at), parts=range(len(lengths)), lengths=lengths, checksums=lengths, created=0.0
        )
        placed += [(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)]
    raw = sealed(layout)
    found = table(raw)
    assert len(found.entries) == len(placed) == layout.entry_count
    assert all(end <= start for (_, end), (start, _) in pairwise(placed))
    assert all(end <= Footer.of_block(raw[-BLOCK_BYTES:]).tables_at(len(raw)) for _, end in placed)
    assert not found.damaged_blocks


def test_the_room_of_a_segment_is_used_to_the_last_block() -> None:
    layout, count = Layout(MIN_SEGMENT_BYTES), 0
    while layout.fits([BLOCK_BYTES], ONE):
        layout.add(ONE, key(count), parts=[0], lengths=[BLOCK_BYTES], checksums=[0], created=0.0)
        count += 1
    tables = -(-count // ENTRIES_PER_BLOCK)
    assert 1 + count + 1 + tables + 1 in (MIN_SEGMENT_BYTES // BLOCK_BYTES, MIN_SEGMENT_BYTES // BLOCK_BYTES - 1)
    assert len(table(sealed(layout)).entries) == count


@pytest.mark.parametrize("size", [0, MIN_SEGMENT_BYTES - BLOCK_BYTES, MIN_SEGMENT_BYTES + 1, MAX_SEGMENT_BYTES * 2])
def test_a_segment_of_no_size_that_segments_have_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a segment of"):
        Layout(size)


def test_damage_in_the_table_costs_the_entries_of_its_block() -> None:
    layout = full_of(3 * ENTRIES_PER_BLOCK)
    raw = sealed(layout)
    raw[-3 * BLOCK_BYTES + 77] ^= 1  # The second block of three.
    found = table(raw)
    assert found.damaged_blocks == 1
    kept = [key(i) for i in range(3 * ENTRIES_PER_BLOCK) if i // ENTRIES_PER_BLOCK != 1]
    assert keys_of(found.entries) == kept


def test_damage_in_the_list_of_namespaces_costs_all_entries() -> None:
    raw = sealed(full_of(3, TWO))
    start = Footer.of_block(raw[-BLOCK_BYTES:]).tables_at(len(raw))
    raw[start + BLOCK_BYTES + 100] ^= 1
    found = table(raw)
    assert (len(found.entries), found.damaged_blocks) == (0, 1)


def test_blocks_of_an_earlier_life_are_no_part_of_a_table() -> None:
    raw = sealed(full_of(2 * ENTRIES_PER_BLOCK))
    older = sealed(full_of(2 * ENTRIES_PER_BLOCK, length=7), Header(STORE, 7, 40, SIZE, 0))
    raw[-2 * BLOCK_BYTES : -BLOCK_BYTES] = older[-2 * BLOCK_BYTES : -BLOCK_BYTES]
    found = table(raw)
    assert (len(found.entries), found.damaged_blocks) == (ENTRIES_PER_BLOCK, 1)
    swapped = sealed(full_of(2 * ENTRIES_PER_BLOCK))
    first, second = bytes(swapped[-3 * BLOCK_BYTES : -2 * BLOCK_BYTES]), bytes(swapped[-2 * BLOCK_BYTES : -BLOCK_BYTES])
    swapped[-3 * BLOCK_BYTES : -BLOCK_BYTES] = second + first
    assert table(swapped).damaged_blocks == 2


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("namespace", 1),
        ("offset", 0),
        ("offset", SIZE // BLOCK_BYTES),
        ("length", SIZE),
        ("key_length", 15),
        ("key_length", 65),
    ],
)
def test_an_entry_that_cannot_be_right_is_left_out(field: str, wrong: int) -> None:
    layout = full_of(3)
    layout._rows[1][field] = wrong
    assert keys_of(table(sealed(layout)).entries) == [key(0), key(2)]


@pytest.mark.parametrize("block", ["header", "footer"])
@pytest.mark.parametrize("at", [0, 8, 12, 16, 40, 48, 100, BLOCK_BYTES - 1])
def test_a_block_with_a_bit_changed_is_refused(block: str, at: int) -> None:
    raw = sealed(full_of(1))
    piece = bytearray(raw[:BLOCK_BYTES] if block == "header" else raw[-BLOCK_BYTES:])
    kind: Any = Header if block == "header" else Footer
    assert kind.of_block(piece).number == 7
    piece[at] ^= 4
    with pytest.raises(BadSegment):
        kind.of_block(piece)


def rewritten(block: bytes, at: int, value: bytes) -> bytes:
    """A block with a value changed and its checksum made anew: not damaged, but of another program."""
    from kvstore.tiers.segment import _sealed_block

    return _sealed_block(block[:at] + value + block[at + len(value) : -8])


@pytest.mark.parametrize(
    ("at", "value", "field"),
    [
        (0, b"KVSEGFTR", "header.magic"),
        (8, b"\2", "header.version"),
        (12, b"\1", "header.flags"),
        (48, (SIZE + 1).to_bytes(8, "little"), "header.size"),
        (48, bytes(8), "header.size"),
    ],
)
def test_a_header_of_another_kind_is_named(at: int, value: bytes, field: str) -> None:
    with pytest.raises(BadSegment) as why:
        Header.of_block(rewritten(HEADER.to_block(), at, value))
    assert why.value.field == field


def test_a_footer_that_lies_about_its_table_is_refused() -> None:
    footer = Footer(STORE, 7, 41, namespace_blocks=1, table_blocks=1, entry_count=1, payload_bytes=8192, sealed_ns=5)
    assert footer.tables_at(SIZE) == SIZE - 3 * BLOCK_BYTES
    with pytest.raises(BadSegment, match=r"footer\.payload"):
        Footer(STORE, 7, 41, 1, 1, 1, payload_bytes=SIZE, sealed_ns=5).tables_at(SIZE)
    with pytest.raises(BadSegment, match=r"footer\.payload"):
        Footer(STORE, 7, 41, 1, 1 << 40, 1, payload_bytes=8192, sealed_ns=5).tables_at(SIZE)
    with pytest.raises(BadSegment, match=r"footer\.entries"):
        Footer.of_block(Footer(STORE, 7, 41, 1, 1, 32, payload_bytes=8192, sealed_ns=5).to_block())
    with pytest.raises(BadSegment, match="block has 5 bytes"):
        Footer.of_block(b"short")


def test_a_block_of_noise_is_no_block() -> None:
    with pytest.raises(BadSegment, match="checksum"):
        Header.of_block(random.Random(1).randbytes(BLOCK_BYTES))
    with pytest.raises(BadSegment):
        Header.of_block(bytes(BLOCK_BYTES))


def test_the_bytes_are_those_of_the_page() -> None:
    """Another program must be able to read what this one wrote: any change here is a new version."""
    layout = Layout(MIN_SEGMENT_BYTES)
    layout.add(ONE, key(0), parts=[1], lengths=[5000], checksums=[0x1122334455667788], created=1.5, expires=2.5)
    header = Header(STORE, number=7, sequence=41, size_bytes=MIN_SEGMENT_BYTES, created_ns=99, key_id=b"k" * 16)
    at, end = layout.seal(header, 5)
    assert at == MIN_SEGMENT_BYTES - 3 * BLOCK_BYTES
    names, entries, footer = (end[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(3))
    assert header.to_block()[:80].hex(" ", 8) == (
        "4b56534547484452 0100000000000000 73746f7265206f66 2031362062797465 "
        "0700000000000000 2900000000000000 0000100000000000 6300000000000000 6b6b6b6b6b6b6b6b 6b6b6b6b6b6b6b6b"
    )
    assert names[:24].hex(" ", 8) == "4b565345474e5350 2900000000000000 0000000036000000"
    assert names[24:78] == (18).to_bytes(4, "little") + b"1" * 32 + b"the message of one"
    assert entries[:24].hex(" ", 8) == "4b5653454754424c 2900000000000000 0000000080000000"
    assert entries[24:80].hex(" ", 8) == (
        "2000010000000000 0100000088130000 8877665544332211 000000000000f83f 0000000000000440 "
        "0000000000000000 0000000000000000"
    )
    assert entries[88:120] == key(0)
    assert footer[:80].hex(" ", 8) == (
        "4b56534547465452 0100000001000000 73746f7265206f66 2031362062797465 "
        "0700000000000000 2900000000000000 0100000000000000 0100000000000000 0030000000000000 0500000000000000"
    )


def test_the_bytes_of_what_is_sealed_are_those_of_the_page() -> None:
    layout = Layout(MIN_SEGMENT_BYTES)
    layout.add(ONE, key(0), parts=[0, 1], lengths=[1, 2], checksums=[3, 4], created=1.5, tags=[b"t" * 16, b"u" * 16])
    header = Header(STORE, 7, 41, MIN_SEGMENT_BYTES, created_ns=99, key_id=b"k" * 16, salt=b"s" * 16)
    assert Header.of_block(header.to_block()) == header
    assert header.to_block()[64:104] == b"k" * 16 + b"s" * 16 + bytes(8)
    entries = layout.seal(header, 5)[1][BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert entries[24:80].hex(" ", 8) == (
        "2001000000000000 0100000001000000 0300000000000000 000000000000f83f 0000000000000000 "
        "7474747474747474 7474747474747474"
    )
    assert tags_of(layout.entries()) == [b"t" * 16, b"u" * 16]
    layout.add(ONE, key(1), parts=[0], lengths=[1], checksums=[3], created=1.5)
    assert tags_of(layout.entries())[2:] == [b""]


def test_the_page_has_the_offsets_of_an_entry() -> None:
    text = DOCS.read_text()
    for name, (kind, offset, *_) in ENTRY.fields.items():  # type: ignore[union-attr]
        assert f"| {offset} | {kind.itemsize} | `{name}` |" in text, name
    assert f"{ENTRIES_PER_BLOCK} entries" in text
    assert np.dtype(ENTRY).itemsize == 128
