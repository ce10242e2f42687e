"""k-means (Clamor fig. 10: d = 10, k = 10), iterations after loading, against MPI and Spark.

Everyone has the same points: Gaussian clusters around 100 means, generated where they stay, by the
same seeds. As many workers for all: our nodes of one CPU, MPI's ranks, Spark's executors of one
core. In each round each side does its iterations from the same first centroids, in an order that
turns from round to round, while the others wait in the kernel; the first round is in no figure.
After each, centroids are compared: everyone's are the same but for rounding.

``mpi_ratio`` is our median time of an iteration / MPI's: the same NumPy function over one array a
rank, and an all-reduce.

``spark_speedup`` is Spark's median time of an iteration / ours, of the best of Spark's programs:
``blocks``, an RDD of NumPy arrays in executors' memory with the same function again, and MLlib's
KMeans with each of its solvers, whose data is persisted by itself and whose iterations are the jobs
that Spark has in its status store. MLlib draws centroids of its own; the sizes of its clusters are
checked.

What is missing is said, and then there is no figure of it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.peers import kmeans_mpi, kmeans_spark, mpi, spark
from bench.support import common, turns
from bench.support.common import emit, note, now
from bench.support.turns import Iterate
from clamor_ray.workloads.data import clusters
from clamor_ray.workloads.data.clusters import Mixture

K = 10
POINT_BYTES = 80
SOLVERS = ("row", "block")
BESIDE = "ours beside "


class Ours:
    """The workload's own loop, over points that its collection keeps."""

    def __init__(self, mixture: Mixture) -> None:
        import clamor_ray as clamor
        from clamor_ray.workloads import kmeans
        from clamor_ray.workloads.cli.waiting import start_workers

        self.mixture = mixture
        start_workers(collections=True)
        # No copies: they would stay where they were made first.
        self.points = kmeans.load(kmeans.KMeansJob(mixture)).options(speculation=False).cache()
        n_points = self.points.count()
        if n_points != mixture.n_points:
            raise common.WrongData(f"{n_points:,} points of {mixture.n_points:,}")
        self.variable = clamor.put(mixture.first_centroids(K))

    def iterate(self, n: int) -> tuple[list[float], Any]:
        """Seconds of each iteration, its update included, and the centroids after them."""
        import clamor_ray as clamor
        from clamor_ray.workloads import kmeans

        with clamor.update(self.variable) as centroids:
            centroids[:] = self.mixture.first_centroids(K)
        lines = list(kmeans.iterate(self.points, self.variable, n))
        emit({"ours_tasks_s": [line.tasks_s for line in lines]})
        return [line.tasks_s + line.update_s for line in lines], lines[-1].centroids


def mllib(peer: Any, mixture: Mixture, n_iterations: int, ours: Iterate) -> dict[str, list[float]]:
    """Seconds of each iteration of MLlib's, by solver, and of ours before and after it ("ours
    beside ..."): a fit of MLlib's cannot stop in the middle, and the machine's speed may change.

    Raises:
        WrongData: Its clusters do not have the points that are nearest to its centroids.
    """
    out = {}
    parts = [mixture.partition(i) for i in range(mixture.n_partitions)]
    for solver in SOLVERS:
        beside = ours(n_iterations // 2)[0]
        start = now()
        answer = peer.ask(mllib=[n_iterations + 1, solver])[0]
        took = now() - start
        # The first iteration persists the data.
        jobs = [seconds for name, seconds in answer["jobs"] if "collectAsMap at KMeans" in name]
        if len(jobs) != answer["iterations"]:
            raise RuntimeError(f"{len(jobs)} jobs of {answer['iterations']} iterations: {answer}")
        # MLlib says how many points it has of each cluster: that depends on every one of them.
        centroids = np.array(answer["centroids"])
        sizes = sum(clusters.partial_sums(part, centroids)[0, :, -1] for part in parts)
        common.verify(f"sizes of the clusters of MLlib's {solver} solver", answer["sizes"], sizes)
        out[f"mllib_{solver}"] = jobs[1:]
        out[f"{BESIDE}mllib_{solver}"] = beside + ours(n_iterations // 2)[0]
        emit({"side": f"mllib_{solver}", "fit_s": took, "jobs": answer["jobs"]})
    return out


@contextlib.contextmanager
def _peers(
    options: argparse.Namespace, mixture: Mixture
) -> Iterator[tuple[Any | None, Any | None]]:
    """MPI's ranks and Spark's application, where they can be had."""
    n, mb = options.workers, options.executor_mb
    with contextlib.ExitStack() as stack:
        yield (
            turns.entered(
                stack,
                "mpi",
                turns.why_not("mpi", mpi.unavailable, options.without),
                lambda: kmeans_mpi.ranks(n, mixture, K),
                mixture.n_points,
            ),
            turns.entered(
                stack,
                "spark",
                turns.why_not("spark", spark.unavailable, options.without),
                lambda: kmeans_spark.application(n, mixture, K, mb),
                mixture.n_points,
            ),
        )


def figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    """From the seconds of all iterations of each side."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    out = {}
    if "mpi" in median:
        out["mpi_ratio"] = median["ours"] / median["mpi"]
    speedups = {
        f"speedup_over_{name}": value / median.get(BESIDE + name, median["ours"])
        for name, value in median.items()
        if name not in ("ours", "mpi") and not name.startswith(BESIDE)
    }
    if speedups:
        out["spark_speedup"] = min(speedups.values())
        out |= speedups
    out["iteration_s"] = median["ours"]
    return out


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench kmeans", description=__doc__)
    parser.add_argument("--small", action="store_true", help="8 MB, 1 round of 3 iterations")
    parser.add_argument("--points", type=int, help="of ten dimensions (12,500,000: 1 GB)")
    parser.add_argument("--rounds", type=int, help="that count (4)")
    parser.add_argument("--iterations", type=int, help="of a round (5)")
    parser.add_argument("--workers", type=int, help="of every side (one for each core)")
    parser.add_argument("--partitions", type=int, help="of ours and of Spark's (2 a worker)")
    parser.add_argument("--executor-mb", type=int, help="memory of each of Spark's executors")
    parser.add_argument(
        "--without", action="append", default=[], choices=["mpi", "spark"], help="leave a peer out"
    )
    options = parser.parse_args(arguments)
    cores = common.environment()["environment"]["cores"]
    options.workers = options.workers or max(2, cores)
    n_points = options.points or (100_000 if options.small else 12_500_000)
    n_rounds = options.rounds or (1 if options.small else 4)
    n_iterations = options.iterations or (3 if options.small else 5)
    n_bytes = n_points * POINT_BYTES
    # What MLlib makes of a point on the JVM is about three times as large.
    options.executor_mb = options.executor_mb or 1024 + 6 * (n_bytes >> 20) // options.workers
    mixture = Mixture(n_points, options.partitions or 2 * options.workers)

    import clamor_ray as clamor

    note("touching memory")
    common.warm_memory(min(4 * n_bytes, 8 << 30))
    environment = common.environment(library=clamor.__version__, bench="kmeans")
    store_bytes = 2 * n_bytes // options.workers + (256 << 20)
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(common.several_nodes(options.workers, store_bytes, num_cpus=1))
        environment["environment"].update(
            trap=nodes.trap,
            points=n_points,
            workers=options.workers,
            partitions=mixture.n_partitions,
        )
        emit(environment)
        ranks, application = stack.enter_context(_peers(options, mixture))
        note("loading")
        ours = Ours(mixture)
        sides: dict[str, Iterate] = {"ours": ours.iterate}
        if ranks is not None:
            sides["mpi"] = turns.of_peer(ranks)
        if application is not None:
            sides["blocks"] = turns.of_peer(application)
        seconds = turns.rounds(sides, n_rounds, n_iterations)
        if not mixture.n_points > 2_000_000:
            parts = [mixture.partition(i) for i in range(mixture.n_partitions)]
            expected = clusters.reference(parts, mixture.first_centroids(K), n_iterations)
            clusters.check(ours.iterate(n_iterations)[1], expected)
        if application is not None:
            note("MLlib")
            seconds |= mllib(application, mixture, n_rounds * n_iterations, ours.iterate)
    emit({"spread": {name: common.spread(values) for name, values in seconds.items()}})
    common.summary(figures(seconds))
    return 0
