"""Points in Gaussian clusters, and the arithmetic of k-means (Lloyd 1982). No Ray here.

One pass. Clamor assigns points to centroids and goes over the assignments a second time for the
means, which its authors name as what costs them most against MPI (7.2). Here a chunk of points that
fits a core's cache is scored, assigned and summed before the next one is looked at.

Scores. The nearest centroid c of a point x is the one with the largest x.c - |c|^2 / 2: a matrix
product, without |x|^2. Which centroid won is a row of zeros with a single one, and the sums by
cluster are the product of those rows with the points, so that all that is long runs in the BLAS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import WrongResult

__all__ = [
    "Mixture",
    "WrongCentroids",
    "check",
    "cost",
    "generate",
    "new_centroids",
    "partial_sums",
    "reference",
    "save",
]

Float64 = npt.NDArray[np.float64]

CHUNK_POINTS: Final = 2048  # 160 KiB of ten dimensions, and as much of scores
BOX: Final = 10.0  # the true means are within [0, BOX) in each dimension; each spreads by 1


class WrongCentroids(WrongResult):
    """The tasks' centroids are not those that one process finds."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Points that everyone can generate, partition by partition (Clamor 7.2).

    Args:
        n_points: in all.
        n_partitions: into which they are cut, about evenly.
        dimensions: of a point.
        n_true: Gaussian clusters that they are drawn from, all of one size and weight.
        seed: of the means and of the draw.
    """

    n_points: int
    n_partitions: int
    dimensions: int = 10
    n_true: int = 100
    seed: int = 1

    def size_of(self, number: int) -> int:
        """Points of a partition."""
        edges = [self.n_points * i // self.n_partitions for i in (number, number + 1)]
        return edges[1] - edges[0]

    def means(self) -> Float64:
        """The true ones, shape (n_true, dimensions)."""
        rng = np.random.default_rng([self.seed, 0])
        return rng.uniform(0.0, BOX, (self.n_true, self.dimensions))

    def partition(self, number: int) -> Float64:
        """The points of a partition, shape (size_of(number), dimensions).

        Example:
            >>> Mixture(1000, 3).partition(2).shape
            (334, 10)
        """
        rng = np.random.default_rng([self.seed, 1 + number])
        n = self.size_of(number)
        out = rng.standard_normal((n, self.dimensions))
        out += self.means()[rng.integers(0, self.n_true, n)]
        return out

    def first_centroids(self, k: int) -> Float64:
        """Where k-means begins: k points of the mixture's own, shape (k, dimensions)."""
        rng = np.random.default_rng([self.seed, 0, k])
        chosen = rng.choice(self.n_true, k, replace=k > self.n_true)
        centroids: Float64 = self.means()[chosen] + rng.standard_normal((k, self.dimensions))
        return centroids


def generate(numbers: npt.NDArray[np.int64], mixture: Mixture) -> Float64:
    """The points of these partitions: what `map_batches` over their numbers calls."""
    parts = [mixture.partition(int(number)) for number in numbers]
    return np.concatenate(parts) if parts else np.empty((0, mixture.dimensions))


def save(mixture: Mixture, folder: Path) -> list[Path]:
    """Writes ``points-00000.npy`` and so on, one file a partition."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(mixture.n_partitions):
        path = folder / f"points-{number:05}.npy"
        np.save(path, mixture.partition(number))
        paths.append(path)
    return paths


# ---------------------------------------------------------------- one iteration


def partial_sums(points: Float64, centroids: Float64) -> Float64:
    """For each centroid the sum of the points that are nearest to it, and how many these are.

    Of equally near centroids the first has the point.

    Args:
        points: shape (n, d); n may be 0.
        centroids: shape (k, d).

    Returns:
        Shape (1, k, d + 1), the number last: one item, so that the sums of many partitions are
        added up with ``.sum()``.

    Example:
        >>> partial_sums(np.array([[0.0], [1.0], [9.0]]), np.array([[0.0], [10.0]])).tolist()
        [[[1.0, 2.0], [9.0, 1.0]]]
    """
    k, d = centroids.shape
    out = np.zeros((1, k, d + 1))
    half = (centroids * centroids).sum(axis=1)[:, None] / 2.0
    for first in range(0, len(points), CHUNK_POINTS):
        chunk = points[first : first + CHUNK_POINTS]
        scores = centroids @ chunk.T
        scores -= half
        won = (scores == scores.max(axis=0)).astype(np.float64)
        counts = won.sum(axis=1)
        if counts.sum() != len(chunk):  # some points are as near to another one
            won = np.eye(k)[scores.argmax(axis=0)].T
            counts = won.sum(axis=1)
        out[0, :, :d] += won @ chunk
        out[0, :, d] += counts
    return out


def new_centroids(sums: Float64, centroids: Float64) -> Float64:
    """The means of the clusters; a cluster that has no point keeps its centroid.

    Args:
        sums: shape (k, d + 1), of all points.
        centroids: shape (k, d), before.
    """
    counts = sums[:, -1:]
    return np.where(counts > 0, sums[:, :-1] / np.maximum(counts, 1.0), centroids)


# ---------------------------------------------------------------- checking


def reference(parts: Iterable[Float64], centroids: Float64, iterations: int) -> Float64:
    """The centroids after so many iterations, by squared differences, in this process.

    None of the code above scores or sums.

    Args:
        parts: the points, gone over once in each iteration; a list, or something like it.
    """
    k, d = centroids.shape
    for _ in range(iterations):
        sums, counts = np.zeros((k, d)), np.zeros(k, np.int64)
        for points in parts:
            for first in range(0, len(points), 1 << 16):
                chunk = points[first : first + (1 << 16)]
                squares = np.empty((len(chunk), k))
                for j in range(k):
                    squares[:, j] = ((chunk - centroids[j]) ** 2).sum(axis=1)
                label = squares.argmin(axis=1)
                counts += np.bincount(label, minlength=k)
                for axis in range(d):
                    sums[:, axis] += np.bincount(label, chunk[:, axis], minlength=k)
        full = counts > 0
        centroids = centroids.copy()
        centroids[full] = sums[full] / counts[full, None]
    return centroids


def cost(parts: Iterable[Float64], centroids: Float64) -> float:
    """Sum over all points of the squared distance to the nearest centroid."""
    total = 0.0
    for points in parts:
        for first in range(0, len(points), 1 << 16):
            chunk = points[first : first + (1 << 16)]
            squares = [((chunk - each) ** 2).sum(axis=1) for each in centroids]
            total += float(np.minimum.reduce(squares).sum())
    return total


def check(centroids: Any, expected: Float64) -> float:
    """That centroids are these, but for the rounding of other orders of summing.

    Returns:
        The largest difference in any dimension.

    Raises:
        WrongCentroids: One differs by more than 1e-7; the message names the first.
    """
    found = np.asarray(centroids)
    if found.shape != expected.shape:
        raise WrongCentroids(f"centroids have shape {found.shape}, not {expected.shape}")
    difference = np.abs(found - expected)
    wrong = np.flatnonzero(~(difference <= 1e-7).all(axis=1))  # a NaN is wrong as well
    if len(wrong):
        i = int(wrong[0])
        raise WrongCentroids(
            f"{len(wrong)} of {len(expected)} centroids; number {i} is "
            f"{found[i].round(6).tolist()}, not {expected[i].round(6).tolist()}"
        )
    return float(difference.max(initial=0.0))
