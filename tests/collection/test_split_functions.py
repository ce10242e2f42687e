"""Split aggregation without a cluster: what functions of the user's may do."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._protocol.split_aggregation import How
from clamor_ray.actors.allreduce.merging import MOST_DROPPED, Aggregate, Runs, Spare


def aggregate(split: Any, reduce: Any, n_segments: int = 2) -> Aggregate:
    return Aggregate(How(None, n_segments, split, reduce), Spare())


def test_one_object_may_be_several_segments() -> None:
    nothing: Counter[int] = Counter()

    def split(value: Any, index: int, n: int) -> Any:
        return Counter({k: v for k, v in value.items() if k % n == index}) or nothing

    def reduce(one: Any, other: Any) -> Any:
        one.update(other)
        return one

    made = aggregate(split, reduce, 4)
    for partition, key in enumerate([0, 1, 2, 3, 7]):
        made.add(partition, Counter([key]))
    assert made.objects() == [{0: 1}, {1: 1}, {2: 1}, {3: 1, 7: 1}]
    assert not nothing


def test_one_object_that_is_several_segments_is_copied_for_the_ring() -> None:
    made = aggregate(lambda value, index, n: value, None)
    made.add(0, [1])
    one, other = made.objects()
    assert one is not other


def read_only(value: float) -> Any:
    array = np.full(3, value)
    array.flags.writeable = False  # as what lies in Ray's store
    return array


@pytest.mark.parametrize("view", [lambda b: b, lambda b: b[:], lambda b: b.reshape(3, 1)[:, 0]])
def test_reduce_op_may_return_its_second_argument(view: Any) -> None:
    def reduce(one: Any, other: Any) -> Any:
        if not one.any():
            return view(other)
        one += other
        return one

    made = aggregate(lambda value, index, n: value, reduce)
    given = [read_only(value) for value in (0.0, 1.0, 2.0)]
    for partition, value in enumerate(given):
        made.add(partition, value)
    assert [segment.tolist() for segment in made.objects()] == [[3.0] * 3] * 2
    assert given[1].tolist() == [1.0] * 3


@pytest.mark.parametrize("put", [lambda b: {"a": b}, lambda b: b])
def test_reduce_op_may_keep_a_part_of_its_second_argument(put: Any) -> None:
    def reduce(one: Any, other: Any) -> Any:
        array = other["a"] if isinstance(other, dict) else other
        if one["a"] is None:
            return {"a": array}
        one["a"] += array
        return one

    made = aggregate(lambda value, index, n: value, reduce)
    for partition, value in enumerate([{"a": None}, put(read_only(1.0)), put(read_only(2.0))]):
        made.add(partition, value)
    assert [segment["a"].tolist() for segment in made.objects()] == [[3.0] * 3] * 2


@pytest.mark.parametrize("which", [SystemExit, GeneratorExit])
def test_an_exit_in_a_function_is_told_as_what_it_raised(which: Any) -> None:
    def ends(*args: Any) -> Any:
        raise which(3)

    with pytest.raises(errors.FunctionFailedError, match=which.__name__):
        How(None, 2, ends, ends).segments([1], 0)
    with pytest.raises(errors.FunctionFailedError, match=which.__name__):
        How(None, 2, ends, ends).two(1, 2, "here")


# ------------------------------------------------------------------ runs


def test_a_run_that_was_dropped_is_not_begun_again() -> None:
    runs = Runs()

    def how() -> How:  # the driver gives it up in the middle of a call that begins it
        runs.drop(1)
        return How("sum")

    assert runs.of(1, how) is None
    assert runs.of(1, lambda: How("sum")) is None
    assert runs.is_dropped(1)
    for other in range(2, MOST_DROPPED + 2):
        runs.drop(other)
    assert not runs.is_dropped(1)


def test_calls_do_not_wait_while_functions_are_loaded() -> None:
    runs = Runs()
    ended: list[bool] = []

    def how() -> How:
        other = threading.Thread(target=lambda: runs.drop(2))
        other.start()
        other.join(10)
        ended.append(not other.is_alive())
        return How("sum")

    assert runs.of(1, how) is not None
    assert ended == [True]
