"""What is counted, each with one meaning (docs/metrics.md). Counters only grow; every event is counted once."""

from __future__ import annotations

from enum import Enum

# name -> meaning. Those of a namespace; a shard's counters are their sums.
NAMESPACE_COUNTERS = {
    "match_calls": "Match calls answered",
    "match_asked_blocks": "keys given to Match",
    "match_hit_blocks": "of these, stored (COVERAGE_PREFIX: leading ones only)",
    "match_warm_blocks": "of these hits, on disk only",
    "acquire_calls": "Acquire and Get calls answered",
    "acquire_asked_blocks": "keys given to Acquire and Get",
    "acquire_leased_blocks": "of these, leased",
    "acquire_missing_blocks": "of these, not stored or after the end of the usable prefix",
    "acquire_warm_blocks": "of these, on disk and not in memory when the wait ended",
    "acquire_busy_blocks": "of these, stored but over the leased share",
    "acquire_late_blocks": "of these, still in flight when the wait ended",
    "reserve_calls": "Reserve and Put calls answered",
    "reserve_created_parts": "parts that were given a slot",
    "reserve_present_parts": "parts that were stored already",
    "reserve_in_flight_parts": "parts that another writer held",
    "reserve_full_parts": "parts refused because nothing may be evicted now",
    "reserve_quota_parts": "parts refused by the namespace's own limit",
    "reserve_too_large_parts": "parts refused as too long",
    "reserve_draining_parts": "parts refused because the shard drains",
    "reserve_beyond_parts": "parts refused because a block before them was",
    "committed_parts": "parts made visible",
    "abandoned_parts": "reserved parts dropped: aborted, expired, or the writer died",
    "lost_parts": "parts dropped at commit because their block was removed meanwhile",
    "written_bytes": "payload received from writers",
    "read_bytes": "payload sent to readers",
    "evicted_capacity_blocks": "blocks evicted to make room in their size class",
    "evicted_page_blocks": "blocks evicted to give their page to another size class",
    "evicted_quota_blocks": "blocks evicted because their namespace reached its own limit",
    "expired_blocks": "blocks removed by their namespace's ttl",
    "deleted_blocks": "blocks removed by Delete",
    "purged_blocks": "blocks removed by Purge",
    "corrupt_blocks": "blocks dropped because a part no longer matched its checksum",
    "incomplete_blocks": "blocks that vanished because no part of them was ever committed",
    "read_leases_expired": "read leases that ended by their deadline",
    "write_leases_expired": "write leases that ended by their deadline",
    "over_blocks": "blocks that Over was believed of",
}


class Removal(Enum):
    """Why a block left the index; the value is its counter."""

    CAPACITY = "evicted_capacity_blocks"
    PAGE = "evicted_page_blocks"
    QUOTA = "evicted_quota_blocks"
    TTL = "expired_blocks"
    DELETED = "deleted_blocks"
    PURGED = "purged_blocks"
    CORRUPT = "corrupt_blocks"
    INCOMPLETE = "incomplete_blocks"


class Counters:
    """A fixed set of counters by name."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMESPACE_COUNTERS, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a counter. Raises KeyError for an unknown name, ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"{name} cannot shrink by {count}")
        self._values[name] += count

    def values(self) -> dict[str, int]:
        """Returns a copy, in the order of NAMESPACE_COUNTERS."""
        return dict(self._values)

    def __getitem__(self, name: str) -> int:
        return self._values[name]
