"""How `kvstore serve` asks for streaming stores, by executing itself anew, and for short slices of the CPU."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from kvstore.cli import exit_codes, main, serve
from kvstore.cli.streaming import FROM_BYTES, TUNABLE, VARIABLE, ask_for_streaming_stores, with_streaming_stores
from kvstore.service.scheduling import SLICE_NS, ask_for_short_slices
from tests.integration.server_process import ServerProcess, serving

T = TypeVar("T")
OURS = f"{TUNABLE}={FROM_BYTES:#x}"
OTHER = "glibc.malloc.tcache_count=3"
IS_GLIBC = platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
only_glibc = pytest.mark.skipif(not IS_GLIBC, reason="needs glibc on x86-64")

# -- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("", OURS), (OTHER, f"{OTHER}:{OURS}")])
def test_the_setting_is_added_to_what_is_there(before: str, after: str) -> None:
    environment = {"PATH": "/bin", VARIABLE: before}
    assert with_streaming_stores(environment) == {"PATH": "/bin", VARIABLE: after}
    assert environment == {"PATH": "/bin", VARIABLE: before}


def test_an_environment_without_any_setting_gets_this_one() -> None:
    assert with_streaming_stores({}) == {VARIABLE: OURS}


@pytest.mark.parametrize("value", [OURS, f"{TUNABLE}=0x4040", f"{OTHER}:{TUNABLE}=1", f"{TUNABLE}=1:{OTHER}"])
def test_a_setting_that_is_there_is_kept_whatever_its_value(value: str) -> None:
    assert with_streaming_stores({VARIABLE: value}) is None


@pytest.mark.parametrize("before", [{}, {VARIABLE: OTHER}])
def test_what_was_added_is_found_the_next_time(before: Mapping[str, str]) -> None:
    """Else the program would execute itself anew for ever."""
    made = with_streaming_stores(before)
    assert made is not None
    assert with_streaming_stores(made) is None


@only_glibc
@pytest.mark.parametrize("before", [{}, {VARIABLE: OTHER}, {VARIABLE: f"{OTHER}:"}])
def test_the_c_library_takes_the_setting_and_those_beside_it(before: Mapping[str, str]) -> None:
    loader = "/lib64/ld-linux-x86-64.so.2"
    told = subprocess.run(
        [loader, "--list-tunables"], env=with_streaming_stores(before), capture_output=True, text=True, timeout=20
    )
    if told.returncode:
        pytest.skip("this C library does not tell its settings")
    lines = told.stdout.splitlines()
    assert [line for line in lines if line.startswith(f"{TUNABLE}: {FROM_BYTES:#x} ")]
    assert not before or [line for line in lines if line.startswith("glibc.malloc.tcache_count: 0x3 ")]


# -- when it executes anew -------------------------------------------------------------------------------------------


@dataclass
class Started:
    """What `kvstore serve` did: executions of another program, and servers run."""

    executed: list[tuple[str, list[str], dict[str, str]]] = field(default_factory=list)
    served: int = 0
    failure: OSError | None = None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """A process that was started as `kvstore serve --hot.capacity 8MiB`, with neither end of it real."""
    told = Started()

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        told.executed.append((path, words, environment))
        if told.failure is not None:
            raise told.failure

    def run(*_: object) -> int:
        told.served += 1
        return exit_codes.OK

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(serve, "_serve", run)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["/bin/kvstore", "serve", "--hot.capacity", "8MiB"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "/bin/kvstore", "serve", "--hot.capacity", "8MiB"])
    return told


def test_a_process_started_to_serve_executes_itself_anew_as_it_was_started(started: Started) -> None:
    assert main() == exit_codes.OK
    ((path, words, environment),) = started.executed
    assert path == sys.executable
    assert words == [sys.executable, "-X", "dev", "/bin/kvstore", "serve", "--hot.capacity", "8MiB"]
    assert environment == {**os.environ, VARIABLE: OURS}
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("argv", [["pytest", "tests"], ["tool"], ["tool", "-x", "serve"], ["-c"]])
def test_code_that_calls_the_command_line_is_not_executed_anew(
    started: Started, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert main(["serve", "--hot.capacity", "8MiB"]) == exit_codes.OK
    assert (started.executed, started.served) == ([], 1)


@pytest.mark.parametrize(
    ("more", "code", "served"),
    [
        (["--check"], exit_codes.OK, 0),
        (["--shm.streaming_stores", "off"], exit_codes.OK, 1),
        (["--shm.streaming_stores", "maybe"], exit_codes.USAGE, 0),
        (["--no.such", "1"], exit_codes.USAGE, 0),
    ],
)
def test_nothing_is_executed_where_it_is_not_wanted(started: Started, more: list[str], code: int, served: int) -> None:
    sys.argv += more
    assert main() == code
    assert (started.executed, started.served) == ([], served)


@pytest.mark.parametrize(("machine", "libc"), [("aarch64", "glibc"), ("x86_64", ""), ("x86_64", "musl")])
def test_nothing_is_executed_where_the_c_library_has_no_such_setting(
    started: Started, machine: str, libc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "1"))
    assert main() == exit_codes.OK
    assert (started.executed, started.served) == ([], 1)


def test_nothing_is_executed_once_the_setting_is_there(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{TUNABLE}=0x4040")
    assert main() == exit_codes.OK
    assert (started.executed, started.served) == ([], 1)


def test_a_server_that_cannot_be_executed_anew_runs_on(started: Started) -> None:
    started.failure = PermissionError(13, "Permission denied")
    assert main() == exit_codes.OK
    assert (len(started.executed), started.served) == (1, 1)
    ask_for_streaming_stores([])


def test_what_can_be_read_once_only_is_not_read_again(started: Started, tmp_path: Path) -> None:
    """A restarted process would find a pipe empty, and run on defaults without a word."""
    pipe, plain = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    plain.touch()
    ask_for_streaming_stores([plain, pipe])
    ask_for_streaming_stores([plain, tmp_path / "gone"])
    assert started.executed == []
    ask_for_streaming_stores([plain])
    assert len(started.executed) == 1


# -- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def _environment(process: ServerProcess) -> str:
    """What the process that was started, and no child of it, has now, as :NAME=VALUE:NAME=VALUE:.

    Older C libraries write a zero over each colon of their settings, too.
    """
    return f":{Path(f'/proc/{process.process.pid}/environ').read_bytes().decode()}".replace("\0", ":")


def _command(process: ServerProcess) -> list[str]:
    return Path(f"/proc/{process.process.pid}/cmdline").read_bytes().decode().split("\0")[:-1]


@only_glibc
@pytest.mark.integration
@pytest.mark.usefixtures("without_settings")
def test_a_server_has_the_setting_under_the_pid_that_was_started() -> None:
    with serving() as process:
        assert f":{VARIABLE}={OURS}:" in _environment(process)
        started = process.process.args
        assert isinstance(started, list)
        assert _command(process)[1:] == started[1:]
        lines = process.stdout_text().splitlines()
        assert [line for line in lines if line.startswith("server.listen =")] == lines[:1], "it said things twice"
        process.terminate()
        assert process.process.wait(20) == exit_codes.OK


@only_glibc
@pytest.mark.integration
@pytest.mark.usefixtures("without_settings")
def test_a_server_that_is_told_not_to_has_no_setting() -> None:
    with serving({"shm.streaming_stores": "off"}) as process:
        assert f":{VARIABLE}=" not in _environment(process)


@only_glibc
@pytest.mark.integration
@pytest.mark.parametrize(
    ("given", "kept"),
    [(f"{TUNABLE}=0x200000", f"{TUNABLE}=0x200000"), (OTHER, f"{OTHER}:{OURS}")],
    ids=["this one", "another"],
)
def test_a_server_keeps_the_settings_it_is_given(given: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with serving() as process:
        environment = _environment(process)
    assert f":{VARIABLE}={kept}:" in environment
    assert environment.count(TUNABLE) == 1


@pytest.mark.integration
@pytest.mark.usefixtures("without_settings")
def test_a_configuration_from_a_pipe_is_heeded() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'[server]\nlisten = "127.0.0.1:0"\nadmin_listen = "127.0.0.1:0"\n[hot]\ncapacity = "8MiB"\n')
    os.close(writing)
    words = ["serve", "--config", f"/dev/fd/{reading}", "--bulk.listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore", *words], stdout=subprocess.PIPE, text=True, pass_fds=(reading,)
    ) as process:
        os.close(reading)
        assert process.stdout is not None
        told = list[str]()
        for line in process.stdout:
            told.append(line)
            if line.startswith("listening on"):
                break
        process.terminate()
        assert process.wait(20) == exit_codes.OK
    assert [line for line in told if line.startswith("hot.capacity = 8MiB")]


# -- slices of the CPU -----------------------------------------------------------------------------------------------


def _in_a_thread(ask: Callable[[], T]) -> T:
    """Asks in a thread of its own: what it is given ends with it."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join(20)
    (answer,) = answers
    return answer


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("nicer", [0, 3])
def test_short_slices_leave_the_priority_as_it_is(nicer: int) -> None:
    ours = _nice()

    def ask() -> tuple[bool, int, int]:
        os.setpriority(os.PRIO_PROCESS, 0, min(19, ours + nicer))
        before = _nice()
        return ask_for_short_slices(), before, _nice()

    is_taken, before, after = _in_a_thread(ask)
    assert isinstance(is_taken, bool)
    assert after == before == min(19, ours + nicer)
    assert _nice() == ours


@pytest.mark.skipif(
    platform.machine() != "x86_64" or tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="needs Linux 6.12, which tells how long slices are",
)
def test_the_kernel_has_taken_the_short_slices() -> None:
    def ask() -> tuple[bool, int]:
        is_taken, told = ask_for_short_slices(), ctypes.create_string_buffer(48)
        assert ctypes.CDLL(None).syscall(315, 0, told, 48, 0) == 0  # sched_getattr
        return is_taken, struct.unpack_from("=IIQiIQQQ", told.raw)[5]

    is_taken, slice_ns = _in_a_thread(ask)
    if not is_taken:
        pytest.skip("the kernel does not let us")
    assert slice_ns == SLICE_NS


def test_a_machine_whose_call_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("it called the kernel"))
    assert ask_for_short_slices() is False


def test_whoever_chose_another_policy_keeps_it() -> None:
    def ask() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return ask_for_short_slices(), os.sched_getscheduler(0)

    assert _in_a_thread(ask) == (False, os.SCHED_BATCH)
