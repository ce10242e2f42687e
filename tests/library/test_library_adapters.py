"""Our adapters: the same answers over memory that is not theirs, and what they give way to."""

from __future__ import annotations

import datetime
import gc
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from scipy.spatial import KDTree, cKDTree

from clamor_ray._objects import library_adapters
from clamor_ray._objects.layout import Pickled, put_together, take_apart
from clamor_ray.errors import NotInPlaceError
from tests.library.test_layout import round_trip

RNG = np.random.default_rng(5)
VECTORS = RNG.random((5_000, 32), np.float32)
POINTS = {
    "random": RNG.random((3_000, 3)),
    "equal": np.zeros((100, 2)),
    "one leaf": RNG.random((5, 200)),
    "repeated": np.repeat(RNG.random((50, 2)), 40, axis=0),
    "one": np.ones((1, 1)),
}


def memory_of(pickled: Pickled) -> npt.NDArray[np.uint8]:
    """A region's memory with the object in it; read-only, as readers have it."""
    image = np.zeros(pickled.plan.region_bytes, np.uint8)
    for offset, view in pickled.pieces():
        image[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
    image.flags.writeable = False
    return image


# ------------------------------------------------------------------ SciPy


@pytest.mark.parametrize("how", [{}, {"balanced_tree": False}, {"compact_nodes": False}])
@pytest.mark.parametrize("cls", [cKDTree, KDTree])
@pytest.mark.parametrize("name", POINTS)
def test_a_tree_has_the_same_nodes(name: str, cls: Any, how: dict[str, Any]) -> None:
    points = POINTS[name]
    tree = cls(points, leafsize=10, **how)
    reduction = library_adapters.library_reduction(tree)
    assert reduction is not NotImplemented
    made = round_trip(tree)
    assert type(made) is cls
    states = [
        each.__getstate__()[0].view(np.int64).reshape(-1, 9)[:, [0, 1, 2, 3, 4, 7, 8]]
        for each in (tree, made)
    ]
    assert np.array_equal(*states)
    for got, want in zip(made.query(points[:20], k=3), tree.query(points[:20], k=3), strict=True):
        assert np.array_equal(got, want)
    assert made.query_ball_point(points[0], 0.1) == tree.query_ball_point(points[0], 0.1)


def test_nodes_take_a_tenth_and_points_are_where_they_were_put() -> None:
    tree = cKDTree(RNG.random((50_000, 3)))
    pickled = take_apart(tree)
    nodes_bytes = tree.__getstate__()[0].nbytes
    assert pickled.plan.inband_bytes < nodes_bytes / 10
    assert sum(n for _, n in pickled.plan.buffers) < tree.data.nbytes + tree.indices.nbytes + 100
    image = memory_of(pickled)
    made = put_together(image, pickled.plan)
    assert np.shares_memory(made.data, image)
    assert np.shares_memory(made.indices, image)


def test_an_empty_tree_and_a_subclass_and_other_nodes_are_pickled_as_scipy_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Named(KDTree):
        pass

    assert round_trip(cKDTree(np.empty((0, 3)))).n == 0
    assert library_adapters.library_reduction(Named(POINTS["random"])) is NotImplemented
    reduce = library_adapters._reduce_scipy
    assert reduce(cKDTree(POINTS["random"])) is not NotImplemented
    expand = library_adapters._expand
    monkeypatch.setattr(library_adapters, "_expand", lambda *parts: expand(*parts) + 1)
    assert reduce(cKDTree(POINTS["random"])) is NotImplemented


# ------------------------------------------------------------------ faiss


def made_index(factory: str) -> Any:
    index = faiss.index_factory(VECTORS.shape[1], factory)
    index.train(VECTORS)
    if factory.startswith("IDMap"):
        index.add_with_ids(VECTORS, np.arange(len(VECTORS)) + 7)
    else:
        index.add(VECTORS)
    return index


@pytest.fixture(autouse=True)
def one_thread() -> None:
    faiss.omp_set_num_threads(1)


@pytest.mark.parametrize(
    "factory", ["Flat", "IVF16,Flat", "HNSW16,Flat", "IDMap,Flat", "IVF16,SQ8", "SQ8", "PCA8,Flat"]
)
def test_an_index_answers_from_read_only_memory(factory: str) -> None:
    index = made_index(factory)
    want = index.search(VECTORS[:20], 5)
    pickled = take_apart({"index": index})
    assert pickled.plan.inband_bytes < 1000
    image = memory_of(pickled)
    made = put_together(image, pickled.plan)["index"]
    del image, index
    gc.collect()
    for got, expected in zip(made.search(VECTORS[:20], 5), want, strict=True):
        assert np.array_equal(got, expected)


def test_a_flat_index_reads_the_memory_itself() -> None:
    pickled = take_apart(made_index("Flat"))
    image = memory_of(pickled)
    made = put_together(image, pickled.plan)
    address = int(image.ctypes.data)
    assert address <= int(made.get_xb()) < address + image.nbytes


def test_a_binary_index() -> None:
    codes = RNG.integers(0, 256, (1_000, 8)).astype(np.uint8)
    index = faiss.IndexBinaryFlat(64)
    index.add(codes)
    made = round_trip(index)
    assert np.array_equal(made.search(codes[:9], 3)[0], index.search(codes[:9], 3)[0])


def test_growth_is_refused_and_the_hint_makes_an_index_that_grows() -> None:
    made = round_trip(made_index("Flat"))
    for change in (lambda: made.add(VECTORS), made.reset, lambda: made.remove_ids(np.arange(3))):
        with pytest.raises(NotInPlaceError, match="of a faiss index that is a global") as caught:
            change()
    assert "faiss.deserialize_index(faiss.serialize_index(index))" in caught.value.hint
    index = faiss.deserialize_index(faiss.serialize_index(made))
    index.add(VECTORS)
    assert index.ntotal == 2 * len(VECTORS) == 2 * made.ntotal
    assert round_trip(made).ntotal == made.ntotal  # it may be put again


# ------------------------------------------------------------------ Polars


def test_a_frame_is_the_same_and_its_columns_are_buffers() -> None:
    pl = pytest.importorskip("polars")
    n = 20_000
    frame = pl.DataFrame(
        {
            "x": RNG.random(n),
            "none": [None if i % 3 else i for i in range(n)],
            "text": [f"a name of more than twelve bytes {i}" for i in range(n)],
            "list": [[i, i + 1] for i in range(n)],
            "time": [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)] * n,
        }
    ).with_columns(
        category=pl.Series(["a", "b"] * (n // 2), dtype=pl.Categorical),
        enum=pl.Series(["a", "b"] * (n // 2), dtype=pl.Enum(["b", "a"])),
    )
    pickled = take_apart(frame)
    assert pickled.plan.inband_bytes < 4096
    image = memory_of(pickled)
    made = put_together(image, pickled.plan)
    assert made.schema == frame.schema
    assert made.equals(frame)
    assert np.shares_memory(made["x"].to_numpy(), image)
    part = take_apart(frame[1000:1100])
    assert part.plan.total_bytes < pickled.plan.total_bytes / 20
    assert round_trip(frame[1000:1100]).equals(frame[1000:1100])


def test_frames_that_arrow_cannot_hold_are_pickled_as_polars_does() -> None:
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"large": pl.Series([1, 2], dtype=pl.Int128)})
    with pytest.raises((pa.ArrowException, pl.exceptions.PolarsError)):
        frame.to_arrow(compat_level=pl.CompatLevel.newest())
    assert library_adapters.library_reduction(frame) is NotImplemented
    assert round_trip(frame).equals(frame)
