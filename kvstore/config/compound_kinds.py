"""Kinds of value made of other kinds: a size or a percentage, a word or a value, a list of addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvstore.config import units
from kvstore.config.address import Address
from kvstore.config.faults import shown
from kvstore.config.kinds import Kind, Size, outside, toml_type


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
            raise outside(shown(text), "0%..100%")
        return share

    def from_toml(self, raw: object) -> int | Fraction:
        return self.from_text(raw) if isinstance(raw, str) else self._size().from_toml(raw)

    def show(self, value: Any) -> str:
        return units.format_size(value)

    def bounds(self) -> str:
        return f"{self._size().bounds()} or 0%..100% of hot.capacity"

    def _size(self) -> Size:
        return Size(low=self.low, high=self.high)


@dataclass(frozen=True)
class WordOr(Kind):
    """One literal word, read as None, or a value of another kind."""

    word: str
    other: Kind

    @property
    def name(self) -> str:
        return f'"{self.word}" or {self.other.name}'

    @property
    def unit(self) -> str:
        return self.other.unit

    def from_text(self, text: str) -> object:
        return None if text == self.word else self._explained(self.other.from_text, text)

    def from_toml(self, raw: object) -> object:
        return None if raw == self.word else self._explained(self.other.from_toml, raw)

    def show(self, value: Any) -> str:
        return self.word if value is None else self.other.show(value)

    def bounds(self) -> str:
        return f"{self.word}, or {self.other.bounds()}"

    def _explained(self, read: Callable[[Any], object], raw: object) -> object:
        try:
            return read(raw)
        except ValueError as error:
            raise ValueError(f"{error}; or write {self.word}") from None


@dataclass(frozen=True)
class Addresses(Kind):
    """One to `most` addresses: a TOML list of strings, or one string with commas between.

    Spaces around the items of a string are ignored; text is never a list of letters.
    """

    most: int
    name = "a list of addresses"

    def from_text(self, text: str) -> tuple[Address, ...]:
        return self._read([item.strip(" ") for item in text.split(",")], shown(text))

    def from_toml(self, raw: object) -> tuple[Address, ...]:
        if isinstance(raw, str):
            return self.from_text(raw)
        if not isinstance(raw, list):
            raise ValueError(f"{shown(raw)} is {toml_type(raw)}, not {self.name}")
        return self._read(raw, shown(raw))

    def show(self, value: Any) -> str:
        return ",".join(str(address) for address in value)

    def bounds(self) -> str:
        return f"1..{self.most} addresses"

    def _read(self, items: Sequence[object], quoted: str) -> tuple[Address, ...]:
        if not 1 <= len(items) <= self.most:
            raise ValueError(f"{quoted} has {len(items)} addresses, outside {self.bounds()}")
        addresses = _parse_all(items)
        for index, address in enumerate(addresses):
            for earlier in addresses[:index]:
                if address.overlaps(earlier):
                    raise ValueError(f"{quoted}: {earlier} and {address} cannot both be listened at")
        return addresses


def _parse_all(items: Sequence[object]) -> tuple[Address, ...]:
    """Every item as an address, or one error that holds every item's."""
    addresses: list[Address] = []
    refusals: list[str] = []
    for item in items:
        if not isinstance(item, str):
            refusals.append(f"the item {shown(item)} is {toml_type(item)}, not an address in quotes")
            continue
        try:
            addresses.append(Address.parse(item))
        except ValueError as error:
            refusals.append(str(error))
    if refusals:
        raise ValueError("; ".join(refusals))
    return tuple(addresses)
