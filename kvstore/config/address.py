"""Where a server listens: `host:port`, `[IPv6]:port` or `unix:/path`, each read strictly."""

from __future__ import annotations

import ipaddress
import posixpath
import re
from dataclasses import dataclass

from kvstore.config.faults import shown

MAX_PORT = 65535
# Linux: sockaddr_un.sun_path has 108 bytes, the last one NUL (unix(7)).
MAX_UNIX_PATH_BYTES = 107
ADDRESS_HELP = "host:port, [IPv6]:port or unix:/path, for example 127.0.0.1:7070, [::1]:7070 or unix:/run/kvstore.sock"

_HOST_PORT = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([^:]*)")
_PORT = re.compile(r"0|[1-9][0-9]{0,4}")
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62})(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_ONLY_DIGITS = re.compile(r"[0-9.]+")


@dataclass(frozen=True)
class Address:
    """One place to listen at: a host and a port, or the path of a Unix socket when `unix_path` is set.

    `host` is without brackets and in its canonical spelling; port 0 stands for any free port.
    """

    host: str
    port: int
    unix_path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises: ValueError, with the reason, for anything but host:port, [IPv6]:port and unix:/path.
        """
        if text.startswith("unix:"):
            return cls(host="", port=0, unix_path=_unix_path(text))
        match = _HOST_PORT.fullmatch(text)
        if match is None:
            raise ValueError(_refusal(text, _shape_reason(text)))
        bracketed, plain, port = match.groups()
        host = _ipv6_host(text, bracketed) if plain is None else _plain_host(text, plain)
        return cls(host=host, port=_port(text, port))

    def __str__(self) -> str:
        if self.unix_path is not None:
            return f"unix:{self.unix_path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def grpc_target(self) -> str:
        """The address as gRPC writes it, for a server's port and for a channel alike."""
        return str(self)

    def is_loopback(self) -> bool:
        """True when only this machine can reach the address: a Unix socket, localhost, 127.0.0.0/8 or ::1."""
        if self.unix_path is not None or self.host == "localhost":
            return True
        address = self._ip()
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback if address is not None else False

    def overlaps(self, other: Address) -> bool:
        """True when one process cannot listen at both: the same address, or its port on all addresses of the family."""
        if self.unix_path is not None or other.unix_path is not None:
            return self.unix_path == other.unix_path
        if self.port != other.port or self.port == 0:
            return False
        return self.host == other.host or self._is_wildcard_for(other) or other._is_wildcard_for(self)

    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def _is_wildcard_for(self, other: Address) -> bool:
        mine, theirs = self._ip(), other._ip()
        if mine is None or not mine.is_unspecified:
            return False
        return theirs is None or mine.version == theirs.version


def checked_unix_path(path: str) -> str:
    """Returns the path of a Unix socket in its shortest spelling. Raises ValueError with the reason alone."""
    if not path.startswith("/") or path.startswith("//") or path.endswith("/"):
        raise ValueError("the path of a Unix socket must be absolute and name a file")
    if "," in path or not path.isprintable():
        raise ValueError("the path may hold no comma and no control character")
    path = posixpath.normpath(path)
    size_bytes = len(path.encode())
    if size_bytes > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path has {size_bytes} bytes, the limit is {MAX_UNIX_PATH_BYTES}")
    return path


def _refusal(text: str, reason: str) -> str:
    return f"{shown(text)} is not an address, {reason}: write {ADDRESS_HELP}"


def _shape_reason(text: str) -> str:
    if "[" in text or "]" in text:
        return "the brackets do not hold one IPv6 address before a colon and a port"
    if text.count(":") > 1:
        return "it has more than one colon, and an IPv6 host needs brackets"
    return "it has no port"


def _port(text: str, port: str) -> int:
    if not port:
        raise ValueError(_refusal(text, "the port is missing"))
    if _PORT.fullmatch(port) is None:
        reason = (
            "it has more than one colon, and an IPv6 host needs brackets"
            if ":" in port
            else f"the port {shown(port)} is not a number 0..{MAX_PORT}"
        )
        raise ValueError(_refusal(text, reason))
    if int(port) > MAX_PORT:
        raise ValueError(_refusal(text, f"the port {port} is above {MAX_PORT}"))
    return int(port)


def _ipv6_host(text: str, host: str) -> str:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(_refusal(text, f"{shown(host)} is not an IPv6 address")) from None
    if address.scope_id is not None:
        raise ValueError(_refusal(text, "zone ids are not supported"))
    return str(address)


def _plain_host(text: str, host: str) -> str:
    if not host:
        raise ValueError(_refusal(text, "the host is missing (0.0.0.0 listens on every address)"))
    if _ONLY_DIGITS.fullmatch(host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(_refusal(text, f"{shown(host)} is not an IPv4 address")) from None
    if _NAME.fullmatch(host) is None:
        raise ValueError(_refusal(text, f"{shown(host)} is not a host name"))
    return host.lower()


def _unix_path(text: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("///"):
        path = path[2:]
    try:
        return checked_unix_path(path)
    except ValueError as error:
        raise ValueError(_refusal(text, str(error))) from None
