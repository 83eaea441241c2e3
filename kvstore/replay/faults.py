"""Why a replay ended early."""

from __future__ import annotations


class ReplayError(Exception):
    """A replay cannot go on; the message is for people."""


class ServerDied(ReplayError):
    """The shard's process ended."""


class ServerSilent(ReplayError):
    """No shard answers at the address given."""


class WorkerDied(ReplayError):
    """A worker process ended, or met a fault that no later request would be spared."""
