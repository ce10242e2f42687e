"""Linear models over sparse rows: losses, gradients, and who walks down them. No Ray here.

Weights are one array: a number for each feature, and the intercept last. What the rows of a
partition add up to is one array as well: the gradient of the summed losses, in the same order, and
behind it the sum of the losses, how many rows have the right sign, and how many there are. So
arrays of any partitions are added up element by element, in any pieces.

Two walks. `lbfgs`: limited-memory BFGS (Liu, Nocedal 1989) with a line search for the weak Wolfe
conditions by bisection, for losses that are smooth. `descend`: steps of step / sqrt(t) along the
(sub)gradient, as MLlib's GradientDescent with minibatches of everything; it does not fall in each
iteration, so whoever calls it keeps the best.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..data.errors import WrongWeights
from ..data.rows import Float64, LabelledRows

__all__ = [
    "LOSSES",
    "TAIL",
    "Facts",
    "Sample",
    "Step",
    "accumulate",
    "check",
    "descend",
    "generate",
    "lbfgs",
    "penalized",
    "plain_evaluate",
]

TAIL: Final = 3  # behind the gradient: losses, rows of the right sign, rows
MOST_EVALUATIONS: Final = 30  # of a line search
_DECREASE: Final = 1e-4
_CURVATURE: Final = 0.9

Evaluate = Callable[[Float64], tuple[float, Float64]]


# ---------------------------------------------------------------- data


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows that everyone can draw, partition by partition.

    A feature's chance falls with its number, so that some are in most rows and most are in few.

    Args:
        n_rows: in all.
        n_features: columns.
        n_partitions: into which rows are cut, about evenly.
        per_row: numbers drawn a row; where two have the same column one stays.
        seed: of all that is drawn.
    """

    n_rows: int
    n_features: int
    n_partitions: int
    per_row: int = 30
    seed: int = 1

    def size_of(self, number: int) -> int:
        """Rows of a partition."""
        edges = [self.n_rows * i // self.n_partitions for i in (number, number + 1)]
        return edges[1] - edges[0]

    def weights_of(self, columns: npt.NDArray[Any]) -> Float64:
        """What labels are drawn by, of these columns: within [-2, 2)."""
        mixed = columns.astype(np.uint64) + np.uint64(self.seed)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        weights: Float64 = (mixed >> np.uint64(11)) * (4.0 / (1 << 53)) - 2.0
        return weights

    def partition(self, number: int) -> LabelledRows:
        """The rows of a partition, with labels -1 and 1.

        Example:
            >>> len(Sample(1000, 50, 3).partition(2))
            334
        """
        rng = np.random.default_rng([self.seed, number])
        shape = (self.size_of(number), self.per_row)
        drawn = np.sort((rng.random(shape) ** 3 * self.n_features).astype(np.int32), axis=1)
        stays = np.ones(shape, bool)
        stays[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
        first = np.zeros(shape[0] + 1, np.int64)
        np.cumsum(stays.sum(axis=1), out=first[1:])
        columns = drawn[stays]
        values = rng.standard_normal(len(columns))
        rows = LabelledRows(np.zeros(shape[0]), first, columns, values)
        margins = _sums_by_row(rows, values * self.weights_of(columns))
        chance = 1.0 / (1.0 + np.exp(-margins))
        return dataclasses.replace(rows, labels=np.where(rng.random(shape[0]) < chance, 1.0, -1.0))


def generate(numbers: npt.NDArray[np.int64], sample: Sample) -> npt.NDArray[Any]:
    """The rows of these partitions, an item each: what `map_batches` over their numbers calls."""
    out = np.empty(len(numbers), object)
    out[:] = [sample.partition(int(number)) for number in numbers]
    return out


class Facts(NamedTuple):
    """What some rows are, all together.

    Args:
        n_rows: how many.
        width: one past the largest column.
        labels: different ones, the least first; of many, three.
    """

    n_rows: int = 0
    width: int = 0
    labels: tuple[float, ...] = ()

    def and_of(self, rows: LabelledRows) -> Facts:
        """With those of some more rows."""
        return self.and_these(Facts(len(rows), rows.width, tuple(np.unique(rows.labels).tolist())))

    def and_these(self, other: Facts) -> Facts:
        """Of both."""
        labels = tuple(sorted({*self.labels, *other.labels})[:3])
        return Facts(self.n_rows + other.n_rows, max(self.width, other.width), labels)


# ---------------------------------------------------------------- losses


def logistic(margins: Float64, signs: Float64) -> tuple[Float64, Float64]:
    """Losses log(1 + exp(-y m)), and their slopes by m."""
    at = signs * margins
    losses: Float64 = np.logaddexp(0.0, -at)
    return losses, -signs * np.exp(-np.logaddexp(0.0, at))


def hinge(margins: Float64, signs: Float64) -> tuple[Float64, Float64]:
    """Losses max(0, 1 - y m), and a subgradient of each: 0 where it bends."""
    short = 1.0 - signs * margins
    return np.maximum(short, 0.0), np.where(short > 0.0, -signs, 0.0)


LOSSES: Final[dict[str, Callable[[Float64, Float64], tuple[Float64, Float64]]]] = {
    "logistic": logistic,
    "hinge": hinge,
}


def accumulate(
    total: Float64 | None, rows: LabelledRows, weights: Float64, loss: str, positive: float
) -> Float64:
    """Adds what some rows have of losses and gradient; changes `total`.

    Args:
        total: so far, shape (len(weights) + TAIL,); None: nothing.
        rows: with columns below len(weights) - 1.
        weights: the intercept last.
        loss: of LOSSES.
        positive: the label of rows that should have a positive margin; all others a negative one.
    """
    n_features = len(weights) - 1
    if total is None:
        total = np.zeros(len(weights) + TAIL)
    signs = np.where(rows.labels == positive, 1.0, -1.0)
    margins = rows.matrix(n_features) @ weights[:n_features] + weights[n_features]
    losses, slopes = LOSSES[loss](margins, signs)
    np.add.at(total, rows.columns, rows.values * np.repeat(slopes, np.diff(rows.first)))
    total[n_features] += slopes.sum()
    total[-3] += losses.sum()
    total[-2] += np.count_nonzero((margins > 0.0) == (signs > 0.0))
    total[-1] += len(rows)
    return total


def penalized(
    total: Float64, weights: Float64, penalty: float, intercept: bool
) -> tuple[float, Float64]:
    """The mean loss with penalty / 2 |w|^2, and its gradient. The intercept has no penalty.

    Args:
        total: of all rows, at these weights. Its memory is the gradient's.
        intercept: whether it may change.
    """
    n = total[-1]
    gradient = total[: len(weights)]
    gradient /= n
    value = float(total[-3] / n)
    if penalty:
        value += penalty / 2.0 * float(weights[:-1] @ weights[:-1])
        gradient[:-1] += penalty * weights[:-1]
    if not intercept:
        gradient[-1] = 0.0
    return value, gradient


def _sums_by_row(rows: LabelledRows, numbers: Float64) -> Float64:
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.first))
    return np.bincount(row_of, numbers, minlength=len(rows)).astype(np.float64)


# ---------------------------------------------------------------- walks


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Where an iteration is.

    Args:
        number: from 1.
        weights: there.
        value: what is made small, there.
        moved: how far from the iteration before it, or to the one after it.
    """

    number: int
    weights: Float64
    value: float
    moved: float


def descend(
    evaluate: Evaluate, weights: Float64, iterations: int, tolerance: float, step: float = 1.0
) -> Iterator[Step]:
    """Steps of step / sqrt(t) along the gradient.

    Ends after so many iterations, or with a step shorter than tolerance * max(1, |w|).
    """
    for number in range(1, iterations + 1):
        value, gradient = evaluate(weights)
        change = -step / math.sqrt(number) * gradient
        moved = float(np.linalg.norm(change))
        yield Step(number, weights, value, moved)
        weights = weights + change
        if moved < tolerance * max(1.0, float(np.linalg.norm(weights))):
            return


def lbfgs(
    evaluate: Evaluate, weights: Float64, iterations: int, tolerance: float, memory: int = 10
) -> Iterator[Step]:
    """Limited-memory BFGS.

    Ends after so many iterations, with one that gains less than tolerance * |value|, or where no
    step gains anything.

    Args:
        memory: pairs of arrays as long as the weights that are kept.
    """
    value, gradient = evaluate(weights)
    pairs: collections.deque[tuple[Float64, Float64, float]] = collections.deque(maxlen=memory)
    for number in range(1, iterations + 1):
        direction = _direction(gradient, pairs)
        first = 1.0 if pairs else min(1.0, 1.0 / max(float(np.linalg.norm(gradient)), 1e-300))
        found = _search(evaluate, weights, value, gradient, direction, first)
        if found is None:
            return
        length, new_value, new_gradient = found
        change = length * direction
        bend = new_gradient - gradient
        curvature = float(change @ bend)
        if curvature > 1e-300:
            pairs.append((change, bend, curvature))
        weights = weights + change
        gained, value, gradient = value - new_value, new_value, new_gradient
        yield Step(number, weights, value, float(np.linalg.norm(change)))
        if gained <= tolerance * abs(value):
            return


def _direction(gradient: Float64, pairs: Sequence[tuple[Float64, Float64, float]]) -> Float64:
    """The two loops. BLAS adds without temporary arrays."""
    from scipy.linalg import blas

    out = -gradient
    factors = []
    for change, bend, curvature in reversed(pairs):
        factor = float(change @ out) / curvature
        factors.append(factor)
        blas.daxpy(bend, out, a=-factor)
    if pairs:
        _, bend, curvature = pairs[-1]
        out *= curvature / float(bend @ bend)
    for (change, bend, curvature), factor in zip(pairs, reversed(factors), strict=True):
        blas.daxpy(change, out, a=factor - float(bend @ out) / curvature)
    return out


def _search(
    evaluate: Evaluate,
    weights: Float64,
    value: float,
    gradient: Float64,
    direction: Float64,
    length: float,
) -> tuple[float, float, Float64] | None:
    """A length by the weak Wolfe conditions, the value and the gradient there; None: nothing is
    gained at any."""
    slope = float(gradient @ direction)
    if not slope < 0.0:
        return None
    low, high = 0.0, math.inf
    best: tuple[float, float, Float64] | None = None
    for _ in range(MOST_EVALUATIONS):
        there, gradient_there = evaluate(weights + length * direction)
        if not there <= value + _DECREASE * length * slope:
            high = length
        elif float(gradient_there @ direction) < _CURVATURE * slope:
            low, best = length, (length, there, gradient_there)
        else:
            return length, there, gradient_there
        length = 2.0 * low if math.isinf(high) else (low + high) / 2.0
    return best


# ---------------------------------------------------------------- checking


def plain_evaluate(
    parts: Sequence[LabelledRows],
    n_features: int,
    loss: str,
    positive: float,
    penalty: float,
    intercept: bool,
) -> Evaluate:
    """What `penalized` makes of all rows, as SciPy's products of one matrix, in this process.

    None of the code above makes losses or gradients of it.
    """
    from scipy import sparse, special

    matrix = sparse.vstack([rows.matrix(n_features) for rows in parts]).tocsr()
    signs = np.concatenate([np.where(rows.labels == positive, 1.0, -1.0) for rows in parts])

    def evaluate(weights: Float64) -> tuple[float, Float64]:
        at = signs * (matrix @ weights[:-1] + weights[-1])
        if loss == "logistic":
            losses, slopes = -special.log_expit(at), -signs * special.expit(-at)
        else:
            losses, slopes = (1.0 - at).clip(min=0.0), -signs * (at < 1.0)
        value = losses.mean() + penalty * (weights[:-1] ** 2).sum() / 2
        gradient = np.append(matrix.T @ slopes / len(signs) + penalty * weights[:-1], slopes.mean())
        if not intercept:
            gradient[-1] = 0.0
        return float(value), gradient

    return evaluate


def check(weights: Float64, expected: Float64) -> float:
    """That weights are these, but for the rounding of other orders of summing.

    Returns:
        The largest difference, relative to the largest weight.

    Raises:
        WrongWeights: One differs by more than 1e-5 of the largest weight; names the worst.
    """
    if weights.shape != expected.shape:
        raise WrongWeights(f"there are {len(weights):,} weights, not {len(expected):,}")
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-12)
    difference = np.abs(weights - expected) / scale
    wrong = ~(difference <= 1e-5)  # a NaN is wrong as well
    if wrong.any():
        i = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
        raise WrongWeights(
            f"{int(wrong.sum()):,} of {len(weights):,} weights; number {i} is {weights[i]:.8g}, "
            f"not {expected[i]:.8g}"
        )
    return float(difference.max(initial=0.0))
