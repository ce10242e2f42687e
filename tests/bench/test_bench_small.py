"""Each benchmark runs on little data and ends with its figures; nothing judges them here."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from bench import query_share
from bench.peers import redis
from tests.bench.conftest import ROOT, lines_of, run_bench
from tests.support.lab import remove_stale, require_lab
from tests.support.lab.availability import missing
from tests.support.lab.memory import TOP

FIGURES = {
    "cold_read": {
        "sparse_fault_speedup",
        "sparse_prefetch_speedup",
        "sparse_bytes_ratio",
        "dense_speedup",
        "put_speedup",
    },
    "faults": {"node_hit_ratio", "remote_fault_ratio"},
    "fetch": {"wire_ratio", "small_page_rate"},
    "overhead": {"task_overhead_ratio"},
    "update": {"round_speedup", "bytes_per_update", "lookup_rate_ratio"},
}
# The gate has one that reads and one that writes; `make soak` has all of them.
SHORT = ("overhead", "update")
LONG = [pytest.param(name, marks=pytest.mark.soak) for name in sorted({*FIGURES} - {*SHORT})]

Bench = Callable[..., list[dict[str, Any]]]


@pytest.mark.lab
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_small_run_ends_with_its_figures(name: str, bench: Bench) -> None:
    lines = bench(name, "--small")
    assert {"kernel", "cores", "page_size", "ray", "trap"} <= set(lines[0]["environment"])
    figures = lines[-1]["summary"]
    assert set(figures) == FIGURES[name]
    assert all(math.isfinite(value) and value > 0 for value in figures.values())


@pytest.mark.lab
def test_micro_ends_with_a_ratio_for_each_case(running: dict[str, str]) -> None:
    short = ("--benchmark-max-time=0.01", "--benchmark-min-rounds=3", "--benchmark-warmup=off")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/micro", *short],
        cwd=ROOT,
        env={**os.environ, **running},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = (json.loads(x)["summary"] for x in done.stdout.splitlines() if "summary" in x)
    cases = ("open", "lookup", "lookup_rows", "pickle", "small_commit")
    assert set(figures) == {f"{case}_ratio" for case in cases}
    assert all(math.isfinite(value) and value > 0 for value in figures.values())


@pytest.mark.lab
@pytest.mark.soak
def test_range_read_ends_with_a_figure_for_each_size_of_a_row(bench: Bench) -> None:
    figures = bench("range_read", "--small")[-1]["summary"]
    assert set(figures) == {"range_read"}
    assert set(figures["range_read"]) == {"256 KiB", "64 KiB", "8 KiB"}
    assert all(math.isfinite(value) and value > 0 for value in figures["range_read"].values())


@pytest.mark.lab
@pytest.mark.soak
def test_gather_ends_with_the_figures_of_both_cases(bench: Bench) -> None:
    if reason := redis.unavailable():
        missing(f"the peer of gather: {reason}")
    figures = bench("gather", "--small")[-1]["summary"]
    assert set(figures) == {"zipf", "uniform"}
    for case in figures.values():
        assert set(case) == {"redis_speedup", "actor_speedup"}
        assert all(math.isfinite(value) and value > 0 for value in case.values())


@pytest.mark.lab
@pytest.mark.soak
def test_serve_load_ends_with_its_figures(bench: Bench) -> None:
    if reason := redis.unavailable():
        missing(f"the peer of serve_load: {reason}")
    lines = bench("serve_load", "--small")
    figures = lines[-1]["summary"]
    assert set(figures) == {"p99_ratio", "rps_ratio"}
    assert set(figures["p99_ratio"]) == {"hot", "cold"}
    assert set(figures["rps_ratio"]) == {"redis 16", "redis 1024", "actor 16", "actor 1024"}
    for case in figures.values():
        assert all(math.isfinite(value) and value > 0 for value in case.values())
    windows = [line for line in lines if "windows" in line]
    assert {line["n_wrong"] + line["n_failed"] for line in windows} == {0}
    # All rows that a cold window asks for are of its update: replicas have heard of it.
    cold = [line for line in windows if (line["windows"], line["path"]) == ("cold", "lookup")]
    assert [line["updates"] for line in cold] == [[1], [2]]


@pytest.mark.lab
@pytest.mark.soak
def test_first_touch_ends_with_the_figures_of_each_way(bench: Bench) -> None:
    lines = bench("first_touch", "--small")
    assert {"kernel", "cores", "page_size", "ray", "trap", "rate"} <= set(lines[0]["environment"])
    names = {"fetch_ratio", "loop_fetch_ratio", "loop_ratio", "index_speedup"}
    figures = lines[-1]["summary"]
    assert figures.pop("leak") == 0
    names |= {"present_ratio", "paged_ratio", "scalar_ratio", "slice_ratio", "leak_s"}
    assert set(figures) == names
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    loops = [line for line in lines if line.get("way") == "loop"]
    # Of what is fetched by blocks, each touched block has come.
    assert loops
    assert all(loop["fetch_ratio"] >= 1 for loop in loops)


@pytest.mark.lab
@pytest.mark.soak
def test_query_share_ends_with_the_share_of_each_case(bench: Bench) -> None:
    lines = bench("query_share", "--small")
    shares = lines[-1]["summary"]["query_share"]
    left_out = {"torch row", "polars row", "polars column"}  # what may not be installed
    assert {*query_share.CASES} - left_out <= set(shares) <= {*query_share.CASES}
    assert all(math.isfinite(share) and share > 0 for share in shares.values())


@pytest.mark.lab
@pytest.mark.soak
def test_idle_ends_with_its_figures(bench: Bench) -> None:
    figures = bench("idle", "--small")[-1]["summary"]
    assert set(figures) == {"growth_kib_per_minute", "descriptors", "threads"}
    assert all(math.isfinite(value) for value in figures.values())


@pytest.mark.lab
@pytest.mark.soak
def test_autoscale_ends_with_its_figures(bench: Bench) -> None:
    figures = bench("autoscale", "--small")[-1]["summary"]
    expected = {"idle_to_gone_s", "idle_to_gone_v1_s"}
    assert set(figures) == expected | {f"ray_{name}" for name in expected}
    assert all(math.isfinite(value) for value in figures.values())


@pytest.mark.lab
@pytest.mark.soak
def test_metrics_ends_with_its_figures(bench: Bench) -> None:
    figures = bench("metrics", "--small")[-1]["summary"]
    assert set(figures) == {"fault_ratio", "core_percent", "registry_core_percent"}
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["fault_ratio"] > 0


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.soak
def test_beyond_ends_with_the_figures_of_each_peer() -> None:
    if not TOP.is_dir() or importlib.util.find_spec("duckdb") is None:
        missing("beyond needs memory cgroups of version 1, and DuckDB, its peer")
    figures = lines_of(run_bench("beyond", "--small", "--systems", "clamor,duckdb"))[-1]["summary"]
    assert set(figures) == {"beyond_slowdown", "duckdb_speedup", "ray_speedup"}
    assert figures.pop("ray_speedup") == {"sort": 0, "scan": 0}  # it was not asked for
    for kinds in figures.values():
        assert set(kinds) == {"sort", "scan"}
        assert all(math.isfinite(value) and value > 0 for value in kinds.values())


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.soak
def test_hot_pages_ends_with_its_figures_and_leaves_no_namespace() -> None:
    require_lab("netns")
    lines = lines_of(run_bench("hot_pages", "--small"))
    assert {"kernel", "cores", "page_size", "ray", "trap", "rate"} <= set(lines[0]["environment"])
    names = {"ideal_ratio", "growth", "off_speedup", "random_speedup", "ray_speedup"}
    assert set(lines[-1]["summary"]) == names
    assert all(math.isfinite(value) and value > 0 for value in lines[-1]["summary"].values())
    runs = [line for line in lines if line.get("side") == "clamor"]
    assert {run["replication"] for run in runs} == {"p2c", "random", "off"}
    for run in runs:
        assert run["distinct_bytes"] <= sum(run["bytes_received"][1:])
        assert not any(run.get("redirected_blocks", [])) or run["replication"] != "off"
    assert remove_stale() == []


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.soak
def test_drain_ends_with_its_figures_and_leaves_no_namespace() -> None:
    require_lab("netns")
    lines = lines_of(run_bench("drain", "--small"))
    assert {"kernel", "cores", "page_size", "ray", "trap", "rate"} <= set(lines[0]["environment"])
    names = {"evacuation_share", "read_stall_ms", "commit_stall_ms"}
    names |= {"read_before_ms", "commit_before_ms"}
    assert set(lines[-1]["summary"]) == names
    assert all(math.isfinite(value) and value > 0 for value in lines[-1]["summary"].values())
    run = lines[-2]
    assert run["bytes"] >= 2 * 16 << 20
    for phase in ("before", "during"):
        for what in ("read", "commit", "update"):
            assert run[phase][what]["n"] > 10
            assert run[phase][what]["max_ms"] >= run[phase][what]["p50_ms"] > 0
    assert remove_stale() == []


def test_unknown_name_lists_those_there_are() -> None:
    done = run_bench("nothing")
    assert done.returncode == 2
    for name in FIGURES:
        assert name in done.stderr
