"""A power-law graph, and the arithmetic of PageRank over it. No Ray here.

The graph. Stored by target (the transposed adjacency in CSR): the sources of the edges into a
vertex lie together, so that a task that owns a range of vertices reads one contiguous range of
edges and writes nothing that another task writes. Vertices are numbered by how popular they are as
sources, hubs first, as graph frameworks renumber them: what is read for most edges is then a few
blocks at the front of the vector, not one hot number in every block.

The vector. An edge needs rank / out-degree of its source. That quotient is what is kept, not the
rank: one look-up an edge instead of two and a division, and half the bytes to have at hand.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import WrongResult
from .stream import zipf

__all__ = [
    "Graph",
    "WrongRanks",
    "balanced_ranges",
    "check",
    "generate",
    "iterate",
    "ranks_of",
    "reference",
    "shares",
]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

CHUNK_EDGES: Final = 1 << 18  # at a time in private memory: 2 MiB of quotients
DRAWN_EDGES: Final = 1 << 21  # at a time while generating
_STEP: Final = 0x9E3779B1  # prime: times it, modulo n, is a permutation of most n


class WrongRanks(WrongResult):
    """The tasks' ranks are not those of the same sums made in one process."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """What the driver puts once.

    Attributes:
        first_edge: (n + 1,); the edges into vertex v are first_edge[v] to first_edge[v + 1].
        sources: (edges,); where each comes from. Edges may repeat, and lead to where they began.
        out_degrees: (n,); how often each vertex is a source.
    """

    first_edge: Int64
    sources: npt.NDArray[np.uint32]
    out_degrees: npt.NDArray[np.uint32]

    @property
    def n_vertices(self) -> int:
        """How many there are, those without edges included."""
        return len(self.first_edge) - 1

    @property
    def n_edges(self) -> int:
        """How many there are, each as often as it repeats."""
        return len(self.sources)


# ---------------------------------------------------------------- generating


def generate(
    n_vertices: int,
    n_edges: int,
    exponent: float,
    seed: int,
    empty: Callable[[Any, Any], Any] = np.empty,
    done: Callable[[int], None] = lambda edges: None,
) -> Graph:
    """A graph whose in- and out-degrees both follow a power law.

    The number of vertices of degree k falls as k ** -exponent; 2.1 is what Broder et al. found for
    links between web pages. In-degrees are set to what that says; the source of each edge is drawn,
    so that out-degrees follow it on average, and a vertex that is never drawn dangles.

    Args:
        n_vertices: at least 1, below 2 ** 32.
        n_edges: at least 0.
        exponent: above 1.
        seed: of the draw; the same graph for the same arguments.
        empty: makes the arrays, as `numpy.empty(shape, dtype)`; a region's own builds in place.
        done: told of the edges drawn so far.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> generate(1000, 16_000, 2.1, seed=1).n_edges
        16000
    """
    if not 1 <= n_vertices < 1 << 32:
        raise ValueError(f"n_vertices is 1 to {(1 << 32) - 1:,}, not {n_vertices:,}")
    if n_edges < 0:
        raise ValueError(f"n_edges is 0 or more, not {n_edges:,}")
    if not exponent > 1:
        raise ValueError(f"exponent is above 1, not {exponent}")
    skew = 1.0 / (exponent - 1.0)  # of the degree by its place in the order of degrees
    graph = Graph(
        empty(n_vertices + 1, np.int64),
        empty(n_edges, np.uint32),
        empty(n_vertices, np.uint32),
    )
    weights = (_scattered(n_vertices) + 1.0) ** -skew
    np.cumsum(weights, out=weights)
    graph.first_edge[0] = 0
    graph.first_edge[1:] = np.rint(weights * (n_edges / weights[-1]))
    del weights
    graph.out_degrees[:] = 0
    rng = np.random.default_rng(seed)
    for first in range(0, n_edges, DRAWN_EDGES):
        drawn = zipf(rng, n_vertices, min(DRAWN_EDGES, n_edges - first), skew)
        graph.sources[first : first + len(drawn)] = drawn
        counts = np.bincount(drawn)
        graph.out_degrees[: len(counts)] += counts.astype(np.uint32)
        done(first + len(drawn))
    return graph


def _scattered(n: int) -> Int64:
    """A permutation of range(n) that has neighbours far from each other."""
    step = _STEP if n % _STEP else 1
    out = np.arange(n, dtype=np.uint64)
    out *= np.uint64(step)
    out %= np.uint64(n)
    return out.view(np.int64)


# ---------------------------------------------------------------- one slice


def balanced_ranges(first_edge: Int64, n_ranges: int) -> list[tuple[int, int]]:
    """Vertices in contiguous ranges of about equal work.

    The work of a range is its edges and, counted as one edge each, its vertices, so that a tail of
    vertices without edges is shared out as well. No vertex is cut: one with more edges than a
    share makes a range that is larger.

    Args:
        first_edge: as a graph's.
        n_ranges: how many at the most; empty ones are left out.

    Returns:
        (begin, end) pairs that cover all vertices in order.
    """
    if n_ranges < 1:
        raise ValueError(f"n_ranges is at least 1, not {n_ranges}")
    n = len(first_edge) - 1
    work = first_edge + np.arange(n + 1)
    cuts = np.searchsorted(work, np.linspace(0, work[-1], n_ranges + 1)[1:-1])
    edges = [0, *cuts.tolist(), n]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _chunks(begin: int, end: int, size: int, backward: bool) -> Iterator[tuple[int, int]]:
    starts = range(begin, end, size)
    for start in reversed(starts) if backward else starts:
        yield start, min(end, start + size)


def ranks_of(
    graph: Graph,
    quotients: Float64,
    begin: int,
    end: int,
    base: float,
    *,
    backward: bool = False,
    chunk_edges: int = CHUNK_EDGES,
) -> Float64:
    """New ranks of the vertices [begin, end): base + the sum of the quotients of their sources.

    Private memory: one chunk of edges, and the answer.

    Args:
        quotients: (n,), `shares` of the ranks before.
        base: what every vertex gets.
        backward: from the last edge to the first. The answer is the same but for rounding; who goes
            over the same edges again and again, with a cache that holds a part of them, finds that
            part where he turns round, and nothing where he begins anew.
        chunk_edges: at a time.

    Example:
        >>> g = generate(10, 50, 2.1, seed=1)
        >>> ranks_of(g, np.zeros(10), 2, 5, 0.1)
        array([0.1, 0.1, 0.1])
    """
    bounds = graph.first_edge[begin : end + 1]
    out = np.full(end - begin, base)
    for first, last in _chunks(int(bounds[0]), int(bounds[-1]), chunk_edges, backward):
        # Vertices with edges in the chunk; those at its ends may have others outside of it.
        v = int(np.searchsorted(bounds, first, "right")) - 1
        w = int(np.searchsorted(bounds, last, "left"))
        starts = np.maximum(bounds[v:w], first) - first
        # Of equal starts only the last has edges; reduceat would give the others one all the same.
        full = np.flatnonzero(np.diff(starts, append=last - first))
        values = quotients.take(graph.sources[first:last])
        out[v:w][full] += np.add.reduceat(values, starts[full])
    return out


# ---------------------------------------------------------------- between iterations


def shares(ranks: Float64, out_degrees: npt.NDArray[np.uint32], damping: float) -> Float64:
    """What each vertex gives along each of its edges; 0 for one that has none."""
    quotients = ranks * damping
    np.divide(quotients, out_degrees, out=quotients, where=out_degrees > 0)
    quotients[out_degrees == 0] = 0.0
    return quotients


def base_of(ranks: Float64, out_degrees: npt.NDArray[np.uint32], damping: float) -> float:
    """What every vertex gets whatever links to it: the jump to a random vertex, and its part of
    what vertices without edges cannot give along one."""
    dangling = float(ranks[out_degrees == 0].sum())
    return (1.0 - damping + damping * dangling) / len(ranks)


def iterate(
    graph: Graph,
    step: Callable[[int, Float64, float], Float64],
    damping: float,
    iterations: int,
    tolerance: float,
) -> Iterator[tuple[Float64, float]]:
    """The power method from equal ranks (Page et al. 1999), one iteration at a time.

    Args:
        step: (number from 0, quotients, base) -> new ranks; however that is done.
        damping: chance of following an edge, below 1.
        iterations: at the most.
        tolerance: it ends where the ranks moved by less than that (L1 norm) in an iteration.

    Yields:
        The ranks after the iteration, and how far they moved.
    """
    n = graph.n_vertices
    degrees = np.array(graph.out_degrees)  # private: read in every iteration
    ranks = np.full(n, 1.0 / n)
    for number in range(iterations):
        base = base_of(ranks, degrees, damping)
        new = step(number, shares(ranks, degrees, damping), base)
        residual = float(np.abs(new - ranks).sum())
        ranks = new
        yield ranks, residual
        if residual < tolerance:
            return


# ---------------------------------------------------------------- checking


def reference(graph: Graph, damping: float, iterations: int, tolerance: float = 0.0) -> Float64:
    """The ranks by SciPy's sparse product, in this process; none of the code above sums."""
    from scipy.sparse import csr_matrix

    n = graph.n_vertices
    links = csr_matrix(
        (np.ones(graph.n_edges), graph.sources.astype(np.int64), graph.first_edge), shape=(n, n)
    )
    degrees = np.asarray(links.sum(axis=0)).ravel()
    dangling = degrees == 0
    ranks = np.full(n, 1.0 / n)
    for _ in range(iterations):
        given = np.where(dangling, 0.0, ranks / np.where(dangling, 1.0, degrees))
        new = damping * (links @ given + ranks[dangling].sum() / n) + (1.0 - damping) / n
        moved = np.abs(new - ranks).sum()
        ranks = new
        if moved < tolerance:
            break
    return ranks


def check(ranks: Float64, expected: Float64) -> float:
    """That ranks are these, but for the rounding of other orders of summing.

    Returns:
        The largest relative difference.

    Raises:
        WrongRanks: One differs by more than 1e-9 of itself; the message names the first.
    """
    if ranks.shape != expected.shape:
        raise WrongRanks(f"there are {len(ranks):,} ranks, not {len(expected):,}")
    difference = np.abs(ranks - expected) / expected
    wrong = np.flatnonzero(~(difference <= 1e-9))  # a NaN is wrong as well
    if len(wrong):
        v = int(wrong[0])
        raise WrongRanks(
            f"{len(wrong):,} of {len(ranks):,} ranks; vertex {v} has {ranks[v]!r}, "
            f"not {expected[v]!r}"
        )
    return float(difference.max(initial=0.0))
