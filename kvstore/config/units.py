"""Sizes, durations and ratios as text: what is accepted is exactly what is written here, all else is refused.

*Size*: whole bytes (`4096`), or a whole number and a unit, with at most one space between (`64GiB`, `5 GB`).
kB and KB are 1000 bytes, KiB is 1024. *Duration*: a whole number and ms, s, m or h, with at most one space between.
*Ratio*: a decimal (`0.5`) or a percentage (`50%`). Letter case counts; signs, exponents, underscores, leading zeros
and fractions of a unit are refused.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from kvstore.config.faults import shown

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

SIZE_UNIT_BYTES = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
DURATION_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
MAX_DIGITS = 15
SIZE_HELP = (
    "whole bytes or a whole number with B, kB, KB, MB, GB, TB, KiB, MiB, GiB or TiB, for example 64GiB, 5GB or 4096"
)
DURATION_HELP = "a whole number with ms, s, m or h, for example 97s, 250ms, 5m or 1h"
RATIO_HELP = "a decimal or a percentage, for example 0.5 or 50%"

_WHOLE = rf"(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_SIZE = re.compile(_WHOLE + r"(?: ?(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB))?")
_DURATION = re.compile(_WHOLE + r" ?(ms|s|m|h)")
_RATIO = re.compile(r"((?:0|[1-9][0-9]{0,2})(?:\.[0-9]{1,6})?)(%?)")


def parse_size(text: str) -> int:
    """Bytes that `text` says.

    Raises: ValueError for any spelling but those at the head of this file.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is not a size: write {SIZE_HELP}")
    return int(match[1]) * SIZE_UNIT_BYTES[match[2] or "B"]


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling that `parse_size` reads back: the largest binary unit that divides, else bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        count, rest = divmod(size_bytes, SIZE_UNIT_BYTES[unit])
        if count and not rest:
            return f"{count}{unit}"
    return str(size_bytes)


def describe_size(size_bytes: int) -> str:
    """`size_bytes` for a reader: rounded to a tenth of a unit, then exactly, as in `31.2GiB (33500000000 bytes)`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= SIZE_UNIT_BYTES[unit]:
            rounded = f"{size_bytes / SIZE_UNIT_BYTES[unit]:.1f}".removesuffix(".0")
            return f"{rounded}{unit} ({size_bytes} bytes)"
    return f"{size_bytes} bytes"


def parse_duration(text: str) -> float:
    """Seconds that `text` says, whole milliseconds.

    Raises: ValueError for any spelling but those at the head of this file; a number without a unit is one of them.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is not a duration: write {DURATION_HELP}")
    return int(match[1]) * DURATION_UNIT_MS[match[2]] / 1000


def format_duration(seconds: float) -> str:
    """The shortest exact spelling that `parse_duration` reads back: the largest unit that divides; zero is `0s`."""
    total_ms = round(seconds * 1000)
    for unit in ("h", "m", "s"):
        count, rest = divmod(total_ms, DURATION_UNIT_MS[unit])
        if count and not rest:
            return f"{count}{unit}"
    return f"{total_ms}ms" if total_ms else "0s"


def parse_ratio(text: str) -> float:
    """The share that `text` says: 0.5 for both `0.5` and `50%`.

    Raises: ValueError for any spelling but those at the head of this file.
    """
    match = _RATIO.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is not a ratio: write {RATIO_HELP}")
    return float(Decimal(match[1]) / (100 if match[2] else 1))


def format_ratio(ratio: float) -> str:
    """`ratio` as a decimal without an exponent, as `parse_ratio` reads it."""
    return format(Decimal(repr(ratio)), "f")


def parse_percent(text: str) -> Fraction:
    """The exact share that a percentage says, 1/2 for `50%`.

    Raises: ValueError when `text` is not a percentage.
    """
    match = _RATIO.fullmatch(text)
    if match is None or not match[2]:
        raise ValueError(f"{shown(text)} is not a percentage: write for example 50% or 12.5%")
    return Fraction(match[1]) / 100
