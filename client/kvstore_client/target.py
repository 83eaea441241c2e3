"""Addresses of shards: `host:port`, `[IPv6]:port` or `unix:/path`. Anything sloppier is refused with a reason."""

from __future__ import annotations

import ipaddress
import re

from kvstore_wire.errors import InvalidArgument

MAX_UNIX_PATH_BYTES = 107  # sun_path holds 108 bytes with its closing zero (unix(7)).
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_PORT = re.compile(r"[0-9]{1,5}")


def checked_target(text: str, field: str = "target") -> str:
    """Returns `text` if it is an address gRPC will read as it was meant. Raises InvalidArgument naming `field`."""
    if not isinstance(text, str):
        raise InvalidArgument(f"must be text, not {type(text).__name__}", field=field)
    if text.startswith("unix:"):
        return _unix(text, field)
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise InvalidArgument(f"{text!r} needs a host and a port, as in host:50051", field=field)
    if host.startswith("[") or host.endswith("]"):
        _check_v6(host, text, field)
    elif ":" in host:
        raise InvalidArgument(f"{text!r} is ambiguous: write IPv6 as [address]:port", field=field)
    else:
        _check_host(host, text, field)
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise InvalidArgument(f"{port!r} is not a port", field=field, limit="1-65535")
    return text


def checked_host(text: str, field: str) -> str:
    """Returns `text` if it is a host name or an IP address. Raises InvalidArgument naming `field`."""
    if not isinstance(text, str):
        raise InvalidArgument(f"must be text, not {type(text).__name__}", field=field)
    if ":" in text:
        _check_v6(f"[{text}]", text, field)
    else:
        _check_host(text, text, field)
    return text


def _unix(text: str, field: str) -> str:
    path = text[len("unix:") :]
    if not path.startswith("/") or "\0" in path or path.endswith("/"):
        raise InvalidArgument(f"{text!r} needs the absolute path of a socket, as in unix:/run/kv.sock", field=field)
    if len(path.encode("utf-8", "surrogateescape")) > MAX_UNIX_PATH_BYTES:
        raise InvalidArgument("the socket's path is too long", field=field, limit=f"{MAX_UNIX_PATH_BYTES} bytes")
    return text


def _check_v6(host: str, text: str, field: str) -> None:
    try:
        ipaddress.IPv6Address(host[1:-1] if host.startswith("[") and host.endswith("]") else "")
    except ValueError:
        raise InvalidArgument(f"{text!r} has no valid IPv6 address", field=field) from None


def _check_host(host: str, text: str, field: str) -> None:
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise InvalidArgument(f"{host!r} is not a host name or address", field=field)
    if set(host) <= set("0123456789."):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise InvalidArgument(f"{text!r} has no valid IPv4 address", field=field) from None
