"""k-means while a node is killed (Clamor fig. 11): in the middle of iteration 4 of 10.

Four nodes of one CPU, on this machine. Each repetition is two runs on fresh clusters, one that is
left alone and one in which a node that is not the driver's is killed with all its processes, once
it has ended a task of the iteration and begun another. Centroids are checked after both. Slow
tasks get no copies here: a task that runs twice does so because something was lost.

``failure_slowdown``: seconds of the iteration in which the node died / those of the same iteration
of the run that was left alone; median of the repetitions. For a part of it nothing can be done:
until Ray calls a node dead that is silent, which takes five missed health checks of three seconds
each unless its settings say otherwise (`detection_s`: from the kill until `ray.nodes()` said so).
``redo_slowdown`` is the same without those seconds. ``later_slowdown``: that of the iterations
after it, which have a node less; three left of four are 1.33 where tasks have all the cores that
they ask for.

``rerun_share``: tasks that ran again / tasks lost; the worst repetition. Lost are the partitions of
points of which the node had the only copy, as Ray knew at the time, and the tasks that were running
on it. Tasks say themselves that they began.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.support import common, executions, logged
from bench.support.common import emit, note, now
from bench.support.executions import Log
from clamor_ray.workloads.data import clusters
from clamor_ray.workloads.data.clusters import Mixture

N_NODES = 4
ITERATIONS = 10
FAILS_IN = 4
K = 10
WAIT_S = 300.0


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Killer(threading.Thread):
    """Kills a node in the middle of its work, and says what was lost with it."""

    def __init__(self, lab: Any, victim: int, points: Any, log: Log) -> None:
        super().__init__(daemon=True)
        self.lab, self.victim, self.log = lab, victim, log
        with points._evaluation() as evaluation:
            self.parts = evaluation.parts()
        self.lost: set[tuple[str, int]] = set()
        self.detection_s = 0.0
        self.error: str | None = None

    def _is_within(self, node: str, stage: str) -> bool:
        """Whether the node has ended a task of the stage, of which the driver has heard then, for
        the node has one place, and is in another, which will be lost."""
        mine = [line for line in self.log.lines() if line.stage == stage and line.node == node]
        running = executions.running_on(mine, node)
        return bool(running) and any(line.event == "ended" for line in mine)

    def _stopped_within(self, node: str, stage: str) -> bool:
        """As `_is_within`, and it stands still."""
        if not self._is_within(node, stage):
            return False
        pids = self.lab.processes(self.victim)
        _signal(pids, signal.SIGSTOP)
        time.sleep(0.005)  # the signal is delivered when the process is next scheduled
        if self._is_within(node, stage):
            return True
        _signal(pids, signal.SIGCONT)
        return False

    def run(self) -> None:
        import ray

        node, stage = self.lab.node_ids[self.victim], logged.stage_of(FAILS_IN)
        deadline = time.monotonic() + WAIT_S
        while not self._stopped_within(node, stage):
            if time.monotonic() > deadline:
                self.error = f"node {node[:8]} never was in the middle of {stage}"
                return
            time.sleep(0.002)  # a file has no other way to say that it grew
        where = ray.experimental.get_object_locations(self.parts)
        self.lab.kill_node(self.victim)
        killed = now()
        self.lost = executions.running_on(self.log.lines(), node)
        for number, part in enumerate(self.parts):
            if where[part]["node_ids"] == [node]:
                self.lost.add(("load", number))
        while any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()):
            if time.monotonic() > deadline:
                self.error = f"Ray never called node {node[:8]} dead"
                return
            time.sleep(0.05)  # Ray has no event of it for drivers
        self.detection_s = now() - killed


def run(mixture: Mixture, want: Any, victim: int | None, folder: str) -> dict[str, Any]:
    """Ten iterations on a cluster of their own.

    Raises:
        WrongCentroids: A node that died has changed the result.
    """
    import clamor_ray as clamor
    from tests.support.lab import local_cluster
    from tests.support.lab.cluster import RAY_HEALTH_CHECK_PERIOD_MS

    log = Log(str(Path(folder) / ("killed" if victim else "alone")))
    store_bytes = 2 * mixture.n_points * 80 // N_NODES + (256 << 20)
    with local_cluster(
        N_NODES,
        object_store_memory=store_bytes,
        log_to_driver=False,
        health_check_period_ms=RAY_HEALTH_CHECK_PERIOD_MS,
    ) as lab:
        trap = clamor.init().trap
        points = logged.load(mixture, log, speculation=False)
        killer = None
        if victim is not None:
            killer = Killer(lab, victim, points, log)
            killer.start()
        iterations = list(logged.iterate(points, mixture, K, ITERATIONS, log))
        clusters.check(iterations[-1][1], want)
        lost, detection_s = set(), 0.0
        if killer is not None:
            killer.join(WAIT_S)
            if killer.error is not None:
                raise RuntimeError(killer.error)
            lost, detection_s = killer.lost, killer.detection_s
        clamor.shutdown()
    lines = log.lines()
    return {
        "killed": victim is not None,
        "trap": trap,
        "seconds": [took for took, _ in iterations],
        "tasks": len({(line.stage, line.partition) for line in lines}),
        "lost": len(lost),
        "lost_points": len([task for task in lost if task[0] == "load"]),
        "rerun": executions.rerun(lines),
        "partitions_by_node": logged.loaded(log),
        "detection_s": detection_s,
    }


def figures(alone: list[dict[str, Any]], killed: list[dict[str, Any]]) -> dict[str, float]:
    """From the runs of all repetitions."""
    pairs = list(zip(alone, killed, strict=True))

    def ratio(of: Any) -> float:
        return statistics.median(of(two["seconds"]) / of(one["seconds"]) for one, two in pairs)

    def failed_s(record: dict[str, Any]) -> float:
        took: float = record["seconds"][FAILS_IN - 1]
        return took

    return {
        "failure_slowdown": statistics.median(failed_s(two) / failed_s(one) for one, two in pairs),
        "redo_slowdown": statistics.median(
            (failed_s(two) - two["detection_s"]) / failed_s(one) for one, two in pairs
        ),
        "detection_s": statistics.median(two["detection_s"] for two in killed),
        "later_slowdown": ratio(lambda seconds: statistics.median(seconds[FAILS_IN:])),
        "total_slowdown": ratio(sum),
        "rerun_share": max(two["rerun"] / two["lost"] for two in killed),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench recovery", description=__doc__)
    parser.add_argument("--small", action="store_true", help="32 MB, 1 repetition")
    parser.add_argument("--points", type=int, help="of ten dimensions (12,500,000: 1 GB)")
    parser.add_argument("--partitions", type=int, help="of them (10 for each node)")
    parser.add_argument("--repetitions", type=int, help="3")
    options = parser.parse_args(arguments)
    mixture = Mixture(
        options.points or (400_000 if options.small else 12_500_000),
        options.partitions or 10 * N_NODES,
    )

    import clamor_ray as clamor

    environment = common.environment(
        library=clamor.__version__,
        bench="recovery",
        points=mixture.n_points,
        partitions=mixture.n_partitions,
    )
    note("the answer by one process")
    want = logged.expected(mixture, K, ITERATIONS)
    alone, killed = [], []
    for number in range(options.repetitions or (1 if options.small else 3)):
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
            for victim, runs in ((None, alone), (1 + number % (N_NODES - 1), killed)):
                note(f"repetition {number + 1}: {'a node dies' if victim else 'left alone'}")
                record = run(mixture, want, victim, folder)
                if not alone:
                    environment["environment"]["trap"] = record["trap"]
                    emit(environment)
                emit({"repetition": number, **record})
                runs.append(record)
    common.summary(figures(alone, killed))
    return 0
