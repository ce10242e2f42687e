"""What a task of a program costs beside its own work: the matcher of a node, without a cluster.

A program that is a loop over a dataset: each round is a task for each partition, which waits for
the round before. ``c_step_us``: a task whose kernel in C does nothing, with one executor, in a loop
that never enters Python: taken, called, finished, and what may begin after it matched. Beside it,
in the records, a program of which each task sends: one value to all partitions, and a sum back.

``tasks_per_second_at_10_percent``: kernels that take their time, on an executor process for each
core. As many tasks a second and core as there are when a tenth of that time is not the kernels'.

``py_rate``: functions in Python that do nothing, a second and core, taken by batches of 256: from
the matcher that processes share (``shared``), and from its model in Python (``model``), which is
what runs where there is no compiled extension. One process.

Medians of repetitions, by wall time.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.support import common
from bench.support.common import emit, note, now
from clamor_ray._recipes.matching.matcher import Matcher
from clamor_ray._recipes.matching.shared import SharedMatcher
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import Tables

N_PARTITIONS: Final = 256
BATCH: Final = 64
PY_BATCH: Final = 256
TASK_NS: Final = (500, 1000, 2000, 4000, 8000)
SHARE: Final = 0.1
TIMEOUT_S: Final = 600


def a_loop(rounds: int) -> Tables:
    """Each round changes each partition."""
    p = Builder()
    x = p.dataset([0] * N_PARTITIONS)
    with p.loop(max=rounds):
        p.stage(lambda t, x: None, writes=[x])
    return p.tables()


def a_loop_that_sends(rounds: int) -> Tables:
    """As a step of gradient descent: a value to all, and a sum of what they make of it."""
    p = Builder()
    w, x = p.value(0), p.dataset([0] * N_PARTITIONS)
    with p.loop(max=rounds):
        p.stage(lambda t, w: t.broadcast(w), reads=[w])
        p.stage(lambda t, x: t.send(0, t.recv()), reads=[x])
        p.stage(lambda t, w: sum(t.recv()), writes=[w])
    return p.tables()


def filled(matcher: Any, tables: Tables) -> Any:
    """All slices are here."""
    for group in range(tables.n_groups):
        for index in range(tables.n_slices(group)):
            state = {dataset: PartitionState() for dataset in tables.datasets_of(group)}
            matcher.add(group, index, SliceState(state))
    return matcher


def address_of(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


# ------------------------------------------------------------------- kernels


def run_all(matcher: SharedMatcher) -> int:
    """Runs until the program has ended. Returns how many tasks this executor had."""
    n = 0
    while not matcher.is_complete:
        n += matcher.run_kernels(BATCH, 0.01)[0]
    return n


def step_us(tables: Tables, library: ctypes.CDLL, kernel: str) -> tuple[float, int]:
    """Microseconds a task, and how many there were."""
    with SharedMatcher.create(tables) as matcher:
        for stage in range(len(tables.stages)):
            matcher.set_kernel(stage, address_of(library, kernel))
        filled(matcher, tables)
        start = now()
        n = run_all(matcher)
        return (now() - start) / n * 1e6, n


def executor(fd: int, tables: Tables, library_path: Path, task_ns: int, out: Any) -> None:
    """A process: sends its tasks, its seconds, and those of its kernels."""
    library = ctypes.CDLL(str(library_path))
    library.spent.restype = ctypes.c_uint64
    with SharedMatcher.attach(tables, fd) as matcher:
        matcher.set_kernel(0, address_of(library, "take_time"))
        out.send(None)
        out.recv()
        library.take_ns(ctypes.c_uint64(task_ns))
        begun = now()
        n = run_all(matcher)
        out.send((n, now() - begun, library.spent() / 1e9))


def at_once(tables: Tables, library_path: Path, task_ns: int, n_executors: int) -> dict[str, float]:
    """Executors on all cores. Tasks a second and core, and the share that is not the kernels'."""
    context = multiprocessing.get_context("fork")
    with SharedMatcher.create(tables) as matcher:
        started = []
        for _ in range(n_executors):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=executor,
                args=(matcher.fd, tables, library_path, task_ns, theirs),
                daemon=True,
            )
            process.start()
            started.append((process, ours))
        for _, pipe in started:
            pipe.recv()
        filled(matcher, tables)
        for _, pipe in started:
            pipe.send(None)
        done = []
        for process, pipe in started:
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"An executor did not end in {TIMEOUT_S} s.")
            done.append(pipe.recv())
            process.join(TIMEOUT_S)
    n, wall, kernels = (sum(column) for column in zip(*done, strict=True))
    return {"rate": n / wall, "share": 1 - kernels / wall}


def at_share(points: Sequence[dict[str, float]], share: float) -> float:
    """The rate at which so much of the time is not the kernels', between measured ones. Pure.

    Args:
        points: With "rate" and "share", in the order of tasks that take longer.

    Example:
        >>> at_share([{"rate": 400.0, "share": 0.2}, {"rate": 100.0, "share": 0.0}], 0.1)
        250.0
    """
    for before, after in itertools.pairwise(points):
        if before["share"] >= share > after["share"]:
            part = (before["share"] - share) / (before["share"] - after["share"])
            return before["rate"] + part * (after["rate"] - before["rate"])
    nearest = min(points, key=lambda point: abs(point["share"] - share))
    note(f"no two points have {share} between their shares; the nearest has {nearest['share']:.3f}")
    return nearest["rate"]


# -------------------------------------------------------------------- Python


def nothing(_: Any) -> None:
    """The task."""


def py_rate(matcher: Any, n_tasks: int) -> float:
    """Tasks a second: taken, called, finished."""
    n = 0
    start = now()
    while n < n_tasks:
        tasks = matcher.take(PY_BATCH)
        for task in tasks:
            nothing(task)
        matcher.finish(tasks)
        n += len(tasks)
    return n / (now() - start)


def repeated(n: int, measure: Callable[[], float]) -> list[float]:
    """The first one warms up."""
    return [measure() for _ in range(n + 1)][1:]


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench recipes", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--executors", type=int, default=0, help="one a core")
    args = parser.parse_args(argv)
    rounds, n_repeated = (100, 1) if args.small else (4000, 7)
    n_executors = args.executors or len(os.sched_getaffinity(0))
    emit(common.environment(executors=n_executors))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="clamor-bench-") as folder:
        library_path = common.compile_c("kernels.c", Path(folder), shared=True)
        library = ctypes.CDLL(str(library_path))
        for name, kernel, tables in (
            ("c_step_us", "nothing", a_loop(rounds)),
            ("c_step_that_sends_us", "pass_on", a_loop_that_sends(rounds)),
        ):
            note(name)
            took = repeated(
                n_repeated,
                lambda t=tables, k=kernel: step_us(t, library, k)[0],  # type: ignore[misc]
            )
            emit({"case": name, **common.spread(took)})
            figures[name] = statistics.median(took)
        points = []
        for task_ns in TASK_NS:
            note(f"tasks of {task_ns} ns on {n_executors} executors")
            tables = a_loop(max(10, rounds * 500 // task_ns))
            same = [at_once(tables, library_path, task_ns, n_executors) for _ in range(n_repeated)]
            points.append({key: statistics.median(s[key] for s in same) for key in same[0]})
            emit({"case": "at_once", "task_ns": task_ns, "executors": n_executors, **points[-1]})
        figures["tasks_per_second_at_10_percent"] = at_share(points, SHARE)
    tables = a_loop(rounds)
    n_tasks = N_PARTITIONS * rounds // 4
    rates: dict[str, float] = {}
    for name, make in (("shared", SharedMatcher.create), ("model", Matcher)):
        note(f"py_rate, {name}")
        found = repeated(
            n_repeated, lambda make=make: py_rate(filled(make(tables), tables), n_tasks)
        )  # type: ignore[misc,operator]
        emit({"case": "py_rate", "matcher": name, **common.spread(found)})
        rates[name] = statistics.median(found)
    figures["py_rate"] = rates
    del figures["c_step_that_sends_us"]
    common.summary(figures)
