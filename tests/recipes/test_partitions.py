"""The partitions of a node: both kinds, against plain objects, in one process and in several."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from clamor_ray._recipes.matching.partitions import (
    LocalPartitions,
    Packed,
    Partitions,
    SharedPartitions,
    in_band_bytes,
)
from clamor_ray._recipes.matching.shared import SharedMatcher
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import Tables

N = 4


class Particles:
    """An object of arrays and numbers."""

    def __init__(self, n: int) -> None:
        self.at = np.arange(float(n))
        self.mass = np.ones(n)
        self.steps = 0

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Particles)
        same = np.array_equal(self.at, other.at) and np.array_equal(self.mass, other.mass)
        return same and self.steps == other.steps


def tables() -> Tables:
    p = Builder()
    x, y, v = p.dataset([0] * N), p.dataset([0] * N), p.value(0)
    p.stage(lambda t, y, x: x, reads=[y], writes=[x])
    p.stage(lambda t, v: v, writes=[v])
    return p.tables()


@pytest.fixture(params=["local", "shared", "two processes"])
def places(request: pytest.FixtureRequest) -> Iterator[tuple[Tables, list[Partitions]]]:
    """Where partitions are read and changed in turn: one place, or two of the same node."""
    made = tables()
    if request.param == "local":
        yield made, [LocalPartitions()]
        return
    with SharedMatcher.create(made, heap_bytes=64 << 20) as matcher:
        found: list[Partitions] = [SharedPartitions(made, matcher)]
        if request.param == "shared":
            yield made, found
            return
        with SharedMatcher.attach(made, matcher.fd) as other:
            yield made, [*found, SharedPartitions(made, other)]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        (array, *left_rest), (other, *right_rest) = left["a"], right["a"]
        return same(array, other) and left_rest == right_rest
    if isinstance(left, np.ndarray):
        is_kind = isinstance(right, np.ndarray) and left.dtype == right.dtype
        return is_kind and left.shape == right.shape and bool((left == right).all())
    return type(left) is type(right) and bool(left == right)


VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.randrange(10**6),
    lambda rng: "x" * rng.randrange(6000),
    lambda rng: np.arange(rng.randrange(3000)) * rng.random(),
    lambda rng: np.asfortranarray(np.arange(12).reshape(3, 4)),
    lambda rng: np.arange(20)[::2],
    lambda rng: np.array([{"a": rng.random()}, None], dtype=object),
    lambda rng: np.array(rng.random()),
    lambda rng: np.zeros(0),
    lambda rng: Particles(1 + rng.randrange(900)),
    lambda rng: {"a": [np.arange(rng.randrange(2000)), rng.random()]},
    lambda rng: None,
    lambda rng: [rng.random() for _ in range(rng.randrange(2000))],
]


def change_in_place(value: Any, rng: random.Random) -> None:
    """As a function that returns nothing."""
    if isinstance(value, np.ndarray) and value.dtype != object and value.size:
        value[...] = value * 3
    elif isinstance(value, np.ndarray) and value.size:
        value.flat[0] = {"a": rng.random()}
    elif isinstance(value, Particles):
        value.at += 1
        if rng.random() < 0.5:
            value.steps += 1
        if rng.random() < 0.3:
            value.mass = value.mass * 2  # another array in its place
        if rng.random() < 0.2:
            value.mass = np.ones(rng.randrange(50))
    elif isinstance(value, dict):
        value["a"][0] += 1
        value["a"].append(rng.random())
    elif isinstance(value, list):
        value.append(rng.random())


@pytest.mark.parametrize("seed", range(8))
def test_as_plain_objects(seed: int, places: tuple[Tables, list[Partitions]]) -> None:
    """Tasks change partitions in place, return others, or what they were given; slices go and
    come back."""
    made, nodes = places
    stage = made.stages[0]
    rng = random.Random(seed)
    plain = {(d, i): rng.choice(VALUES)(rng) for d in (0, 1) for i in range(N)}
    for key, value in plain.items():
        rng.choice(nodes).put(key, copy.deepcopy(value))
    for _ in range(300):
        node, index = rng.choice(nodes), rng.randrange(N)
        key = (0, index)
        values = node.values(stage, index)
        read, changed = values
        assert same(read, plain[1, index])
        assert same(changed, plain[key])
        how = rng.randrange(6)
        results: dict[int, Any] = {}
        if how < 2:
            salt = rng.random()
            change_in_place(changed, random.Random(salt))
            change_in_place(plain[key], random.Random(salt))
        elif how == 2:
            results[0] = changed
        elif how == 3:
            results[0] = rng.choice(VALUES)(rng)
            plain[key] = copy.deepcopy(results[0])
        elif how == 4 and isinstance(changed, np.ndarray) and changed.dtype != object:
            results[0] = changed[::-1] if changed.ndim else changed + 1  # of the same memory
            plain[key] = copy.deepcopy(results[0])
        node.keep(stage, index, values, results)
        if how == 5:
            packed = {d: rng.choice(nodes).pack((d, index)) for d in (0, 1)}
            for d, each in packed.items():
                assert same(each.value(), plain[d, index])
                rng.choice(nodes).remove((d, index))
                with pytest.raises(KeyError):
                    rng.choice(nodes).value((d, index))
                rng.choice(nodes).put_packed((d, index), each)
    for key, value in plain.items():
        for node in nodes:
            assert same(node.value(key), value)


def two_written() -> Tables:
    p = Builder()
    x, y = p.dataset([0] * N), p.dataset([0] * N)
    p.stage(lambda t, x, y: (x, y), writes=[x, y])
    return p.tables()


@pytest.mark.parametrize("kind", ["local", "shared"])
@pytest.mark.parametrize(
    "returns",
    [
        lambda w, prev: (w - 1, w),
        lambda now, nxt: (nxt, now),
        lambda x, y: (np.append(x, 1.0), x),
        lambda x, y: (x[::-1], x[1:]),
        lambda x, y: ({"a": x}, x),
        lambda x, y: (x, [y]),
        lambda x, y: (y, y),
    ],
)
def test_one_partition_may_be_returned_as_another(kind: str, returns: Any) -> None:
    """As by plain objects that are copied: they do not change together later."""
    made = two_written()
    stage = made.stages[0]
    with SharedMatcher.create(made, heap_bytes=64 << 20) as matcher:
        shared = kind == "shared"
        node: Partitions = SharedPartitions(made, matcher) if shared else LocalPartitions()
        for n_items in (3, 60_000):
            x, y = np.arange(float(n_items)), np.full(n_items, 0.5)
            node.put((0, 0), x.copy())
            node.put((1, 0), y.copy())
            for _ in range(2):
                first, second = copy.deepcopy(returns(x, y))
                values = node.values(stage, 0)
                if not all(isinstance(each, np.ndarray) for each in values):
                    break
                one, other = returns(*values)
                node.keep(stage, 0, values, {0: one, 1: other})
                x, y = copy.deepcopy(first), copy.deepcopy(second)
                assert same_items(node.value((0, 0)), first)
                assert same_items(node.value((1, 0)), second)
                if isinstance(x, np.ndarray):
                    values = node.values(stage, 0)
                    values[0] += 1
                    node.keep(stage, 0, values, {})
                    x = x + 1
                    assert same_items(node.value((1, 0)), second)


def same_items(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return same_items(left["a"], right["a"])
    if isinstance(left, list):
        return all(same_items(a, b) for a, b in zip(left, right, strict=True))
    return same(left, right)


def test_what_came_read_only_is_replaced() -> None:
    made = tables()
    with SharedMatcher.create(made, heap_bytes=8 << 20) as matcher:
        node = SharedPartitions(made, matcher)
        for dataset in (0, 1):
            node.put((dataset, 0), None)
        for n in range(3):
            values = node.values(made.stages[0], 0)
            node.keep(made.stages[0], 0, values, {0: np.frombuffer(bytes([n] * 10), np.uint8)})
            assert node.value((0, 0)).tolist() == [n] * 10


def test_an_array_is_changed_where_it_is() -> None:
    """Nothing is packed, and the other process's array is the same memory."""
    made = tables()
    with contextlib.ExitStack() as stack:
        matcher = stack.enter_context(SharedMatcher.create(made, heap_bytes=8 << 20))
        there = stack.enter_context(SharedMatcher.attach(made, matcher.fd))
        one, other = SharedPartitions(made, matcher), SharedPartitions(made, there)
        for dataset in (0, 1):
            one.put((dataset, 0), np.zeros(1000))
        seen = other.value((0, 0))
        used_bytes = matcher.heap_used_bytes
        generations = list(matcher.memory.generations())
        values = one.values(made.stages[0], 0)
        values[1][:] = 7
        one.keep(made.stages[0], 0, values, {})
        assert (seen == 7).all()
        one.keep(made.stages[0], 0, values, {0: np.full(1000, 8.0)})  # copied into it
        assert (seen == 8).all()
        assert list(matcher.memory.generations()) == generations
        assert matcher.heap_used_bytes == used_bytes


def test_what_goes_takes_no_memory() -> None:
    made = tables()
    with SharedMatcher.create(made, heap_bytes=32 << 20) as matcher:
        partitions = SharedPartitions(made, matcher)
        before_bytes = matcher.heap_used_bytes
        for _ in range(100):
            partitions.put((0, 1), np.zeros(1 << 19))
            partitions.put((0, 1), Particles(1 << 15))
        partitions.remove((0, 1))
        assert matcher.heap_used_bytes == before_bytes


def test_what_is_no_array_is_counted() -> None:
    assert in_band_bytes(np.zeros(10**6)) < 1000
    assert in_band_bytes([0.5] * 10**5) > 10**5


def test_packed_arrays_may_be_changed() -> None:
    packed = Packed(*_packed(np.arange(5)))
    value = packed.value()
    value += 1
    assert packed.value().tolist() == [0, 1, 2, 3, 4]


def _packed(value: Any) -> tuple[bytes, tuple[bytes, ...]]:
    partitions = LocalPartitions()
    partitions.put((0, 0), value)
    packed = partitions.pack((0, 0))
    return packed.stream, packed.buffers
