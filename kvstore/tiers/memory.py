"""The arena's memory: one memfd, mapped once, prefaulted in the background."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading

_LOG = logging.getLogger("kvstore.memory")
SPARE_BYTES = 4096  # Beyond the capacity, for the health probe's own page.
_STEP_BYTES = 16 << 20
_MADV_HUGEPAGE = 14
_F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; Python names it from 3.12 on at the earliest.
_MADV_POPULATE_WRITE = 23  # Linux 5.14; faults pages in without changing what they hold.


class ArenaMemory:
    """Owns the arena's bytes from construction to `close`. `view` is writable; readers must not write through it.

    `read_only_fd` may be given to other processes: they can map it, but neither write nor resize what it shows, not
    even after opening it anew. None where the kernel cannot promise that. `close` closes it.
    """

    def __init__(self, capacity_bytes: int, *, huge_pages: str = "off") -> None:
        self.capacity_bytes = capacity_bytes
        self.fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, capacity_bytes + SPARE_BYTES)
        self._map = mmap.mmap(self.fd, capacity_bytes + SPARE_BYTES, mmap.MAP_SHARED)
        self.view = memoryview(self._map)
        self.read_only_fd = self._sealed()
        self.prefaulted_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if huge_pages == "try":
            self._ask_for_huge_pages()

    def prefault_in_background(self) -> None:
        """Starts a thread that takes every page from the kernel once, low addresses first, without the GIL."""
        self._thread = threading.Thread(target=self._prefault, name="kvstore-prefault", daemon=True)
        self._thread.start()

    @property
    def is_prefaulting(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stops prefaulting and gives the memory back, at the latest when the last view handed out is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(BufferError):  # A transfer that was cut off may still refer to its pieces.
            self.view.release()
            self._map.close()
        os.close(self.fd)
        if self.read_only_fd is not None:
            os.close(self.read_only_fd)

    def _sealed(self) -> int | None:
        """Allows no writable mapping but the one that is there, and no other size. Returns a descriptor for readers."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            _LOG.warning("the arena cannot be shared with readers: %s", error)
            return None

    def _prefault(self) -> None:
        populate = _Populate(self._address())
        for offset in range(0, self.capacity_bytes, _STEP_BYTES):
            if self._stop.is_set():
                return
            size = min(_STEP_BYTES, self.capacity_bytes - offset)
            try:
                if not populate(offset, size):
                    os.posix_fallocate(self.fd, offset, size)
            except OSError as error:
                # Not fatal: the pages are taken on first use, or that use fails where this did.
                _LOG.warning("prefault stopped at %d of %d bytes: %s", offset, self.capacity_bytes, error)
                return
            self.prefaulted_bytes = offset + size
        _LOG.info("prefaulted %d bytes", self.prefaulted_bytes)

    def _address(self) -> int:
        # from_buffer borrows the map only for this call; no export outlives it.
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _ask_for_huge_pages(self) -> None:
        try:
            self._map.madvise(_MADV_HUGEPAGE)
        except OSError as error:
            _LOG.warning("no huge pages for the arena: %s", error)


class _Populate:
    """Calls madvise(MADV_POPULATE_WRITE) through ctypes, which drops the GIL; false where the kernel lacks it."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def __call__(self, offset: int, size: int) -> bool:
        return bool(self._madvise(self._address + offset, size, _MADV_POPULATE_WRITE) == 0)
