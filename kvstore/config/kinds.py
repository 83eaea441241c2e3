"""The kinds of value an option may have: how each is read from text and from TOML, shown, and bounded.

Each kind reads strictly and raises ValueError with a message that quotes the value; none adjusts what it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvstore.config import units
from kvstore.config.address import Address
from kvstore.config.faults import shown


class Kind(ABC):
    """One kind of value. `name` and `unit` are for the reader: unit says what a number in the config tree counts."""

    name: str
    unit: str = ""

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


def _refuse_outside(quoted: str, bounds: str) -> ValueError:
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
        return self._bounded(int(text))

    def from_toml(self, raw: object) -> int:
        if not isinstance(raw, int) or not _is_integer(raw):
            raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not {self.name}: write a bare integer")
        return self._bounded(raw)

    def show(self, value: Any) -> str:
        return str(value)

    def bounds(self) -> str:
        return f"{self.low}..{self.high}"

    def _bounded(self, value: int) -> int:
        if not self.low <= value <= self.high:
            raise _refuse_outside(shown(value), self.bounds())
        return value


@dataclass(frozen=True, kw_only=True)
class Size(Kind):
    """Bytes, `low..high`, a multiple of `multiple`, a power of two when `shape` says so."""

    low: int
    high: int
    multiple: int = 1
    shape: str = ""
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
        return f"{text}, {self.shape}" if self.shape else text

    def _bounded(self, value: int, quoted: str) -> int:
        if not self.low <= value <= self.high:
            raise _refuse_outside(quoted, f"{units.format_size(self.low)}..{units.format_size(self.high)}")
        if value % self.multiple:
            raise ValueError(f"{quoted} is {value} bytes, not a multiple of {units.format_size(self.multiple)}")
        if self.shape == POWER_OF_TWO and value & (value - 1):
            raise ValueError(f"{quoted} is {value} bytes, not {POWER_OF_TWO}")
        return value


POWER_OF_TWO = "a power of two"


@dataclass(frozen=True, kw_only=True)
class SizeOrPercent(Kind):
    """Bytes (an int) or a percentage of the capacity (a Fraction); `low..high` bounds the bytes."""

    low: int
    high: int
    name = "a size or a percentage"
    unit = "bytes"

    def from_text(self, text: str) -> int | Fraction:
        if not text.endswith("%"):
            return self._size().from_text(text)
        share = units.parse_percent(text)
        if share > 1:
            raise _refuse_outside(shown(text), "0%..100%")
        return share

    def from_toml(self, raw: object) -> int | Fraction:
        return self.from_text(raw) if isinstance(raw, str) else self._size().from_toml(raw)

    def show(self, value: Any) -> str:
        return units.format_size(value)

    def bounds(self) -> str:
        return f"{self._size().bounds()} or 0%..100% of hot.capacity"

    def _size(self) -> Size:
        return Size(low=self.low, high=self.high)


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
            raise _refuse_outside(shown(text), self.bounds())
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
            raise _refuse_outside(quoted, self.bounds())
        return value


@dataclass(frozen=True)
class Choice(Kind):
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


@dataclass(frozen=True)
class WordOr(Kind):
    """One literal word, read as None, or a value of another kind."""

    word: str
    other: Kind

    @property
    def name(self) -> str:  # type: ignore[override]
        return f'"{self.word}" or {self.other.name}'

    @property
    def unit(self) -> str:  # type: ignore[override]
        return self.other.unit

    def from_text(self, text: str) -> object:
        return None if text == self.word else self._explained(self.other.from_text, text)

    def from_toml(self, raw: object) -> object:
        return None if raw == self.word else self._explained(self.other.from_toml, raw)

    def show(self, value: Any) -> str:
        return self.word if value is None else self.other.show(value)

    def bounds(self) -> str:
        return f"{self.word}, or {self.other.bounds()}"

    def _explained(self, read: Any, raw: object) -> object:
        try:
            return read(raw)
        except ValueError as error:
            raise ValueError(f"{error}; or write {self.word}") from None


@dataclass(frozen=True)
class Addresses(Kind):
    """One to `most` addresses: a TOML list of strings, or one string with commas between (spaces around are ignored)."""

    most: int
    name = "a list of addresses"

    def from_text(self, text: str) -> tuple[Address, ...]:
        return self._read([item.strip(" ") for item in text.split(",")], shown(text))

    def from_toml(self, raw: object) -> tuple[Address, ...]:
        if isinstance(raw, str):
            return self.from_text(raw)
        if not isinstance(raw, list):
            raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not {self.name}")
        wrong = next((item for item in raw if not isinstance(item, str)), None)
        if wrong is not None:
            raise ValueError(f"the item {shown(wrong)} is {toml_type(wrong)}, not an address in quotes")
        return self._read(raw, shown(raw))

    def show(self, value: Any) -> str:
        return ",".join(str(address) for address in value)

    def bounds(self) -> str:
        return f"1..{self.most} addresses"

    def _read(self, items: list[str], quoted: str) -> tuple[Address, ...]:
        if not 1 <= len(items) <= self.most:
            raise ValueError(f"{quoted} has {len(items)} addresses, outside {self.bounds()}")
        addresses = tuple(Address.parse(item) for item in items)
        for index, address in enumerate(addresses):
            if any(address.overlaps(earlier) for earlier in addresses[:index]):
                raise ValueError(f"{quoted} lists {address} more than once, or a port and the same port on all hosts")
        return addresses
