"""A k-d tree that points leave and join in place (Clamor listing 3). No Ray here.

The tree halves space, not a list: a leaf is the box between some planes, and is one block of memory
with more slots than points. A point that leaves empties its slot; one that joins takes an empty
slot of the leaf in whose box it is. Planes never move, and boxes need no bounds of what is in them,
so that either one changes a single block, and that is what travels. (SciPy's tree keeps bounds of
its points in every node above them, and its points without a gap between them.)

What that costs: points that join in one place fill its leaf, and then the tree has to be built
again; `LeafFull` says so.

Distances are straight lines between points on the unit sphere (see `nearest`), in metres where
`metres` says so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from ..data.errors import WrongResult
from . import nearest

__all__ = [
    "LeafFull",
    "NoSuchPoint",
    "Tree",
    "WrongDistances",
    "build",
    "check",
    "erase",
    "insert",
    "lookup",
    "metres",
    "nearer",
    "query",
]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

SLOTS: Final = 128  # x, y, z and the id, 8 bytes each: a block
FILL: Final = 96  # points of a leaf when it is built, at the most
EMPTY: Final = np.inf  # the coordinates of an empty slot: nothing is nearer than a point
_QUERIES: Final = 4096  # at a time


class LeafFull(Exception):
    """There is no slot left where a point belongs: build the tree again."""


class NoSuchPoint(Exception):
    """A point is not in the tree, or not with that id."""


class WrongDistances(WrongResult):
    """The tasks' distances differ from brute force; the message names the first one."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """What the driver puts once, and then changes in place.

    Attributes:
        axes: (nodes,), of the plane that halves a node's box; the children of node i are 2i + 1
            (below) and 2i + 2.
        planes: (nodes,), where it is. A point on it may be on either side.
        leaves: (nodes + 1, SLOTS, 4): x, y, z and the id of each point.
    """

    axes: npt.NDArray[np.int8]
    planes: Float64
    leaves: Float64

    @property
    def depth(self) -> int:
        """Planes from the root to a leaf."""
        return len(self.leaves).bit_length() - 1


def build(points: Float64) -> Tree:
    """A tree over points of shape (n, 3), whose ids are their rows.

    Example:
        >>> tree = build(np.eye(3))
        >>> query(tree, np.array([[0.0, 0.9, 0.1]]))[1].tolist()
        [1]
    """
    n = len(points)
    depth = max(0, int(np.ceil(np.log2(max(1, n) / FILL))))
    axes = np.zeros((1 << depth) - 1, np.int8)
    planes = np.zeros((1 << depth) - 1)
    groups = [np.arange(n)]
    for level in range(depth):
        below: list[Int64] = []
        for number, rows in enumerate(groups):
            node = (1 << level) - 1 + number
            mine = points[rows]
            axis = int(np.argmax(np.ptp(mine, axis=0))) if len(rows) else 0
            half = len(rows) // 2
            order = np.argpartition(mine[:, axis], half) if len(rows) else np.arange(0)
            axes[node] = axis
            planes[node] = mine[order[half], axis] if len(rows) else 0.0
            below += [rows[order[:half]], rows[order[half:]]]
        groups = below
    leaves = np.full((1 << depth, SLOTS, 4), EMPTY)
    leaves[:, :, 3] = -1
    for number, rows in enumerate(groups):
        leaves[number, : len(rows), :3] = points[rows]
        leaves[number, : len(rows), 3] = rows
    return Tree(axes, planes, leaves)


# ---------------------------------------------------------------- changing


def erase(tree: Tree, point: Float64, number: int) -> None:
    """Takes a point out.

    Raises:
        NoSuchPoint: There is none with this id in this place.
    """
    _, nodes, _ = _reached(tree, point[None], np.zeros(1))
    for leaf in nodes.tolist():
        slots = np.flatnonzero(
            (tree.leaves[leaf, :, 3] == number) & (tree.leaves[leaf, :, :3] == point).all(axis=1)
        )
        if len(slots):
            tree.leaves[leaf, slots[0]] = (EMPTY, EMPTY, EMPTY, -1)
            return
    raise NoSuchPoint(f"point {number:,} is not at {point.tolist()}")


def insert(tree: Tree, point: Float64, number: int) -> None:
    """Puts a point in.

    Raises:
        LeafFull: Where it belongs there is no slot left.
    """
    leaf = int(_home(tree, point[None])[0])
    free = np.flatnonzero(tree.leaves[leaf, :, 3] < 0)
    if not len(free):
        raise LeafFull(
            f"leaf {leaf:,} has {SLOTS} points already, there is no slot for point {number:,}: "
            "build the tree again"
        )
    tree.leaves[leaf, free[0]] = (*point.tolist(), number)


# ---------------------------------------------------------------- asking


def query(tree: Tree, queries: Float64) -> tuple[Float64, Int64]:
    """The nearest point of each query; of equally near ones, the one with the lowest id.

    Args:
        queries: shape (m, 3).

    Returns:
        Distances, in the unit of the points, and ids; infinite and -1 where the tree is empty.
    """
    distances, ids = np.empty(len(queries)), np.empty(len(queries), np.int64)
    for first in range(0, len(queries), _QUERIES):
        part = slice(first, first + _QUERIES)
        distances[part], ids[part] = _query(tree, queries[part])
    return distances, ids


def _query(tree: Tree, queries: Float64) -> tuple[Float64, Int64]:
    m = len(queries)
    home = _home(tree, queries)
    squares, ids = _best_in(tree, queries, home)
    # Other leaves that reach as near as what was found at home.
    who, leaves, _ = _reached(tree, queries, squares)
    away = leaves != home[who]
    who, leaves = who[away], leaves[away]
    more_squares, more_ids = _best_in(tree, queries[who], leaves)
    who = np.concatenate([np.arange(m), who])
    squares, ids = np.concatenate([squares, more_squares]), np.concatenate([ids, more_ids])
    order = np.lexsort((ids, squares, who))
    first = np.flatnonzero(np.diff(who[order], prepend=-1))  # every query has one: its home
    chosen = order[first]
    return np.sqrt(squares[chosen]), ids[chosen]


def _home(tree: Tree, queries: Float64) -> Int64:
    """The leaf whose box holds each query."""
    node = np.zeros(len(queries), np.int64)
    rows = np.arange(len(queries))
    for _ in range(tree.depth):
        node = 2 * node + 1 + (queries[rows, tree.axes[node]] >= tree.planes[node])
    leaf: Int64 = node - len(tree.planes)
    return leaf


def _reached(tree: Tree, queries: Float64, squares: Float64) -> tuple[Int64, Int64, Float64]:
    """Pairs of a query and a leaf whose box is no farther than the query's squared distance."""
    who = np.arange(len(queries))
    node = np.zeros(len(queries), np.int64)
    offsets = np.zeros((len(queries), 3))  # from the query to the node's box, along each axis
    for _ in range(tree.depth):
        axis = tree.axes[node]
        rows = np.arange(len(who))
        beyond = queries[who, axis] - tree.planes[node]
        near = 2 * node + 1 + (beyond >= 0)
        far = 2 * node + 1 + (beyond < 0)
        across = offsets.copy()
        across[rows, axis] = beyond  # the plane is farther than the box's side was, if any
        keep = (across**2).sum(axis=1) <= squares[who]
        who = np.concatenate([who, who[keep]])
        node = np.concatenate([near, far[keep]])
        offsets = np.concatenate([offsets, across[keep]])
    return who, node - len(tree.planes), offsets


def _best_in(tree: Tree, queries: Float64, leaves: Int64) -> tuple[Float64, Int64]:
    """Squared distance and id of the nearest point of one leaf for each query."""
    squares, ids = np.empty(len(queries)), np.empty(len(queries), np.int64)
    order = np.argsort(leaves, kind="stable")
    starts = np.flatnonzero(np.diff(leaves[order], prepend=-1)).tolist()
    for first, last in itertools.pairwise([*starts, len(order)]):
        rows = order[first:last]
        leaf = tree.leaves[leaves[rows[0]]]  # each is read once, however many ask
        full = leaf[leaf[:, 3] >= 0]
        if not len(full):
            squares[rows], ids[rows] = np.inf, -1
            continue
        full = full[np.argsort(full[:, 3])]
        every = ((queries[rows, None, :] - full[None, :, :3]) ** 2).sum(axis=2)
        best = every.argmin(axis=1)
        squares[rows] = every[np.arange(len(rows)), best]
        ids[rows] = full[best, 3].astype(np.int64)
    return squares, ids


def metres(distances: Float64) -> Float64:
    """Along the earth, of straight lines between points on the unit sphere."""
    out: Float64 = 2.0 * nearest.EARTH_RADIUS_M * np.arcsin(np.clip(distances / 2.0, 0.0, 1.0))
    return out


# ---------------------------------------------------------------- what tasks call


def lookup(queries: Float64, tree: Tree) -> Float64:
    """Metres from each query, a point on the unit sphere, to the nearest point of the tree."""
    return metres(query(tree, queries)[0])


def nearer(distances: tuple[Float64, Float64]) -> npt.NDArray[np.int64]:
    """Which of two distances is the smaller one: 0, also where they are equal, or 1."""
    which: npt.NDArray[np.int64] = np.argmin(np.stack(distances), axis=0)
    return which


# ---------------------------------------------------------------- checking


def check(
    name: str,
    found_m: Float64,
    places: tuple[Float64, Float64],
    queries: tuple[Float64, Float64],
    sample: Iterable[int],
) -> int:
    """Compares a sample of distances with the haversine formula over all places.

    Args:
        name: what is checked, for the message.
        found_m: metres, one for each query.
        places, queries: latitudes and longitudes, in degrees.

    Returns:
        The number compared.

    Raises:
        WrongDistances: naming the query and both distances.
    """
    if len(found_m) != len(queries[0]):
        raise WrongDistances(f"{name}: {len(found_m):,} distances, {len(queries[0]):,} queries")
    compared = 0
    for i in sample:
        _, want = nearest.brute_force(*places, float(queries[0][i]), float(queries[1][i]), 1)
        # The two formulas round differently: a tenth of a millimetre is far above either error.
        if not np.isclose(found_m[i], want[0], rtol=1e-9, atol=1e-4):
            raise WrongDistances(
                f"{name}: query {i:,} is {found_m[i]:,.4f} m from its nearest place, "
                f"by brute force {want[0]:,.4f} m"
            )
        compared += 1
    return compared
