"""Benchmarks of stages: from what was measured to figures, and what they stand on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import incremental, kmeans, recovery, straggler
from bench.peers import mpi, spark
from bench.peers import peer as _peer
from bench.support import cgroup, common, executions, turns
from bench.support.executions import Line, Log
from tests.bench.conftest import lines_of, run_bench
from tests.support.lab.availability import missing

# ---------------------------------------------------------------- figures


def test_kmeans_figures_are_of_medians_and_of_sparks_best() -> None:
    seconds = {
        "ours": [1.0, 9.0, 2.0],
        "mpi": [1.6],
        "blocks": [8.0],
        "mllib_row": [6.0, 6.0, 60.0],
        "ours beside mllib_row": [3.0, 3.0, 1.0],  # the machine was slower by then
    }
    assert kmeans.figures(seconds) == {
        "mpi_ratio": 1.25,
        "spark_speedup": 2.0,
        "speedup_over_blocks": 4.0,
        "speedup_over_mllib_row": 2.0,
        "iteration_s": 2.0,
    }


def test_without_a_peer_there_is_no_figure_of_it() -> None:
    assert kmeans.figures({"ours": [2.0]}) == {"iteration_s": 2.0}
    assert set(kmeans.figures({"ours": [2.0], "mpi": [1.0]})) == {"iteration_s", "mpi_ratio"}


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order = []

    def side(name: str, centroids: float = 1.0):
        def iterate(n: int):
            order.append(name)
            return [float(len(order))] * n, np.full((2, 2), centroids)

        return iterate

    seconds = turns.rounds({"a": side("a"), "b": side("b")}, 2, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [4.0, 4.0, 5.0, 5.0], "b": [3.0, 3.0, 6.0, 6.0]}
    with pytest.raises(common.WrongData, match="the answer of b is not that of a"):
        turns.rounds({"a": side("a"), "b": side("b", 1.001)}, 1, 1)


def killed_run(failed_s: float, detection_s: float, rerun: int, lost: int) -> dict[str, object]:
    seconds = [1.0] * 3 + [failed_s] + [1.5] * 6
    return {
        "seconds": seconds,
        "detection_s": detection_s,
        "rerun": rerun,
        "lost": lost,
        "unheard": 0,
        "failed_in": 4,
    }


def test_recovery_figures() -> None:
    alone = [{"seconds": [1.0] * 10, "detection_s": 0.0}] * 3
    killed = [
        killed_run(20.0, 15.0, 5, 5),
        killed_run(18.0, 15.0, 6, 5),
        killed_run(17.0, 15.0, 4, 4),
    ]
    assert recovery.figures(alone, killed) == {
        "failure_slowdown": 18.0,
        "redo_slowdown": 3.0,
        "detection_s": 15.0,
        "later_slowdown": 1.5,
        "total_slowdown": pytest.approx(3.0),
        "rerun_share": 1.2,
        "unheard": 0,
    }


def test_straggler_figures() -> None:
    times = {"alone": (1.0, 3.0, 2.0), "with": (3.0, 9.0, 2.0), "without": (12.0, 13.0, 11.0)}
    records = [{"case": c, "seconds": [t / 2, t / 2]} for c, ts in times.items() for t in ts]
    assert straggler.figures(records) == {
        "slowdown_with": 1.5,
        "slowdown_without": 6.0,
        "alone_s": 2.0,
    }


def test_incremental_figures_count_what_ran_for_nothing() -> None:
    def record(refresh_s: float, rerun: int, unread: bool = False) -> dict[str, object]:
        return {
            "read_by_nobody": unread,
            "refresh_s": refresh_s,
            "anew_s": 2.0,
            "needed": 0 if unread else 1,
            "rerun": rerun,
        }

    records = [record(9.0, 1, unread=True), record(0.02, 1), record(0.04, 1), record(0.04, 1)]
    assert incremental.figures(records) == {
        "refresh_speedup": 50.0,
        "precision": 0.75,
        "refresh_s": 0.04,
        "anew_s": 2.0,
    }


def test_the_work_of_a_block_depends_on_all_of_it() -> None:
    blocks = np.random.default_rng(1).random((3, 512))
    before = incremental.iterated(blocks, 5)
    blocks[1, 256] += 0.25
    after = incremental.iterated(blocks, 5)
    assert (before == after).tolist() == [True, False, True]


# ---------------------------------------------------------------- who ran


def test_what_tasks_say_is_counted(tmp_path: Path) -> None:
    lines = [
        Line("began", "load", 0, "a"),
        Line("ended", "load", 0, "a"),
        Line("began", "load", 1, "b"),
        Line("ended", "load", 1, "b"),
        Line("began", "iteration 1", 0, "b"),
        Line("began", "load", 1, "a"),
        Line("began", "iteration 1", 0, "a"),
        Line("began", "iteration 1", 0, "c"),
    ]
    assert executions.rerun(lines) == 3
    assert executions.rerun(lines[:5]) == 0
    begun_again = Line("began", "a", 1, "elsewhere")
    ended = [Line("ended", "a", n, "here") for n in (0, 1)]
    two = [Line("began", "a", n, "here") for n in (0, 1)] + ended
    assert executions.ended_and_again(two, "here", "a") == set()
    assert executions.ended_and_again([*two, begun_again], "here", "a") == {("a", 1)}
    assert executions.ended_and_again([*two, begun_again], "elsewhere", "a") == set()
    assert executions.running_on(lines, "b") == {("iteration 1", 0)}
    assert executions.running_on(lines[:4], "b") == set()
    assert Log(str(tmp_path / "none")).lines() == []
    half = tmp_path / "half"
    half.write_text('["began", "load", 1, "a"]\n["began", "lo')
    assert Log(str(half)).lines() == [Line("began", "load", 1, "a")]


# ---------------------------------------------------------------- peers

PEER = """
import os, sys
from bench.peers import peer as _peer
if "dies" in sys.argv[1]:
    print("it went wrong")
    sys.exit(3)
child = os.fork()
def leave(code):
    print("leaving")
    sys.stdout.flush()
    os._exit(code)
_peer.serve(0 if child else 1, {"twice": lambda x: 2 * x, "leave": leave})
"""


def test_every_process_of_a_peer_is_asked() -> None:
    command = [sys.executable, "-c", PEER, "well"]
    with _peer.started("it", command, 2, {}) as peer:
        assert peer.ask(twice=4) == [8, 8]
        assert peer.ask(twice="ab") == ["abab", "abab"]


def test_a_peer_that_does_not_start_or_ends_says_why() -> None:
    with (
        pytest.raises(_peer.PeerFailed, match=r"(?s)it did not start.*it went wrong"),
        _peer.started("it", [sys.executable, "-c", PEER, "dies"], 1, {}),
    ):
        pass
    with (
        _peer.started("it", [sys.executable, "-c", PEER, "well"], 2, {}) as peer,
        pytest.raises(_peer.PeerFailed, match=r"(?s)it: .*leaving"),
    ):
        peer.ask(leave=1)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install mpi4py mpich" in str(mpi.unavailable())
    assert "no mpi4py" in str(mpi.unavailable())
    assert "pip install pyspark" in str(spark.unavailable())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "no java" in str(spark.unavailable())


# ---------------------------------------------------------------- control groups


@pytest.mark.root
def test_a_process_in_a_cgroup_gets_its_quota() -> None:
    if reason := cgroup.unavailable():
        missing(reason)
    script = (
        "import os, sys, time\n"
        "sys.stdin.readline()\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end: pass\n"
        "print(time.process_time())\n"
    )
    with cgroup.groups(2, 0.25) as groups:
        paths = [group.path for group in groups]
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        groups[1].add(process.pid)
        assert groups[1].pids() == [process.pid]
        assert groups[0].pids() == []
        out, _ = process.communicate("\n", timeout=60)
        # A quarter of 1.5 s, and what it took to start: far from all of it.
        assert float(out) < 0.75
    assert not any(path.exists() for path in paths)


# ---------------------------------------------------------------- small runs


def small(name: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """On a cluster of its own, or where the environment says that one runs."""
    lines = lines_of(run_bench(name, *arguments, "--small", **environment))
    assert {"kernel", "cores", "page_size", "ray", "trap"} <= set(lines[0]["environment"])
    assert all(np.isfinite(value) for value in lines[-1]["summary"].values())
    return lines


@pytest.mark.lab
def test_incremental_ends_with_its_figures(running: dict[str, str]) -> None:
    lines = small("incremental", **running)
    assert set(lines[-1]["summary"]) == {"refresh_speedup", "precision", "refresh_s", "anew_s"}
    assert lines[-1]["summary"]["precision"] == 1.0


@pytest.mark.lab
@pytest.mark.soak
def test_kmeans_ends_with_its_figures_and_says_what_is_missing(running: dict[str, str]) -> None:
    if reason := mpi.unavailable():
        missing(reason)
    lines = small("kmeans", "--without", "spark", "--workers", "2", **running)
    assert set(lines[-1]["summary"]) == {"mpi_ratio", "iteration_s"}
    assert {"missing": {"spark": "not asked for"}} in lines


@pytest.mark.slow
@pytest.mark.soak
def test_kmeans_against_spark_ends_with_its_figures() -> None:
    if reason := spark.unavailable():
        pytest.skip(reason)  # 400 MB and a Java: a peer for who wants the figure
    summary = small("kmeans", "--without", "mpi")[-1]["summary"]
    speedups = [summary[f"speedup_over_{name}"] for name in ("blocks", "mllib_row", "mllib_block")]
    assert summary["spark_speedup"] == min(speedups)


@pytest.mark.lab
@pytest.mark.soak  # two clusters; the gate has test_recovery_lab.py
def test_recovery_ends_with_its_figures_and_runs_what_was_lost() -> None:
    summary = small("recovery")[-1]["summary"]
    assert {"failure_slowdown", "rerun_share"} <= set(summary)
    # What ran on the node when it died is run again too, and nothing else is.
    assert summary["rerun_share"] == 1.0


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.soak
def test_straggler_ends_with_its_figures() -> None:
    if reason := cgroup.unavailable():
        missing(reason)
    lines = small("straggler")
    assert set(lines[-1]["summary"]) == {"slowdown_with", "slowdown_without", "alone_s"}
    copies = {line["case"]: line["copies"] for line in lines if "case" in line}
    assert copies["alone"] == copies["without"] == 0
