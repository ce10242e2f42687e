"""Versions, transactions and views on a real cluster of two nodes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ANSWER_S, ClamorCluster, until
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

N = 1 << 18  # float64: 2 MiB
PER_BLOCK = 512


def ray_get(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=ANSWER_S)


def plain(function: Any, node: int = 1, **options: Any) -> Any:
    """As a task of a node, by Ray alone."""
    import ray

    return ray.remote(function).options(
        num_cpus=0, resources={node_resource(node): 0.001}, **options
    )


@pytest.fixture
def ref(clamor_cluster: ClamorCluster) -> Iterator[Any]:
    ref = clamor.put(np.zeros(N))
    yield ref
    clamor.free(ref)


def first_and_last(ref: Any) -> tuple[int, float, float]:
    x = ref.get()
    return ref.version, float(x[0]), float(x[-1])


def put_there() -> Any:
    return clamor.put(np.zeros(N))


def add(ref: Any, index: int, value: float) -> int:
    with clamor.update(ref) as x:
        x[index] += value
    return ref.version


# ------------------------------------------------------------------ one variable


def test_what_the_driver_commits_tasks_see(clamor_cluster: ClamorCluster, ref: Any) -> None:
    look = plain(first_and_last)
    old = ref.snapshot()
    assert ray_get(look.remote(ref)) == (0, 0, 0)
    assert add(ref, 0, 1) == 1
    assert ray_get(look.remote(ref)) == (1, 1, 0)
    assert ray_get(look.remote(old)) == (0, 0, 0)
    assert add(ref, -1, 2) == 2
    got = ray_get([look.remote(r) for r in (ref.at(0), ref.at(1), ref, old)])
    assert got == [(0, 0, 0), (1, 1, 0), (2, 1, 2), (0, 0, 0)]


def test_what_a_task_commits_all_see(clamor_cluster: ClamorCluster, ref: Any) -> None:
    assert ray_get(plain(add).remote(ref, 5, 7.0)) == 1  # the home is the driver's node
    assert ref.version == 0
    assert ref.get()[5] == 0
    assert ref.refresh().version == 1
    assert ref.get()[5] == 7
    assert ray_get(plain(add).remote(ref, 5, 7.0)) == 2
    assert ray_get(plain(add, node=0).remote(ref, 5, 7.0)) == 3
    assert ref.refresh().get()[5] == 21


def test_a_reader_keeps_its_version(clamor_cluster: ClamorCluster, ref: Any) -> None:
    import ray

    class Reader:
        def __init__(self, refs: list[Any]) -> None:
            (self.ref,) = refs
            self.array = self.ref.get()

        def look(self) -> tuple[int, float, float]:
            return self.ref.version, float(self.array[0]), float(self.array[-1])

    readers = [
        ray.remote(Reader).options(num_cpus=0, resources={node_resource(node): 0.001}).remote([ref])
        for node in (0, 1)
    ]
    assert ray_get([reader.look.remote() for reader in readers]) == [(0, 0, 0)] * 2
    mine = ref.get()
    for _ in range(5):
        add(ref, 0, 1)
        add(ref, -1, 1)  # a block that nobody had touched before
    assert (mine[0], mine[-1]) == (0, 0)
    assert ray_get([reader.look.remote() for reader in readers]) == [(0, 0, 0)] * 2
    assert first_and_last(ref) == (10, 5, 5)
    for reader in readers:
        ray.kill(reader)


def test_a_task_that_runs_again_sees_the_same(
    clamor_cluster: ClamorCluster, ref: Any, tmp_path: Any
) -> None:
    flag = tmp_path / "second"

    def once_more(x: Any, refs: list[Any]) -> tuple[float, int]:
        if not flag.exists():
            flag.write_text("now")
            add(refs[0], 0, 1)  # a version that the second run must not see
            os._exit(1)
        return float(x[0]), refs[0].version

    task = clamor_cluster.remote(once_more, max_retries=2)
    assert ray_get(task.remote(ref, [ref])) == (0, 0)
    assert ref.refresh().get()[0] == 1


def test_objects_of_tasks_and_actors(clamor_cluster: ClamorCluster, ref: Any) -> None:
    def count(x: Any) -> float:
        with clamor.update(x) as y:
            y[0] += 1
        return float(y[0])

    for _ in range(3):
        ray_get(clamor_cluster.remote(count).remote(ref))
    assert ref.refresh().get()[0] == 3

    class Counter:
        async def count(self, x: Any) -> None:
            with clamor.update(x) as y:
                y[0] += 1

        def fail(self, x: Any) -> None:
            with clamor.update(x) as y:
                y[0] = 99
                raise KeyError("mine")

    counter = clamor.remote(num_cpus=0, resources={node_resource(1): 0.001})(Counter).remote()
    ray_get(counter.count.remote(ref))
    with pytest.raises(KeyError):
        ray_get(counter.fail.remote(ref))
    ray_get(counter.count.remote(ref))
    assert ref.refresh().get()[0] == 5
    import ray

    ray.kill(counter)


def test_rivals(clamor_cluster: ClamorCluster, ref: Any) -> None:
    def work(refs: list[Any], block: int, n: int) -> None:
        for _ in range(n):
            clamor.retry(add, refs[0], 0, 1.0, attempts=200, most_s=0.2)  # all meet here
            add(refs[0], block * PER_BLOCK, 1.0)  # and none here

    work_there = [plain(work, node=block % 2) for block in range(1, 5)]
    done = [task.remote([ref], block, 10) for block, task in enumerate(work_there, 1)]
    ray_get(done)
    x = ref.refresh().get()
    assert x[[b * PER_BLOCK for b in range(5)]].tolist() == [40, 10, 10, 10, 10]
    assert ref.version == 80


def test_a_conflict_crosses_the_wire(clamor_cluster: ClamorCluster, ref: Any) -> None:
    old = ref.snapshot()
    add(ref, 3, 1)
    with pytest.raises(errors.CommitConflict) as caught:
        ray_get(plain(add).remote(old, 3, 1.0))
    conflict = caught.value.cause
    assert (conflict.region, conflict.base_version, conflict.version) == (ref._region, 0, 1)
    assert conflict.n_blocks == 1
    assert conflict.transaction is None


@pytest.mark.parametrize("node", [0, 1])
def test_large_commits(clamor_cluster: ClamorCluster, node: int) -> None:
    n = 20 << 17  # 20 MiB

    def fill(ref: Any) -> tuple[int, ...]:
        tx = clamor.update(ref)
        with tx as x:
            x[:] = np.arange(len(x))
        return tx.versions

    ref = clamor.put(np.zeros(n))
    assert ray_get(plain(fill, node).remote(ref)) == (1,)
    np.testing.assert_array_equal(ref.refresh().get(), np.arange(n))
    assert not ref.at(0).get().any()
    clamor.free(ref)


def test_arrays_grow(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.zeros((1000, 64), np.float32, capacity=10**6)

    def extend(ref: Any) -> None:
        with clamor.update(ref, grow_to=10**6) as x:
            x[-1] = 3

    ray_get(plain(extend).remote(ref))
    assert ref.get().shape == (1000, 64)
    assert ref.refresh().get().shape == (10**6, 64)
    assert ref.get()[-1].tolist() == [3] * 64
    assert not ref.get()[1000:100_000].any()
    assert ray_get(plain(lambda r: r.at(0).get().shape).remote(ref)) == (1000, 64)
    clamor.free(ref)


# ------------------------------------------------------------------ several variables


def test_transactions_over_two_homes(clamor_cluster: ClamorCluster, ref: Any) -> None:
    there = ray_get(plain(put_there).remote())
    small = clamor.put(np.zeros(4))

    def move(a: Any, b: Any, c: Any) -> None:
        with clamor.transaction(a, b, c) as (x, y, z):
            x[7] -= 1
            y[7] += 1
            z[0] += 1

    refs = (ref, there, small)
    stop = threading.Event()
    sums: list[tuple[float, float]] = []

    def watch() -> None:
        mine = [r._latest() for r in refs]
        while not stop.is_set():
            with clamor.transaction(*(r._latest() for r in mine)) as (x, y, z):
                sums.append((float(x[7] + y[7]), float(y[7] - z[0])))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for node in (0, 1, 0, 1, 1, 0):
            ray_get(plain(move, node).remote(*refs))
    finally:
        stop.set()
        watcher.join(ANSWER_S)
    assert len(sums) > 3
    assert set(sums) == {(0.0, 0.0)}
    assert [r.refresh().version for r in refs] == [6, 6, 6]
    assert [float(r.get()[i]) for r, i in zip(refs, (7, 7, 0), strict=True)] == [-6, 6, 6]
    clamor.free(there)
    clamor.free(small)


def test_inline_variables(clamor_cluster: ClamorCluster) -> None:
    small = clamor.put(np.zeros(4))
    assert ray_get(plain(add).remote(small, 2, 5.0)) == 1
    old = small.snapshot()
    assert small.refresh().get()[2] == 5
    with pytest.raises(errors.CommitConflict):
        ray_get(plain(add).remote(old, 2, 5.0))
    assert ray_get(plain(lambda r: r.at(0).get()[2]).remote(small)) == 0
    clamor.free(small)
    with pytest.raises(errors.FreedError):
        ray_get(plain(add).remote(old._thawed(), 2, 5.0))


def test_what_was_freed_cannot_be_updated(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.zeros(N))
    other = ref._latest()
    tx = clamor.update(other)
    x = tx.begin()
    x[0] = 1
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        tx.commit()
    with pytest.raises(errors.FreedError):
        ray_get(plain(add).remote(other, 0, 1.0))
    del x, tx
    until(lambda: clamor_cluster.is_gone(ref))


def test_a_failed_commit_lets_go_without_a_garbage_collection(
    clamor_cluster: ClamorCluster,
) -> None:
    ref = clamor.put(np.zeros(N))
    tx = clamor.update(ref)
    tx.begin()[0] = 1
    clamor.free(ref)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(errors.FreedError):
            tx.commit()
        del tx
        until(lambda: clamor_cluster.is_gone(ref), 10.0)
    finally:
        gc.enable()


def test_hash_maps(clamor_cluster: ClamorCluster) -> None:
    m = clamor.HashMap.build(np.arange(100_000), np.zeros(100_000))

    def set_there(m: Any) -> float:
        with clamor.update(m) as t:
            t[17] = 4.0
        return float(m.get(17))

    assert ray_get(plain(set_there).remote(m)) == 4
    assert (m.get(17), m.refresh().get(17)) == (0, 4)
    with clamor.update(m) as t:
        t[18] = 1.0
    assert ray_get(plain(lambda m: float(m.get(18))).remote(m)) == 1


def test_frames_cannot_take_new_columns(clamor_cluster: ClamorCluster) -> None:
    import pandas as pd

    ref = clamor.put(pd.DataFrame({"a": np.arange(50_000.0)}))
    with pytest.raises(errors.NotInPlaceError), clamor.update(ref) as frame:
        frame["b"] = 1
    assert list(ref.refresh().get().columns) == ["a"]
    clamor.free(ref)


# ------------------------------------------------------------------ bounds


def test_many_commits_leave_nothing_behind(clamor_cluster: ClamorCluster, ref: Any) -> None:
    look = plain(first_and_last)
    for _ in range(5):
        ray_get(look.remote(ref))
        for _ in range(10):
            with clamor.update(ref) as x:
                x[0] += 1
        x = None
        gc.collect()
    assert ray_get(look.remote(ref)) == (50, 50, 0)
    until(lambda: all(clamor_cluster.engine(n).layers == 0 for n in (0, 1)))
    until(lambda: all(clamor_cluster.region(ref, n).generations <= 1 for n in (0, 1)))
    engine = clamor_cluster.engine(0)
    assert engine.commits_published >= 50
    assert engine.commits_dropped == 0 or engine.commits_dropped < engine.commits_staged


def test_a_forked_child_cannot_commit(clamor_cluster: ClamorCluster, ref: Any) -> None:
    def fork(refs: list[Any]) -> tuple[int, tuple[int, ...]]:
        tx = clamor.update(refs[0])
        x = tx.begin()
        x[0] = 1
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                tx.commit()
            except errors.ForkedError:
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), tx.commit()

    assert ray_get(plain(fork).remote([ref])) == (0, (1,))


# ------------------------------------------------------------------ views


def test_a_task_returns_a_view_without_its_bytes(clamor_cluster: ClamorCluster) -> None:
    import ray

    ref = clamor.put({"data": np.arange(4 * N, dtype=np.float64).reshape(-1, 64)})

    def cut(d: Any, n: int) -> Any:
        return d["data"][n : n + 3000, ::2]

    returned = clamor_cluster.remote(cut).remote(ref, 100)
    ray.wait([returned], timeout=ANSWER_S)
    size = ray.experimental.get_object_locations([returned])[returned]["object_size"]
    assert size is None or size < 10_000
    expected = np.arange(4 * N, dtype=np.float64).reshape(-1, 64)[100:3100, ::2]
    got = ray_get(returned)
    np.testing.assert_array_equal(got, expected)
    with clamor.update(ref) as d:
        d["data"][:] = 0
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(ray_get(returned), expected)
    # On, into a closure and into another task.
    assert ray_get(plain(lambda: float(got.sum())).remote()) == expected.sum()
    assert ray_get(plain(lambda v: float(v.sum())).remote(got)) == expected.sum()
    assert ray_get(ray.put([got]))[0].shape == expected.shape
    clamor.free(ref)


def test_a_view_of_a_spread_array_travels_without_its_bytes(clamor_cluster: ClamorCluster) -> None:
    """It begins in one piece and ends in another one; tasks see the version that it is of."""
    import ray

    content = np.arange(8 * N, dtype=np.float64).reshape(-1, 64)
    ref = clamor.put(content, home="spread")
    pieces = ref._piece_versions()
    assert len(pieces) > 4
    rows = slice(pieces[0].length_bytes // 512 - 50, 2 * pieces[0].length_bytes // 512 + 50, 3)
    view, expected = ref.get()[rows, 1:], content[rows, 1:]
    put = ray.put(view)
    size = ray.experimental.get_object_locations([put])[put]["object_size"]
    assert size is None or size < 10_000
    with clamor.update(ref) as x:
        x[:] = 0
    for argument in (view, put):
        for node in (0, 1):
            found = ray_get(plain(lambda v: np.array(v), node).remote(argument))
            np.testing.assert_array_equal(found, expected)
    assert ray_get(plain(lambda: float(view.sum())).remote()) == expected.sum()  # in a closure
    assert ray_get(plain(lambda v: bool(v.flags.writeable)).remote(view)) is False
    clamor.free(ref)


def test_arrow_travels_as_a_reference(clamor_cluster: ClamorCluster) -> None:
    import ray

    ref = clamor.put(pa.table({"a": np.arange(N), "b": np.arange(float(N))}))
    put = ray.put(ref.get())
    size = ray.experimental.get_object_locations([put])[put]["object_size"]
    assert size is None or size < 20_000

    def total(table: Any) -> int:
        return int(table.column("a").to_numpy().sum())

    assert ray_get(plain(total).remote(put)) == N * (N - 1) // 2
    clamor.free(ref)


def test_a_view_of_what_was_freed(clamor_cluster: ClamorCluster) -> None:
    import ray

    ref = clamor.put(np.arange(N))
    put = ray.put(ref.get())
    clamor.free(ref)
    with pytest.raises(Exception, match="freed") as caught:
        ray_get(plain(lambda v: float(v.sum()), max_retries=0).remote(put))
    assert not isinstance(caught.value, ray.exceptions.GetTimeoutError)


def test_switched_off_by_the_environment(clamor_cluster: ClamorCluster, ref: Any) -> None:
    import ray

    task = clamor_cluster.remote(
        lambda x: x, runtime_env={"env_vars": {"CLAMOR_VIEW_REF_BYTES": "0"}}
    )
    returned = task.remote(ref)
    got = ray_get(returned)
    assert ray.experimental.get_object_locations([returned])[returned]["object_size"] > 8 * N
    assert not got.any()


def test_ordinary_arrays_travel_zero_copy(clamor_cluster: ClamorCluster) -> None:
    import ray

    array = np.arange(100 << 17)  # 100 MiB
    put = ray.put(array)
    one, two = ray_get(put), ray_get(put)
    np.testing.assert_array_equal(one[::1000], array[::1000])
    addresses = [a.__array_interface__["data"][0] for a in (one, two)]
    assert addresses[0] == addresses[1]  # both in Ray's store
    assert not one.flags.writeable


# ------------------------------------------------------------------ structures with pointers


def test_structures_of_pointers_are_updated_where_they_lie(clamor_cluster: ClamorCluster) -> None:
    import ctypes

    with clamor.build(1 << 20) as r:
        cells = r.empty(1024, np.uint64)
        cells[:] = 0
        address = cells.__array_interface__["data"][0]
        cells[0] = address + 8 * 100  # a pointer into the region
        ref = r.publish({"tree": r.pointer(address), "cells": cells})
    del cells

    def write_through(ref: Any) -> int:
        with clamor.update(ref) as d:
            inner = ctypes.c_uint64.from_address(int(d["tree"]))
            ctypes.c_uint64.from_address(inner.value).value = 77
        return ref.version

    def read_through(d: Any) -> int:
        inner = ctypes.c_uint64.from_address(int(d["tree"]))
        return ctypes.c_uint64.from_address(inner.value).value

    assert ray_get(plain(write_through).remote(ref)) == 1
    assert ray_get(clamor_cluster.remote(read_through).remote(ref._latest())) == 77
    assert ray_get(clamor_cluster.remote(read_through).remote(ref)) == 0
    held = ref.get()
    with pytest.raises(errors.AddressClashError):
        clamor.update(ref).begin()  # its address is taken, in this process, by another version
    del held
    gc.collect()
    assert write_through(ref) == 2
    for n in range(3):  # the copy of the block before gives way
        with clamor.update(ref) as d:
            inner = ctypes.c_uint64.from_address(int(d["tree"]))
            ctypes.c_uint64.from_address(inner.value).value = 80 + n
    assert ref.version == 5
    assert read_through(ref.get()) == 82
    clamor.free(ref)
