"""Logistic regression in Spark: two programs.

* ``blocks``: an RDD of sparse blocks in executors' memory. A task's arithmetic is the function that
  our tasks call; the weights are a broadcast variable, the sums are reduced by the driver.
* ``mllib``: LogisticRegression of Spark's own library, on the JVM. Its L-BFGS evaluates the loss
  and the gradient of all rows, as a step along the gradient does, and each evaluation is a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from bench.peers import peer as _peer
from bench.peers import spark

EVALUATION = "treeAggregate at RDDLossFunction"  # Spark's name of the job


def application(
    n_workers: int, sample: Any, step: float, executor_mb: int
) -> contextlib.AbstractContextManager[_peer.Peer]:
    """A driver and so many executors of one core; the blocks are in their memory."""
    spec = {**dataclasses.asdict(sample), "step": step}
    return spark.application("bench.peers.lr_spark", n_workers, executor_mb, spec)


class _Application:
    def __init__(self, spec: dict[str, Any]) -> None:
        import pyspark

        from clamor_ray.workloads.models import linear

        self.step = spec.pop("step")
        self.session = spark.session(spec)
        self.sample = linear.Sample(**spec)
        self.version = pyspark.__version__
        self.context = self.session.sparkContext
        sample, n = self.sample, self.sample.n_partitions
        self.blocks = self.context.parallelize(range(n), n).map(sample.partition).cache()
        self.n_rows = self.blocks.map(len).sum()

    def about(self, _: Any) -> dict[str, Any]:
        return {"library": f"Spark {self.version}", "n": self.n_rows}

    def iterate(self, n: int) -> dict[str, Any]:
        """`n` steps over the blocks."""
        import numpy as np

        from clamor_ray.workloads.models import linear

        def evaluate(weights: Any) -> tuple[float, Any]:
            shared = self.context.broadcast(weights)
            total = self.blocks.map(
                lambda rows, s=shared: linear.accumulate(None, rows, s.value, "logistic", 1.0)
            ).reduce(lambda a, b: a + b)
            shared.unpersist()
            return linear.penalized(total, weights, 0.0, True)

        seconds = []
        start = time.perf_counter()
        first = np.zeros(self.sample.n_features + 1)
        for here in linear.descend(evaluate, first, n, 0.0, self.step):
            seconds.append(time.perf_counter() - start)
            weights = here.weights
            start = time.perf_counter()
        return {"seconds": seconds, "answer": weights.tolist()}

    def mllib(self, n: int) -> dict[str, Any]:
        """A fit of so many iterations; the blocks make room for it."""
        from pyspark.ml.classification import LogisticRegression
        from pyspark.ml.linalg import Vectors, VectorUDT
        from pyspark.sql.types import DoubleType, StructField, StructType

        self.blocks.unpersist(blocking=True)
        sample, n_partitions = self.sample, self.sample.n_partitions

        def rows(number: int) -> Iterator[tuple[float, Any]]:
            part = sample.partition(number)
            for i, label in enumerate(part.labels):
                these = slice(part.first[i], part.first[i + 1])
                row = Vectors.sparse(sample.n_features, part.columns[these], part.values[these])
                yield float(label > 0), row

        schema = StructType([StructField("label", DoubleType()), StructField("row", VectorUDT())])
        found = self.context.parallelize(range(n_partitions), n_partitions).flatMap(rows)
        data = self.session.createDataFrame(found, schema).cache()
        data.count()
        before = spark.jobs(self.context)
        model = LogisticRegression(
            featuresCol="row", maxIter=n, regParam=0.0, tol=0.0, standardization=False
        ).fit(data)
        data.unpersist()
        return {
            "jobs": spark.jobs_since(before, self.context),
            "iterations": model.summary.totalIterations,
            "loss": model.summary.objectiveHistory[-1],
            "weights": [*model.coefficients.toArray().tolist(), model.intercept],
        }


def _main() -> None:
    here = _Application(spark.given())
    try:
        _peer.serve(0, {"about": here.about, "iterate": here.iterate, "mllib": here.mllib})
    finally:
        here.session.stop()


if __name__ == "__main__":
    _main()
