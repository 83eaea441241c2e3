"""A disk that does what failpoints say, for tests of a whole server."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.service.failpoints import Failpoints
from kvstore.tiers.device import Device, Disk


class FailingDisk:
    """A disk in front of another."""

    def __init__(self, disk: Disk, failpoints: Failpoints) -> None:
        self._disk, self._failpoints = disk, failpoints

    def names(self) -> list[str]:
        return self._disk.names()

    def open(self, name: str) -> Device:
        self._failpoints.hit_in_thread("disk.open")
        return FailingDevice(self._disk.open(name), self._failpoints)

    def create(self, name: str, size_bytes: int) -> Device:
        self._failpoints.hit_in_thread("disk.create")
        return FailingDevice(self._disk.create(name, size_bytes), self._failpoints)

    def remove(self, name: str) -> None:
        self._disk.remove(name)

    def free_bytes(self) -> int:
        return self._disk.free_bytes()


class FailingDevice:
    """A device of such a disk."""

    def __init__(self, device: Device, failpoints: Failpoints) -> None:
        self._device, self._failpoints = device, failpoints

    @property
    def size_bytes(self) -> int:
        return self._device.size_bytes

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._failpoints.hit_in_thread("disk.read")
        self._device.read(offset, pieces)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._failpoints.hit_in_thread("disk.write")
        self._device.write(offset, pieces)

    def sync(self) -> None:
        self._failpoints.hit_in_thread("disk.sync")
        self._device.sync()

    def close(self) -> None:
        self._device.close()
