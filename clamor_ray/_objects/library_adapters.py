"""Our adapters for objects of other libraries, where these can read memory that is not theirs.

No library is imported here before an object of it is met. Each adapter stands for the library's own
pickle, and gives way to it (NotImplemented) where it cannot promise the same object.

docs/adapters.md has what a query of each moves. Pure: no Ray, no C.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from clamor_ray.errors import NotInPlaceError

# ------------------------------------------------------------------ faiss

# In an index over memory that is not its own, these end the process.
_FAISS_GROWS: Final = (
    *("add", "add_core", "add_sa_codes", "add_with_ids", "merge_from", "remove_ids", "reset"),
    *("train", "update_vectors"),
)


def _refuse_growth(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotInPlaceError(
        f"{name} of a faiss index that is a global variable: its memory is the variable's, and "
        "keeps its length.",
        hint="Make a copy: index = faiss.deserialize_index(faiss.serialize_index(index)) "
        "(serialize_index_binary, if it is binary), and clamor.put it if others need it.",
    )


def _faiss_index(stored: npt.NDArray[np.uint8], is_binary: bool) -> Any:
    faiss: Any = importlib.import_module("faiss")
    reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(np.asarray(stored)), stored.nbytes)
    index = faiss.read_index_binary(reader) if is_binary else faiss.read_index(reader)
    # Its vectors and its graph are in that array, which lives as long as the index.
    index.referenced_objects = [stored]
    for name in _FAISS_GROWS:
        if hasattr(index, name):
            setattr(index, name, functools.partial(_refuse_growth, name))
    return index


def _reduce_faiss(index: Any) -> Any:
    """An index as its serialized bytes, in one array."""
    faiss = sys.modules["faiss"]
    if not hasattr(faiss, "ZeroCopyIOReader"):  # before 1.11
        return NotImplemented
    if not type(index).__module__.startswith("faiss.swigfaiss"):
        return NotImplemented  # a class of Python's, which has more than the index
    if isinstance(index, faiss.IndexBinary):
        return _faiss_index, (faiss.serialize_index_binary(index), True)
    if isinstance(index, faiss.Index):
        return _faiss_index, (faiss.serialize_index(index), False)
    return NotImplemented


# ------------------------------------------------------------------ SciPy

# A node is these nine words (`struct ckdtreenode`). Pointers mean nothing in a pickle: SciPy sets
# them anew. Nodes are in preorder, so that all but three of the words follow from the others.
_WORDS: Final = 9
_DIM, _COUNT, _SPLIT, _START, _END, _LESS_AT, _GREATER_AT, _LESS, _GREATER = range(_WORDS)
_POINTERS: Final = [_LESS_AT, _GREATER_AT]


def _compact(nodes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """What the nodes of a tree follow from.

    Args:
        nodes: shape (n, 9).

    Returns:
        The dimension that each node is split in, -1 for leaves, shape (n,); where the inner nodes
        are split, shape (n - leaves,), float64; the number of points of each leaf, shape (leaves,).
    """
    dims = nodes[:, _DIM]
    is_leaf = dims == -1
    counts = nodes[is_leaf, _COUNT]
    return (
        dims.astype(np.min_scalar_type(-1 - max(0, int(dims.max())))),
        nodes[~is_leaf, _SPLIT].view(np.float64),
        counts.astype(np.min_scalar_type(int(counts.max()))),
    )


def _expand(
    dims: npt.NDArray[Any], splits: npt.NDArray[np.float64], counts: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """The nodes again, shape (n, 9); pointers are zero."""
    n = len(dims)
    is_leaf = dims == -1
    # In preorder, the subtree of a node ends where it has, for the first time, one leaf more than
    # inner nodes. `depth` falls by one at a time: so that is where it is next one less.
    depth = np.concatenate([[0], np.cumsum(np.where(is_leaf, -1, 1))])
    order = np.argsort(depth * (n + 1) + np.arange(n + 1))
    keys = depth[order] * (n + 1) + order
    ends = order[np.searchsorted(keys, (depth[:-1] - 1) * (n + 1) + np.arange(n))]
    leaves_before = np.concatenate([[0], np.cumsum(is_leaf)])
    points_before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    nodes = np.zeros((n, _WORDS), np.int64)
    nodes[:, _DIM] = dims
    nodes[:, _START] = points_before[leaves_before[:-1]]
    nodes[:, _END] = points_before[leaves_before[ends]]
    nodes[:, _COUNT] = nodes[:, _END] - nodes[:, _START]
    inner = np.flatnonzero(~is_leaf)
    nodes[inner, _SPLIT] = splits.view(np.int64)
    nodes[inner, _LESS] = inner + 1
    nodes[inner, _GREATER] = ends[inner + 1]
    return nodes


def _kd_tree(cls: Any, compact: tuple[tuple[bytes, str], ...], *rest: Any) -> Any:
    parts = [np.frombuffer(raw, t) if raw else np.empty(0, t) for raw, t in compact]
    tree = cls.__new__(cls)
    tree.__setstate__((_expand(*parts).reshape(-1).view("S1"), *rest))
    return tree


def _reduce_scipy(tree: Any) -> Any:
    """A k-d tree with a tenth of its nodes' bytes: SciPy reads all nodes when it opens a tree.

    They travel in the stream, which comes in one piece. As an array, they would be read in order,
    and the region would learn that large pages suit it.
    """
    spatial = sys.modules.get("scipy.spatial")
    if spatial is None or type(tree) not in (spatial.cKDTree, spatial.KDTree):
        return NotImplemented
    state = tree.__getstate__()
    raw = state[0] if isinstance(state, tuple) else None
    if not isinstance(raw, np.ndarray) or raw.nbytes == 0 or raw.nbytes % (8 * _WORDS):
        return NotImplemented
    nodes = np.ascontiguousarray(raw).view(np.int64).reshape(-1, _WORDS).copy()
    nodes[:, _POINTERS] = 0
    compact = _compact(nodes)
    if not np.array_equal(_expand(*compact), nodes):
        return NotImplemented  # another SciPy, with other nodes
    parts = tuple((part.tobytes(), part.dtype.str) for part in compact)
    return _kd_tree, (type(tree), parts, *state[1:])


# ------------------------------------------------------------------ Polars


def _polars_frame(table: Any) -> Any:
    polars: Any = importlib.import_module("polars")
    return polars.from_arrow(table, rechunk=False)


def _reduce_polars(frame: Any) -> Any:
    """A frame as the Arrow table that it is in memory."""
    polars = sys.modules["polars"]
    if type(frame) is not polars.DataFrame or not hasattr(polars, "CompatLevel"):
        return NotImplemented
    try:
        import pyarrow
    except ImportError:
        return NotImplemented
    try:
        table = frame.to_arrow(compat_level=polars.CompatLevel.newest())
        same = polars.from_arrow(table.slice(0, 0)).schema == frame.schema
    except (pyarrow.ArrowException, polars.exceptions.PolarsError):
        return NotImplemented  # a column of a type that Arrow does not have
    return (_polars_frame, (table,)) if same else NotImplemented


_REDUCTIONS: Final = {"faiss": _reduce_faiss, "scipy": _reduce_scipy, "polars": _reduce_polars}


def library_reduction(obj: Any) -> Any:
    """How an object of another library leaves its memory out of band, or NotImplemented."""
    reduce = _REDUCTIONS.get(type(obj).__module__.partition(".")[0])
    return NotImplemented if reduce is None else reduce(obj)
