"""The namespace that operator tools work in: a TOML file, or flags for an opaque one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from kvstore.cli.command_errors import CommandError
from kvstore.config import parse_size
from kvstore_client import Attention, Chains, Geometry, Kind, NamespaceSpec
from kvstore_wire.errors import InvalidArgument

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 1 << 20
DEFAULTS = {"name": "operator", "model": "none", "tenant": "", "part_bytes": "1MiB", "key_scheme": "operator.v1"}
_TEXTS = ("name", "tenant", "model", "weights_revision", "key_scheme")
_KEYS = (*_TEXTS, "kind", "part_bytes", "chains", "geometry", "facts")
_GEOMETRY_TEXTS = ("dtype", "layout")
_GEOMETRY_NUMBERS = ("block_tokens", "layers", "kv_heads", "head_dim", "layer_groups", "head_shards")
_GEOMETRY_KEYS = (*_GEOMETRY_TEXTS, *_GEOMETRY_NUMBERS, "attention")

EXAMPLE = """\
a namespace file:
  name = "chat"
  model = "meta-llama/Llama-3.1-70B"
  kind = "kv"                       # or "opaque", then without [geometry]
  part_bytes = "5MiB"
  chains = "chained"                # or "ordered", "none"
  tenant = "team-a"                 # optional, as weights_revision, key_scheme and [facts]
  [geometry]
  block_tokens = 16
  dtype = "bfloat16"
  layers = 80
  kv_heads = 8
  head_dim = 128
  attention = "mha"                 # or "mla"; optional, as layout, layer_groups and head_shards
"""

_E = TypeVar("_E", bound=IntEnum)


def add_namespace_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --namespace-file, and the flags that name an opaque namespace without one."""
    parser.add_argument("--namespace-file", metavar="TOML", type=Path, help="file that describes the namespace")
    group = parser.add_argument_group("an opaque namespace without a file")
    for name, value in DEFAULTS.items():
        flag = "--" + name.replace("_", "-")
        text = "largest value" if name == "part_bytes" else f"the namespace's {name.replace('_', ' ')}"
        group.add_argument(
            flag, metavar="SIZE" if name == "part_bytes" else "TEXT", help=f"{text} (default: {value!r})"
        )


def namespace_spec(arguments: argparse.Namespace) -> NamespaceSpec:
    """Returns the namespace that the flags describe. Raises CommandError, OSError."""
    given = {name: getattr(arguments, name) for name in DEFAULTS if getattr(arguments, name) is not None}
    if arguments.namespace_file is not None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise CommandError(f"{flag}: the namespace file says it already")
        return read_namespace(arguments.namespace_file)
    return _spec({"kind": "opaque", "chains": "none", **DEFAULTS, **given}, "the flags")


def read_namespace(path: Path) -> NamespaceSpec:
    """Reads a namespace file. Raises CommandError naming file and field, OSError."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise CommandError(f"{path}: is above {MAX_FILE_BYTES} bytes")
    try:
        fields = tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{path}: is not TOML: {error}") from None
    return _spec(fields, str(path))


def _spec(fields: Mapping[str, Any], where: str) -> NamespaceSpec:
    try:
        _check_known(fields, _KEYS, "")
        _check_present(fields, ("name", "model", "part_bytes"))
        texts = {name: _text(name, fields[name]) for name in _TEXTS if name in fields}
        return NamespaceSpec(
            **texts,
            part_bytes=_size(fields["part_bytes"]),
            kind=_choice("kind", fields.get("kind", "kv"), Kind),
            chains=_choice("chains", fields.get("chains", "ordered"), Chains),
            geometry=_geometry(fields["geometry"]) if "geometry" in fields else None,
            facts=_facts(fields.get("facts", {})),
        )
    except InvalidArgument as error:
        raise CommandError(f"{where}: {error}") from None


def _geometry(fields: object) -> Geometry:
    table = _table("geometry", fields)
    _check_known(table, _GEOMETRY_KEYS, "geometry.")
    _check_present(table, ("block_tokens", "dtype", "layers", "kv_heads", "head_dim"), "geometry.")
    texts: dict[str, Any] = {name: _text(f"geometry.{name}", table[name]) for name in _GEOMETRY_TEXTS if name in table}
    numbers: dict[str, Any] = {name: table[name] for name in _GEOMETRY_NUMBERS if name in table}
    attention = _choice("geometry.attention", table.get("attention", "mha"), Attention)
    return Geometry(**texts, **numbers, attention=attention)


def _facts(fields: object) -> tuple[tuple[str, str], ...]:
    return tuple((name, _text(f"facts.{name}", value)) for name, value in _table("facts", fields).items())


def _size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return parse_size(_text("part_bytes", value))
    except ValueError as error:
        raise InvalidArgument(str(error), field="part_bytes") from None


def _choice(name: str, value: object, kind: type[_E]) -> _E:
    allowed = {member.name.lower(): member for member in kind}
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgument(f"is {value!r}", field=name, limit=", ".join(allowed))
    return allowed[value]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"must be text, not {value!r}", field=name)
    return value


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("must be a table", field=name)
    return value


def _check_known(fields: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(known)}"
            raise InvalidArgument(f"is not a field of a namespace{hint}", field=f"{prefix}{name}")


def _check_present(fields: Mapping[str, Any], names: tuple[str, ...], prefix: str = "") -> None:
    for name in names:
        if name not in fields:
            raise InvalidArgument("is missing", field=f"{prefix}{name}")
