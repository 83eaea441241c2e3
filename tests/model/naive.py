"""A naive store: dicts of blocks, and a memory that remembers which part was written where.

It does not choose victims: it is told which blocks went and says whether they might.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.leases import ReadLease, WriteLease
from kvstore.core.namespaces import Namespace

ABSENT, RESERVED, PRESENT = "absent", "reserved", "present"


@dataclass
class NaiveBlock:
    """One block: the state of each part, its length, who holds it."""

    key: bytes
    generation: int  # Counts blocks ever made; tells a block from a later one with the same key.
    states: list[str]
    length: int
    created: float
    holders: set[int] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        return PRESENT not in self.states


@dataclass
class NaiveRead:
    """A read lease: what was granted, and the words that must be read there."""

    lease: ReadLease
    owner: int
    deadline: float
    blocks: list[NaiveBlock]
    words: dict[int, tuple[int, int]]  # offset -> (generation, part)


@dataclass
class NaiveWrite:
    """A write lease: (block, part, offset) of each part created, and which are open."""

    lease: WriteLease
    owner: int
    deadline: float
    parts: list[tuple[NaiveBlock, int, int]]
    open: set[int]


@dataclass
class NaivePin:
    """Copies under way from or to the slots of a lease, which may have ended. `owed` are indexes of parts that were
    dropped at commit meanwhile."""

    held: NaiveRead | NaiveWrite
    count: int = 0
    owed: set[int] = field(default_factory=set)


class NaiveNamespace:
    """The index of one namespace."""

    def __init__(self, real: Namespace, *, ttl_s: float | None) -> None:
        self.real = real
        self.ttl_s = ttl_s
        self.blocks: dict[bytes, NaiveBlock] = {}

    def visible(self, key: bytes, parts: tuple[int, ...], now: float) -> NaiveBlock | None:
        """The block if all the parts asked for can be read now."""
        block = self.blocks.get(key)
        if block is None or not self.young(block, now):
            return None
        chosen = parts or range(len(block.states))
        return block if all(block.states[p] == PRESENT for p in chosen) else None

    def in_flight(self, key: bytes, parts: tuple[int, ...], now: float) -> bool:
        """Whether what is missing of it is being written."""
        block = self.blocks.get(key)
        if block is None or not self.young(block, now):
            return False
        states = [block.states[p] for p in parts or range(len(block.states))]
        return ABSENT not in states and RESERVED in states

    def young(self, block: NaiveBlock, now: float) -> bool:
        return self.ttl_s is None or block.created + self.ttl_s > now
