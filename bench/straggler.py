"""k-means with busy neighbours on one node of four (Clamor fig. 12). Needs root.

Each node's raylet, with all that it starts, is in a control group of its own that has a part of a
core: a small machine. On one of them other processes compute as well, in its group, so that what
its tasks get is a share of a share, as on a host that is let to too many.

A run is ten iterations. Points are loaded before the neighbours come, so that each node has its
part of them, and each has done an iteration, which counts for nothing. Runs are made with nobody
busy, with the neighbours and copies of slow tasks, and with the neighbours and without copies, in
turn, on fresh clusters; centroids are checked after each.

``slowdown_with`` and ``slowdown_without``: seconds of ten iterations with the neighbours / with
nobody busy, with copies of slow tasks and without; medians of the repetitions.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.support import (
    cgroup,
    common,
    executions,
    logged,
)
from bench.support.common import emit, note
from bench.support.executions import Log
from clamor_ray.workloads.data import clusters
from clamor_ray.workloads.data.clusters import Mixture

N_NODES, SMALL_N_NODES = 4, 3
ITERATIONS = 10
SLOW = 2  # which node; not the driver's
K = 100

CASES = {"alone": (False, True), "with": (True, True), "without": (True, False)}


def _compute() -> None:
    while True:
        pass


@contextlib.contextmanager
def neighbours(group: cgroup.Group, n: int) -> Iterator[None]:
    """Processes that compute in a group."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute, daemon=True) for _ in range(n)]
    try:
        for process in processes:
            process.start()
            assert process.pid is not None
            group.add(process.pid)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(30)


def run(
    options: argparse.Namespace, mixture: Mixture, want: Any, case: str, folder: str
) -> dict[str, Any]:
    """The iterations on a cluster of its own.

    Raises:
        WrongCentroids: A copy of a task has changed the result.
    """
    import clamor_ray as clamor
    from tests.support.lab import local_cluster
    from tests.support.lab.cluster import RAY_HEALTH_CHECK_PERIOD_MS, RAY_IDLE_WORKERS

    busy, copies = CASES[case]
    log = Log(str(Path(folder) / case))
    store_bytes = 2 * mixture.n_points * 80 // options.nodes + (256 << 20)
    with contextlib.ExitStack() as stack:
        # Nothing of the cluster is left when the groups are removed.
        groups = stack.enter_context(cgroup.groups(options.nodes, options.cores))
        lab = stack.enter_context(
            local_cluster(
                options.nodes,
                object_store_memory=store_bytes,
                log_to_driver=False,
                health_check_period_ms=RAY_HEALTH_CHECK_PERIOD_MS,
                idle_workers=RAY_IDLE_WORKERS,
            )
        )
        for node, group in enumerate(groups):
            for pid in lab.processes(node):
                group.add(pid)
        trap = clamor.init().trap
        stack.callback(clamor.shutdown)
        points = logged.load(mixture, log, speculation=False)
        points = points.options(speculation=copies)
        warm = Log(str(Path(folder) / "warm"))
        list(logged.iterate(points.options(speculation=False), mixture, K, 1, warm))
        with neighbours(groups[SLOW], options.neighbours if busy else 0):
            iterations = list(logged.iterate(points, mixture, K, options.iterations, log))
        clusters.check(iterations[-1][1], want)
        slow = lab.node_ids[SLOW]
    lines = [line for line in log.lines() if line.stage != "load" and line.event == "began"]
    return {
        "case": case,
        "trap": trap,
        "seconds": [took for took, _ in iterations],
        "tasks_on_slow_node": len([line for line in lines if line.node == slow]),
        "copies": executions.rerun(lines),
        "partitions_by_node": logged.loaded(log),
    }


def figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """From the runs of all repetitions."""
    total = {
        case: statistics.median(sum(r["seconds"]) for r in records if r["case"] == case)
        for case in CASES
    }
    return {
        "slowdown_with": total["with"] / total["alone"],
        "slowdown_without": total["without"] / total["alone"],
        "alone_s": total["alone"],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench straggler", description=__doc__)
    parser.add_argument(
        "--small", action="store_true", help="fewer points, 3 nodes, 2 iterations, once"
    )
    parser.add_argument("--iterations", type=int, help=f"of k-means ({ITERATIONS})")
    parser.add_argument("--points", type=int, help="of ten dimensions (4,000,000)")
    parser.add_argument("--partitions", type=int, help="of them (4 for each node)")
    parser.add_argument("--neighbours", type=int, help="busy processes (5)")
    parser.add_argument("--cores", type=float, help="of each node (its part of 0.8 of all)")
    parser.add_argument("--repetitions", type=int, help="3")
    options = parser.parse_args(arguments)
    options.iterations = options.iterations or (2 if options.small else ITERATIONS)
    options.neighbours = options.neighbours or (2 if options.small else 5)
    options.nodes = SMALL_N_NODES if options.small else N_NODES
    reason = cgroup.unavailable()
    if reason is not None:
        raise SystemExit(f"bench straggler: {reason}")
    mixture = Mixture(
        options.points or (100_000 if options.small else 4_000_000),
        options.partitions or 4 * options.nodes,
    )

    import clamor_ray as clamor

    environment = common.environment(library=clamor.__version__, bench="straggler")
    # The driver and the registry want some as well.
    options.cores = options.cores or 0.8 * environment["environment"]["cores"] / options.nodes
    environment["environment"].update(
        points=mixture.n_points,
        partitions=mixture.n_partitions,
        cores_of_a_node=options.cores,
        neighbours=options.neighbours,
    )
    note("the answer by one process")
    want = logged.expected(mixture, K, options.iterations)
    records = []
    for number in range(options.repetitions or (1 if options.small else 3)):
        with tempfile.TemporaryDirectory(prefix="bench-straggler-") as folder:
            order = list(CASES)
            for case in order[number % 3 :] + order[: number % 3]:
                note(f"repetition {number + 1}: {case}")
                record = run(options, mixture, want, case, folder)
                if not records:
                    environment["environment"]["trap"] = record["trap"]
                    emit(environment)
                emit({"repetition": number, **record})
                records.append(record)
    common.summary(figures(records))
    return 0
