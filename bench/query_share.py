"""What one cold query of each object that users try first moves, of the object's bytes.

Two nodes. Each object is put on one, and a fresh process on the other, on a node that has nothing
of it, opens it and asks once: ten neighbours, one row, one prediction. `opened` is what the open
moved, `moved` is that and the query, both in bytes that the node received, headers included; the
share is `moved` / the object. The answer is compared with that of the object itself.

A share of about 1 is a library that reads, or copies, all of the object: docs/adapters.md says
which. `--cases` chooses some. A case whose library is not installed is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import emit, grown, node_counters, note

TIMEOUT_S = 600
SEED = 11
WARM_BYTES = 1 << 20
WIDTH = 64  # float32 columns of vectors, a multiple of 4 bytes
K = 10
Points = npt.NDArray[Any]


def points3(n_bytes: int, *, in_order_of_leaves: bool = False) -> Points:
    """Points whose tree, with its indices, takes about n_bytes. (n, 3), float64."""
    points = np.random.default_rng(SEED).random((n_bytes // 32, 3))
    if in_order_of_leaves:
        from scipy.spatial import cKDTree

        points = points[cKDTree(points).indices]
    return points


def vectors(n_bytes: int) -> Points:
    """(n, WIDTH), float32: clusters, as embeddings have them."""
    rng = np.random.default_rng(SEED)
    n = n_bytes // (4 * WIDTH)
    centres = rng.standard_normal((256, WIDTH), np.float32)
    made = rng.standard_normal((n, WIDTH), np.float32)
    made *= 0.3
    made += centres[rng.integers(0, len(centres), n)]
    return made


def near(of: Points) -> Points:
    """The point that is asked for: near one of them. (1, columns)."""
    i = len(of) // 3
    return of[i : i + 1] + np.asarray(1e-3, of.dtype)


# ------------------------------------------------------------------ cases: make, and ask


def make_ckdtree(n_bytes: int, leafsize: int = 16, **how: Any) -> Any:
    from scipy.spatial import cKDTree

    points = points3(n_bytes, **how)
    return cKDTree(points, leafsize=leafsize), near(points)


def ask_ckdtree(tree: Any, at: Points) -> Any:
    return tree.query(at, k=K)[1]


def make_neighbours(n_bytes: int, name: str, **how: Any) -> Any:
    from sklearn import neighbors

    points = points3(n_bytes, **how)
    if name == "NearestNeighbors":
        return neighbors.NearestNeighbors(algorithm="kd_tree").fit(points), near(points)
    return getattr(neighbors, name)(points), near(points)


def ask_tree(tree: Any, at: Points) -> Any:
    return tree.query(at, k=K)[1]


def ask_neighbours(model: Any, at: Points) -> Any:
    return model.kneighbors(at, K)[1]


def make_forest(n_bytes: int) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    n = n_bytes // 9000  # each row takes about 180 bytes in each of 50 trees
    points = np.random.default_rng(SEED).random((n, 8))
    model = RandomForestRegressor(50, random_state=0, n_jobs=1, bootstrap=False, max_features=2)
    return model.fit(points, points.sum(axis=1)), near(points)


def ask_prediction(model: Any, at: Points) -> Any:
    return model.predict(at)


def make_faiss(n_bytes: int, factory: str, share: float = 1.0) -> Any:
    import faiss

    data = vectors(int(n_bytes * share))
    faiss.omp_set_num_threads(1)
    index = faiss.index_factory(WIDTH, factory)
    index.train(data[:50_000])
    index.add(data)
    return index, near(data)


def ask_faiss(index: Any, at: Points) -> Any:
    return index.search(at, K)[1]


def make_hnswlib(n_bytes: int) -> Any:
    import hnswlib

    data = vectors(n_bytes * 2 // 3)
    index = hnswlib.Index("l2", WIDTH)
    index.init_index(len(data), ef_construction=40, M=16)
    index.add_items(data, num_threads=2)
    return index, near(data)


def ask_hnswlib(index: Any, at: Points) -> Any:
    return index.knn_query(at, K, num_threads=1)[0]


def columns(n_bytes: int) -> dict[str, Any]:
    """Sixteen columns of numbers and one of text."""
    n = n_bytes // 144
    rng = np.random.default_rng(SEED)
    names = [f"name {i:09}" for i in range(n)]
    return {**{f"c{i}": rng.random(n) for i in range(16)}, "name": names}


def make_pandas(n_bytes: int) -> Any:
    import pandas

    frame = pandas.DataFrame(columns(n_bytes))
    return frame, len(frame) // 3


def ask_pandas_row(frame: Any, i: int) -> Any:
    return [str(each) for each in frame.iloc[i]]


def ask_pandas_column(frame: Any, i: int) -> Any:
    return frame["c3"].sum()


def make_arrow(n_bytes: int) -> Any:
    import pyarrow

    table = pyarrow.table(columns(n_bytes))
    return table, len(table) // 3


def ask_arrow_row(table: Any, i: int) -> Any:
    return [str(each) for each in table.slice(i, 1).to_pylist()[0].values()]


def ask_arrow_column(table: Any, i: int) -> Any:
    return float(table["c3"].to_numpy().sum())


def make_polars(n_bytes: int) -> Any:
    import polars

    frame = polars.DataFrame(columns(n_bytes))
    return frame, len(frame) // 3


def ask_polars_row(frame: Any, i: int) -> Any:
    return [str(each) for each in frame.row(i)]


def ask_polars_column(frame: Any, i: int) -> Any:
    return frame["c3"].sum()


def make_torch(n_bytes: int) -> Any:
    import torch

    tensor = torch.from_numpy(vectors(n_bytes))
    return tensor, len(tensor) // 3


def ask_row(array: Any, i: int) -> Any:
    return np.asarray(array[i])


def make_numpy(n_bytes: int) -> Any:
    array = vectors(n_bytes)
    return array, len(array) // 3


@dataclasses.dataclass(frozen=True)
class Case:
    """An object and a question.

    Args:
        needs: the library.
        make: bytes -> (object of about so many, what is asked for).
        ask: (object, what) -> an answer that can be compared.
    """

    needs: str
    make: Callable[..., Any]
    ask: Callable[..., Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


LEAVES = {"in_order_of_leaves": True}
CASES = {
    "numpy row": Case("numpy", make_numpy, ask_row),
    "torch row": Case("torch", make_torch, ask_row),
    "cKDTree": Case("scipy", make_ckdtree, ask_ckdtree),
    "cKDTree leafsize=64": Case("scipy", make_ckdtree, ask_ckdtree, {"leafsize": 64}),
    "cKDTree in order": Case("scipy", make_ckdtree, ask_ckdtree, LEAVES),
    "KDTree": Case("sklearn", make_neighbours, ask_tree, {"name": "KDTree"}),
    "KDTree in order": Case("sklearn", make_neighbours, ask_tree, {"name": "KDTree", **LEAVES}),
    "BallTree": Case("sklearn", make_neighbours, ask_tree, {"name": "BallTree"}),
    "NearestNeighbors": Case(
        "sklearn", make_neighbours, ask_neighbours, {"name": "NearestNeighbors"}
    ),
    "RandomForest": Case("sklearn", make_forest, ask_prediction),
    "faiss Flat": Case("faiss", make_faiss, ask_faiss, {"factory": "Flat"}),
    "faiss IVFFlat": Case("faiss", make_faiss, ask_faiss, {"factory": "IVF256,Flat"}),
    "faiss HNSWFlat": Case(
        "faiss", make_faiss, ask_faiss, {"factory": "HNSW16,Flat", "share": 0.6}
    ),
    "hnswlib": Case("hnswlib", make_hnswlib, ask_hnswlib),
    "pandas row": Case("pandas", make_pandas, ask_pandas_row),
    "pandas column": Case("pandas", make_pandas, ask_pandas_column),
    "arrow row": Case("pyarrow", make_arrow, ask_arrow_row),
    "arrow column": Case("pyarrow", make_arrow, ask_arrow_column),
    "polars row": Case("polars", make_polars, ask_polars_row),
    "polars column": Case("polars", make_polars, ask_polars_column),
}


class Reader:
    """A process of the other node that asks one question."""

    def open(self, refs: list[Any]) -> None:
        self.obj = refs[0].get()

    def ask(self, name: str, what: Any) -> Any:
        return CASES[name].ask(self.obj, what)


def measure(name: str, n_bytes: int, nodes: common.TwoNodes) -> float:
    """One case; its share."""
    import ray

    import clamor_ray as clamor

    case = CASES[name]
    obj, what = case.make(n_bytes, **case.options)
    want = case.ask(obj, what)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", clamor.ClamorWarning)  # of what travels whole
        ref = clamor.put(obj)
        # The reader's libraries come with its first question, which is about another object.
        small, small_what = case.make(max(n_bytes // 64, WARM_BYTES), **case.options)
        warm = clamor.put(small)
    del obj
    reader = nodes.on_b(Reader)
    ray.get(reader.open.remote([warm]), timeout=TIMEOUT_S)
    ray.get(reader.ask.remote(name, small_what), timeout=TIMEOUT_S)

    before = node_counters(nodes.b)
    ray.get(reader.open.remote([ref]), timeout=TIMEOUT_S)
    opened = node_counters(nodes.b)
    got = ray.get(reader.ask.remote(name, what), timeout=TIMEOUT_S)
    asked = node_counters(nodes.b)
    common.verify(name, got, want)
    moved = grown(before, asked, "bytes_received")
    share = moved / ref.nbytes
    emit(
        {
            "case": name,
            "object_bytes": ref.nbytes,
            "opened_bytes": grown(before, opened, "bytes_received"),
            "moved_bytes": moved,
            "share": round(share, 4),
        }
    )
    ray.kill(reader)
    for each in (ref, warm):
        clamor.free(each)
    return share


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench query_share", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--mb", type=int, default=0, help="bytes of each object, in 10^6")
    parser.add_argument("--cases", default="", help="names, with commas; all by default")
    args = parser.parse_args(argv)
    n_bytes = (args.mb or (4 if args.small else 96)) * 10**6
    chosen = [name for name in args.cases.split(",") if name] or list(CASES)
    if unknown := sorted({*chosen} - {*CASES}):
        parser.error(f"no such cases: {unknown}; there are {list(CASES)}")
    shares: dict[str, float] = {}
    with common.two_nodes(256 << 20) as nodes:
        emit(common.environment(trap=nodes.trap))
        for name in chosen:
            if importlib.util.find_spec(CASES[name].needs) is None:
                note(f"{name}: {CASES[name].needs} is not installed")
                continue
            note(name)
            shares[name] = measure(name, n_bytes, nodes)
        common.summary({"query_share": shares})
