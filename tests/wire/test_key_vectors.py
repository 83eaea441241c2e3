"""The specification in docs/keys.md and the code give the same bytes, and both give the literals below."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvstore_wire.canonical import field
from kvstore_wire.keys import EMPTY, Adapter, Extras, Media, chain_keys, root_key
from kvstore_wire.namespace import LABEL, Chains, Geometry, Kind, NamespaceSpec

SPEC_PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
PAGE = SPEC_PAGE.read_text("utf-8")
VECTORS: list[dict[str, Any]] = json.loads(PAGE.split("```json\n")[1].split("```")[0])

LLAMA = NamespaceSpec(
    name="any label",
    model="meta-llama/Llama-3.1-8B",
    part_bytes=65536,
    tenant="acme",
    weights_revision="r1",
    geometry=Geometry(4, "bfloat16", 32, 8, 128, layer_groups=4, head_shards=2),
    chains=Chains.CHAINED,
    facts=(("rank", "0"), ("engine", "vllm")),
)
TINY = NamespaceSpec("n", "m", 1, geometry=Geometry(1, "bf16", 1, 1, 1))


def spec_of(vector: dict[str, Any]) -> NamespaceSpec:
    given = dict(vector["namespace"])
    geometry = given.pop("geometry", None)
    return NamespaceSpec(
        name="vector",
        model=given.pop("model"),
        part_bytes=given.pop("part_bytes"),
        kind=Kind[given.pop("kind", "KV")],
        chains=Chains[given.pop("chains", "ORDERED")],
        facts=tuple(given.pop("facts", {}).items()),
        geometry=None if geometry is None else Geometry(**geometry),
        **given,
    )


def extras_of(given: dict[str, Any]) -> Extras:
    adapter = given.get("adapter")
    media = tuple(Media(m["offset"], bytes.fromhex(m["content"])) for m in given.get("media", ()))
    return Extras(None if adapter is None else Adapter(adapter["name"], adapter["revision"]), media)


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_the_vectors_of_the_page_come_out(vector: dict[str, Any]) -> None:
    spec, salt = spec_of(vector), bytes.fromhex(vector.get("salt", ""))
    found: dict[str, Any] = {}
    if "digest" in vector:
        found["digest"] = spec.digest.hex()
    if "root" in vector:
        found["root"] = root_key(spec, salt).hex()
    if "keys" in vector:
        extras = [extras_of(e) for e in vector.get("extras", ())]
        found["keys"] = [k.hex() for k in chain_keys(spec, vector["tokens"], salt=salt, extras=extras)]
    assert found == {name: vector[name] for name in found}
    assert found


def test_the_digests_are_these() -> None:
    assert LLAMA.digest.hex() == "45411a77520887ab620e30d50180ed486a1bcd0ba2b5ce4fd17dc806ca6cdb5f"
    assert TINY.digest.hex() == "28d352912e8992e770748e6fbdaae51d5a3998dc8efcee6a38645f7489bc7a98"
    values = NamespaceSpec("v", "any", 1 << 20, kind=Kind.OPAQUE, key_scheme="lmcache", chains=Chains.NONE)
    assert values.digest.hex() == "4df86a0d714633fd0356fd21d7d7cd3d41a45a18c1a13f3763ca35cf49f7491d"


def test_the_roots_are_these() -> None:
    assert root_key(LLAMA).hex() == "43e05a7a0d60a4ed78432bf2634f3a443b52015b35e8c5ccd9ac1f7c2dcc46f9"
    assert root_key(LLAMA, b"salt").hex() == "2e1670402507a20a2c1ae1f274160e0a6ecf63965acc0a22dbe8849a6d4ebccd"


def test_the_block_keys_are_these() -> None:
    plain = chain_keys(LLAMA, list(range(1, 14)))
    assert [k.hex() for k in plain] == [
        "b1aa0d2da337482b70524980272d6627c81fef4b3cb931b94198b9abcb19bf37",
        "ba5140f641623612c63c19a63f85b12e31f8c9f9d8e2076305e543503a55b75c",
        "bff1b97b16a055e4129b213a429158c098a353cdee2de1453c6939085901184f",
    ]
    sql = Adapter("sql", "7")
    media = (Media(-2, bytes(range(16))), Media(3, b"\xff" * 32))
    extras = [EMPTY, Extras(sql), Extras(sql, media)]
    assert chain_keys(LLAMA, list(range(1, 14)), extras=extras)[2].hex() == (
        "440dd611b92b75b3a5ffba84e9e2c9272e445d0d52157c9b512cf23babd37258"
    )
    alone = NamespaceSpec("i", "m", 1, geometry=Geometry(1, "bf16", 1, 1, 1), chains=Chains.NONE)
    assert [k.hex() for k in chain_keys(alone, [7, 7])] == [
        "b82ae13f4eb222d3ab3a8841b35029b3ea9a091491c698cbeb17cf08241a37aa"
    ] * 2


def records_by_hand() -> list[bytes]:
    """The records that the page writes out, one field a line, notes left out."""
    records: list[bytes] = []
    for line in re.findall(r"^    ([0-9a-f]{2}) ([0-9a-f]{8})(?: ([0-9a-f]+))?(?:  .*)?$", PAGE, re.MULTILINE):
        encoded = bytes.fromhex("".join(line))
        if encoded[0] == 0:
            records.append(b"")
        records[-1] += encoded
    return records


def test_the_example_by_hand_can_be_followed() -> None:
    namespace, root, block = records_by_hand()
    encoded = [row for _, _, row in TINY.canonical_fields()]
    assert namespace == field(0, LABEL.encode()) + b"".join(encoded)
    assert [blake3(r).hexdigest() for r in (namespace, root, block)] == [
        TINY.digest.hex(),
        root_key(TINY).hex(),
        chain_keys(TINY, [7])[0].hex(),
    ]
    for digest in (TINY.digest, root_key(TINY), chain_keys(TINY, [7])[0]):
        assert f"`{digest.hex()}`" in PAGE
