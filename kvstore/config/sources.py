"""Reads what file, environment and flags say, without deciding between them.

Each reader returns a `Reading`: the known settings, raw, and a fault for whatever has no place in the schema.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.faults import Fault, nearest_name, shown
from kvstore.config.kinds import Kind, toml_type
from kvstore.config.options import ENV_CONFIG, POLICY_KEY, SECTIONS, Option, options, policy_options
from kvstore.config.place_kinds import ENV_PREFIX
from kvstore.config.schema import Source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 1024 * 1024
MAX_NAMESPACE_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One raw value for a known key. `where` is its source in words, for messages."""

    key: str
    kind: Kind
    source: Source
    where: str
    raw: object


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one source said. `namespaces` are the namespaces that it has a policy table for."""

    settings: tuple[Setting, ...] = ()
    namespaces: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def join(readings: list[Reading]) -> Reading:
    """All of `readings` as one, in order."""
    return Reading(
        settings=tuple(setting for reading in readings for setting in reading.settings),
        namespaces=tuple(namespace for reading in readings for namespace in reading.namespaces),
        faults=tuple(fault for reading in readings for fault in reading.faults),
    )


def policy_key(namespace: str, name: str) -> str:
    """The key of one value of a namespace's policy, as the file would spell it."""
    return f'{POLICY_KEY}."{namespace}".{name}'


def config_path(path: Path | None, env: Mapping[str, str]) -> Path | None:
    """The file to read: `path`, else the one that KVSTORE_CONFIG names, else none."""
    named = env.get(ENV_CONFIG, "")
    return path if path is not None or not named else Path(named)


def read_env(env: Mapping[str, str]) -> Reading:
    """The overrides among the environment's variables: all that start with KVSTORE_ must be known."""
    known = {option.env: option for option in options()}
    readings = []
    for name, text in sorted(env.items()):
        if name.startswith(ENV_PREFIX) and name != ENV_CONFIG:
            readings.append(_override(name, text, where=f"env {name}", source="env", known=known))
    if env.get(ENV_CONFIG) == "":
        fault = Fault(key=ENV_CONFIG, where=f"env {ENV_CONFIG}", value="", problem="'' names no file: unset it")
        readings.append(Reading(faults=(fault,)))
    return join(readings)


def read_flags(flags: Mapping[str, str]) -> Reading:
    """The overrides of the command line, a mapping of `section.key` to text."""
    known = {option.key: option for option in options()}
    return join(
        [_override(key, text, where=f"flag --{key}", source="flag", known=known) for key, text in sorted(flags.items())]
    )


def read_file(path: Path) -> Reading:
    """The settings of a TOML file; a file that cannot be read or parsed is one fault."""
    where = f"file {path}"
    try:
        document = _parse_file(path)
    except (OSError, ValueError, RecursionError) as error:
        return Reading(faults=(Fault(key=str(path), where=where, value="", problem=f"cannot be read: {error}"),))
    return join([_read_section(name, raw, where=where) for name, raw in document.items()])


def _parse_file(path: Path) -> dict[str, object]:
    with path.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return tomllib.loads(content.decode())


def _override(name: str, text: str, *, where: str, source: Source, known: Mapping[str, Option]) -> Reading:
    option = known.get(name)
    if option is not None:
        return Reading(settings=(Setting(key=option.key, kind=option.kind, source=source, where=where, raw=text),))
    if name.startswith(f"{POLICY_KEY}."):
        fault = Fault(key=name, where=where, value=shown(text), problem="a policy can only be set in the file")
        return Reading(faults=(fault,))
    return Reading(faults=(_unknown_key(name, text, where=where, known=known),))


def _unknown_key(name: str, raw: object, *, where: str, known: Mapping[str, Option]) -> Fault:
    """The fault of a key that no section has; a right name in the wrong section is the nearest of all."""
    moved = next((key for key, option in known.items() if option.name == name.rpartition(".")[2]), "")
    nearest = moved or nearest_name(name, known)
    limit = "" if nearest else f"one of {', '.join(known)}"
    return Fault(key=name, where=where, value=shown(raw), problem="unknown key", limit=limit, nearest=nearest)


def _read_section(section: str, raw: object, *, where: str) -> Reading:
    if section not in SECTIONS:
        return Reading(faults=(_unknown_section(section, raw, where=where),))
    if not isinstance(raw, dict):
        return Reading(faults=(_not_a_table(section, raw, where=where),))
    readings = []
    for name, value in raw.items():
        key = f"{section}.{name}"
        if key == POLICY_KEY:
            readings.append(_read_policies(value, where=where))
        else:
            readings.append(_read_key(key, value, where=where, known={option.key: option for option in options()}))
    return join(readings)


def _unknown_section(name: str, raw: object, *, where: str) -> Fault:
    """A name outside every section: a misspelt section, or a key that lost its section."""
    if isinstance(raw, dict):
        nearest = nearest_name(name, SECTIONS)
        limit = "" if nearest else f"one of {', '.join(SECTIONS)}"
        return Fault(
            key=name,
            where=where,
            value=shown(raw),
            problem="unknown section",
            limit=limit,
            nearest=nearest and f"[{nearest}]",
        )
    by_name = {option.name: option.key for option in options()}
    nearest = by_name.get(nearest_name(name, by_name), "")
    limit = f"in one of the sections {', '.join(SECTIONS)}"
    return Fault(
        key=name, where=where, value=shown(raw), problem="unknown key outside any section", limit=limit, nearest=nearest
    )


def _not_a_table(key: str, raw: object, *, where: str) -> Fault:
    problem = f"{shown(raw)} is {toml_type(raw)}, not a table: write [{key}] on a line of its own"
    return Fault(key=key, where=where, value=shown(raw), problem=problem)


def _read_key(key: str, raw: object, *, where: str, known: Mapping[str, Option]) -> Reading:
    option = known.get(key)
    if option is None:
        return Reading(faults=(_unknown_key(key, raw, where=where, known=known),))
    return Reading(settings=(Setting(key=key, kind=option.kind, source="file", where=where, raw=raw),))


def _read_policies(raw: object, *, where: str) -> Reading:
    if not isinstance(raw, dict):
        return Reading(faults=(_not_a_table(f'{POLICY_KEY}."<tenant>/<name>"', raw, where=where),))
    return join([_read_policy(namespace, table, where=where) for namespace, table in raw.items()])


def _read_policy(namespace: str, raw: object, *, where: str) -> Reading:
    table_key = f'{POLICY_KEY}."{namespace}"'
    if not isinstance(raw, dict):
        return Reading(faults=(_not_a_table(table_key, raw, where=where),))
    known = {policy_key(namespace, option.name): option for option in policy_options()}
    keys = [_read_key(policy_key(namespace, key), value, where=where, known=known) for key, value in raw.items()]
    return join([_read_namespace(namespace, table_key, where=where), *keys])


def _read_namespace(namespace: str, table_key: str, *, where: str) -> Reading:
    tenant, _, name = namespace.partition("/")
    if tenant and name and namespace.isprintable() and len(namespace) <= MAX_NAMESPACE_CHARS:
        return Reading(namespaces=(namespace,))
    problem = f"{shown(namespace)} is not <tenant>/<name>"
    limit = f"at most {MAX_NAMESPACE_CHARS} printable characters with a slash between, in quotes"
    return Reading(faults=(Fault(key=table_key, where=where, value=shown(namespace), problem=problem, limit=limit),))
