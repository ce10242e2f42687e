"""Logistic regression over rows that stay in the cluster's memory (Sparker 5.3; MLlib).

    python -m clamor_ray.workloads.lr --demo --picture loss.png
    python -m clamor_ray.workloads.lr 's3://bucket/kdd-*.svm' --penalty 1e-6 --out weights.parquet

Rows are read from libsvm files, or generated, once, and cached. The weights are a global variable,
which the driver changes in place before each aggregate, so that each reads a version of its own. A
task per partition goes over its rows once, and makes an array as long as the weights: the gradient.
These are added up in segments by all nodes (`--aggregate split`), or in a tree.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import click

from .cli import options
from .cli.linear_job import LinearJob, linear_program, run
from .models import linear

__all__ = ["main", "make_job", "run"]


def make_job(
    solver: Literal["lbfgs", "gd"] = "lbfgs",
    iterations: int = 20,
    tolerance: float = 1e-6,
    step: float = 1.0,
    memory: int = 10,
    **others: object,
) -> LinearJob:
    """A job of logistic loss.

    Args:
        solver: L-BFGS, as MLlib's LogisticRegression; or steps along the gradient, as its
            LogisticRegressionWithSGD with all rows in each batch.
        tolerance, step, memory: of the walk in `linear`.
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
    return LinearJob(walk, "logistic", iterations, **others)  # type: ignore[arg-type]


@linear_program
@click.option(
    "--solver",
    type=click.Choice(["lbfgs", "gd"]),
    default="lbfgs",
    show_default=True,
    help="Limited-memory BFGS, or plain steps along the gradient.",
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
def main(**of_job: Any) -> LinearJob:
    """Learns which of two labels ROWS have: libsvm files by path or pattern, or rows it generates.

    Of the two labels the larger one is the one whose chance the model gives.

    Exit status: 0; 1 where the weights are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    return make_job(**of_job)


if __name__ == "__main__":
    main()
