"""Import directions, read off the syntax tree: kvstore_wire <- core <- tiers <- service <- cli, the client beside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"kvstore": ROOT / "kvstore", "kvstore_client": ROOT / "client/kvstore_client"}
SOURCES["kvstore_wire"] = ROOT / "proto/kvstore_wire"

# Layer -> what of this project it may import. A layer may always import itself.
LAYERS = {
    "kvstore_wire": set[str](),
    "kvstore_client": {"kvstore_wire"},
    "kvstore.config": {"kvstore_wire"},
    "kvstore.workload": {"kvstore_wire"},
    "kvstore.core": {"kvstore_wire"},
    "kvstore.tiers": {"kvstore_wire", "kvstore.core"},
    "kvstore.service": {"kvstore_wire", "kvstore.core", "kvstore.tiers", "kvstore.config"},
    "kvstore.build": {"kvstore_wire", "kvstore.core", "kvstore.tiers", "kvstore.config", "kvstore.service"},
    # The commands act as clients, so these two alone know both sides.
    "kvstore.replay": {"kvstore_wire", "kvstore_client", "kvstore.workload", "kvstore.config", "kvstore.cli"},
    "kvstore.cli": {
        "kvstore_wire",
        "kvstore_client",
        "kvstore.build",
        "kvstore.config",
        "kvstore.replay",
        "kvstore.service",
        "kvstore.tiers",
        "kvstore.workload",
    },
    "kvstore.__main__": {"kvstore.cli"},
}
# Module -> layers (or modules) that may import it.
OUTSIDE = {
    "grpc": {"kvstore.service", "kvstore_client.channel", "kvstore_client.transports", "kvstore.cli", "kvstore.replay"},
    "grpc_health": {"kvstore.service", "kvstore.cli"},
    "grpc_reflection": {"kvstore.service"},
    "cupy": {"kvstore_client.gpu"},
    "asyncio": {"kvstore_wire.waiting", "kvstore.service", "kvstore.cli", "kvstore_client", "kvstore.replay"},
    "threading": {
        "kvstore.service.copier",
        "kvstore.tiers",
        "kvstore.cli",
        "kvstore_client",
        "kvstore.replay",
        "kvstore.workload",
    },
    "time": {"kvstore.service", "kvstore.cli", "kvstore_client", "kvstore.replay"},
    "socket": {
        "kvstore_wire.pacing",
        "kvstore.build",
        "kvstore.service",
        "kvstore_client",
        "kvstore.cli",
        "kvstore.replay",
    },
}


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join((package, *parts)).removesuffix(".__init__")
                yield name, path


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _layer(name: str) -> str | None:
    found = [layer for layer in LAYERS if name == layer or name.startswith(layer + ".")]
    return max(found, key=len) if found else None


def _inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


@pytest.mark.parametrize(("name", "path"), [pytest.param(n, p, id=n) for n, p in _modules()])
def test_module_imports_only_what_its_layer_may(name: str, path: Path) -> None:
    layer = _layer(name)
    if name in ("kvstore", "kvstore_client", "kvstore_wire"):
        layer = layer or name
    assert layer is not None, f"{name} is in no layer"
    for imported in _imports(path):
        target = _layer(imported)
        if target is not None and target != layer:
            assert target in LAYERS.get(layer, set()), f"{name} imports {imported}"
        top = imported.partition(".")[0]
        if top in OUTSIDE:
            assert _inside(name, OUTSIDE[top]), f"{name} imports {imported}"


def test_every_package_of_the_project_was_read() -> None:
    names = {name for name, _ in _modules()}
    assert {"kvstore.core.store", "kvstore_client.client", "kvstore_wire.keys", "kvstore.service.handlers"} <= names


@pytest.mark.parametrize("word", ["pickle", "marshal", "shelve"])
def test_nothing_received_can_be_unpickled(word: str) -> None:
    for name, path in _modules():
        assert word not in {i.partition(".")[0] for i in _imports(path)}, f"{name} imports {word}"


def test_nothing_received_can_be_evaluated() -> None:
    for name, path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), f"{name}:{node.lineno}"
