"""The pages say what the code says: names, commands, options and links, and the README's example really runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import BENCHES
from kvstore.build import build_server
from kvstore.cli import COMMANDS
from kvstore.config import load_config, options
from kvstore.core.counters import NAMESPACE_COUNTERS, Removal
from kvstore.replay.admin import admin_peer
from kvstore.replay.own_server import own_server
from kvstore.service import failpoints
from kvstore.service.admin import AdminHandlers
from kvstore.service.latency import BUCKETS, Latencies
from kvstore.service.shell import Call
from kvstore.service.tiering import DROPPED, TierState
from kvstore.tiers.memory import ArenaMemory
from kvstore_client import BlockState, Client, ClientOptions, Coverage
from kvstore_wire.methods import ADMIN_METHODS, STORE_METHODS
from kvstore_wire.v1 import admin_pb2 as pb
from tests.integration.shard import FLAGS, shard
from tests.integration.transport_scene import until
from tests.shards import key, kv_spec

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README, METRICS, ARCHITECTURE = ROOT / "README.md", ROOT / "docs/metrics.md", ROOT / "docs/architecture.md"
OWN_PAGES = [README, METRICS, ARCHITECTURE, ROOT / "CONTRIBUTING.md"]
SOURCES = [ROOT / "kvstore", ROOT / "client/kvstore_client", ROOT / "proto/kvstore_wire"]
DEFAULT_TARGET = "127.0.0.1:7070"
TIMEOUT_S = 60

_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_ROW = re.compile(r"^\| `([a-z_]+)` \|", re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=_name)
each_own_page = pytest.mark.parametrize("page", OWN_PAGES, ids=_name)


# -- links and commands --------------------------------------------------------------------------------------------


@each_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        target, _, heading = link.partition("#")
        found = page if not target else page.parent / target
        assert found.exists(), f"{_name(page)} links to {link}"
        if heading:
            assert heading in _headings(found), f"{_name(page)} links to {link}"


def _headings(page: Path) -> set[str]:
    """Anchors of a page, as code forges make them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_own_page
def test_make_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in _commands(page):
        if "make " in line:
            words = line[line.index("make ") :].split()[1:]
            named = {w for w in words if "=" not in w}
            assert named <= targets, f"{_name(page)}: {line}"


@each_own_page
def test_commands_and_their_options_exist(page: Path) -> None:
    known = {option.flag for option in options()} | {"--config", "--check"}
    for line in _commands(page):
        command = re.search(r"\bkvstore (-?-?[a-z]+)", line)
        if command is not None and "docker" not in line:
            assert command[1] in (*COMMANDS, "--help"), f"{_name(page)}: {line}"
        if "kvstore serve" in line:
            assert set(re.findall(r"--[a-z._]+", line)) <= known, f"{_name(page)}: {line}"
        bench = re.search(r"-m bench ([a-z]+)", line)
        assert bench is None or bench[1] in BENCHES, f"{_name(page)}: {line}"


def test_the_readme_begins_with_two_commands() -> None:
    assert _commands(README)[:2] == ["make demo", "make test"]


def _commands(page: Path) -> list[str]:
    """Lines of indented code, and code within sentences, without what is fenced."""
    text = _FENCE.sub("", page.read_text())
    indented = [line.strip().partition("  #")[0] for line in text.splitlines() if line.startswith("    ")]
    return indented + _CODE.findall(text)


@each_own_page
def test_options_named_exist(page: Path) -> None:
    keys = {option.key for option in options()}
    sections = {option.section for option in options()}
    for word in _CODE.findall(_FENCE.sub("", page.read_text())):
        section, _, rest = word.partition(".")
        if section in sections and re.fullmatch("[a-z_]+", rest) and rest not in ("py", "proto"):
            assert word in keys, f"{_name(page)} names {word}"


# -- names ---------------------------------------------------------------------------------------------------------


def test_names_in_the_architecture_exist() -> None:
    members, names = _defined()
    names |= {*STORE_METHODS, *ADMIN_METHODS} | {option.name for option in options()}
    for word in _CODE.findall(_FENCE.sub("", ARCHITECTURE.read_text())):
        if re.fullmatch(r"_?[A-Z]\w+\.\w+", word):
            owner, _, member = word.partition(".")
            assert member in members.get(owner, set()), word
        elif re.fullmatch(r"[A-Za-z_]+", word) and word not in {p.name for p in SOURCES}:
            assert word in names, word


def _defined() -> tuple[dict[str, set[str]], set[str]]:
    """Returns the members of each class, and every name that is defined anywhere."""
    members: dict[str, set[str]] = {}
    names = {failpoints.ENVIRONMENT, "hints"}  # A variable, and a feature.
    for node in (n for tree in _trees() for n in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            members.setdefault(node.name, set()).update(_names(node))
        names.update(_own_names(node))
    return members, names


def _trees() -> Iterator[ast.Module]:
    for folder in SOURCES:
        for pattern in ("*.py", "*.pyi"):
            for path in sorted(folder.rglob(pattern)):
                yield ast.parse(path.read_text())


def _names(node: ast.ClassDef) -> set[str]:
    return {name for inner in ast.walk(node) for name in _own_names(inner)}


def _own_names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    plain = [t.elts if isinstance(t, ast.Tuple) else [t] for t in targets]
    found = {t.id for group in plain for t in group if isinstance(t, ast.Name)}
    return found | {t.attr for group in plain for t in group if isinstance(t, ast.Attribute)}


# -- metrics -------------------------------------------------------------------------------------------------------


def _section(title: str) -> str:
    """The text under a heading of the metrics page, up to the next."""
    return re.split(r"^## ", METRICS.read_text().partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def test_every_counter_has_one_row() -> None:
    assert _ROW.findall(_section("Counters")) == list(NAMESPACE_COUNTERS)


async def test_every_number_of_the_warm_tier_has_one_row(tmp_path: Path) -> None:
    memory = ArenaMemory(1 << 20)
    chosen = {"hot.capacity": "1MiB", "warm.path": str(tmp_path / "warm"), "warm.capacity": "64MiB"}
    server = build_server(load_config(None, {}, {**chosen, "warm.segment": "1MiB"}), memory)
    assert server.shell.tiering is not None
    stats = AdminHandlers(server.shell, ()).get_stats(pb.GetStatsRequest(), Call())
    for title, counts in (("Counters", stats.counters), ("Gauges", stats.gauges)):
        told = [count.name for count in counts if count.name.startswith("warm_")]
        assert _ROW.findall(_section(f"{title} of the warm tier")) == told
    await server.shell.tiering.close()
    server.shell.copier.close()
    memory.close()


async def test_every_gauge_has_one_row() -> None:
    memory = ArenaMemory(1 << 20)
    server = build_server(load_config(None, {}, {"hot.capacity": "1MiB"}), memory)
    stats = AdminHandlers(server.shell, ()).get_stats(pb.GetStatsRequest(), Call())
    assert _ROW.findall(_section("Gauges")) == [gauge.name for gauge in stats.gauges]
    memory.close()


def test_every_number_named_in_formulas_exists() -> None:
    known = set(_ROW.findall(METRICS.read_text()))
    fields = {f.name for message in (pb.Stats, pb.NamespaceStatus) for f in message.DESCRIPTOR.fields}
    for title in ("Hit rates", "Sums that must hold"):
        for word in _CODE.findall(_section(title)):
            if re.fullmatch(r"[a-z]+(_[a-z]+)+", word) and not word.endswith("_hit_rate"):
                assert word in known | fields, word


def test_the_removals_listed_are_all_there_are() -> None:
    listed = _section("Sums that must hold").partition("the eight counters")[2].partition(")")[0]
    assert _CODE.findall(listed) == [removal.value for removal in Removal]


def test_the_reasons_to_drop_a_block_listed_are_all_there_are() -> None:
    listed = _section("Sums that must hold").partition("the counters of dropped blocks")[2].partition(")")[0]
    assert _CODE.findall(listed) == [f"warm_dropped_{why}_blocks" for why in DROPPED]


def test_the_states_of_the_warm_tier_are_as_described() -> None:
    (row,) = re.findall(r"^\| `warm_state` \| (.*) \|$", METRICS.read_text(), re.MULTILINE)
    assert re.findall(r"(\d) (\w+)", row) == [
        (str(int(s)), s.name.lower()) for s in TierState if s is not TierState.OFF
    ]


def test_buckets_are_as_described() -> None:
    # elapsed -> bucket; bounds double from 1 us and belong to the lower bucket.
    cases = {1: 0, 1_000: 0, 1_001: 1, 2_000: 1, 2_001: 2, 4_000: 2, 4_001: 3, 2**30 * 1000: 30, 2**30 * 1000 + 1: 31}
    for elapsed_ns, bucket in cases.items():
        latencies = Latencies()
        latencies.add("Get", elapsed_ns)
        (histogram,) = latencies.messages()
        assert list(histogram.buckets) == [int(i == bucket) for i in range(BUCKETS)], elapsed_ns
        assert histogram.sum_us == -(-elapsed_ns // 1000)
    assert f"with {BUCKETS} buckets" in _section("Latencies")


# -- the example ---------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_example_runs_and_the_sums_hold() -> None:
    blocks = dict(_FENCE.findall(README.read_text()))
    assert blocks["python"].count(DEFAULT_TARGET) == 1
    with shard("64MiB") as server:
        script = blocks["python"].replace(DEFAULT_TARGET, server.target)
        for _ in range(2):  # The second time the blocks are there already.
            done = subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            assert (done.stdout, done.stderr) == (blocks["text"], "")
        with admin_peer(server.admin_target, deadline_s=TIMEOUT_S) as admin:
            stats = admin.stats()
    counters = {c.name: c.value for c in stats.counters}
    assert counters["reserve_present_parts"] == 4
    _check_sums(counters, {g.name: g.value for g in stats.gauges})


@pytest.mark.integration
def test_the_sums_hold_when_blocks_go_to_disk_and_come_back(tmp_path: Path) -> None:
    spec, keys = kv_spec("sums", part_bytes=64 << 10), list[bytes]()
    tier = ["--warm.path", str(tmp_path / "warm"), "--warm.capacity", "256MiB", "--warm.segment", "1MiB"]
    with own_server([*FLAGS, "--hot.capacity", "4MiB", *tier]) as server:
        with Client(ClientOptions(server.target, default_deadline_ms=20_000)) as client:
            ns = client.namespace(spec)

            def more_are_on_disk_than_fit_in_memory() -> bool:
                some = [key(len(keys) + i) for i in range(4)]
                keys.extend(some)
                assert ns.put(some, [_value(k, spec.part_bytes) for k in some]).ok
                return _counts(server.admin_target)["warm_demoted_blocks"] > 100

            until(more_are_on_disk_than_fit_in_memory, "blocks do not go to disk", within_s=TIMEOUT_S)
            for at in range(0, len(keys), 16):
                some = keys[at : at + 16]
                got = ns.get(some, coverage=Coverage.EACH, wait_ms=5000)
                found = zip(some, got.values or (), strict=True)
                assert all(value is None or value == _value(k, spec.part_bytes) for k, value in found)
            states = ns.match(keys, coverage=Coverage.EACH).states
            at_once = ns.get(keys, coverage=Coverage.EACH, wait_ms=0).states
        counts = _settled_counts(server.admin_target)
    assert counts["warm_promoted_blocks"] > 0
    assert counts["match_warm_blocks"] == states.count(BlockState.WARM) > 0
    assert counts["acquire_warm_blocks"] >= at_once.count(BlockState.WARM) > 0
    _check_sums(counts, counts)
    _check_warm_sums(counts)


def _value(block: bytes, size_bytes: int) -> bytes:
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def _counts(target: str) -> dict[str, int]:
    """Counters and gauges of a server."""
    with admin_peer(target, deadline_s=TIMEOUT_S) as admin:
        stats = admin.stats()
    return {c.name: c.value for c in (*stats.counters, *stats.gauges)}


def _settled_counts(target: str) -> dict[str, int]:
    """Counters and gauges of a server that nobody uses any more, once nothing is on its way to disk or from it."""
    found: dict[str, int] = {}

    def is_settled() -> bool:
        found.update(_counts(target))
        return not any(found[name] for name in ("warm_promoting_bytes", "warm_writing_bytes", "leases"))

    until(is_settled, "something is on its way to disk or from it")
    return found


def _check_warm_sums(counts: dict[str, int]) -> None:
    dropped = sum(counts[f"warm_dropped_{why}_blocks"] for why in DROPPED)
    evicted = sum(counts[f"evicted_{why}_blocks"] for why in ("capacity", "page", "quota"))
    assert counts["warm_demoted_blocks"] + dropped == evicted > 0
    assert counts["warm_promoted_blocks"] == counts["warm_read_blocks"]
    missed = counts["warm_missed_blocks"] + counts["warm_promote_cancelled_blocks"]
    assert counts["warm_promote_missed_blocks"] == missed
    assert counts["match_warm_blocks"] <= counts["match_hit_blocks"] <= counts["match_asked_blocks"]
    assert counts["warm_rewritten_bytes"] <= counts["warm_written_bytes"]
    assert counts["warm_stored_bytes"] < counts["warm_capacity_bytes"]


def _check_sums(counters: dict[str, int], gauges: dict[str, int]) -> None:
    """The sums of the metrics page, on a server that nobody but its probe uses any more."""
    places = ("free_bytes", "reserved_bytes", "leased_bytes", "evictable_bytes")
    assert sum(gauges[name] for name in places) == gauges["capacity_bytes"]
    answers = [f"acquire_{name}_blocks" for name in ("leased", "missing", "warm", "busy", "late")]
    assert sum(counters[name] for name in answers) == counters["acquire_asked_blocks"]
    ends = ("committed_parts", "abandoned_parts", "lost_parts")
    assert sum(counters[name] for name in ends) == counters["reserve_created_parts"]
    removed = sum(counters[removal.value] for removal in Removal)
    assert removed + gauges["stored_blocks"] == counters["reserve_created_parts"]
