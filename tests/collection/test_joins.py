"""Joins against nested loops in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray.collection.data import blocks, shuffle
from clamor_ray.collection.data.blocks import from_items, items
from clamor_ray.collection.data.joins import KINDS
from tests.support.collection_items import SMALL_KEYS, for_all, norm, same

HOW = st.sampled_from(sorted(KINDS))
SIDE = st.one_of(
    st.lists(st.tuples(SMALL_KEYS, st.integers(0, 99)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("xyz")), max_size=12),
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0, 1)), max_size=12),
)


def nested_loops(left: list[Any], right: list[Any], how: str, meet: Any) -> list[Any]:
    """Pairs of (left item, right item), None where there is none: left order, then right's."""
    found: list[Any] = []
    for one in left:
        partners = [other for other in right if meet(one, other)]
        found += [(one, other) for other in partners]
        if not partners and how in ("left_outer", "full_outer"):
            found.append((one, None))
    if how in ("right_outer", "full_outer"):
        lonely = [other for other in right if not any(meet(one, other) for one in left)]
        found += [(None, other) for other in lonely]
    if how.endswith(("semi", "anti")):
        mine, others = (left, right) if how.startswith("left") else (right, left)
        wanted = how.endswith("semi")
        return [one for one in mine if any(meet(one, other) for other in others) is wanted]
    return found


def equal_keys(one: Any, other: Any) -> bool:
    return norm(one[0]) in {norm(other[0])}  # as dicts compare: no array of np.int32 == tuple


@for_all(SIDE, SIDE, HOW)
def test_pairs(left: list[Any], right: list[Any], how: str) -> None:
    found = list(items(shuffle.join_items(from_items(left), from_items(right), None, how)))
    expected = nested_loops(left, right, how, equal_keys)
    if not how.endswith(("semi", "anti")):
        expected = [((a or b)[0], (a and a[1], b and b[1])) for a, b in expected]
    assert [(norm(k), v) for k, v in found] == [(norm(k), v) for k, v in expected]


ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, 0, 1, 2]), st.sampled_from(["a", "b", None]), st.integers(0, 9)
    ),
    max_size=10,
)


@for_all(ROWS, ROWS, HOW, st.booleans(), st.integers(0, 10))
def test_tables(left: list[Any], right: list[Any], how: str, two: bool, cut: int) -> None:
    schema = [("k", pa.int64()), ("s", pa.string())]
    sides = []
    for rows, value in ((left, "v"), (right, "w")):
        columns = [dict(zip(("k", "s", value), row, strict=True)) for row in rows]
        table = pa.Table.from_pylist(columns, pa.schema([*schema, (value, pa.int64())]))
        sides.append(pa.concat_tables([table.slice(0, cut), table.slice(cut)]))
    on = ["k", "s"] if two else ["k"]
    if not two:
        sides[1] = sides[1].drop_columns(["s"])
    found = shuffle.join_items(*sides, on if two else "k", how)

    def meet(one: Any, other: Any) -> bool:
        return all(one[name] == other[name] and one[name] is not None for name in on)

    rows = [side.to_pylist() for side in sides]
    expected = nested_loops(*rows, how, meet)
    if not how.endswith(("semi", "anti")):
        names = ["k", "s", "v", "w"]
        expected = [
            {
                name: (b or {}).get(name) if (a or {}).get(name) is None else a[name]
                for name in names
            }
            for a, b in expected
        ]
    assert found.to_pylist() == expected
    # The rows are those of Arrow's own join, which has no order.
    arrows = sides[0].join(sides[1], on, join_type=KINDS[how]).select(found.column_names)
    assert sorted(map(repr, arrows.to_pylist())) == sorted(map(repr, found.to_pylist()))


def test_names_that_both_have() -> None:
    left = pa.table({"k": [1, 2], "v": [1, 2]})
    right = pa.table({"id": [2, 3], "v": ["x", "y"]})
    with pytest.raises(ValueError, match=r"'v' twice: give left_suffix or right_suffix"):
        shuffle.join_items(left, right, "k", "inner", right_on="id")
    found = shuffle.join_items(left, right, "k", "full_outer", right_on="id", right_suffix="_r")
    assert found.to_pydict() == {"k": [1, 2, 3], "v": [1, 2, None], "v_r": [None, "x", "y"]}
    twice = pa.table([[1], [2], [3]], ["k", "v", "v"])
    with pytest.raises(ValueError, match="2 columns 'v'"):
        shuffle.join_items(twice, right, "k", right_on="id", right_suffix="_r")
    with pytest.raises(ValueError, match="2 columns 'v'"):
        shuffle.join_items(twice, right, "v", right_on="id")


def test_columns_that_arrows_join_does_not_have() -> None:
    left = pa.table({"k": ["a", "b"], "l": [[1], None], "s": [{"x": 1}, {"x": 2}]})
    tensors = blocks.from_batch({"k": ["b", "c"], "t": np.arange(4.0).reshape(2, 2)})
    found = list(items(shuffle.join_items(left, tensors, "k", "outer")))
    assert [row["l"] for row in found] == [[1], None, None]
    assert found[0]["t"] is None
    assert found[1]["t"].tolist() == [0, 1]
    keys = pa.table({"k": [[1], [2]]})
    assert shuffle.join_items(keys, keys, "k").to_pydict() == {"k": [[1], [2]]}


def test_keys_of_other_types() -> None:
    ints = pa.table({"k": [1, 2], "v": [1, 2]})
    floats = pa.table({"k": [2.0, math.nan, 0.0], "w": [1, 2, 3]})
    assert shuffle.join_items(ints, floats, "k").to_pydict() == {"k": [2], "v": [2], "w": [1]}
    other = pa.table({"k": [math.nan, -0.0], "v": [8, 9]})
    assert shuffle.join_items(other, floats, "k").column("w").to_pylist() == [2, 3]
    words = pa.table({"k": pa.array(["a", "b"]).dictionary_encode(), "v": [1, 2]})
    plain = pa.table({"k": pa.array(["b"], pa.large_string())})
    assert shuffle.join_items(words, plain, "k").column("v").to_pylist() == [2]
    with pytest.raises(TypeError, match=r"'k' of the left is int64, 'k' of the right string"):
        shuffle.join_items(ints, pa.table({"k": ["a"]}), "k")


def test_what_does_not_join() -> None:
    table, pairs = pa.table({"k": [1]}), from_items([(1, 2)])
    with pytest.raises(ValueError, match="how is one of inner, left_outer"):
        shuffle.join_items(pairs, pairs, None, "cross")
    with pytest.raises(TypeError, match="One side of the join is a table"):
        shuffle.join_items(table, pairs, "k")
    with pytest.raises(ValueError, match="give their names"):
        shuffle.join_items(table, table, None)
    with pytest.raises(ValueError, match="leave `on` out"):
        shuffle.join_items(pairs, pairs, "k")
    with pytest.raises(errors.MissingColumnError, match="no column 'q'"):
        shuffle.join_items(table, table, "q")
    with pytest.raises(TypeError, match="A join works on pairs"):
        shuffle.join_items(from_items([1, 2]), pairs, None)


@pytest.mark.parametrize("how", sorted(KINDS))
def test_empty_sides(how: str) -> None:
    table, pairs = pa.table({"k": [1], "v": [2]}), from_items([(1, 2)])
    sides = (
        (table, table.slice(0, 0).rename_columns(["k", "w"]), "k"),
        (table, blocks.EMPTY, "k"),
        (pairs, blocks.EMPTY, None),
    )
    for full, empty, on in sides:
        one = blocks.n_items(shuffle.join_items(full, empty, on, how))
        assert one == (how in ("left_outer", "full_outer", "left_anti"))
        two = blocks.n_items(shuffle.join_items(empty, full, on, how))
        assert two == (how in ("right_outer", "full_outer", "right_anti"))
        assert blocks.n_items(shuffle.join_items(blocks.EMPTY, blocks.EMPTY, on, how)) == 0
    (kept,) = items(shuffle.join_items(pairs, blocks.EMPTY, None, "left"))
    assert same(kept, (1, (2, None)))


def test_sparks_names() -> None:
    pairs, other = from_items([(1, "a")]), from_items([(2, "b")])
    for name, rows in (
        ("inner", 0),
        ("left", 1),
        ("right", 1),
        ("outer", 2),
        ("full_outer", 2),
        ("leftouter", 1),
        ("left_semi", 0),
        ("leftanti", 1),
    ):
        assert blocks.n_items(shuffle.join_items(pairs, other, None, name)) == rows
