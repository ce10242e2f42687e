"""k-means while a node is killed (Clamor fig. 11): in the middle of iteration 4 of 10.

Four nodes of one CPU, on this machine. Each repetition is two runs on fresh clusters, one that is
left alone and one in which a node that is not the driver's is killed with all its processes, once
it has ended a task of the iteration and begun another. Where tasks are short that moment may be
missed: then it is that of the next iteration (`failed_in`). Centroids are checked after both. Slow
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
on it. Tasks say themselves that they began. ``unheard``: of the tasks lost, those that had ended
and ran again all the same; the worst repetition. After a task's function its process talks to the
registry, for which Ray lets the next task begin: the answers of such tasks, of more than one where
the registry is slow, may die with the node.
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

N_NODES, SMALL_N_NODES = 4, 3
ITERATIONS = 10
FAILS_IN, FAILS_BY = 4, 9
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
        self.node, self.failed_in = lab.node_ids[victim], 0
        self.has_ended = threading.Event()  # the program
        self.lost: set[tuple[str, int]] = set()
        self.detection_s = 0.0
        self.error: str | None = None

    def _is_within(self) -> int:
        """The iteration of which the node has ended a task, and is in another, which will be lost.
        0: it is in the middle of none."""
        mine = [line for line in self.log.lines() if line.node == self.node]
        for iteration in range(FAILS_IN, FAILS_BY + 1):
            of_it = [line for line in mine if line.stage == logged.stage_of(iteration)]
            has_ended_one = any(line.event == "ended" for line in of_it)
            if has_ended_one and executions.running_on(of_it, self.node):
                return iteration
        return 0

    def _stopped_within(self) -> int:
        """As `_is_within`, and it stands still."""
        found = self._is_within()
        if not found:
            return 0
        pids = self.lab.processes(self.victim)
        _signal(pids, signal.SIGSTOP)
        time.sleep(0.005)  # the signal is delivered when the process is next scheduled
        if self._is_within() == found:
            return found
        _signal(pids, signal.SIGCONT)
        return 0

    def run(self) -> None:
        import ray

        node = self.node
        deadline = time.monotonic() + WAIT_S
        while not (found := self._stopped_within()):
            if self.has_ended.is_set() or time.monotonic() > deadline:
                self.error = (
                    f"node {node[:8]} never was in the middle of iterations {FAILS_IN} to "
                    f"{FAILS_BY}: give more points, so that tasks take longer"
                )
                return
            time.sleep(0.002)  # a file has no other way to say that it grew
        self.failed_in = found
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


def run(
    mixture: Mixture, want: Any, victim: int | None, folder: str, small: bool
) -> dict[str, Any]:
    """Ten iterations on a cluster of their own; a small one hears of a death earlier.

    Raises:
        WrongCentroids: A node that died has changed the result.
    """
    import clamor_ray as clamor
    from tests.support.lab import local_cluster
    from tests.support.lab.cluster import (
        HEALTH_CHECK_PERIOD_MS,
        RAY_HEALTH_CHECK_PERIOD_MS,
        RAY_IDLE_WORKERS,
    )

    log = Log(str(Path(folder) / ("killed" if victim else "alone")))
    n_nodes = SMALL_N_NODES if small else N_NODES
    period_ms = HEALTH_CHECK_PERIOD_MS if small else RAY_HEALTH_CHECK_PERIOD_MS
    store_bytes = 2 * mixture.n_points * 80 // n_nodes + (256 << 20)
    with local_cluster(
        n_nodes,
        object_store_memory=store_bytes,
        log_to_driver=False,
        health_check_period_ms=period_ms,
        idle_workers=RAY_IDLE_WORKERS,
    ) as lab:
        trap = clamor.init().trap
        points = logged.load(mixture, log, speculation=False)
        killer = None
        if victim is not None:
            killer = Killer(lab, victim, points, log)
            killer.start()
        iterations = list(logged.iterate(points, mixture, K, ITERATIONS, log))
        clusters.check(iterations[-1][1], want)
        lost, unheard, detection_s, failed_in = set(), set(), 0.0, 0
        if killer is not None:
            killer.has_ended.set()
            killer.join(WAIT_S)
            if killer.error is not None:
                raise RuntimeError(killer.error)
            failed_in = killer.failed_in
            stage = logged.stage_of(failed_in)
            unheard = executions.ended_and_again(log.lines(), killer.node, stage)
            lost, detection_s = killer.lost | unheard, killer.detection_s
        clamor.shutdown(force=True)
    lines = log.lines()
    return {
        "killed": victim is not None,
        "trap": trap,
        "seconds": [took for took, _ in iterations],
        "tasks": len({(line.stage, line.partition) for line in lines}),
        "lost": len(lost),
        "unheard": len(unheard),
        "lost_points": len([task for task in lost if task[0] == "load"]),
        "rerun": executions.rerun(lines),
        "partitions_by_node": logged.loaded(log),
        "detection_s": detection_s,
        "failed_in": failed_in,
    }


def figures(alone: list[dict[str, Any]], killed: list[dict[str, Any]]) -> dict[str, float]:
    """From the runs of all repetitions."""
    pairs = list(zip(alone, killed, strict=True))

    def failed_s(record: dict[str, Any], iteration: int) -> float:
        took: float = record["seconds"][iteration - 1]
        return took

    def later_s(record: dict[str, Any], iteration: int) -> float:
        return statistics.median(record["seconds"][iteration:])

    def ratio(of: Any) -> float:
        return statistics.median(
            of(two, two["failed_in"]) / of(one, two["failed_in"]) for one, two in pairs
        )

    def redo_s(record: dict[str, Any], iteration: int) -> float:
        return failed_s(record, iteration) - float(record["detection_s"])

    return {
        "failure_slowdown": ratio(failed_s),
        "redo_slowdown": ratio(redo_s),
        "detection_s": statistics.median(two["detection_s"] for two in killed),
        "later_slowdown": ratio(later_s),
        "total_slowdown": ratio(lambda record, _: sum(record["seconds"])),
        "rerun_share": max(two["rerun"] / two["lost"] for two in killed),
        "unheard": max(two["unheard"] for two in killed),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench recovery", description=__doc__)
    parser.add_argument("--small", action="store_true", help="24 MB, 3 nodes, 1 repetition")
    parser.add_argument("--points", type=int, help="of ten dimensions (12,500,000: 1 GB)")
    parser.add_argument("--partitions", type=int, help="of them (10 for each node)")
    parser.add_argument("--repetitions", type=int, help="3")
    options = parser.parse_args(arguments)
    n_nodes = SMALL_N_NODES if options.small else N_NODES
    mixture = Mixture(
        options.points or (300_000 if options.small else 12_500_000),
        options.partitions or 10 * n_nodes,
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
            for victim, runs in ((None, alone), (1 + number % (n_nodes - 1), killed)):
                note(f"repetition {number + 1}: {'a node dies' if victim else 'left alone'}")
                record = run(mixture, want, victim, folder, options.small)
                if not alone:
                    environment["environment"]["trap"] = record["trap"]
                    emit(environment)
                emit({"repetition": number, **record})
                runs.append(record)
    common.summary(figures(alone, killed))
    return 0
