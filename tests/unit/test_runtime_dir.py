"""Where the Unix socket of the fast channel goes, and which folders are too open for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvstore.config import SocketPathError, shm_socket_path

UID = os.getuid()


def path_of(
    temporary: Path, setting: str = "auto", *, port: int = 7070, uid: int = UID, runtime: str | None = None
) -> str | None:
    environ = {"HOME": "/"} if runtime is None else {"XDG_RUNTIME_DIR": runtime}
    return shm_socket_path(setting, grpc_port=port, uid=uid, environ=environ, temporary=temporary)


def private(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


def test_off_is_none_and_a_path_is_itself(tmp_path: Path) -> None:
    assert path_of(tmp_path, "off") is None
    assert path_of(tmp_path, "/run/kv.sock", port=0, runtime=str(tmp_path)) == "/run/kv.sock"
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_the_runtime_folder_of_this_uid(tmp_path: Path) -> None:
    runtime = private(tmp_path / "run")
    assert path_of(tmp_path, runtime=str(runtime)) == f"{runtime}/kvstore-7070.sock"
    assert list(tmp_path.iterdir()) == [runtime]


def test_auto_makes_a_folder_of_its_own_where_there_is_none(tmp_path: Path) -> None:
    for _ in range(2):  # The second time it is there.
        assert path_of(tmp_path) == f"{tmp_path}/kvstore-{UID}/7070.sock"
    made = (tmp_path / f"kvstore-{UID}").lstat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid) == (0o700, UID)


@pytest.mark.parametrize("runtime", ["", "run", "/nowhere/at/all"])
def test_a_runtime_folder_that_is_none_is_passed_over(tmp_path: Path, runtime: str) -> None:
    assert path_of(tmp_path, runtime=runtime) == f"{tmp_path}/kvstore-{UID}/7070.sock"


def test_a_runtime_folder_that_is_open_or_a_link_is_passed_over(tmp_path: Path) -> None:
    open_folder = private(tmp_path / "open")
    open_folder.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(private(tmp_path / "target"))
    for runtime in (open_folder, link):
        assert path_of(tmp_path, runtime=str(runtime)) == f"{tmp_path}/kvstore-{UID}/7070.sock"


def test_a_folder_of_another_uid_is_refused(tmp_path: Path) -> None:
    private(tmp_path / f"kvstore-{UID + 1}")
    with pytest.raises(SocketPathError, match=rf"shm\.socket: .* belongs to uid {UID}, not to {UID + 1}"):
        path_of(tmp_path, uid=UID + 1)


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    private(tmp_path / f"kvstore-{UID}").chmod(0o711)
    with pytest.raises(SocketPathError, match="has mode 0711, and others may not use it"):
        path_of(tmp_path)


def test_a_link_or_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    place = tmp_path / f"kvstore-{UID}"
    place.symlink_to(private(tmp_path / "target"))
    with pytest.raises(SocketPathError, match="is not a folder"):
        path_of(tmp_path)
    place.unlink()
    place.touch()
    with pytest.raises(SocketPathError, match="cannot be made: File exists"):
        path_of(tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(SocketPathError, match="cannot be made: No such file or directory"):
        path_of(tmp_path / "absent")


def test_a_path_is_no_longer_than_a_sockets_may_be(tmp_path: Path) -> None:
    tail_bytes = len("/kvstore-7070.sock")
    folder = private(tmp_path / "x")
    longest = private(folder / ("y" * (107 - tail_bytes - len(f"{folder}/"))))
    found = path_of(tmp_path, runtime=str(longest))
    assert found is not None
    assert len(found) == 107
    longer = private(folder / ("z" * (108 - tail_bytes - len(f"{folder}/"))))
    with pytest.raises(SocketPathError, match="the path has 108 bytes, the limit is 107"):
        path_of(tmp_path, runtime=str(longer))


def test_auto_needs_a_port(tmp_path: Path) -> None:
    with pytest.raises(SocketPathError, match=r"TCP port in server\.listen"):
        path_of(tmp_path, port=0)
