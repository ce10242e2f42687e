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
from typing import Any

from .cli import options
from .cli.linear_job import LinearJob, linear_program, run
from .models import linear

__all__ = ["main", "make_job", "run"]


def make_job(
    iterations: int = 100,
    tolerance: float = 1e-3,
    step: float = 1.0,
    penalty: float = 0.01,
    **others: object,
) -> LinearJob:
    """A job of hinge loss.

    Args:
        tolerance, step: of `linear.descend`.
        penalty: 1 / (n C) of other people's C, for n rows.
        others: other fields of the job.
    """
    walk = functools.partial(linear.descend, iterations=iterations, tolerance=tolerance, step=step)
    return LinearJob(walk, "hinge", iterations, penalty=penalty, **others)  # type: ignore[arg-type]


@linear_program
@options.number("--iterations", 100)
@options.real(
    "--tolerance",
    1e-3,
    "It ends with a step shorter than this share of the weights' length.",
)
@options.real(
    "--step", 1.0, "In the first iteration; it falls with the root of their number.", above=True
)
@options.penalty(0.01)
def main(**of_job: Any) -> LinearJob:
    """Separates ROWS with two labels: libsvm files by path or pattern, or rows it generates.

    Exit status: 0; 1 where the weights are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    return make_job(**of_job)


if __name__ == "__main__":
    main()
