"""The benches of programs: from the times of tasks to figures, and small runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import program_peers, program_skew
from bench.peers import mpi, spark
from bench.support import common, timed, turns
from bench.support.timed import Ran, TimedProgram
from clamor_ray._recipes.program.plain import run_plainly
from clamor_ray.workloads.models.particles import ParticleBox
from tests.bench.conftest import lines_of, run_bench
from tests.support.lab.availability import missing

# ---------------------------------------------------------------- times of tasks


def test_each_task_of_a_program_leaves_when_it_ran(tmp_path: Path) -> None:
    p = TimedProgram(tmp_path / "tasks")
    parts, total = p.dataset([1, 2, 3]), p.value(0)
    with p.loop(max=9) as loop:
        p.stage(lambda t, part: t.send(0, part), reads=[parts])
        p.stage(lambda t, total: total + sum(t.recv()), writes=[total])
        loop.until(lambda t, total: total >= 12, reads=[total])
    found = run_plainly(p.tables(), p.functions, [list(each.source) for each in p.datasets])
    assert found[total.number] == [12]
    tasks = timed.read(tmp_path / "tasks")
    places = [(task.number, task.stage, task.index) for task in tasks]
    a_round = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert places == [
        (3 * number + stage + 1, stage, index) for number in (0, 1) for stage, index in a_round
    ]
    times = [time for task in tasks for time in (task.began_ns, task.ended_ns)]
    assert times == sorted(times)
    assert len(timed.rounds_of(tasks).seconds) == 2


def test_a_round_is_from_the_end_of_the_one_before() -> None:
    s = 10**9
    tasks = [
        Ran(1, 0, 1, 2 * s, 3 * s),
        Ran(1, 0, 0, 1 * s, 5 * s),
        Ran(2, 1, 1, 5 * s, 9 * s),
        Ran(2, 1, 0, 6 * s, 7 * s),
        Ran(3, 0, 0, 7 * s, 8 * s),  # before the round before it has ended
        Ran(3, 0, 1, 8 * s, 10 * s),
        Ran(4, 1, 0, 12 * s, 15 * s),
    ]
    rounds = timed.rounds_of(tasks)
    assert rounds.seconds == [8.0, 6.0]
    assert rounds.longest_s == [4.0 + 4.0, 2.0 + 3.0]
    assert rounds.stages_s == [3.0, 3.5]
    with pytest.raises(ValueError, match="stage 1 has number 5: that is not one loop"):
        timed.rounds_of([*tasks, Ran(5, 1, 0, 0, 1)])


# ---------------------------------------------------------------- against peers


def test_ratios_are_of_the_medians_of_each_repetition() -> None:
    seconds = {
        "program": [1.0, 1.0, 9.0, 3.0, 3.0, 0.1],
        "mpi": [2.0] * 6,
        "blocks": [30.0, 3.0, 30.0, 30.0, 30.0, 90.0],
        "mllib": [8.0, 9.0, 8.0],
        "ours beside mllib": [2.0, 0.1, 5.0],
    }
    found = program_peers.figures(seconds, 3)
    assert found["mpi_ratio"] == [0.5, 1.5]
    assert found["speedup_over_blocks"] == [30.0, 10.0]
    assert found["speedup_over_mllib"] == [4.0]
    assert found["spark_speedup"] == [4.0]  # of the best of Spark's
    assert set(found) == {
        "mpi_ratio",
        "spark_speedup",
        "speedup_over_blocks",
        "speedup_over_mllib",
    }
    assert program_peers.figures({"program": [1.0]}, 1) == {}


class APeer:
    def ask(self, about: int) -> list[dict[str, Any]]:
        return [{"library": "x", "n": 3}, {"library": "x", "n": 4}]


def test_a_peer_that_is_missing_is_said_and_one_with_other_data_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def start() -> Iterator[APeer]:
        yield APeer()

    monkeypatch.setattr(common, "_out", None)
    assert turns.why_not("mpi", lambda: "there is none", ["spark"]) == "there is none"
    assert turns.why_not("spark", lambda: "there is none", ["spark"]) == "not asked for"
    with contextlib.ExitStack() as stack:
        assert turns.entered(stack, "mpi", "there is none", start, 7) is None
        assert isinstance(turns.entered(stack, "mpi", None, start, 7), APeer)
        with pytest.raises(common.WrongData, match="mpi has 7 items of 8"):
            turns.entered(stack, "mpi", None, start, 8)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records == [
        {"missing": {"mpi": "there is none"}},
        {"peer": {"name": "mpi", "library": "x", "n": 2}},
    ]


# ---------------------------------------------------------------- uneven work


@pytest.mark.parametrize("skew", [None, 3.0])
def test_the_work_of_a_slab_is_its_pairs(skew: float | None) -> None:
    box = ParticleBox(width=16.0)
    first = program_skew.drawn(200, skew, box)
    x = first.at[:, 0]
    near = (np.abs(x[:, None] - x) <= box.radius).sum(axis=1)
    for n_slabs in (1, 2, 8):
        found = program_skew.pairs(first, box, n_slabs)
        edges = np.arange(n_slabs + 1) * (box.width / n_slabs)
        inside = [(x >= a) & (x < b) for a, b in itertools.pairwise(edges)]
        assert found.tolist() == [near[mask].sum() for mask in inside]
    assert (x.max() < 8.0) == (skew is None)


def test_the_bound_is_of_the_longest_task_or_of_busy_cores() -> None:
    assert program_skew.bound(np.array([8, 0]), np.array([2, 2, 2, 2, 0, 0]), 2) == 2.0
    assert program_skew.bound(np.array([8, 0]), np.array([6, 1, 1, 0, 0, 0]), 2) == 8 / 6
    assert program_skew.bound(np.array([4, 4]), np.array([2, 2, 2, 2]), 2) == 1.0


# ---------------------------------------------------------------- small runs


@pytest.mark.lab
@pytest.mark.soak
def test_skew_ends_with_its_figures(running: dict[str, str]) -> None:
    lines = lines_of(run_bench("program_skew", "--small", "--executors", "2", **running))
    figures = lines[-1]["summary"]
    assert set(figures) == {"skew_speedup", "skew_bound", "round_s"}
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    assert [line["slabs"] for line in lines if "slabs" in line] == [8, 2, 2, 8]


@pytest.mark.lab
@pytest.mark.soak
def test_rounds_against_mpi_end_with_their_figures(running: dict[str, str]) -> None:
    if reason := mpi.unavailable():
        missing(reason)
    arguments = ("program_peers", "--small", "--workers", "2", "--without", "spark")
    lines = lines_of(run_bench(*arguments, **running))
    figures = lines[-1]["summary"]
    assert set(figures) == {"mpi_ratio", "round_s"}
    for of_workloads in figures.values():
        assert set(of_workloads) == {"kmeans", "lr", "pagerank"}
        assert all(math.isfinite(value) and value > 0 for value in of_workloads.values())
    assert {"missing": {"spark": "not asked for"}} in lines


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(700)
def test_rounds_against_spark_end_with_their_figures() -> None:
    if reason := spark.unavailable():
        pytest.skip(reason)  # 400 MB and a Java: a peer for who wants the figure
    arguments = ("program_peers", "--small", "--without", "mpi", "--workloads", "kmeans,lr")
    figures = lines_of(run_bench(*arguments, timeout_s=600))[-1]["summary"]
    forms = {"kmeans": ("blocks", "mllib_row", "mllib_block"), "lr": ("blocks", "mllib")}
    for workload, names in forms.items():
        speedups = [figures[f"speedup_over_{name}"][workload] for name in names]
        assert figures["spark_speedup"][workload] == min(speedups)
