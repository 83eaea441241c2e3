"""Users of this machine, as options name them: by number, or as the server's own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstore.config.faults import shown

SAME = "same"
# Linux: uid_t has 32 bits, and its highest value means "no user" to chown(2).
MAX_UID = 2**32 - 2

_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class Uids:
    """A set of users. `listed` are their numbers; None stands for the server's own."""

    listed: tuple[int, ...] | None = None

    def admits(self, uid: int, *, own_uid: int) -> bool:
        """Whether `uid` is among them, asked of a server that runs as `own_uid`."""
        return uid == own_uid if self.listed is None else uid in self.listed


def checked_uid(item: object) -> int:
    """Returns a uid that is written as a number or as text. Raises ValueError with the reason."""
    if isinstance(item, str) and _NUMBER.fullmatch(item):
        item = int(item)
    if not isinstance(item, int) or isinstance(item, bool):
        raise ValueError(f"{shown(item)} is not a uid: write a whole number, for example 1000")
    if not 0 <= item <= MAX_UID:
        raise ValueError(f"{item} is outside 0..{MAX_UID}")
    return item
