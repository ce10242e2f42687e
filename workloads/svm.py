"""A linear support vector machine over rows that stay in the cluster (Sparker 5.3; MLlib).

    python -m clamor_ray.workloads.svm --demo --picture loss.png
    python -m clamor_ray.workloads.svm 's3://bucket/kdd-*.svm' --out weights.parquet

Hinge loss with a penalty on the squared weights, by steps along a subgradient over all rows, as
MLlib's SVMWithSGD with `miniBatchFraction` 1: step / sqrt(t) in iteration t. A subgradient's step
may raise the loss; the weights that come out are those with the least. Rows, weights and sums are
handled as in `clamor_ray.workloads.lr`.
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
    iterations: int = 100,
    tolerance: float = 1e-3,
    step: float = 1.0,
    penalty: float = 0.01,
    **options: object,
) -> Job:
    """A job of hinge loss.

    Args:
        tolerance, step: of `linear.descend`.
        penalty: 1 / (n C) of other people's C, for n rows.
        options: other fields of the job.
    """
    walk = functools.partial(linear.descend, iterations=iterations, tolerance=tolerance, step=step)
    return Job(walk, "hinge", iterations, penalty=penalty, **options)  # type: ignore[arg-type]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@linear_options
@click.option("--iterations", default=100, show_default=True, type=click.IntRange(1))
@click.option(
    "--tolerance",
    default=1e-3,
    show_default=True,
    type=click.FloatRange(0),
    help="It ends with a step shorter than this share of the weights' length.",
)
@click.option(
    "--step",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="In the first iteration; it falls with the root of their number.",
)
@click.option(
    "--penalty",
    default=0.01,
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
    iterations: int,
    tolerance: float,
    step: float,
    penalty: float,
) -> None:
    """Separates ROWS with two labels: libsvm files by path or pattern, or rows it generates.

    Exit status: 0; 1 where the weights are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """

    def make(sample: Sample | None, check: bool) -> Job:
        return make_job(
            *(iterations, tolerance, step, penalty),
            sample=sample,
            data=data,
            n_features=n_features,
            zero_based=zero_based,
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
