"""Logistic regression as a program of stages: steps along the gradient, without the driver.

It is what `python -m clamor_ray.workloads.lr --solver gd` does. Its L-BFGS is not here: a line
search evaluates as often as it needs to, between the updates of a state that only the driver has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..data.rows import Float64, LabelledRows
from ..models import linear
from ..models.linear import Step
from .kmeans import add_up
from .rounds import Round, begin_round, end_round

__all__ = ["Descent", "LRDatasets", "describe_lr"]


@dataclasses.dataclass(frozen=True)
class Descent:
    """How to go down.

    Args:
        positive: the label of rows that should have a positive margin.
        iterations: at the most.
        tolerance, step: see `linear.descend`.
        penalty, intercept: see `linear.penalized`.
    """

    positive: float
    iterations: int = 20
    tolerance: float = 1e-6
    step: float = 1.0
    penalty: float = 0.0
    intercept: bool = True


class LRDatasets(NamedTuple):
    """Datasets of the program.

    Args:
        rows: `LabelledRows`, one or some a partition.
        weights: a value: where the next step begins, the intercept last.
        last: a value: the last `Step`.
        best: a value: the `Step` with the least loss.
        lines: a value: a `Round` each.
    """

    rows: Any
    weights: Any
    last: Any
    best: Any
    lines: Any


def describe_lr(p: Any, rows: Any, n_features: int, how: Descent) -> LRDatasets:
    """Steps along the gradient, from weights that are 0.

    Args:
        p: the program that is being described.
        rows: partitions, each one `LabelledRows`, or a sequence of them.
        n_features: the model has one weight more.
        how: to go down.
    """
    parts = p.dataset(rows, name="rows")
    weights = p.value(np.zeros(n_features + 1), name="weights")
    last, best = p.value(None, name="last step"), p.value(None, name="best step")
    lines = p.value([], name="lines")
    with p.loop(max=how.iterations) as loop:
        p.stage(send_weights, reads=[weights], writes=[lines])
        p.stage(functools.partial(losses_and_gradient, how.positive), reads=[parts])
        p.stage(functools.partial(go_down, how), writes=[weights, last, best, lines])
        loop.until(functools.partial(is_short, how.tolerance), reads=[last, weights])
    return LRDatasets(parts, weights, last, best, lines)


def send_weights(t: Any, weights: Float64, lines: list[Round]) -> None:
    """To all partitions of rows."""
    begin_round(lines)
    t.broadcast(weights)


def losses_and_gradient(
    positive: float, t: Any, part: LabelledRows | Sequence[LabelledRows]
) -> None:
    """Of the rows of a partition."""
    (weights,) = t.recv()
    total = np.zeros(len(weights) + linear.TAIL)
    for rows in [part] if isinstance(part, LabelledRows) else part:
        linear.accumulate(total, rows, weights, "logistic", positive)
    t.send(0, total)


def go_down(
    how: Descent,
    t: Any,
    weights: Float64,
    last: Step | None,
    best: Step | None,
    lines: list[Round],
) -> tuple[Float64, Step, Step, list[Round]]:
    """One step of `linear.descend`."""
    summed_s = time.time()
    total = add_up(t.recv())
    right = float(total[-2] / total[-1])
    value, gradient = linear.penalized(total, weights, how.penalty, how.intercept)
    number = 1 if last is None else last.number + 1
    change = -how.step / math.sqrt(number) * gradient
    here = Step(number, weights, value, float(np.linalg.norm(change)))
    if best is None or value < best.value:
        best = here
    return weights + change, here, best, end_round(lines, summed_s, here.moved, value, right)


def is_short(tolerance: float, t: Any, last: Step, weights: Float64) -> bool:
    """Whether the last step was shorter than that share of the weights' length."""
    return last.moved < tolerance * max(1.0, float(np.linalg.norm(weights)))
