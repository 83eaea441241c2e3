"""Open devices of segments, lent to those who read them, and given up only when nobody does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.tiers.device import Device, Disk
from kvstore.tiers.recovery import name_of
from kvstore.tiers.sealing import Keyring, SegmentKey
from kvstore.tiers.writer import key_in


class Gone(OSError):
    """The segment has another life by now, or none."""


@dataclass(eq=False)
class Lent:
    """A segment's device, and the key of the life that it is in, None where that is not sealed."""

    device: Device
    key: SegmentKey | None
    users: int = 0


class Lending:
    """Owns the devices from `add`, or the first use, to `leave` or `close`.

    `holds`: whether a life (number, sequence) has not been given up.
    """

    def __init__(
        self, disk: Disk, holds: Callable[[int, int], object], *, store_id: bytes, keyring: Keyring | None
    ) -> None:
        self._disk, self._holds = disk, holds
        self._store_id, self._keyring = store_id, keyring
        self._changed = threading.Condition()
        self._open: dict[tuple[int, int], Lent] = {}

    def add(self, life: tuple[int, int], device: Device, key: SegmentKey | None) -> None:
        """Takes the device of a life that begins."""
        with self._changed:
            self._open[life] = Lent(device, key)

    @contextmanager
    def lent(self, life: tuple[int, int]) -> Iterator[Lent]:
        """Lends the device of a life, which goes on for as long. Raises OSError, of it FileNotFoundError and Gone.

        Raises BadSegment where the segment is not what it was, and WrongKey.
        """
        opened = self._take(life)
        try:
            yield opened
        finally:
            with self._changed:
                opened.users -= 1
                self._changed.notify_all()

    def leave(self, life: tuple[int, int], give_up: Callable[[], bool]) -> bool:
        """Calls `give_up`, and returns its result when nobody uses the life any more."""
        with self._changed:
            result = give_up()
            opened = self._open.get(life)
            while opened is not None and opened.users:
                self._changed.wait()
            self._open.pop(life, None)
        if opened is not None:
            opened.device.close()
        return result

    def close(self) -> None:
        """Gives everything back; nobody may use anything. Idempotent."""
        while self._open:
            self._open.popitem()[1].device.close()

    def _take(self, life: tuple[int, int]) -> Lent:
        with self._changed:
            if not self._holds(*life):
                raise Gone(f"segment {life[0]} has another life")
            opened = self._open.get(life)
            if opened is not None:
                opened.users += 1
                return opened
        device = self._disk.open(name_of(life[0]))
        try:
            key = key_in(device, self._keyring, store_id=self._store_id, life=life)
        except BaseException:
            device.close()
            raise
        with self._changed:
            if life not in self._open and self._holds(*life):
                made = self._open[life] = Lent(device, key, users=1)
                return made
        device.close()
        return self._take(life)
