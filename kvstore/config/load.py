"""Loads the configuration once, from one TOML file, the environment and flags, and refuses it whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config import schema
from kvstore.config.choices import Choices, choose, resolve
from kvstore.config.faults import ConfigError
from kvstore.config.options import SECTIONS, options, policy_options
from kvstore.config.pairs import find_impossible
from kvstore.config.schema import Config
from kvstore.config.sources import Reading, config_path, join, policy_key, read_env, read_file, read_flags


def load_config(path: Path | None, env: Mapping[str, str], flags: Mapping[str, str]) -> Config:
    """The configuration that the sources come to; flags win over `env`, `env` over the file, the file over defaults.

    `flags` maps `section.key` to text. Without a `path`, KVSTORE_CONFIG in `env` names the file; without either there
    is none.

    Raises: ConfigError with every fault: unknown names, values that are malformed or out of bounds in any source (an
    overridden one too), impossible pairs, an unreadable file.
    """
    reading = _read(path, env, flags)
    choices, faults = choose(reading.settings, namespaces=reading.namespaces)
    choices = resolve(choices)
    faults = [*reading.faults, *faults, *find_impossible(choices, namespaces=reading.namespaces)]
    if faults:
        raise ConfigError(faults)
    return _build(choices, reading.namespaces)


def _read(path: Path | None, env: Mapping[str, str], flags: Mapping[str, str]) -> Reading:
    chosen_path = config_path(path, env)
    from_file = Reading() if chosen_path is None else read_file(chosen_path)
    return join([from_file, read_env(env), read_flags(flags)])


def _build(choices: Choices, namespaces: tuple[str, ...]) -> Config:
    policies = tuple(_build_policy(choices, namespace) for namespace in namespaces)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for option in options():
        values[option.section][option.name] = choices[option.key].value
    return Config(
        server=schema.ServerConfig(**values["server"]),
        hot=schema.HotConfig(**values["hot"]),
        limits=schema.LimitsConfig(**values["limits"]),
        lease=schema.LeaseConfig(**values["lease"]),
        namespaces=schema.NamespacesConfig(**values["namespaces"], policy=policies),
        health=schema.HealthConfig(**values["health"]),
        tls=schema.TlsConfig(**values["tls"]),
        bulk=schema.BulkConfig(**values["bulk"]),
        shm=schema.ShmConfig(**values["shm"]),
        warm=schema.WarmConfig(**values["warm"]),
        sources=schema.Sources(tuple((key, choice.source) for key, choice in choices.items())),
    )


def _build_policy(choices: Choices, namespace: str) -> schema.NamespacePolicy:
    values = {option.name: choices[policy_key(namespace, option.name)].value for option in policy_options()}
    return schema.NamespacePolicy(namespace=namespace, **values)
