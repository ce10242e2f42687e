"""Edges between vertices whose degrees follow a power law, and lists of neighbours. No Ray here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import WrongResult
from .stream import zipf

__all__ = ["Edges", "WrongLists", "check", "generate", "lists_of", "reference"]

Int64 = npt.NDArray[np.int64]
Batch = dict[str, Int64]

_STEPS: Final = (0x9E3779B1, 0x85EBCA6B)  # primes: times one, modulo n, permutes most n


class WrongLists(WrongResult):
    """The tasks' lists are not those that one process makes."""


@dataclasses.dataclass(frozen=True)
class Edges:
    """Edges that everyone can generate, partition by partition.

    Both in- and out-degrees follow a power law: the number of vertices of degree k falls as
    k ** -exponent. Who has many edges out need not have many in. Edges may repeat, and lead to
    where they began.

    Args:
        n_vertices: numbered from 0; those that are never drawn have no list.
        n_edges: in all.
        n_partitions: into which they are cut.
        exponent: above 1.
        seed: of the draw.
    """

    n_vertices: int
    n_edges: int
    n_partitions: int
    exponent: float = 2.1
    seed: int = 1

    def partition(self, number: int) -> Batch:
        """The edges of a partition: source and target of each.

        Example:
            >>> {name: len(ids) for name, ids in Edges(100, 1000, 3).partition(0).items()}
            {'source': 333, 'target': 333}
        """
        first, last = (self.n_edges * i // self.n_partitions for i in (number, number + 1))
        rng = np.random.default_rng([self.seed, number])
        skew = 1.0 / (self.exponent - 1.0)
        drawn = [zipf(rng, self.n_vertices, last - first, skew) for _ in _STEPS]
        ends = [
            # Hubs are all over the numbers; those of the one end are not those of the other.
            (ranks * (step if self.n_vertices % step else 1) + shift) % self.n_vertices
            for ranks, step, shift in zip(drawn, _STEPS, (0, self.n_vertices // 2), strict=True)
        ]
        return {"source": ends[0], "target": ends[1]}


def generate(numbers: Int64, edges: Edges) -> Batch:
    """The edges of these partitions: what `map_batches` over their numbers calls."""
    parts = [edges.partition(int(number)) for number in numbers]
    return {
        name: np.concatenate([np.empty(0, np.int64), *(part[name] for part in parts)])
        for name in ("source", "target")
    }


def lists_of(batch: Batch, by: str, other: str) -> pa.Table:
    """Lists of neighbours of a partition that has all edges of its vertices.

    Args:
        batch: the edges, in any order.
        by: "source" for lists of where edges lead, "target" for lists of where they come from.
        other: the other one.

    Returns:
        A row a vertex, in order: ``vertex``, and ``neighbours``, sorted; a neighbour is there as
        often as the edge.

    Example:
        >>> batch = {"source": np.array([7, 2, 7]), "target": np.array([5, 1, 3])}
        >>> lists_of(batch, "source", "target").to_pylist()[1]
        {'vertex': 7, 'neighbours': [3, 5]}
    """
    order = np.lexsort((batch[other], batch[by]))
    keys, values = batch[by][order], batch[other][order]
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    offsets = np.append(starts, len(keys))
    neighbours = pa.LargeListArray.from_arrays(offsets, values.astype(np.int64))
    return pa.table({"vertex": keys[starts].astype(np.int64), "neighbours": neighbours})


def reference(batches: list[Batch], by: str, other: str) -> dict[int, list[int]]:
    """All lists, made in this process edge by edge; none of the code above groups."""
    lists: defaultdict[int, list[int]] = defaultdict(list)
    for batch in batches:
        for vertex, neighbour in zip(batch[by].tolist(), batch[other].tolist(), strict=True):
            lists[vertex].append(neighbour)
    return {vertex: sorted(neighbours) for vertex, neighbours in lists.items()}


def check(name: str, table: Any, expected: dict[int, list[int]]) -> None:
    """That a table has these lists, in the order of the vertices.

    Raises:
        WrongLists: naming the first vertex that differs.
    """
    vertices = table.column("vertex").to_pylist()
    if vertices != sorted(expected):
        if sorted(vertices) == sorted(expected):
            raise WrongLists(f"{name}: the lists are not in the order of their vertices")
        odd = min(set(vertices) ^ set(expected), default=None)
        if odd is None:
            raise WrongLists(f"{name}: some vertices have more than one list")
        has = "has a list but no edge" if odd in vertices else "has edges but no list"
        raise WrongLists(f"{name}: vertex {odd:,} {has}")
    lists = table.column("neighbours").to_pylist()
    for vertex, found in zip(vertices, lists, strict=True):
        if found != expected[vertex]:
            raise WrongLists(
                f"{name}: vertex {vertex:,} has {len(found):,} neighbours {found[:5]}..., "
                f"not {len(expected[vertex]):,} {expected[vertex][:5]}..."
            )
