"""A linear model over rows of a collection: what `lr` and `svm` do alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import clamor_ray as clamor

from ..data.errors import InputError
from ..data.libsvm import read_libsvm
from ..data.rows import Float64
from ..models import linear
from ..models.linear import Evaluate, Facts, Sample, Step
from ..recipes.lr import LRDatasets
from . import options
from .learning import (
    How,
    Iteration,
    Model,
    Received,
    learning_options,
    print_iterations,
    spread,
)
from .learning_tasks import Gradient
from .program import CommandRun, program, refuse_both
from .report import human_bytes
from .results import agreement, draw_curve
from .running import ended, print_progress
from .stages import Stages
from .waiting import default_partitions, start_workers

# (what gives losses and gradients, first weights) -> iterations
Walk = Callable[[Evaluate, Float64], Iterator[Step]]
# (program, rows, number of features, positive label) -> datasets with the answer
Describe = Callable[[Any, Any, int, float], LRDatasets]


@dataclasses.dataclass(frozen=True)
class LinearJob:
    """What the command line asked for.

    Args:
        walk: how weights get better.
        loss: of linear.LOSSES.
        iterations: at the most.
        sample: what to draw; None where rows are read.
        data: libsvm files.
        n_features: None: as many as there are.
        zero_based: indices of the files begin at 0.
        penalty: see `linear.penalized`.
        intercept: whether there is one.
        n_partitions: of files.
        how: sums are made.
        check: whether to do it in this process as well.
        describe: the same walk as a program of stages, without the driver; None: by the driver.
        progress_picture: of that program, to write.
    """

    walk: Walk
    loss: str
    iterations: int
    sample: Sample | None = None
    data: str | Sequence[str] | None = None
    n_features: int | None = None
    zero_based: bool = False
    penalty: float = 0.0
    intercept: bool = True
    n_partitions: int | None = None
    how: How = "split"
    check: bool = False
    describe: Describe | None = None
    progress_picture: Path | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LinearOutcome:
    """Of a run.

    Args:
        weights: of the iteration with the least loss; the intercept last.
        facts: of the rows.
        accuracy: share of the rows that have the right sign there.
        lines: one an iteration.
        received: bytes between page servers, in all iterations, of nodes that are there after them.
        error: largest relative difference from the check; None where there was none.
        progress: of a program; None where there was none.
    """

    weights: Float64
    facts: Facts
    accuracy: float
    lines: list[Iteration]
    received: int
    error: float | None
    progress: Any = None


class Learned(NamedTuple):
    """What iterations have found.

    Args:
        best: with the least loss.
        accuracy: there.
        lines: one an iteration.
        progress: of a program; None where there was none.
    """

    best: Step
    accuracy: float
    lines: list[Iteration]
    progress: Any = None


class Evaluator:
    """The mean loss and its gradient at some weights, by tasks over all rows.

    Args:
        rows: items are `LabelledRows`.
        facts: of them.
        job: loss, penalty, intercept, how.
        n_features: the model has one weight more.
    """

    def __init__(self, rows: Any, facts: Facts, job: LinearJob, n_features: int) -> None:
        self.rows, self.job = rows, job
        self.model = Model(n_features + 1)
        self.positive = facts.labels[-1]
        self.accuracy: dict[float, float] = {}  # by loss

    def __call__(self, weights: Float64) -> tuple[float, Float64]:
        self.model.set(weights)
        seq_op = Gradient(self.model.variable, self.job.loss, self.positive)
        total = self.model.add_up(self.rows, seq_op, self.job.how)
        right = float(total[-2] / total[-1])
        value, gradient = linear.penalized(total, weights, self.job.penalty, self.job.intercept)
        self.accuracy[value] = right
        return value, gradient


def load(job: LinearJob) -> Any:
    """The rows as a collection; nothing runs yet, but where a file is compressed."""
    if job.sample is not None:
        n = job.sample.n_partitions
        numbers = clamor.from_numpy(np.arange(n), partitions=n)
        return numbers.map_batches(linear.generate, job.sample)
    wanted = job.n_partitions or default_partitions()
    rows = read_libsvm(
        job.data, zero_based=job.zero_based, n_features=job.n_features, partitions=wanted
    )
    return spread(rows, wanted)


def look(rows: Any, job: LinearJob) -> tuple[Facts, int]:
    """What the rows are, and how many features the model has.

    Raises:
        InputError: They cannot be learned from.
    """
    facts = rows.aggregate(Facts(), Facts.and_of, Facts.and_these)
    if not facts.n_rows:
        raise InputError(f"{job.data} has no rows")
    if len(facts.labels) != 2:
        labels = ", ".join(f"{label:g}" for label in facts.labels)
        more = " and more" if len(facts.labels) > 2 else ""
        raise InputError(f"two labels are needed; there are {labels}{more}")
    n_features = job.n_features or (job.sample.n_features if job.sample else facts.width)
    if facts.width > n_features:
        raise InputError(f"there are {facts.width:,} features, not {n_features:,}")
    return facts, n_features


def run(
    job: LinearJob, stages: Stages, after: Callable[[int], None] = lambda number: None
) -> LinearOutcome:
    """Loads, learns and checks, on the cluster that this process is attached to.

    Args:
        after: is told of each iteration.

    Raises:
        InputError: There are no rows, or not two labels.
        WrongWeights: The weights are not those that one process finds.
    """
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    text = "reading rows" if job.sample is None else "generating rows where they stay"
    with stages.stage("load", text):
        rows = load(job).cache()
        facts, n_features = look(rows, job)
    text = f"up to {job.iterations} iterations over {facts.n_rows:,} rows"
    arrived = Received()
    if job.describe is None:
        found = by_driver(rows, facts, n_features, job, stages, text, after)
    else:
        found = by_program(rows, facts, n_features, job, stages, text)
    received = arrived.bytes()
    error = None
    if job.check:
        with stages.stage("check", "checking against the same in this process"):
            plain = linear.plain_evaluate(
                rows.collect(), n_features, job.loss, facts.labels[-1], job.penalty, job.intercept
            )
            expected = list(job.walk(plain, np.zeros(n_features + 1)))
            best = min(expected, key=lambda step: step.value)
            error = linear.check(found.best.weights, best.weights)
    return LinearOutcome(
        found.best.weights, facts, found.accuracy, found.lines, received, error, found.progress
    )


def by_driver(
    rows: Any,
    facts: Facts,
    n_features: int,
    job: LinearJob,
    stages: Stages,
    text: str,
    after: Callable[[int], None],
) -> Learned:
    """An aggregate of the collection for each loss and gradient."""
    evaluator = Evaluator(rows, facts, job, n_features)
    lines: list[Iteration] = []
    best: Step | None = None
    try:
        with stages.stage("iterate", text, job.iterations) as done:
            for step in job.walk(evaluator, np.zeros(n_features + 1)):
                lines.append(evaluator.model.line(step.number, step.value, step.moved))
                if best is None or step.value < best.value:
                    best = step
                done(step.number)
                after(step.number)
    finally:
        evaluator.model.free()
    if best is None:
        raise InputError(
            "the first weights, all zero, have the least loss: no feature says anything"
        )
    return Learned(best, evaluator.accuracy[best.value], lines)


def by_program(
    rows: Any, facts: Facts, n_features: int, job: LinearJob, stages: Stages, text: str
) -> Learned:
    """All iterations as one program over the cached partitions."""
    assert job.describe is not None
    p = clamor.Program()
    of = job.describe(p, rows, n_features, facts.labels[-1])
    with ended(p, stages, text, job.iterations, job.progress_picture) as (ran, progress):
        best, rounds = ran.result(of.best), ran.result(of.lines)
    lines = [
        Iteration(number, 1, each.tasks_s, each.update_s, each.loss, each.moved)
        for number, each in enumerate(rounds, 1)
    ]
    return Learned(best, rounds[best.number - 1].right, lines, progress)


# ---------------------------------------------------------------- for people


def print_outcome(console: Console, job: LinearJob, outcome: LinearOutcome) -> None:
    """What a run found, and what it took."""
    last = outcome.lines[-1]
    ended = "ended" if last.number < job.iterations else "stopped"
    checked = agreement("weights", outcome.error)
    console.print(
        f"\n{ended} after {last.number} iterations over {outcome.facts.n_rows:,} rows with "
        f"{len(outcome.weights) - 1:,} features; least loss "
        f"{min(line.loss for line in outcome.lines):.6f}, {outcome.accuracy:.2%} of the rows on "
        f"the right side; page servers received {human_bytes(outcome.received)}.{checked}\n",
        soft_wrap=True,
    )
    print_iterations(console, outcome.lines, job.loss + "\nloss")


def write(weights: Float64, out: Path) -> None:
    """Parquet: feature (from 0; -1 is the intercept), weight; without those that are 0."""
    features = np.flatnonzero(weights)
    values = weights[features]
    features[features == len(weights) - 1] = -1
    pq.write_table(pa.table({"feature": features, "weight": values}), out)


linear_options = options.together(
    click.argument("data", metavar="[ROWS]", required=False),
    options.count(
        "--rows", "n_rows", "To generate. Default: 1,000,000; 50,000 for the demo.", least=2
    ),
    click.option(
        "--features",
        "n_features",
        type=click.IntRange(1, (1 << 31) - 1),
        help="Default: as many as the files have; 1,000,000 to generate, 20,000 for the demo.",
    ),
    click.option("--zero-based", is_flag=True, help="Indices of the files begin at 0."),
    click.option(
        "--intercept/--no-intercept", default=True, show_default=True, help="Without a penalty."
    ),
    options.new_file("--out", "Weights, Parquet."),
    learning_options,
)


def linear_program(make: Callable[..., LinearJob]) -> click.Command:
    """A command that learns a linear model.

    Args:
        make: a job of the options; has those that are this model's own, and its help.
    """

    @functools.wraps(make)
    def body(
        asked: CommandRun,
        data: str | None,
        n_rows: int | None,
        seed: int,
        picture: Path | None,
        out: Path | None,
        **of_job: Any,
    ) -> None:
        refuse_both(data, {"--demo": asked.demo, "--rows": n_rows}, "rows")
        job = make(data=data, **of_job)
        with asked.attached():
            if not data:
                sample = Sample(
                    n_rows or (50_000 if asked.demo else 1_000_000),
                    job.n_features or (20_000 if asked.demo else 1_000_000),
                    job.n_partitions or default_partitions(),
                    seed=seed,
                )
                job = dataclasses.replace(job, sample=sample)
            outcome = run(job, asked.stages)
        print_outcome(asked.console, job, outcome)
        print_progress(asked, outcome.progress)
        if picture is not None:
            title = f"{outcome.facts.n_rows:,} rows, {len(outcome.weights) - 1:,} features"
            draw_curve(outcome.lines, title, f"{job.loss} loss", picture)
        if out is not None:
            write(outcome.weights, out)
        asked.wrote(picture=picture, weights=out, progress=job.progress_picture)

    return program("50,000 rows on a local cluster.")(linear_options(body))
