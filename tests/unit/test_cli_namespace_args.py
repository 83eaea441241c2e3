"""A namespace from a TOML file or from flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvstore.cli.command_errors import CommandError
from kvstore.cli.namespace_args import add_namespace_flags, namespace_spec, read_namespace
from kvstore_client import Attention, Chains, Geometry, Kind, NamespaceSpec

FILE = """\
name = "chat"
tenant = "team-a"
model = "m"
weights_revision = "r1"
part_bytes = "5MiB"
chains = "chained"
[geometry]
block_tokens = 16
dtype = "bfloat16"
layers = 80
kv_heads = 8
head_dim = 128
attention = "mla"
head_shards = 2
[facts]
rank = "0"
"""


def _given(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_namespace_flags(parser)
    return parser.parse_args(flags)


def _file(folder: Path, text: str) -> Path:
    path = folder / "ns.toml"
    path.write_text(text)
    return path


def test_a_file_says_every_field(tmp_path: Path) -> None:
    geometry = Geometry(16, "bfloat16", 80, 8, 128, attention=Attention.MLA, head_shards=2)
    assert read_namespace(_file(tmp_path, FILE)) == NamespaceSpec(
        name="chat",
        tenant="team-a",
        model="m",
        weights_revision="r1",
        part_bytes=5 << 20,
        geometry=geometry,
        chains=Chains.CHAINED,
        facts=(("rank", "0"),),
    )


def test_without_a_file_the_namespace_is_opaque() -> None:
    spec = namespace_spec(_given("--name", "mine", "--part-bytes", "64KiB", "--tenant", "t"))
    assert (spec.name, spec.tenant, spec.part_bytes) == ("mine", "t", 64 << 10)
    assert (spec.kind, spec.chains) == (Kind.OPAQUE, Chains.NONE)


def test_file_and_flags_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--model: the namespace file says it already"):
        namespace_spec(_given("--namespace-file", str(_file(tmp_path, FILE)), "--model", "x"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('model = "m"\n', "", "model: is missing"),
        ('model = "m"', 'modell = "m"', "did you mean model?"),
        ("layers = 80", "layer = 80", "did you mean geometry.layers?"),
        ("layers = 80", 'layers = "80"', "geometry.layers: must be a whole number"),
        ('part_bytes = "5MiB"', 'part_bytes = "5 Mb"', "part_bytes: '5 Mb' is not a size"),
        ('chains = "chained"', 'chains = "linked"', "chains: is 'linked' (limit: chained, ordered, none)"),
        ("[geometry]", "[other]", "other: is not a field"),
        ("head_shards = 2", "head_shards = 3", "head_shards: 3 does not divide 8"),
        ('name = "chat"', 'name = ["chat"]', "name: must be text"),
        ('rank = "0"', "rank = 0", "facts.rank: must be text"),
    ],
)
def test_each_fault_names_file_and_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = _file(tmp_path, FILE.replace(old, new))
    with pytest.raises(CommandError) as caught:
        read_namespace(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is not TOML"):
        read_namespace(_file(tmp_path, "name: chat"))
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CommandError, match="is not TOML"):
        read_namespace(path)
