"""How each rival's server is started on this host; each returns the address that its client takes."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.compare.processes import Processes, free_ports, listens, says

LOCALHOST = "127.0.0.1"
MEMORY_MIB = 4096
MOONCAKE_SEGMENT_BYTES = 1 << 30
OPENLAKE_CONFIG = """\
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "{host}:{rpc}"
kv_agents = ["{host}:{rpc}"]
s3_addr = "{host}:{s3}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1

[[credentials]]
access_key = "compare"
secret_key = "compare"

[[nodes]]
id = 0
rpc_addr = "{host}:{rpc}"
disk_count = 0

[kv_slab]
capacity_gb = 1
reserve_ttl_secs = 60
"""


@dataclass(frozen=True)
class Ground:
    """Where a server is started: who owns it, its folder, its environment's programs, and what will be put in it."""

    processes: Processes
    folder: Path
    programs: Path
    set_bytes: int
    put_rounds: int

    def program(self, name: str) -> str:
        return str(self.programs / name)


def redis_tcp(ground: Ground) -> str:
    (port,) = free_ports(1)
    _redis(ground, "--port", str(port), "--bind", LOCALHOST, port=port)
    return f"redis://{LOCALHOST}:{port}"


def redis_unix(ground: Ground) -> str:
    (port,) = free_ports(1)
    path = ground.folder / "redis.sock"
    _redis(ground, "--port", str(port), "--bind", LOCALHOST, "--unixsocket", str(path), port=port)
    return f"unix://{path}"


def _redis(ground: Ground, *flags: str, port: int) -> None:
    command = ["redis-server", *flags, "--save", "", "--appendonly", "no", "--dir", str(ground.folder)]
    command += ["--maxmemory", f"{MEMORY_MIB}mb", "--maxmemory-policy", "allkeys-lru", "--loglevel", "warning"]
    ground.processes.start(command, ready=listens(port))


def memcached(ground: Ground) -> str:
    (port,) = free_ports(1)
    # -I: the largest value, 1 MiB by default.
    command = ["memcached", "-l", LOCALHOST, "-p", str(port), "-m", str(MEMORY_MIB), "-I", "8m", "-t", "2"]
    if os.geteuid() == 0:
        command += ["-u", "nobody"]
    ground.processes.start(command, ready=listens(port))
    return str(port)


def mooncake(ground: Ground) -> str:
    rpc, metrics, meta, node, own = free_ports(5)
    flags = {
        "rpc_address": LOCALHOST,
        "rpc_port": rpc,
        "metrics_host": LOCALHOST,
        "metrics_port": metrics,
        "enable_http_metadata_server": "true",
        "http_metadata_server_host": LOCALHOST,
        "http_metadata_server_port": meta,
    }
    command = [ground.program("mooncake_master"), *(f"--{name}={value}" for name, value in flags.items())]
    ground.processes.start(command, ready=listens(rpc, meta))
    metadata, master = f"http://{LOCALHOST}:{meta}/metadata", f"{LOCALHOST}:{rpc}"
    # The memory is another process's: in one process, Mooncake would copy it past the network.
    command = [ground.program("python"), "-m", "bench.compare.clients.mooncake_node", f"{LOCALHOST}:{node}"]
    ground.processes.start([*command, metadata, master, str(MOONCAKE_SEGMENT_BYTES)], ready=says("lending"))
    return f"{LOCALHOST}:{own},{metadata},{master}"


def openlake(ground: Ground) -> str:
    rpc, s3 = free_ports(2)
    config = ground.folder / "openlake.toml"
    config.write_text(OPENLAKE_CONFIG.format(host=LOCALHOST, rpc=rpc, s3=s3))
    command = [ground.program("openlaked"), "--config", str(config)]
    ground.processes.start(command, ready=listens(rpc), leaves="/dev/shm/openlake_kv_{pid}_*")
    return f"{LOCALHOST}:{rpc}"


def redhare(ground: Ground) -> str:
    """Redhare has no server of its own: clients share an index in Redis, and a put lands in the client's own arena."""
    (port,) = free_ports(1)
    # What is removed is not used again, so the arena has room for every round of puts.
    gigabytes = math.ceil(ground.set_bytes * (ground.put_rounds + 2) / 1e9) + 1
    return f"{redis_tcp(ground)},{port},{gigabytes}GB"


def redhare_reader(holder_address: str) -> str:
    """The address of a second client that holds nothing itself."""
    (port,) = free_ports(1)
    return f"{holder_address.split(',')[0]},{port},64MB"


def lmcache_legacy(ground: Ground) -> str:
    (port,) = free_ports(1)
    command = [ground.program("lmcache_server"), LOCALHOST, str(port), "cpu"]
    ground.processes.start(command, ready=listens(port))
    return str(port)


def lmcache_multiprocess(ground: Ground) -> str:
    rpc, http = free_ports(2)
    command = [ground.program("lmcache"), "server", "--host", "localhost", "--port", str(rpc), "--transport", "zmq"]
    command += ["--http-host", LOCALHOST, "--http-port", str(http), "--l1-size-gb", "3", "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "auto", "--disable-metrics", "--chunk-size", "16"]
    ground.processes.start(command, ready=listens(rpc, http))
    return f"{rpc},{http}"


def raw_tcp(ground: Ground) -> str:
    (port,) = free_ports(1)
    return _raw(ground, str(port))


def raw_unix(ground: Ground) -> str:
    return _raw(ground, str(ground.folder / "raw.sock"))


def _raw(ground: Ground, address: str) -> str:
    command = [sys.executable, "-m", "bench.compare.clients.raw_socket", address, str(ground.set_bytes)]
    ground.processes.start(command, ready=says("listening"))
    return address


def none(ground: Ground) -> str:
    """For a client that needs no server."""
    return ""
