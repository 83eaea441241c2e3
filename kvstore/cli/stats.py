"""`kvstore stats`: what a server has done, over its admin port."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, reported
from kvstore.cli.connection import ADMIN, add_timeout_flag, add_tls_flags, duration_s, timeout_ms, tls_options
from kvstore.cli.stats_view import StatsView, print_view
from kvstore_client import ClientOptions

MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 60_000


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "stats",
        help="show hit rates, bytes, evictions, latencies and namespaces of a server",
        description="Shows counters since the server's start, over its admin port.",
        epilog="examples:\n"
        "  kvstore stats\n"
        "  kvstore stats --watch --interval 2s\n"
        "  kvstore stats --json | jq .counters.read_bytes\n"
        "  kvstore stats --config\n\n"
        "exit codes: 0 shown, 2 bad arguments, 3 no server",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--admin", metavar="ADDRESS", default=ADMIN, help="the server's admin port (default: %(default)s)"
    )
    parser.add_argument("--watch", action="store_true", help="show again and again, until Ctrl-C")
    parser.add_argument(
        "--interval", metavar="TIME", default="1s", help="with --watch: how often (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one a line")
    parser.add_argument("--config", action="store_true", help="also show the server's options and where each is from")
    add_timeout_flag(parser)
    add_tls_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("stats", lambda: _stats(arguments))


def _stats(arguments: argparse.Namespace) -> int:
    ClientOptions(target=arguments.admin)  # Checks the spelling of the address, and sends nothing.
    interval_ms = _interval_ms(arguments.interval)
    for view in _views(arguments, interval_ms):
        if arguments.json:
            print(json.dumps(view.to_json()), flush=True)
        else:
            print_view(view, clear=arguments.watch)
    return exit_codes.OK


def _views(arguments: argparse.Namespace, interval_ms: int) -> Iterator[StatsView]:
    from kvstore.replay.admin import admin_peer

    tls, deadline_s = tls_options(arguments), timeout_ms(arguments) / 1000
    with admin_peer(arguments.admin, tls=tls, deadline_s=deadline_s) as peer:
        options = [(o.key, o.value, o.source) for o in peer.config().options] if arguments.config else []
        if not arguments.watch:
            yield StatsView(peer.stats(), peer.namespaces(), options)
            return
        for stats in peer.watch(interval_ms):
            yield StatsView(stats, peer.namespaces(), options)


def _interval_ms(text: str) -> int:
    milliseconds = round(duration_s(text, "--interval") * 1000)
    if not MIN_INTERVAL_MS <= milliseconds <= MAX_INTERVAL_MS:
        raise CommandError(f"--interval: {text} is outside {MIN_INTERVAL_MS}ms..{MAX_INTERVAL_MS // 1000}s")
    return milliseconds
