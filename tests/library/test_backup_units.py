"""Which chunks are copied together, and how a variable was placed, without a session."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from clamor_ray._backup import units
from clamor_ray._backup.chunks import CHUNK_BLOCKS, CHUNK_BYTES
from clamor_ray._backup.copying import FILE_BYTES, CopyOrder
from clamor_ray._backup.graph import GraphVariable
from clamor_ray._objects.layout import BLOCK_BYTES, Plan
from clamor_ray._protocol.messages import CheckpointVariable, Latest, RegionRecord
from clamor_ray._read.ref import GlobalRef
from clamor_ray._redundancy.levels import Level


def known(nodes: list[str], **record: Any) -> CheckpointVariable:
    region = RegionRecord(1, 0, 0, 1, (), **record)
    return CheckpointVariable(Latest(1, 0), region, (), None, tuple(nodes))


def saved(nodes: list[str], piece_bytes: int) -> GraphVariable:
    ref: GlobalRef[Any] = GlobalRef(1, 0, 0, 4096, Plan(10, 10), "scope")
    return GraphVariable(ref, known(nodes, n_pieces=len(nodes), piece_bytes=piece_bytes))


@given(st.lists(st.integers(0, 20 * CHUNK_BLOCKS), max_size=50))
@settings(deadline=None)
def test_chunks_with_blocks(numbers: list[int]) -> None:
    expected = sorted({number // CHUNK_BLOCKS for number in numbers})
    assert units.chunks_with(BitMap(numbers)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "DENSE_BLOCKS", 0)
        assert units.chunks_with(BitMap(numbers)) == expected
    assert list(units.blocks_of_chunk(2)) == list(range(2 * CHUNK_BLOCKS, 3 * CHUNK_BLOCKS))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), unique=True, max_size=100))
@settings(deadline=None)
def test_each_chunk_is_in_one_file_of_its_node(chunks: list[tuple[int, int]]) -> None:
    variables = [saved([f"node{(v + i) % 3}" for i in range(6)], 8 * CHUNK_BYTES) for v in range(4)]
    made = units.Units("here")
    for variable, chunk in chunks:
        blocks = bytes(units.blocks_of_chunk(chunk).serialize())
        made.add(variables[variable], variable, CopyOrder(chunk, blocks, ""))
    found = []
    for unit in made.all():
        assert 0 < unit.n_bytes <= FILE_BYTES
        n_chunks = sum(map(len, unit.orders.values()))
        assert unit.n_bytes == n_chunks * CHUNK_BLOCKS * BLOCK_BYTES
        for variable, orders in unit.orders.items():
            for order in orders:
                assert unit.node_id == f"node{(variable + order.chunk // 8) % 3}"
                found.append((variable, order.chunk))
    assert sorted(found) == sorted(chunks)


def test_many_small_variables_share_a_file() -> None:
    made = units.Units("here")
    order = CopyOrder(0, bytes(BitMap([0]).serialize()), "")
    for index in range(1000):
        made.add(saved(["there"], 0), index, order)
    assert [len(unit.refs) for unit in made.all()] == [256, 256, 256, 232]
    made = units.Units("here")
    made.add(saved([""], 0), 0, order)  # its home is lost: whoever has it
    assert [unit.node_id for unit in made.all()] == ["here"]


@pytest.mark.parametrize(
    ("variable", "level"),
    [
        (known(["a"]), None),
        (known(["a"], on_disk=True), Level("raid0", spill=True, is_here=True)),
        (known(["a", "b"], n_pieces=2), Level("raid0")),
        (known(["a", "a"], n_pieces=2), Level("raid0")),
        (known(["a", "b"], n_pieces=2, on_disk=True), Level("raid0", spill=True)),
        (known(["a", "a"], n_pieces=2, on_disk=True), Level("raid0", spill=True, is_here=True)),
        (known(["a", "b", "c"], n_pieces=1, group_width=1, group_parity=2), Level("raid1", 3)),
        (known([*"abcd", "c", "c"], n_pieces=4, group_width=2, group_parity=1), Level("raid4")),
        (known([*"abcd", "c", "a"], n_pieces=4, group_width=2, group_parity=1), Level("raid5")),
    ],
)
def test_how_it_was_placed(variable: CheckpointVariable, level: Level | None) -> None:
    assert units.level_of_known(variable) == level
