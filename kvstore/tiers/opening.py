"""Opens a folder of the warm tier: whose it is, what it holds, and the tier that serves it.

    <folder>/identity  segments/LOCK  segments/<number>.seg  index/  deleted.log          (docs/storage.md)

Rules
- Nothing is changed in a folder that another process uses, that has something else in it, or that is of another format:
  it is refused with a text that names it.
- All else is a cache's to lose and no reason not to start: damage costs what is damaged, and a disk so full that not
  even the index could be opened costs the segments that were written first.
- All of it blocks.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvstore.core.segments import SegmentBook, SegmentRules
from kvstore.tiers.device import Disk, Folder, FolderInUse
from kvstore.tiers.identity import FolderRefused, Identity, is_untouched, read_identity
from kvstore.tiers.index import Index, IndexBroken
from kvstore.tiers.recovery import Clock, Recovered, recover
from kvstore.tiers.sealing import BadKeys, Keyring, load_keys, read_keys
from kvstore.tiers.segment import BadSegment
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.warm import Clocks, WarmSettings, WarmTier
from kvstore.tiers.writer import sealed_life

_LOG = logging.getLogger("kvstore.opening")
SEGMENTS, INDEX, DELETED = "segments", "index", "deleted.log"
_SEGMENT = re.compile(r"\d{10}\.seg")
ROOM_BYTES = 16 << 20  # For the small files that an index makes each time it is opened.


@dataclass(frozen=True, kw_only=True)
class OpenSettings:
    """`cache_bytes` bounds what the index keeps in memory, `rewrite_share` is that of SegmentRules.

    `keyring`: see `keys_at`; its first key seals what is written. `wrap`: stands between the tier and its disk.
    """

    path: Path
    capacity_bytes: int
    segment_bytes: int
    cache_bytes: int
    rewrite_share: float = SegmentRules.rewrite_share
    keyring: Keyring | None = None
    on_wrong_key: Literal["refuse", "empty"] = "refuse"
    on_broken_index: Literal["rebuild", "refuse"] = "rebuild"
    tier: WarmSettings = field(default_factory=WarmSettings)
    wrap: Callable[[Disk], Disk] = lambda disk: disk


@dataclass(frozen=True)
class Opened:
    """A tier, and what was found for it."""

    tier: WarmTier
    found: Recovered
    identity: Identity
    folder: Folder

    def close(self, *, timeout_s: float) -> None:
        """Closes the tier and lets other processes have the folder: not before the last write to it has ended.

        Where the disk hangs for longer than `timeout_s` that is the end of this process. Idempotent.
        """
        self.tier.close(timeout_s=timeout_s)
        if not self.tier.stalled_s:
            self.folder.close()

    def __str__(self) -> str:
        """What was found, in one line for a log."""
        found = ", ".join(f"{name} {count}" for name, count in sorted(self.found.counts.items()))
        rebuilt = ", its index made anew" if self.found.rebuilt else ""
        return f"{self.found.block_count} blocks{rebuilt}{f' ({found})' if found else ''}"


def open_warm(settings: OpenSettings, *, clocks: Clocks) -> Opened:
    """Opens the folder, which is made where it is absent; the caller closes what it gets. Blocks.

    Raises: FolderInUse where another process has it. FolderRefused where it is not the tier's, is of another format, or
    has a broken index that is to be kept. WrongKey where it has segments sealed with a key that `keyring` lacks.
    OSError where it cannot be made, read or written.
    """
    path = settings.path
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = _known(path)  # Before the lock, which would leave something in a folder that is another's.
    with ExitStack() as stack:
        folder = _locked(path)
        stack.callback(folder.close)
        identity = _known(path) or identity  # Another process may have made it meanwhile.
        given_up = 0 if identity is None else _make_room(folder, path / INDEX, identity)
        _remove_unfinished(path)
        identity = _settled(path, identity, settings.segment_bytes)
        _warn_of_room(path, folder, settings.capacity_bytes)
        tombstones = Tombstones(path / DELETED)
        stack.callback(tombstones.close)
        book, found = _recovered(folder, tombstones, identity, settings, clocks)
        stack.callback(found.index.close)
        if given_up:
            found.counts["full_disk_segments"] += given_up
        tier = WarmTier(
            settings.wrap(folder),
            book,
            found.index,
            tombstones,
            namespaces=found.namespaces,
            store_id=identity.store_id,
            clocks=clocks,
            settings=settings.tier,
            keyring=settings.keyring,
        )
        stack.pop_all()
    opened = Opened(tier, found, identity, folder)
    _LOG.info("%s holds %s", path, opened)
    return opened


def keys_at(place: str, environment: Mapping[str, str]) -> Keyring | None:
    """Returns the keys of a place, None where that is empty: the path of a file, or env:NAME for a variable's value.

    Raises: BadKeys and OSError; neither says anything of a key.
    """
    if not place.startswith("env:"):
        return load_keys(Path(place)) if place else None
    name = place.removeprefix("env:")
    try:
        return read_keys(environment[name])
    except KeyError:
        raise BadKeys(f"the environment variable {name} is not set") from None
    except BadKeys as error:
        raise BadKeys(f"the environment variable {name}: {error}") from None


def _known(path: Path) -> Identity | None:
    """Returns whose the folder is, None where it is new. Raises FolderRefused and OSError."""
    identity = read_identity(path)
    if identity is None and not is_untouched(path, segments=SEGMENTS):
        raise FolderRefused(
            f"{path} has files in it and none that says that they are the warm tier's: take an empty folder, "
            "or one that does not exist"
        )
    return identity


def _locked(path: Path) -> Folder:
    try:
        return Folder(path / SEGMENTS)
    except FolderInUse:
        raise FolderInUse(f"another process uses {path}: each server needs a folder of its own") from None


def _settled(path: Path, identity: Identity | None, segment_bytes: int) -> Identity:
    """Writes down whose the folder is, where that is new, and how large its segments are. Raises OSError."""
    if identity is None:
        identity = Identity.new(segment_bytes)
        identity.write(path)
    elif identity.segment_bytes != segment_bytes:
        size = identity.segment_bytes
        _LOG.warning("%s has segments of %d bytes, now %d: what it holds is given up", path, size, segment_bytes)
        identity = Identity(identity.store_id, segment_bytes)
        identity.write(path)
    return identity


def _recovered(
    folder: Folder, tombstones: Tombstones, identity: Identity, settings: OpenSettings, clocks: Clocks
) -> tuple[SegmentBook, Recovered]:
    """Fills a book with what is there. An index that breaks while it is read is treated as one that cannot be opened.

    Raises FolderRefused, WrongKey and OSError.
    """
    path = settings.path / INDEX
    rules = SegmentRules(segment_bytes=settings.segment_bytes, rewrite_share=settings.rewrite_share)

    def attempt() -> tuple[SegmentBook, Recovered]:
        book = SegmentBook(rules, settings.capacity_bytes)
        clock = Clock(clocks.now(), clocks.wall())
        found = recover(
            folder,
            book,
            tombstones,
            index_path=path,
            cache_bytes=settings.cache_bytes,
            store_id=identity.store_id,
            clock=clock,
            keyring=settings.keyring,
            on_wrong_key=settings.on_wrong_key,
        )
        return book, found

    try:
        if settings.on_broken_index == "refuse" and path.exists():
            Index(path, cache_bytes=settings.cache_bytes).close()  # Before it is set aside.
        return attempt()
    except IndexBroken as error:
        broken = str(error)
    if settings.on_broken_index == "refuse":
        raise FolderRefused(f"{path} is broken, and is to be kept: {broken}")
    _LOG.error("the index is set aside and made anew from the segments: %s", broken)
    _set_aside(path)
    try:
        return attempt()
    except IndexBroken as error:
        raise FolderRefused(f"{path} cannot be made: {error}") from None


def _set_aside(path: Path) -> None:
    """Keeps a broken index, the last one only, for whoever wants to know why. Raises OSError."""
    aside = path.with_name(f"{path.name}.broken")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _make_room(folder: Folder, index_path: Path, identity: Identity) -> int:
    """Gives up segments, those that were written first, until an index can be opened; returns how many.

    Opening it writes what its own log holds, and small files. Raises OSError.
    """
    needed = ROOM_BYTES + 2 * sum(log.stat().st_size for log in index_path.glob("*.log"))
    if folder.free_bytes() >= needed:
        return 0
    given_up = 0
    for name in _first_written(folder, identity):
        if folder.free_bytes() >= needed:
            break
        _LOG.warning("the disk is full: segment %s is given up, so that the index can be opened", name)
        folder.remove(name)
        given_up += 1
    return given_up


def _first_written(folder: Folder, identity: Identity) -> list[str]:
    """Returns the names of segments, those that hold nothing first and then by age; what cannot be read is left out."""
    found: list[tuple[int, str]] = []
    for name in folder.names():
        if not _SEGMENT.fullmatch(name):
            continue
        with suppress(OSError), closing(folder.open(name)) as device:
            try:
                life = sealed_life(device, store_id=identity.store_id, number=int(name[:10]))
            except BadSegment:
                life = None
            found.append((0 if life is None else life[0].sequence, name))
    return [name for _, name in sorted(found)]


def _remove_unfinished(path: Path) -> None:
    for entry in path.glob(".new-*"):
        with suppress(OSError):
            entry.unlink()


def _warn_of_room(path: Path, folder: Folder, capacity_bytes: int) -> None:
    free, held = folder.free_bytes(), _held_bytes(folder)
    if capacity_bytes > free + held:
        text = "%s may take %d bytes, more than the %d that it has and the %d that are free on its file system"
        _LOG.warning(text, path, capacity_bytes, held, free)


def _held_bytes(folder: Folder) -> int:
    """Returns what the segments take. Raises OSError."""
    return sum(os.stat(folder.path / name, follow_symlinks=False).st_blocks * 512 for name in folder.names())
