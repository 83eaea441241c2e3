"""Exit codes of every subcommand."""

from __future__ import annotations

OK = 0
FAILED = 1  # The work failed, or found something wrong.
USAGE = 2  # Bad arguments or configuration.
UNREACHABLE = 3  # No server answered.
INTERRUPTED = 130
