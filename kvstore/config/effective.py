"""What a loaded configuration comes to, for the start-up output and the admin service."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.config.options import EMPTY, Option, options, policy_options
from kvstore.config.schema import Config, Source
from kvstore.config.sources import policy_key
from kvstore.config.units import describe_size


def effective(config: Config) -> list[tuple[str, str, Source]]:
    """Every option as (key, value as text, source), `auto` and percentages already worked out."""
    return [(key, option.kind.show(value), config.sources.of(key)) for key, option, value in _values(config)]


def startup_lines(config: Config) -> list[str]:
    """One line for each option, with its source, and with the exact bytes of each size."""
    lines = []
    for key, option, value in _values(config):
        text = option.kind.show(value) or EMPTY
        if option.unit == "bytes" and value is not None:
            text += f" ({value} bytes)"
        lines.append(f"{key} = {text} [{config.sources.of(key)}]")
    return lines


def check_memory(config: Config, available_bytes: int) -> list[str]:
    """Warnings, with the numbers, about memory that the machine lacks, and about capacity that nothing can use.

    Units: `available_bytes` is what the machine, or the container's limit, has free before the arena is taken.
    """
    hot, budget_bytes = config.hot, config.server.send_budget
    available = describe_size(available_bytes)
    capacity = f"hot.capacity {describe_size(hot.capacity)}"
    warnings = []
    if hot.capacity > available_bytes:
        warnings.append(f"{capacity} is more than the {available} of memory available")
    elif hot.capacity + budget_bytes > available_bytes:
        budget = f"server.send_budget {describe_size(budget_bytes)}"
        warnings.append(f"{capacity} and {budget} together are more than the {available} of memory available")
    if hot.capacity % hot.page:
        rest, page = describe_size(hot.capacity % hot.page), describe_size(hot.page)
        warnings.append(f"{capacity} is not a whole number of pages, hot.page {page}: {rest} are left over")
    if config.warm.path and config.warm.capacity % config.warm.segment:
        rest, segment = describe_size(config.warm.capacity % config.warm.segment), describe_size(config.warm.segment)
        on_disk = f"warm.capacity {describe_size(config.warm.capacity)}"
        warnings.append(f"{on_disk} is not a whole number of segments, warm.segment {segment}: {rest} are left over")
    return warnings


def _values(config: Config) -> Iterator[tuple[str, Option, object]]:
    for option in options():
        yield option.key, option, getattr(getattr(config, option.section), option.name)
    for policy in config.namespaces.policy:
        for option in policy_options():
            yield policy_key(policy.namespace, option.name), option, getattr(policy, option.name)
