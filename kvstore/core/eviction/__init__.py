"""Eviction policies by their configured name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.columns import BlockColumns
from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.eviction.expected import ExpectedReuse
from kvstore.core.eviction.lru import TailFirstLru

POLICIES: dict[str, Callable[[BlockColumns], EvictionPolicy]] = {"lru": TailFirstLru, "expected": ExpectedReuse}
