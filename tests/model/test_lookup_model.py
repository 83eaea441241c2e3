"""Finding a chain by neighbouring rows gives what asking the index for each key gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.columns import BlockColumns
from kvstore.core.lookup import each_block, leading_blocks
from kvstore.core.namespaces import Namespace, NamespaceRules
from kvstore_wire.namespace import Chains, Kind, NamespaceSpec

ROWS = 120
KEYS = [bytes([number]) * 16 for number in range(60)]


def _namespace(index: int, columns: BlockColumns) -> Namespace:
    spec = NamespaceSpec(name=f"n{index}", model="m", kind=Kind.OPAQUE, chains=Chains.ORDERED, part_bytes=1)
    return Namespace(index, spec, NamespaceRules(), columns.ttl_place)


@st.composite
def tables(draw: st.DrawFn) -> tuple[BlockColumns, Namespace]:
    """Rows in runs of the chain, broken by gaps, by another namespace's equal keys and by removed blocks."""
    columns = BlockColumns(ROWS)
    mine, other = _namespace(0, columns), _namespace(1, columns)
    for owner in draw(st.permutations([mine, other])):
        order = list(range(len(KEYS)))
        for _ in range(draw(st.integers(0, 3))):
            a, b = draw(st.integers(0, 59)), draw(st.integers(0, 59))
            order[a], order[b] = order[b], order[a]
        for number in order[draw(st.integers(0, 10)) : draw(st.integers(20, 60))]:
            row = columns.add(KEYS[number])
            assert row is not None
            columns.namespace[row] = owner.index
            columns.doomed[row] = draw(st.integers(0, 30)) == 0
            if not columns.doomed[row]:
                owner.blocks[KEYS[number]] = row
    return columns, mine


chains = st.lists(st.integers(0, 59), max_size=12) | st.integers(0, 50).map(lambda first: list(range(first, 60)))


@given(table=tables(), chain=chains)
def test_leading_blocks_are_those_of_the_index(table: tuple[BlockColumns, Namespace], chain: list[int]) -> None:
    columns, namespace = table
    keys = [KEYS[number] for number in chain]
    expected = []
    for key in keys:
        if key not in namespace.blocks:
            break
        expected.append(namespace.blocks[key])
    assert leading_blocks(columns, namespace, keys).tolist() == expected
    assert each_block(namespace, keys).tolist() == [namespace.blocks.get(key, -1) for key in keys]


def test_a_chain_at_the_end_of_the_table_is_found_whole() -> None:
    columns = BlockColumns(ROWS)
    namespace = _namespace(0, columns)
    for key in KEYS:
        row = columns.add(key)
        assert row is not None
        namespace.blocks[key] = row
    assert np.array_equal(leading_blocks(columns, namespace, list(KEYS)), np.arange(len(KEYS)))
    assert leading_blocks(columns, namespace, [*KEYS[50:], b"?" * 16, KEYS[0]]).tolist() == list(range(50, 60))
