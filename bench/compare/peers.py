"""Who is compared: one row of the table per store and way to reach it."""

from __future__ import annotations

import ctypes.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bench.compare import servers
from bench.compare.servers import Ground

Link = Literal["tcp", "host"]
TCP: Link = "tcp"
HOST: Link = "host"
OURS = "ours"


@dataclass(frozen=True)
class Ceiling:
    """What no store of its kind can pass: a client like any other, of this interpreter."""

    name: str
    client: str
    serve: Callable[[Ground], str]


@dataclass(frozen=True)
class Row:
    """One store by one way.

    `family`: rows of one family are variants of which a reader sees the better cell. `client`: a module of
    bench.compare.clients; empty where the rival has a benchmark of its own. `link`: tcp reaches any host. `copies`: a
    get moves its bytes; where it does not, its rate is one of calls and is not drawn beside rates of bytes.
    """

    title: str
    peer: str
    family: str
    link: Link
    ceiling: str
    client: str
    serve: Callable[[Ground], str]
    environment: str = ""
    variant: str = ""
    warm_up_rounds: int = 1
    reads_from_holder: bool = False
    copies: bool = True
    programs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    note: str = ""


RAW_TCP, RAW_UNIX, MEMCPY = "raw TCP", "raw Unix socket", "memcpy"
CEILINGS = (
    Ceiling(RAW_TCP, "raw_socket", servers.raw_tcp),
    Ceiling(RAW_UNIX, "raw_socket", servers.raw_unix),
    Ceiling(MEMCPY, "memcpy", servers.none),
)


def _own(variant: str, *, link: Link, ceiling: str, note: str = "") -> Row:
    title = f"KV Commons {variant}"
    return Row(title, OURS, title, link, ceiling, "own_client", servers.none, variant=variant, note=note)


def _redis(way: str, *, hiredis: str) -> Row:
    unix = way == "Unix socket"
    return Row(
        title=f"Redis, {way}{', hiredis' if hiredis else ''}",
        peer="redis",
        family=f"Redis, {way}",
        link=HOST if unix else TCP,
        ceiling=RAW_UNIX if unix else RAW_TCP,
        client="redis_client",
        serve=servers.redis_unix if unix else servers.redis_tcp,
        environment=hiredis or "redis",
        programs=("redis-server",),
        packages=("redis-server",),
        note="the copy from the library's new objects into the caller's buffer is in its gets",
    )


ROWS = (
    _own("bulk", link=TCP, ceiling=RAW_TCP),
    _own("grpc", link=TCP, ceiling=RAW_TCP),
    _redis("TCP", hiredis=""),
    _redis("TCP", hiredis="redis-hiredis"),
    Row(
        title="memcached",
        peer="memcached",
        family="memcached",
        link=TCP,
        ceiling=RAW_TCP,
        client="memcached_client",
        serve=servers.memcached,
        environment="memcached",
        programs=("memcached",),
        packages=("memcached",),
        note="the copy from the library's new objects into the caller's buffer is in its gets",
    ),
    Row(
        title="Mooncake store, TCP",
        peer="mooncake",
        family="Mooncake store, TCP",
        link=TCP,
        ceiling=RAW_TCP,
        client="mooncake_client",
        serve=servers.mooncake,
        environment="mooncake",
        warm_up_rounds=2,
        libraries=("ibverbs", "rdmacm", "numa"),
        packages=("libibverbs1", "librdmacm1", "libnuma1"),
    ),
    Row(
        title="LMCache legacy server",
        peer="lmcache-legacy",
        family="LMCache legacy server",
        link=TCP,
        ceiling=RAW_TCP,
        client="lmcache_legacy_client",
        serve=servers.lmcache_legacy,
        environment="lmcache",
        note="its protocol has no batch: gets are a loop",
    ),
    Row(
        title="Redhare, other process, TCP",
        peer="redhare",
        family="Redhare, other process, TCP",
        link=TCP,
        ceiling=RAW_TCP,
        client="redhare_client",
        serve=servers.redhare,
        environment="redhare",
        variant="reader",
        reads_from_holder=True,
        programs=("redis-server",),
        packages=("redis-server",),
        note="a put lands in the caller's own process, so there is none across processes",
    ),
    _own("shm", link=HOST, ceiling=MEMCPY),
    _own("shm unverified", link=HOST, ceiling=MEMCPY, note="what landed is not checked, as in the other stores"),
    replace(
        _own("shm views", link=HOST, ceiling=MEMCPY, note="its gets copy nothing: the caller reads the arena in place"),
        copies=False,
    ),
    _redis("Unix socket", hiredis=""),
    _redis("Unix socket", hiredis="redis-hiredis"),
    Row(
        title="OpenLake, shared memory",
        peer="openlake",
        family="OpenLake, shared memory",
        link=HOST,
        ceiling=MEMCPY,
        client="openlake_client",
        serve=servers.openlake,
        environment="openlake",
    ),
    Row(
        title="Redhare, own process",
        peer="redhare",
        family="Redhare, own process",
        link=HOST,
        ceiling=MEMCPY,
        client="redhare_client",
        serve=servers.redhare,
        environment="redhare",
        variant="holder",
        programs=("redis-server",),
        packages=("redis-server",),
        note="the values lie in the reading process itself; each put touches fresh memory",
    ),
    Row(
        title="LMCache multiprocess server",
        peer="lmcache-mp",
        family="LMCache multiprocess server",
        link=HOST,
        ceiling=MEMCPY,
        client="",
        serve=servers.lmcache_multiprocess,
        environment="lmcache",
        note="by its own benchmark (one chunk of 16 tokens a value): p50 of store and retrieve, gather and scatter "
        "over layers included, with its checksums instead of ours",
    ),
)
PEERS = tuple(dict.fromkeys(row.peer for row in ROWS))


def absent(row: Row) -> str:
    """Which program or library of the row's server this machine lacks; empty if none."""
    lost = [name for name in row.programs if shutil.which(name) is None]
    lost += [f"lib{name}" for name in row.libraries if ctypes.util.find_library(name) is None]
    if not lost:
        return ""
    return f"{', '.join(lost)} not found (--install tries apt-get install {' '.join(row.packages)})"


def chosen(names: str) -> list[Row]:
    """The rows of peers named with commas between. Raises ValueError for a name that no peer has."""
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise ValueError(f"no peer called {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return [row for row in ROWS if row.peer in wanted]
