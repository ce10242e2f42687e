"""PageRank as a program of stages: a partition has a range of vertices, and the edges into it.

In each round a partition gives the others what its vertices give along their edges, once for each
vertex that the other has an edge from, and gets the same of them. The order of the sums is that of
the edges, as in `graphs.ranks_of`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..data import graphs
from ..data.graphs import Float64, Graph, Int64
from .rounds import Round, begin_round, end_round

__all__ = ["GraphPart", "PageRankDatasets", "cut_graph", "describe_pagerank"]


@dataclasses.dataclass(frozen=True, eq=False)
class GraphPart:
    """A range of vertices.

    Args:
        n_vertices: of the whole graph.
        edges: the edges into these vertices; sources are places in what all partitions give.
        out_degrees: of these vertices, in the whole graph.
        gives: for each partition, those of these vertices that it has edges from.
    """

    n_vertices: int
    edges: Graph
    out_degrees: Any
    gives: tuple[Int64, ...]

    @property
    def n_bytes(self) -> int:
        """Of its arrays."""
        edges = self.edges.first_edge.nbytes + self.edges.sources.nbytes
        return int(edges + self.out_degrees.nbytes + sum(each.nbytes for each in self.gives))


class PageRankDatasets(NamedTuple):
    """Datasets of the program.

    Args:
        parts: `GraphPart`.
        ranks: of the vertices of each.
        residual: a value: how far the ranks moved in the last round (L1 norm).
        rounds: a value: how many there were.
        lines: a value: a `Round` each.
    """

    parts: Any
    ranks: Any
    residual: Any
    rounds: Any
    lines: Any


def cut_graph(graph: Graph, n_parts: int) -> list[GraphPart]:
    """Ranges of about equal work, `n_parts` of them at the most."""
    ranges = graphs.balanced_ranges(graph.first_edge, n_parts)
    begins = np.array([begin for begin, _ in ranges] + [graph.n_vertices])
    edges_of, wanted = [], []
    for begin, end in ranges:
        first = graph.first_edge[begin : end + 1]
        sources = graph.sources[int(first[0]) : int(first[-1])]
        distinct, places = np.unique(sources, return_inverse=True)
        degrees = graph.out_degrees[begin:end]
        edges_of.append(Graph(first - first[0], places.astype(np.uint32), degrees))
        cuts = np.searchsorted(distinct, begins)
        pairs = itertools.pairwise(cuts.tolist())
        wanted.append([distinct[a:b].astype(np.int64) for a, b in pairs])
    return [
        GraphPart(
            graph.n_vertices,
            edges_of[number],
            edges_of[number].out_degrees,
            tuple(of_other[number] - begin for of_other in wanted),
        )
        for number, (begin, _) in enumerate(ranges)
    ]


def describe_pagerank(
    p: Any, parts: Sequence[GraphPart], damping: float, iterations: int, tolerance: float
) -> PageRankDatasets:
    """The power method from equal ranks.

    Args:
        p: the program that is being described.
        parts: of `cut_graph`.
        damping: chance of following an edge, below 1.
        iterations: at the most.
        tolerance: it ends where the ranks moved by less than that (L1 norm) in a round.
    """
    n = parts[0].n_vertices
    ranges = p.dataset(parts, name="parts of the graph")
    ranks = p.dataset([np.full(len(part.out_degrees), 1.0 / n) for part in parts], name="ranks")
    residual, rounds = p.value(np.inf, name="residual"), p.value(0, name="rounds")
    lines = p.value([], name="lines")
    p.stage(begin, writes=[lines])
    with p.loop(max=iterations) as loop:
        p.stage(functools.partial(give, damping), reads=[ranges, ranks])
        p.stage(functools.partial(rank, damping), reads=[ranges], writes=[ranks])
        p.stage(add_residuals, writes=[residual, rounds, lines])
        loop.until(functools.partial(has_converged, tolerance), reads=[residual])
    return PageRankDatasets(ranges, ranks, residual, rounds, lines)


def begin(t: Any, lines: list[Round]) -> None:
    """The first round begins."""
    begin_round(lines)


def give(damping: float, t: Any, part: GraphPart, ranks: Float64) -> None:
    """What these vertices give along each of their edges, to who has edges from them; and the ranks
    that have no edge to give along."""
    shares = graphs.shares(ranks, part.out_degrees, damping)
    dangling = float(ranks[part.out_degrees == 0].sum())
    for index, places in enumerate(part.gives):
        t.send(index, (shares[places], dangling))


def rank(damping: float, t: Any, part: GraphPart, ranks: Float64) -> Float64:
    """New ranks of these vertices; how far they moved goes to the next stage."""
    got = t.recv()
    quotients = np.concatenate([shares for shares, _ in got])
    dangling = sum(dangling for _, dangling in got)
    base = (1.0 - damping + damping * dangling) / part.n_vertices
    new = graphs.ranks_of(part.edges, quotients, 0, len(ranks), base)
    t.send(0, float(np.abs(new - ranks).sum()))
    return new


def add_residuals(
    t: Any, residual: float, rounds: int, lines: list[Round]
) -> tuple[float, int, list[Round]]:
    """How far all ranks moved."""
    summed_s = time.time()
    residual = sum(t.recv())
    if rounds:  # it began when the one before ended
        lines.append(Round(lines[-1].ended_s))
    return residual, rounds + 1, end_round(lines, summed_s, residual)


def has_converged(tolerance: float, t: Any, residual: float) -> bool:
    """Whether the ranks moved by less."""
    return residual < tolerance
