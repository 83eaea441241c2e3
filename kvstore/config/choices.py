"""Which value each option gets: flags over environment over file over default, then what follows from other options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvstore.config.faults import Fault, shown
from kvstore.config.kinds import Kind
from kvstore.config.options import options, policy_options
from kvstore.config.schema import MAX_PAGE_BYTES, MAX_PART_BYTES, MIN_PAGE_BYTES, Source
from kvstore.config.sources import Setting, policy_key
from kvstore.config.units import MIB


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value that one option has, and where it came from.

    `inherited` when a namespace has it from the defaults, `worked_out` when it is an `auto` that suits all others.
    """

    key: str
    kind: Kind
    source: Source
    where: str
    value: Any
    inherited: bool = False
    worked_out: bool = False

    def __str__(self) -> str:
        return f"{self.key} {self.kind.show(self.value)} ({self.where})"


# A key whose value is faulty in some source is absent: nothing can be said about what depends on it.
Choices = dict[str, Choice]

# What `auto` comes to for payload on its way to disk and from it: the key, the most, and a share of the capacity.
QUEUES = (("warm.queue", 128 * MIB, 16), ("warm.promote_queue", 512 * MIB, 4))


def auto_page_bytes(capacity_bytes: int) -> int:
    """The page that `auto` stands for: the largest power of two within 64 MiB and an eighth of the capacity.

    Never less than 64 KiB, so that small arenas still have pages of use.
    """
    most = min(MAX_PAGE_BYTES, capacity_bytes // 8)
    return max(MIN_PAGE_BYTES, 1 << (most.bit_length() - 1))


def auto_queue_bytes(capacity_bytes: int, part_bytes: int, *, most_bytes: int, share: int) -> int:
    """What may be in flight where that is `auto`: one part in any case, but never more than the capacity."""
    return min(capacity_bytes, max(part_bytes, min(most_bytes, capacity_bytes // share)))


def choose(settings: Iterable[Setting], *, namespaces: Iterable[str]) -> tuple[Choices, list[Fault]]:
    """Parse every setting, also those that a stronger source overrides, and let the strongest win.

    `settings` come weakest source first. The choices include what each of `namespaces` inherits from the defaults.
    """
    choices, faults = _defaults(), []
    spoilt: set[str] = set()
    for setting in settings:
        try:
            choices[setting.key] = _parse(setting)
        except ValueError as error:
            spoilt.add(setting.key)
            faults.append(_fault(setting, str(error)))
    _inherit(choices, spoilt=spoilt, namespaces=namespaces)
    for key in spoilt:
        choices.pop(key, None)
    return choices, faults


def resolve(choices: Choices) -> Choices:
    """The choices with every `auto` and every percentage replaced by what it comes to."""
    resolved = dict(choices)
    _resolve_page(resolved)
    _resolve_queues(resolved)
    _resolve_percents(resolved)
    return resolved


def _parse(setting: Setting) -> Choice:
    raw = setting.raw
    value = setting.kind.from_toml(raw) if setting.source == "file" else setting.kind.from_text(str(raw))
    return Choice(key=setting.key, kind=setting.kind, source=setting.source, where=setting.where, value=value)


def _fault(setting: Setting, problem: str) -> Fault:
    return Fault(
        key=setting.key, where=setting.where, value=shown(setting.raw), problem=problem, limit=setting.kind.bounds()
    )


def _defaults() -> Choices:
    return {
        option.key: Choice(
            key=option.key,
            kind=option.kind,
            source="default",
            where="default",
            value=option.kind.from_text(option.default),
        )
        for option in options()
    }


def _inherit(choices: Choices, *, spoilt: set[str], namespaces: Iterable[str]) -> None:
    for namespace in namespaces:
        for option in policy_options():
            key, parent = policy_key(namespace, option.name), f"namespaces.default_{option.name}"
            if key in choices or key in spoilt:
                continue
            if parent in spoilt:
                spoilt.add(key)
            else:
                choices[key] = dataclasses.replace(choices[parent], key=key, inherited=True)


def _resolve_page(choices: Choices) -> None:
    """Replace `auto`, and let the part limit follow it where neither was set."""
    page, capacity, part = (choices.get(key) for key in ("hot.page", "hot.capacity", "limits.max_part"))
    if page is None or page.value is not None:
        return
    if capacity is None:
        del choices["hot.page"]
        return
    page_bytes = auto_page_bytes(capacity.value)
    where = f"auto, from {capacity}" if page_bytes < MAX_PAGE_BYTES else "auto"
    choices["hot.page"] = dataclasses.replace(page, value=page_bytes, where=where)
    if part is not None and part.source == "default":
        choices["limits.max_part"] = dataclasses.replace(part, value=min(MAX_PART_BYTES, page_bytes))


def _resolve_queues(choices: Choices) -> None:
    capacity, part = choices.get("hot.capacity"), choices.get("limits.max_part")
    for key, most_bytes, share in QUEUES:
        queue = choices.get(key)
        if queue is None or queue.value is not None:
            continue
        if capacity is None or part is None:
            del choices[key]
            continue
        value = auto_queue_bytes(capacity.value, part.value, most_bytes=most_bytes, share=share)
        choices[key] = dataclasses.replace(queue, value=value, where="auto", worked_out=True)


def _resolve_percents(choices: Choices) -> None:
    capacity = choices.get("hot.capacity")
    for key, choice in list(choices.items()):
        if not isinstance(choice.value, Fraction):
            continue
        if capacity is None:
            del choices[key]
        else:
            choices[key] = dataclasses.replace(choice, value=int(choice.value * capacity.value))
