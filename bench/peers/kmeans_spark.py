"""The peer that is Spark, in local-cluster mode: two programs.

* ``blocks``: an RDD of NumPy blocks in executors' memory. A task's arithmetic is the function that
  our tasks call; the centroids are a broadcast variable, the sums are reduced by the driver.
* ``mllib``: KMeans of Spark's own library, on the JVM; its data are persisted by its `fit`. Spark
  says how long each of its jobs took, and an iteration is a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.peers import peer as _peer

MISSING = "PySpark and a Java are needed for spark_speedup (pip install pyspark; a JRE, 17 or 21)"


def unavailable() -> str | None:
    """Why there is no Spark here, or None."""
    import importlib.util

    if importlib.util.find_spec("pyspark") is None:
        return f"{MISSING}: there is no pyspark"
    if shutil.which("java") is None:
        return f"{MISSING}: there is no java"
    return None


@contextlib.contextmanager
def application(n_workers: int, mixture: Any, k: int, executor_mb: int) -> Iterator[_peer.Peer]:
    """A driver and so many executors of one core; the blocks are in their memory."""
    spec = json.dumps(
        {**dataclasses.asdict(mixture), "k": k, "workers": n_workers, "executor_mb": executor_mb}
    )
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [sys.executable, "-m", "bench.peers.kmeans_spark", spec]
    with _peer.started("Spark", command, 1, environment) as peer:
        yield peer


class _Application:
    def __init__(self, spec: dict[str, Any]) -> None:
        import pyspark
        from pyspark.sql import SparkSession

        from clamor_ray.workloads.data import clusters

        self.k = spec.pop("k")
        workers, executor_mb = spec.pop("workers"), spec.pop("executor_mb")
        self.mixture = clusters.Mixture(**spec)
        builder = SparkSession.builder.master(f"local-cluster[{workers},1,{executor_mb}]")
        settings = {
            "spark.ui.enabled": "false",
            "spark.executor.memory": f"{executor_mb}m",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            # Arrow batches as large as a partition: nothing is split that need not be.
            "spark.sql.execution.arrow.maxRecordsPerBatch": "0",
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        self.session = builder.getOrCreate()
        self.version = pyspark.__version__
        self.context = self.session.sparkContext
        mixture, n = self.mixture, self.mixture.n_partitions
        self.blocks = self.context.parallelize(range(n), n).map(mixture.partition).cache()
        self.n_points = self.blocks.map(len).sum()

    def about(self, _: Any) -> dict[str, Any]:
        return {"library": f"Spark {self.version}", "points": self.n_points}

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
        return {"seconds": seconds, "centroids": centroids.tolist()}

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
        before = self._jobs()
        means = KMeans(k=self.k, initMode="random", seed=1, maxIter=n, tol=0.0, solver=solver).fit(
            data
        )
        jobs = {number: job for number, job in self._jobs().items() if number not in before}
        return {
            "jobs": [[name, seconds] for _, (name, seconds) in sorted(jobs.items())],
            "iterations": means.summary.numIter,
            "sizes": means.summary.clusterSizes,
            "centroids": [center.tolist() for center in means.clusterCenters()],
        }

    def _jobs(self) -> dict[int, tuple[str, float]]:
        """Name and seconds of each job that has ended, as Spark's own status store has them."""
        store = self.context._jsc.sc().statusStore()
        jobs = store.jobsList(None)
        out = {}
        for i in range(jobs.size()):
            job = jobs.apply(i)
            if job.completionTime().isDefined() and job.submissionTime().isDefined():
                took = job.completionTime().get().getTime() - job.submissionTime().get().getTime()
                out[job.jobId()] = (job.name(), took / 1e3)
        return out


def _main() -> None:
    spark = _Application(json.loads(sys.argv[-2]))
    try:
        _peer.serve(0, {"about": spark.about, "iterate": spark.iterate, "mllib": spark.mllib})
    finally:
        spark.session.stop()


if __name__ == "__main__":
    _main()
