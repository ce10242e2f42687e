"""Rounds of small tasks: a program, against Ray tasks and a Ray Compiled Graph (Canary, fig 9).

Each round has eight tasks a core, and the next one begins when all have ended. ``ray_speedup``:
rounds a second of the program, by those of the peer: ``tasks`` (a driver that gets each round) and
``compiled_graph`` (an actor a core, each with eight calls in a row). Tasks of 1 ms compute with
NumPy; empty ones do nothing. All in one cluster of one node, one after the other, in each
repetition.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import ray

import clamor_ray as clamor
from bench.support import common
from bench.support.common import emit, note, now

TASKS_A_CORE: Final = 8
TASK_S: Final = 1e-3


def length_for(seconds: float) -> int:
    """Of an array whose square roots take so long on one core."""
    n = 1 << 16
    array = np.ones(n)
    best_s = min(_timed(lambda: np.sqrt(array, out=array)) for _ in range(50))
    return max(1, int(n * seconds / best_s))


def _timed(what: Callable[[], Any]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def work(array: Any) -> None:
    if len(array):
        np.sqrt(array, out=array)


def by_program(n_tasks: int, length: int, n_rounds: int) -> float:
    """Rounds a second."""
    program = clamor.Program()
    parts = program.dataset([np.ones(length) for _ in range(n_tasks)])
    total = program.value(0)

    def compute(t: Any, part: Any) -> None:
        work(part)
        t.send(0, 1)

    def count(t: Any, total: int) -> int:
        return total + sum(t.recv())

    with program.loop(max=n_rounds):
        program.stage(compute, writes=[parts])
        program.stage(count, writes=[total])
    job = program.run()
    start = now()
    job.wait()
    took_s = now() - start
    common.verify("tasks that ran", job.result(total), n_tasks * n_rounds)
    job.stop()
    return n_rounds / took_s


def by_tasks(n_tasks: int, length: int, n_rounds: int) -> float:
    """Rounds a second: arrays stay where they are made, in a cache of each worker."""

    @ray.remote(num_cpus=1)
    def compute() -> int:
        global _array
        try:
            array = _array  # type: ignore[used-before-def]
        except NameError:
            array = _array = np.ones(length)
        work(array)
        return 1

    ray.get([compute.remote() for _ in range(n_tasks)])
    start = now()
    for _ in range(n_rounds):
        ray.get([compute.remote() for _ in range(n_tasks)])
    return n_rounds / (now() - start)


class Computer:
    """An actor of the compiled graph."""

    def __init__(self, length: int, n_calls: int) -> None:
        self._arrays = [np.ones(length) for _ in range(n_calls)]

    def compute(self, number: int) -> int:
        for array in self._arrays:
            work(array)
        return number


def by_compiled_graph(n_cores: int, length: int, n_rounds: int) -> float:
    """Rounds a second."""
    from ray.dag import InputNode, MultiOutputNode

    made = ray.remote(num_cpus=1)(Computer)
    actors = [made.remote(length, TASKS_A_CORE) for _ in range(n_cores)]
    with InputNode() as number:
        graph = MultiOutputNode([actor.compute.bind(number) for actor in actors])
    compiled = graph.experimental_compile()
    try:
        ray.get(compiled.execute(0))
        start = now()
        for n in range(n_rounds):
            common.verify("answers", ray.get(compiled.execute(n)), [n] * n_cores)
        return n_rounds / (now() - start)
    finally:
        compiled.teardown()
        for actor in actors:
            ray.kill(actor)


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench programs", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    args = parser.parse_args(argv)
    n_cores = len(os.sched_getaffinity(0))
    n_tasks = TASKS_A_CORE * n_cores
    n_repeated, scale = (1, 20) if args.small else (5, 1)
    emit(common.environment(cores=n_cores))
    ray.init(num_cpus=n_cores, log_to_driver=False, include_dashboard=False)
    clamor.init()
    figures: dict[str, float] = {}
    try:
        for name, length, n_rounds in (
            ("1 ms", length_for(TASK_S), 400 // scale),
            ("empty", 0, 2000 // scale),
        ):
            ratios: dict[str, list[float]] = {"tasks": [], "compiled_graph": []}
            for n in range(n_repeated):
                note(f"{name}, repetition {n + 1}")
                ours = by_program(n_tasks, length, n_rounds)
                tasks = by_tasks(n_tasks, length, max(5, n_rounds // 10))
                graph = by_compiled_graph(n_cores, length, n_rounds)
                emit({"case": name, "program": ours, "tasks": tasks, "compiled_graph": graph})
                ratios["tasks"].append(ours / tasks)
                ratios["compiled_graph"].append(ours / graph)
            for peer, found in ratios.items():
                figures[f"ray_speedup ({name}, {peer})"] = statistics.median(found)
    finally:
        clamor.shutdown()
        ray.shutdown()
    common.summary(figures)
