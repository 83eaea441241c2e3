"""The verbs of Admin as methods from message to message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvstore.core.namespaces import Namespace
from kvstore.core.store import Purged
from kvstore.service.shell import Call, Shell
from kvstore.service.tiering import durably
from kvstore.tiers.warm import Purged as OnDisk
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import admin_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types

DEFAULT_PAGE, MAX_PAGE = 100, 1000
PAGE_BYTES = 1 << 20  # A page ends early where the specs in it are long.
_SOURCES = {"env": "environment"}  # The contract's word for a source, where it is another one than the option's.
MIN_INTERVAL_MS, DEFAULT_INTERVAL_MS, MAX_INTERVAL_MS = 100, 1000, 60_000


class Channel(Protocol):
    """The fast channel's door, as far as it is counted."""

    @property
    def connection_count(self) -> int: ...

    @property
    def opened_total(self) -> int: ...


class AdminHandlers:
    """`options` are the effective options as (key, value, source). `channel` is None where there is no such door."""

    def __init__(self, shell: Shell, options: Sequence[tuple[str, str, str]], channel: Channel | None = None) -> None:
        self._shell, self._options, self._channel = shell, options, channel
        self._started = shell.now()

    def get_stats(self, request: pb.GetStatsRequest, call: Call) -> pb.Stats:
        store = self._shell.store
        gauges = store.gauges() | {"prefaulted_bytes": self._shell.memory.prefaulted_bytes} | self._channel_gauges()
        counters = store.counters() | {"audits": self._shell.audits, "audit_faults": self._shell.audit_faults}
        tiering = self._shell.tiering
        if tiering is not None:
            counters |= tiering.counters()
            gauges |= tiering.gauges()
        return pb.Stats(
            generation=self._shell.generation,
            uptime_ms=int((self._shell.now() - self._started) * 1000),
            counters=_counts(counters),
            gauges=_counts(gauges),
            latencies=self._shell.latencies.messages(),
        )

    async def watch_stats(self, request: pb.WatchStatsRequest, call: Call) -> AsyncIterator[pb.Stats]:
        interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            limit = f"{MIN_INTERVAL_MS}-{MAX_INTERVAL_MS}"
            raise InvalidArgument(f"is {interval_ms}", field="interval_ms", limit=limit)
        while not self._shell.draining:
            yield self.get_stats(pb.GetStatsRequest(), call)
            await asyncio.sleep(interval_ms / 1000)

    def get_config(self, request: pb.GetConfigRequest, call: Call) -> pb.GetConfigResponse:
        rows = [pb.Option(key=k, value=v, source=_SOURCES.get(s, s)) for k, v, s in self._options]
        return pb.GetConfigResponse(options=rows)

    def list_namespaces(self, request: pb.ListNamespacesRequest, call: Call) -> pb.ListNamespacesResponse:
        """Pages are cut by digest, so that namespaces that come and go never make one appear twice."""
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidArgument(f"is {size}", field="page_size", limit=f"{MAX_PAGE}")
        users = (n for n in self._shell.store.namespaces if not n.rules.spare)
        known = sorted(users, key=lambda n: n.spec.digest)
        rest = [n for n in known if n.spec.digest.hex() > request.page_token]
        answer = pb.ListNamespacesResponse()
        for namespace in rest[:size]:
            answer.namespaces.append(_status(namespace))
            if answer.ByteSize() > PAGE_BYTES:
                break
        shown = len(answer.namespaces)
        answer.next_page_token = rest[shown - 1].spec.digest.hex() if len(rest) > shown > 0 else ""
        return answer

    async def purge(self, request: pb.PurgeRequest, call: Call) -> pb.PurgeResponse:
        if not (request.HasField("tenant") or request.digest or request.older_than_ms or request.all):
            raise InvalidArgument("say tenant, digest, older_than_ms or all", field="selector")

        def chosen(namespace: Namespace) -> bool:
            spec = namespace.spec
            tenant_fits = not request.HasField("tenant") or spec.tenant == request.tenant
            return tenant_fits and (not request.digest or spec.digest == request.digest)

        age_s = request.older_than_ms / 1000
        before = self._shell.now() - age_s if request.older_than_ms else float("inf")
        on_disk = self._purge_disk(request, age_s)
        done = Purged(0, 0, 0)
        for step in self._shell.store.purge_in_steps(chosen, created_before=before):
            done = step
            self._shell.settle()
            await asyncio.sleep(0)
        answer = pb.PurgeResponse(blocks=done.blocks, deferred_blocks=done.deferred_blocks, bytes=done.bytes)
        for purged in await durably(on_disk):
            answer.warm_blocks += purged.block_count
            answer.warm_bytes += purged.size_bytes
        return answer

    def _purge_disk(self, request: pb.PurgeRequest, age_s: float) -> list[asyncio.Future[OnDisk]]:
        """Begins to purge what the warm tier has, namespaces that nobody attached since the start included."""
        tiering = self._shell.tiering
        if tiering is None:
            return []
        before = tiering.wall() - age_s if age_s else float("inf")
        found = []
        for digest, raw in tiering.warm.namespaces().items():
            tenant_fits = not request.HasField("tenant") or types.NamespaceSpec.FromString(raw).tenant == request.tenant
            if tenant_fits and (not request.digest or digest == request.digest):
                found.append(tiering.purge(digest, created_before=before))
        return found

    async def set_warm_tier(self, request: pb.SetWarmTierRequest, call: Call) -> pb.WarmTierStatus:
        tiering = self._shell.tiering
        if tiering is None:
            raise InvalidArgument("this shard has none: `warm.path` is not set", field="warm_tier")
        if request.capacity_bytes:
            tiering.resize(request.capacity_bytes)
        if request.HasField("enabled"):
            tiering.enable(enabled=request.enabled)
        answer = tiering.status()
        if request.capacity_bytes:  # The tier comes to it in its turn.
            segment_bytes = tiering.settings.segment_bytes
            answer.capacity_bytes = request.capacity_bytes // segment_bytes * segment_bytes
        return answer

    def _channel_gauges(self) -> dict[str, int]:
        channel, regions = self._channel, self._shell.regions
        return {
            "channel_connections": 0 if channel is None else channel.connection_count,
            "channel_opened_total": 0 if channel is None else channel.opened_total,
            "regions": regions.region_count,
            "region_bytes": regions.region_bytes,
            "regions_registered": regions.registered_count,
        }


def _counts(values: dict[str, int]) -> list[pb.Count]:
    return [pb.Count(name=name, value=value) for name, value in values.items()]


def _status(namespace: Namespace) -> pb.NamespaceStatus:
    rules = namespace.rules
    return pb.NamespaceStatus(
        spec=namespace.spec.to_message(),
        digest=namespace.spec.digest,
        sessions=namespace.sessions,
        blocks=len(namespace.blocks),
        hot_bytes=namespace.hot_bytes,
        quota_bytes=rules.quota_bytes,
        max_bytes=rules.max_bytes or 0,
        ttl_ms=int((rules.ttl_s or 0) * 1000),
        counters=_counts(namespace.counters.values()),
    )
