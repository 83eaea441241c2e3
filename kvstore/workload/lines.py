"""JSON lines of a trace file, plain or gzip, and the checks on their fields.

Rules: every fault is a TraceError that names file, line and field; a line has a stated limit, so that no file, however
compressed, is read into memory whole because it lacks line ends.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from kvstore.workload.trace import MAX_BLOCK_ID, BlockIds, as_block_ids

MAX_LINE_BYTES = 16 << 20
MAX_TOKENS = 1 << 24
MAX_TIME_S = 1e10

_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace file does not hold what its format says."""

    def __init__(self, problem: str, *, path: Path, line_number: int, field: str) -> None:
        super().__init__(f"{path}: line {line_number}: {field}: {problem}")
        self.problem = problem
        self.path = path
        self.line_number = line_number
        self.field = field


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a file, with the place to name when a field is wrong."""

    path: Path
    line_number: int
    fields: dict[str, object]

    def fault(self, field: str, problem: str) -> TraceError:
        """Return the error that names this line and the field."""
        return TraceError(problem, path=self.path, line_number=self.line_number, field=field)

    def value(self, field: str) -> object:
        """Return a field's value. Raises: TraceError if it is absent."""
        if field not in self.fields:
            raise self.fault(field, "is missing")
        return self.fields[field]

    def whole(self, value: object, *, field: str, limit: int) -> int:
        """Return the value as an integer. Raises: TraceError unless it is a whole number in 0..limit."""
        if type(value) is not int:
            raise self.fault(field, f"is {_shown(value)}, not a whole number")
        if not 0 <= value <= limit:
            raise self.fault(field, f"is {value}, outside 0..{limit}")
        return value

    def seconds(self, value: object, *, field: str, units_per_s: int) -> float:
        """Return the value in seconds. Raises: TraceError unless it is a finite number in 0..MAX_TIME_S seconds."""
        if type(value) is not int and type(value) is not float:
            raise self.fault(field, f"is {_shown(value)}, not a number")
        if not math.isfinite(value) or not 0 <= value <= MAX_TIME_S * units_per_s:
            raise self.fault(field, f"is {value}, outside 0..{MAX_TIME_S * units_per_s:g}")
        return value / units_per_s

    def items(self, value: object, *, field: str) -> list[object]:
        """Return the value as a list. Raises: TraceError if it is none."""
        if not isinstance(value, list):
            raise self.fault(field, f"is {_shown(value)}, not a list")
        return cast("list[object]", value)

    def tokens(self, field: str) -> int:
        """Return a field that counts tokens. Raises: TraceError if absent or no count."""
        return self.whole(self.value(field), field=field, limit=MAX_TOKENS)

    def block_ids(self, field: str) -> BlockIds:
        """Return a field that lists block ids. Raises: TraceError if absent or an entry is no 63-bit id."""
        ids = [
            self.whole(entry, field=field, limit=MAX_BLOCK_ID) for entry in self.items(self.value(field), field=field)
        ]
        return as_block_ids(ids)


def read_lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the non-blank lines of a plain or gzip file with their numbers, from 1.

    Raises: TraceError for a broken or truncated gzip stream or a line over MAX_LINE_BYTES; OSError if unreadable.
    """
    line_number = 0
    with path.open("rb") as raw:
        stream = _opened(raw)
        try:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                line_number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"over {MAX_LINE_BYTES} bytes", path=path, line_number=line_number, field="line")
                if not line.isspace():
                    yield line_number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(str(error), path=path, line_number=line_number + 1, field="gzip stream") from error


def parse_record(path: Path, line_number: int, line: bytes) -> Record:
    """Parse one line. Raises: TraceError unless it is one JSON object."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"is not JSON: {error}", path=path, line_number=line_number, field="line") from error
    if not isinstance(fields, dict):
        raise TraceError(f"is {_shown(fields)}, not a JSON object", path=path, line_number=line_number, field="line")
    return Record(path, line_number, fields)


def _opened(raw: BinaryIO) -> BinaryIO:
    magic = raw.read(len(_GZIP_MAGIC))
    raw.seek(0)
    return cast("BinaryIO", gzip.GzipFile(fileobj=raw, mode="rb")) if magic == _GZIP_MAGIC else raw


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
