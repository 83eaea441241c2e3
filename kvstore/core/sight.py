"""How the keys of one call stand: the state of each, and the blocks that can be leased.

A sight is taken one block at a time for a few keys and by columns for many (see few.py); both tell the same, but that a
PREFIX sight of a few ends at the first key that is not HOT: what lies beyond it is never told.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore.core import few
from kvstore.core.arena import SLOT_UNIT_BYTES
from kvstore.core.columns import ABSENT, PRESENT, RESERVED, Flags, Ids
from kvstore.core.few import Rows, as_rows
from kvstore.core.lookup import each_block, leading_blocks
from kvstore.core.namespaces import Namespace
from kvstore.core.records import Records
from kvstore_wire.states import BlockState, Coverage

# As plain ints: reading a member of an enum costs as much as reading a column.
MISSING, HOT, WARM, IN_FLIGHT, BUSY, BEYOND = (
    int(state)
    for state in (
        *(BlockState.MISSING, BlockState.HOT, BlockState.WARM),
        *(BlockState.IN_FLIGHT, BlockState.BUSY, BlockState.BEYOND),
    )
)
_HOT = bytes([HOT])
# By the least state of the parts asked for: all are there, or what is not is being written.
_BY_LEAST = {ABSENT: MISSING, RESERVED: IN_FLIGHT, PRESENT: HOT}


class Ask(NamedTuple):
    """What to look for. `parts` names the parts of each block, at least one."""

    namespace: Namespace
    keys: Sequence[bytes]
    parts: tuple[int, ...]
    coverage: Coverage
    now: float


class Room(NamedTuple):
    """What may be leased: `call_bytes` in all, `share_bytes` of what no lease holds yet."""

    call_bytes: int
    share_bytes: int


class Grant(NamedTuple):
    """Blocks to lease and the rows of their parts, in key then part order. `cut`: there was no room for all."""

    blocks: Rows
    parts: Rows
    size_bytes: int
    cut: bool


class FewSight:
    """The sight of a few keys."""

    __slots__ = ("_at", "_blocks", "_parts", "_records", "states")

    def __init__(self, records: Records, ask: Ask) -> None:
        self._records, self._parts = records, ask.parts
        self.states = bytearray(len(ask.keys))
        self._at: list[int] = []  # Indexes of the keys that are HOT, and their blocks.
        self._blocks: list[int] = []
        get, is_prefix = ask.namespace.blocks.get, ask.coverage is Coverage.PREFIX
        for at, key in enumerate(ask.keys):
            block = get(key)
            state = MISSING if block is None else self._state(block, ask)
            if block is not None and state == HOT:
                self._at.append(at)
                self._blocks.append(block)
            elif is_prefix:
                self.states[at] = state
                break
            self.states[at] = state

    def _state(self, block: int, ask: Ask) -> int:
        cell, state = self._records.blocks.cell, self._records.parts.cell.state
        ttl_s = ask.namespace.rules.ttl_s
        if ttl_s is not None and not cell.created[block] + ttl_s > ask.now:
            return MISSING
        first, parts = cell.first_part[block], ask.parts
        least = state[first + parts[0]] if len(parts) == 1 else min([state[first + part] for part in parts])
        return _BY_LEAST[least]

    def grant(self, end: int, room: Room) -> Grant:
        """Chooses the HOT blocks of keys[:end] that there is room for; the others of them become BUSY."""
        blocks = self._blocks if end == len(self.states) else self._blocks[: bisect_left(self._at, end)]
        if not blocks:
            return Grant([], [], 0, cut=False)
        cell, part_count = self._records.blocks.cell, len(self._parts)
        total = fresh = count = 0
        for block in blocks:
            size = cell.slot_units[block] * SLOT_UNIT_BYTES
            more = total + size * part_count
            if not cell.holds[block]:
                fresh += size * cell.present[block]
            if more > room.call_bytes or (fresh and fresh > room.share_bytes):
                break
            total, count = more, count + 1
        for at in self._at[count : len(blocks)]:
            self.states[at] = BUSY
        return Grant(blocks[:count], self._rows(blocks[:count]), total, count < len(blocks))

    def _rows(self, blocks: list[int]) -> list[int]:
        first, parts = self._records.blocks.cell.first_part, self._parts
        return [first[block] + part for block in blocks for part in parts]


class ManySight:
    """The sight of many keys."""

    __slots__ = ("_at", "_blocks", "_ready", "_records", "_rows", "states")

    def __init__(self, records: Records, ask: Ask) -> None:
        self._records = records
        self._at, self._blocks = _known(records, ask)
        self._ready, reserved, self._rows = _ready(records, self._blocks, ask)
        self.states = bytearray(len(ask.keys))
        view = np.frombuffer(self.states, np.uint8)
        view[self._at] = np.where(
            self._ready, np.uint8(HOT), np.where(reserved, np.uint8(IN_FLIGHT), np.uint8(MISSING))
        )

    def grant(self, end: int, room: Room) -> Grant:
        """As FewSight.grant."""
        wanted: Ids = np.flatnonzero(self._ready & (self._at < end)).astype(np.int32)
        if not len(wanted):
            return Grant([], [], 0, cut=False)
        columns, blocks = self._records.blocks, self._blocks[wanted]
        size = columns.slot_units[blocks].astype(np.int64) * SLOT_UNIT_BYTES
        total = np.cumsum(size * self._rows.shape[1])
        fresh = np.cumsum(np.where(columns.holds[blocks] == 0, size * columns.present[blocks], 0))
        fits = (total <= room.call_bytes) & ((fresh == 0) | (fresh <= room.share_bytes))
        count = len(fits) if fits.all() else int(np.argmin(fits))
        np.frombuffer(self.states, np.uint8)[self._at[wanted[count:]]] = BUSY
        size_bytes = int(total[count - 1]) if count else 0
        parts = self._rows[wanted[:count]].ravel()
        return Grant(as_rows(blocks[:count]), as_rows(parts), size_bytes, cut=count < len(wanted))


Sight: TypeAlias = "FewSight | ManySight"


def look(records: Records, ask: Ask) -> Sight:
    """Takes a sight of the keys."""
    is_few = len(ask.keys) * len(ask.parts) <= few.MOST_ROWS
    return FewSight(records, ask) if is_few else ManySight(records, ask)


def hot_prefix(states: bytearray) -> int:
    """How many leading keys are HOT."""
    return len(states) - len(states.lstrip(_HOT))


def _known(records: Records, ask: Ask) -> tuple[Ids, Ids]:
    """Returns (indexes of keys, their blocks) for keys in the index; PREFIX stops before the first that is not."""
    keys = list(ask.keys)
    if ask.coverage is Coverage.PREFIX:
        blocks = leading_blocks(records.blocks, ask.namespace, keys)
        return np.arange(len(blocks), dtype=np.int32), blocks
    blocks = each_block(ask.namespace, keys)
    at = np.flatnonzero(blocks >= 0).astype(np.int32)
    return at, blocks[at]


def _ready(records: Records, blocks: Ids, ask: Ask) -> tuple[Flags, Flags, Ids]:
    """Returns, for each block, whether all its parts asked for are present, whether it is not but the missing ones are
    being written, and the rows of those parts (shape: blocks x parts)."""
    columns, ttl_s = records.blocks, ask.namespace.rules.ttl_s
    rows: Ids = columns.first_part[blocks][:, None] + np.array(ask.parts, np.int32)
    state = records.parts.state[rows]
    present = state == PRESENT
    ready = present.all(axis=1)
    reserved = ~ready & (present | (state == RESERVED)).all(axis=1)
    if ttl_s is not None:
        young = columns.created[blocks] + ttl_s > ask.now
        ready, reserved = ready & young, reserved & young
    return ready, reserved, rows
