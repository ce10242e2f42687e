"""Split aggregation without a cluster: what one node merges, what the driver makes of shares."""

from __future__ import annotations

import operator
import threading
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.ring import reduce_into
from clamor_ray._protocol.split_aggregation import UFUNCS, AggregateLayout, How
from clamor_ray.actors.allreduce.merging import Aggregate, Runs, Spare
from clamor_ray.collection.run import split


def part(value: Any, index: int, n: int) -> Any:
    return value[len(value) * index // n : len(value) * (index + 1) // n]


def aggregate(op: str | None = "sum", **how: Any) -> Aggregate:
    return Aggregate(How(op, **how), Spare())


# ------------------------------------------------------------------ in C


@pytest.mark.parametrize("op", sorted(UFUNCS))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 1000])
def test_two_arrays_are_numpys(op: str, dtype: str, n: int) -> None:
    rng = np.random.default_rng(n)
    one, other = (rng.integers(-(2**31), 2**31 - 1, n) for _ in range(2))
    if dtype == "int64":
        one, other = one << 32, other << 32  # wraps around
    with np.errstate(all="ignore"):
        one, other = one.astype(dtype), other.astype(dtype)
    if dtype.startswith("float") and n:
        one[0], other[-1] = np.nan, np.inf
    out = np.empty_like(one)
    reduce_into(out, one, other, op)
    with np.errstate(all="ignore"):
        expected = UFUNCS[op](one, other)
    np.testing.assert_array_equal(out, expected)


def test_an_operation_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from clamor_ray._native import ring

    monkeypatch.setitem(ring.OPS, "sum", 77)
    with pytest.raises(errors.RangeError):
        reduce_into(np.zeros(2), np.zeros(2), np.zeros(2), "sum")


# ------------------------------------------------------------------ one node


@pytest.mark.parametrize("op", sorted(UFUNCS))
@pytest.mark.parametrize("n_segments", [0, 1, 3, 50])
def test_arrays_are_merged_whole_or_by_segments(op: str, n_segments: int) -> None:
    values = [np.random.default_rng(i).integers(-9, 9, 17) for i in range(4)]
    made = aggregate(op, n_segments=n_segments, split=part if n_segments else None)
    for partition, value in enumerate(values):
        value.flags.writeable = False  # as what lies in Ray's store
        made.add(partition, value)
    flat, is_own = made.take()
    assert is_own
    np.testing.assert_array_equal(flat, UFUNCS[op].reduce(values))


def test_one_array_is_not_copied() -> None:
    value = np.arange(5.0)
    made = aggregate()
    made.add(3, value)
    flat, is_own = made.take()
    assert not is_own
    assert np.shares_memory(flat, value)


def test_a_partition_counts_once_from_any_attempt() -> None:
    made = aggregate()
    for partition in (0, 1, 1, 0, 2, 1):
        made.add(partition, np.array([10**partition]))
    assert made.take()[0].tolist() == [111]
    assert made.has([0, 1, 2])
    assert not made.has([3])


def test_turns_make_the_order_whatever_comes_first() -> None:
    values = [np.array([1e16]), np.array([1.0]), np.array([-1e16]), np.array([1.0])]
    found = set()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        made = aggregate()
        for partition in order:
            assert not made.has(range(4))
            made.add(partition, values[partition], turn=partition)
        assert made.has(range(4))
        found.add(float(made.take()[0][0]))
    assert found == {((1e16 + 1.0) - 1e16) + 1.0}
    # In another order it is another number: the test can fail.
    assert ((1e16 - 1e16) + 1.0) + 1.0 not in found


def test_a_turn_that_comes_twice_counts_once() -> None:
    made = aggregate()
    for turn in (1, 1, 0, 0, 1):
        made.add(turn, np.array([1]), turn)
    assert made.take()[0].tolist() == [2]


def test_objects_are_reduced_by_the_function_and_may_be_changed() -> None:
    kept = [[1], [2]]

    def extend(one: list[int], other: list[int]) -> list[int]:
        one += other
        return one

    made = aggregate(None, n_segments=2, split=lambda u, i, n: u[i], reduce=extend)
    made.add(0, kept)
    made.add(1, [[3], [4]])
    assert made.objects() == [[1, 3], [2, 4]]
    assert kept == [[1], [2]]  # what lies in Ray's store is the same as before
    assert made.layout == AggregateLayout("", ((), ()))


def test_a_known_operation_on_what_is_no_array_is_the_functions_own() -> None:
    made = aggregate("sum", n_segments=1, split=lambda u, i, n: u, reduce=operator.add)
    made.add(0, ["a"])
    made.add(1, ["b"])
    assert made.objects() == [["a", "b"]]


@pytest.mark.parametrize("dtype", [np.uint8, np.complex128, ">f8", object, bool])
def test_arrays_that_c_does_not_know_are_reduced_by_numpy(dtype: Any) -> None:
    made = aggregate("max")
    for partition in range(3):
        made.add(partition, np.array([partition, 1, 1 - partition // 2]).astype(dtype))
    (found,) = made.objects()
    expected = np.maximum.reduce([np.array([p, 1, 1 - p // 2]).astype(dtype) for p in range(3)])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (np.zeros(3), "float64 of shape (3,)"),
        (np.zeros((2, 1)), "float64 of shape (2, 1)"),
        (np.zeros(2, np.float32), "float32 of shape (2,)"),
        ([0.0, 0.0], "objects that are no arrays of numbers"),
    ],
)
def test_what_differs_is_named_and_nothing_is_added(other: Any, told: str) -> None:
    made = aggregate()
    made.add(4, np.array([1.0, 2.0]))
    with pytest.raises(errors.CollectiveMismatchError) as caught:
        made.add(7, other)
    assert "Partition 4 made float64 of shape (2,), and partition 7 " + told in str(caught.value)
    assert made.take()[0].tolist() == [1.0, 2.0]


def test_functions_that_raise_are_named() -> None:
    def bad(*args: Any) -> Any:
        raise KeyError("none")

    split_fails = aggregate(n_segments=3, split=bad, names=("split_op (bad)", "reduce_op"))
    with pytest.raises(errors.FunctionFailedError) as caught:
        split_fails.add(5, [1])
    assert "split_op (bad) raised, at segment 0 of 3 of partition 5" in str(caught.value)
    assert "KeyError: 'none'" in str(caught.value)
    assert caught.value.cause == "KeyError"
    names = ("split_op", "reduce_op (bad)")
    fails = aggregate(None, n_segments=1, split=part, reduce=bad, names=names)
    fails.add(0, [1])
    with pytest.raises(errors.FunctionFailedError, match=r"reduce_op \(bad\) raised, at part"):
        fails.add(1, [1])


def test_a_buffer_serves_the_next_run_and_never_two_at_once() -> None:
    runs = Runs()
    arrays = [np.ones(100), np.ones(100)]

    def merged(run: int) -> Aggregate:
        made = runs.of(run, lambda: How("sum"))
        for partition, array in enumerate(arrays):
            made.add(partition, array)
        return made

    merged(1)
    first = merged(1).take()[0]
    runs.drop(1)  # it was taken: nobody else gets it
    second = merged(2).take()[0]
    assert not np.shares_memory(first, second)
    runs.give_spare(second)
    third = merged(3)
    assert np.shares_memory(third.take()[0], second)


def test_a_run_that_is_dropped_unread_gives_its_buffer_back() -> None:
    runs = Runs()
    for run in (1, 2):
        made = runs.of(run, lambda: How("sum"))
        made.add(0, np.ones(10))
        made.add(1, np.ones(10))
        if run == 1:
            lies_at = made._buffer.ctypes.data  # type: ignore[union-attr]
            runs.drop(1)
        else:
            assert made._buffer.ctypes.data == lies_at  # type: ignore[union-attr]


def test_runs_that_are_not_cleared_are_bounded() -> None:
    runs = Runs(most=3)
    for run in range(10):
        runs.of(run, lambda: How("sum"))
    assert list(runs._runs) == [7, 8, 9]


def test_waiting_for_partitions_has_a_deadline() -> None:
    runs = Runs()
    runs.of(1, lambda: How("sum")).add(0, np.zeros(1))
    with pytest.raises(errors.WaitTimeoutError):
        runs.whole(1, [0, 1], 0.05)

    def late() -> None:
        runs.of(1, lambda: How("sum")).add(1, np.zeros(1))
        runs.told()

    thread = threading.Timer(0.05, late)
    thread.start()
    assert runs.whole(1, [0, 1], 30).has([0, 1])
    thread.join()


# ------------------------------------------------------------------ the driver


def test_known_operations() -> None:
    ops = [np.add, operator.add, operator.iadd, "sum"]
    assert [split.op_of(op) for op in ops] == ["sum"] * 4
    assert split.op_of(np.multiply) == split.op_of("prod") == "prod"
    assert split.op_of(np.maximum) == split.op_of("max") == "max"
    assert split.op_of(np.minimum) == split.op_of("min") == "min"
    for unknown in (max, min, sum, np.subtract, lambda a, b: a + b, "mean", "add", [], None):
        assert split.op_of(unknown) is None


@pytest.mark.parametrize("n_members", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[], [0], [5], [3, 0, 4], [1] * 9, [0, 0, 2, 5, 0]])
def test_segments_are_cut_from_shares(n_members: int, sizes: list[int]) -> None:
    total = np.arange(sum(sizes))
    bounds = [len(total) * rank // n_members for rank in range(n_members + 1)]
    shares = [total[bounds[rank] : bounds[rank + 1]] for rank in range(n_members)]
    segments = split.cut(AggregateLayout("int64", tuple((size,) for size in sizes)), shares)
    assert [segment.shape for segment in segments] == [(size,) for size in sizes]
    assert np.concatenate([*segments, total[:0]]).tolist() == total.tolist()


def test_segments_within_a_share_are_not_copied() -> None:
    shares = [np.arange(6), np.arange(6, 12)]
    segments = split.cut(AggregateLayout("int64", ((2, 2), (2,), (3,), (3,))), shares)
    assert [np.shares_memory(s, shares[i // 2]) for i, s in enumerate(segments)] == [True] * 4
    assert segments[0].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("zero", [np.full((2, 3), 10), 10, np.full(3, 10.5), np.full((2, 3), 1j)])
def test_zero_counts_once_more(zero: Any) -> None:
    total = np.arange(6)
    layout = AggregateLayout("int64", ((2, 3),))
    made = split.whole(layout, [total[:2], total[2:]], "sum", zero, np.add)
    np.testing.assert_array_equal(made, zero + total.reshape(2, 3))
    assert made.dtype == (zero + total.reshape(2, 3)).dtype
    made[0, 0] = 7  # it is the user's


def test_every_composition_of_a_ring_has_its_name() -> None:
    class Actor:
        def __init__(self, name: bytes) -> None:
            self._actor_id = name

    one, two = Actor(b"1"), Actor(b"2")
    rings = split.SessionRings()
    name = rings.name([one, two], 4)
    assert rings.name([one, two], 4) == name
    others = {rings.name([two, one], 4), rings.name([one], 4), rings.name([one, two], 2)}
    assert len(others | {name}) == 4
    rings.forget()
    assert rings.name([one, two], 4) != name
