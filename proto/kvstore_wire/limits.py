"""Limits of the contract itself, the same for every shard (a shard's own limits come with Attach)."""

from __future__ import annotations

PROTOCOL_VERSION = 1
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
MAX_NAME_BYTES = 255
MAX_TENANT_BYTES = 255
MAX_MODEL_BYTES = 4096
MAX_REVISION_BYTES = 255
MAX_DTYPE_BYTES = 32
MAX_LAYOUT_BYTES = 64
MAX_SCHEME_BYTES = 64
MAX_FACTS = 64
MAX_FACT_NAME_BYTES = 64
MAX_FACT_VALUE_BYTES = 1024
MAX_SALT_BYTES = 4096
MAX_CLIENT_BYTES = 255
MAX_FEATURES = 32
MAX_NAMESPACES_PER_SESSION = 64
MAX_LEASES_PER_CALL = 1024
MAX_NEXT_USE = 32
MAX_CORRUPT_PER_CALL = 16
MAX_CALL_PARTS = 1 << 16  # Keys times parts in Acquire, Reserve, Get and Put.
MAX_MATCH_PARTS = 1 << 20  # Keys times parts in Match.
MAX_CALL_SLICES = 1 << 17  # Slices of a region in one Get or Put.
MAX_RANGES = 16  # In one Get.
SESSION_BYTES = 16
DIGEST_BYTES = 32
