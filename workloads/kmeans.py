"""k-means over points that stay in the cluster's memory (Clamor 7.2, fig. 10; Lloyd 1982).

    python -m clamor_ray.workloads.kmeans --demo
    python -m clamor_ray.workloads.kmeans 'points-*.npy' -k 10 --out centroids.parquet

The points are a collection, generated or read once and then cached. The centroids are a global
variable, which the driver changes in place between iterations, so that each iteration reads a
version of its own. In an iteration a task per partition goes over its points once and returns the
sums by nearest centroid; what travels are k rows of numbers a partition.

With --recipes the iterations are a program of stages (`recipes/kmeans.py`): the same points and
sums, and no driver between two iterations.
"""

from __future__ import annotations

import dataclasses
import glob
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import clamor_ray as clamor

from .cli import observe, options, running
from .cli.program import CommandRun, program, refuse_both
from .cli.report import human_bytes
from .cli.results import agreement, print_rows
from .cli.stages import Stages
from .cli.waiting import default_partitions, start_workers
from .data import clusters
from .data.clusters import Float64, Mixture
from .data.errors import InputError
from .recipes.kmeans import describe_kmeans


@dataclasses.dataclass(frozen=True)
class KMeansJob:
    """What the command line asked for.

    Args:
        mixture: what to generate; None where points are read.
        data: path or glob of .npy files, or several; each an array of shape (points, dimensions).
        k: clusters to find.
        iterations: at the most.
        tolerance: the farthest that a centroid moves, below which it ends.
        n_partitions: of files; None for `default_partitions()`.
        check: whether to do it in this process as well.
        recipes: as a program, without the driver.
        progress_picture: of that program, to write.
    """

    mixture: Mixture | None
    data: str | list[str] | None = None
    k: int = 10
    iterations: int = 10
    tolerance: float = 0.0
    n_partitions: int | None = None
    check: bool = False
    recipes: bool = False
    progress_picture: Path | None = None


@dataclasses.dataclass(frozen=True)
class LloydIteration:
    """One line of the result.

    Args:
        number: from 1.
        tasks_s: from the start of the tasks to the sums of all.
        update_s: of the commit after them; of a program, of the task that makes new centroids.
        moved: the farthest that a centroid did.
        centroids: after it, shape (k, d); of a program, after the last one.
    """

    number: int
    tasks_s: float
    update_s: float
    moved: float
    centroids: Float64


@dataclasses.dataclass(frozen=True)
class KMeansOutcome:
    """Of a run.

    Args:
        n_points: that there are.
        lines: one an iteration.
        received: bytes between page servers, in all iterations.
        error: largest difference from the check; None where there was none.
        progress: of a program; None where there was none.
    """

    n_points: int
    lines: list[LloydIteration]
    received: int
    error: float | None
    progress: Any = None


def load(job: KMeansJob) -> Any:
    """The points as a collection; nothing runs yet."""
    if job.mixture is None:
        return clamor.read_npy(job.data, partitions=job.n_partitions or default_partitions())
    n = job.mixture.n_partitions
    numbers = clamor.from_numpy(np.arange(n), partitions=n)
    return numbers.map_batches(clusters.generate, job.mixture)


def iterate(
    points: Any,
    variable: clamor.GlobalRef[Float64],
    iterations: int,
    tolerance: float = 0.0,
) -> Iterator[LloydIteration]:
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
        yield LloydIteration(number, summed - start, time.perf_counter() - summed, moved, new)
        if moved < tolerance:
            return


def run(job: KMeansJob, stages: Stages) -> KMeansOutcome:
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
    before = observe.cost()
    text = f"up to {job.iterations} iterations over {n_points:,} points"
    go = run_program if job.recipes else run_collection
    lines, progress = go(job, points, first, stages, text)
    received = (observe.cost() - before).bytes_received
    error = None
    if job.check:
        with stages.stage("check", "checking against the same in this process"):
            expected = clusters.reference(parts(job), first, len(lines))
            error = clusters.check(lines[-1].centroids, expected)
    return KMeansOutcome(n_points, lines, received, error, progress)


def run_collection(
    job: KMeansJob, points: Any, first: Float64, stages: Stages, text: str
) -> tuple[list[LloydIteration], None]:
    """A stage of a collection for each iteration."""
    variable = clamor.put(first)
    lines: list[LloydIteration] = []
    try:
        with stages.stage("iterate", text, job.iterations) as done:
            for line in iterate(points, variable, job.iterations, job.tolerance):
                lines.append(line)
                done(line.number)
    finally:
        clamor.free(variable)
    return lines, None


def run_program(
    job: KMeansJob, points: Any, first: Float64, stages: Stages, text: str
) -> tuple[list[LloydIteration], Any]:
    """All iterations as one program; and its progress at the end."""
    p = clamor.Program()
    of = describe_kmeans(p, points, first, job.iterations, job.tolerance)
    with running.ended(p, stages, text, job.iterations, job.progress_picture) as (ran, progress):
        centroids = ran.result(of.centroids)
        lines = [
            LloydIteration(number, line.tasks_s, line.update_s, line.moved, centroids)
            for number, line in enumerate(ran.result(of.lines), 1)
        ]
        return lines, progress


def first_centroids(job: KMeansJob, points: Any) -> Float64:
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


def parts(job: KMeansJob) -> list[Float64]:
    """The points in this process, for the check."""
    if job.mixture is not None:
        return [job.mixture.partition(i) for i in range(job.mixture.n_partitions)]
    given = [job.data] if isinstance(job.data, str) else job.data or []
    paths = [path for each in given for path in sorted(glob.glob(each, recursive=True))]
    return [np.load(path) for path in paths]


def print_outcome(asked: CommandRun, outcome: KMeansOutcome) -> None:
    """What a run found, and what it took."""
    last = outcome.lines[-1]
    asked.say(
        f"\n{len(last.centroids)} clusters of {outcome.n_points:,} points after {last.number} "
        f"iterations; page servers received {human_bytes(outcome.received)} for them."
        f"{agreement('centroids', outcome.error)}\n"
    )
    rows = (
        (
            str(line.number),
            f"{line.tasks_s:.3f}",
            f"{line.update_s * 1e3:.1f}",
            f"{line.moved:.2e}",
        )
        for line in outcome.lines
    )
    headings = ("iteration", "tasks\ns", "update\nms", "farthest\nmove")
    print_rows(asked.console, headings, rows, title="Iterations")
    running.print_progress(asked, outcome.progress)


def write(centroids: Float64, out: Path) -> None:
    """Parquet: a row a cluster, with columns cluster, x0, x1, ..."""
    columns: dict[str, Any] = {"cluster": np.arange(len(centroids))}
    columns |= {f"x{axis}": column for axis, column in enumerate(centroids.T)}
    pq.write_table(pa.table(columns), out)


@program("A million points on a local cluster.")
@click.argument("data", metavar="[POINTS]", required=False)
@options.number("-k", 10, "Clusters.")
@options.count(
    "--points",
    "n_points",
    "To generate, of --dimensions. Default: 12,500,000 (1 GB); 1,000,000 for the demo.",
)
@click.option("-d", "--dimensions", default=10, show_default=True, type=click.IntRange(1))
@options.number("--means", 100, "Gaussian clusters that points are drawn from.")
@options.number("--iterations", 10)
@options.real("--tolerance", 0.0, "It ends where no centroid moved by as much.")
@options.partitions()
@options.seed("Of the points.")
@options.new_folder(
    "--save", "Write the generated points to this folder, as .npy, and read them from there."
)
@options.new_file("--out", "Centroids, Parquet.")
@options.check()
@running.recipes_options
def main(
    asked: CommandRun,
    data: str | None,
    k: int,
    n_points: int | None,
    dimensions: int,
    means: int,
    iterations: int,
    tolerance: float,
    n_partitions: int | None,
    seed: int,
    save: Path | None,
    out: Path | None,
    check: bool,
    recipes: bool,
    progress_picture: Path | None,
) -> None:
    """Finds K clusters of POINTS, .npy files by path or glob, or of points that it generates.

    Prints for each iteration how long it took, and how far the centroids moved.

    Exit status: 0; 1 where the centroids are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    refuse_both(data, {"--demo": asked.demo, "--points": n_points, "--save": save}, "points")
    running.check_options(progress_picture, recipes)
    if data and check and "://" in data:
        raise click.UsageError("--check reads the points in this process: give it local files")
    with asked.attached():
        mixture, files = None, []
        if not data:
            mixture = Mixture(
                n_points or (1_000_000 if asked.demo else 12_500_000),
                n_partitions or default_partitions(),
                *(dimensions, means, seed),
            )
            if save:
                with asked.stages.stage("save", f"writing points to {save}"):
                    files = [str(path) for path in clusters.save(mixture, save)]
                mixture = None
        job = KMeansJob(
            *(mixture, data or files, k, iterations, tolerance, n_partitions, check),
            recipes=recipes,
            progress_picture=progress_picture,
        )
        outcome = run(job, asked.stages)
    print_outcome(asked, outcome)
    if out is not None:
        write(outcome.lines[-1].centroids, out)
    asked.wrote(centroids=out, progress=progress_picture)


if __name__ == "__main__":
    main()
