"""What the warm tier must reach on two cores: blocks of 2 MiB to disk and back, what is written for it, small calls.

Figure and ceiling are played in turn, round by round, another one first each time; a ratio is the median over
neighbouring rounds, since a disk is shared and its speed drifts. Ceilings are bare reads and writes past the page cache
(disk.py), of the same pieces at the same depth; the bare reads are of the very places that the tier reads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.channel import CORES
from bench.disk import (
    OWN,
    RAW,
    RawFile,
    RawReader,
    RawWriter,
    folder_on_disk,
    in_turn,
    process_written_bytes,
    share_row,
)
from bench.report import Row, say
from bench.rig import MIB, on_cores
from bench.slots import (
    DESCRIBED,
    PART_BYTES,
    READ_BYTES,
    READERS,
    SEGMENT_BYTES,
    WAIT_S,
    Slots,
    neighbours,
    raw_reads,
    tier_in,
    write_all,
)
from bench.warm_server import small_calls, warm_gets
from kvstore.core.segments import SegmentRules
from kvstore.replay.warm import ENTRIES_PER_BLOCK, WarmSize
from kvstore.tiers.index import Located
from kvstore.tiers.warm import BATCH_BYTES, Wanted, WarmTier

SEGMENTS, ROUND_SEGMENTS = 5, 2  # So few that one is given up for each that is written.
PER_SEGMENT = WarmSize(PART_BYTES, SEGMENT_BYTES, 1).blocks_per_segment
TABLE_BLOCKS = -(-PER_SEGMENT // ENTRIES_PER_BLOCK) + 1  # And one of namespaces.
WEAR_SEGMENT_BYTES, WEAR_SEGMENTS = 64 * MIB, 8
WEAR_BLOCKS, QUICK_WEAR_BLOCKS, WEAR_STEP, TOUCHED_A_STEP = 768, 384, 16, 64

DEMOTED = "demotion: memory to disk, 8 MiB a write"
PROMOTED = f"promotion: disk to memory, checked, {READERS} threads"
DEMOTION, PROMOTION, WARM_GET = 0.85, 0.85, 0.75
WRITTEN_OVER_DEMOTED = 1.05
PING_MS = 20.0


@dataclass(frozen=True)
class Plan:
    """How much is played: rounds of a rate, and for how many seconds at most; seconds beside a saturated disk."""

    rounds: int = 25
    rounds_s: float = 25.0
    beside_s: float = 10.0
    idle_s: float = 3.0
    wear_blocks: int = WEAR_BLOCKS


QUICK = Plan(3, 5.0, 2.0, 1.0, QUICK_WEAR_BLOCKS)


def run(plan: Plan | None = None) -> list[Row]:
    """Measures all of it on two cores, in folders of the working directory."""
    plan = Plan() if plan is None else plan
    with on_cores(CORES):
        say("to disk and back")
        rows = _streams(plan)
        say("warm gets")
        rows += warm_gets(rounds=2 * plan.rounds, seconds=plan.rounds_s, at_least=WARM_GET)
        say("bytes written")
        for share in (0.0, SegmentRules.rewrite_share):
            rows += _wear(plan, share)
        say("small calls beside a busy disk")
        rows += small_calls(idle_s=plan.idle_s, busy_s=plan.beside_s, at_most_ms=PING_MS)
    return rows


# -- to disk and back ----------------------------------------------------------------------------------------------


def _streams(plan: Plan) -> list[Row]:
    """Demotion in the steady state, one segment given up for each that is written; then promotion of what is there."""
    block_count = ROUND_SEGMENTS * PER_SEGMENT
    with (
        folder_on_disk("warm") as folder,
        Slots(block_count) as slots,
        tier_in(folder, segment_bytes=SEGMENT_BYTES, segment_count=SEGMENTS, rewrite_share=0.0) as (tier, _),
        RawReader(READERS) as reader,
    ):
        places, written = _demotion(plan, tier, slots, folder)
        read = _promotion(plan, tier, slots, places, reader, folder / "segments")
        return [written, read]


def _demotion(plan: Plan, tier: WarmTier, slots: Slots, folder: Path) -> tuple[dict[bytes, Located], Row]:
    numbers, places = count(), dict[bytes, Located]()
    batch = BATCH_BYTES // PART_BYTES
    writes = [
        [slots.pieces[at : min(at + batch, first + PER_SEGMENT)] for at in range(first, first + PER_SEGMENT, batch)]
        for first in range(0, len(slots.pieces), PER_SEGMENT)
    ]

    def demote() -> float:
        blocks = [slots.block(slot, next(numbers)) for slot in range(len(slots.pieces))]
        start = time.perf_counter()
        found = write_all(tier, blocks)
        taken = time.perf_counter() - start
        places.clear()
        places.update(zip([block.key for block in blocks], found, strict=True))
        return taken

    with ExitStack() as stack:
        files = [RawFile(folder / f"raw-{i}", SEGMENT_BYTES) for i in range(SEGMENTS)]
        for file in files:
            stack.callback(file.close)
        raw = RawWriter(files, SEGMENT_BYTES, table_blocks=TABLE_BLOCKS)
        acts = {OWN: demote, RAW: lambda: raw.write_s(writes)}
        warm_up = -(-SEGMENTS // ROUND_SEGMENTS) + 1  # From then on all is written over.
        times = in_turn(acts, rounds=plan.rounds, seconds=plan.rounds_s, warm_up=warm_up)
        given_up = tier.counts["given_up_segments"]
    tier.flush().result(WAIT_S)
    if given_up < ROUND_SEGMENTS * len(times[OWN]):
        raise RuntimeError(f"only {given_up} segments were given up: that is no steady state")
    return places, share_row(DEMOTED, times, len(slots.pieces) * PART_BYTES, at_least=DEMOTION)


def _promotion(
    plan: Plan, tier: WarmTier, slots: Slots, places: Mapping[bytes, Located], reader: RawReader, segments: Path
) -> Row:
    keys, found, pieces = list(places), list(places.values()), slots.pieces
    wanted = [
        [Wanted(DESCRIBED.digest, keys[i], found[i], [pieces[i]]) for i in group]
        for group in neighbours(found, READ_BYTES)
    ]
    bare = raw_reads(reader, segments, found, pieces)

    def promote() -> float:
        for piece in pieces:
            piece[:8] = bytes(8)  # So that what was not read does not pass for it.
        start = time.perf_counter()
        futures = [tier.read(group) for group in wanted]
        good = [all(future.result(WAIT_S)) for future in futures]
        taken = time.perf_counter() - start
        if not all(good):
            raise RuntimeError("a block was not read as it was written")
        return taken

    acts = {OWN: promote, RAW: lambda: reader.read_s(bare)}
    times = in_turn(acts, rounds=plan.rounds, seconds=plan.rounds_s)
    return share_row(PROMOTED, times, len(pieces) * PART_BYTES, at_least=PROMOTION)


# -- what is written for it ----------------------------------------------------------------------------------------


def _wear(plan: Plan, share: float) -> list[Row]:
    """Bytes that reach the disk for each that is demoted, while most of what is stored is used again."""
    draw, places = random.Random(7), list[Located]()
    held = WEAR_SEGMENTS * WEAR_SEGMENT_BYTES // PART_BYTES
    with (
        folder_on_disk("warm") as folder,
        Slots(WEAR_STEP) as slots,
    ):
        before = process_written_bytes()
        with tier_in(folder, segment_bytes=WEAR_SEGMENT_BYTES, segment_count=WEAR_SEGMENTS, rewrite_share=share) as (
            tier,
            disk,
        ):
            for first in range(0, plan.wear_blocks, WEAR_STEP):
                places += write_all(tier, [slots.block(slot, first + slot) for slot in range(WEAR_STEP)])
                for place in draw.choices(places[-held:], k=TOUCHED_A_STEP):
                    tier.note(place.life, place.start, time.monotonic(), used=True)
            tier.flush().result(WAIT_S)
            again, given_up = tier.counts["rewritten_blocks"], tier.counts["given_up_segments"]
        all_bytes = process_written_bytes() - before
    if not given_up or bool(again) != bool(share):
        raise RuntimeError(f"{given_up} segments were given up, and {again} blocks written again")
    demoted = plan.wear_blocks * PART_BYTES
    most = WRITTEN_OVER_DEMOTED if not share else (1 + share / (1 - share)) * WRITTEN_OVER_DEMOTED
    kind = "nothing written again" if not share else f"up to {share:.0%} of it written again"
    name = f"bytes to disk over bytes demoted, {kind}"
    return [
        Row(name, disk.written_bytes / demoted, "x", at_most=most),
        Row(f"{name}, the index included", all_bytes / demoted, "x"),
    ]
