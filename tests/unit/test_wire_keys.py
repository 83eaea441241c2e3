"""Keys: the same in every process that says the same things, and never the same for different things."""

from __future__ import annotations

import dataclasses
import enum
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_wire.canonical import field
from kvstore_wire.errors import InvalidArgument
from kvstore_wire.keys import Adapter, Extras, Media, block_key, chain_keys, root_key
from kvstore_wire.namespace import Attention, Chains, Geometry, Kind, NamespaceSpec
from tests.shards import Shard, fill

GEOMETRY = Geometry(16, "bfloat16", 32, 8, 128)
SPEC = NamespaceSpec("n", "model", 65536, tenant="t", weights_revision="r1", geometry=GEOMETRY)
TOKENS = list(range(512))

PROGRAM = """
from kvstore_wire.keys import Adapter, Extras, chain_keys
from kvstore_wire.namespace import Geometry, NamespaceSpec
facts = tuple({"b": "2", "a": "1", "c": "3"}.items())
spec = NamespaceSpec("n", "model", 65536, geometry=Geometry(16, "bfloat16", 32, 8, 128), facts=facts)
for key in chain_keys(spec, list(range(512)), extras=[Extras(Adapter("sql", "7"))] * 32):
    print(key.hex())
"""


def keys_in_a_fresh_process(hash_seed: str | None) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        env["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_fresh_processes_derive_the_same_keys_whatever_their_hash_seed() -> None:
    first, second, third = (keys_in_a_fresh_process(seed) for seed in ("1", None, "4711"))
    assert first == second == third
    assert len(set(first)) == 32


def last_key(spec: NamespaceSpec = SPEC, salt: bytes = b"", extras: Extras | None = None) -> bytes:
    given_extras = [extras] * 32 if extras is not None else ()
    return chain_keys(spec, TOKENS, salt=salt, extras=given_extras)[-1]


def test_an_adapter_has_keys_of_its_own_by_name_and_by_revision() -> None:
    adapters = [None, Adapter("a", ""), Adapter("b", ""), Adapter("a", "2"), Adapter("", "a"), Adapter("a2", "")]
    found = {last_key(extras=Extras(adapter)) for adapter in adapters}
    assert len(found) == len(adapters)


def test_an_adapter_s_key_does_not_depend_on_what_was_loaded_before_it() -> None:
    first = [Adapter("x", "1"), Adapter("y", "1")]
    second = [Adapter("y", "1"), Adapter("x", "1")]
    assert last_key(extras=Extras(first[1])) == last_key(extras=Extras(second[0]))


def test_no_value_passes_for_another_field() -> None:
    found = {
        last_key(extras=Extras(Adapter("X", ""))),
        last_key(salt=b"X"),
        last_key(dataclasses.replace(SPEC, tenant="tX")),
        last_key(dataclasses.replace(SPEC, tenant="", model="tmodel")),
        last_key(dataclasses.replace(SPEC, model="model/r1", weights_revision="")),
        last_key(dataclasses.replace(SPEC, tenant="a/b", model="c")),
        last_key(dataclasses.replace(SPEC, tenant="a", model="b/c")),
        last_key(dataclasses.replace(SPEC, facts=(("a", "bc"),))),
        last_key(dataclasses.replace(SPEC, facts=(("ab", "c"),))),
        last_key(dataclasses.replace(SPEC, facts=(("a", "b"), ("c", "")))),
        last_key(),
    }
    assert len(found) == 11


def test_the_same_placeholders_with_other_media_have_other_keys() -> None:
    first, second = b"1" * 32, b"2" * 32
    media = [
        (),
        (Media(0, first),),
        (Media(0, second),),
        (Media(1, first),),
        (Media(-16, first),),
        (Media(0, first), Media(8, second)),
        (Media(0, first + second),),
    ]
    tokens = [32_000] * 16
    found = {chain_keys(SPEC, tokens, extras=[Extras(media=m)])[0] for m in media}
    assert len(found) == len(media)


def test_media_that_moves_by_a_block_changes_every_key_from_there_on() -> None:
    item, none = Extras(media=(Media(0, b"m" * 32),)), Extras()
    tokens = [5] * 64
    one = chain_keys(SPEC, tokens, extras=[none, item, none, none])
    two = chain_keys(SPEC, tokens, extras=[none, none, item, none])
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two)


CHANGES: dict[str, Callable[[NamespaceSpec], NamespaceSpec]] = {
    "dtype": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, dtype="fp8_e4m3")),
    "weights_revision": lambda s: dataclasses.replace(s, weights_revision="r2"),
    "model": lambda s: dataclasses.replace(s, model="model2"),
    "tenant": lambda s: dataclasses.replace(s, tenant="t2"),
    "key_scheme": lambda s: dataclasses.replace(s, key_scheme="vllm.sha256_cbor"),
    "chains": lambda s: dataclasses.replace(s, chains=Chains.CHAINED),
    "part_bytes": lambda s: dataclasses.replace(s, part_bytes=32768),
    "block_tokens": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, block_tokens=8)),
    "layers": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, layers=16)),
    "kv_heads": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, kv_heads=4)),
    "head_dim": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, head_dim=64)),
    "attention": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, attention=Attention.MLA)),
    "layout": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, layout="BLHNC")),
    "layer_groups": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, layer_groups=2)),
    "head_shards": lambda s: dataclasses.replace(s, geometry=dataclasses.replace(GEOMETRY, head_shards=2)),
    "pp_rank": lambda s: dataclasses.replace(s, facts=(("pp_rank", "1"),)),
    "tp_rank": lambda s: dataclasses.replace(s, facts=(("tp_rank", "1"),)),
}


def test_every_fact_about_the_bytes_changes_every_key_and_the_label_changes_none() -> None:
    found = {last_key(change(SPEC)) for change in CHANGES.values()} | {last_key()}
    assert len(found) == len(CHANGES) + 1
    assert last_key(dataclasses.replace(SPEC, name="other label")) == last_key()


@pytest.mark.parametrize("change", ["dtype", "weights_revision", "pp_rank", "tp_rank"])
def test_what_was_put_under_one_spec_is_a_miss_under_the_other_and_a_hit_under_the_first(change: str) -> None:
    client = Shard().client()
    first = dataclasses.replace(SPEC, part_bytes=4096, name="first")
    second = dataclasses.replace(CHANGES[change](first), name="second")
    one, two = client.attach(first), client.attach(second)
    client.put(one, chain_keys(first, TOKENS))
    assert client.match(two, chain_keys(second, TOKENS)).prefix_blocks == 0
    assert client.match(two, chain_keys(first, TOKENS)).prefix_blocks == 0, "even with the other's keys"
    assert client.match(one, chain_keys(first, TOKENS)).prefix_blocks == 32


def test_a_scheduler_without_a_rank_finds_the_prefix_that_all_ranks_have_put() -> None:
    shard = Shard()
    spec = dataclasses.replace(SPEC, part_bytes=4096, geometry=dataclasses.replace(GEOMETRY, head_shards=4))
    scheduler, workers = shard.client(), [shard.client() for _ in range(4)]
    space, chain = scheduler.attach(spec), chain_keys(spec, TOKENS)
    for rank, worker in enumerate(workers):
        lease = worker.reserve(space, chain[: 30 - rank], parts=(rank,)).lease
        assert lease is not None
        fill(lease)
        worker.commit(lease)
    assert scheduler.match(space, chain).prefix_blocks == 27
    assert scheduler.match(space, chain, parts=(0,)).prefix_blocks == 30


def test_a_chain_cannot_start_in_the_middle() -> None:
    chain = chain_keys(SPEC, TOKENS)
    later = TOKENS[16:64]
    assert chain_keys(SPEC, later, parent=chain[0]) == chain[1:4]
    assert not set(chain_keys(SPEC, later)) & set(chain)
    with pytest.raises(InvalidArgument) as caught:
        chain_keys(SPEC, later, parent=b"")
    assert caught.value.field == "parent"


class TextDtype(str, enum.Enum):
    """A text enum, whose str() and format() differ between Python versions."""

    BF16 = "bfloat16"


class NumberedKind(enum.IntEnum):
    KV = 1


class MyText(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


def test_members_of_enums_and_subclasses_count_by_their_wire_value() -> None:
    plain = dataclasses.replace(SPEC, facts=(("dtype", "bfloat16"),))
    fancy = NamespaceSpec(
        name="n",
        model=MyText("model"),
        part_bytes=65536,
        tenant="t",
        weights_revision="r1",
        kind=NumberedKind.KV,  # type: ignore[arg-type]
        geometry=Geometry(16, TextDtype.BF16, 32, 8, 128, attention=1),  # type: ignore[arg-type]
        chains=2,  # type: ignore[arg-type]
        facts=((MyText("dtype"), TextDtype.BF16),),
    )
    assert fancy.digest == plain.digest
    assert plain.difference(fancy) is None
    assert fancy.difference(plain) is None
    assert NamespaceSpec.from_message(fancy.to_message()).digest == plain.digest
    with pytest.raises(InvalidArgument):
        dataclasses.replace(SPEC, kind="KV")  # type: ignore[arg-type]


HOSTILE = [
    "../../etc/passwd",
    "/root",
    "a\0b",
    "line\nbreak",
    "%2e%2e%2f",
    "a b",
    "ключ",
    "\u202e",
    "é",
    "e\u0301",
    "x" * 255,
    "x" * 256,
    "x" * 4096,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_a_name_looks_like_its_keys_are_32_bytes(text: str) -> None:
    spec = dataclasses.replace(SPEC, model=text)
    assert {len(k) for k in chain_keys(spec, TOKENS, salt=text.encode()[:128])} == {32}
    assert NamespaceSpec.from_message(spec.to_message()) == spec


def test_names_that_look_alike_are_not_alike() -> None:
    assert len({dataclasses.replace(SPEC, model=text).digest for text in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize(
    ("field_name", "make"),
    [
        ("model", lambda: dataclasses.replace(SPEC, model="x" * 4097)),
        ("model", lambda: dataclasses.replace(SPEC, model="")),
        ("model", lambda: dataclasses.replace(SPEC, model="\ud800")),
        ("name", lambda: dataclasses.replace(SPEC, name="ü" * 128)),
        ("tenant", lambda: dataclasses.replace(SPEC, tenant="x" * 256)),
        ("part_bytes", lambda: dataclasses.replace(SPEC, part_bytes=0)),
        ("part_bytes", lambda: dataclasses.replace(SPEC, part_bytes=True)),
        ("geometry", lambda: dataclasses.replace(SPEC, geometry=None)),
        ("geometry", lambda: dataclasses.replace(SPEC, kind=Kind.OPAQUE)),
        ("geometry.layer_groups", lambda: dataclasses.replace(GEOMETRY, layer_groups=5)),
        ("geometry.head_shards", lambda: dataclasses.replace(GEOMETRY, head_shards=16)),
        ("geometry.block_tokens", lambda: dataclasses.replace(GEOMETRY, block_tokens=65537)),
        ("facts", lambda: dataclasses.replace(SPEC, facts=(("a", "1"), ("a", "1")))),
        ("facts", lambda: dataclasses.replace(SPEC, facts=tuple((f"{i}", "") for i in range(65)))),
        ("salt", lambda: root_key(SPEC, b"s" * 4097)),
        ("extras", lambda: chain_keys(SPEC, TOKENS, extras=[Extras()])),
        ("tokens", lambda: chain_keys(SPEC, [-1] * 16)),
        ("tokens", lambda: chain_keys(SPEC, [1 << 32] * 16)),
        ("tokens", lambda: chain_keys(SPEC, [1.0] * 16)),  # type: ignore[list-item]
        ("tokens", lambda: chain_keys(SPEC, [[1] * 16])),  # type: ignore[list-item]
        ("media.content", lambda: block_key(b"p" * 32, b"", Extras(media=(Media(0, b"short"),)))),
        ("media.offset", lambda: block_key(b"p" * 32, b"", Extras(media=(Media(1 << 63, b"c" * 32),)))),
    ],
)
def test_what_breaks_a_limit_is_refused_by_name(field_name: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field_name


def test_the_kind_of_token_array_does_not_matter() -> None:
    expected = chain_keys(SPEC, TOKENS)
    for dtype in ("i2", "<i4", ">i4", "i8", "u4", ">u8"):
        assert chain_keys(SPEC, np.array(TOKENS, dtype)) == expected
    assert chain_keys(SPEC, np.array(TOKENS * 2, "i4")[::2][:0]) == []
    assert chain_keys(SPEC, np.repeat(TOKENS, 2)[::2]) == expected
    assert chain_keys(SPEC, TOKENS[:47]) == expected[:2]


# -- collisions ------------------------------------------------------------------------------------------------------


def test_constructions_that_collide_under_weak_hashes_do_not_collide() -> None:
    base = [100] * 64
    variants = [base]
    for at in range(0, 48, 7):
        shifted = list(base)
        shifted[at] += 31
        shifted[at + 1] -= 1
        variants.append(shifted)
    variants.append(base[16:32] + base[:16] + [101] * 32)
    variants.append([101] * 32 + base[:32])
    variants.append([*base[:15], 0, *base[16:]])
    found = [tuple(chain_keys(SPEC, tokens)) for tokens in variants]
    assert len({chain[-1] for chain in found}) == len(variants)


def test_swapped_blocks_and_moved_boundaries_have_other_keys() -> None:
    one, two = list(range(16)), list(range(16, 32))
    forward, backward = chain_keys(SPEC, one + two), chain_keys(SPEC, two + one)
    assert not set(forward) & set(backward)
    narrow = dataclasses.replace(SPEC, geometry=dataclasses.replace(GEOMETRY, block_tokens=8))
    assert not set(chain_keys(narrow, one + two)) & set(forward)
    assert block_key(b"p" * 32, b"abcd") != block_key(b"p" * 31, b"pabcd")


def test_two_hundred_thousand_random_blocks_have_two_hundred_thousand_keys() -> None:
    draw = np.random.default_rng(11)
    short = dataclasses.replace(SPEC, geometry=dataclasses.replace(GEOMETRY, block_tokens=2))
    tokens = draw.integers(0, 128_256, 400_000)
    assert len(set(chain_keys(short, tokens))) == 200_000
    independent = dataclasses.replace(short, chains=Chains.NONE)
    pairs = {tuple(p) for p in tokens.reshape(-1, 2).tolist()}
    assert len(set(chain_keys(independent, tokens))) == len(pairs)


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=6))
def test_an_encoded_record_says_what_was_put_in(rows: list[tuple[int, bytes]]) -> None:
    encoded, found = b"".join(field(tag, value) for tag, value in rows), []
    while encoded:
        size = int.from_bytes(encoded[1:5], "little")
        found.append((encoded[0], encoded[5 : 5 + size]))
        encoded = encoded[5 + size :]
    assert found == rows
