"""The pressure benchmark: its figures, and a run on little data; nothing judges them here."""

from __future__ import annotations

import math

import pytest

from bench import pressure
from tests.bench.conftest import lines_of, run_bench


def test_the_figures_are_of_the_best_policy_that_is_not_random() -> None:
    seconds = {(policy, 0.5): 1.0 for policy in ("sieve", "lru", "random")}
    seconds |= {("sieve", 1.0): 2.0, ("lru", 1.0): 4.0, ("random", 1.0): 3.0}
    seconds |= {("sieve", 0.33): 9.0, ("lru", 0.33): 6.0, ("random", 0.33): 5.0}
    found = pressure.figures(seconds)
    assert found == {
        "best_policy_slowdown": 2.0,
        "best_policy": "lru",
        "best_vs_random": pytest.approx(1.2),
    }


def test_the_budget_is_a_part_of_the_graph_or_leaves_it_in_peace() -> None:
    assert pressure.budget_bytes(100 << 20, 0.5) == 50 << 20
    whole = pressure.budget_bytes(100 << 20, 1.0)
    assert pressure.HIGH_WATER * whole > 100 << 20


@pytest.mark.parametrize("policies", ["sieve", "sieve,lru", "random", "random,best"])
def test_policies_must_be_known_and_random_among_them(policies: str) -> None:
    with pytest.raises(SystemExit):
        pressure.main(["--policies", policies])


@pytest.mark.lab
@pytest.mark.soak
def test_small_run_ends_with_its_figures(running: dict[str, str]) -> None:
    lines = lines_of(run_bench("pressure", "--small", **running))
    assert {"kernel", "cores", "page_size", "ray", "trap"} <= set(lines[0]["environment"])
    cases = [line["case"] for line in lines if "case" in line]
    assert [(case["policy"], case["fraction"]) for case in cases] == [
        (policy, fraction)
        for fraction in pressure.SMALL_FRACTIONS
        for policy in pressure.SMALL_POLICIES
    ]
    for case in cases:
        assert (case["evicted_blocks"] > 0) == (case["fraction"] < 1.0)
        assert (case["refetched_blocks"] > 0) == (case["fraction"] < 1.0)
    figures = lines[-1]["summary"]
    assert set(figures) == {"best_policy_slowdown", "best_policy", "best_vs_random"}
    assert figures["best_policy"] in pressure.SMALL_POLICIES
    for name in ("best_policy_slowdown", "best_vs_random"):
        assert math.isfinite(figures[name])
        assert figures[name] > 0
