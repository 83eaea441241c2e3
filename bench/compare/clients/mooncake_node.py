"""A Mooncake node that lends memory until it is stopped: `... mooncake_node OWN METADATA MASTER SIZE_BYTES`."""

from __future__ import annotations

import signal
import sys
from typing import Any

from mooncake.store import MooncakeDistributedStore

LOCAL_BUFFER_BYTES = 64 << 20


def main() -> None:
    own, metadata, master, size_bytes = sys.argv[1:]
    store: Any = MooncakeDistributedStore()
    done = store.setup(own, metadata, int(size_bytes), LOCAL_BUFFER_BYTES, "tcp", "", master)
    if done:
        raise RuntimeError(f"the node's set-up answered {done}")
    print("lending", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
