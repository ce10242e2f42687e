"""Objects taken apart and put together again over memory that is not theirs."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sklearn.ensemble import RandomForestClassifier
from sklearn.neighbors import BallTree, KDTree

from clamor_ray._objects import layout
from clamor_ray._objects.layout import (
    BLOCK_BYTES,
    BUFFER_ALIGNMENT,
    Plan,
    make_plan,
    put_together,
    take_apart,
)
from clamor_ray._objects.pointer import Pointer
from clamor_ray.errors import AddressClashError, ClamorWarning, UnpicklableError

RNG = np.random.default_rng(7)
POINTS = RNG.random((20_000, 3))


class Memory:
    """Stands for a lease: owns bytes, and shows when nobody looks into them any more."""

    def __init__(self, n_bytes: int, *, writable: bool) -> None:
        self._bytes = np.zeros(n_bytes, np.uint8)
        self.writable = writable

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface = dict(self._bytes.__array_interface__)
        interface["data"] = (interface["data"][0], not self.writable)
        return interface


def load(pickled: layout.Pickled, *, writable: bool = False) -> tuple[Any, weakref.ref[Memory]]:
    """Writes an object into memory of its own and rebuilds it there."""
    memory = Memory(pickled.plan.region_bytes, writable=writable)
    for offset, view in pickled.pieces():
        memory._bytes[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
    return put_together(np.asarray(memory), pickled.plan), weakref.ref(memory)


def round_trip(obj: object, **kwargs: Any) -> Any:
    return load(take_apart(obj), **kwargs)[0]


# ------------------------------------------------------------------ plans


@given(st.integers(0, 10_000), st.lists(st.integers(0, 50_000), max_size=30))
def test_buffers_are_aligned_and_apart(inband: int, sizes: list[int]) -> None:
    plan = make_plan(inband, sizes)
    end = inband
    for (offset, n_bytes), size in zip(plan.buffers, sizes, strict=True):
        assert n_bytes == size
        assert offset >= end
        assert offset % (BLOCK_BYTES if size >= BLOCK_BYTES else BUFFER_ALIGNMENT) == 0
        assert offset - end < BLOCK_BYTES
        end = offset + size
    assert plan.total_bytes == end <= plan.region_bytes
    assert plan.region_bytes % BLOCK_BYTES == 0 < plan.region_bytes


def test_a_plan_travels() -> None:
    plan = make_plan(100, [8, 5000])
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan == Plan(9096, 100, ((128, 8), (4096, 5000)))


def test_blocks_of_the_stream_and_chosen_buffers() -> None:
    plan = make_plan(5000, [3, 4096, 10_000, 0])
    assert layout.runs_of_buffers(plan, lambda _: False) == [(0, 2)]
    assert layout.runs_of_buffers(plan) == [(0, 6)]
    assert layout.runs_of_buffers(plan, lambda i: i == 2) == [(0, 2), (3, 3)]


def test_runs_of_buffers_in_any_order() -> None:
    plan = Plan(40_000, 100, ((36_864, 10), (0, 20_000), (4096, 5000), (0, 0)), 20_480)
    assert layout.runs_of_buffers(plan, lambda _: False) == [(5, 1)]
    assert layout.runs_of_buffers(plan) == [(0, 6), (9, 1)]
    assert layout.runs_of_buffers(plan, lambda i: i == 0) == [(5, 1), (9, 1)]


def test_capacity_is_reserved() -> None:
    assert Plan(5000, 100, capacity_bytes=9000).region_bytes == 12_288
    assert Plan(5000, 100, capacity_bytes=100).region_bytes == 8192
    plan, stream = layout.take_apart_zeros((10, 3), "f4", capacity=1_000_000)
    ((offset, n_bytes),) = plan.buffers
    assert (offset % BLOCK_BYTES, n_bytes) == (0, 120)
    assert plan.total_bytes == offset + 120
    assert 12_000_000 <= plan.region_bytes - offset < 12_000_000 + BLOCK_BYTES
    # Where the stream lies there is room for that of the longest.
    longest, its_stream = layout.take_apart_zeros((1_000_000, 3), "f4", capacity=1_000_000)
    assert len(stream) <= len(its_stream) <= offset
    assert longest.region_bytes == plan.region_bytes
    image = np.zeros(plan.region_bytes, np.uint8)
    image[: len(stream)] = np.frombuffer(stream, np.uint8)
    assert put_together(image, plan).shape == (10, 3)
    for shape, capacity in (((), 5), ((10, 3), 9), ((10, 3), -1)):
        with pytest.raises(ValueError, match="capacity"):
            layout.take_apart_zeros(shape, "f4", capacity=capacity)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1288490189, "1.2 GiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_bytes_for_people(n_bytes: int, text: str) -> None:
    assert layout.format_bytes(n_bytes) == text


# ------------------------------------------------------------------ NumPy

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "c order": POINTS,
    "f order": np.asfortranarray(POINTS),
    "strided": POINTS[::2],
    "column": POINTS[:, 1],
    "reversed": POINTS[::-1],
    "transposed 3d": RNG.random((10, 40, 30)).transpose(1, 0, 2),
    "zero size": np.zeros((0, 3)),
    "zero size dates": np.zeros(0, "M8[ns]"),
    "0-d": np.array(3.5),
    "0-d date": np.array("2020-02-02", "M8[D]"),
    "dates": np.arange(5000).astype("M8[s]"),
    "dates, f order": np.asfortranarray(np.arange(6000).reshape(2, 3000).astype("m8[s]")),
    "structured": np.zeros(500, [("t", "M8[ns]"), ("x", "<f4", (2,)), ("name", "U3")]),
    "strings": np.array([f"s{i}" for i in range(3000)]),
    "big endian": np.arange(5000, dtype=">i4"),
    "half": np.ones(5000, np.float16),
    "complex": np.ones(5000, np.complex128),
    "bool": np.ones(5000, bool),
    "record": np.zeros(1000, [("a", "f4")]).view(np.recarray),
    "masked": np.ma.masked_less(POINTS, 0.5),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_equal_and_read_only(name: str) -> None:
    array = ARRAYS[name]
    pickled = take_apart(array)
    assert pickled.plan.inband_bytes < 6000
    again, _ = load(pickled)
    assert type(again) is type(array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    np.testing.assert_array_equal(np.asarray(again), np.asarray(array))
    if array.size:
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(again)[...] = np.asarray(array)


def test_fortran_order_is_kept() -> None:
    assert round_trip(ARRAYS["f order"]).flags.f_contiguous


def test_buffers_are_not_copied_on_the_way_out() -> None:
    pickled = take_apart({"a": POINTS})
    assert np.shares_memory(np.frombuffer(pickled.buffers[0], np.float64), POINTS)


def test_buffers_are_views_of_the_memory() -> None:
    pickled = take_apart(POINTS)
    image = np.zeros(pickled.plan.region_bytes, np.uint8)
    for offset, view in pickled.pieces():
        image[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
    assert np.shares_memory(put_together(image, pickled.plan), image)


def test_private_memory_is_writable() -> None:
    again = round_trip(POINTS, writable=True)
    again[0] = 7
    assert (again[0] == 7).all()


def test_a_memmap_comes_back_as_its_content(tmp_path: Any) -> None:
    path = tmp_path / "array"
    mapped = np.memmap(path, np.int64, "w+", shape=(2000,))
    mapped[:] = np.arange(2000)
    again = round_trip(mapped)
    assert type(again) is np.ndarray
    assert (again == np.arange(2000)).all()


def test_arrays_of_objects_travel_in_band() -> None:
    array = np.array([1, "a", None, POINTS], object)
    again = round_trip(array)
    assert list(again[:3]) == [1, "a", None]
    np.testing.assert_array_equal(again[3], POINTS)


# ------------------------------------------------------------------ zeros


@pytest.mark.parametrize("shape", [0, 5, (), (0, 3), (3, 4), np.int64(9)])
@pytest.mark.parametrize("dtype", [np.float32, "M8[s]", [("a", "i4"), ("b", "U2")], ">i8"])
def test_zeros_without_an_array(shape: Any, dtype: Any) -> None:
    plan, inband = layout.take_apart_zeros(shape, dtype)
    image = np.zeros(plan.region_bytes, np.uint8)
    image[: len(inband)] = np.frombuffer(inband, np.uint8)
    again = put_together(image, plan)
    expected = np.zeros(shape, dtype)
    assert again.dtype == expected.dtype
    assert again.shape == expected.shape
    np.testing.assert_array_equal(again, expected)


def test_zeros_of_any_size_cost_nothing() -> None:
    plan, inband = layout.take_apart_zeros((10**6, 10**6), np.float64)
    assert plan.total_bytes > 8 * 10**12
    assert len(inband) < 1000


@pytest.mark.parametrize("args", [((3,), object), ((-1,), "f4"), ((3,), "S0")])
def test_zeros_that_cannot_be(args: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError):
        layout.take_apart_zeros(*args)


# ------------------------------------------------------------------ what others make of arrays


def frame() -> pd.DataFrame:
    n = 20_000
    table = pd.DataFrame(
        {
            "number": np.arange(n),
            "real": RNG.random(n),
            "text": [f"text {i}" for i in range(n)],
            "when": pd.date_range("2020", periods=n, freq="s"),
            "kind": pd.Categorical(["a", "b"] * (n // 2)),
        }
    )
    table["text"] = table["text"].astype(pd.StringDtype("pyarrow"))
    return table.set_index("number", drop=False)


@pytest.mark.parametrize("backend", ["numpy", "pyarrow"])
def test_pandas(backend: str) -> None:
    table = frame()
    if backend == "pyarrow":
        table = table.convert_dtypes(dtype_backend="pyarrow")
    pickled = take_apart(table)
    assert pickled.plan.inband_bytes < 6000
    again, _ = load(pickled)
    pd.testing.assert_frame_equal(again, table)


def test_arrow() -> None:
    n = 20_000
    table = pa.table(
        {
            "number": np.arange(n),
            "text": [f"text {i}" if i % 7 else None for i in range(n)],
            "list": [[i, i + 1] for i in range(n)],
            "struct": [{"a": i, "b": str(i)} for i in range(n)],
            "dictionary": pa.array(["x", "y"] * (n // 2)).dictionary_encode(),
        }
    )
    pickled = take_apart(table)
    assert pickled.plan.inband_bytes < 6000
    again, _ = load(pickled)
    assert again.equals(table)
    again.validate(full=True)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia"])
def test_sparse_matrices(kind: str) -> None:
    if kind == "dia":
        matrix = scipy.sparse.diags([RNG.random(2000), RNG.random(1990)], [0, 10])
    else:
        matrix = scipy.sparse.random(2000, 2000, 0.01, format=kind, rng=RNG)
    again = round_trip(matrix)
    assert abs(again - matrix).sum() == 0
    vector = RNG.random(2000)
    np.testing.assert_allclose(again @ vector, matrix @ vector)


@pytest.mark.parametrize("cls", [cKDTree, KDTree, BallTree])
def test_trees_answer_alike_and_leave_out_of_band(cls: Any) -> None:
    tree = cls(POINTS)
    pickled = take_apart(tree)
    assert pickled.plan.inband_bytes < pickled.plan.total_bytes / 20
    again, _ = load(pickled)
    queries = RNG.random((100, 3))
    for mine, theirs in zip(again.query(queries, 5), tree.query(queries, 5), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_forest_predicts_alike_and_leaves_out_of_band() -> None:
    forest = RandomForestClassifier(10, random_state=0).fit(POINTS, POINTS[:, 0] > POINTS[:, 1])
    pickled = take_apart(forest)
    assert pickled.plan.inband_bytes < 6000
    again, _ = load(pickled)
    np.testing.assert_array_equal(again.predict_proba(POINTS), forest.predict_proba(POINTS))


@dataclasses.dataclass
class Nested:
    name: str
    points: np.ndarray[Any, Any]
    more: dict[str, Any]


def test_nested_objects() -> None:
    shared = RNG.random(3000)
    obj = Nested("n", POINTS, {"a": [shared, (shared, 1)], "t": pa.table({"x": shared})})
    again = round_trip(obj)
    assert again.name == "n"
    np.testing.assert_array_equal(again.points, POINTS)
    assert again.more["a"][0] is again.more["a"][1][0]
    assert again.more["t"].equals(obj.more["t"])


# ------------------------------------------------------------------ what keeps the memory alive


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: POINTS, lambda a: a[5:10].T),
        (lambda: pa.table({"x": np.arange(9000)}), lambda t: t.column("x").chunk(0).slice(3)),
        (lambda: pd.DataFrame({"x": np.arange(9000.0)}), lambda t: t["x"].to_numpy()[3:]),
        (lambda: scipy.sparse.random(900, 900, 0.1, "csr", rng=RNG), lambda m: m.data),
        (lambda: cKDTree(POINTS), lambda t: t),
    ],
    ids=["numpy", "arrow", "pandas", "sparse", "tree"],
)
def test_a_part_keeps_the_memory_alive(make: Any, part: Any) -> None:
    obj, memory = load(take_apart(make()))
    piece = part(obj)
    del obj
    gc.collect()
    assert memory() is not None
    del piece
    gc.collect()
    assert memory() is None


def test_an_object_without_buffers_lets_go_at_once() -> None:
    obj, memory = load(take_apart({"a": list(range(100))}))
    assert obj == {"a": list(range(100))}
    assert memory() is None


# ------------------------------------------------------------------ what does not fit


def test_large_objects_without_buffers_warn() -> None:
    with pytest.warns(ClamorWarning, match=r"builtins\.dict keeps .* rebuilds that part whole"):
        take_apart({i: str(i) for i in range(200_000)})


def test_objects_with_mostly_buffers_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_apart({"names": ["x" * 10] * 1000, "points": POINTS})
        take_apart({i: str(i) for i in range(1000)})


@pytest.mark.parametrize("obj", [threading.Lock(), {"a": [threading.Lock()]}])
def test_what_cannot_be_pickled_is_named(obj: Any) -> None:
    with pytest.raises(UnpicklableError, match="lock") as caught:
        take_apart(obj)
    assert isinstance(caught.value.__cause__, TypeError)


def test_functions_and_local_classes_are_fine() -> None:
    class Local:
        def __init__(self) -> None:
            self.points = POINTS

    again = round_trip({"f": lambda x: x + 1, "o": Local()})
    assert again["f"](1) == 2
    np.testing.assert_array_equal(again["o"].points, POINTS)


def test_an_image_holds_everything() -> None:
    pickled = take_apart({"a": np.arange(20), "b": np.zeros(0), "c": "text"})
    image = pickled.image()
    assert len(image) == pickled.plan.total_bytes
    again = put_together(np.frombuffer(image, np.uint8), pickled.plan)
    np.testing.assert_array_equal(again["a"], np.arange(20))
    assert again["c"] == "text"


# ------------------------------------------------------------------ in place


class Building:
    """A region that objects are built in: the lower half is theirs, the upper is for copies."""

    def __init__(self, n_bytes: int) -> None:
        self.memory = Memory(n_bytes, writable=True)
        self.image = np.asarray(self.memory)
        self.address = self.image.ctypes.data
        self.end = n_bytes // 2
        self.placed: list[tuple[int, int]] = []

    def place(self, n_bytes: int, alignment: int) -> int:
        offset = self.end = layout.round_up(self.end, alignment)
        self.end += n_bytes
        self.placed.append((n_bytes, alignment))
        return offset

    def publish(self, obj: Any, **how: Any) -> tuple[Any, layout.InPlace]:
        end = self.address + self.image.nbytes
        taken = layout.take_apart_in_place(
            obj, self.address, end, self.place, capacity_bytes=self.image.nbytes, **how
        )
        for offset, view in taken.pieces:
            self.image[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
        return put_together(self.image, taken.plan), taken


def test_what_lies_in_the_region_is_not_copied() -> None:
    building = Building(1 << 20)
    inside = building.image[4096:44_096].view(np.float64)
    inside[:] = np.arange(5000)
    outside = np.arange(3000.0)
    obj = {"a": inside, "b": outside, "c": inside[:10], "d": inside[:0], "e": "text"}
    got, taken = building.publish(obj)
    assert taken.plan.buffers[0] == (4096, 40_000)
    assert taken.plan.buffers[2] == (4096, 80)
    assert building.placed[0] == (24_000, BLOCK_BYTES)
    assert building.placed[1:] == [(taken.plan.inband_bytes, BUFFER_ALIGNMENT)]
    assert taken.plan.inband_offset != 0
    assert (taken.plan.region_bytes, taken.plan.fixed) == (1 << 20, False)
    assert taken.plan.total_bytes == building.end
    for name in "abcd":
        np.testing.assert_array_equal(got[name], obj[name])
    assert got["e"] == "text"
    inside[7] = -1
    assert got["a"][7] == -1  # it is the same memory
    assert any(array is inside for array in taken.arrays)


def test_a_buffer_that_crosses_the_end_is_copied() -> None:
    building = Building(1 << 16)
    both = np.zeros(1 << 16, np.uint8)
    building.address = both.ctypes.data + 100  # what begins before the region, and ends in it
    _, taken = building.publish(both[50:200])
    assert building.placed[0] == (150, BUFFER_ALIGNMENT)
    assert len(taken.pieces) == 2


def test_pointers_in_place() -> None:
    building = Building(1 << 16)
    at = building.address + 512
    pointer = Pointer(at, building.image[512:1024])
    got, taken = building.publish([pointer, 5])
    assert taken.plan.fixed
    assert taken.plan.buffers == ((512, 512),)
    assert (got[0].address, got[0].nbytes, got[1]) == (at, 512, 5)
    elsewhere = building.image.copy()
    with pytest.raises(AddressClashError, match=f"{at:#x}"):
        put_together(elsewhere, taken.plan)
    assert building.publish(5, fixed=True)[1].plan.fixed
    with pytest.raises(UnpicklableError, match="means nothing in a copy"):
        take_apart({"p": pointer})
    memory = weakref.ref(building.memory)
    del building, taken, elsewhere
    del pointer
    gc.collect()
    assert memory() is not None
    del got
    gc.collect()
    assert memory() is None  # a pointer keeps its memory, and nothing else does
