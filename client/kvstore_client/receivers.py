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


class ChainReceiver:
    """Receives a Get by chain. `into` has the caller's slices for each part, or is None: memory is made."""

    def __init__(self, asked: Question, into: Sequence[Slices] | None, verify: Verify) -> None:
        self._asked, self._into, self._verify = asked, into, verify
        self._states = b""
        self._hits: list[int] = []  # Index of each part that comes, in the question.
        self._lengths: list[int] = []
        self._targets: list[Slices | None] = []
        self._landing: Landing | None = None

    def begin(self, header: store.GetHeader) -> None:
        asked = self._asked
        self._states, self._lengths = header.states, list(header.lengths)
        check_states(self._states, asked.block_count, highest=BlockState.BEYOND)
        parts = asked.parts_per_block
        for block, state in enumerate(self._states):
            if state == BlockState.HOT:
                self._hits.extend(range(block * parts, (block + 1) * parts))
        check_lengths(asked.spec, self._lengths, len(header.checksums), len(self._hits))
        self._targets = self._choose()
        self._landing = Landing(
            lengths=self._lengths, checksums=list(header.checksums), targets=self._targets, verify=self._verify
        )

    def feed(self, piece: memoryview) -> None:
        if self._landing is None:
            raise MalformedAnswer("bytes came before the header")
        self._landing.feed(piece)

    def finish(self) -> None:
        if self._landing is None:
            raise MalformedAnswer("the answer has no header")
        self._landing.finish()

    def landed(self) -> Landed:
        """Returns what came, with every block that must not be used made a miss. Call after `finish`."""
        parts, count = self._asked.parts_per_block, self._asked.block_count
        out = Landed(bytearray(self._states), [0] * (count * parts), [None] * (count * parts))
        for at, length, target in zip(self._hits, self._lengths, self._targets, strict=True):
            out.lengths[at], out.values[at] = length, target
        corrupt = self._landing.corrupt if self._landing is not None else []
        out.corrupt_parts = [self._hits[i] for i in corrupt]
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


class LeaseReceiver:
    """Receives a read under a lease whose grants are known."""

    def __init__(self, grants: Grants, into: Sequence[Slices] | None, verify: Verify) -> None:
        self._lengths: list[int] = grants.lengths.tolist()
        self._checksums: list[int] = grants.checksums.tolist()
        self.targets: list[Slices] = list(fresh(self._lengths)) if into is None else list(into)
        self._landing = Landing(lengths=self._lengths, checksums=self._checksums, targets=self.targets, verify=verify)

    @property
    def corrupt(self) -> tuple[int, ...]:
        return tuple(self._landing.corrupt)

    def begin(self, header: store.GetHeader) -> None:
        if list(header.lengths) != self._lengths or list(header.checksums) != self._checksums:
            raise MalformedAnswer("the bytes announced are not those that were leased")

    def feed(self, piece: memoryview) -> None:
        self._landing.feed(piece)

    def finish(self) -> None:
        self._landing.finish()


def check_states(states: bytes, count: int, *, highest: int) -> None:
    """Raises MalformedAnswer unless there is one known state an item."""
    if len(states) != count:
        raise MalformedAnswer(f"{len(states)} states for {count} items")
    if states and max(states) > highest:
        raise MalformedAnswer(f"unknown state {max(states)}")


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
