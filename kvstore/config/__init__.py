"""The server's configuration: one TOML file, environment and flags become one frozen tree, checked as a whole."""

from __future__ import annotations

from kvstore.config.address import Address
from kvstore.config.choices import auto_page_bytes
from kvstore.config.effective import check_memory, effective, startup_lines
from kvstore.config.faults import ConfigError, Fault
from kvstore.config.load import load_config
from kvstore.config.options import Option, options, options_table, policy_options
from kvstore.config.place_kinds import AUTO, OFF
from kvstore.config.runtime_dir import SocketPathError, shm_socket_path
from kvstore.config.schema import (
    BulkConfig,
    Config,
    HealthConfig,
    HotConfig,
    LeaseConfig,
    LimitsConfig,
    NamespacePolicy,
    NamespacesConfig,
    ServerConfig,
    ShmConfig,
    Source,
    Sources,
    TlsConfig,
    WarmConfig,
)
from kvstore.config.uids import Uids
from kvstore.config.units import (
    describe_size,
    format_duration,
    format_ratio,
    format_size,
    parse_duration,
    parse_ratio,
    parse_size,
)

__all__ = [
    "AUTO",
    "OFF",
    "Address",
    "BulkConfig",
    "Config",
    "ConfigError",
    "Fault",
    "HealthConfig",
    "HotConfig",
    "LeaseConfig",
    "LimitsConfig",
    "NamespacePolicy",
    "NamespacesConfig",
    "Option",
    "ServerConfig",
    "ShmConfig",
    "SocketPathError",
    "Source",
    "Sources",
    "TlsConfig",
    "Uids",
    "WarmConfig",
    "auto_page_bytes",
    "check_memory",
    "describe_size",
    "effective",
    "format_duration",
    "format_ratio",
    "format_size",
    "load_config",
    "options",
    "options_table",
    "parse_duration",
    "parse_ratio",
    "parse_size",
    "policy_options",
    "shm_socket_path",
    "startup_lines",
]
