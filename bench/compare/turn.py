"""One turn: those at the table play each round one after the other, so that drift of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LATENCY_SLICES = 5
SLOW_S, VERY_SLOW_S = 4.0, 8.0
SLOW_ROUNDS, VERY_SLOW_ROUNDS = 3, 1


class Player(Protocol):
    """Who does rounds; a Conversation is one."""

    def round_s(self, op: str, batch: int) -> float: ...

    def latencies_ms(self, first: int, calls: int) -> list[float]: ...


@dataclass(frozen=True)
class Seat:
    """A player under its title, with the rounds that it needs before they count."""

    title: str
    player: Player
    warm_up_rounds: int = 1


def rates(seats: Sequence[Seat], op: str, *, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each seat's rounds, in the order in which they were played. The first seat rotates."""
    slowest_s = max(_warm_up_s(seat, op, batch) for seat in seats)
    times: dict[str, list[float]] = {seat.title: [] for seat in seats}
    for i in range(rounds_for(slowest_s, rounds)):
        for seat in _from(seats, i):
            times[seat.title].append(seat.player.round_s(op, batch))
    return times


def latencies(seats: Sequence[Seat], *, uncounted: int, calls: int) -> dict[str, list[float]]:
    """Milliseconds of each seat's single gets, in slices played in turn after calls that do not count."""
    times: dict[str, list[float]] = {seat.title: [] for seat in seats}
    for seat in seats:
        seat.player.latencies_ms(0, uncounted)
    for i, (first, last) in enumerate(slices(calls)):
        for seat in _from(seats, i):
            times[seat.title] += seat.player.latencies_ms(uncounted + first, last - first)
    return times


def rounds_for(round_s: float, rounds: int) -> int:
    """How many rounds are played where one takes this long."""
    if round_s > VERY_SLOW_S:
        return min(rounds, VERY_SLOW_ROUNDS)
    return min(rounds, SLOW_ROUNDS) if round_s > SLOW_S else rounds


def slices(calls: int, count: int = LATENCY_SLICES) -> list[tuple[int, int]]:
    """Half-open ranges that share out the calls evenly."""
    made = [(calls * i // count, calls * (i + 1) // count) for i in range(count)]
    return [(first, last) for first, last in made if last > first]


def _warm_up_s(seat: Seat, op: str, batch: int) -> float:
    return [seat.player.round_s(op, batch) for _ in range(seat.warm_up_rounds)][-1]


def _from(seats: Sequence[Seat], index: int) -> list[Seat]:
    at = index % len(seats)
    return [*seats[at:], *seats[:at]]
