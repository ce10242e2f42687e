"""k-means whose tasks say that they ran, for benchmarks that count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.support.common import now
from bench.support.executions import Log
from clamor_ray.workloads.data import clusters
from clamor_ray.workloads.data.clusters import Float64, Mixture


def load(mixture: Mixture, log: Log, **options: Any) -> Any:
    """The points, generated about evenly on all nodes, and kept.

    Raises:
        RuntimeError: A node has none.
    """
    import clamor_ray as clamor
    from clamor_ray.workloads.cli.waiting import nodes_with_cpus, start_workers

    start_workers(collections=True)
    n = mixture.n_partitions
    numbers = clamor.from_numpy(np.arange(n), partitions=n).options(progress=False, **options)
    points = numbers.map_batches(_generate, mixture, log).execute()
    n_nodes, n_used = len(nodes_with_cpus()), len(loaded(log))
    if n_used < n_nodes:
        raise RuntimeError(f"only {n_used} of {n_nodes} nodes have points")
    return points


def loaded(log: Log) -> list[int]:
    """How many partitions each node generated first, most first."""
    first = {line.partition: line.node for line in reversed(log.lines()) if line.stage == "load"}
    return sorted(Counter(first.values()).values(), reverse=True)


def _generate(numbers: Any, mixture: Mixture, log: Log) -> Float64:
    (number,) = numbers.tolist()
    log.note("began", "load", number)
    points = mixture.partition(number)
    log.note("ended", "load", number)
    return points


def _partial_sums(
    points: Float64, centroids: Float64, names: dict[float, int], stage: str, log: Log
) -> Float64:
    number = names[float(points[0, 0])]
    log.note("began", stage, number)
    sums = clusters.partial_sums(points, centroids)
    log.note("ended", stage, number)
    return sums


def stage_of(iteration: int) -> str:
    """What the log calls it."""
    return f"iteration {iteration}"


def iterate(
    points: Any, mixture: Mixture, k: int, iterations: int, log: Log
) -> Iterator[tuple[float, Float64]]:
    """Seconds of each iteration, its update included, and the centroids after it."""
    import clamor_ray as clamor

    # A partition is known by its first number.
    names = {
        float(mixture.partition(number)[0, 0]): number for number in range(mixture.n_partitions)
    }
    centroids = mixture.first_centroids(k)
    variable = clamor.put(centroids)
    try:
        for number in range(1, iterations + 1):
            start = now()
            summing = points.map_batches(_partial_sums, variable, names, stage_of(number), log)
            centroids = clusters.new_centroids(np.asarray(summing.sum()), centroids)
            with clamor.update(variable) as shared:
                shared[:] = centroids
            yield now() - start, centroids
    finally:
        clamor.free(variable)


def expected(mixture: Mixture, k: int, iterations: int) -> Float64:
    """The centroids by one process: the sums of all partitions, added up."""
    centroids = mixture.first_centroids(k)
    parts = [mixture.partition(i) for i in range(mixture.n_partitions)]
    for _ in range(iterations):
        sums = sum(clusters.partial_sums(part, centroids)[0] for part in parts)
        centroids = clusters.new_centroids(np.asarray(sums), centroids)
    return centroids
