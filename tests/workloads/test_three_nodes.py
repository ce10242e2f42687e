"""Programs as a user starts them, one after the other on three nodes that RAY_ADDRESS names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pyarrow.parquet as pq
import pytest

from clamor_ray.workloads.data import graphs
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.workloads.conftest import run_as_main

pytestmark = pytest.mark.lab

Attach = Callable[[str, str], str]
WHOLE_JOB = "--places 40000 --queries 3000 --tasks 12 --check 200 --dir {}"


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    """Without a session: each program has its own."""
    require_lab("local")
    with local_cluster(3, num_cpus=2) as lab:
        yield lab


@pytest.fixture
def attach(
    lab: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Attach:
    """Runs a demo in this process, whose driver knows the cluster; returns what it prints."""
    monkeypatch.setenv("RAY_ADDRESS", lab.address)

    def run(name: str, arguments: str) -> str:
        said = run_as_main(monkeypatch, capsys, name, "--demo", *arguments.split())
        assert f"attaching to {lab.address}" in said
        return said

    return run


def started(arguments: str, **environment: str) -> str:
    """What the demo of the nearest places prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "clamor_ray.workloads.knn", "--demo", *arguments.split()],
        env={**os.environ, "COLUMNS": "140", **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_whole_job(folder: Path, said: str) -> None:
    for part in ("200 answers equal brute force", "all 3,000 metadata checksums", "node 3"):
        assert part in said, said
    assert "times less" in said
    result = pq.read_table(folder / "result.parquet")
    assert result.num_rows == 3000
    assert len(result.column("nearest")[0]) == 10
    assert matplotlib.image.imread(folder / "result.png").shape[1] == 2000


def test_a_cluster_of_its_own_in_the_other_trap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers have the trap of its environment. It is the first: the others share a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = f"{WHOLE_JOB.format(tmp_path)} --nodes 3"
    said = started(options, CLAMOR_TRAP="sigsegv")
    assert "starting a local cluster of 3 nodes" in said
    check_whole_job(tmp_path, said)


def test_the_nearest_places(lab: LocalCluster, tmp_path: Path) -> None:
    """Generated places, three raylets, every answer checked, and less than all of it moved."""
    said = started(WHOLE_JOB.format(tmp_path), **lab.environment)
    assert f"attaching to {lab.address}" in said
    check_whole_job(tmp_path, said)


def test_ranks_in_a_cache_that_is_too_small(attach: Attach, tmp_path: Path) -> None:
    """Each node goes over 3 MiB in every iteration and may keep 1: the ranks are the same."""
    out = tmp_path / "ranks.parquet"
    options = f"--vertices 100000 --iterations 3 --tolerance 0 --cache-bytes 1MiB --out {out}"
    said = attach("pagerank", options)
    assert "stopped after 3 iterations" in said
    assert "All ranks equal SciPy's" in said
    table = pq.read_table(out)
    ranks = np.empty(100_000)
    ranks[table["vertex"].to_numpy()] = table["rank"].to_numpy()
    graphs.check(ranks, graphs.reference(graphs.generate(100_000, 1_600_000, 2.1, 1), 0.85, 3))
    lines = re.findall(r"^ +([123]) +\S+e.*?(\S+ \S+) +(\S+ \S+) +(\S+ \S+) *$", said, re.M)
    assert [line[0] for line in lines] == ["1", "2", "3"], said
    for _, received, evicted, _ in lines:
        assert "MiB" in received
        assert "MiB" in evicted
    assert lines[-1][3] != "0 B"  # what was evicted was fetched again


def test_a_sort_in_a_cache_that_is_too_small(attach: Attach) -> None:
    """Each node needs several MiB of the others, and may keep 1."""
    said = attach("sort", "--records 100000 --partition-mib 1 --cache-bytes 1MiB")
    assert "100,000 records, 9.5 MiB, in order in 10 partitions" in said
    for name in ("runs", "merge", "check"):
        found = re.search(rf"^ *{name} +10 .*?(\S+ \S+) +(\S+ \S+) +(\S+ \S+) *$", said, re.M)
        assert found, said
        assert found[2] != "0 B", said  # evicted
