"""Client processes for tests of transports, one role each: stopped, killed, forked, or ended with everything open."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
import traceback
from collections.abc import Callable

from kvstore_client import Client, ForkedClient
from tests.integration.client_cases import keys, kv_spec, value
from tests.integration.transport_scene import MIB, Rooms, options_of, region_of

SIZE = 700_000
SPEC = kv_spec(part_bytes=SIZE)
VALUES = [value(("child", i), SIZE) for i in range(3)]


def say(text: object) -> None:
    print(text, flush=True)


def told() -> str:
    return sys.stdin.readline().strip()


def views(client: Client) -> None:
    """Looks at blocks, waits to be told, looks again and says whether it counted."""
    viewed = client.namespace(SPEC).view(keys(3))
    taken = viewed.array(0)
    say("in place" if viewed.in_place else "a copy")
    told()
    say(hashlib.sha256(taken.tobytes()).hexdigest())
    say(viewed.close())


def writes_late(client: Client) -> None:
    """Reserves, fills its own region, waits to be told and only then writes."""
    with region_of(client, 4 * MIB) as region:
        rooms = Rooms(region.memory)
        namespace = client.namespace(SPEC)
        lease = namespace.reserve(keys(3, "late"), lease_ms=300)
        source = rooms.holding(VALUES)
        say(len(lease.created))
        told()
        done = namespace.write(lease, source)
        say(f"{done.stored} {type(done.failure).__name__}")


def forks(client: Client) -> None:
    """A forked child may use nothing; its parent goes on as before."""
    namespace = client.namespace(SPEC)
    with region_of(client, 4 * MIB) as region:
        rooms = Rooms(region.memory)
        assert namespace.put(keys(3), rooms.holding(VALUES)).ok
        viewed = namespace.view(keys(3))
        into = [bytearray(SIZE) for _ in range(3)]
        assert namespace.get(keys(3), into=into).prefix_blocks == 3
        pid = os.fork()
        if not pid:
            os._exit(_in_child(client))
        for _ in range(50):
            assert namespace.get(keys(3), into=into).prefix_blocks == 3
            assert into == VALUES
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert namespace.get(keys(3), into=into).prefix_blocks == 3
        assert [bytes(v) for v in viewed] == VALUES
        say(viewed.close())


def _in_child(client: Client) -> int:
    """Tries everything; returns how many calls were not refused."""
    namespace = client.namespace
    tries: list[Callable[[], object]] = [
        lambda: namespace(SPEC),
        lambda: client.register(0),
        lambda: client.poll(),
        lambda: client.fileno(),
    ]
    wrong = 0
    try:
        for act in tries:
            try:
                act()
                wrong += 1
            except ForkedClient:
                pass
        client.close()
        gc.collect()
    except BaseException:  # noqa: BLE001 - it must not come back into the parent's code
        traceback.print_exc()
        return 99
    return wrong


def leaves_all_open(client: Client) -> None:
    """Ends with lanes, views and regions open, calls under way and nothing closed."""
    namespace = client.namespace(SPEC)
    fd = os.memfd_create("open")
    os.ftruncate(fd, 4 * MIB)
    rooms = Rooms(client.register(fd).memory)
    assert namespace.put(keys(3), rooms.holding(VALUES)).ok
    kept = namespace.view(keys(3))
    assert bytes(kept[0]) == VALUES[0]
    sys.modules["kept"] = kept  # type: ignore[assignment]
    namespace.submit_get(keys(3))
    threading.Thread(target=lambda: namespace.get(keys(1, "never"), wait_ms=500), daemon=True).start()
    say("leaves")


def is_forgotten(client: Client) -> None:
    """Forgets a client without closing it, and goes on."""
    other = Client(client.options)
    namespace = other.namespace(SPEC)
    assert namespace.put(keys(3), VALUES).ok
    assert namespace.get(keys(3)).prefix_blocks == 3
    before = threading.active_count()
    del namespace, other
    gc.collect()
    say(threading.active_count() - before)
    told()


ROLES: dict[str, Callable[[Client], None]] = {
    "views": views,
    "writes_late": writes_late,
    "forks": forks,
    "leaves_all_open": leaves_all_open,
    "is_forgotten": is_forgotten,
}


def main(target: str, role: str) -> None:
    transport, _, role = role.partition(":")
    client = Client(options_of(target, transport))
    ROLES[role](client)
    if role != "leaves_all_open":
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
