"""Payloads: whatever is not the very bytes asked for is noticed."""

from __future__ import annotations

import hashlib
import threading
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.workload.payload import MAX_PART, check_payload, fill_payload

GOLDEN = ["e02f28c9ad07d014", "1f993d4374e4177c", "4819200f0d7dd7fa"]
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
SIZES = [1, 7, 8, 9, 4095, 4096, 4099, 256 << 10, (256 << 10) + 3, (1 << 20) + 8]


def payload(key: bytes, part: int, size_bytes: int) -> bytearray:
    out = bytearray(size_bytes)
    fill_payload(key, part, out)
    return out


def words(data: bytearray) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, dtype=np.uint64, count=len(data) // 8)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_payload_passes_its_own_check_and_no_other(size_bytes: int) -> None:
    data = payload(KEY, 0, size_bytes)
    assert check_payload(KEY, 0, data)
    assert check_payload(KEY, 0, bytes(data))
    if size_bytes >= 7:
        assert not check_payload(KEY, 1, data)
        assert not check_payload(OTHER_KEY, 0, data)


def test_an_empty_payload() -> None:
    fill_payload(KEY, 0, bytearray())
    assert check_payload(KEY, 0, b"")


def test_the_bytes_are_the_same_on_every_machine() -> None:
    digests = [hashlib.sha256(payload(KEY, 3, size)).hexdigest()[:16] for size in (4096, 4099, 600_000)]
    assert digests == GOLDEN


@pytest.mark.parametrize("size_bytes", [4096, 1 << 20])
def test_payloads_of_other_keys_and_parts_differ_in_every_word(size_bytes: int) -> None:
    payloads = [payload(key, part, size_bytes) for key in (KEY, OTHER_KEY, KEY[:16]) for part in (0, 1, MAX_PART)]
    for one, other in combinations(payloads, 2):
        assert np.all(words(one) != words(other))


@pytest.mark.parametrize("size_bytes", [4096, 4099, (1 << 20) + 5])
def test_one_flipped_bit_anywhere_is_found(size_bytes: int) -> None:
    data = payload(KEY, 2, size_bytes)
    for position in (0, 1, size_bytes // 2, size_bytes - 2, size_bytes - 1):
        data[position] ^= 0x10
        assert not check_payload(KEY, 2, data)
        data[position] ^= 0x10
    assert check_payload(KEY, 2, data)


@pytest.mark.parametrize("shift_bytes", [1, 8, 4096, 256 << 10, 512 << 10, (512 << 10) + 8])
def test_a_rotated_payload_is_found_and_wrong_nearly_everywhere(shift_bytes: int) -> None:
    data = payload(KEY, 0, 1 << 20)
    rotated = data[shift_bytes:] + data[:shift_bytes]
    assert not check_payload(KEY, 0, rotated)
    assert np.count_nonzero(words(rotated) == words(data)) == 0


@pytest.mark.parametrize("piece_bytes", [8, 64, 4096, 64 << 10, 256 << 10])
def test_two_swapped_pieces_are_found(piece_bytes: int) -> None:
    data = payload(KEY, 0, 1 << 20)
    swapped = data[piece_bytes : 2 * piece_bytes] + data[:piece_bytes] + data[2 * piece_bytes :]
    assert not check_payload(KEY, 0, swapped)


def test_a_shortened_or_zeroed_payload_is_found() -> None:
    data = payload(KEY, 0, 8192)
    assert not check_payload(KEY, 0, data[:4096])
    assert not check_payload(KEY, 0, data + bytes(8))
    assert not check_payload(KEY, 0, data[:8000] + bytes(192))
    assert not check_payload(KEY, 0, bytes(8192))


def test_only_the_given_slice_is_written_at_any_alignment() -> None:
    expected = payload(KEY, 0, 4099)
    for offset in (0, 1, 5, 8):
        arena = bytearray(b"\xee" * 5000)
        fill_payload(KEY, 0, memoryview(arena)[offset : offset + 4099])
        assert arena[offset : offset + 4099] == expected
        assert set(arena[:offset] + arena[offset + 4099 :]) == {0xEE}
        assert check_payload(KEY, 0, memoryview(arena)[offset : offset + 4099])


def test_numpy_arrays_serve_as_buffers() -> None:
    array = np.zeros(300_001, dtype=np.uint8)
    fill_payload(KEY, 9, array)
    assert check_payload(KEY, 9, array)
    assert array.tobytes() == payload(KEY, 9, 300_001)


def test_a_buffer_that_cannot_be_filled_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        fill_payload(KEY, 0, memoryview(bytes(64)))
    with pytest.raises((ValueError, BufferError)):
        fill_payload(KEY, 0, np.zeros(64, dtype=np.uint8)[::2])


@pytest.mark.parametrize("part", [-1, MAX_PART + 1])
def test_a_part_outside_its_range_is_refused(part: int) -> None:
    with pytest.raises(ValueError, match="part"):
        fill_payload(KEY, part, bytearray(8))
    with pytest.raises(ValueError, match="part"):
        check_payload(KEY, part, bytes(8))


def test_threads_check_without_disturbing_each_other() -> None:
    parts = {part: payload(KEY, part, 1 << 20) for part in range(4)}
    verdicts: list[bool] = []

    def check(part: int) -> None:
        for _ in range(20):
            verdicts.append(check_payload(KEY, part, parts[part]))
            verdicts.append(not check_payload(KEY, part, parts[(part + 1) % 4]))

    threads = [threading.Thread(target=check, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(verdicts) == 160
    assert all(verdicts)
