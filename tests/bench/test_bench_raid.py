"""The benchmark of redundancy: its figures, and a run on little data; nothing judges them here."""

from __future__ import annotations

import io
import math
import time
from typing import Any

import pytest

from bench import raid
from bench.drivers import raid_driver
from clamor_ray.workloads.data import graphs
from tests.bench.conftest import lines_of, run_bench
from tests.support.lab import remove_stale, require_lab


def ranked(level: str, repetition: int, iteration_s: list[float]) -> dict[str, Any]:
    return {"run": "rank", "level": level, "repetition": repetition, "iteration_s": iteration_s}


def stored(level: str, hosts: int, ratio: float) -> dict[str, Any]:
    return {"run": "storage", "level": level, "hosts": hosts, "ratio": ratio}


DEGRADED = {
    "run": "degraded",
    "before_s": [3.0, 1.0, 2.0],
    "until_detected_s": [90.0],
    "after_s": [5.0, 2.2, 2.0],
    "detection_s": 1.5,
    "repair_s": 4.0,
}


def test_the_overhead_is_of_runs_beside_each_other() -> None:
    runs = [
        *(ranked("raid0", 0, [1.0, 9.0, 2.0]), ranked("raid5", 0, [2.2, 2.2, 99.0])),
        *(ranked("raid5", 1, [13.0]), ranked("raid0", 1, [10.0])),  # a slow moment hits both
        *(ranked("raid0", 2, [1.0]), ranked("raid5", 2, [1.0])),
        *(stored("raid5", 5, 1.25), stored("raid1", 5, 2.0), stored("raid5", 3, 1.5)),
        DEGRADED,
    ]
    assert raid.figures(runs) == {
        "parity_overhead": pytest.approx(1.1),
        "degraded_slowdown": pytest.approx(1.1),
        "degraded_first": 2.5,
        "detection_s": 1.5,
        "repair_s": 4.0,
        "storage_ratio": {"raid5_of_5": 1.25, "raid1_of_5": 2.0, "raid5_of_3": 1.5},
    }


def test_a_run_without_a_killed_host_has_no_figures() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        raid.figures([ranked("raid0", 0, [1.0]), ranked("raid5", 0, [1.0])])


def test_the_budget_is_of_the_graph_and_of_the_vector() -> None:
    graph = graphs.generate(1000, 16_000, 2.1, seed=1)
    assert raid_driver.graph_bytes_of(graph) == 1001 * 8 + 16_000 * 4 + 1000 * 4 + 1000 * 8


def test_the_last_host_is_killed_and_the_driver_hears_when() -> None:
    killed: list[tuple[int, float]] = []

    class Lab:
        node_ids = ("a", "b", "c")

        def kill_node(self, index: int) -> None:
            killed.append((index, time.monotonic()))

    class Driver:
        stdin = io.StringIO()

    began_s = time.monotonic()
    raid.kill(Lab(), 0.05, Driver())
    said_s = float(Driver.stdin.getvalue())
    ((index, at_s),) = killed
    assert index == 2
    assert began_s + 0.05 <= said_s <= at_s


def test_ranks_that_are_wrong_end_the_run() -> None:
    """Whatever time it took."""
    graph = graphs.generate(1000, 16_000, 2.1, seed=1)
    ranking = raid_driver.Ranking.__new__(raid_driver.Ranking)
    ranking.graph, ranking.done = graph, 3
    ranking.ranks = graphs.reference(graph, raid_driver.DAMPING, 3)
    ranking.check()
    ranking.ranks[17] *= 1 + 1e-6
    with pytest.raises(graphs.WrongRanks, match="vertex 17"):
        ranking.check()


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.soak
def test_small_run_ends_with_its_figures_and_leaves_no_namespace() -> None:
    require_lab("netns")
    lines = lines_of(run_bench("raid", "--small"))
    assert {"kernel", "cores", "page_size", "ray", "trap", "rate"} <= set(lines[0]["environment"])
    figures = lines[-1]["summary"]
    ratios = figures.pop("storage_ratio")
    assert ratios == pytest.approx({"raid5_of_3": 1.5, "raid1_of_3": 2.0}, rel=0.1)
    names = {"parity_overhead", "degraded_slowdown", "degraded_first", "detection_s", "repair_s"}
    names |= {"parity_rate"}
    assert set(figures) == names
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    runs = [line for line in lines if line.get("run") == "rank"]
    assert [run["level"] for run in runs] == ["raid0", "raid5"]
    # The caches hold less than the graph, and a parity has commits of its own.
    assert all(run["evicted_blocks"] > 0 for run in runs)
    assert runs[1]["commits_applied"] > runs[0]["commits_applied"] > 0
    assert remove_stale() == []
