"""Calls that a program makes often, each beside what Ray or NumPy has for the same purpose."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from bench.micro.conftest import CONTROL, OURS, Measure

N = 1 << 20
N_ROWS = 1000
both_sides = pytest.mark.parametrize("side", [CONTROL, OURS])


def random_numbers() -> Any:
    return np.random.default_rng(0).random(N)


@both_sides
def test_open(measure: Measure, side: str) -> None:
    """`get` of what this process has had before: against `ray.get` of the same in its own store."""
    array = random_numbers()
    if side == OURS:
        get: Callable[[], Any] = clamor.put(array).get
    else:
        reference = ray.put(array)

        def get() -> Any:
            return ray.get(reference)

    measure("open", side, get)
    assert float(get()[7]) == float(array[7])


@both_sides
def test_lookup_of_one(measure: Measure, side: str) -> None:
    """One number of an array that is resident: against the same of NumPy's."""
    private = random_numbers()
    ref = clamor.put(private)
    array = ref.get() if side == OURS else private
    measure("lookup", side, lambda: array[12345])
    assert float(array[12345]) == float(private[12345])


@both_sides
def test_lookup_of_rows(measure: Measure, side: str) -> None:
    """A thousand of them at random."""
    private = random_numbers()
    ids = np.random.default_rng(1).integers(0, N, N_ROWS)
    ref = clamor.put(private)
    array = ref.get() if side == OURS else private
    clamor.prefetch(ref.get())
    measure("lookup_rows", side, lambda: array[ids])
    assert np.array_equal(array[ids], private[ids])


@both_sides
def test_pickle_of_a_reference(measure: Measure, side: str) -> None:
    """Against an ObjectRef, which Ray counts as we count ours."""
    reference = clamor.put(random_numbers()) if side == OURS else ray.put(random_numbers())
    measure("pickle", side, lambda: ray.cloudpickle.dumps(reference))
    assert pickle.loads(ray.cloudpickle.dumps(reference)) == reference


@ray.remote(num_cpus=0)
class Nothing:
    """Ray's least call that another process answers."""

    def call(self) -> None:
        pass


@both_sides
def test_small_commit(measure: Measure, side: str) -> None:
    """One number changes, at home on this node: against an actor's call."""
    if side == OURS:
        ref = clamor.put(np.zeros(N))

        def call() -> None:
            with clamor.update(ref) as array:
                array[0] += 1

        measure("small_commit", side, call)
        assert float(ref.refresh().get()[0]) == ref.version > 0
    else:
        actor = Nothing.remote()
        measure("small_commit", side, lambda: ray.get(actor.call.remote()))
        ray.kill(actor)
