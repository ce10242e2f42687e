"""Peers that are applications of Spark, in local-cluster mode. `unavailable` says what is missing;
`application` starts one."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
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
def application(
    module: str, n_workers: int, executor_mb: int, spec: Mapping[str, Any]
) -> Iterator[_peer.Peer]:
    """A driver and so many executors of one core.

    Args:
        module: the driver, run as ``__main__``; its `spec` is `given()`.
        n_workers: executors.
        executor_mb: memory of each.
        spec: JSON.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    whole = json.dumps({**spec, "workers": n_workers, "executor_mb": executor_mb})
    with _peer.started("Spark", [sys.executable, "-m", module, whole], 1, environment) as peer:
        yield peer


def given() -> dict[str, Any]:
    """In the driver: the `spec` that it was started with; `session` takes what is of Spark."""
    found: dict[str, Any] = json.loads(sys.argv[-2])
    return found


def session(spec: dict[str, Any]) -> Any:
    """In the driver: Spark's session."""
    from pyspark.sql import SparkSession

    workers, executor_mb = spec.pop("workers"), spec.pop("executor_mb")
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
    return builder.getOrCreate()


def jobs(context: Any) -> dict[int, tuple[str, float]]:
    """Name and seconds of each job that has ended, as Spark's own status store has them."""
    store = context._jsc.sc().statusStore()
    found = store.jobsList(None)
    out = {}
    for i in range(found.size()):
        job = found.apply(i)
        if job.completionTime().isDefined() and job.submissionTime().isDefined():
            took = job.completionTime().get().getTime() - job.submissionTime().get().getTime()
            out[job.jobId()] = (job.name(), took / 1e3)
    return out


def jobs_since(before: Collection[int], context: Any) -> list[tuple[str, float]]:
    """Name and seconds of the jobs that are not these, in order."""
    return [job for number, job in sorted(jobs(context).items()) if number not in before]
