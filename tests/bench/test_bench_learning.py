"""The bench of learning: from what was measured to figures, and a small run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bench import learning
from bench.support import common
from tests.bench.test_bench_stages import small


def test_figures_are_of_medians_and_their_geometric_mean() -> None:
    seconds = {
        "lr": {"tree": [4.0, 40.0, 4.0], "split": [2.0, 1.0, 2.0]},
        "svm": {"tree": [8.0], "split": [1.0]},
    }
    sums = {
        "lr": {"tree": [3.0], "split": [1.0]},
        "svm": {"tree": [4.0], "split": [0.5]},
    }
    assert learning.figures(seconds, sums) == {
        "split_speedup": pytest.approx(math.sqrt(2.0 * 8.0)),
        "lr_split_speedup": 2.0,
        "lr_sum_speedup": 3.0,
        "lr_split_s": 2.0,
        "svm_split_speedup": 8.0,
        "svm_sum_speedup": 8.0,
        "svm_split_s": 1.0,
    }


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def train(how: str) -> Any:
        order.append(how)
        return float(len(order)), len(order) / 2, np.ones(3)

    seconds, sums = learning.rounds("x", train, 2)
    assert order == ["tree", "split", "split", "tree", "tree", "split"]
    assert seconds == {"split": [3.0, 6.0], "tree": [4.0, 5.0]}
    assert sums == {"split": [1.5, 3.0], "tree": [2.0, 2.5]}


@pytest.mark.parametrize("wrong", [1.001, np.nan])
def test_models_that_differ_have_no_figure(wrong: float) -> None:
    def train(how: str) -> Any:
        model = np.ones(3)
        model[1] = wrong if how == "split" else 1.0
        return 1.0, 1.0, model

    with pytest.raises(common.WrongData, match="x: the model by split aggregation"):
        learning.rounds("x", train, 1)


@pytest.mark.lab
@pytest.mark.soak
def test_it_ends_with_its_figures(running: dict[str, str]) -> None:
    lines = small("learning", "--features", "20000", "--words", "300", **running)
    summary = lines[-1]["summary"]
    each = [summary[f"{name}_split_speedup"] for name in learning.WORKLOADS]
    assert summary["split_speedup"] == pytest.approx(math.prod(each) ** (1 / 3), rel=1e-3)
    assert {line["aggregate"] for line in lines if "aggregate" in line} == set(learning.HOWS)
