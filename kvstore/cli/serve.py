"""`kvstore serve`: runs one shard until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.streaming import ask_for_streaming_stores
from kvstore.config import Address, Config, check_memory, load_config, options, startup_lines
from kvstore.service.failpoints import ENVIRONMENT, Failpoints
from kvstore.service.scheduling import ask_for_short_slices

_LOG = logging.getLogger("kvstore.serve")
# How long a thread that reads or copies waits for the interpreter lock before the event loop is asked to pass it on.
# Python's own 5 ms are as long as the disk takes for what is read at once.
SWITCH_S = 0.001


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="run one shard",
        description="Runs one shard until SIGTERM or SIGINT: then it admits nothing new, lets leases end and exits 0. "
        "Options come from flags, then KVSTORE_* variables, then the file, then the defaults shown here.",
        epilog="examples:\n  kvstore serve --hot.capacity 64GiB\n  kvstore serve --config kvstore.toml --check\n"
        "  KVSTORE_HOT__CAPACITY=64GiB kvstore serve --server.listen 10.0.0.5:7070",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file with options (also: KVSTORE_CONFIG)")
    parser.add_argument("--check", action="store_true", help="check the configuration, print it and exit")
    for option in options():
        parser.add_argument(
            option.flag, dest=f"option:{option.key}", metavar="VALUE", help=option.help.replace("%", "%%")
        )


def run(arguments: argparse.Namespace) -> int:
    from kvstore.build import warm_keys
    from kvstore.service.tls import load_tls

    try:
        config = _config(vars(arguments), os.environ)
        failpoints = Failpoints(os.environ.get(ENVIRONMENT, ""))
        load_tls(config)  # Its faults belong to these, before memory is taken, and to --check.
        warm_keys(config)
    except (ValueError, OSError) as error:  # ConfigError and BadKeys are of the former.
        print(f"kvstore serve: {error}", file=sys.stderr)
        return exit_codes.USAGE
    if config.shm.streaming_stores == "try" and not arguments.check:
        ask_for_streaming_stores(read=_files(vars(arguments)["config"], os.environ, config))
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for line in startup_lines(config):
        print(line)
    for warning in [*check_memory(config, _available_bytes()), *_exposure(config)]:
        _LOG.warning("%s", warning)
    if arguments.check:
        return exit_codes.OK
    return _serve(config, failpoints)


def _files(chosen: Path | None, environment: Mapping[str, str], config: Config) -> list[Path]:
    """Returns the files that the configuration was read from."""
    named = [chosen, environment.get("KVSTORE_CONFIG"), config.tls.cert, config.tls.key, config.tls.client_ca]
    if not config.warm.encryption_key.startswith("env:"):
        named.append(config.warm.encryption_key)
    return [Path(name) for name in named if name]


def _config(chosen: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    flags = {k.removeprefix("option:"): v for k, v in chosen.items() if k.startswith("option:") and v is not None}
    return load_config(chosen["config"], environment, flags | _unknown(chosen["unknown"]))


def _unknown(words: Sequence[str]) -> dict[str, str]:
    """Unknown flags as options of that name, so that the loader tells them with all other faults."""
    found: dict[str, str] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, _, value = word.removeprefix("--").partition("=")
            found[key] = value
        elif key:
            found[key] = word
        else:
            found[word] = ""
    return found


def _serve(config: Config, failpoints: Failpoints) -> int:
    import uvloop

    from kvstore.tiers.sealing import WrongKey

    try:
        return int(uvloop.run(_run(config, failpoints)))
    except (OSError, MemoryError, WrongKey) as error:  # The arena, its tables, an address or a folder cannot be had.
        print(f"kvstore serve: {error}", file=sys.stderr)
        return exit_codes.FAILED


async def _run(config: Config, failpoints: Failpoints) -> int:
    from kvstore.build import build_server, channel_places
    from kvstore.service.grpc_door import GRPC_LOGGER, DepartedCallers
    from kvstore.tiers.memory import ArenaMemory
    from kvstore_wire.malloc import keep_freed_memory

    logging.getLogger(GRPC_LOGGER).addFilter(DepartedCallers())
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_S)
    memory = ArenaMemory(config.hot.capacity, huge_pages=config.hot.huge_pages)
    if config.hot.prefault == "background":
        memory.prefault_in_background()
    server = build_server(config, memory, failpoints)
    ask_for_short_slices()  # After the copying threads were made: theirs are long.
    bound = await server.start(config.server.listen, config.server.admin_listen, channel_places(config))
    # The tables stay for ever: without this each full collection walks every stored key.
    gc.collect()
    gc.freeze()
    if bound.channel:
        print(f"fast channel on {', '.join(bound.channel)}")
    print(f"listening on {', '.join(bound.store)}; admin on {', '.join(bound.admin)}", flush=True)
    progress = asyncio.create_task(_show_prefault(memory, stopping))
    await stopping.wait()
    await progress
    await server.drain(config.server.drain_timeout)
    await server.stop()
    memory.close()
    print("stopped", flush=True)
    return exit_codes.OK


async def _show_prefault(memory: Any, stopping: asyncio.Event) -> None:
    """Prints how far prefaulting is, every tenth of the arena."""
    shown, running = 0, True
    while running and not stopping.is_set():
        running = memory.is_prefaulting  # Read first, so that the last tenth is shown too.
        tenth = 10 * memory.prefaulted_bytes // memory.capacity_bytes
        if tenth > shown:
            shown = tenth
            print(f"prefaulted {10 * tenth} % of {memory.capacity_bytes} bytes", flush=True)
        await asyncio.sleep(0.1 if running else 0)


def _exposure(config: Config) -> list[str]:
    """Warnings for ports that other hosts can reach: only a certificate authenticates callers."""
    addresses: tuple[Address, ...] = (
        *config.server.listen,
        *config.server.admin_listen,
        *(config.bulk.listen or ()),
    )
    open_to_others = [str(a) for a in addresses if not a.is_loopback()]
    if not open_to_others or config.tls.client_ca:
        return []
    lacking = "callers are not authenticated" + ("" if config.tls.cert else " and nothing is encrypted")
    return [f"{', '.join(open_to_others)} can be reached from other hosts, and {lacking}"]


def _available_bytes() -> int:
    """Memory that can be had without swapping: what the machine has left, or the container's limit if that is less."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    left = next(int(fields[1]) * 1024 for fields in lines if fields[0] == "MemAvailable:")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return left if text == "max" else min(left, int(text))
