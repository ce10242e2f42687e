"""k-means as a program of stages: the iterations of `workloads/kmeans.py` without the driver.

In each round the centroids go to all partitions of points, their sums come back to one task, and
that moves the centroids. Sums are added up in the order of the partitions, so the answer does not
depend on which worker is fast.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..data import clusters
from ..data.clusters import Float64
from .rounds import Round, begin_round, end_round

__all__ = ["KMeansDatasets", "describe_kmeans"]


class KMeansDatasets(NamedTuple):
    """Datasets of the program.

    Args:
        points: arrays of shape (n, d), one a partition.
        centroids: a value, shape (k, d).
        moved: a value: the farthest that a centroid did in the last round.
        rounds: a value: how many there were.
        lines: a value: a `Round` each.
    """

    points: Any
    centroids: Any
    moved: Any
    rounds: Any
    lines: Any


def describe_kmeans(
    p: Any, points: Any, centroids: Float64, iterations: int, tolerance: float = 0.0
) -> KMeansDatasets:
    """Lloyd's iterations.

    Args:
        p: the program that is being described.
        points: partitions, each an array of shape (n, d); n may be 0.
        centroids: the first ones, shape (k, d).
        iterations: at the most.
        tolerance: it ends where no centroid moved by as much.
    """
    parts = p.dataset(points, name="points")
    centres = p.value(centroids, name="centroids")
    moved, rounds = p.value(np.inf, name="moved"), p.value(0, name="rounds")
    lines = p.value([], name="lines")
    with p.loop(max=iterations) as loop:
        p.stage(send_centroids, reads=[centres], writes=[lines])
        p.stage(sum_by_nearest, reads=[parts])
        p.stage(move, writes=[centres, moved, rounds, lines])
        loop.until(functools.partial(has_settled, tolerance), reads=[moved])
    return KMeansDatasets(parts, centres, moved, rounds, lines)


def send_centroids(t: Any, centroids: Float64, lines: list[Round]) -> None:
    """To all partitions of points."""
    begin_round(lines)
    t.broadcast(centroids)


def sum_by_nearest(t: Any, points: Float64) -> None:
    """What the points of a partition add up to, by nearest centroid."""
    (centroids,) = t.recv()
    t.send(0, clusters.partial_sums(points, centroids))


def move(
    t: Any, centroids: Float64, moved: float, rounds: int, lines: list[Round]
) -> tuple[Float64, float, int, list[Round]]:
    """Centroids to the means of their points."""
    summed_s = time.time()
    sums = add_up(t.recv())
    new = clusters.new_centroids(sums[0], centroids)
    moved = float(np.sqrt(((new - centroids) ** 2).sum(axis=1)).max())
    return new, moved, rounds + 1, end_round(lines, summed_s, moved)


def has_settled(tolerance: float, t: Any, moved: float) -> bool:
    """Whether no centroid moved by as much."""
    return moved < tolerance


def add_up(parts: Sequence[Float64]) -> Float64:
    """Element by element, in their order."""
    return functools.reduce(np.add, parts)
