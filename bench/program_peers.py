"""Rounds of k-means, logistic regression and PageRank: a program, against MPI and Spark.

Everyone has the same data, drawn by the same seeds, and the same NumPy functions over it (Canary,
figs. 8 and 10). As many workers for all: tasks that the program's worker runs at once, MPI's ranks,
Spark's executors of one core. In each repetition each side does its rounds from the same start, in
an order that turns, while the others wait in the kernel; the first repetition is in no figure. Then
answers are compared: everyone's are the same but for rounding.

``mpi_ratio``: the program's median round / that of mpi4py, for each workload. A rank has its
partitions in private arrays, and calls MPI once where a program has messages.

``spark_speedup``: Spark's median round / the program's, of the best of Spark's programs. Of k-means
these are those of `kmeans`. Of logistic regression they are ``blocks``, the same function over an
RDD, and ``mllib``, whose rounds are the jobs in which MLlib evaluates the loss and the gradient.

Figures are medians of the repetitions' ratios; records have the least and the most. A record
``longest_tasks_s`` says how much of a median round of the program is its longest tasks, one of each
stage. What is missing is said, and then there is no figure of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Sequence
from typing import Any

from bench.drivers.program_sides import BLOCKS, CASES, Case, by_program
from bench.kmeans import BESIDE
from bench.peers import mpi, spark
from bench.support import common, turns
from bench.support.common import emit, note
from bench.support.turns import Iterate

SIZES = {  # (small, else)
    "points": (50_000, 2_000_000),
    "rows": (2_000, 200_000),
    "features": (500, 10_000),
    "vertices": (1 << 12, 1 << 19),
    "edges": (1 << 15, 1 << 23),
    "repetitions": (1, 5),
    "rounds": (4, 20),
}


def ratios(ours: Sequence[float], theirs: Sequence[float], n_rounds: int) -> list[float]:
    """Of each repetition the median of ours / that of theirs. Pure.

    Example:
        >>> ratios([1.0, 1.0, 9.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 3)
        [0.5, 1.5]
    """
    pairs = zip(_medians(ours, n_rounds), _medians(theirs, n_rounds), strict=True)
    return [mine / other for mine, other in pairs]


def _medians(seconds: Sequence[float], n_rounds: int) -> list[float]:
    each = range(0, len(seconds), n_rounds)
    return [statistics.median(seconds[first : first + n_rounds]) for first in each]


def figures(seconds: dict[str, list[float]], n_rounds: int) -> dict[str, list[float]]:
    """Ratios of the repetitions, by figure: of one workload. Pure.

    Args:
        seconds: of all rounds, by side. A side of MLlib's stands beside one of ours.
        n_rounds: of a repetition.
    """
    ours = seconds["program"]
    out = {}
    if "mpi" in seconds:
        out["mpi_ratio"] = ratios(ours, seconds["mpi"], n_rounds)
    speedups = {}
    if BLOCKS in seconds:
        speedups[BLOCKS] = ratios(seconds[BLOCKS], ours, n_rounds)
    for name in seconds:
        if name.startswith(BESIDE):
            own = name.removeprefix(BESIDE)
            mine, other = statistics.median(seconds[name]), statistics.median(seconds[own])
            speedups[own] = [other / mine]
    if speedups:
        out["spark_speedup"] = min(speedups.values(), key=statistics.median)
        out |= {f"speedup_over_{name}": values for name, values in speedups.items()}
    return out


def measured(
    name: str, case: Case, options: argparse.Namespace
) -> tuple[dict[str, list[float]], float]:
    """Figures of a workload, and the program's median round."""
    without, n_rounds = options.without, options.rounds
    with contextlib.ExitStack() as stack:
        sides: dict[str, Iterate] = {}
        why = turns.why_not("mpi", mpi.unavailable, without)
        ranks = turns.entered(stack, "mpi", why, case.mpi, case.n_items)
        application: Any = None
        if case.spark is not None:
            why = turns.why_not("spark", spark.unavailable, without)
            application = turns.entered(stack, "spark", why, case.spark, case.n_items)
        note(f"{name}: loading")
        sides["program"] = by_program(case, options.workers)
        if ranks is not None:
            sides["mpi"] = turns.of_peer(ranks)
        if application is not None:
            sides[BLOCKS] = turns.of_peer(application)
        note(f"{name}: rounds of {', '.join(sides)}")
        seconds = dict(turns.rounds(sides, options.repetitions, n_rounds))
        if application is not None and case.mllib is not None:
            note(f"{name}: MLlib")
            n_jobs = options.repetitions * n_rounds
            seconds |= case.mllib(application, n_jobs, sides["program"])
    for side, values in seconds.items():
        emit({"workload": name, "side": side, **common.spread(values)})
    return figures(seconds, n_rounds), statistics.median(seconds["program"])


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench program_peers", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    for option, (_, default) in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"how many ({default:,})")
    parser.add_argument("--workers", type=int, help="of every side (one for each core)")
    parser.add_argument("--partitions", type=int, help="of the data (one a worker)")
    parser.add_argument(
        "--workloads", default=",".join(CASES), help="some of the default, with commas"
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=["mpi", "spark"], help="leave a peer out"
    )
    options = parser.parse_args(argv)
    for option, (small, default) in SIZES.items():
        if getattr(options, option) is None:
            setattr(options, option, small if options.small else default)
    wanted = options.workloads.split(",")
    if unknown := set(wanted) - set(CASES):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}: take {', '.join(CASES)}")
    options.workers = options.workers or max(2, len(os.sched_getaffinity(0)))
    options.partitions = options.partitions or options.workers
    # One thread a task, as in a rank and in an executor.
    os.environ["OMP_NUM_THREADS"] = "1"
    n_bytes = max(
        options.points * 80, options.rows * 30 * 12, options.vertices * 32 + options.edges * 4
    )
    environment = common.environment(workers=options.workers)
    summary: dict[str, dict[str, float]] = {}
    with common.several_nodes(1, 4 * n_bytes + (256 << 20), num_cpus=options.workers) as nodes:
        environment["environment"]["trap"] = nodes.trap
        emit(environment)
        for name in wanted:
            case = CASES[name](options)
            emit({"workload": name, **case.size})
            found, round_s = measured(name, case, options)
            for figure, values in found.items():
                emit({"workload": name, "figure": figure, **common.spread(values)})
                summary.setdefault(figure, {})[name] = statistics.median(values)
            summary.setdefault("round_s", {})[name] = round_s
    common.summary(summary)
