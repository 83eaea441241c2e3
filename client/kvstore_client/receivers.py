"""Check a read's header against the question, and choose where each part lands.

Rules: nothing is believed before it is counted - states against keys, lengths and checksums against hits, each length
against the namespace. Only then are buffers chosen, and only then do bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore_client.buffers import Slices, size_of
from kvstore_client.errors import MalformedAnswer
from kvstore_client.grants import Grants
from kvstore_client.landing import Landing
from kvstore_client.options import Verify
from kvstore_client.question import Question
from kvstore_wire.namespace import Kind, NamespaceSpec
from kvstore_wire.states import BlockState, Coverage
from kvstore_wire.v1 import block_store_pb2 as store


@dataclass(eq=False)
class Landed:
    """What one Get brought: final states, and by index of part its length and value."""

    states: bytearray
    lengths: list[int]
    values: list[Slices | None]
    corrupt_blocks: list[int] = field(default_factory=list)
    corrupt_parts: list[int] = field(default_factory=list)
    mismatched_blocks: list[int] = field(default_factory=list)

    def head(self, block_count: int, parts_per_block: int) -> Landed:
        """Returns the same without the blocks from `block_count` on."""
        parts = block_count * parts_per_block
        return replace(self, states=self.states[:block_count], lengths=self.lengths[:parts], values=self.values[:parts])


class _Receiver:
    """What both kinds share: the landing, once it is known."""

    def __init__(self) -> None:
        self._landing: Landing | None = None
        self._found: list[int] | None = None  # Parts found corrupt by whoever moved all bytes at once.

    def room(self, most: int) -> memoryview:
        return self._begun().room(most)

    def landed(self, size: int) -> None:
        self._begun().landed(size)

    def feed(self, piece: memoryview) -> None:
        self._begun().feed(piece)

    def trail(self, trailer: store.GetTrailer) -> None:
        self._begun().trail(trailer.checksums)

    def finish(self) -> None:
        landing = self._begun()
        if self._found is None:
            landing.finish()

    def moved(self, corrupt: Sequence[int]) -> None:
        """Takes the bytes as landed by somebody else, who found these parts corrupt."""
        self._begun()
        self._found = list(corrupt)

    @property
    def _corrupt(self) -> list[int]:
        if self._found is not None:
            return self._found
        return self._landing.corrupt if self._landing is not None else []

    def _begun(self) -> Landing:
        if self._landing is None:
            raise MalformedAnswer("bytes came before the header")
        return self._landing


class ChainReceiver(_Receiver):
    """Receives a Get by chain. `into` has the caller's slices for each part, or is None: memory is made.

    `ranged_bytes`: what the ranges asked for take of each part; None where whole parts were asked for.
    """

    def __init__(
        self, asked: Question, into: Sequence[Slices] | None, verify: Verify, ranged_bytes: int | None = None
    ) -> None:
        super().__init__()
        self._asked, self._into, self._verify, self._ranged_bytes = asked, into, verify, ranged_bytes
        self._states = b""
        self._hits: list[int] = []  # Index of each part that comes, in the question.
        self._lengths: list[int] = []
        self._targets: list[Slices | None] = []

    @property
    def targets(self) -> Sequence[Slices | None]:
        """Where each part that comes goes, None for one that its buffer cannot hold. Known once begun."""
        return self._targets

    @property
    def all_targets(self) -> Sequence[Slices] | None:
        """The caller's slices for each part asked for, where their sizes are known to be right."""
        return self._into if self._asked.spec.kind is Kind.KV else None

    @property
    def most_bytes(self) -> int:
        """Bytes that the answer can have at most."""
        if self._into is not None:
            return sum(map(size_of, self._into))
        return self._asked.block_count * self._asked.parts_per_block * self._asked.spec.part_bytes

    def begin(self, header: store.GetHeader) -> None:
        asked = self._asked
        self._states, self._lengths = header.states, list(header.lengths)
        check_states(self._states, asked.block_count, highest=BlockState.BEYOND)
        parts = asked.parts_per_block
        for block, state in enumerate(self._states):
            if state == BlockState.HOT:
                self._hits.extend(range(block * parts, (block + 1) * parts))
        checksums: list[int] | None = list(header.checksums)
        if self._ranged_bytes is None:
            check_lengths(asked.spec, self._lengths, len(header.checksums), len(self._hits))
        else:
            check_ranged(self._lengths, self._ranged_bytes, len(self._hits))
            checksums = None
        self._targets = self._choose()
        self._landing = Landing(lengths=self._lengths, checksums=checksums, targets=self._targets, verify=self._verify)

    def result(self) -> Landed:
        """Returns what came, with every block that must not be used made a miss. Call after `finish`."""
        parts, count = self._asked.parts_per_block, self._asked.block_count
        out = Landed(bytearray(self._states), [0] * (count * parts), [None] * (count * parts))
        for at, length, target in zip(self._hits, self._lengths, self._targets, strict=True):
            out.lengths[at], out.values[at] = length, target
        out.corrupt_parts = [self._hits[i] for i in self._corrupt]
        out.corrupt_blocks = _distinct(at // parts for at in out.corrupt_parts)
        out.mismatched_blocks = _distinct(
            at // parts for at, target in zip(self._hits, self._targets, strict=True) if target is None
        )
        self._drop(out)
        return out

    def _drop(self, out: Landed) -> None:
        for block in (*out.corrupt_blocks, *out.mismatched_blocks):
            out.states[block] = BlockState.MISSING
        if self._asked.coverage is Coverage.PREFIX:
            end = next((i for i, state in enumerate(out.states) if state != BlockState.HOT), len(out.states))
            for block in range(end + 1, len(out.states)):
                out.states[block] = BlockState.BEYOND
        parts = self._asked.parts_per_block
        for block, state in enumerate(out.states):
            if state != BlockState.HOT:
                out.lengths[block * parts : (block + 1) * parts] = [0] * parts
                out.values[block * parts : (block + 1) * parts] = [None] * parts

    def _choose(self) -> list[Slices | None]:
        if self._into is None:
            return list(fresh(self._lengths))
        chosen = [self._into[at] for at in self._hits]
        return [slices if size_of(slices) >= size else None for slices, size in zip(chosen, self._lengths, strict=True)]


class LeaseReceiver(_Receiver):
    """Receives a read under a lease whose grants are known."""

    def __init__(self, grants: Grants, into: Sequence[Slices] | None, verify: Verify) -> None:
        super().__init__()
        self._lengths: list[int] = grants.lengths.tolist()
        self._checksums: list[int] = grants.checksums.tolist()
        self.targets: list[Slices] = list(fresh(self._lengths)) if into is None else list(into)
        self._landing = Landing(lengths=self._lengths, checksums=self._checksums, targets=self.targets, verify=verify)

    @property
    def corrupt(self) -> tuple[int, ...]:
        return tuple(self._corrupt)

    @property
    def all_targets(self) -> Sequence[Slices]:
        return self.targets

    @property
    def most_bytes(self) -> int:
        return sum(self._lengths)

    def begin(self, header: store.GetHeader) -> None:
        if list(header.lengths) != self._lengths or list(header.checksums) != self._checksums:
            raise MalformedAnswer("the bytes announced are not those that were leased")


def check_states(states: bytes, count: int, *, highest: int) -> None:
    """Raises MalformedAnswer unless there is one known state an item."""
    if len(states) != count:
        raise MalformedAnswer(f"{len(states)} states for {count} items")
    if states and max(states) > highest:
        raise MalformedAnswer(f"unknown state {max(states)}")


def check_ranged(lengths: Sequence[int], ranged_bytes: int, part_count: int) -> None:
    """Raises MalformedAnswer unless every part has the bytes that its ranges take."""
    if len(lengths) != part_count or any(length != ranged_bytes for length in lengths):
        raise MalformedAnswer(f"{len(lengths)} lengths for {part_count} parts of {ranged_bytes} ranged bytes each")


def check_lengths(spec: NamespaceSpec, lengths: Sequence[int], checksum_count: int, part_count: int) -> None:
    """Raises MalformedAnswer unless every part has a length its namespace allows, and a checksum."""
    if len(lengths) != part_count or checksum_count != part_count:
        raise MalformedAnswer(f"{len(lengths)} lengths and {checksum_count} checksums for {part_count} parts")
    if not lengths:
        return
    low = spec.part_bytes if spec.kind is Kind.KV else 0
    if min(lengths) < low or max(lengths) > spec.part_bytes:
        raise MalformedAnswer(f"parts of {min(lengths)} to {max(lengths)} bytes where {spec.part_bytes} is the rule")


def fresh(lengths: Sequence[int]) -> list[Slices]:
    """Returns one slice a part, all cut from one new allocation."""
    memory = np.empty(sum(lengths), np.uint8).data
    made: list[Slices] = []
    at = 0
    for length in lengths:
        made.append([memory[at : at + length]])
        at += length
    return made


def _distinct(numbers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(numbers))
