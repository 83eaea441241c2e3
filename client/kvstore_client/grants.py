"""Where the parts under a read lease are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Grants:
    """Leased parts in key then part order.

    Shapes: each (n,) uint64. Units: `offsets` and `lengths` in bytes of the shard's arena; `checksums` xxh3-64.
    """

    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    def of(offsets: list[int], lengths: list[int], checksums: list[int]) -> Grants:
        return Grants(np.array(offsets, np.uint64), np.array(lengths, np.uint64), np.array(checksums, np.uint64))
