"""A file descriptor that is readable while completions wait: an eventfd, or a pipe where there is none."""

from __future__ import annotations

import os
from contextlib import suppress


class Wakeup:
    """Owns its descriptors for as long as it lives. `set` and `clear` may be called any number of times."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        # An eventfd wants exactly eight bytes, a pipe takes them as well; a full pipe is readable already.
        with suppress(BlockingIOError):
            os.write(self._write, (1).to_bytes(8, "little"))

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def __del__(self) -> None:
        os.close(self._read)
        if self._write != self._read:
            os.close(self._write)
