"""Kinds of value that name a place or a person of this machine: files, sockets, ports, users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.config.address import MAX_UNIX_PATH_BYTES, Address, checked_unix_path
from kvstore.config.compound_kinds import Addresses
from kvstore.config.faults import shown
from kvstore.config.kinds import Kind, toml_type
from kvstore.config.uids import MAX_UID, SAME, Uids, checked_uid

AUTO, OFF = "auto", "off"
MAX_UIDS = 64
MAX_PATH_BYTES = 4095  # Linux: PATH_MAX counts the closing zero.
ENV_PREFIX = "KVSTORE_"  # Every variable that starts with it is an option.
ENV_PLACE = "env:"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class FilePath(Kind):
    """The path of a file or a folder, "" for none. Whether it is there shows when it is used."""

    name = "a path"

    def from_text(self, text: str) -> str:
        if not text.isprintable():
            raise ValueError(f"{shown(text)} is not a path: it holds a control character")
        size_bytes = len(text.encode())
        if size_bytes > MAX_PATH_BYTES:
            raise ValueError(f"{shown(text)} has {size_bytes} bytes, the limit is {MAX_PATH_BYTES}")
        return text

    def show(self, value: Any) -> str:
        return str(value)

    def bounds(self) -> str:
        return "a path, or empty"


@dataclass(frozen=True)
class KeyPlace(FilePath):
    """Where secret keys are, "" for none: the absolute path of a file, or env:NAME.

    What is neither may be a key that was written here by mistake, so that no refusal quotes it.
    """

    name = "a place of keys"

    def from_text(self, text: str) -> str:
        if text.startswith(ENV_PLACE):
            return self._variable(text)
        if text and not text.startswith("/"):
            raise ValueError(f"it is no place of keys: write {self.bounds()}, and the keys themselves only there")
        return super().from_text(text)

    def bounds(self) -> str:
        return "an absolute path, or env:NAME, or empty"

    def _variable(self, text: str) -> str:
        variable = text.removeprefix(ENV_PLACE)
        if _VARIABLE.fullmatch(variable) is None:
            raise ValueError("it names no environment variable after env:")
        if variable.startswith(ENV_PREFIX):
            raise ValueError(f"variables that start with {ENV_PREFIX} are options: give the keys another name")
        return text


@dataclass(frozen=True)
class SocketPath(Kind):
    """The absolute path of a Unix socket, or one of the words AUTO and OFF."""

    name = f'"{AUTO}", "{OFF}" or a path'

    def from_text(self, text: str) -> str:
        if text in (AUTO, OFF):
            return text
        try:
            return checked_unix_path(text)
        except ValueError as error:
            raise ValueError(f"{shown(text)} is not a socket's path, {error}; or write {AUTO} or {OFF}") from None

    def show(self, value: Any) -> str:
        return str(value)

    def bounds(self) -> str:
        return f"{AUTO}, {OFF}, or an absolute path of at most {MAX_UNIX_PATH_BYTES} bytes"


@dataclass(frozen=True)
class HostPort(Kind):
    """An address as clients are told it, "" for none: host:port, the port not 0."""

    name = "an address"

    def from_text(self, text: str) -> str:
        if not text:
            return text
        address = Address.parse(text)
        if address.unix_path is not None or address.port == 0:
            raise ValueError(f"{shown(text)} is no place that clients can connect to: write a host and a port above 0")
        return str(address)

    def show(self, value: Any) -> str:
        return str(value)

    def bounds(self) -> str:
        return "host:port or [IPv6]:port, or empty"


@dataclass(frozen=True)
class TcpAddresses(Addresses):
    """Addresses without the paths of Unix sockets."""

    def bounds(self) -> str:
        return f"1..{self.most} addresses of hosts"

    def _read(self, items: Sequence[object], quoted: str) -> tuple[Address, ...]:
        addresses = super()._read(items, quoted)
        for address in addresses:
            if address.unix_path is not None:
                raise ValueError(f"{quoted}: {address} is a Unix socket; shm.socket says where one is")
        return addresses


@dataclass(frozen=True)
class UidSet(Kind):
    """Users: one of `words`, SAME or none, or numbers with commas between; in TOML also a list."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{', '.join(self.words)} or a list of uids"

    def from_text(self, text: str) -> Uids:
        if text in self.words:
            return Uids(None if text == SAME else ())
        return self._read([item.strip(" ") for item in text.split(",")], shown(text))

    def from_toml(self, raw: object) -> Uids:
        if isinstance(raw, str):
            return self.from_text(raw)
        if isinstance(raw, list):
            return self._read(raw, shown(raw))
        if isinstance(raw, int) and not isinstance(raw, bool):
            return self._read([raw], shown(raw))
        raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not {self.name}")

    def show(self, value: Any) -> str:
        if value.listed is None:
            return SAME
        return ",".join(str(uid) for uid in value.listed) or "none"

    def bounds(self) -> str:
        return f"{', '.join(self.words)}, or 1..{MAX_UIDS} uids of 0..{MAX_UID}"

    def _read(self, items: Sequence[object], quoted: str) -> Uids:
        if not 1 <= len(items) <= MAX_UIDS:
            raise ValueError(f"{quoted} has {len(items)} uids, outside 1..{MAX_UIDS}")
        try:
            uids = tuple(checked_uid(item) for item in items)
        except ValueError as error:
            raise ValueError(f"{quoted}: {error}; or write {' or '.join(self.words)}") from None
        if len(set(uids)) < len(uids):
            raise ValueError(f"{quoted} names a uid twice")
        return Uids(uids)
