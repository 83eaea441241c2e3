"""The one place that builds a shard from its configuration."""

from __future__ import annotations

import os
import secrets
import socket
from importlib.metadata import version
from pathlib import Path

from kvstore.config import Config, effective
from kvstore.core.cleaning import CleaningRules
from kvstore.core.namespaces import NamespaceRules
from kvstore.core.store import PROBE_HOME, Store, StoreSettings
from kvstore.service.checks import Checks
from kvstore.service.copier import RegionCopier
from kvstore.service.failing_disk import FailingDisk
from kvstore.service.failpoints import Failpoints
from kvstore.service.framed.door import ChannelSettings
from kvstore.service.probe import PROBE_TENANT
from kvstore.service.regions import RegionTable
from kvstore.service.server import ChannelPlaces, Server
from kvstore.service.shell import Shell
from kvstore.service.tiering import Tiering, TieringSettings
from kvstore.service.tls import load_tls
from kvstore.tiers.memory import ArenaMemory
from kvstore.tiers.opening import OpenSettings, keys_at, open_warm
from kvstore.tiers.sealing import Keyring
from kvstore.tiers.warm import Clocks, WarmSettings
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import types_pb2 as types


def build_server(config: Config, memory: ArenaMemory, failpoints: Failpoints | None = None) -> Server:
    """Wires a shard. `memory` has `config.hot.capacity` bytes and outlives the server; the caller closes it.

    Opens the folder of the warm tier, which may take seconds; the server gives it back when it stops.
    Raises: ConfigError where a file of section `tls` is not what it should be; OSError, BadKeys and WrongKey where the
    warm tier's folder cannot be had.
    """
    failpoints = failpoints or Failpoints()
    tls = load_tls(config)
    shell = Shell(
        store=Store(store_settings(config), lambda spec: namespace_rules(config, spec)),
        memory=memory,
        checks=Checks(limits(config)),
        generation=secrets.randbits(63) | 1,
        name=f"{socket.gethostname()} kvcommons/{version('kvcommons')}",
        failpoints=failpoints,
        regions=RegionTable(config.shm.max_regions, config.shm.max_region_bytes),
        copier=RegionCopier(memory, failpoints, threads=config.shm.copy_threads),
    )
    if config.warm.path:
        shell.tiering = _tiering(config, shell)
    return Server(
        shell,
        options=effective(config),
        send_budget_bytes=config.server.send_budget,
        probe_interval_s=config.health.probe_interval,
        probe_timeout_s=config.health.probe_timeout,
        channel=channel_settings(config),
        tls=tls,
    )


def warm_keys(config: Config) -> Keyring | None:
    """Reads the keys of the warm tier, None where there are none. Raises BadKeys and OSError."""
    return keys_at(config.warm.encryption_key, os.environ)


def _tiering(config: Config, shell: Shell) -> Tiering:
    """Opens the warm tier. Blocks. Raises OSError, BadKeys, WrongKey."""
    warm, store, clocks = config.warm, shell.store, Clocks(shell.now, shell.wall)

    def is_hot(digest: bytes, key: bytes) -> bool:
        namespace = store.namespaces.by_digest(digest)
        return namespace is not None and key in namespace.blocks

    settings = OpenSettings(
        path=Path(warm.path),
        capacity_bytes=warm.capacity,
        segment_bytes=warm.segment,
        cache_bytes=warm.index_cache,
        rewrite_share=warm.rewrite_share,
        on_broken_index="refuse" if warm.on_broken_index == "refuse" else "rebuild",
        keyring=warm_keys(config),
        on_wrong_key="empty" if warm.on_wrong_key == "empty" else "refuse",
        tier=WarmSettings(queue_bytes=warm.queue, readers=warm.read_threads, is_hot=is_hot),
        wrap=lambda disk: FailingDisk(disk, shell.failpoints),
    )
    bounds = TieringSettings(
        cleaning=CleaningRules(warm.clean_share, warm.write_budget),
        queue_bytes=warm.queue,
        promote_bytes=warm.promote_queue,
        segment_bytes=warm.segment,
        flush_s=warm.flush_timeout,
    )
    opened = open_warm(settings, clocks=clocks)
    return Tiering(store, shell.memory, opened, bounds, clocks=clocks, settle=shell.settle, latencies=shell.latencies)


def channel_settings(config: Config) -> ChannelSettings:
    """The fast channel's share of the configuration."""
    own = os.getuid()
    return ChannelSettings(
        max_connections=config.bulk.max_connections,
        frame_bytes=config.bulk.frame,
        credit_bytes=config.bulk.credit,
        stall_s=config.bulk.stall_timeout,
        busy_poll_s=config.bulk.busy_poll_us / 1e6,
        may_connect=lambda uid: config.shm.allow_uids.admits(uid, own_uid=own),
        may_map=lambda uid: config.shm.map_uids.admits(uid, own_uid=own),
    )


def channel_places(config: Config) -> ChannelPlaces:
    """Where the fast channel listens."""
    return ChannelPlaces(config.bulk.listen or (), config.bulk.advertise, config.shm.socket)


def store_settings(config: Config) -> StoreSettings:
    """The core's share of the configuration."""
    return StoreSettings(
        capacity_bytes=config.hot.capacity,
        page_bytes=config.hot.page,
        policy=config.hot.policy,
        max_leased_share=config.hot.max_leased_share,
        max_call_bytes=config.limits.max_call_bytes,
        max_sessions=config.server.max_sessions,
        max_namespaces=config.server.max_namespaces,
        session_open_s=config.lease.session_open_timeout,
        homes=(PROBE_HOME,),
    )


def limits(config: Config) -> types.Limits:
    """The limits that Attach tells."""
    return types.Limits(
        max_match_blocks=config.limits.max_match_blocks,
        max_blocks=config.limits.max_blocks_per_call,
        max_parts_per_block=config.limits.max_parts_per_block,
        max_part_bytes=config.limits.max_part,
        max_call_bytes=config.limits.max_call_bytes,
        max_wait_ms=int(config.limits.max_wait * 1000),
        default_lease_ms=int(config.lease.default * 1000),
        max_lease_ms=int(config.lease.max * 1000),
        max_message_bytes=config.server.max_message,
        chunk_bytes=config.limits.chunk,
        session_open_ms=int(config.lease.session_open_timeout * 1000),
    )


def namespace_rules(config: Config, spec: NamespaceSpec) -> NamespaceRules:
    """What the operator set for a namespace; the probe's own lives beside the arena."""
    if spec.tenant == PROBE_TENANT:
        return NamespaceRules(spare=True)
    policy = config.namespaces.for_namespace(f"{spec.tenant}/{spec.name}")
    return NamespaceRules(quota_bytes=policy.quota or 0, max_bytes=policy.max_bytes, ttl_s=policy.ttl)
