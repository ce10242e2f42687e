"""Deltas by themselves: combined, merged and collected, against a loop over the calls."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from clamor_ray._native import scatter
from clamor_ray._write.deltas import (
    UFUNCS,
    Array,
    Collector,
    Delta,
    Op,
    Sum,
    apply_sums,
    combine,
    dense,
    merged,
    sparse,
)
from clamor_ray.errors import ClosedError, ForkedError, RangeError

OPS: tuple[Op, ...] = ("add", "max", "min")


class Ref:
    def __init__(self, region: int) -> None:
        self._region = region


def _loop(op: Op, ids: Array, values: Array) -> dict[int, Array]:
    found: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for number, value in zip(ids.tolist(), values, strict=True):
            known = found.get(number)
            found[number] = value if known is None else UFUNCS[op](known, value)
    return found


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [np.uint32, np.uint64])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8", "u2"])  # in C, and not
def test_combine_is_a_loop(dtype: str, width: Any, op: Op, shape: tuple[int, ...]) -> None:
    seed = np.random.default_rng([len(shape), len(op), *dtype.encode()])
    for n in (0, 1, 7, 3000):
        ids = seed.integers(0, np.iinfo(width).max, 200, width, endpoint=True)
        ids = ids[seed.integers(0, 200, n)]
        values = seed.normal(scale=1e4, size=(n, *shape)).astype(dtype)
        if np.dtype(dtype).kind == "f":
            values[seed.random(values.shape) < 0.01] = np.nan
        rows = combine(op, ids, values)
        expected = _loop(op, ids, values)
        assert rows.ids.dtype == width
        assert rows.ids.tolist() == sorted(expected)
        if n:
            made = np.stack([expected[number] for number in rows.ids.tolist()])
            np.testing.assert_array_equal(rows.values, made)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8"])
def test_merged_lists_are_combined_ones(dtype: str, op: Op, shape: tuple[int, ...]) -> None:
    seed = np.random.default_rng([len(shape), len(op), *dtype.encode()])
    lists = []
    for width in (np.uint32, np.uint32, np.uint64):
        ids = seed.integers(0, 300_000, 2000).astype(width)
        values = (seed.normal(size=(2000, *shape)) * 1e4).astype(dtype)
        lists.append(combine(op, ids, values))
    made = getattr(merged([Sum(**{op: rows}) for rows in lists]), op)
    everything = np.concatenate([rows.ids for rows in lists])
    expected = combine(op, everything, np.concatenate([rows.values for rows in lists]))
    np.testing.assert_array_equal(made.ids, expected.ids)
    np.testing.assert_array_equal(made.values, expected.values)


def test_merged_in_order_whole_arrays_first() -> None:
    f8 = np.dtype("f8")
    first = Sum(dense=np.array([1e16, 0, 0]), add=combine("add", *_rows([0, 2], [1.0, 1.0])))
    second = Sum(dense=np.array([-1e16, 1, 0]), max=combine("max", *_rows([1], [9.0])))
    both = merged([first, second])
    assert both.dense is not None
    assert both.dense.tolist() == [0, 1, 0]
    array = np.zeros(3, f8)
    apply_sums(array, [both])
    assert array.tolist() == [1, 9, 1]
    array = np.zeros(5, f8)  # it has grown
    apply_sums(array, [first, second])
    assert array.tolist() == [(1e16 + 1) - 1e16, 9, 1, 0, 0]


def _rows(ids: list[int], values: list[float]) -> tuple[Any, Array]:
    return np.array(ids, np.uint32), np.array(values)


def test_a_collector_keeps_copies_and_is_bounded() -> None:
    f4 = np.dtype("f4")
    small = Collector(most_bytes=1 << 12)
    values = np.ones(100, f4)
    for _ in range(200):
        small.add(Ref(1), sparse("add", (50,), f4, np.arange(100) % 50, values))
        values[:] = 1  # the caller's own again
        assert small._new_bytes[1] <= (1 << 12) + 800
    values[:] = 77
    small.add(Ref(2), dense((2,), f4, np.ones(2, f4)))
    refs, sums = small.take()
    assert [ref._region for ref in refs] == [1, 2]
    assert sums[1].add is not None
    assert sums[1].add.values.tolist() == [400] * 50
    assert sums[2].dense is not None
    assert small.take()[1] == {}


def test_a_collector_refuses_adds_that_would_be_lost() -> None:
    f8 = np.dtype("f8")
    one = Collector()
    one.add(Ref(1), sparse("add", (5,), f8, [0], 1))
    child = os.fork()
    if child == 0:
        try:
            one.add(Ref(1), sparse("add", (5,), f8, [0], 1))
        except ForkedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.take()
    with pytest.raises(ClosedError, match="is over"):
        one.add(Ref(1), sparse("add", (5,), f8, [0], 1))


def test_ids_are_narrow_where_they_can_be() -> None:
    f8 = np.dtype("f8")
    for n_rows, width in ((1 << 32, np.uint32), ((1 << 32) + 1, np.uint64)):
        ids = sparse("add", (n_rows,), f8, [-1], 1).ids
        assert ids is not None
        assert (ids.dtype, int(ids[0])) == (width, n_rows - 1)


def test_c_checks_ids_before_it_writes() -> None:
    array = np.zeros(4)
    with pytest.raises(RangeError, match="row 4 of 4"):
        scatter.apply("add", array, np.array([0, 4], np.uint64), np.ones(2))
    assert not array.any()
    delta = Delta("add", np.array([3], np.uint32), np.ones(1))
    assert delta.n_bytes == 12
