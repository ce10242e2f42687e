"""Logistic regression over rows that stay in the cluster's memory (Sparker 5.3; MLlib).

    python -m clamor_ray.workloads.lr --demo --picture loss.png
    python -m clamor_ray.workloads.lr 's3://bucket/kdd-*.svm' --penalty 1e-6 --out weights.parquet

Rows are read from libsvm files, or generated, once, and cached. The weights are a global variable,
which the driver changes in place before each aggregate, so that each reads a version of its own. A
task per partition goes over its rows once, and makes an array as long as the weights: the gradient.
These are added up in segments by all nodes (`--aggregate split`), or in a tree.

With --recipes the steps along the gradient are a program (`recipes/lr.py`): the same rows, and no
driver between two iterations.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import click

from .cli import options, running
from .cli.linear_job import LinearJob, linear_program, run
from .models import linear
from .recipes.lr import Descent, LRDatasets, describe_lr

__all__ = ["main", "make_job", "run"]

Solver = Literal["lbfgs", "gd"]


def make_job(
    solver: Solver = "lbfgs",
    iterations: int = 20,
    tolerance: float = 1e-6,
    step: float = 1.0,
    memory: int = 10,
    recipes: bool = False,
    penalty: float = 0.0,
    intercept: bool = True,
    **others: object,
) -> LinearJob:
    """A job of logistic loss.

    Args:
        solver: L-BFGS, as MLlib's LogisticRegression; or steps along the gradient, as its
            LogisticRegressionWithSGD with all rows in each batch.
        tolerance, step, memory: of the walk in `linear`.
        recipes: as a program, without the driver; by steps along the gradient alone.
        penalty, intercept: see `linear.penalized`.
        others: other fields of the job.
    """
    if solver == "lbfgs":
        walk = functools.partial(
            linear.lbfgs, iterations=iterations, tolerance=tolerance, memory=memory
        )
    else:
        walk = functools.partial(
            linear.descend, iterations=iterations, tolerance=tolerance, step=step
        )

    def describe(p: Any, rows: Any, n_features: int, positive: float) -> LRDatasets:
        how = Descent(positive, iterations, tolerance, step, penalty, intercept)
        return describe_lr(p, rows, n_features, how)

    return LinearJob(
        walk,
        "logistic",
        iterations,
        penalty=penalty,
        intercept=intercept,
        describe=describe if recipes else None,
        **others,  # type: ignore[arg-type]
    )


def is_given(option: str) -> bool:
    """Whether it is on the command line."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not click.core.ParameterSource.DEFAULT


@linear_program
@click.option(
    "--solver",
    type=click.Choice(["lbfgs", "gd"]),
    help="Limited-memory BFGS, or plain steps along the gradient. Default: lbfgs; gd with "
    "--recipes, which has no other.",
)
@options.number("--iterations", 20)
@options.real(
    "--tolerance",
    1e-6,
    "lbfgs ends with an iteration that gains less than this share of the loss; gd with a "
    "step shorter than this share of the weights' length.",
)
@options.real(
    "--step",
    1.0,
    "Of gd, in its first iteration; it falls with the root of their number.",
    above=True,
)
@options.number(
    "--memory",
    10,
    "Of lbfgs: pairs of arrays as long as the weights, in the driver's memory.",
)
@options.penalty(0.0)
@running.recipes_options
def main(solver: Solver | None, recipes: bool, **of_job: Any) -> LinearJob:
    """Learns which of two labels ROWS have: libsvm files by path or pattern, or rows it generates.

    Of the two labels the larger one is the one whose chance the model gives.

    Exit status: 0; 1 where the weights are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    running.check_options(of_job["progress_picture"], recipes)
    if recipes and solver == "lbfgs":
        raise click.UsageError(
            "--recipes goes by --solver gd: lbfgs asks for losses as often as it needs them"
        )
    if recipes and is_given("how"):
        raise click.UsageError(
            "--aggregate is how tasks of collections are added up: with --recipes one task does it"
        )
    return make_job("gd" if recipes else solver or "lbfgs", recipes=recipes, **of_job)


if __name__ == "__main__":
    main()
