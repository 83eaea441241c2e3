"""Which blocks are being deleted: not to be found from the moment that was asked for.

Rules
- Deletions are done in the order they were asked for, each known by its ticket. One is over when a later or the same
  ticket is done.
- What could not be deleted stays hidden, until it is tried again with success.
- Asked for by callers that take turns, ended by the one thread that deletes; any thread asks, without a lock.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_OVER = 1 << 16  # Marks that are kept though they are over.


class Marks:
    def __init__(self) -> None:
        self._last = self._done = 0
        self._keys: dict[tuple[bytes, bytes], int] = {}
        self._namespaces: dict[bytes, int] = {}
        self.undone_keys: dict[bytes, set[bytes]] = {}
        self.undone_purges: dict[bytes, float] = {}  # Digest -> before when.

    def __bool__(self) -> bool:
        """Whether anything is hidden."""
        return self._done != self._last or bool(self.undone_keys or self.undone_purges)

    def ask(self, digest: bytes, keys: Sequence[bytes] | None) -> int:
        """Hides blocks, or with None all of a namespace; returns the ticket."""
        if self._done == self._last or len(self._keys) + len(self._namespaces) > _MOST_OVER:
            done = self._done
            self._keys = {place: ticket for place, ticket in self._keys.items() if ticket > done}
            self._namespaces = {place: ticket for place, ticket in self._namespaces.items() if ticket > done}
        ticket = self._last + 1
        if keys is None:
            self._namespaces[digest] = ticket
        else:
            self._keys.update(dict.fromkeys([(digest, key) for key in keys], ticket))
        self._last = ticket
        return ticket

    def done(self, ticket: int) -> None:
        """Ends all that was asked for up to this ticket."""
        self._done = ticket

    def failed(self, digest: bytes, keys: Sequence[bytes] | None, before: float) -> None:
        """Keeps hidden what could not be deleted; with None, what was made before a time."""
        if keys is None:
            self.undone_purges[digest] = max(before, self.undone_purges.get(digest, before))
        else:
            self.undone_keys[digest] = self.undone_keys.get(digest, set()) | set(keys)

    def hides(self, digest: bytes, key: bytes) -> bool:
        done = self._done
        if self._namespaces.get(digest, 0) > done or self._keys.get((digest, key), 0) > done:
            return True
        return digest in self.undone_purges or key in self.undone_keys.get(digest, ())
