"""The warm tier as a running shard uses it: what goes to disk, what comes back, and how it is while the disk is not.

States
- ON: everything.
- DEGRADED: the disk failed or hangs. Memory serves on as if there were no warm tier; what can be read still is read
  unless the disk hangs. The tier tries again by itself.
- DISABLED: an operator took it out. Deletions still reach it, so that nothing deleted is back when it returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from kvstore.core.cleaning import Cleaner, CleaningRules
from kvstore.core.namespaces import Namespace
from kvstore.core.sessions import Session
from kvstore.core.sight import Ask
from kvstore.core.store import Store
from kvstore.service.demotion import Demotion
from kvstore.service.latency import Latencies
from kvstore.service.promotion import Fetch, Promotion
from kvstore.tiers.memory import ArenaMemory
from kvstore.tiers.opening import Opened
from kvstore.tiers.warm import Clocks, Purged
from kvstore_wire.errors import Internal, InvalidArgument
from kvstore_wire.v1 import admin_pb2 as pb

_LOG = logging.getLogger("kvstore.tiering")
MAX_CAPACITY_BYTES = 16 << 40
STALL_S = 1.0  # A call of the disk longer than this, and nothing more is asked of it.
CLOSE_S = 5.0  # How long the end of the process waits for the disk.
_RETRY_S, _LONGEST_RETRY_S = 0.5, 5.0
_FAULT_MEMORY_S = 3.0  # How long a failed read makes the tier degraded.


class TierState(IntEnum):
    """As told by the gauge `warm_state`."""

    OFF = 0
    ON = 1
    DEGRADED = 2
    DISABLED = 3


_STATES = {
    TierState.OFF: pb.WARM_TIER_STATE_OFF,
    TierState.ON: pb.WARM_TIER_STATE_ON,
    TierState.DEGRADED: pb.WARM_TIER_STATE_DEGRADED,
    TierState.DISABLED: pb.WARM_TIER_STATE_DISABLED,
}


@dataclass(frozen=True)
class TieringSettings:
    """Bounds of what is on its way to and from disk, and how long a clean stop may write."""

    cleaning: CleaningRules
    queue_bytes: int
    promote_bytes: int
    segment_bytes: int
    flush_s: float = 10.0


class Tiering:
    """Owns the warm tier from construction to `close`. Lives on the event loop."""

    def __init__(
        self,
        store: Store,
        memory: ArenaMemory,
        opened: Opened,
        settings: TieringSettings,
        *,
        clocks: Clocks,
        settle: Callable[[], None],
        latencies: Latencies,
    ) -> None:
        warm = self.warm = opened.tier
        self._opened, self.settings, self._store, self._clocks = opened, settings, store, clocks
        self._enabled = True
        self._reason = ""  # Why the tier is degraded.
        self._read_errors, self._read_failed_at = 0, float("-inf")
        self._healing: asyncio.Future[None] | None = None
        self._heal_at, self._retry_s = 0.0, _RETRY_S
        self.degraded_count = 0
        session = Session(b"warm tier", "warm tier", frozenset(), None)
        store.sessions.keep_internal(session)
        cleaner = Cleaner(store.records, settings.cleaning, clocks.now())
        self.demotion = Demotion(
            store.records,
            memory,
            warm,
            cleaner,
            queue_bytes=settings.queue_bytes,
            segment_bytes=settings.segment_bytes,
            clocks=clocks,
            why_not=self._why_not_write,
            latencies=latencies,
        )
        self.promotion = Promotion(
            store,
            memory,
            warm,
            self.demotion,
            session=session,
            queue_bytes=settings.promote_bytes,
            clocks=clocks,
            settle=settle,
            latencies=latencies,
        )
        store.reader.elsewhere = self._elsewhere

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        if not self._enabled:
            return TierState.DISABLED
        return TierState.DEGRADED if self._reason else TierState.ON

    @property
    def reason(self) -> str:
        """Why the tier is degraded, empty where it is not."""
        return self._reason if self._enabled else ""

    def enable(self, *, enabled: bool) -> None:
        """Takes the tier in or out, at once, whatever its disk does."""
        if enabled != self._enabled:
            _LOG.warning("the warm tier is %s", "enabled" if enabled else "disabled")
        self._enabled = enabled

    def resize(self, capacity_bytes: int) -> asyncio.Future[None]:
        """Changes the capacity; done when what is beyond it was given up. Raises InvalidArgument, fails as the disk."""
        least = 2 * self.settings.segment_bytes
        if not least <= capacity_bytes <= MAX_CAPACITY_BYTES:
            limit = f"{least}-{MAX_CAPACITY_BYTES}"
            raise InvalidArgument(f"is {capacity_bytes}", field="capacity_bytes", limit=limit)
        self.demotion.disk_bytes = capacity_bytes
        self.demotion.fit()
        resizing = asyncio.wrap_future(self.warm.resize(capacity_bytes))
        resizing.add_done_callback(_log_failure)
        return resizing

    def wall(self) -> float:
        """Seconds of the wall clock."""
        return self._clocks.wall()

    def status(self) -> pb.WarmTierStatus:
        """How the tier is, for an operator."""
        gauges = self.warm.gauges()
        return pb.WarmTierStatus(
            state=_STATES[self.state],
            reason=self.reason,
            capacity_bytes=gauges["capacity_bytes"],
            stored_bytes=gauges["stored_bytes"],
            stored_blocks=gauges["stored_blocks"],
            writing_bytes=self.demotion.writing_bytes,
            promoting_bytes=self.promotion.bytes_on_the_way,
        )

    def tick(self) -> None:
        """Looks how the disk is, tries it again where it failed, and writes what has become cold."""
        now = self._clocks.now()
        reason = self._find_reason(now)
        if reason and not self._reason:
            self.degraded_count += 1
            _LOG.error("the warm tier is degraded: %s", reason)
        elif self._reason and not reason:
            _LOG.warning("the warm tier is well again")
        self._reason = reason
        if self.warm.fault is not None and now >= self._heal_at and self._healing is None:
            self._heal(now)
        self.demotion.pump()

    def _find_reason(self, now: float) -> str:
        if self.warm.stalled_s > STALL_S:
            return "the disk hangs"
        if self.warm.fault is not None:
            return str(self.warm.fault)
        errors = self.warm.counts["read_errors"]
        if errors != self._read_errors:
            self._read_errors, self._read_failed_at = errors, now
        return "reads fail" if now - self._read_failed_at < _FAULT_MEMORY_S else ""

    def _heal(self, now: float) -> None:
        healing = self._healing = asyncio.wrap_future(self.warm.heal())

        def done(healed: asyncio.Future[None]) -> None:
            self._healing = None
            failed = healed.cancelled() or healed.exception() is not None
            self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s) if failed else _RETRY_S
            self._heal_at = self._clocks.now() + self._retry_s

        healing.add_done_callback(done)
        self._heal_at = now + self._retry_s

    def _may_read(self) -> bool:
        return self._enabled and self.warm.stalled_s <= STALL_S

    def _why_not_write(self) -> str:
        if not self._enabled:
            return "disabled"
        if self.warm.fault is not None:
            return "fault"
        return "stalled" if self.warm.stalled_s > STALL_S else ""

    def _elsewhere(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[bool]:
        if not self._may_read() or namespace.rules.spare:
            return [False] * len(keys)
        return self.warm.has(namespace.spec.digest, keys)

    # -- what handlers ask for -------------------------------------------------------------------------------------

    async def begin(self, ask: Ask, until: float) -> list[Fetch]:
        """As `Promotion.begin`."""
        return await self.promotion.begin(ask, until) if self._may_read() else []

    def leave(self, fetches: Sequence[Fetch]) -> None:
        """As `Promotion.leave`."""
        self.promotion.leave(fetches)

    def delete(self, namespace: Namespace, keys: Sequence[bytes]) -> asyncio.Future[int]:
        """Forgets blocks: nobody finds them from now on; durable when it is done."""
        return asyncio.wrap_future(self.warm.delete(namespace.spec.digest, keys))

    def purge(self, digest: bytes, *, created_before: float) -> asyncio.Future[Purged]:
        """Forgets a namespace's blocks made before a time of the wall clock; as `delete`."""
        return asyncio.wrap_future(self.warm.purge(digest, created_before))

    # -- the end ---------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Writes what is worth keeping of memory, heads first, within the time set for it."""
        if self.settings.flush_s <= 0 or self.state is not TierState.ON:
            return
        started = self._clocks.now()
        written, left = await self.demotion.flush(self.settings.flush_s)
        left_s = max(0.1, self.settings.flush_s - (self._clocks.now() - started))
        try:
            await asyncio.wait_for(asyncio.wrap_future(self.warm.flush()), left_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, we are going
            _LOG.warning("what was written last may be lost: %s", error)
        _LOG.info("wrote %d blocks of memory to disk, %d were left", written, left)

    async def close(self) -> None:
        """Gives the disk back; in time whatever it does."""
        self._enabled = False
        await asyncio.to_thread(self._opened.close, timeout_s=CLOSE_S)

    # -- looking ---------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """What happened, each with its unit last."""
        demotion, promotion = self.demotion.counts, self.promotion.counts
        found = {name: demotion[name] for name in ("demoted_blocks", "kept_blocks")}
        found |= {f"dropped_{why}_blocks": demotion[f"dropped_{why}_blocks"] for why in DROPPED}
        names = ("missed", "vanished", "refused", "cancelled", "late")
        found |= {f"promote_{name}_blocks": promotion[f"{name}_blocks"] for name in names}
        found["promoted_blocks"] = promotion["promoted_blocks"]
        tier = self.warm.counts
        found |= {name: tier[name] for name in TIER_COUNTS}
        found["degraded"] = self.degraded_count
        return {f"warm_{name}": value for name, value in found.items()}

    def gauges(self) -> dict[str, int]:
        """How it is now."""
        found = self.warm.gauges() | {
            "state": int(self.state),
            "writing_bytes": self.demotion.writing_bytes,
            "promoting_bytes": self.promotion.bytes_on_the_way,
        }
        return {f"warm_{name}": value for name, value in found.items()}


def _log_failure(ended: asyncio.Future[None]) -> None:
    error = None if ended.cancelled() else ended.exception()
    if error is not None:
        _LOG.error("the warm tier could not be resized: %s", error)


T = TypeVar("T")


async def durably(forgotten: Sequence[asyncio.Future[T]]) -> list[T]:
    """Waits until the warm tier has forgotten what it was told to. Raises Internal where its disk could not be told."""
    done = await asyncio.gather(*forgotten, return_exceptions=True)
    failed = next((ended for ended in done if isinstance(ended, BaseException)), None)
    if failed is not None:
        raise Internal(f"gone until this shard starts again: the warm tier could not note it: {failed}") from failed
    return [future.result() for future in forgotten]


# Why a block left memory without a copy.
DROPPED = ("behind", "budget", "over", "incomplete", "too_large", "copy_gone", "fault", "stalled", "disabled")
# Of WarmTier.counts.
TIER_COUNTS = (
    *("written_blocks", "failed_blocks", "refused_blocks", "rewritten_blocks", "read_blocks", "missed_blocks"),
    *("deleted_blocks", "corrupt_blocks", "given_up_segments", "sealed_segments", "lost_segments"),
    *("faults", "read_errors"),
)
