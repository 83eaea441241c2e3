"""LMCache's own benchmark of its multiprocess server: a request stores or retrieves `batch` chunks, one a value.

A store counts once its answer is there; a request that looks up before the store is complete misses and retrieves
nothing, so the samples of a cell can be few.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare.conversation import ANSWER_S, ClientFailed
from bench.compare.processes import QUIET, ROOT

CHUNK_TOKENS = 16
HEAD_DIM = 128
# Keys and values of 16 tokens in 2-byte numbers of one head and one layer.
SMALLEST_BYTES = 2 * CHUNK_TOKENS * HEAD_DIM * 2
_JSON = re.compile(r"^\{.*^\}", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Requests:
    """What one run of the benchmark found, in milliseconds a request."""

    store_ms: float
    retrieve_ms: float
    retrieve_p99_ms: float


def shape(size_bytes: int) -> tuple[int, int]:
    """Heads and layers whose chunk has this size. Raises ValueError for sizes that no chunk has."""
    heads = 1 if size_bytes < 1 << 20 else 8
    layers, rest = divmod(size_bytes, SMALLEST_BYTES * heads)
    if rest or not layers:
        raise ValueError(f"no chunk of {CHUNK_TOKENS} tokens has {size_bytes} bytes")
    return heads, layers


def run(
    program: Path, *, address: str, size_bytes: int, batch: int, request_count: int, first_sequence: int
) -> Requests:
    """Runs it. Sequences are what its values are told apart by. Raises ClientFailed."""
    rpc, http = address.split(",")
    heads, layers = shape(size_bytes)
    command = [str(program), "bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven"]
    command += ["--rpc-url", f"tcp://localhost:{rpc}", "--url", f"http://127.0.0.1:{http}", "--num-blocks", "256"]
    command += ["--num-tokens", str(CHUNK_TOKENS * batch)]
    command += ["--kvcache-shape-spec", f"(2,256,{CHUNK_TOKENS},{heads},{HEAD_DIM}):bfloat16:{layers}"]
    command += ["--start", str(first_sequence), "--end", str(first_sequence + request_count), "--interval", "0"]
    return parse(_output([*command, "--format", "json"]))


def parse(output: str) -> Requests:
    """Reads the benchmark's report. Raises ClientFailed if it lacks a figure or its own checksums differ."""
    found = _JSON.search(output)
    if found is None:
        raise ClientFailed(f"its benchmark printed no report: {output.strip()[-300:]}")
    metrics: dict[str, Any] = json.loads(found.group(0))["metrics"]
    results = metrics.get("results", {})
    if results.get("checksum_fail", 1) or not results.get("checksum_ok"):
        raise ClientFailed(f"its own checksums: {results}")
    try:
        retrieve = metrics["warm_retrieve"]
        return Requests(
            metrics["cold_store"]["cold_store_p50"], retrieve["warm_retrieve_p50"], retrieve["warm_retrieve_p99"]
        )
    except KeyError as lost:
        raise ClientFailed(f"its report has no {lost}") from None


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise ClientFailed(f"its benchmark took over {ANSWER_S:.0f} s") from None
    if done.returncode:
        raise ClientFailed(f"its benchmark ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
