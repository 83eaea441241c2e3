"""Every option as a value: for the loader, for `--help` and for the table in docs/configuration.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from kvstore.config import schema
from kvstore.config.kinds import Kind
from kvstore.config.place_kinds import ENV_PREFIX

ENV_CONFIG = "KVSTORE_CONFIG"
POLICY_KEY = "namespaces.policy"
EMPTY = '""'  # How people are shown a value that is empty text.

SECTIONS: dict[str, type] = {
    "server": schema.ServerConfig,
    "hot": schema.HotConfig,
    "limits": schema.LimitsConfig,
    "lease": schema.LeaseConfig,
    "namespaces": schema.NamespacesConfig,
    "health": schema.HealthConfig,
    "tls": schema.TlsConfig,
    "bulk": schema.BulkConfig,
    "shm": schema.ShmConfig,
    "warm": schema.WarmConfig,
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: `key` is `section.name`; `default` and `bounds` are text; `unit` is that of the loaded value."""

    key: str
    type: str
    default: str
    bounds: str
    unit: str
    doc: str
    kind: Kind = field(repr=False)

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def env(self) -> str:
        """The environment variable that overrides it, "" for a key that only the file may hold."""
        if self.section == POLICY_KEY:
            return ""
        return f"{ENV_PREFIX}{self.section.upper()}__{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The command-line flag that overrides it, "" for a key that only the file may hold."""
        return "" if self.section == POLICY_KEY else f"--{self.key}"

    @property
    def help(self) -> str:
        """One line for `--help`."""
        return f"{self.doc} ({self.bounds}; default {self.default or EMPTY})"


@cache
def options() -> tuple[Option, ...]:
    """Every option that file, environment and flags may set, in the order of the schema."""
    return tuple(option for section, tree in SECTIONS.items() for option in _options_of(section, tree))


@cache
def policy_options() -> tuple[Option, ...]:
    """The keys of a `[namespaces.policy."<tenant>/<name>"]` table, which only the file may hold."""
    return _options_of(POLICY_KEY, schema.NamespacePolicy)


def options_table(chosen: Iterable[Option]) -> str:
    """The Markdown table of `chosen` as docs/configuration.md shows it."""
    rows = ["| Key | Default | Bounds | Meaning | Environment | Flag |", "|---|---|---|---|---|---|"]
    for option in chosen:
        spellings = [f"`{text}`" if text else "file only" for text in (option.env, option.flag)]
        default = option.default or EMPTY
        cells = [f"`{option.name}`", f"`{default}`", option.bounds, option.doc, *spellings]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _options_of(section: str, tree: type) -> tuple[Option, ...]:
    return tuple(
        Option(
            key=f"{section}.{item.name}",
            type=item.metadata["kind"].name,
            default=item.metadata["default"],
            bounds=item.metadata["bounds"],
            unit=item.metadata["unit"],
            doc=item.metadata["doc"],
            kind=item.metadata["kind"],
        )
        for item in dataclasses.fields(tree)
        if "kind" in item.metadata
    )
