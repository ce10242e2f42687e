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
from pathlib import Path
from typing import Literal

import click

from .cli.linear_job import Job, carry_out, linear_options, run
from .models import linear
from .models.linear import Sample

__all__ = ["main", "make_job", "run"]


def make_job(
    solver: Literal["lbfgs", "gd"] = "lbfgs",
    iterations: int = 20,
    tolerance: float = 1e-6,
    step: float = 1.0,
    memory: int = 10,
    **options: object,
) -> Job:
    """A job of logistic loss.

    Args:
        solver: L-BFGS, as MLlib's LogisticRegression; or steps along the gradient, as its
            LogisticRegressionWithSGD with all rows in each batch.
        tolerance, step, memory: of the walk in `linear`.
        options: other fields of the job.
    """
    if solver == "lbfgs":
        walk = functools.partial(
            linear.lbfgs, iterations=iterations, tolerance=tolerance, memory=memory
        )
    else:
        walk = functools.partial(
            linear.descend, iterations=iterations, tolerance=tolerance, step=step
        )
    return Job(walk, "logistic", iterations, **options)  # type: ignore[arg-type]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@linear_options
@click.option(
    "--solver",
    type=click.Choice(["lbfgs", "gd"]),
    default="lbfgs",
    show_default=True,
    help="Limited-memory BFGS, or plain steps along the gradient.",
)
@click.option("--iterations", default=20, show_default=True, type=click.IntRange(1))
@click.option(
    "--tolerance",
    default=1e-6,
    show_default=True,
    type=click.FloatRange(0),
    help="lbfgs ends with an iteration that gains less than this share of the loss; gd with a "
    "step shorter than this share of the weights' length.",
)
@click.option(
    "--step",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Of gd, in its first iteration; it falls with the root of their number.",
)
@click.option(
    "--memory",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Of lbfgs: pairs of arrays as long as the weights, in the driver's memory.",
)
@click.option(
    "--penalty",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Half of it times the squared length of the weights is added to the mean loss.",
)
def main(
    data: str | None,
    demo: bool,
    n_rows: int | None,
    n_features: int | None,
    zero_based: bool,
    intercept: bool,
    out: Path | None,
    aggregate: Literal["split", "tree"],
    partitions: int | None,
    seed: int,
    picture: Path | None,
    check: bool | None,
    cache_bytes: str | None,
    cache_policy: str | None,
    nodes: int | None,
    solver: Literal["lbfgs", "gd"],
    iterations: int,
    tolerance: float,
    step: float,
    memory: int,
    penalty: float,
) -> None:
    """Learns which of two labels ROWS have: libsvm files by path or pattern, or rows it generates.

    Of the two labels the larger one is the one whose chance the model gives.

    Exit status: 0; 1 where the weights are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """

    def make(sample: Sample | None, check: bool) -> Job:
        return make_job(
            *(solver, iterations, tolerance, step, memory),
            sample=sample,
            data=data,
            n_features=n_features,
            zero_based=zero_based,
            penalty=penalty,
            intercept=intercept,
            n_partitions=partitions,
            how=aggregate,
            check=check,
        )

    carry_out(
        make, data=data, demo=demo, n_rows=n_rows, n_features=n_features, seed=seed,
        partitions=partitions, picture=picture, out=out, check=check, nodes=nodes,
        cache_bytes=cache_bytes, cache_policy=cache_policy,
    )  # fmt: skip


if __name__ == "__main__":
    main()
