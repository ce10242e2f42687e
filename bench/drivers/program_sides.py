"""What `program_peers` compares: workloads as programs, each with its data, peers and checks.

A side does some rounds from the same start: seconds of each, and the answer after them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import kmeans
from bench.peers import kmeans_mpi, kmeans_spark, lr_mpi, lr_spark, pagerank_mpi
from bench.support import common, timed
from bench.support.common import emit, now
from bench.support.timed import TimedProgram
from bench.support.turns import Iterate
from clamor_ray.workloads.data import graphs
from clamor_ray.workloads.data.clusters import Mixture
from clamor_ray.workloads.models import linear
from clamor_ray.workloads.models.linear import Sample
from clamor_ray.workloads.recipes.kmeans import describe_kmeans
from clamor_ray.workloads.recipes.lr import Descent, describe_lr
from clamor_ray.workloads.recipes.pagerank import cut_graph, describe_pagerank

STEP: Final = 1.0
DAMPING: Final = 0.85
BLOCKS: Final = "blocks"  # Spark, with the function that our tasks call

Peer = contextlib.AbstractContextManager[Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload.

    Args:
        size: what it has of everything, for the record.
        n_items: that the processes of each peer have, all together.
        parts: makes a partition of the program, by number.
        n_parts: partitions of the program.
        describe: (program, partitions, rounds) -> a dataset, and what makes the answer of it.
        mpi: starts ranks.
        spark: starts an application; None: there is none.
        mllib: (peer, rounds, side) -> seconds of each round of Spark's own library, by its name,
            and of the side beside it.
    """

    size: dict[str, int]
    n_items: int
    parts: Callable[[int], Any]
    n_parts: int
    describe: Callable[[Any, list[Any], int], tuple[Any, Callable[[Any], Any]]]
    mpi: Callable[[], Peer]
    spark: Callable[[], Peer] | None = None
    mllib: Callable[[Any, int, Iterate], dict[str, list[float]]] | None = None


def executor_mb(n_bytes: int, n_workers: int) -> int:
    """Memory of an executor of Spark: what it makes of a row on the JVM is some times as large."""
    return 1024 + 6 * (n_bytes >> 20) // n_workers


def kmeans_case(options: argparse.Namespace) -> Case:
    mixture = Mixture(options.points, options.partitions)
    first = mixture.first_centroids(kmeans.K)

    def describe(p: Any, parts: list[Any], rounds: int) -> Any:
        return describe_kmeans(p, parts, first, rounds).centroids, np.asarray

    n, mb = options.workers, executor_mb(mixture.n_points * kmeans.POINT_BYTES, options.workers)
    return Case(
        size={"points": mixture.n_points, "partitions": mixture.n_partitions},
        n_items=mixture.n_points,
        parts=mixture.partition,
        n_parts=mixture.n_partitions,
        describe=describe,
        mpi=lambda: kmeans_mpi.ranks(n, mixture, kmeans.K),
        spark=lambda: kmeans_spark.application(n, mixture, kmeans.K, mb),
        mllib=lambda peer, rounds, ours: kmeans.mllib(peer, mixture, rounds, ours),
    )


def lr_case(options: argparse.Namespace) -> Case:
    sample = Sample(options.rows, options.features, options.partitions)

    def describe(p: Any, parts: list[Any], rounds: int) -> Any:
        how = Descent(1.0, iterations=rounds, tolerance=0.0, step=STEP)
        return describe_lr(p, parts, sample.n_features, how).last, lambda last: last.weights

    n, mb = options.workers, executor_mb(sample.n_rows * sample.per_row * 12, options.workers)
    return Case(
        size={
            "rows": sample.n_rows,
            "features": sample.n_features,
            "partitions": sample.n_partitions,
        },
        n_items=sample.n_rows,
        parts=sample.partition,
        n_parts=sample.n_partitions,
        describe=describe,
        mpi=lambda: lr_mpi.ranks(n, sample, STEP),
        spark=lambda: lr_spark.application(n, sample, STEP, mb),
        mllib=lambda peer, rounds, ours: _lr_of_mllib(peer, sample, rounds, ours),
    )


def _lr_of_mllib(peer: Any, sample: Sample, rounds: int, ours: Iterate) -> dict[str, list[float]]:
    """Evaluations of MLlib's, and rounds of ours before and after them.

    Raises:
        WrongData: The loss that it says is not that of its weights.
    """
    beside = ours(rounds // 2 + 1)[0]
    start = now()
    answer = peer.ask(mllib=rounds)[0]
    took = now() - start
    jobs = [s for name, s in answer["jobs"] if name.startswith(lr_spark.EVALUATION)]
    if len(jobs) <= answer["iterations"]:
        raise RuntimeError(f"{len(jobs)} evaluations in {answer['iterations']} iterations")
    parts = [sample.partition(number) for number in range(sample.n_partitions)]
    evaluate = linear.plain_evaluate(parts, sample.n_features, "logistic", 1.0, 0.0, True)
    loss = evaluate(np.array(answer["weights"]))[0]
    if not np.isclose(loss, answer["loss"], rtol=1e-6, atol=0.0):
        raise common.WrongData(f"MLlib's loss is {answer['loss']!r}, and of its weights {loss!r}")
    emit({"side": "mllib", "fit_s": took, "jobs": answer["jobs"]})
    beside += ours(rounds // 2 + 1)[0]
    # The first evaluation makes blocks of the rows, and persists them.
    return {"mllib": jobs[1:], f"{kmeans.BESIDE}mllib": beside}


class _Put(list[Any]):
    """Partitions that are in Ray's store already."""

    def __init__(self, parts: list[Any], refs: list[Any]) -> None:
        super().__init__(parts)
        self._refs = refs

    def partition_references(self) -> list[Any]:
        """As of a collection: what the program's workers get."""
        return self._refs


def pagerank_case(options: argparse.Namespace) -> Case:
    drawn = {
        "n_vertices": options.vertices,
        "n_edges": options.edges,
        "exponent": 2.1,
        "seed": 1,
    }
    graph = graphs.generate(**drawn)
    parts = cut_graph(graph, options.partitions)

    def describe(p: Any, refs: list[Any], rounds: int) -> Any:
        datasets = describe_pagerank(p, _Put(parts, refs), DAMPING, rounds, 0.0)
        return datasets.ranks, lambda ranks: np.concatenate(ranks) * graph.n_vertices

    return Case(
        size={"vertices": graph.n_vertices, "edges": graph.n_edges, "partitions": len(parts)},
        n_items=graph.n_vertices,
        parts=parts.__getitem__,
        n_parts=len(parts),
        describe=describe,
        mpi=lambda: pagerank_mpi.ranks(options.workers, {**drawn, "damping": DAMPING}),
    )


CASES: Final[dict[str, Callable[[argparse.Namespace], Case]]] = {
    "kmeans": kmeans_case,
    "lr": lr_case,
    "pagerank": pagerank_case,
}


def by_program(case: Case, n_cpus: int) -> Iterate:
    """The side that is ours: a worker on this node, which runs so many tasks at once."""
    import ray

    refs = [ray.put(case.parts(number)) for number in range(case.n_parts)]

    def iterate(n: int) -> tuple[list[float], Any]:
        with tempfile.TemporaryDirectory(prefix="clamor-bench-") as folder:
            path = Path(folder) / "tasks"
            program = TimedProgram(path)
            dataset, answer_of = case.describe(program, refs, n)
            job = program.run(workers=1, cpus=n_cpus)
            try:
                answer = answer_of(job.result(dataset))
            finally:
                job.stop()
            rounds = timed.rounds_of(timed.read(path))
        if len(rounds.seconds) != n:
            raise common.WrongData(f"{len(rounds.seconds)} rounds have run, and not {n}")
        names = [stage.name for stage in program.tables().stages]
        emit(
            {
                "side": "program",
                "longest_tasks_s": statistics.median(rounds.longest_s),
                "stages_s": dict(zip(names, rounds.stages_s, strict=True)),
            }
        )
        return rounds.seconds, answer

    return iterate
