"""What clients saw, in numbers that add up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """`wrong`: parts whose bytes were not theirs. `touched`: buffers written to after their call had ended.

    `by_transport`: calls by the transport that carried them, as far as the client told.
    """

    calls: int = 0
    read_parts: int = 0
    viewed_parts: int = 0
    cancelled: int = 0
    broken: int = 0
    wrong: int = 0
    corrupt: int = 0
    touched: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    by_transport: Counter[str] = field(default_factory=Counter)

    def note(self, failure: Exception | None) -> None:
        if failure is not None:
            self.failures[type(failure).__name__] += 1

    def line(self) -> str:
        return json.dumps(self.__dict__)

    def add(self, line: str) -> None:
        """Adds what another one's line says."""
        for name, value in json.loads(line).items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)
