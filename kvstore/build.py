"""The one place that builds a shard from its configuration."""

from __future__ import annotations

import os
import secrets
import socket
from importlib.metadata import version

from kvstore.config import Config, effective
from kvstore.core.namespaces import NamespaceRules
from kvstore.core.store import PROBE_HOME, Store, StoreSettings
from kvstore.service.checks import Checks
from kvstore.service.copier import RegionCopier
from kvstore.service.failpoints import Failpoints
from kvstore.service.framed.door import ChannelSettings
from kvstore.service.probe import PROBE_TENANT
from kvstore.service.regions import RegionTable
from kvstore.service.server import ChannelPlaces, Server
from kvstore.service.shell import Shell
from kvstore.service.tls import load_tls
from kvstore.tiers.memory import ArenaMemory
from kvstore_wire.namespace import NamespaceSpec
from kvstore_wire.v1 import types_pb2 as types


def build_server(config: Config, memory: ArenaMemory, failpoints: Failpoints | None = None) -> Server:
    """Wires a shard. `memory` has `config.hot.capacity` bytes and outlives the server; the caller closes it.

    Raises: ConfigError where a file of section `tls` is not what it should be.
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
    return Server(
        shell,
        options=effective(config),
        send_budget_bytes=config.server.send_budget,
        probe_interval_s=config.health.probe_interval,
        probe_timeout_s=config.health.probe_timeout,
        channel=channel_settings(config),
        tls=tls,
    )


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
