"""Where the Unix socket of the fast channel is: what `shm.socket` comes to for one server.

Whoever can write to a socket's folder can put a socket of their own in its place, so a folder that the server chose
itself must belong to the server's uid, and to nobody else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstore.config.address import checked_unix_path
from kvstore.config.place_kinds import AUTO, OFF

RUNTIME_DIR_ENV = "XDG_RUNTIME_DIR"
TEMPORARY = Path("/tmp")
FOLDER_MODE = 0o700
_OTHERS = 0o077


class SocketPathError(OSError):
    """There is no safe place for the socket."""


def shm_socket_path(
    setting: str, *, grpc_port: int, uid: int, environ: Mapping[str, str], temporary: Path = TEMPORARY
) -> str | None:
    """Returns the socket's path, None if the setting is off; makes the folder that `auto` needs in `temporary`.

    `auto` is `$XDG_RUNTIME_DIR/kvstore-<port>.sock` where that folder is this uid's, else
    `/tmp/kvstore-<uid>/<port>.sock`.
    Raises: SocketPathError where `auto` has no port, no safe folder, or a path longer than a socket's may be.
    Source: the XDG base directory specification, for when its folder may be used.
    """
    if setting == OFF:
        return None
    if setting != AUTO:
        return setting
    if not grpc_port:
        raise SocketPathError(
            f"shm.socket: {AUTO} takes its name from a TCP port in server.listen, which has none: write a path or {OFF}"
        )
    folder = environ.get(RUNTIME_DIR_ENV, "")
    if folder.startswith("/") and _fault(Path(folder), uid) == "":
        return _checked(Path(folder, f"kvstore-{grpc_port}.sock"))
    return _checked(private_folder(temporary / f"kvstore-{uid}", uid) / f"{grpc_port}.sock")


def private_folder(folder: Path, uid: int) -> Path:
    """Returns `folder`, made if it is absent. Raises SocketPathError unless it is the uid's alone."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except OSError as error:
        raise SocketPathError(f"shm.socket: {folder} cannot be made: {error.strerror}; write a path or {OFF}") from None
    fault = _fault(folder, uid)
    if fault:
        raise SocketPathError(f"shm.socket: {folder} {fault}; write a path or {OFF}")
    return folder


def _fault(folder: Path, uid: int) -> str:
    """What makes the folder unsafe, "" if nothing does. A link is never followed: its owner may turn it elsewhere."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != uid:
        return f"belongs to uid {found.st_uid}, not to {uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"has mode {mode:04o}, and others may not use it ({FOLDER_MODE:04o})" if mode & _OTHERS else ""


def _checked(path: Path) -> str:
    try:
        return checked_unix_path(str(path))
    except ValueError as error:
        raise SocketPathError(f"shm.socket: {AUTO} comes to {path}: {error}; write a shorter path or {OFF}") from None
