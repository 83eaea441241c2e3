"""The tree of every option: one frozen dataclass a section, one field an option.

Each field's metadata holds its kind (which parses and bounds it), its default as text and its doc; the loader, the
docs and `--help` all read them there. Sizes are bytes, durations seconds, ratios shares of one. No field has a Python
default: the tree is only made whole, by `load_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from kvstore.config.address import Address
from kvstore.config.compound_kinds import Addresses, SizeOrPercent, WordOr
from kvstore.config.kinds import Count, Duration, Kind, OneOf, Ratio, Size
from kvstore.config.place_kinds import FilePath, HostPort, KeyPlace, SocketPath, TcpAddresses, UidSet
from kvstore.config.uids import SAME, Uids
from kvstore.config.units import GIB, KIB, MIB, TIB

Source = Literal["default", "file", "env", "flag"]

MIN_PAGE_BYTES = 64 * KIB
MAX_PAGE_BYTES = 64 * MIB
MAX_PART_BYTES = 64 * MIB
# Parts are kept in multiples of 4 KiB, the page of x86-64 and the unit of direct I/O.
GRAIN_BYTES = 4 * KIB
MAX_CAPACITY_BYTES = 16 * TIB
MAX_COUNT = 65536
HOT_POLICIES = ("expected", "lru")  # Those of kvstore.core.eviction.

_TTL = WordOr("none", Duration(low="100ms", high="8760h"))
_QUOTA = WordOr("none", SizeOrPercent(low=0, high=MAX_CAPACITY_BYTES))
_MAX_BYTES = WordOr("none", SizeOrPercent(low=GRAIN_BYTES, high=MAX_CAPACITY_BYTES))
_IN_FLIGHT = WordOr("auto", Size(low=GRAIN_BYTES, high=64 * GIB))


def _option(kind: Kind, *, default: str, doc: str) -> Mapping[str, Any]:
    return MappingProxyType({"kind": kind, "default": default, "doc": doc, "bounds": kind.bounds(), "unit": kind.unit})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Ports, sessions and messages."""

    listen: tuple[Address, ...] = field(
        metadata=_option(Addresses(16), default="127.0.0.1:7070", doc="where clients connect; port 0 is any free port")
    )
    admin_listen: tuple[Address, ...] = field(
        metadata=_option(Addresses(16), default="127.0.0.1:7071", doc="where the admin service listens")
    )
    drain_timeout: float = field(
        metadata=_option(Duration(low="0s", high="10m"), default="10s", doc="how long SIGTERM lets leases end")
    )
    max_sessions: int = field(
        metadata=_option(Count(low=1, high=MAX_COUNT), default="4096", doc="most client sessions open at once")
    )
    max_namespaces: int = field(
        metadata=_option(Count(low=1, high=MAX_COUNT), default="1024", doc="most namespaces this server holds")
    )
    max_message: int = field(
        metadata=_option(Size(low=128 * KIB, high=64 * MIB), default="8MiB", doc="largest single message either way")
    )
    send_budget: int = field(
        metadata=_option(
            Size(low=4 * MIB, high=64 * GIB),
            default="256MiB",
            doc="bytes that all inline Get streams may hold in flight",
        )
    )
    log_level: str = field(
        metadata=_option(
            OneOf(("debug", "info", "warning", "error")), default="info", doc="least severe message that is logged"
        )
    )


@dataclass(frozen=True, kw_only=True)
class HotConfig:
    """The arena: the memory that holds the parts."""

    capacity: int = field(
        metadata=_option(
            Size(low=1 * MIB, high=MAX_CAPACITY_BYTES, multiple=GRAIN_BYTES),
            default="1GiB",
            doc="bytes of memory for parts, taken at start",
        )
    )
    page: int = field(
        metadata=_option(
            WordOr("auto", Size(low=MIN_PAGE_BYTES, high=MAX_PAGE_BYTES, power_of_two=True)),
            default="auto",
            doc="unit in which size classes take memory, at most hot.capacity; auto is the largest power of two that "
            "is at most 64MiB and an eighth of hot.capacity, and at least 64KiB",
        )
    )
    huge_pages: str = field(
        metadata=_option(OneOf(("off", "try")), default="off", doc="try asks for huge pages and runs on without them")
    )
    prefault: str = field(
        metadata=_option(
            OneOf(("background", "off")), default="background", doc="background touches every page once after start"
        )
    )
    max_leased_share: float = field(
        metadata=_option(
            Ratio(low=0.05, high=1.0), default="0.8", doc="most of hot.capacity that leases may pin at once"
        )
    )
    policy: str = field(
        metadata=_option(
            OneOf(HOT_POLICIES),
            default="expected",
            doc="which blocks are evicted first: those least likely to be asked for again, or those idle longest",
        )
    )


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """The most that one call may ask for."""

    max_blocks_per_call: int = field(
        metadata=_option(
            Count(low=1, high=MAX_COUNT), default="4096", doc="most blocks in one Acquire, Reserve, Get or Put"
        )
    )
    max_match_blocks: int = field(
        metadata=_option(Count(low=1, high=MAX_COUNT), default="32768", doc="most blocks in one Match")
    )
    max_parts_per_block: int = field(
        metadata=_option(
            Count(low=1, high=MAX_COUNT), default="1024", doc="most parts that a geometry may cut a block in"
        )
    )
    max_part: int = field(
        metadata=_option(
            Size(low=GRAIN_BYTES, high=MAX_PART_BYTES),
            default="64MiB",
            doc="largest part, at most hot.page; where it is not set and hot.page is auto, the smaller of 64MiB and "
            "hot.page",
        )
    )
    max_call_bytes: int = field(
        metadata=_option(Size(low=1 * MIB, high=64 * GIB), default="1GiB", doc="most payload bytes that one call moves")
    )
    chunk: int = field(
        metadata=_option(Size(low=64 * KIB, high=4 * MIB), default="1MiB", doc="piece size of inline streams")
    )
    max_wait: float = field(metadata=_option(Duration(low="0s", high="10m"), default="30s", doc="longest wait_ms"))


@dataclass(frozen=True, kw_only=True)
class LeaseConfig:
    """How long rights to slots last."""

    default: float = field(
        metadata=_option(
            Duration(low="100ms", high="24h"),
            default="30s",
            doc="life of a lease whose caller asks for none, at most lease.max",
        )
    )
    max: float = field(
        metadata=_option(Duration(low="100ms", high="24h"), default="5m", doc="longest life that a caller may ask for")
    )
    session_open_timeout: float = field(
        metadata=_option(
            Duration(low="100ms", high="10m"),
            default="10s",
            doc="how long a new session may wait to open its pulse stream",
        )
    )


@dataclass(frozen=True, kw_only=True)
class NamespacePolicy:
    """What one namespace is given; None stands for none."""

    namespace: str
    ttl: float | None = field(metadata=_option(_TTL, default="default_ttl", doc="as default_ttl, for this namespace"))
    quota: int | None = field(
        metadata=_option(_QUOTA, default="default_quota", doc="as default_quota, for this namespace")
    )
    max_bytes: int | None = field(
        metadata=_option(_MAX_BYTES, default="default_max_bytes", doc="as default_max_bytes, for this namespace")
    )


@dataclass(frozen=True, kw_only=True)
class NamespacesConfig:
    """Retention and shares: the defaults, and one policy for each namespace that the file names."""

    default_ttl: float | None = field(
        metadata=_option(
            _TTL,
            default="none",
            doc="life of a block, from its first Reserve, in a namespace whose policy leaves it out",
        )
    )
    default_quota: int | None = field(
        metadata=_option(
            _QUOTA, default="none", doc="memory that a namespace whose policy leaves it out can always use"
        )
    )
    default_max_bytes: int | None = field(
        metadata=_option(
            _MAX_BYTES, default="none", doc="most memory that a namespace whose policy leaves it out may use"
        )
    )
    policy: tuple[NamespacePolicy, ...]

    def for_namespace(self, namespace: str) -> NamespacePolicy:
        """The policy of `<tenant>/<name>`: its own, or one made of the defaults."""
        for policy in self.policy:
            if policy.namespace == namespace:
                return policy
        return NamespacePolicy(
            namespace=namespace, ttl=self.default_ttl, quota=self.default_quota, max_bytes=self.default_max_bytes
        )


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """How the server watches itself."""

    probe_interval: float = field(
        metadata=_option(
            Duration(low="100ms", high="1m"), default="2s", doc="time between two probes of the event loop"
        )
    )
    probe_timeout: float = field(
        metadata=_option(Duration(low="10ms", high="1m"), default="1s", doc="a probe slower than this is a failed one")
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Encryption of the TCP ports. Paths of PEM files, "" = none; they are read at start."""

    cert: str = field(
        metadata=_option(FilePath(), default="", doc="certificate chain of this server, in PEM; empty is no TLS")
    )
    key: str = field(
        metadata=_option(FilePath(), default="", doc="private key of tls.cert, in PEM, without passphrase")
    )
    client_ca: str = field(
        metadata=_option(
            FilePath(),
            default="",
            doc="certificates of an authority, in PEM; where set, a client must show a certificate that it signed",
        )
    )


@dataclass(frozen=True, kw_only=True)
class BulkConfig:
    """The fast channel over TCP. `listen` is None where there is none; `frame`, `credit` also hold for shm."""

    listen: tuple[Address, ...] | None = field(
        metadata=_option(
            WordOr("off", TcpAddresses(16)),
            default="127.0.0.1:7072",
            doc="where the fast channel listens; port 0 is any free port",
        )
    )
    advertise: str = field(
        metadata=_option(
            HostPort(),
            default="",
            doc="where clients are told to connect; empty tells them the port only, and they use the host that they "
            "speak gRPC to",
        )
    )
    max_connections: int = field(
        metadata=_option(
            Count(low=1, high=MAX_COUNT),
            default="4096",
            doc="most connections of the fast channel at once, over all its sockets",
        )
    )
    credit: int = field(
        metadata=_option(
            Size(low=1 * MIB, high=4 * GIB),
            default="64MiB",
            doc="payload bytes that a client may send to a connection before it is granted more",
        )
    )
    frame: int = field(
        metadata=_option(Size(low=64 * KIB, high=4 * MIB), default="2MiB", doc="largest payload of one frame")
    )
    busy_poll_us: int = field(
        metadata=_option(
            Count(low=0, high=10_000),
            default="500",
            doc="microseconds that the server looks for the next request before it sleeps, while they come as fast as "
            "that; 0 is not at all",
        )
    )
    stall_timeout: float = field(
        metadata=_option(
            Duration(low="100ms", high="10m"),
            default="5s",
            doc="a peer that takes or sends nothing for so long in the middle of a transfer is cut",
        )
    )


@dataclass(frozen=True, kw_only=True)
class ShmConfig:
    """The fast channel over a Unix socket, with shared memory. `socket` is AUTO, OFF or a path."""

    socket: str = field(
        metadata=_option(
            SocketPath(),
            default="auto",
            doc="where clients of this machine connect; auto is a path that only the server's own uid can reach, made "
            "of the port in server.listen",
        )
    )
    allow_uids: Uids = field(
        metadata=_option(
            UidSet((SAME,)),
            default="same",
            doc="whose processes may connect; same is the server's own uid",
        )
    )
    map_uids: Uids = field(
        metadata=_option(
            UidSet((SAME, "none")),
            default="same",
            doc="whose processes get the arena mapped, read-only; others are served by copies",
        )
    )
    max_regions: int = field(
        metadata=_option(Count(low=1, high=MAX_COUNT), default="64", doc="most regions that a session may register")
    )
    max_region_bytes: int = field(
        metadata=_option(
            Size(low=GRAIN_BYTES, high=MAX_CAPACITY_BYTES),
            default="256GiB",
            doc="most bytes of all regions of one session",
        )
    )
    copy_threads: int = field(
        metadata=_option(Count(low=1, high=64), default="2", doc="threads that copy between regions and the arena")
    )
    streaming_stores: str = field(
        metadata=_option(
            OneOf(("off", "try")),
            default="try",
            doc="try copies large parts past the CPU's caches, which takes a restart of the process by itself at start",
        )
    )


@dataclass(frozen=True, kw_only=True)
class WarmConfig:
    """The warm tier: blocks on disk, beyond memory. `path` is "" where there is none.

    `write_budget` is None where writes are not bounded. `encryption_key` says where keys are, and is none itself.
    """

    path: str = field(
        metadata=_option(
            FilePath(), default="", doc="folder that this server alone keeps blocks in; empty is no warm tier"
        )
    )
    capacity: int = field(
        metadata=_option(
            Size(low=64 * MIB, high=MAX_CAPACITY_BYTES),
            default="64GiB",
            doc="most bytes of segments on disk, a hard limit; as many whole segments as fit in it, at least two",
        )
    )
    segment: int = field(
        metadata=_option(
            Size(low=1 * MIB, high=1 * GIB, power_of_two=True),
            default="256MiB",
            doc="bytes of one file of blocks, written from its beginning to its end and given up as a whole",
        )
    )
    index_cache: int = field(
        metadata=_option(
            Size(low=1 * MIB, high=64 * GIB),
            default="64MiB",
            doc="bytes of memory for what is looked up often in the index on disk",
        )
    )
    queue: int = field(
        metadata=_option(
            _IN_FLIGHT,
            default="auto",
            doc="payload in memory that may wait to be written, and has its room until it is; auto is the smaller of "
            "128MiB and a sixteenth of hot.capacity, and at least limits.max_part",
        )
    )
    promote_queue: int = field(
        metadata=_option(
            _IN_FLIGHT,
            default="auto",
            doc="payload that may be on its way from disk to memory at once; auto is the smaller of 512MiB and a "
            "quarter of hot.capacity, and at least limits.max_part",
        )
    )
    read_threads: int = field(
        metadata=_option(
            Count(low=1, high=64),
            default="8",
            doc="reads that the disk has at once; as many threads more check what came, and look up",
        )
    )
    clean_share: float = field(
        metadata=_option(
            Ratio(low=0.01, high=1.0),
            default="0.5",
            doc="most of hot.capacity, the coldest, that is written ahead of time, so that evicting it waits for no "
            "disk; no more than 3% of warm.capacity, since it is in both, or than single calls take",
        )
    )
    write_budget: int | None = field(
        metadata=_option(
            WordOr("none", Size(low=64 * KIB, high=64 * GIB)),
            default="none",
            doc="bytes a second that may be written on average, for the wear of the flash; beyond it blocks leave "
            "memory unwritten",
        )
    )
    rewrite_share: float = field(
        metadata=_option(
            Ratio(low=0.0, high=0.5),
            default="0.25",
            doc="most of all bytes written that may be blocks in use, kept from a segment that is given up",
        )
    )
    flush_timeout: float = field(
        metadata=_option(
            Duration(low="0s", high="10m"), default="10s", doc="how long SIGTERM may write blocks of memory to disk"
        )
    )
    encryption_key: str = field(
        metadata=_option(
            KeyPlace(),
            default="",
            doc="where the keys are that payload on disk is sealed with; empty writes it as it is",
        )
    )
    on_wrong_key: str = field(
        metadata=_option(
            OneOf(("refuse", "empty")),
            default="refuse",
            doc="what to do with segments sealed with a key that is not there: refuse to start, or take them as empty",
        )
    )
    on_broken_index: str = field(
        metadata=_option(
            OneOf(("rebuild", "refuse")),
            default="rebuild",
            doc="what to do with an index that cannot be opened: make it anew from the segments, or refuse to start",
        )
    )


@dataclass(frozen=True)
class Sources:
    """Where each option's value came from."""

    entries: tuple[tuple[str, Source], ...]

    def of(self, key: str) -> Source:
        """The source of `section.key`; what no source set is a default."""
        return next((source for name, source in self.entries if name == key), "default")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration, checked. Two are equal when their values are, whatever the sources."""

    server: ServerConfig
    hot: HotConfig
    limits: LimitsConfig
    lease: LeaseConfig
    namespaces: NamespacesConfig
    health: HealthConfig
    tls: TlsConfig
    bulk: BulkConfig
    shm: ShmConfig
    warm: WarmConfig
    sources: Sources = field(compare=False)
