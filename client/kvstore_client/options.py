"""What a client is told once, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstore_client.deadline import MAX_DEADLINE_MS
from kvstore_client.target import checked_target
from kvstore_client.tls import TlsOptions
from kvstore_wire import limits as contract
from kvstore_wire.errors import InvalidArgument

MIB = 1 << 20
MIN_KEEPALIVE_MS = 10_000  # Shards drop clients that ping more often than this.


class Verify(Enum):
    """Whether what landed is checked against the writer's checksum."""

    ON = "on"
    OFF = "off"


VERIFY_ON, VERIFY_OFF = Verify.ON, Verify.OFF
TRANSPORTS = ("shm", "bulk", "grpc")


@dataclass(frozen=True)
class ClientOptions:
    """Options of one client. Raises InvalidArgument (field, limit) on construction.

    `target`: `host:port`, `[IPv6]:port` or `unix:/path`.
    `queue_bytes`: payload that tickets may hold at once; what does not fit is dropped and counted.
    `lease_ms`: how long leases last unless a call says otherwise; 0 = what the shard gives.
    `connect_backoff_min_ms`, `connect_backoff_max_ms`: pause between attempts to connect.
    `gives_hints`: tells the shard that calls carry hints, so that silence could mean no return; none uses it yet.
    `tls`: how connections over TCP are encrypted; None = not at all. Unix sockets stay plain.
    `busy_poll_us`: microseconds that a blocking call looks for its answer before it sleeps; 0 = it sleeps at once.
    `disk_wait_ms`: how long a read waits for blocks that the shard has on disk, or that are in flight, unless the call
    says otherwise; a shard without a warm tier is not waited for.
    `transports`: ways to move bytes that may be used, the preferred first: "shm", "bulk" and "grpc".
    """

    target: str
    default_deadline_ms: int = 1000
    queue_bytes: int = 256 * MIB
    max_concurrent_calls: int = 64
    verify: Verify = Verify.ON
    lease_ms: int = 0
    connect_backoff_min_ms: int = 100
    connect_backoff_max_ms: int = 1000
    keepalive_ms: int = 30_000
    name: str = "kvstore_client"
    gives_hints: bool = False
    tls: TlsOptions | None = None
    transports: tuple[str, ...] = TRANSPORTS
    busy_poll_us: int = 150
    disk_wait_ms: int = 200

    def __post_init__(self) -> None:
        checked_target(self.target)
        _check_number("default_deadline_ms", self.default_deadline_ms, low=1, high=MAX_DEADLINE_MS)
        _check_number("queue_bytes", self.queue_bytes, low=1, high=1 << 40)
        _check_number("max_concurrent_calls", self.max_concurrent_calls, low=1, high=4096)
        _check_number("lease_ms", self.lease_ms, low=0, high=MAX_DEADLINE_MS)
        _check_number("connect_backoff_min_ms", self.connect_backoff_min_ms, low=100, high=60_000)
        lowest_ms = self.connect_backoff_min_ms
        _check_number("connect_backoff_max_ms", self.connect_backoff_max_ms, low=lowest_ms, high=60_000)
        _check_number("busy_poll_us", self.busy_poll_us, low=0, high=10_000)
        _check_number("disk_wait_ms", self.disk_wait_ms, low=0, high=MAX_DEADLINE_MS)
        _check_number("keepalive_ms", self.keepalive_ms, low=MIN_KEEPALIVE_MS, high=MAX_DEADLINE_MS)
        if not isinstance(self.verify, Verify):
            raise InvalidArgument(f"{self.verify!r} is not a Verify", field="verify", limit="VERIFY_ON, VERIFY_OFF")
        if not isinstance(self.gives_hints, bool):
            raise InvalidArgument(f"must be True or False, not {self.gives_hints!r}", field="gives_hints")
        _check_name(self.name)
        if self.tls is not None and not isinstance(self.tls, TlsOptions):
            raise InvalidArgument(f"must be TlsOptions or None, not {type(self.tls).__name__}", field="tls")
        _check_transports(self.transports)


def _check_number(field: str, value: int, *, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"must be a whole number, not {value!r}", field=field)
    if not low <= value <= high:
        raise InvalidArgument(f"is {value}", field=field, limit=f"{low}-{high}")


def _check_transports(transports: tuple[str, ...]) -> None:
    known = f"one or more of {', '.join(TRANSPORTS)}, each once"
    if not isinstance(transports, tuple):
        raise InvalidArgument(f"must be a tuple, not {type(transports).__name__}", field="transports", limit=known)
    for name in transports:
        if name not in TRANSPORTS:
            raise InvalidArgument(f"{name!r} is not a transport", field="transports", limit=known)
    if not transports or len(set(transports)) < len(transports):
        problem = "names one twice" if transports else "names none"
        raise InvalidArgument(problem, field="transports", limit=known)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise InvalidArgument(f"must be text, not {type(name).__name__}", field="name")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument("is not valid Unicode", field="name") from None
    if size > contract.MAX_CLIENT_BYTES:
        raise InvalidArgument(f"has {size} bytes", field="name", limit=f"0-{contract.MAX_CLIENT_BYTES} bytes")
