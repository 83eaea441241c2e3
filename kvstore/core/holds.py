"""Holds: how many leases name each block. Sizes here are in slot units of present parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.core.columns import BlockColumns, Ids
from kvstore.core.few import Rows


class Idle(NamedTuple):
    """Blocks whose last hold ended. `gone` were removed meanwhile; of the others, the kept, `empty` have no part, and
    `is_parked` tells whether any waits to come back to its queue. Blocks are in ascending order."""

    gone: list[int]
    empty: list[int]
    gone_units: int
    kept_units: int
    is_parked: bool


def add_holds(columns: BlockColumns, blocks: Rows) -> int:
    """Adds a hold to each block, which may be named more than once; returns the units that nothing held before."""
    if isinstance(blocks, list):
        return _add_few(columns, blocks)
    holds = columns.holds
    fresh = np.unique(blocks[holds[blocks] == 0])
    np.add.at(holds, blocks, 1)
    return _units(columns, fresh)


def take_holds(columns: BlockColumns, blocks: Rows) -> Idle:
    """Takes a hold from each block, which may be named more than once."""
    if isinstance(blocks, list):
        return _take_few(columns, blocks)
    holds = columns.holds
    np.subtract.at(holds, blocks, 1)
    idle = np.unique(blocks[holds[blocks] == 0])
    doomed = columns.doomed[idle]
    gone, kept = idle[doomed], idle[~doomed]
    empty = kept[columns.present[kept] == 0]
    is_parked = bool((columns.queue_place.at[kept] < 0).any())
    return Idle(gone.tolist(), empty.tolist(), _units(columns, gone), _units(columns, kept), is_parked)


def _add_few(columns: BlockColumns, blocks: list[int]) -> int:
    cell, units = columns.cell, 0
    for block in blocks:
        holds = cell.holds[block]
        if not holds:
            units += cell.present[block] * cell.slot_units[block]
        cell.holds[block] = holds + 1
    return units


def _take_few(columns: BlockColumns, blocks: list[int]) -> Idle:
    cell, place = columns.cell, columns.queue_place.cell
    idle: list[int] = []
    for block in blocks:
        cell.holds[block] = left = cell.holds[block] - 1
        if not left:
            idle.append(block)
    gone, empty = list[int](), list[int]()
    gone_units = kept_units = 0
    is_parked = False
    for block in sorted(idle):
        present = cell.present[block]
        if cell.doomed[block]:
            gone.append(block)
            gone_units += present * cell.slot_units[block]
            continue
        if not present:
            empty.append(block)
        kept_units += present * cell.slot_units[block]
        is_parked |= place[block] < 0
    return Idle(gone, empty, gone_units, kept_units, is_parked)


def _units(columns: BlockColumns, blocks: Ids) -> int:
    units = columns.present[blocks].astype(np.int64) * columns.slot_units[blocks]
    return int(units.sum())
