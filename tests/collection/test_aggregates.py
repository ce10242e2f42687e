"""sum, min, max, mean and count of partitions, against Python and NumPy over all items."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray.collection.data import blocks, shuffle
from clamor_ray.collection.data.aggregates import NAMES
from clamor_ray.collection.data.blocks import Columns, from_items, items
from tests.support.collection_items import for_all, same


def aggregate(parts: list[Any], what: str, on: Any = None) -> Any:
    return shuffle.finish(shuffle.merge([shuffle.partial(part, what, on) for part in parts]))


INTS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8),
    st.lists(st.integers(-9, 9), max_size=8),
    st.lists(st.integers(-(2**70), 2**70), max_size=8),
    st.lists(st.booleans(), max_size=8),
)


@for_all(st.lists(INTS, min_size=1, max_size=4))
def test_ints_are_exact(parts: list[list[int]]) -> None:
    values = [value for part in parts for value in part]
    made = [from_items(part) for part in parts]
    assert same(aggregate(made, "sum"), sum(values))
    assert aggregate(made, "count") == len(values)
    for what, function in (("min", min), ("max", max), ("mean", lambda v: sum(v) / len(v))):
        if values:
            assert aggregate(made, what) == function(values)
        else:
            with pytest.raises(errors.EmptyCollectionError, match=f"no {what}"):
                aggregate(made, what)


@for_all(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), min_size=1, max_size=4))
def test_floats(parts: list[list[float]]) -> None:
    values = [value for part in parts for value in part]
    made = [from_items(part) for part in parts]
    assert math.isclose(aggregate(made, "sum"), math.fsum(values), rel_tol=1e-12, abs_tol=1e-6)
    if values:
        assert aggregate(made, "min") == min(values)
        assert aggregate(made, "max") == max(values)
        mean = math.fsum(values) / len(values)
        assert math.isclose(aggregate(made, "mean"), mean, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize("what", ["sum", "min", "max", "mean"])
def test_nan_propagates_from_any_partition(what: str) -> None:
    for nan in (from_items([math.nan]), from_items([1, math.nan]), pa.table({"a": [math.nan, 1]})):
        on = "a" if isinstance(nan, pa.Table) else None
        one = pa.table({"a": [1.0, 2.0]}) if on else from_items([1.0, 2.0])
        for parts in ([nan, one], [one, nan], [blocks.EMPTY, one, nan]):
            assert math.isnan(aggregate(parts, what, on))


def test_nulls_are_skipped() -> None:
    table = pa.table({"a": [1, None, 3], "b": [None, 2.5, None], "c": ["x", None, "y"]})
    parts = [table.slice(0, 1), table.slice(1), blocks.EMPTY, table.slice(0, 0)]
    assert same(aggregate(parts, "sum", "a"), 4)
    assert same(aggregate(parts, "mean", "b"), 2.5)
    assert aggregate(parts, "count", "a") == 2
    assert aggregate(parts, "count") == 3
    assert aggregate(parts, "max", "c") == "y"
    assert aggregate(parts, "min", ["a", "c"]) == {"min(a)": 1, "min(c)": "x"}
    assert aggregate(parts, "count", ["a", "b"]) == {"count(a)": 2, "count(b)": 1}
    numbers = [part.select(["a", "b"]) if isinstance(part, pa.Table) else part for part in parts]
    for order in (numbers, numbers[::-1]):
        assert aggregate(order, "sum") == {"sum(a)": 4, "sum(b)": 2.5}
    assert aggregate([part.select(["a"]) for part in numbers[:2]], "sum") == 4
    with pytest.raises(errors.EmptyCollectionError):
        aggregate([table.slice(1, 1)], "min", "a")


def test_n_d_items_are_aggregated_by_element() -> None:
    points = np.random.default_rng(0).normal(size=(20, 2, 3)).astype(np.float32)
    parts = [points[:7], points[7:7], points[7:]]
    for what, expected in (
        ("sum", points.sum(axis=0, dtype=float)),
        ("mean", points.mean(axis=0, dtype=float)),
        ("min", points.min(axis=0)),
        ("max", points.max(axis=0)),
    ):
        found = aggregate(parts, what)
        assert found.shape == (2, 3)
        assert np.allclose(found, expected, rtol=1e-12)
    large = np.full((3, 2), 2**62)
    found = aggregate([large, large], "sum")
    assert found.tolist() == [6 * 2**62] * 2
    assert aggregate([large[:1], -large[:1]], "sum").dtype == np.int64
    with pytest.raises(TypeError, match="cannot be added"):
        aggregate([np.ones((2, 2)), np.ones((2, 3))], "sum")


def test_times_text_and_fields() -> None:
    days = np.array(["2020-01-02", "2020-01-01"], "M8[D]")
    assert aggregate([days], "min") == np.datetime64("2020-01-01")
    assert aggregate([np.array([3, 1], "m8[s]")], "sum") == np.timedelta64(4, "s")
    assert aggregate([from_items(["b"]), from_items(["a", "c"])], "max") == "c"
    pairs = Columns((np.array([1, 2]), from_items(["x", "y"])))
    assert aggregate([pairs, blocks.EMPTY], "sum", 0) == 3
    assert aggregate([pairs], "max") == (2, "y")
    for b in (from_items(["a", "b"]), pairs, days, from_items([None, 1]), from_items([[1], [2]])):
        with pytest.raises(TypeError, match="There is no sum of items of"):
            aggregate([b], "sum")


def test_what_cannot_be_aggregated() -> None:
    with pytest.raises(ValueError, match="not 'median'"):
        shuffle.partial(blocks.EMPTY, "median")
    with pytest.raises(errors.MissingColumnError):
        shuffle.partial(pa.table({"a": [1]}), "sum", "b")
    with pytest.raises(ValueError, match="nothing to merge"):
        shuffle.merge([])
    with pytest.raises(ValueError, match="cannot be merged"):
        shuffle.merge([shuffle.partial(np.ones(1), what) for what in ("sum", "min")])


@pytest.mark.parametrize("what", NAMES)
def test_nothing_at_all(what: str) -> None:
    for empty in (blocks.EMPTY, np.empty((0, 3)), pa.table({"a": pa.nulls(0, pa.int64())})):
        if what in ("sum", "count"):
            assert same(aggregate([empty, blocks.EMPTY], what), 0)
        else:
            with pytest.raises(errors.EmptyCollectionError):
                aggregate([empty, empty], what)


def test_merging_is_the_same_in_any_tree() -> None:
    parts = [shuffle.partial(from_items(list(range(i))), "mean") for i in range(6)]
    flat = shuffle.finish(shuffle.merge(parts))
    tree = shuffle.merge([shuffle.merge(parts[:2]), shuffle.merge([shuffle.merge(parts[2:])])])
    assert shuffle.finish(tree) == flat == 20 / 15
    assert list(items(from_items(list(range(2))))) == [0, 1]
