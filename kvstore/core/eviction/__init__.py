"""Eviction policies by their configured name."""

from __future__ import annotations

from typing import Protocol

from kvstore.core.columns import BlockColumns
from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.eviction.expected import ExpectedReuse
from kvstore.core.eviction.lru import TailFirstLru


class MakePolicy(Protocol):
    """A policy's class."""

    takes_hints: bool

    def __call__(self, columns: BlockColumns) -> EvictionPolicy: ...


POLICIES: dict[str, MakePolicy] = {"lru": TailFirstLru, "expected": ExpectedReuse}
