"""TCP between two processes of one host, which nothing on its way can slow down.

Some congestion controls (BBR) measure a path and spread what they send over time. Within a host there is no path: what
they hold back is lost time, a third of the throughput as measured. Both ends ask for one that does not.
"""

from __future__ import annotations

import ipaddress
import socket

UNPACED = b"reno"  # Any process may ask for it, and every kernel has it.


def unpace_within_host(sock: socket.socket) -> bool:
    """Asks that what a TCP socket sends to its own host is not paced; false where it is another, or it cannot be."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        own, peer = sock.getsockname()[0], sock.getpeername()[0]
        if own != peer and not _is_loopback(peer):
            return False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
    except (OSError, AttributeError):  # AttributeError: a system that has no such option.
        return False
    return True


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_loopback or (mapped is not None and mapped.is_loopback)
