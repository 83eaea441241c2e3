"""The configuration as a whole: precedence, every fault at once, impossible pairs, and docs that match the code."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.config import (
    Address,
    Config,
    ConfigError,
    NamespacePolicy,
    Option,
    Uids,
    auto_page_bytes,
    check_memory,
    effective,
    format_size,
    load_config,
    options,
    options_table,
    parse_size,
    policy_options,
    startup_lines,
)
from kvstore.tiers.segment import Described, Layout

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
SIZE_OPTIONS = [option for option in options() if option.unit == "bytes"]


def load(
    file: Path | None = None, *, env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Config:
    return load_config(file, env or {}, flags or {})


def refuse(
    file: Path | None = None, *, env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> ConfigError:
    with pytest.raises(ConfigError) as refusal:
        load(file, env=env, flags=flags)
    return refusal.value


def attempt(flags: Mapping[str, str]) -> Config | ConfigError:
    try:
        return load(flags=flags)
    except ConfigError as error:
        return error


def write(folder: Path, text: str) -> Path:
    path = folder / "kvstore.toml"
    path.write_text(text)
    return path


def shown(config: Config) -> dict[str, str]:
    return {key: text for key, text, _ in effective(config)}


# --- Sources and their order


def test_flags_win_over_env_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nmax_sessions = 2\nmax_namespaces = 2\nlog_level = 'error'\n")
    env = {"KVSTORE_SERVER__MAX_SESSIONS": "3", "KVSTORE_SERVER__MAX_NAMESPACES": "3", "HOME": "/"}
    config = load(path, env=env, flags={"server.max_sessions": "4"})
    server = config.server
    assert (server.max_sessions, server.max_namespaces, server.log_level) == (4, 3, "error")
    sources = {key: source for key, _, source in effective(config)}
    keys = ("server.max_sessions", "server.max_namespaces", "server.log_level", "server.listen")
    assert [sources[key] for key in keys] == ["flag", "env", "file", "default"]


def test_kvstore_config_names_the_file_and_a_path_wins_over_it(tmp_path: Path) -> None:
    named = write(tmp_path, "[server]\nmax_sessions = 2\n")
    other = tmp_path / "other.toml"
    other.write_text("[server]\nmax_sessions = 9\n")
    assert load(env={"KVSTORE_CONFIG": str(named)}).server.max_sessions == 2
    assert load(other, env={"KVSTORE_CONFIG": str(named)}).server.max_sessions == 9
    (fault,) = refuse(env={"KVSTORE_CONFIG": ""}).faults
    assert fault.key == "KVSTORE_CONFIG"


def test_every_option_can_be_set_from_env_and_flag_alike() -> None:
    by_env = load(env={option.env: option.default for option in options()})
    by_flag = load(flags={option.key: option.default for option in options()})
    assert by_env == by_flag == load()
    assert {source for _, _, source in effective(by_env)} == {"env"}
    assert {source for _, _, source in effective(by_flag)} == {"flag"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[hot\n", "cannot be read"),
        (b"[hot]\ncapacity = 1\ncapacity = 2\n", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"#" * (1024 * 1024 + 1), "larger than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_fault_beside_the_others(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_bytes(content)
    error = refuse(path, flags={"hot.capacity": "5g"})
    assert [fault.key for fault in error.faults] == [str(path), "hot.capacity"]
    assert problem in error.faults[0].problem


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in str(refuse(tmp_path / "absent.toml"))


def test_the_tree_is_frozen_and_survives_pickling() -> None:
    config = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hot.capacity = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    error = refuse(flags={"hot.capacity": "5g"})
    assert pickle.loads(pickle.dumps(error)).faults == error.faults


# --- Unknown names


def test_misspelt_keys_and_sections_are_refused_naming_the_nearest(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'drain_timout = "1s"\n[hot]\ncapcity = "4GiB"\nlisten = "a:1"\n[limit]\nchunk = "64KiB"\n[zzzz]\nx = 1\n',
    )
    error = refuse(path, env={"KVSTORE_HOT_CAPACITY": "4GiB"}, flags={"server.max_session": "1"})
    nearest = {fault.key: fault.nearest for fault in error.faults}
    assert nearest == {
        "drain_timout": "server.drain_timeout",
        "hot.capcity": "hot.capacity",
        "hot.listen": "server.listen",
        "limit": "[limits]",
        "zzzz": "",
        "KVSTORE_HOT_CAPACITY": "KVSTORE_HOT__CAPACITY",
        "server.max_session": "server.max_sessions",
    }
    text = str(error)
    assert text.startswith("configuration refused, 7 faults:")
    assert f"hot.capcity (file {path}): unknown key; the nearest known one is hot.capacity" in text
    assert "(env KVSTORE_HOT_CAPACITY)" in text
    assert "(flag --server.max_session)" in text
    assert "zzzz" in text
    assert "one of server, hot, limits" in text


def test_every_fault_of_every_source_is_listed_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[hot]\ncapacity = "5g"\nhuge_pages = true\n[server]\nmax_sessions = 0\n[lease]\nmax = "10s"\n'
    )
    env = {"KVSTORE_LIMITS__CHUNK": "1KiB", "KVSTORE_BANANA": "1"}
    error = refuse(path, env=env, flags={"hot.capacity": "2GiB", "health.probe_timeout": "1"})
    assert [fault.key for fault in error.faults] == [
        "KVSTORE_BANANA",
        "hot.capacity",
        "hot.huge_pages",
        "server.max_sessions",
        "limits.chunk",
        "health.probe_timeout",
        "lease.default and lease.max",
    ]
    overridden = error.faults[1]
    assert (overridden.where, overridden.value) == (f"file {path}", "'5g'")
    assert overridden.limit == "1MiB..16TiB, a multiple of 4KiB"


def test_a_name_with_line_breaks_stays_on_its_line(tmp_path: Path) -> None:
    error = refuse(write(tmp_path, '[hot]\n"a\\nb" = 1\n'), env={"KVSTORE_\udc80": "1"})
    assert len(str(error).splitlines()) == 3
    assert str(error).encode()


# --- Sizes


@pytest.mark.parametrize("option", SIZE_OPTIONS, ids=lambda option: option.key)
@pytest.mark.parametrize("text", ["5GB", "5GiB", "5g", "5 gb", "5e9", "0", "-1", "", "5XB"])
def test_every_size_option_reads_a_size_exactly_or_refuses_it(option: Option, text: str) -> None:
    flags = {option.key: text}
    if option.key in ("namespaces.default_quota", "warm.queue", "warm.promote_queue"):
        flags["hot.capacity"] = "8GiB"
    outcome = attempt(flags)
    if isinstance(outcome, ConfigError):
        assert all(fault.key.startswith(option.key) for fault in outcome.faults)
        assert all(f"flag --{option.key}" in fault.where for fault in outcome.faults)
        assert all(repr(text) in fault.problem for fault in outcome.faults)
    else:
        size_bytes = parse_size(text)
        assert shown(outcome)[option.key] == format_size(size_bytes)
        assert f"{option.key} = {format_size(size_bytes)} ({size_bytes} bytes) [flag]" in startup_lines(outcome)


def test_some_of_those_sizes_are_accepted() -> None:
    assert load(flags={"hot.capacity": "5GiB"}).hot.capacity == 5 * GIB
    assert load(flags={"limits.max_call_bytes": "5GB"}).limits.max_call_bytes == 5_000_000_000
    assert "not a multiple of 4KiB" in str(refuse(flags={"hot.capacity": "5GB"}))


# --- Bounds. Each row: key, a value below, the lowest, the highest, a value above; then what else must be set.

BOUNDS = [
    ("server.drain_timeout", "", "0s", "10m", "601s"),
    ("server.max_sessions", "0", "1", "65536", "65537"),
    ("server.max_namespaces", "0", "1", "65536", "65537"),
    ("server.max_message", "131071", "128KiB", "64MiB", "67108865"),
    ("server.send_budget", "4194303", "4MiB", "64GiB", "68719476737"),
    ("hot.capacity", "1044480", "1MiB", "16TiB", "17592186048512"),
    ("hot.page", "32KiB", "64KiB", "64MiB", "128MiB"),
    ("hot.max_leased_share", "0.049", "0.05", "1.0", "1.001"),
    ("limits.max_blocks_per_call", "0", "1", "65536", "65537"),
    ("limits.max_match_blocks", "0", "1", "65536", "65537"),
    ("limits.max_parts_per_block", "0", "1", "65536", "65537"),
    ("limits.max_part", "4095", "4KiB", "64MiB", "67108865"),
    ("limits.max_call_bytes", "1048575", "1MiB", "64GiB", "68719476737"),
    ("limits.chunk", "65535", "64KiB", "4MiB", "4194305"),
    ("limits.max_wait", "", "0s", "10m", "601s"),
    ("lease.default", "99ms", "100ms", "24h", "1441m"),
    ("lease.max", "99ms", "100ms", "24h", "1441m"),
    ("lease.session_open_timeout", "99ms", "100ms", "10m", "601s"),
    ("namespaces.default_ttl", "99ms", "100ms", "8760h", "8761h"),
    ("namespaces.default_quota", "", "0", "16TiB", "17592186044417"),
    ("namespaces.default_max_bytes", "4095", "4KiB", "16TiB", "17592186044417"),
    ("health.probe_interval", "99ms", "100ms", "1m", "61s"),
    ("health.probe_timeout", "9ms", "10ms", "1m", "61s"),
    ("bulk.max_connections", "0", "1", "65536", "65537"),
    ("bulk.credit", "1048575", "1MiB", "4GiB", "4294967297"),
    ("bulk.frame", "65535", "64KiB", "4MiB", "4194305"),
    ("bulk.busy_poll_us", "", "0", "10000", "10001"),
    ("bulk.stall_timeout", "99ms", "100ms", "10m", "601s"),
    ("shm.max_regions", "0", "1", "65536", "65537"),
    ("shm.max_region_bytes", "4095", "4KiB", "16TiB", "17592186044417"),
    ("shm.copy_threads", "0", "1", "64", "65"),
    ("warm.capacity", "67108863", "64MiB", "16TiB", "17592186044417"),
    ("warm.segment", "512KiB", "1MiB", "1GiB", "2GiB"),
    ("warm.index_cache", "1048575", "1MiB", "64GiB", "68719476737"),
    ("warm.queue", "4095", "4KiB", "64GiB", "68719476737"),
    ("warm.promote_queue", "4095", "4KiB", "64GiB", "68719476737"),
    ("warm.read_threads", "0", "1", "64", "65"),
    ("warm.clean_share", "0.009", "0.01", "1.0", "1.001"),
    ("warm.write_budget", "65535", "64KiB", "64GiB", "68719476737"),
    ("warm.rewrite_share", "", "0.0", "0.5", "0.501"),
    ("warm.flush_timeout", "", "0s", "10m", "601s"),
]
BESIDE = {
    ("server.max_message", "128KiB"): {"limits.chunk": "64KiB"},
    ("hot.page", "64KiB"): {"limits.max_part": "64KiB"},
    ("hot.max_leased_share", "0.05"): {"hot.capacity": "2GiB"},
    ("limits.max_call_bytes", "1MiB"): {"limits.max_part": "1MiB"},
    ("lease.default", "24h"): {"lease.max": "24h"},
    ("bulk.credit", "1MiB"): {"bulk.frame": "1MiB"},
    ("lease.max", "100ms"): {"lease.default": "100ms"},
    ("namespaces.default_quota", "16TiB"): {"hot.capacity": "16TiB"},
    ("warm.capacity", "64MiB"): {"warm.segment": "32MiB", "limits.max_part": "1MiB"},
    ("warm.segment", "1MiB"): {"limits.max_part": "512KiB"},
    ("warm.queue", "4KiB"): {"limits.max_part": "4KiB"},
    ("warm.queue", "64GiB"): {"hot.capacity": "64GiB"},
    ("warm.promote_queue", "4KiB"): {"limits.max_part": "4KiB"},
    ("warm.promote_queue", "64GiB"): {"hot.capacity": "64GiB"},
}


@pytest.mark.parametrize(("key", "below", "lowest", "highest", "above"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_each_bound_is_exact_and_nothing_is_adjusted(
    key: str, below: str, lowest: str, highest: str, above: str
) -> None:
    for text in (lowest, highest):
        assert shown(load(flags={key: text, **BESIDE.get((key, text), {})}))[key] == text
    for text in filter(None, (below, above)):
        faults = [fault for fault in refuse(flags={key: text}).faults if fault.key == key]
        assert [(fault.value, fault.where) for fault in faults] == [(repr(text), f"flag --{key}")]
        assert f"{text!r} is outside {lowest}..{highest}" in faults[0].problem


def test_the_table_of_bounds_holds_every_option_that_has_any() -> None:
    words_and_lists = {option.key for option in options() if not option.unit}
    assert {row[0] for row in BOUNDS} | words_and_lists == {option.key for option in options()}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[hot]\ncapacity = 1073741824.0", "a float, not a size"),
        ("[hot]\ncapacity = true", "true is a boolean, not a size"),
        ("[hot]\ncapacity = -4096", "-4096 is outside 1MiB"),
        ("[hot]\ncapacity = ['1GiB']", "a list, not a size"),
        ("[hot]\npage = 0", "0 is outside 64KiB"),
        ("[hot]\npage = '3MiB'", "not a power of two; or write auto"),
        ("[hot]\nmax_leased_share = nan", "nan is outside 0.05..1.0"),
        ("[hot]\nmax_leased_share = inf", "inf is outside"),
        ("[hot]\nmax_leased_share = true", "a boolean, not a ratio"),
        ("[hot]\npolicy = 'LRU'", "'LRU' is not one of expected, lru"),
        ("[hot]\nprefault = 1", "an integer, not a word"),
        ("hot = 3", "an integer, not a table"),
        ("[[hot]]", "a list, not a table"),
        ("[server]\nmax_sessions = '4096'", "a string, not a count"),
        ("[server]\nmax_sessions = 4096.0", "a float, not a count"),
        ("[server]\ndrain_timeout = 10", "an integer, not a duration"),
        ("[server]\ndrain_timeout = 10:00:00", "a date or time, not a duration"),
        ("[namespaces]\ndefault_ttl = 0", "or write none"),
        ("[namespaces]\ndefault_quota = '101%'", "'101%' is outside 0%..100%"),
        ("[namespaces]\ndefault_quota = 0.5", "a float, not a size"),
        ("[namespaces]\npolicy = 1", "an integer, not a table"),
        ("[tls]\ncert = 1", "an integer, not a path"),
        ("[tls]\ncert = 'a\tb'", "holds a control character"),
        (f"[tls]\ncert = '{'x' * 4096}'", "has 4096 bytes, the limit is 4095"),
        ("[bulk]\nlisten = 'unix:/run/k'", "unix:/run/k is a Unix socket; shm.socket says where one is"),
        ("[bulk]\nlisten = 'none'", "or write off"),
        ("[bulk]\nlisten = []", "0 addresses, outside 1..16 addresses of hosts"),
        ("[bulk]\nadvertise = 'h:0'", "no place that clients can connect to"),
        ("[bulk]\nadvertise = 'unix:/run/k'", "no place that clients can connect to"),
        ("[bulk]\nadvertise = 'h'", "it has no port"),
        ("[shm]\nsocket = 'run/k'", "must be absolute and name a file; or write auto or off"),
        (f"[shm]\nsocket = '/{'x' * 107}'", "has 108 bytes, the limit is 107"),
        ("[shm]\nsocket = true", 'a boolean, not "auto", "off" or a path'),
        ("[shm]\nallow_uids = 'none'", "'none' is not a uid: write a whole number, for example 1000; or write same"),
        ("[shm]\nallow_uids = [1, 'x']", "'x' is not a uid"),
        ("[shm]\nallow_uids = [-1]", "-1 is outside 0..4294967294"),
        ("[shm]\nallow_uids = []", "has 0 uids, outside 1..64"),
        ("[shm]\nallow_uids = [1, 1]", "names a uid twice"),
        ("[shm]\nallow_uids = 1.5", "a float, not same or a list of uids"),
        ("[shm]\nmap_uids = [true]", "true is not a uid"),
        ("[warm]\npath = true", "a boolean, not a path"),
        ("[warm]\nsegment = '3MiB'", "not a power of two"),
        ("[warm]\nqueue = '1KiB'", "or write auto"),
        ("[warm]\nwrite_budget = 0", "or write none"),
        ("[warm]\non_wrong_key = 'ignore'", "'ignore' is not one of refuse, empty"),
        ("[warm]\non_broken_index = true", "a boolean, not a word"),
        ("[warm]\nencryption_key = 'env:'", "names no environment variable"),
        ("[warm]\nencryption_key = 'env:A B'", "names no environment variable"),
        ("[warm]\nencryption_key = 'env:KVSTORE_KEY'", "variables that start with KVSTORE_ are options"),
        ("[warm]\nencryption_key = 'keys'", "an absolute path, or env:NAME, or empty"),
        ("[warm]\nencryption_key = 1", "an integer, not a place of keys"),
    ],
)
def test_values_of_a_wrong_type_are_refused(tmp_path: Path, line: str, problem: str) -> None:
    (fault,) = refuse(write(tmp_path, line)).faults
    assert problem in str(fault)


def test_toml_may_write_numbers_bare(tmp_path: Path) -> None:
    path = write(tmp_path, "[hot]\ncapacity = 2097152\nmax_leased_share = 1\n[server]\nmax_sessions = 7\n")
    config = load(path)
    assert (config.hot.capacity, config.hot.max_leased_share, config.server.max_sessions) == (2 * MIB, 1.0, 7)
    assert isinstance(config.hot.max_leased_share, float)


# --- Lists


def test_a_list_is_the_same_from_every_source_and_spelling(tmp_path: Path) -> None:
    text = "0.0.0.0:7070, unix:/run/kvstore.sock"
    files = [
        write(tmp_path, 'server.listen = ["0.0.0.0:7070", "unix:/run/kvstore.sock"]'),
        tmp_path / "comma.toml",
    ]
    files[1].write_text(f'[server]\nlisten = "{text}"\n')
    configs = [load(path) for path in files]
    configs += [load(env={"KVSTORE_SERVER__LISTEN": text}), load(flags={"server.listen": text.replace(" ", "")})]
    expected = (Address("0.0.0.0", 7070), Address("", 0, "/run/kvstore.sock"))
    assert [config.server.listen for config in configs] == [expected] * 4


def test_one_address_as_text_is_a_list_of_one(tmp_path: Path) -> None:
    expected = (Address("node-7", 7070),)
    configs = [
        load(write(tmp_path, '[server]\nlisten = "node-7:7070"\n')),
        load(env={"KVSTORE_SERVER__LISTEN": "node-7:7070"}),
        load(flags={"server.listen": "node-7:7070"}),
    ]
    assert [config.server.listen for config in configs] == [expected] * 3


@pytest.mark.parametrize("text", ["", ",", "a:1,", "a:1,,b:2", "a:1;b:2", "a:1 b:2", "a:1,a:1", "0.0.0.0:1,a:1"])
def test_sloppy_lists_are_refused(text: str) -> None:
    assert [fault.key for fault in refuse(flags={"server.listen": text}).faults] == ["server.listen"]


@pytest.mark.parametrize("value", ["[]", "7070", "[7070]", "['a:1', ['b:2']]", "['a:1,b:2']", "{a = 1}", "''"])
def test_lists_of_a_wrong_type_are_refused(tmp_path: Path, value: str) -> None:
    error = refuse(write(tmp_path, f"[server]\nlisten = {value}\n"))
    assert [fault.key for fault in error.faults] == ["server.listen"]


def test_every_bad_address_of_a_list_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nlisten = ['[::1]:50051', '::1', 'host:90abc', 'host:', 'host:70000', 3]\n")
    (fault,) = refuse(path).faults
    for part in ("'::1'", "'host:90abc'", "'host:'", "'host:70000'", "the item 3 is an integer"):
        assert part in fault.problem
    assert "'[::1]:50051' is not" not in fault.problem


def test_at_most_sixteen_addresses() -> None:
    texts = [f"10.0.0.{index}:1" for index in range(17)]
    assert len(load(flags={"server.listen": ",".join(texts[:16])}).server.listen) == 16
    assert "17 addresses, outside 1..16" in str(refuse(flags={"server.listen": ",".join(texts)}))


def test_places_and_users_are_as_written() -> None:
    flags = {"bulk.advertise": "[0::1]:7072", "shm.socket": "/run//kv/./k.sock", "bulk.listen": "0.0.0.0:1,[::]:1"}
    config = load(flags=flags)
    assert (config.bulk.advertise, config.shm.socket) == ("[::1]:7072", "/run/kv/k.sock")
    assert config.bulk.listen == (Address("0.0.0.0", 1), Address("::", 1))
    assert load(flags={"bulk.listen": "off"}).bulk.listen is None


def test_uids_are_the_same_from_every_spelling(tmp_path: Path) -> None:
    spellings = ["[1000, 1001]", "'1000, 1001'", "['1000', 1001]"]
    configs = [load(write(tmp_path, f"[shm]\nallow_uids = {text}\n")) for text in spellings]
    configs.append(load(flags={"shm.allow_uids": "1000,1001"}))
    assert [config.shm.allow_uids for config in configs] == [Uids((1000, 1001))] * 4
    assert load(write(tmp_path, "[shm]\nallow_uids = 0\n")).shm.allow_uids == Uids((0,))


def test_only_the_uids_named_are_admitted() -> None:
    assert [load().shm.allow_uids.admits(uid, own_uid=1000) for uid in (1000, 0, 1001)] == [True, False, False]
    listed = load(flags={"shm.allow_uids": "0,1001", "shm.map_uids": "none"}).shm
    assert [listed.allow_uids.admits(uid, own_uid=1000) for uid in (1000, 0, 1001)] == [False, True, True]
    assert not any(listed.map_uids.admits(uid, own_uid=1000) for uid in (1000, 0, 1001))


# --- What follows from other options


@pytest.mark.parametrize(
    ("capacity_bytes", "page_bytes"),
    [
        (MIB, 128 * KIB),
        (MIB + 4 * KIB, 128 * KIB),
        (64 * MIB, 8 * MIB),
        (511 * MIB, 32 * MIB),
        (512 * MIB, 64 * MIB),
        (16 * TIB, 64 * MIB),
    ],
)
def test_auto_page_is_shown_and_the_part_limit_follows_it(capacity_bytes: int, page_bytes: int) -> None:
    config = load(flags={"hot.capacity": str(capacity_bytes)})
    assert config.hot.page == config.limits.max_part == auto_page_bytes(capacity_bytes) == page_bytes
    assert shown(config)["hot.page"] == shown(config)["limits.max_part"] == format_size(page_bytes)
    assert page_bytes <= capacity_bytes


def test_auto_page_is_never_below_its_bound() -> None:
    assert auto_page_bytes(64 * KIB) == 64 * KIB


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ({"hot.capacity": "1MiB", "hot.page": "2MiB", "limits.max_part": "64KiB"}, ("2MiB", "1MiB")),
        ({"hot.page": "1MiB"}, ("64MiB", "1MiB")),
        ({"hot.page": "1MiB", "limits.max_part": "2MiB"}, ("2MiB", "1MiB")),
        ({"hot.capacity": "1MiB", "limits.max_part": "256KiB"}, ("256KiB", "128KiB")),
        ({"limits.max_part": "2MiB", "limits.max_call_bytes": "1MiB"}, ("2MiB", "1MiB")),
        ({"lease.default": "6m"}, ("6m", "5m")),
        ({"limits.chunk": "4MiB", "server.max_message": "4MiB"}, ("4MiB", "64KiB")),
        ({"hot.capacity": "512MiB", "hot.max_leased_share": "5%"}, ("0.05", "512MiB", "26843545 bytes", "64MiB")),
        ({"namespaces.default_quota": "2GiB"}, ("2147483648 bytes", "1GiB")),
        ({"namespaces.default_quota": "50%", "namespaces.default_max_bytes": "49%"}, ("512MiB", "526133493")),
        ({"namespaces.default_max_bytes": "0%"}, ("4KiB",)),
        ({"server.listen": "h:7071", "server.admin_listen": "h:7071"}, ("h:7071",)),
        ({"server.listen": "0.0.0.0:7071"}, ("0.0.0.0:7071", "127.0.0.1:7071")),
        ({"server.listen": "h:7072", "bulk.listen": "h:7072"}, ("h:7072 of server.listen", "h:7072 of bulk.listen")),
        ({"server.admin_listen": "unix:/run/k", "shm.socket": "/run/k"}, ("unix:/run/k of shm.socket",)),
        ({"bulk.frame": "4MiB", "bulk.credit": "1MiB"}, ("4MiB", "1MiB")),
        ({"bulk.listen": "off", "bulk.advertise": "h:7072"}, ("bulk.advertise h:7072", "opens no port")),
        ({"tls.cert": "/c"}, ("tls.cert /c", "tls.key is not")),
        ({"tls.key": "/k"}, ("tls.key /k", "tls.cert is not")),
        ({"tls.client_ca": "/a"}, ("tls.client_ca /a", "tls.cert is not")),
        ({"shm.allow_uids": "1,2", "shm.map_uids": "2,3"}, ("3 of shm.map_uids 2,3", "shm.allow_uids 1,2")),
        ({"warm.segment": "64MiB"}, ("64MiB (default)", "16KiB", "warm.segment 64MiB (flag")),
        ({"warm.segment": "1MiB", "limits.max_part": "1032193"}, ("limits.max_part 1032193", "warm.segment 1MiB")),
        ({"warm.capacity": "511MiB"}, ("warm.capacity 511MiB", "two of warm.segment 256MiB")),
        ({"warm.queue": "63MiB"}, ("limits.max_part 64MiB", "warm.queue 63MiB")),
        ({"warm.queue": "1025MiB"}, ("warm.queue 1025MiB", "hot.capacity 1GiB")),
        ({"warm.promote_queue": "63MiB"}, ("limits.max_part 64MiB", "warm.promote_queue 63MiB")),
        ({"warm.promote_queue": "1025MiB"}, ("warm.promote_queue 1025MiB", "hot.capacity 1GiB")),
    ],
)
def test_impossible_pairs_are_refused_with_both_numbers(flags: dict[str, str], numbers: tuple[str, ...]) -> None:
    (fault,) = refuse(flags=flags).faults
    for number in numbers:
        assert number in fault.problem
    assert "flag --" in fault.where


def test_a_part_may_fill_a_segment_but_for_what_describes_it() -> None:
    config = load(flags={"warm.segment": "1MiB", "limits.max_part": "1032192"})
    assert config.limits.max_part == MIB - 16 * KIB
    # What the format takes beside a part of that length, with a namespace as large as they are.
    layout, described = Layout(config.warm.segment), Described(bytes(32), bytes(1024))
    assert layout.fits([config.limits.max_part], described)
    assert not layout.fits([config.limits.max_part + 1], described)


@pytest.mark.parametrize(
    ("flags", "queue_bytes", "promote_bytes"),
    [
        ({}, 64 * MIB, 256 * MIB),
        ({"hot.capacity": "2GiB"}, 128 * MIB, 512 * MIB),
        ({"hot.capacity": "16TiB"}, 128 * MIB, 512 * MIB),
        ({"hot.capacity": "64MiB"}, 8 * MIB, 16 * MIB),
        ({"hot.capacity": "64MiB", "limits.max_part": "4KiB"}, 4 * MIB, 16 * MIB),
        ({"hot.capacity": "1MiB"}, 128 * KIB, 256 * KIB),
        ({"warm.queue": "65MiB", "warm.promote_queue": "1GiB"}, 65 * MIB, GIB),
    ],
)
def test_auto_queues_follow_capacity_and_part(flags: dict[str, str], queue_bytes: int, promote_bytes: int) -> None:
    config = load(flags=flags)
    assert (config.warm.queue, config.warm.promote_queue) == (queue_bytes, promote_bytes)
    assert shown(config)["warm.queue"] == format_size(queue_bytes)
    again = load(flags={**flags, "warm.queue": str(queue_bytes), "warm.promote_queue": str(promote_bytes)})
    assert again == config, "what auto comes to can be written"


def test_an_auto_queue_is_never_at_fault_itself() -> None:
    error = refuse(flags={"hot.capacity": "1MiB", "limits.max_part": "2MiB"})
    assert error.faults
    assert not [fault for fault in error.faults if "warm." in fault.key]


def test_where_keys_are_is_shown_and_what_may_be_a_key_is_not() -> None:
    for place in ("/etc/kvstore/keys", "env:CACHE_KEYS"):
        assert load(flags={"warm.encryption_key": place}).warm.encryption_key == place
    key = "00112233445566778899aabbccddeeff" * 2
    for text in (key, f"env:{key} ", f"env:KVSTORE_{key}"):
        assert key not in str(refuse(flags={"warm.encryption_key": text}))


def test_a_pair_is_not_judged_on_a_faulty_half() -> None:
    error = refuse(flags={"hot.capacity": "5g", "hot.page": "64MiB", "namespaces.default_quota": "80%"})
    assert [fault.key for fault in error.faults] == ["hot.capacity"]


# --- Namespaces

POLICIES = """
[hot]
capacity = "1GiB"
[namespaces]
default_ttl = "1h"
default_quota = "10%"
[namespaces.policy."chat/llama"]
quota = "50%"
ttl = "none"
[namespaces.policy."code/meta-llama/Llama-3.1 70B"]
max_bytes = "256MiB"
"""


def test_a_policy_takes_what_it_lacks_from_the_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, POLICIES))
    ten_percent = GIB // 10
    assert config.namespaces.policy == (
        NamespacePolicy(namespace="chat/llama", ttl=None, quota=GIB // 2, max_bytes=None),
        NamespacePolicy(namespace="code/meta-llama/Llama-3.1 70B", ttl=3600.0, quota=ten_percent, max_bytes=256 * MIB),
    )
    assert config.namespaces.for_namespace("chat/llama") == config.namespaces.policy[0]
    other = config.namespaces.for_namespace("other/model")
    assert (other.ttl, other.quota, other.max_bytes) == (3600.0, ten_percent, None)
    rows = {key: (text, source) for key, text, source in effective(config)}
    assert rows['namespaces.policy."chat/llama".quota'] == ("512MiB", "file")
    assert rows['namespaces.policy."chat/llama".ttl'] == ("none", "file")
    assert rows['namespaces.policy."chat/llama".max_bytes'] == ("none", "default")


def test_quotas_beyond_the_capacity_are_refused_with_the_sum(tmp_path: Path) -> None:
    text = POLICIES.replace('"10%"', '"20%"').replace('"50%"', '"60%"')
    assert load(write(tmp_path, text)).hot.capacity == GIB
    (fault,) = refuse(write(tmp_path, text.replace('"60%"', '"61%"'))).faults
    assert fault.key.endswith("and hot.capacity")
    assert 'namespaces.policy."chat/llama".quota' in fault.problem
    assert f"{int(GIB * 0.61) + 2 * int(GIB * 0.2)} bytes" in fault.problem


def test_faulty_policies_are_listed_with_their_namespace(tmp_path: Path) -> None:
    text = """
    [namespaces.policy.chat]
    quota = "5g"
    [namespaces.policy."a/b"]
    ttll = "1s"
    quota = "2MiB"
    max_bytes = "1MiB"
    [namespaces.policy."a/c"]
    quota = "2MiB"
    max_bytes = "1MiB"
    [namespaces.policy]
    "a/d" = 1
    """
    error = refuse(write(tmp_path, text), flags={'namespaces.policy."a/b".ttl': "1s"})
    assert [fault.key for fault in error.faults] == [
        'namespaces.policy."chat"',
        'namespaces.policy."a/b".ttll',
        'namespaces.policy."a/d"',
        'namespaces.policy."a/b".ttl',
        'namespaces.policy."chat".quota',
        'namespaces.policy."a/b".quota and namespaces.policy."a/b".max_bytes',
        'namespaces.policy."a/c".quota and namespaces.policy."a/c".max_bytes',
    ]
    assert error.faults[1].nearest == 'namespaces.policy."a/b".ttl'
    assert "only be set in the file" in error.faults[3].problem


def test_inherited_faults_are_told_once(tmp_path: Path) -> None:
    path = write(tmp_path, '[namespaces.policy."a/b"]\n[namespaces.policy."a/c"]\nttl = "1s"\n')
    flags = {"namespaces.default_quota": "2MiB", "namespaces.default_max_bytes": "1MiB"}
    assert [fault.key for fault in refuse(path, flags=flags).faults] == [
        "namespaces.default_quota and namespaces.default_max_bytes"
    ]
    assert [fault.key for fault in refuse(path, flags={"namespaces.default_quota": "5g"}).faults] == [
        "namespaces.default_quota"
    ]


def test_more_policies_than_namespaces_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '[namespaces.policy."a/b"]\n[namespaces.policy."a/c"]\n')
    (fault,) = refuse(path, flags={"server.max_namespaces": "1"}).faults
    assert "2 namespaces, more than server.max_namespaces 1" in fault.problem


# --- Docs


def documented(heading: str) -> list[list[str]]:
    """The cells of the options table under a heading of docs/configuration.md."""
    section = DOCS.read_text().split(f"### `[{heading}]`\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
    return [[cell if cell != '""' else "" for cell in row] for row in cells]


def test_the_documented_options_are_the_options() -> None:
    for section in dict.fromkeys(option.section for option in options()):
        expected = [option for option in options() if option.section == section]
        assert documented(section) == [
            [option.name, option.default, option.bounds, option.doc, option.env, option.flag] for option in expected
        ]
        assert options_table(expected) in DOCS.read_text()
    assert options_table(policy_options()) in DOCS.read_text()


def test_the_documented_defaults_are_those_of_an_empty_start() -> None:
    sections = dict.fromkeys(option.section for option in options())
    written = {f"{section}.{row[0]}": row[1] for section in sections for row in documented(section)}
    empty = load()
    automatic = {"hot.page": "64MiB", "warm.queue": "64MiB", "warm.promote_queue": "256MiB"}
    assert shown(empty) == {**written, **automatic}
    assert {key for key, text in written.items() if text == "auto"} == {*automatic, "shm.socket"}
    assert load(flags=written) == empty
    assert {source for _, _, source in effective(empty)} == {"default"}


def test_every_option_says_what_help_needs() -> None:
    capacity = next(option for option in options() if option.key == "hot.capacity")
    assert (capacity.env, capacity.flag, capacity.type) == ("KVSTORE_HOT__CAPACITY", "--hot.capacity", "a size")
    assert capacity.help == (
        "bytes of memory for parts, taken at start (1MiB..16TiB, a multiple of 4KiB; default 1GiB)"
    )
    assert all(option.doc and option.bounds for option in (*options(), *policy_options()))
    assert [option.key for option in options() if not option.default] == [
        "tls.cert",
        "tls.key",
        "tls.client_ca",
        "bulk.advertise",
        "warm.path",
        "warm.encryption_key",
    ]
    cert = next(option for option in options() if option.key == "tls.cert")
    assert cert.help.endswith('(a path, or empty; default "")')
    assert len({option.env for option in options()}) == len(options())


def test_the_sample_file_of_the_docs_loads(tmp_path: Path) -> None:
    sample = DOCS.read_text().split("```toml\n", 1)[1].split("```", 1)[0]
    config = load(write(tmp_path, sample))
    assert config.hot.capacity == 64 * GIB
    assert config.namespaces.for_namespace("chat/llama-70b").quota == 32 * GIB


# --- Memory


def test_memory_that_is_lacking_is_warned_of_with_the_numbers() -> None:
    config = load()
    assert check_memory(config, 2 * GIB) == []
    (warning,) = check_memory(config, GIB - 1)
    assert "hot.capacity 1GiB (1073741824 bytes)" in warning
    assert "1073741823 bytes" in warning
    (warning,) = check_memory(config, GIB)
    assert "server.send_budget 256MiB" in warning


def test_memory_that_no_page_can_use_is_warned_of() -> None:
    (warning,) = check_memory(load(flags={"hot.capacity": "1000MiB"}), 2 * GIB)
    assert "hot.page 64MiB" in warning
    assert "40MiB (41943040 bytes) are left over" in warning


def test_room_on_disk_that_no_segment_can_use_is_warned_of() -> None:
    flags = {"warm.path": "/data", "warm.capacity": "1000MiB"}
    (warning,) = check_memory(load(flags=flags), 2 * GIB)
    assert "warm.segment 256MiB" in warning
    assert "232MiB (243269632 bytes) are left over" in warning
    assert check_memory(load(flags={**flags, "warm.path": ""}), 2 * GIB) == []
