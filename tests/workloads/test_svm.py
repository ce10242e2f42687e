"""The linear support vector machine: against scikit-learn, and runs over a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clamor_ray.workloads import svm
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.models import linear
from clamor_ray.workloads.models.linear import Sample
from tests.conftest import ClamorCluster


def test_it_comes_near_what_scikit_learn_finds() -> None:
    """The same objective: C is 1 / (n penalty). Steps of a subgradient get there slowly."""
    from scipy import sparse
    from sklearn.svm import LinearSVC

    n, d, penalty = 2000, 30, 0.01
    sample = Sample(n, d, 2, per_row=8)
    parts = [sample.partition(i) for i in range(2)]

    def evaluate(weights: Any) -> Any:
        total = None
        for rows in parts:
            total = linear.accumulate(total, rows, weights, "hinge", 1.0)
        return linear.penalized(total, weights, penalty, False)

    matrix = sparse.vstack([rows.matrix(d) for rows in parts])
    labels = np.concatenate([rows.labels for rows in parts])
    fitted = LinearSVC(
        loss="hinge", C=1 / (n * penalty), fit_intercept=False, tol=1e-8, max_iter=200_000
    ).fit(matrix, labels)
    expected, _ = evaluate(np.append(fitted.coef_[0], 0.0))
    steps = list(linear.descend(evaluate, np.zeros(d + 1), 400, 0.0, step=3.0))
    best = min(steps, key=lambda step: step.value)
    assert expected <= best.value + 1e-9 <= 1.01 * expected
    assert best.weights[-1] == 0.0
    margins = matrix @ best.weights[:-1]
    agreed = ((margins > 0) == (fitted.decision_function(matrix) > 0)).mean()
    assert agreed > 0.97


def test_a_step_is_mllibs() -> None:
    """SquaredL2Updater: w (1 - step penalty) - step g, with step / sqrt(t)."""
    gradients = [np.array([1.0, -2.0]), np.array([0.5, 0.25]), np.array([-1.0, 0.0])]
    given = iter(gradients)

    def evaluate(weights: Any) -> Any:
        return 1.0, next(given) + 0.1 * weights

    steps = list(linear.descend(evaluate, np.zeros(2), 3, 0.0, step=2.0))
    weights = np.zeros(2)
    for t, (step, gradient) in enumerate(zip(steps, gradients, strict=True), 1):
        np.testing.assert_allclose(step.weights, weights)
        size = 2.0 / np.sqrt(t)
        weights = weights * (1 - size * 0.1) - size * gradient


@pytest.mark.parametrize("how", ["split", "tree"])
def test_it_learns_on_two_nodes(clamor_cluster: ClamorCluster, how: Any, stages: Stages) -> None:
    sample = Sample(2000, 5000, 4, per_row=10)
    job = svm.make_job(sample=sample, iterations=6, check=True, how=how)
    outcome = svm.run(job, stages)
    assert outcome.error is not None
    assert outcome.error < 1e-9
    losses = [line.loss for line in outcome.lines]
    assert len(losses) == 6
    assert losses[0] == 1.0
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97
    again = svm.run(job, stages)
    np.testing.assert_allclose(again.weights, outcome.weights, rtol=1e-9, atol=1e-12)


def test_the_weights_are_those_of_the_least_loss(
    clamor_cluster: ClamorCluster, stages: Stages
) -> None:
    job = svm.make_job(sample=Sample(500, 40, 2), iterations=12, step=50.0, check=True)
    outcome = svm.run(job, stages)
    losses = [line.loss for line in outcome.lines]
    assert losses[-1] > min(losses)  # such steps go too far
    sample = Sample(500, 40, 2)
    parts = [sample.partition(i) for i in range(2)]
    value, _ = linear.plain_evaluate(parts, 40, "hinge", 1.0, 0.01, True)(outcome.weights)
    assert value == pytest.approx(min(losses))
