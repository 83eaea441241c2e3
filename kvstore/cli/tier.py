"""`kvstore tier`: how a server's warm tier is, over its admin port; takes it out of use or back in, and resizes it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvstore.cli import exit_codes
from kvstore.cli.command_errors import CommandError, reported
from kvstore.cli.connection import ADMIN, add_timeout_flag, add_tls_flags, timeout_ms, tls_options
from kvstore.cli.stats_view import size, warm_state
from kvstore.config import format_size, parse_size
from kvstore.config.schema import MAX_CAPACITY_BYTES
from kvstore_client import ClientOptions
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.v1 import admin_pb2 as pb


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tier",
        help="show a server's warm tier, take it out of use or back in, resize it",
        description="Shows how a server's warm tier is, over its admin port. A change is made under load and whatever "
        "the disk does, the capacity soon after the answer, and lasts until the server ends: what it starts with is in "
        "its configuration. A tier that is disabled keeps its blocks, but for those that are deleted meanwhile.",
        epilog="examples:\n"
        "  kvstore tier\n"
        "  kvstore tier --disable\n"
        "  kvstore tier --enable --capacity 800GiB\n"
        "  kvstore tier --json | jq .stored_bytes\n\n"
        "exit codes: 0 shown, 1 the tier is degraded or the server has none, 2 bad arguments, 3 no server",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--admin", metavar="ADDRESS", default=ADMIN, help="the server's admin port (default: %(default)s)"
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--enable", action="store_true", help="take it back into use")
    wanted.add_argument("--disable", action="store_true", help="take it out of use: nothing is written or read")
    parser.add_argument(
        "--capacity", metavar="SIZE", help="most bytes of segments on disk, as 500GiB; at least two segments"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_timeout_flag(parser)
    add_tls_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("tier", lambda: _tier(arguments))


def _tier(arguments: argparse.Namespace) -> int:
    ClientOptions(target=arguments.admin)  # Checks the spelling of the address, and sends nothing.
    status = _ask(arguments, _request(arguments))
    if arguments.json:
        print(json.dumps(_to_json(status)))
    else:
        _print(status)
    return exit_codes.FAILED if status.state == pb.WARM_TIER_STATE_DEGRADED else exit_codes.OK


def _request(arguments: argparse.Namespace) -> pb.SetWarmTierRequest:
    request = pb.SetWarmTierRequest()
    if arguments.capacity is not None:
        request.capacity_bytes = _capacity_bytes(arguments.capacity)
    if arguments.enable or arguments.disable:
        request.enabled = arguments.enable
    return request


def _capacity_bytes(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise CommandError(f"--capacity: {error}") from None
    if not 1 <= size_bytes <= MAX_CAPACITY_BYTES:  # 0 would mean: as it is.
        raise CommandError(f"--capacity: is {size_bytes} bytes, outside 1..{format_size(MAX_CAPACITY_BYTES)}")
    return size_bytes


def _ask(arguments: argparse.Namespace, request: pb.SetWarmTierRequest) -> pb.WarmTierStatus:
    from kvstore.replay.admin import admin_peer

    tls, deadline_s = tls_options(arguments), timeout_ms(arguments) / 1000
    with admin_peer(arguments.admin, tls=tls, deadline_s=deadline_s) as peer:
        try:
            return peer.set_warm_tier(request)
        except InvalidArgument as error:
            if error.field == "warm_tier":
                raise CommandError(f"the server at {arguments.admin} has no warm tier", exit_codes.FAILED) from None
            if error.field == "capacity_bytes":
                raise CommandError(f"--capacity: {error.message} bytes (limit: {error.limit})") from None
            raise


def _to_json(status: pb.WarmTierStatus) -> dict[str, object]:
    return {
        "state": warm_state(status.state),
        "reason": status.reason,
        "capacity_bytes": status.capacity_bytes,
        "stored_bytes": status.stored_bytes,
        "stored_blocks": status.stored_blocks,
        "writing_bytes": status.writing_bytes,
        "promoting_bytes": status.promoting_bytes,
    }


def _print(status: pb.WarmTierStatus) -> None:
    reason = f": {status.reason}" if status.reason else ""
    print(f"state         {warm_state(status.state)}{reason}")
    of_all = f"{size(status.stored_bytes)} of {size(status.capacity_bytes)}"
    print(f"stored        {status.stored_blocks:,} blocks, {of_all}")
    print(f"to disk       {size(status.writing_bytes)} under way")
    print(f"to memory     {size(status.promoting_bytes)} under way")
