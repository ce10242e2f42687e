"""k-means over points that stay in the cluster's memory (Clamor 7.2, fig. 10; Lloyd 1982).

    python -m clamor_ray.workloads.kmeans --demo
    python -m clamor_ray.workloads.kmeans 'points-*.npy' -k 10 --out centroids.parquet

The points are a collection, generated or read once and then cached. The centroids are a global
variable, which the driver changes in place between iterations, so that each iteration reads a
version of its own. In an iteration a task per partition goes over its points once and returns the
sums by nearest centroid; what travels are k rows of numbers a partition.
"""

from __future__ import annotations

import dataclasses
import glob
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table

import clamor_ray as clamor

from .cli import observe
from .cli.options import cluster_options
from .cli.report import human_bytes
from .cli.waiting import nodes_with_cpus, start_workers
from .data import clusters
from .data.clusters import Float64, Mixture, WrongCentroids
from .data.places import InputError
from .knn import Stages, attached

PARTITIONS_PER_CPU = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Args:
        mixture: what to generate; None where points are read.
        data: path or glob of .npy files, or several; each an array of shape (points, dimensions).
        k: clusters to find.
        iterations: at the most.
        tolerance: the farthest that a centroid moves, below which it ends.
        n_partitions: of files; None for PARTITIONS_PER_CPU for each CPU.
        check: whether to do it in this process as well.
    """

    mixture: Mixture | None
    data: str | list[str] | None = None
    k: int = 10
    iterations: int = 10
    tolerance: float = 0.0
    n_partitions: int | None = None
    check: bool = False


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One line of the result.

    Args:
        number: from 1.
        tasks_s: from the start of the tasks to the sums of all.
        update_s: of the commit after them.
        moved: the farthest that a centroid did.
        centroids: after it, shape (k, d).
    """

    number: int
    tasks_s: float
    update_s: float
    moved: float
    centroids: Float64


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a run.

    Args:
        n_points: that there are.
        lines: one an iteration.
        received: bytes between page servers, in all iterations.
        error: largest difference from the check; None where there was none.
    """

    n_points: int
    lines: list[Iteration]
    received: int
    error: float | None


def load(job: Job) -> Any:
    """The points as a collection; nothing runs yet."""
    if job.mixture is None:
        n_partitions = job.n_partitions or PARTITIONS_PER_CPU * sum(
            n_cpus for _, n_cpus in nodes_with_cpus()
        )
        return clamor.read_npy(job.data, partitions=n_partitions)
    n = job.mixture.n_partitions
    numbers = clamor.from_numpy(np.arange(n), partitions=n)
    return numbers.map_batches(clusters.generate, job.mixture)


def iterate(
    points: Any,
    variable: clamor.GlobalRef[Float64],
    iterations: int,
    tolerance: float = 0.0,
) -> Iterator[Iteration]:
    """Lloyd's iterations, one at a time.

    Args:
        points: a collection of rows of d numbers, cached.
        variable: the centroids, shape (k, d); changed in place after each iteration.
        iterations: at the most.
        tolerance: it ends where no centroid moved by as much.
    """
    centroids = np.array(variable.get())
    for number in range(1, iterations + 1):
        start = time.perf_counter()
        sums = points.map_batches(clusters.partial_sums, variable).sum()
        summed = time.perf_counter()
        new = clusters.new_centroids(np.asarray(sums), centroids)
        moved = float(np.sqrt(((new - centroids) ** 2).sum(axis=1)).max())
        with clamor.update(variable) as shared:
            shared[:] = new
        centroids = new
        yield Iteration(number, summed - start, time.perf_counter() - summed, moved, new)
        if moved < tolerance:
            return


def run(job: Job, stages: Stages) -> Outcome:
    """Loads, iterates and checks, on the cluster that this process is attached to.

    Raises:
        InputError: There are no points, or not as many as clusters.
        WrongCentroids: The centroids are not those that one process finds.
    """
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    text = "reading points" if job.mixture is None else "generating points where they stay"
    with stages.stage("load", text):
        points = load(job).cache()
        n_points = points.count()
    if n_points < job.k:
        raise InputError(f"-k {job.k}: there are only {n_points:,} points; take k up to that")
    first = first_centroids(job, points)
    variable = clamor.put(first)
    lines: list[Iteration] = []
    try:
        before = observe.cost()
        text = f"up to {job.iterations} iterations over {n_points:,} points"
        with stages.stage("iterate", text, job.iterations) as done:
            for line in iterate(points, variable, job.iterations, job.tolerance):
                lines.append(line)
                done(line.number)
        received = (observe.cost() - before).bytes_received
    finally:
        clamor.free(variable)
    error = None
    if job.check:
        with stages.stage("check", "checking against the same in this process"):
            expected = clusters.reference(parts(job), first, len(lines))
            error = clusters.check(lines[-1].centroids, expected)
    return Outcome(n_points, lines, received, error)


def first_centroids(job: Job, points: Any) -> Float64:
    """Where it begins: at points of the mixture, or the first ones that were read.

    Raises:
        InputError: What was read are not rows of numbers.
    """
    if job.mixture is not None:
        return job.mixture.first_centroids(job.k)
    rows = points.take(job.k)
    try:
        found = np.array(rows, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{job.data} does not hold rows of numbers: {error}") from None
    if found.ndim != 2:
        raise InputError(f"{job.data} holds items of shape {found.shape[1:]}, not rows of numbers")
    return found


def parts(job: Job) -> list[Float64]:
    """The points in this process, for the check."""
    if job.mixture is not None:
        return [job.mixture.partition(i) for i in range(job.mixture.n_partitions)]
    given = [job.data] if isinstance(job.data, str) else job.data or []
    paths = [path for each in given for path in sorted(glob.glob(each, recursive=True))]
    return [np.load(path) for path in paths]


def print_outcome(console: Console, outcome: Outcome) -> None:
    """What a run found, and what it took."""
    checked = ""
    if outcome.error is not None:
        checked = (
            f" All centroids equal those of one process (largest difference {outcome.error:.0e})."
        )
    last = outcome.lines[-1]
    console.print(
        f"\n{len(last.centroids)} clusters of {outcome.n_points:,} points after {last.number} "
        f"iterations; page servers received {human_bytes(outcome.received)} for them.{checked}\n",
        soft_wrap=True,
    )
    table = Table(
        title="Iterations", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 2, 0, 0),
    )  # fmt: skip
    for heading in ("iteration", "tasks\ns", "update\nms", "farthest\nmove"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in outcome.lines:
        table.add_row(
            str(line.number),
            f"{line.tasks_s:.3f}",
            f"{line.update_s * 1e3:.1f}",
            f"{line.moved:.2e}",
        )
    console.print(table)


def write(centroids: Float64, out: Path) -> None:
    """Parquet: a row a cluster, with columns cluster, x0, x1, ..."""
    columns: dict[str, Any] = {"cluster": np.arange(len(centroids))}
    columns |= {f"x{axis}": column for axis, column in enumerate(centroids.T)}
    pq.write_table(pa.table(columns), out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("data", metavar="[POINTS]", required=False)
@click.option("--demo", is_flag=True, help="A million points on a local cluster.")
@click.option("-k", default=10, show_default=True, type=click.IntRange(1), help="Clusters.")
@click.option(
    "--points",
    "n_points",
    type=click.IntRange(1),
    help="To generate, of --dimensions. Default: 12,500,000 (1 GB); 1,000,000 for the demo.",
)
@click.option("-d", "--dimensions", default=10, show_default=True, type=click.IntRange(1))
@click.option(
    "--means",
    "n_true",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Gaussian clusters that points are drawn from.",
)
@click.option("--iterations", default=10, show_default=True, type=click.IntRange(1))
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="It ends where no centroid moved by as much.",
)
@click.option(
    "--partitions", type=click.IntRange(1), help=f"Default: {PARTITIONS_PER_CPU} for each CPU."
)
@click.option("--seed", default=1, show_default=True, help="Of the points.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the generated points to this folder, as .npy, and read them from there.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Centroids, Parquet.")
@click.option(
    "--check/--no-check",
    default=None,
    help="Do it in this process too, and compare. Default: for the demo.",
)
@cluster_options
def main(
    data: str | None,
    demo: bool,
    k: int,
    n_points: int | None,
    dimensions: int,
    n_true: int,
    iterations: int,
    tolerance: float,
    partitions: int | None,
    seed: int,
    save: Path | None,
    out: Path | None,
    check: bool | None,
    cache_bytes: str | None,
    cache_policy: str | None,
    nodes: int | None,
) -> None:
    """Finds K clusters of POINTS, .npy files by path or glob, or of points that it generates.

    Prints for each iteration how long it took, and how far the centroids moved.

    Exit status: 0; 1 where the centroids are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    console = Console(highlight=False)
    stages = Stages(console)
    check = demo if check is None else check
    if data and (demo or save or n_points):
        raise click.UsageError("--demo, --points and --save are of generated points: give no file")
    if data and check and "://" in data:
        raise click.UsageError("--check reads the points in this process: give it local files")
    try:
        with attached(
            nodes or (3 if demo else None),
            stages,
            cache_bytes=cache_bytes,
            cache_policy=cache_policy,
        ):
            mixture, files = None, []
            if not data:
                n_cpus = sum(n_cpus for _, n_cpus in nodes_with_cpus())
                mixture = Mixture(
                    n_points or (1_000_000 if demo else 12_500_000),
                    partitions or PARTITIONS_PER_CPU * n_cpus,
                    *(dimensions, n_true, seed),
                )
                if save:
                    with stages.stage("save", f"writing points to {save}"):
                        files = [str(path) for path in clusters.save(mixture, save)]
                    mixture = None
            job = Job(mixture, data or files, k, iterations, tolerance, partitions, check)
            outcome = run(job, stages)
    except WrongCentroids as error:
        console.print(f"[red]WRONG CENTROIDS:[/red] {error}", soft_wrap=True)
        sys.exit(1)
    except (InputError, clamor.errors.SourceError) as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(2)
    except clamor.errors.ClamorError as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(3)
    print_outcome(console, outcome)
    if out is not None:
        write(outcome.lines[-1].centroids, out)
        console.print(f"\ncentroids  {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
