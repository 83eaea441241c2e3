"""What is wrong with a configuration: one `Fault` per thing, one `ConfigError` that carries them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHOWN_CHARS = 60
# Below this likeness (difflib's ratio) a name is a different word rather than a slip of the hand.
NEAREST_CUTOFF = 0.5


def shown(value: object) -> str:
    """Quote `value` for a message, cut to `SHOWN_CHARS` characters."""
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One reason to refuse a configuration.

    `where` is the source: `file PATH`, `env NAME`, `flag --NAME`, or several of them for an impossible pair.
    `limit` says what is allowed; `nearest` is the known name most like an unknown one, "" when none is alike.
    """

    key: str
    where: str
    value: str
    problem: str
    limit: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        parts = [f"{_one_line(self.key)} ({_one_line(self.where)}): {self.problem}"]
        if self.limit:
            parts.append(f"allowed: {self.limit}")
        if self.nearest:
            parts.append(f"the nearest known one is {self.nearest}")
        return "; ".join(parts)


class ConfigError(ValueError):
    """The configuration is refused; `faults` holds every reason, not only the first."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        heading = f"configuration refused, {count} fault{'' if count == 1 else 's'}:"
        super().__init__("\n".join([heading, *(f"  - {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


def _one_line(name: str) -> str:
    # A quoted TOML key and the name of a variable may hold line breaks and undecodable bytes.
    return name if name.isprintable() else ascii(name)


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`, "" when none is like it."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=NEAREST_CUTOFF)
    return matches[0] if matches else ""
