"""The benchmark of the matcher: its small run, and how its figure is read off."""

from __future__ import annotations

import math

import pytest

from bench.recipes import at_share
from tests.bench.conftest import lines_of, run_bench


def test_the_rate_at_a_share_lies_between_measured_ones() -> None:
    points = [
        {"rate": 900.0, "share": 0.5},
        {"rate": 400.0, "share": 0.2},
        {"rate": 100.0, "share": 0.05},
    ]
    assert at_share(points, 0.1) == pytest.approx(200.0)
    assert at_share(points, 0.2) == pytest.approx(400.0)
    assert at_share(points, 0.6) == 900.0
    assert at_share(points, 0.01) == 100.0


def test_a_small_run_ends_with_its_figures() -> None:
    lines = lines_of(run_bench("recipes", "--small", timeout_s=120.0))
    figures = lines[-1]["summary"]
    assert set(figures) == {"c_step_us", "tasks_per_second_at_10_percent", "py_rate"}
    assert set(figures["py_rate"]) == {"shared", "model"}
    flat = [figures["c_step_us"], figures["tasks_per_second_at_10_percent"]]
    assert all(math.isfinite(each) and each > 0 for each in [*flat, *figures["py_rate"].values()])


@pytest.mark.soak
def test_rounds_against_ray_end_with_their_figures() -> None:
    lines = lines_of(run_bench("programs", "--small", timeout_s=240.0))
    figures = lines[-1]["summary"]
    cases = [
        f"{case}, {peer}" for case in ("1 ms", "empty") for peer in ("tasks", "compiled_graph")
    ]
    assert sorted(figures) == sorted(f"ray_speedup ({case})" for case in cases)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures.values())
