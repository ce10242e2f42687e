"""Real objects: what a task on another node sees is what the driver put."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster, until

pytestmark = pytest.mark.lab

MIB = 1 << 20
BLOCK = 4096


def numbers(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random(n)


@dataclass
class Station:
    name: str
    series: Any
    inner: dict[str, Any]


# ------------------------------------------------------------------ objects
# Each: how to make it, and what to ask of it. The answers are arrays, text and numbers.


def structured() -> Any:
    dtype = np.dtype([("id", "<i8"), ("name", "S12"), ("at", "<f4", (3,))])
    array = np.zeros(20_000, dtype)
    array["id"], array["name"] = np.arange(20_000), b"name"
    array["at"] = numbers(60_000).reshape(-1, 3)
    return array


def arrow_table() -> Any:
    import pyarrow as pa

    def chunk(first: int) -> Any:
        rows = range(first, first + 30_000)
        return pa.table(
            {
                "n": pa.array([None if i % 7 == 0 else i for i in rows], pa.int64()),
                "text": pa.array([None if i % 11 == 0 else f"row {i}" * (i % 4) for i in rows]),
                "list": pa.array([[i, i + 1] if i % 3 else None for i in rows]),
                "kind": pa.array([f"k{i % 5}" for i in rows]).dictionary_encode(),
            }
        )

    table = pa.concat_tables([chunk(0), chunk(30_000)])
    assert table.column("n").num_chunks == 2
    return table


def ask_arrow(table: Any) -> list[Any]:
    import pyarrow.compute as pc

    table.validate(full=True)
    return [
        pc.sum(table["n"]).as_py(),
        table["n"].null_count,
        table["text"].to_pylist()[::997],
        table.slice(29_990, 20).to_pylist(),
    ]


def pandas_numpy() -> Any:
    import pandas as pd

    return pd.DataFrame(
        {
            "a": np.arange(50_000),
            "b": numbers(50_000),
            "when": pd.date_range("2020", periods=50_000, freq="min"),
            "kind": pd.Categorical([f"k{i % 9}" for i in range(50_000)]),
        }
    )


def pandas_arrow() -> Any:
    import pandas as pd
    import pyarrow as pa

    return pa.table({"a": range(50_000), "b": [f"t{i}" for i in range(50_000)]}).to_pandas(
        types_mapper=pd.ArrowDtype
    )


def ask_frame(frame: Any) -> list[Any]:
    return [
        frame.iloc[40_000:40_010].to_dict("list"),
        frame["a"].sum(),
        list(map(str, frame.dtypes)),
    ]


def sparse(form: str) -> Any:
    import scipy.sparse

    return scipy.sparse.random(3000, 2000, 0.02, format=form, rng=np.random.default_rng(1))


def ask_sparse(matrix: Any) -> list[Any]:
    return [matrix @ numbers(2000), matrix[17].toarray(), matrix.nnz, matrix.T @ numbers(3000)]


def points() -> Any:
    return numbers(60_000).reshape(-1, 3)


def ckdtree() -> Any:
    from scipy.spatial import cKDTree

    return cKDTree(points())


def sklearn_tree(kind: str) -> Any:
    from sklearn import neighbors

    return getattr(neighbors, kind)(points(), leaf_size=20)


def ask_tree(tree: Any) -> list[Any]:
    queries = numbers(300, seed=5).reshape(-1, 3)
    return list(tree.query(queries, k=5))


def forest() -> Any:
    from sklearn.ensemble import RandomForestRegressor

    x = numbers(6000).reshape(-1, 3)
    return RandomForestRegressor(12, random_state=0).fit(x, x.sum(axis=1) + np.sin(9 * x[:, 0]))


def ask_forest(model: Any) -> list[Any]:
    return [model.predict(numbers(3000, seed=2).reshape(-1, 3)), model.feature_importances_]


def nest() -> Any:
    series = np.arange(100_000)
    inner = {"deep": [{"matrix": sparse("csr")}, (np.float32(3), None)], "table": arrow_table()}
    return {"station": Station("here", series, inner), "same": series, "empty": {}}


def ask_nest(obj: Any) -> list[Any]:
    station = obj["station"]
    return [
        station.name,
        station.series[::501],
        obj["same"] is station.series,
        *ask_sparse(station.inner["deep"][0]["matrix"]),
        *ask_arrow(station.inner["table"]),
        station.inner["deep"][1],
        obj["empty"],
    ]


def ask_array(array: Any) -> list[Any]:
    flags = array.flags
    return [array, str(array.dtype), array.shape, flags.c_contiguous, flags.f_contiguous]


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Any]]]] = {
    "c order": (lambda: numbers(60_000).reshape(200, 300), ask_array),
    "f order": (lambda: np.asfortranarray(numbers(60_000).reshape(200, 300)), ask_array),
    "three axes, f order": (
        lambda: np.asfortranarray(numbers(60_000).reshape(20, 30, 100)),
        ask_array,
    ),
    "structured": (structured, ask_array),
    "zero size": (lambda: np.empty((0, 7), np.float32), ask_array),
    "zero size among others": (
        lambda: [np.empty(0, np.int16), numbers(9000), np.empty((3, 0))],
        lambda arrays: [answer for array in arrays for answer in ask_array(array)],
    ),
    "no axes": (lambda: np.array(7.5), ask_array),
    "strided": (lambda: numbers(60_000)[::3], lambda array: [array, array.shape]),
    "transposed slice": (
        lambda: numbers(90_000).reshape(300, 300)[10:200, 5:].T,
        lambda array: [array, array.shape],
    ),
    "times": (lambda: np.arange("2000", "2040", dtype="M8[D]"), ask_array),
    "masked": (
        lambda: np.ma.MaskedArray(numbers(9000), mask=np.arange(9000) % 5 == 0),
        lambda array: [array.filled(-1), array.mask, array.mean()],
    ),
    "arrow table": (arrow_table, ask_arrow),
    "pandas on numpy": (pandas_numpy, ask_frame),
    "pandas on arrow": (pandas_arrow, ask_frame),
    "csr": (lambda: sparse("csr"), ask_sparse),
    "csc": (lambda: sparse("csc"), ask_sparse),
    "cKDTree": (ckdtree, ask_tree),
    "KDTree": (lambda: sklearn_tree("KDTree"), ask_tree),
    "BallTree": (lambda: sklearn_tree("BallTree"), ask_tree),
    "random forest": (forest, ask_forest),
    "nested": (nest, ask_nest),
}


def kind_of(answer: Any) -> type[Any]:
    return np.ndarray if type(answer) is clamor.GlobalArray else type(answer)


def same(one: Any, two: Any) -> None:
    assert kind_of(one) is kind_of(two)
    if isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            same(left, right)
    else:
        assert one == two


def answers(name: str, obj: Any) -> Any:
    return OBJECTS[name][1](obj)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_task_on_the_other_node_sees_what_the_driver_put(
    clamor_cluster: ClamorCluster, name: str
) -> None:
    obj = OBJECTS[name][0]()
    expected = answers(name, obj)
    ref = clamor.put(obj)
    same(clamor_cluster.run(answers, name, ref), expected)
    same(answers(name, ref.get()), expected)
    assert ref._inline == (ref._plan.total_bytes < BLOCK)
    if isinstance(obj, np.ndarray):
        assert (ref.shape, ref.dtype, ref.nbytes) == (obj.shape, obj.dtype, obj.nbytes)
    clamor.free(ref)


@pytest.mark.parametrize("name", ["f order", "arrow table", "cKDTree", "nested", "no axes"])
def test_what_a_task_puts_the_driver_reads(clamor_cluster: ClamorCluster, name: str) -> None:
    ref = clamor_cluster.run(lambda: clamor.put(OBJECTS[name][0]()))
    same(answers(name, ref.get()), answers(name, OBJECTS[name][0]()))
    if not ref._inline:
        assert clamor_cluster.region(ref, node=1).is_home
        assert not clamor_cluster.region(ref, node=0).is_home
    clamor.free(ref)


# ------------------------------------------------------------------ read-only and private


def write_to(array: Any) -> None:
    array[0] = 1


@pytest.mark.parametrize("n", [10, 100_000])
def test_writing_to_a_view_is_numpys_own_error(clamor_cluster: ClamorCluster, n: int) -> None:
    ref = clamor.put(np.arange(n))
    array = ref.get()
    for view in (array, array[3:], array.reshape(2, -1)):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        array.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        clamor_cluster.run(write_to, ref)


def private_sum(refs: list[Any]) -> tuple[int, int, int]:
    array = refs[0].get(mode="c")
    array[::1000] = -1
    np.sort(array[:5000])
    array.sort()
    return int(array[0]), int(array.sum()), int(refs[0].get().sum())


@pytest.mark.parametrize("n", [100, 1_000_000])
def test_mode_c_is_writable_and_private(clamor_cluster: ClamorCluster, n: int) -> None:
    base = np.arange(n)
    ref = clamor.put(base)
    changed = base.copy()
    changed[::1000] = -1
    for node in (0, 1):
        got = clamor_cluster.run(private_sum, [ref], node=node)
        assert got == (-1, changed.sum(), base.sum())
    mine, other = ref.get(mode="c"), ref.get(mode="c")
    mine[:] = 7
    other[0] = 8
    assert (mine[0], other[0], other[1], ref.get()[0]) == (7, 8, 1, 0)
    assert clamor_cluster.run(lambda array: int(array.sum()), ref) == base.sum()
    with pytest.raises(ValueError, match="mode is 'r' or 'c', not 'w'"):
        ref.get(mode="w")  # type: ignore[arg-type]


# ------------------------------------------------------------------ many


def byte_of_each(refs: list[Any]) -> tuple[list[int], int, int]:
    def n_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    first = refs[0].get()
    before = n_fds()
    arrays = [first, *(ref.get() for ref in refs[1:])]
    values = [int(array[1000]) for array in arrays]
    return values, before, n_fds()


def test_a_thousand_variables_of_two_mib(clamor_cluster: ClamorCluster) -> None:
    n = 1000
    home_before = clamor_cluster.engine(0).home_bytes
    array = np.zeros(2 * MIB, np.uint8)
    refs = []
    for i in range(n):
        array[1000] = i % 251
        refs.append(clamor.put(array))
    values, fds_before, fds_after = clamor_cluster.run(byte_of_each, refs)
    assert values == [i % 251 for i in range(n)]
    assert fds_after - fds_before < 10
    # What was there before, and nobody refers to any more, may have gone meanwhile.
    assert clamor_cluster.engine(0).home_bytes >= n * 2 * MIB
    for ref in refs:
        clamor.free(ref)
    until(lambda: clamor_cluster.engine(0).home_bytes <= home_before + MIB)


def test_ten_thousand_variables_of_a_kib(clamor_cluster: ClamorCluster) -> None:
    before = clamor_cluster.engine(0)
    refs = [clamor.put(np.full(128, i)) for i in range(10_000)]
    assert all(ref._inline for ref in refs)
    got = clamor_cluster.run(lambda refs: [int(ref.get()[127]) for ref in refs], refs)
    assert got == list(range(10_000))
    assert clamor_cluster.engine(0).regions <= before.regions


# ------------------------------------------------------------------ what crosses


def fetched_by(cluster: ClamorCluster, function: Callable[..., Any], ref: Any, *rest: Any) -> int:
    """Blocks that the other node fetched for a task that gets the reference in a list."""
    cluster.run(function, [ref], *rest)
    return cluster.region(ref).fetched_blocks


def distinct_blocks(array: Any, index: Any) -> int:
    """Blocks that elements of a one-dimensional array lie on; the array begins a block."""
    return len(np.unique(np.arange(len(array))[index] * array.itemsize // BLOCK))


def prefetch_index(refs: list[Any], index: Any) -> None:
    view = refs[0].get()[index]
    clamor.prefetch(view)


@pytest.mark.parametrize(
    "index", [slice(None, None, 1024), slice(70_000, 90_000), slice(None, None, 100_000), 77]
)
def test_prefetch_of_a_view_fetches_its_blocks_and_no_more(
    clamor_cluster: ClamorCluster, index: Any
) -> None:
    array = numbers(MIB)
    ref = clamor.put(array)
    if isinstance(index, int):
        index = slice(index, index + 1)
    fetched = fetched_by(clamor_cluster, prefetch_index, ref, index)
    assert fetched == 1 + distinct_blocks(array, index)  # the pickle stream, and the view
    faults = clamor_cluster.engine(1).faults
    clamor_cluster.run(lambda refs, index: float(refs[0].get()[index].sum()), [ref], index)
    assert clamor_cluster.engine(1).faults == faults  # all of it was there
    clamor.free(ref)


def prefetch_parts(refs: list[Any]) -> list[int]:
    one, table = refs[0].get()
    clamor.prefetch([one[:512], one[100_000:100_512], table.slice(5, 10)])
    return [int(one[:512].sum()), int(one[100_000:100_512].sum()), table["a"][7].as_py()]


def test_prefetch_of_lists_and_arrow(clamor_cluster: ClamorCluster) -> None:
    import pyarrow as pa

    one = np.arange(MIB)
    table = pa.table({"a": np.arange(MIB), "b": np.arange(MIB) * 2.0})
    ref = clamor.put((one, table))
    before = clamor_cluster.engine(1).prefetched_blocks
    expected = [one[:512].sum(), one[100_000:100_512].sum(), 7]
    assert clamor_cluster.run(prefetch_parts, [ref]) == expected
    # The stream, 1 block, 2 blocks (it begins within one), and a block of each column.
    assert clamor_cluster.region(ref).fetched_blocks <= 1 + 1 + 2 + 2
    assert clamor_cluster.engine(1).prefetched_blocks > before
    clamor.free(ref)


def prefetch_without_waiting(refs: list[Any]) -> bool:
    clamor.prefetch(refs[0], wait=False)
    return True


def test_prefetch_of_a_reference_without_waiting(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(numbers(MIB))
    assert clamor_cluster.run(prefetch_without_waiting, [ref])
    until(lambda: clamor_cluster.region(ref).present_blocks == ref._length_bytes // BLOCK)
    clamor.free(ref)


def test_prefetch_of_a_copy_says_so(clamor_cluster: ClamorCluster) -> None:
    array = clamor.put(numbers(MIB)).get()
    with pytest.raises(ValueError, match="is not part of a global variable"):
        clamor.prefetch(array[[1, 2, 3]])
    clamor.prefetch(array[:0])  # nothing to do is no mistake


def touch(array: Any, rows: Any) -> float:
    return float(sum(array[row] for row in rows))


def test_only_what_was_touched_crosses(clamor_cluster: ClamorCluster) -> None:
    array = numbers(8 * MIB)  # 64 MiB, 16,384 blocks
    ref = clamor.put(array)
    rows = np.random.default_rng(3).choice(len(array), 100, replace=False)
    received = clamor_cluster.engine(1).bytes_received
    assert clamor_cluster.run(touch, ref, rows) == touch(array, rows)
    region = clamor_cluster.region(ref)
    assert distinct_blocks(array, rows) <= region.fetched_blocks <= 100 * 16
    assert clamor_cluster.engine(1).bytes_received - received < 0.12 * array.nbytes
    assert region.present_blocks == region.fetched_blocks
    clamor.free(ref)


def test_stats_show_what_faults_have_fetched_and_what_was_touched(
    clamor_cluster: ClamorCluster,
) -> None:
    array = numbers(8 * MIB)
    ref = clamor.put(array)
    rows = np.random.default_rng(4).choice(len(array), 300, replace=False)
    assert clamor_cluster.run(touch, ref, rows) == touch(array, rows)
    touched = distinct_blocks(array, rows)
    region = clamor_cluster.region(ref)
    # The stream was prefetched: that block was asked for by no fault.
    assert touched <= region.fault_fetched_blocks <= region.fetched_blocks
    assert abs(region.fault_touched_blocks - touched) <= touched / 4
    assert region.fault_ratio == region.fault_fetched_blocks / region.fault_touched_blocks
    assert 1 <= region.fault_ratio <= 2
    home = clamor_cluster.region(ref, node=0)
    assert (home.fault_fetched_blocks, home.fault_ratio) == (0, 0.0)
    clamor.free(ref)


def warned(refs: list[Any], rows: Any) -> tuple[list[str], list[str], float]:
    """Warnings of an open after some of the rows were read in a loop, then of another."""
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        got = float(sum(row[0] for row in map(refs[0].get().__getitem__, rows)))
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            refs[0].get()
            gc.collect()
    return ([str(w.message) for w in none], [str(w.message) for w in caught], got)


def test_a_process_is_told_once_that_its_faults_fetch_too_much(
    clamor_cluster: ClamorCluster,
) -> None:
    table = numbers(16 * MIB).reshape(-1, 512)  # 128 MiB, a block a row
    ref = clamor.put(table)
    # In order, and most of what lies between them is not touched.
    rows = np.flatnonzero(np.random.default_rng(5).random(len(table)) < 0.3)
    before, after, got = clamor_cluster.run(warned, [ref], rows)
    assert got == pytest.approx(float(table[rows, 0].sum()))
    region = clamor_cluster.region(ref)
    assert region.fault_fetched_blocks - region.fault_touched_blocks >= 4096, region
    assert before == []
    assert len(after) == 1
    assert "clamor.gather" in after[0]
    assert "page_bytes=4096" in after[0]
    clamor.free(ref)


def total(array: Any) -> int:
    return int(array.sum())


def test_a_block_crosses_once_for_all_workers_of_a_node(clamor_cluster: ClamorCluster) -> None:
    import ray

    array = np.arange(2 * MIB)
    ref = clamor.put(array)
    received = clamor_cluster.engine(1).bytes_received
    task = clamor_cluster.remote(total)
    got = ray.get([task.remote(ref) for _ in range(4)], timeout=90)
    assert got == [array.sum()] * 4
    assert clamor_cluster.region(ref).fetched_blocks == ref._length_bytes // BLOCK
    assert clamor_cluster.engine(1).bytes_received - received < 1.05 * ref._length_bytes
    before = clamor_cluster.engine(1).fetch_requests
    assert clamor_cluster.run(total, ref) == array.sum()
    assert clamor_cluster.engine(1).fetch_requests == before
    clamor.free(ref)


# ------------------------------------------------------------------ free


def get_first(refs: list[Any]) -> Any:
    return refs[0].get()[0]


def test_after_free_get_raises_everywhere(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.arange(100_000))
    copies = [ref]
    assert clamor_cluster.run(get_first, copies) == 0
    array = ref.get()
    clamor.free(ref)
    clamor.free(ref)
    assert array.sum() == 4_999_950_000  # what was read before goes on being readable
    del array
    with pytest.raises(errors.FreedError):
        ref.get()
    for node in (0, 1):
        with pytest.raises(errors.FreedError):
            clamor_cluster.run(get_first, copies, node=node)
    with pytest.raises(errors.FreedError):
        clamor.prefetch(ref)


def test_freed_by_a_task_is_freed_for_the_driver(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.arange(100_000))
    clamor_cluster.run(lambda refs: clamor.free(refs[0]), [ref])
    with pytest.raises(errors.FreedError):
        ref.get()


def read_when_told(array: Any, folder: str) -> int:
    (Path(folder) / "has begun").touch()
    until((Path(folder) / "go on").exists)
    return int(array.sum())


def test_a_running_task_keeps_what_it_reads(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    import ray

    home_before = clamor_cluster.engine(0).home_bytes
    array = np.arange(1, MIB)
    ref = clamor.put(array)
    answer = clamor_cluster.remote(read_when_told).remote(ref, str(tmp_path))
    until((tmp_path / "has begun").exists)
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        clamor_cluster.run(get_first, [ref])
    assert not clamor_cluster.is_gone(ref)
    (tmp_path / "go on").touch()
    assert ray.get(answer, timeout=60) == array.sum()
    until(lambda: clamor_cluster.is_gone(ref))
    assert clamor_cluster.engine(0).home_bytes <= home_before


def test_memory_goes_back(clamor_cluster: ClamorCluster) -> None:
    gc.collect()
    home, cached = clamor_cluster.engine(0).home_bytes, clamor_cluster.engine(1).cached_bytes
    ref = clamor.put(np.ones(4 * MIB))
    kept = ref.get()[5:10]
    assert clamor_cluster.run(total, ref) == 4 * MIB
    assert clamor_cluster.engine(0).home_bytes - home >= 32 * MIB
    assert clamor_cluster.engine(1).cached_bytes - cached >= 32 * MIB
    clamor.free(ref)
    until(lambda: clamor_cluster.engine(1).cached_bytes <= cached)
    assert kept.sum() == 5  # its view holds the lease here
    assert clamor_cluster.engine(0).home_bytes > home
    del kept
    until(lambda: clamor_cluster.engine(0).home_bytes <= home)


# ------------------------------------------------------------------ zeros and share


def three_sums(array: Any) -> tuple[float, float, float]:
    n = len(array)
    return float(array[:1000].sum()), float(array[n // 2 : n // 2 + MIB].sum()), float(array[-1])


def test_zeros_allocate_nothing(clamor_cluster: ClamorCluster) -> None:
    home, cached = clamor_cluster.engine(0).home_bytes, clamor_cluster.engine(1).cached_bytes
    ref = clamor.zeros(10**10, np.float32)
    assert ref.nbytes == 40 * 10**9
    assert clamor_cluster.engine(0).home_bytes - home <= 16 * BLOCK
    assert clamor_cluster.run(three_sums, ref) == (0, 0, 0)
    received = clamor_cluster.engine(1).cached_bytes - cached
    assert received < 32 * MIB  # of 37 GiB
    assert three_sums(ref.get()) == (0, 0, 0)
    assert clamor_cluster.engine(0).home_bytes - home < 32 * MIB
    clamor.free(ref)
    matrix = clamor.zeros((300, 500), "<i2").get()
    assert (matrix.shape, matrix.dtype, matrix.sum()) == ((300, 500), np.dtype("<i2"), 0)
    assert clamor.zeros(3).get().tolist() == [0, 0, 0]
    for wrong in (object, "V0"):
        with pytest.raises(ValueError):
            clamor.zeros(3, wrong)
    with pytest.raises(ValueError, match="negative"):
        clamor.zeros((3, -1))


def test_a_ray_object_is_shared_without_a_copy(clamor_cluster: ClamorCluster) -> None:
    import ray

    array = np.arange(4 * MIB)
    home = clamor_cluster.engine(0).home_bytes
    obj = {"large": array, "text": "abc", "small": np.arange(5)}
    object_ref = ray.put(obj)
    ref = clamor.share(object_ref)
    del object_ref
    assert clamor_cluster.engine(0).home_bytes - home < MIB
    rows = np.array([5, 2 * MIB, 4 * MIB - 1])
    assert clamor_cluster.run(lambda obj, rows: touch(obj["large"], rows), ref, rows) == rows.sum()
    assert clamor_cluster.region(ref).fetched_blocks < 200
    assert clamor_cluster.run(lambda obj: total(obj["large"]), ref) == array.sum()
    seen = ref.get()
    np.testing.assert_array_equal(seen["large"][::1000], array[::1000])
    assert (seen["text"], seen["small"].tolist()) == ("abc", [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="read-only"):
        seen["large"][0] = 1
    del seen
    clamor.free(ref)


def make_ones() -> Any:
    return np.ones(MIB)


def test_an_object_of_the_other_node_is_shared_there(clamor_cluster: ClamorCluster) -> None:
    object_ref = clamor_cluster.remote(make_ones).remote()
    ref = clamor.share(object_ref)
    assert clamor_cluster.region(ref, node=1).is_home
    assert ref.get()[::5000].sum() == len(range(0, MIB, 5000))
    clamor.free(ref)
    small = clamor_cluster.remote(lambda: 17).remote()  # Ray keeps it with its owner
    assert clamor.share(small).get() == 17
