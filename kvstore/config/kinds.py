"""The kinds of value an option may have: how each is read from text and from TOML, shown, and bounded.

Each kind reads strictly and raises ValueError with a message that quotes the value; none adjusts what it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from kvstore.config import units
from kvstore.config.faults import shown


class Kind(ABC):
    """One kind of value."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind with its article, for messages and docs."""

    @property
    def unit(self) -> str:
        """What a number in the config tree counts, "" for what is no number."""
        return ""

    @abstractmethod
    def from_text(self, text: str) -> object:
        """Read text from an environment variable, a flag or a TOML string.

        Raises: ValueError when it is malformed or out of bounds.
        """

    def from_toml(self, raw: object) -> object:
        """Read a TOML value; a string is read as text.

        Raises: ValueError when its type is wrong, or it is malformed or out of bounds.
        """
        if isinstance(raw, str):
            return self.from_text(raw)
        raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not {self.name}")

    @abstractmethod
    def show(self, value: Any) -> str:
        """The text that `from_text` reads back as `value`."""

    @abstractmethod
    def bounds(self) -> str:
        """What is allowed, for messages and docs."""


def toml_type(raw: object) -> str:
    """The TOML name of a value's type, with its article."""
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "a list", dict: "a table"}
    return names.get(type(raw), "a date or time")


def _is_integer(raw: object) -> bool:
    # TOML's true and false arrive as bool, which Python counts among the integers.
    return isinstance(raw, int) and not isinstance(raw, bool)


def outside(quoted: str, bounds: str) -> ValueError:
    """The error of a value beyond its bounds."""
    return ValueError(f"{quoted} is outside {bounds}")


@dataclass(frozen=True, kw_only=True)
class Count(Kind):
    """A whole number, `low..high`."""

    low: int
    high: int
    name = "a count"
    unit = "count"

    def from_text(self, text: str) -> int:
        if not (text.isascii() and text.isdigit()) or len(text) > units.MAX_DIGITS or (text[0] == "0" and text != "0"):
            raise ValueError(f"{shown(text)} is not a count: write a whole number, for example {self.low}")
        return self._bounded(int(text), shown(text))

    def from_toml(self, raw: object) -> int:
        if not isinstance(raw, int) or not _is_integer(raw):
            raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not {self.name}: write a bare integer")
        return self._bounded(raw, shown(raw))

    def show(self, value: Any) -> str:
        return str(value)

    def bounds(self) -> str:
        return f"{self.low}..{self.high}"

    def _bounded(self, value: int, quoted: str) -> int:
        if not self.low <= value <= self.high:
            raise outside(quoted, self.bounds())
        return value


@dataclass(frozen=True, kw_only=True)
class Size(Kind):
    """Bytes, `low..high`, a multiple of `multiple`, and a power of two where `power_of_two` is set."""

    low: int
    high: int
    multiple: int = 1
    power_of_two: bool = False
    name = "a size"
    unit = "bytes"

    def from_text(self, text: str) -> int:
        return self._bounded(units.parse_size(text), shown(text))

    def from_toml(self, raw: object) -> int:
        if isinstance(raw, str):
            return self.from_text(raw)
        if isinstance(raw, int) and _is_integer(raw):
            return self._bounded(raw, shown(raw))
        raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not a size: write {units.SIZE_HELP}")

    def show(self, value: Any) -> str:
        return units.format_size(value)

    def bounds(self) -> str:
        text = f"{units.format_size(self.low)}..{units.format_size(self.high)}"
        if self.multiple > 1:
            text += f", a multiple of {units.format_size(self.multiple)}"
        return f"{text}, a power of two" if self.power_of_two else text

    def _bounded(self, value: int, quoted: str) -> int:
        if not self.low <= value <= self.high:
            raise outside(quoted, f"{units.format_size(self.low)}..{units.format_size(self.high)}")
        if value % self.multiple:
            raise ValueError(f"{quoted} is {value} bytes, not a multiple of {units.format_size(self.multiple)}")
        if self.power_of_two and value & (value - 1):
            raise ValueError(f"{quoted} is {value} bytes, not a power of two")
        return value


@dataclass(frozen=True, kw_only=True)
class Duration(Kind):
    """Seconds, bounds written as durations."""

    low: str
    high: str
    name = "a duration"
    unit = "seconds"

    def from_text(self, text: str) -> float:
        seconds = units.parse_duration(text)
        if not units.parse_duration(self.low) <= seconds <= units.parse_duration(self.high):
            raise outside(shown(text), self.bounds())
        return seconds

    def from_toml(self, raw: object) -> float:
        if isinstance(raw, str):
            return self.from_text(raw)
        raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not a duration: write {units.DURATION_HELP}, in quotes")

    def show(self, value: Any) -> str:
        return units.format_duration(value)

    def bounds(self) -> str:
        return f"{self.low}..{self.high}"


@dataclass(frozen=True, kw_only=True)
class Ratio(Kind):
    """A share of one, `low..high`."""

    low: float
    high: float
    name = "a ratio"
    unit = "share"

    def from_text(self, text: str) -> float:
        return self._bounded(units.parse_ratio(text), shown(text))

    def from_toml(self, raw: object) -> float:
        if isinstance(raw, str):
            return self.from_text(raw)
        if isinstance(raw, int | float) and not isinstance(raw, bool):
            return self._bounded(float(raw), shown(raw))
        raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not a ratio: write {units.RATIO_HELP}")

    def show(self, value: Any) -> str:
        return units.format_ratio(value)

    def bounds(self) -> str:
        return f"{units.format_ratio(self.low)}..{units.format_ratio(self.high)}"

    def _bounded(self, value: float, quoted: str) -> float:
        # Written so that a NaN, which TOML can spell, is refused too.
        if not self.low <= value <= self.high:
            raise outside(quoted, self.bounds())
        return value


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few words."""

    words: tuple[str, ...]
    name = "a word"

    def from_text(self, text: str) -> str:
        if text not in self.words:
            raise ValueError(f"{shown(text)} is not one of {', '.join(self.words)}")
        return text

    def show(self, value: Any) -> str:
        return str(value)

    def bounds(self) -> str:
        return ", ".join(self.words)
