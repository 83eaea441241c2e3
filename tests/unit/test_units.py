"""Sizes, durations, ratios and addresses as text: the documented spellings, all else refused with an example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import (
    Address,
    describe_size,
    format_duration,
    format_ratio,
    format_size,
    parse_duration,
    parse_ratio,
    parse_size,
)
from kvstore.config.address import MAX_UNIX_PATH_BYTES


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("0B", 0),
        ("7B", 7),
        ("1kB", 1000),
        ("1KB", 1000),
        ("5MB", 5_000_000),
        ("5GB", 5_000_000_000),
        ("5 GB", 5_000_000_000),
        ("2TB", 2_000_000_000_000),
        ("4KiB", 4096),
        ("8MiB", 8_388_608),
        ("5GiB", 5_368_709_120),
        ("64 GiB", 68_719_476_736),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_documented_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


BAD_SIZES = ["", " ", "5g", "5G", "5 gb", "5gb", "5e9", "5XB", "-1", "+5", "05", "1.5GiB", "5_000", "5  GB", " 5GB"]
BAD_SIZES += ["5GB ", "5GB\n", "GB", "0x10", "5kb", "5Kb", "5kiB", "5GiBs", "٥GB", "9" * 5000, "inf"]


@pytest.mark.parametrize("text", BAD_SIZES)
def test_other_sizes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: .*for example 64GiB") as refusal:
        parse_size(text)
    assert len(str(refusal.value)) < 300


@given(st.integers(min_value=0, max_value=10**15 - 1))
def test_a_size_survives_its_text(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_sizes_are_shown_short_where_that_is_exact() -> None:
    assert [format_size(size) for size in (0, 1023, 4096, 5 * 1024**2, 1536 * 1024**2, 5 * 10**9)] == [
        "0",
        "1023",
        "4KiB",
        "5MiB",
        "1536MiB",
        "5000000000",
    ]
    assert describe_size(33_500_000_000) == "31.2GiB (33500000000 bytes)"
    assert describe_size(1024**3) == "1GiB (1073741824 bytes)"
    assert describe_size(12) == "12 bytes"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("97s", 97.0), ("250ms", 0.25), ("5m", 300.0), ("1h", 3600.0), ("0s", 0.0), ("2 s", 2.0), ("90s", 90.0)],
)
def test_documented_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "97", "0", "97S", "1d", "1.5s", "-1s", "1m30s", "s", "1e3s", "5M", "07s"])
def test_other_durations_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration: .*for example 97s"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10**12))
def test_a_duration_survives_its_text(total_ms: int) -> None:
    assert parse_duration(format_duration(total_ms / 1000)) == total_ms / 1000


def test_durations_are_shown_in_the_largest_unit_that_is_exact() -> None:
    assert [format_duration(seconds) for seconds in (0, 0.25, 97, 300, 3600, 5400)] == [
        "0s",
        "250ms",
        "97s",
        "5m",
        "1h",
        "90m",
    ]


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("0.5", 0.5), ("50%", 0.5), ("1", 1.0), ("100%", 1.0), ("0", 0.0), ("7%", 0.07), ("12.5%", 0.125), ("0.05", 0.05)],
)
def test_documented_ratios_are_read_and_survive_their_text(text: str, ratio: float) -> None:
    assert parse_ratio(text) == ratio
    assert parse_ratio(format_ratio(ratio)) == ratio


@pytest.mark.parametrize("text", ["", "half", ".5", "5e-1", "-0.5", "50 %", "%", "nan", "inf", "0,5", "1/2"])
def test_other_ratios_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a ratio: .*for example 0.5 or 50%"):
        parse_ratio(text)


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070, "127.0.0.1:7070"),
        ("[::1]:50051", "::1", 50051, "[::1]:50051"),
        ("[0:0::1]:50051", "::1", 50051, "[::1]:50051"),
        ("0.0.0.0:0", "0.0.0.0", 0, "0.0.0.0:0"),
        ("Node-7.fleet_a.example:65535", "node-7.fleet_a.example", 65535, "node-7.fleet_a.example:65535"),
    ],
)
def test_host_and_port_are_read(text: str, host: str, port: int, target: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.unix_path) == (host, port, None)
    assert address.grpc_target() == target
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["unix:/run/kvstore.sock", "unix:///run/kvstore.sock"])
def test_unix_sockets_are_read(text: str) -> None:
    address = Address.parse(text)
    assert address == Address("", 0, "/run/kvstore.sock")
    assert address.grpc_target() == "unix:/run/kvstore.sock"
    assert address.is_loopback()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no port"),
        ("::1", "IPv6 host needs brackets"),
        ("::1:50051", "IPv6 host needs brackets"),
        ("fe80::1:2:3", "IPv6 host needs brackets"),
        ("host", "has no port"),
        ("host:", "port is missing"),
        ("host:90abc", "port '90abc' is not a number"),
        ("host:70000", "port 70000 is above 65535"),
        ("host:700000", "port '700000' is not a number"),
        ("host:-1", "port '-1' is not a number"),
        ("host:+80", "port '\\+80' is not a number"),
        ("host:080", "port '080' is not a number"),
        ("host: 80", "port ' 80' is not a number"),
        ("host:80\n", "is not a number"),
        ("host:٨٠", "is not a number"),
        (":7070", "host is missing"),
        ("[]:7070", "is not an IPv6 address"),
        ("[::1]", "brackets"),
        ("[::1]7070", "brackets"),
        ("[::1]:", "port is missing"),
        ("[::1]:90abc", "port '90abc' is not a number"),
        ("[::1:7070", "brackets"),
        ("[localhost]:7070", "is not an IPv6 address"),
        ("[fe80::1%eth0]:7070", "zone ids"),
        ("300.1.1.1:7070", "is not an IPv4 address"),
        ("ho st:7070", "is not a host name"),
        ("http://host:7070", "IPv6 host needs brackets|is not"),
        ("-host:7070", "is not a host name"),
        ("unix:", "must be absolute"),
        ("unix:run/kvstore.sock", "must be absolute"),
        ("unix:/", "must be absolute and name a file"),
        ("unix://host/kvstore.sock", "must be absolute"),
        ("unix:/a,b", "no comma"),
        ("unix:/a\0b", "no control character"),
        ("unix:/" + "x" * MAX_UNIX_PATH_BYTES, "the limit is 107"),
    ],
)
def test_sloppy_addresses_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"is not an address, .*(?:{reason}).*: write host:port"):
        Address.parse(text)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    reachable_here = ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "[::ffff:127.0.0.1]:1", "unix:/s"]
    reachable_from_outside = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[::ffff:10.0.0.1]:1", "node-7:1"]
    assert all(Address.parse(text).is_loopback() for text in reachable_here)
    assert not any(Address.parse(text).is_loopback() for text in reachable_from_outside)


@pytest.mark.parametrize(
    ("left", "right", "overlap"),
    [
        ("10.0.0.1:7070", "10.0.0.1:7070", True),
        ("0.0.0.0:7070", "127.0.0.1:7070", True),
        ("localhost:7070", "0.0.0.0:7070", True),
        ("10.0.0.1:7070", "10.0.0.2:7070", False),
        ("10.0.0.1:7070", "10.0.0.1:7071", False),
        ("0.0.0.0:7070", "[::]:7070", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("unix:/s", "unix:/s", True),
        ("unix:/s", "unix:/t", False),
        ("unix:/s", "127.0.0.1:0", False),
    ],
)
def test_overlap_is_what_one_process_cannot_listen_at_twice(left: str, right: str, overlap: bool) -> None:
    assert Address.parse(left).overlaps(Address.parse(right)) is overlap
    assert Address.parse(right).overlaps(Address.parse(left)) is overlap
