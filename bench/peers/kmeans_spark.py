"""The peer that is Spark, in local-cluster mode: two programs.

* ``blocks``: an RDD of NumPy blocks in executors' memory. A task's arithmetic is the function that
  our tasks call; the centroids are a broadcast variable, the sums are reduced by the driver.
* ``mllib``: KMeans of Spark's own library, on the JVM; its data are persisted by its `fit`. Spark
  says how long each of its jobs took, and an iteration is a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from bench.peers import peer as _peer
from bench.peers import spark


def application(
    n_workers: int, mixture: Any, k: int, executor_mb: int
) -> contextlib.AbstractContextManager[_peer.Peer]:
    """A driver and so many executors of one core; the blocks are in their memory."""
    spec = {**dataclasses.asdict(mixture), "k": k}
    return spark.application("bench.peers.kmeans_spark", n_workers, executor_mb, spec)


class _Application:
    def __init__(self, spec: dict[str, Any]) -> None:
        import pyspark

        from clamor_ray.workloads.data import clusters

        self.k = spec.pop("k")
        self.session = spark.session(spec)
        self.mixture = clusters.Mixture(**spec)
        self.version = pyspark.__version__
        self.context = self.session.sparkContext
        mixture, n = self.mixture, self.mixture.n_partitions
        self.blocks = self.context.parallelize(range(n), n).map(mixture.partition).cache()
        self.n_points = self.blocks.map(len).sum()

    def about(self, _: Any) -> dict[str, Any]:
        return {"library": f"Spark {self.version}", "n": self.n_points}

    def iterate(self, n: int) -> dict[str, Any]:
        """`n` iterations over the blocks."""
        from clamor_ray.workloads.data import clusters

        centroids = self.mixture.first_centroids(self.k)
        seconds = []
        for _ in range(n):
            start = time.perf_counter()
            shared = self.context.broadcast(centroids)
            sums = self.blocks.map(lambda b, s=shared: clusters.partial_sums(b, s.value)).reduce(
                lambda a, b: a + b
            )
            centroids = clusters.new_centroids(sums[0], centroids)
            seconds.append(time.perf_counter() - start)
            shared.unpersist()
        return {"seconds": seconds, "answer": centroids.tolist()}

    def mllib(self, argument: list[Any]) -> dict[str, Any]:
        """A fit of so many iterations by one of its solvers; the blocks make room for it."""
        from pyspark.ml.clustering import KMeans
        from pyspark.ml.functions import array_to_vector

        n, solver = argument
        self.blocks.unpersist(blocking=True)
        mixture, n_partitions = self.mixture, self.mixture.n_partitions

        def batches(numbers: Any) -> Any:
            import numpy as np
            import pyarrow as pa

            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    points = mixture.partition(number)
                    values = pa.array(points.reshape(-1))
                    offsets = np.arange(0, points.size + 1, points.shape[1], dtype=np.int32)
                    lists = pa.ListArray.from_arrays(offsets, values)
                    yield pa.RecordBatch.from_arrays([lists], ["point"])

        rows = self.session.range(0, n_partitions, 1, n_partitions).mapInArrow(
            batches, "point array<double>"
        )
        data = rows.select(array_to_vector("point").alias("features"))
        before = spark.jobs(self.context)
        means = KMeans(k=self.k, initMode="random", seed=1, maxIter=n, tol=0.0, solver=solver).fit(
            data
        )
        return {
            "jobs": spark.jobs_since(before, self.context),
            "iterations": means.summary.numIter,
            "sizes": means.summary.clusterSizes,
            "centroids": [center.tolist() for center in means.clusterCenters()],
        }


def _main() -> None:
    here = _Application(spark.given())
    try:
        _peer.serve(0, {"about": here.about, "iterate": here.iterate, "mllib": here.mllib})
    finally:
        here.session.stop()


if __name__ == "__main__":
    _main()
